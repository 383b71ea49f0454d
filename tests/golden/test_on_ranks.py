"""Goldens and inline expectations of tests on ranks: ranks claim, their parent judges and writes.
In two runs.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_gtrainer.golden.naming import Claim, disagreement
from pytest_gtrainer.testing import ProjectRun, run_project
from tests.golden.conftest import QUICK

HEAD = """
import os, pytest, expecttest
from expecttest import assert_expected_inline as same
on_ranks = pytest.mark.gt_world("ranks", size=2)
"""

CLAIMS = (
    HEAD
    + """
@on_ranks
def test_agree(gt_golden, gt_world):
    gt_golden.check("the same", "a")
    gt_golden.check("also", "b")

@on_ranks
def test_disagree(gt_golden, gt_world):
    gt_golden.check(f"rank {gt_world.rank}\x1b")
"""
)

NEVER_WRITTEN = (
    HEAD
    + """
@pytest.fixture(scope="module")
def breaks_at_the_end():
    yield
    assert False

def test_here(breaks_at_the_end):
    pass

@on_ranks
def test_fails_on_one(gt_golden, gt_world):
    gt_golden.check("never written")
    assert gt_world.rank == 0

@on_ranks
def test_last(gt_golden, gt_world):
    gt_golden.check("never written")
"""
)

UNFAITHFUL = (
    HEAD
    + """
import itertools

class Restless:
    asked = itertools.count()
    def __repr__(self):
        return f"Restless({next(self.asked)})"

def graph_with(constant):
    import torch
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, constant))
    graph.output((y,))
    x.meta["val"] = y.meta["val"] = torch.zeros(2)
    return torch.fx.GraphModule({}, graph)

@on_ranks
@pytest.mark.parametrize("constant", [2, Restless()], ids=["plain", "restless"])
def test_graph(gt_golden, constant):
    gt_golden.check(graph_with(constant))
"""
)

NUMBERS = (
    HEAD
    + """
@on_ranks
@pytest.mark.parametrize("own", [0, 1])
def test_loss(gt_golden, gt_world, own):
    gt_golden.check([1.0, gt_world.rank * own])
"""
)

INLINE = (
    HEAD
    + '''
@on_ranks
def test_inline_agrees(gt_world):
    same(f"{gt_world.size} ranks\\n", """""")
    if gt_world.rank == 1:
        same("only here", """""")

@on_ranks
def test_inline_disagrees(gt_world):
    same(f"rank {gt_world.rank}", """rank 0""")

@on_ranks
def test_inline_fails_on_one(gt_world):
    same("never", """""")
    assert gt_world.rank == 0

def function():
    same("new", """old""")

def test_function(gt_ranks):
    gt_ranks.run(function, size=2)
'''
)
ACCEPTED = INLINE.replace('""""""', '"""\\\n2 ranks\n"""', 1).replace(
    ', """""")\n\n', ', """only here""")\n\n', 1
)


class Made(NamedTuple):
    run: ProjectRun
    folder: Path

    def files(self, top: str) -> dict[str, str]:
        found = (file for file in (self.folder / top).rglob("*") if file.is_file())
        return {file.relative_to(self.folder / top).as_posix(): file.read_text() for file in found}

    def lines_after(self, line: str) -> list[str]:
        lines = self.run.output.splitlines()
        return lines[lines.index(line) + 1 :]


def made(folder: Path, *options: str, files: dict[str, str]) -> Made:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("EXPECTTEST_ACCEPT", raising=False)
        environment.setenv("OMP_NUM_THREADS", "2")  # not what a rank has
        return Made(run_project(folder, *QUICK, *options, files=files), folder)


# -- a run that updates; under xdist the parent of the ranks is a worker, which writes no test file


WAYS = [
    pytest.param((), id="alone", marks=pytest.mark.long),
    pytest.param(("-n1",), id="under xdist"),
]


@pytest.fixture(scope="module", params=WAYS)
def updated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    tests = {
        "claims": CLAIMS,
        "never": NEVER_WRITTEN,
        "graph": UNFAITHFUL,
        "numbers": NUMBERS,
        "inline": INLINE,
    }
    files = {f"test_{name}.py": text for name, text in tests.items()}
    return made(
        tmp_path_factory.mktemp("updated"), *request.param, "--gt-update-goldens", files=files
    )


DISAGREEMENT = """\
the golden differs between ranks, first on rank 1 at line 1:
  rank 0: rank 0\\x1b
  rank 1: rank 1\\x1b
