"""Small functions around goldens, each by an example."""

import errno
import json
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from pytest_gtrainer.golden.compare import judge
from pytest_gtrainer.golden.inline import Expectation, disagreements, spell
from pytest_gtrainer.golden.naming import (
    FOLDER,
    Claim,
    disagreement,
    file_for_version,
    golden_path,
    place_of_tests,
    safe,
    stem_of_golden,
    stem_of_test,
    torch_of,
)
from pytest_gtrainer.golden.plugin import _MOST_COMMANDS, GoldenPlugin, has_passed
from pytest_gtrainer.golden.store import _damage, normal, reason
from pytest_gtrainer.golden.unused import _WORKER_OUTPUT, Collection, UnusedGoldens, has_test_file
from pytest_gtrainer.golden.values import Entry, differences


def test_paths():
    assert (
        str(golden_path("tests/test_a.py::test_c", "after", "text"))
        == "golden/tests/test_a/test_c@after.txt"
    )
    assert (
        str(golden_path("test_a.py::test_c[a/b]", None, "text"))
        == "golden/test_a/test_c-a_b~c14cddc0.txt"
    )
    found = [safe(name) for name in ("bf16-8", "Linear", "con", "")]
    assert found == ["bf16-8", "Linear~e6950b45", "con~1143da2b", "~e3b0c442"]
    assert torch_of(PurePosixPath("golden/test_a/test_c@torch=2.15.fxgraph")) == (2, 15)
    assert torch_of(PurePosixPath("test_c@after.txt")) is None
    assert str(stem_of_test("tests/test_a.py::test_c[8]")) == "golden/tests/test_a/test_c-8"
    assert str(place_of_tests("tests/test_a.py")) == "golden/tests/test_a"
    assert (
        str(stem_of_golden(PurePosixPath("golden/test_a/test_c-8@after.numbers.json")))
        == "golden/test_a/test_c-8"
    )
    assert stem_of_golden(PurePosixPath("golden/test_a/notes.md")) is None
    there = [
        "test_c@torch=2.9.txt",
        "test_c@torch=2.13.txt",
        "test_c@torch=2.15.txt",
        "test_c@x@torch=2.14.txt",
    ]
    held = file_for_version(PurePosixPath("golden/test_c@torch=2.14.txt"), there)
    assert str(held) == "golden/test_c@torch=2.13.txt"
    own = PurePosixPath("golden/test_c@torch=2.15.txt")
    assert file_for_version(own, there) == own, "its own file, though an older one lies beside it"


def test_files(tmp_path):
    assert normal("a\r\nb") == "a\nb\n"
    assert normal("\ufeff\ufeffa\n") == "\ufeffa\n", "one mark, as when a file is read"
    found = [_damage(raw, len(raw)) for raw in (b"", b"a\xff", b"a\0", b"a")]
    assert found == ["is empty", "is not valid UTF-8 at byte 1", "has a NUL byte at byte 1", None]
    read_only = OSError(errno.EROFS, "Read-only file system")
    assert reason(read_only) == "Read-only file system"
    (tmp_path / "test_a.py").touch()
    assert [
        has_test_file(PurePosixPath(FOLDER, name), tmp_path) for name in ("test_a", "test_b")
    ] == [True, False]


def test_a_test_without_parameters_here_keeps_its_goldens_and_no_others(tmp_path):
    place = PurePosixPath(FOLDER, "test_a")
    (tmp_path / place).mkdir(parents=True)
    for name in ("test_c-8.txt", "test_c-bf16@after.txt", "test_cd.txt"):
        (tmp_path / place / name).touch()
    collection = Collection()
    collection.empty_sets.add(place / "test_c")
    collection.collected.add(place)
    assert collection.unowned(tmp_path) == [place / "test_cd.txt"]


def test_without_a_test_is_what_no_worker_has_collected(request):
    plugin = UnusedGoldens(
        request.config, request.config.pluginmanager.getplugin("gtrainer-goldens")
    )
    for unowned in (["golden/a.txt", "golden/b.txt"], ["golden/b.txt", "golden/c.txt"]):
        plugin.pytest_testnodedown(SimpleNamespace(workeroutput={_WORKER_OUTPUT: unowned}), None)
    assert plugin._workers_unowned == {PurePosixPath("golden/b.txt")}