"""


@pytest.mark.second_tier("under xdist]")
def test_ranks_claim_and_the_parent_writes(updated):
    """Nothing of a test that fails on a rank, or in the parent after the last test of its
    module.
    """
    found = {name.partition("::")[2]: each for name, each in updated.run.tests.items()}
    assert found["test_agree"].outcome == "passed"
    assert found["test_disagree"].outcome == found["test_fails_on_one"].outcome == "failed"
    created = [f"golden/test_claims/test_agree@{name}.txt: created" for name in "ab"]
    assert found["test_agree"].goldens == tuple(created), "as properties in the JUnit file, too"
    assert found["test_disagree"].goldens == ("test_claims.py::test_disagree: different",)
    assert (
        "test_last" in updated.run.output.partition("ERROR at teardown of ")[2].partition("\n")[0]
    )
    assert DISAGREEMENT in updated.run.output
    assert "\ngoldens   4 created, 2 different\n" in updated.run.output
    assert updated.files("golden/test_claims") == {
        "test_agree@a.txt": "the same\n",
        "test_agree@b.txt": "also\n",
    }
    assert sorted({name.partition("/")[0] for name in updated.files("golden")}) == [
        "test_claims",
        "test_graph",
        "test_numbers",
    ]


@pytest.mark.second_tier
def test_a_text_that_would_not_be_read_back_is_not_written(updated):
    """The graph's twin, with a constant that a text can hold, is written."""
    assert [updated.run[f"test_graph[{which}]"].outcome for which in ("plain", "restless")] == [
        "passed",
        "failed",
    ]
    assert list(updated.files("golden/test_graph")) == ["test_graph-plain.fxgraph"]
    said = "restless.fxgraph was not written: it would be read back as another graph: line "
    assert said in updated.run["test_graph[restless]"].message


@pytest.mark.second_tier("under xdist]")
def test_numbers_of_all_ranks_must_agree(updated):
    """Torch has one thread in a rank: the environment is that of the rank."""
    assert [updated.run[f"test_loss[{own}]"].outcome for own in (0, 1)] == ["passed", "failed"]
    message = updated.run["test_loss[1]"].message
    assert "the golden differs between ranks, first on rank 1 at line " in message
    assert "\n  rank 0: 0" in message
    (text,) = updated.files("golden/test_numbers").values()
    assert json.loads(text)["entries"][0]["environment"]["threads"] == 1


@pytest.mark.second_tier("under xdist]")
def test_inline_expectations_of_ranks_must_agree_and_one_process_writes(updated):
    assert updated.run["test_inline_agrees"].outcome == "passed"
    problem = (
        "one inline expectation, but different texts, so none is accepted: expect what all "
        "ranks have"
    )
    line = 1 + INLINE.splitlines().index('    same(f"rank {gt_world.rank}", """rank 0""")')
    assert f"test_inline.py:{line}: {problem}" in updated.run["test_inline_disagrees"].message
    assert (
        "\n  rank 0: 'rank 0'\n  rank 1: 'rank 1'" in updated.run["test_inline_disagrees"].message
    )
    assert "raised AssertionError: Mismatch" in updated.run["test_function"].message
    assert "\ninline    2 created\n" in updated.run.output
    assert (updated.folder / "test_inline.py").read_text() == ACCEPTED


# -- a run that checks


ARTIFACTS = (
    HEAD
    + """
def test_alone(gt_artifacts):
    (gt_artifacts / "trace.json").write_text("parent")

@on_ranks
def test_on_ranks(gt_artifacts, gt_world):
    (gt_artifacts / "trace.json").write_text(str(gt_world.rank))
"""
)

UNUSED = (
    HEAD
    + """
@on_ranks
def test_checked(gt_golden, gt_world):
    gt_golden.check("text")

@pytest.mark.gt_world("ranks", size=2, device="cuda")
def test_on_gpus(gt_golden, gt_world):
    gt_golden.check("text")

@pytest.mark.gt_world("ranks", size=4)
def test_on_more(gt_golden, gt_world):
    gt_golden.check("text")
"""
)

COMMANDS = (
    HEAD
    + """
def test_a(gt_golden): gt_golden.check("new")
def test_b(): same("new", "old")

@pytest.mark.xfail
def test_c(): same("new", "old")

@on_ranks
def test_d(gt_world): same("new", "old")
"""
)

GOLDENS = {
    "test_claims/test_agree@a.txt": "the same\n",
    "test_claims/test_agree@b.txt": "also\n",
    **{
        f"test_unused/test_{which}.txt": "text\n"
        for which in ("checked", "checked@old", "on_gpus", "on_more")
    },
}


FLAGS = "--gt-gpus=2 --gt-device=cpu"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Made:
    tests = {
        "commands": COMMANDS,
        "claims": CLAIMS.replace('"the same"', '"the same!"'),
        "artifacts": ARTIFACTS,
        "unused": UNUSED,
        "inline": ACCEPTED,
    }
    files = {f"test_{name}.py": text for name, text in tests.items()}
    files |= {f"golden/{name}": text for name, text in GOLDENS.items()}
    return made(
        tmp_path_factory.mktemp("checked"), "--gt-artifacts=out", *FLAGS.split(), files=files
    )


def test_ranks_claim_and_the_parent_judges(checked):
    message = checked.run["test_agree"].message
    assert message.count(f"  pytest test_claims.py::test_agree {FLAGS} --gt-update-goldens") == 1
    assert "test_agree@a.txt differs" in message
    assert "-the same\n+the same!\n" in message
    assert (
        "\ngoldens   2 different, 2 equal, 1 missing, 2 not judged, 1 unused\n"
        in checked.run.output
    )
    assert DISAGREEMENT in checked.run["test_disagree"].message
    assert checked.files("golden") == GOLDENS


def test_ranks_have_folders_of_their_own_and_leave_their_golden_once(checked):
    """And both texts where they disagree."""
    assert (
        "\n  out/test_claims/test_disagree/rank1.obtained.txt"
        in checked.run["test_disagree"].message
    )
    assert checked.files("out/test_artifacts") == {
        "test_alone/trace.json": "parent",
        "test_on_ranks/rank0/trace.json": "0",
        "test_on_ranks/rank1/trace.json": "1",
    }
    files = checked.files("out/test_claims")
    assert "-the same\n+the same!\n" in files.pop("test_agree/a.difference.diff")
    assert files == {
        "test_agree/a.golden.txt": "the same\n",
        "test_agree/a.obtained.txt": "the same!\n",
        "test_disagree/rank0.obtained.txt": "rank 0\x1b\n",
        "test_disagree/rank1.obtained.txt": "rank 1\x1b\n",
    }


def test_what_ranks_check_is_used_and_what_they_would_check_is_not_judged(checked):
    outcomes = [checked.run[f"test_{which}"].outcome for which in ("checked", "on_gpus", "on_more")]
    assert outcomes == ["passed", "skipped", "skipped"]
    assert (
        "\ngoldens   2 different, 2 equal, 1 missing, 2 not judged, 1 unused\n"
        in checked.run.output
    )
    first, second = checked.lines_after(
        "goldens that no test checks (--gt-prune-goldens removes them):"
    )[:2]
    assert first == "  golden/test_unused/test_checked@old.txt"
    assert not second.startswith("  ")


def test_inline_expectations_are_in_the_list_of_commands(checked):
    """Those that fail a test, in this process and on ranks, each with the command that
    accepts it.
    """
    lines = checked.lines_after("to accept what a test obtained, when its difference is right:")
    listed = [
        f"  pytest test_commands.py::test_{which} {FLAGS} --gt-update-goldens" for which in "abd"
    ]
    assert [line for line in lines if line.startswith("  pytest test_commands.py")] == listed


def test_what_was_accepted_passes_and_what_was_not_ends_in_its_command(checked):
    assert checked.run["test_inline_agrees"].outcome == "passed"
    command = f"pytest test_inline.py::test_inline_disagrees {FLAGS} --gt-update-goldens"
    assert f"to accept what was obtained:\n  {command}\n" in checked.run.output


def test_ranks_whose_texts_differ_in_a_form_feed_disagree():
    """It ends no line of a golden, though ``str.splitlines`` thinks so."""
    claims = {
        rank: [Claim("", "", "text", text)] for rank, text in enumerate(["a\x0cb\n", "a\nb\n"])
    }
    problem, _ = disagreement(claims)
    assert problem.startswith("the golden differs between ranks, first on rank 1 at line 1")