def test_words():
    environment = {"torch": "2.13.0", "device": "cpu", "instructions": "AVX2", "threads": 2}
    assert str(Entry(environment, None)) == "torch 2.13.0, device cpu, instructions AVX2, threads 2"
    said = differences({"loss": [1.0, 2.0], "steps": 2}, {"loss": [1.0, 2.5, 3.0]})
    assert said == ["loss[1]: 2.0 became 2.5", "loss[2]: gained 3.0", "steps: lost 2"]
    assert differences({"loss": 1.0}, {"loss": 1.0, "dropped": []}) == ["dropped: gained []"]


def test_what_ranks_claim():
    assert (
        Claim("", "", "graph", "fsdp = group(range(4, 8))\nif P:").common_text
        == "fsdp = group()\nif P:"
    )
    claims = {0: [Claim("", "", "text", "a\nb\n")], 3: [Claim("", "", "text", "a\nc\n")]}
    message, _ = disagreement(claims)
    assert (
        message
        == "the golden differs between ranks, first on rank 3 at line 2:\n  rank 0: b\n  rank 3: c"
    )
    one, two = (Expectation("test_a.py", 3, "", text, "") for text in ("x", "y"))
    (said,) = disagreements(
        [("rank 0", one), ("rank 1", one), ("rank 2", two)], "expect less"
    ).values()
    problem = (
        "test_a.py:3: one inline expectation, but different texts, so none is accepted: expect less"
    )
    assert said == f"{problem}\n  rank 0: 'x'\n  rank 2: 'y'"


def test_literals_in_the_style_of_others():
    assert spell('r"""one"""', "a'b") == 'r"""a\'b"""'
    assert spell("'one'", "a'b") == '"""a\'b"""'
    assert spell("'one'", chr(0)) is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_other_environments_are_named_or_counted(count):
    """A golden that has no numbers for this environment says for which it has some."""
    entries = [
        {"environment": {"torch": f"2.{number}", "device": "cpu"}, "values": number}
        for number in range(count)
    ]
    known = json.dumps({"gtrainer": "numbers v1", "entries": entries})
    here = {"environment": {"torch": "3.0", "device": "cpu"}, "values": 0}
    obtained = json.dumps({"gtrainer": "numbers v1", "entries": [here]})
    found = judge("numbers", known, obtained)
    assert found.outcome == "not judged"
    others = "torch 2.0, device cpu" if count == 1 else f"{count} others"
    assert found.reasons == (
        f"has no numbers for this environment (torch 3.0, device cpu), but for {others}"
    )


@pytest.mark.parametrize("count", [0, 1, 2, 25])
def test_goldens_that_were_not_judged_are_named_up_to_a_bound(count):
    """And counted by themselves, whatever commands there are."""
    plugin = SimpleNamespace(
        _commands={}, _not_judged={f"golden/{number}": "is of 2.0" for number in range(count)}
    )
    lines = GoldenPlugin.summary_lines(plugin)
    shown = min(count, _MOST_COMMANDS)
    assert lines[:shown] == [f"not judged: golden/{number} is of 2.0" for number in range(shown)]
    left = count - shown
    assert lines[shown:] == ([f"… and {left} more not judged"] if left else [])
    plugin._commands = dict.fromkeys(f"pytest {number}" for number in range(count))
    lines = GoldenPlugin.summary_lines(plugin)
    assert (f"  … and {left} more: each failure ends in its command" in lines) == bool(left)
    assert (lines[:1] == ["to accept what a test obtained, when its difference is right:"]) == (
        count > 1
    )


@pytest.mark.parametrize(
    ("attempts", "writes"),
    [
        (["passed"], [True]),
        (["failed"], [False]),
        (["failed", "passed"], [False, True]),
        (["passed", "failed"], [True, False]),
        (["skipped", "failed", "passed"], [False, False, True]),
    ],
    ids=str,
)
def test_of_a_test_that_is_repeated_each_attempt_counts_by_itself(attempts, writes):
    """Goldens are written after an attempt that passes, whatever the ones before it did."""
    found = []
    plugin = SimpleNamespace(_running="t", _outcomes=set(), _commands={}, _not_judged={})
    plugin._finish = lambda teardown: found.append(has_passed(plugin._outcomes))
    for outcome in attempts:
        for phase in ("setup", "call", "teardown"):
            result = outcome if phase == "call" else "passed"
            report = pytest.TestReport("t", ("t.py", 1, "t"), {}, result, None, phase)
            list(GoldenPlugin.pytest_runtest_logreport(plugin, report))
    assert found == writes
