"""Two records: what is said before the first difference, and what cannot be compared."""

import itertools
import json
import re
import shutil
import struct

import pytest
import torch
from torch import nn

from pytest_gtrainer import record_training
from pytest_gtrainer.over_time.comparing import _disagreement, compare_runs, whole_of
from pytest_gtrainer.over_time.files import FORMAT, VERSION, Entry, read_run
from tests.over_time.test_recording import train
from tests.over_time.trainers import compare


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    train(3, folder / "a")
    train(3, folder / "other model", width=6)
    return folder


def edited(folder, to, edit):
    """Copy a record of one rank, with its lines changed by ``edit``."""
    shutil.copytree(folder, to)
    lines = (to / "rank0.jsonl").read_text().splitlines(keepends=True)
    (to / "rank0.jsonl").write_text("".join(edit(lines)))
    return to


def header(change):
    return lambda lines: [json.dumps(json.loads(lines[0]) | change) + "\n", *lines[1:]]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (header({"version": 7}), "is a record of version 7, and this is version 1"),
        (header({"format": "x"}), "is no record of pytest-gtrainer"),
        (lambda lines: [lines[0][:40]], "is cut within its first line"),
        (lambda lines: [*lines[:2], "{]\n", *lines[2:]], "line 3, is not a line of a record"),
        (lambda lines: [lines[0], '{"step": 0, "phases": {"load": {"w": [1]}}}\n'], "line 2, is"),
        (
            lambda lines: [
                lines[0],
                '{"step": 0, "phases": {"load": {"w": [["0"], "f32", [1], [[0], []]]}}}\n',
            ],
            "line 2, is",
        ),
        (lambda lines: [lines[0], "[" * 100_000 + "\n"], "line 2, is not a line of a record"),
        (header({"world_size": float("inf")}), "line 1, is not a line of a record"),
        (header({"world_size": 0}), "holds files of more than the 0 ranks of its first one"),
        (lambda lines: ["[]\n", *lines[1:]], "line 1, is not a line of a record"),
        (lambda lines: [lines[0], lines[-1]], "no step is in both records: 0 to 2 in A, none in B"),
    ],
)
def test_what_is_no_record_is_one_sentence(records, tmp_path, capsys, edit, sentence):
    status, printed = compare(capsys, records / "a", edited(records / "a", tmp_path / "b", edit))
    assert status == 2
    assert sentence in printed
    assert printed.count("\n") == 1


def test_records_without_values_say_what_to_run_next(tmp_path, capsys):
    for folder, options in (("a", {}), ("b", {"seed": 1}), ("c", {"values": True})):
        train(1, tmp_path / folder, **options)
    line = "next: record both with --values"
    assert line in compare(capsys, tmp_path / "a", tmp_path / "b")[1]
    train(1, tmp_path / "d", seed=1, values=True)
    assert line not in compare(capsys, tmp_path / "c", tmp_path / "d")[1]
    assert line not in compare(capsys, tmp_path / "a", tmp_path / "c")[1]


def test_no_record_at_all(records, tmp_path, capsys):
    status, printed = compare(capsys, records / "a", tmp_path)
    assert (status, printed) == (2, f"{tmp_path} holds no record: no file rank0.jsonl\n")


@pytest.mark.parametrize("sides", ["A", "B", "AB"])
def test_a_record_that_was_cut_is_compared_as_far_as_it_goes(records, tmp_path, capsys, sides):
    folders = []
    for side in "AB":
        folder = records / "a"
        if side in sides:
            folder = edited(folder, tmp_path / side, lambda lines: [*lines[:2], lines[2][:70]])
        folders.append(folder)
    status, printed = compare(capsys, *folders)
    assert status == 1
    for side in "AB":
        cut = f"{side}: rank 0 was cut after step 0: its last line is missing"
        assert (cut in printed) == (side in sides)
    assert "equal: " in printed


def test_ranks_that_stopped_at_different_steps(records, tmp_path, capsys):
    two = edited(records / "a", tmp_path / "b", header({"world_size": 2}))
    shutil.copy(two / "rank0.jsonl", two / "rank1.jsonl")
    edited(two, tmp_path / "c", lambda lines: lines[:3] + lines[-1:])
    status, printed = compare(capsys, two, tmp_path / "c")
    assert status == 1
    assert (
        "its ranks stopped at different steps: rank 0 after step 1, rank 1 after step 2" in printed
    )
    (two / "rank1.jsonl").unlink()
    status, printed = compare(capsys, records / "a", two)
    assert (status, "of 2 ranks, 1 left no file" in printed) == (1, True)


def test_another_model_and_names_on_one_side(records, tmp_path, capsys):
    status, printed = compare(capsys, records / "a", records / "other model")
    assert status == 1
    assert (
        "first difference: step 0, load: 0.weight, rank 0: f32[16, 8] in A, f32[16, 6] in B"
        in printed
    )

    def renamed(lines):
        return [line.replace('"0.', '"first.').replace('"2.', '"last.') for line in lines]

    other = edited(records / "a", tmp_path / "b", renamed)
    status, printed = compare(capsys, records / "a", other)
    assert status == 2
    assert printed == (
        "the records are of different models: no name of a tensor is in both, 0.weight in A and "
        "first.weight in B\n"
    )


def test_wrappers_and_surroundings_are_said_first(records, tmp_path, capsys):
    def wrapped(lines):
        changed = header({"torch": "1.0", "compiled": ["_orig_mod"]})(lines)
        return [line.replace('"0.', '"module._orig_mod.0.') for line in changed]

    status, printed = compare(capsys, records / "a", edited(records / "a", tmp_path / "b", wrapped))
    assert status == 0, printed
    assert "in A, 1.0 in B" in printed
    assert "other compiled: nothing in A, _orig_mod in B" in printed
    assert "names of B without the prefixes of wrappers, as of module._orig_mod.0." in printed


def test_the_page_in_markdown(records, tmp_path, capsys):
    def changed(lines):
        return [
            line.replace('"param_groups.0.lr":0.001', '"param_groups.0.lr":0.002') for line in lines
        ]

    other = edited(records / "a", tmp_path / "b", changed)
    status, printed = compare(capsys, records / "a", other, "--markdown")
    assert status == 1
    assert (
        "**first difference: step 0, optimiser: param_groups.0.lr, rank 0: 0.001 in A, 0.002 in B**"
        in printed
    )
    assert "| optimiser | 1 | " in printed


def test_the_page_in_html(records, tmp_path, capsys):
    """Every difference of the phase, with names from outside as text; whole or not at all."""

    def hostile(entries):
        entries["../../<script>\x1b"] = [1.0, "f32"]
        entries.pop("0.weight")

    other = edited(records / "a", tmp_path / "b", changed_phases(hostile, only="clip"))
    page = tmp_path / "page.html"
    status, printed = compare(capsys, records / "a", other, f"--page={page}")
    assert status == 1
    assert "../../<script>\\x1b: only in B" in printed
    text = page.read_text()
    assert "<h1>Two records differ: step 0, clip: 0.weight: only in A</h1>" in text
    assert "<td>../../&lt;script&gt;\\x1b</td>" in text
    assert "<tr><td>clip</td><td>2</td><td>5</td></tr>" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "page.html"]
    status, printed = compare(capsys, records / "a", other, f"--page={tmp_path}")
    assert (status, printed) == (2, f"{tmp_path} cannot be written: Is a directory\n")
    equal = edited(records / "a", tmp_path / "c", list)
    assert compare(capsys, records / "a", equal, f"--page={page}")[0] == 0
    assert "<h1>Two records are equal</h1>" in page.read_text()


def test_values_name_the_element(tmp_path, capsys):
    """Z2: the element and both numbers, of a tensor and of a result of a module."""
    train(2, tmp_path / "a", values=True, activations="0")
    train(2, tmp_path / "b", values=True, activations="0", nudge=(5, 3))
    status, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "first difference: step 1, forward: 0, rank 0\n  element [0, 5]: " in printed
    assert "4 of 64 elements of rank 0 differ" in printed
    (tmp_path / "b" / "rank0.values").unlink()
    status, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, "element [" in printed) == (1, False)


def changed_phases(change, *, only=""):
    """Return an edit that gives the phases of each step, or of one phase, to ``change``."""

    def edit(lines):
        edited_lines = []
        for line in lines:
            content = json.loads(line)
            for phase, entries in content.get("phases", {}).items():
                if only in ("", phase):
                    change(entries)
            edited_lines.append(json.dumps(content) + "\n")
        return edited_lines

    return edit


def of_two_ranks(folder, to, edit=lambda lines: lines):
    """Copy a record of one rank as one of two, the second one changed by ``edit``."""
    edited(folder, to, header({"world_size": 2}))
    lines = (to / "rank0.jsonl").read_text().splitlines(keepends=True)
    (to / "rank1.jsonl").write_text("".join(edit(lines)))
    return to


def test_a_record_is_not_compared_with_itself(records, tmp_path, capsys):
    (tmp_path / "link").symlink_to(records / "a")
    for other in (records / "a", tmp_path / "link"):
        status, printed = compare(capsys, records / "a", other)
        assert status == 2
        assert printed == f"A and B are one folder, {records / 'a'}: a record is equal to itself\n"


@pytest.mark.parametrize(
    ("phase", "name"), [("gradient", "0.weight"), ("clip", "0.bias"), ("load", "0.weight.exp_avg")]
)
def test_a_tensor_that_one_rank_lacks_is_a_difference(records, tmp_path, capsys, phase, name):
    """Other ranks have the same values, as replicas do."""

    def moments(entries):
        entries["0.weight.exp_avg"] = [1.0, "f32"]

    a = edited(records / "a", tmp_path / "moments", changed_phases(moments, only="load"))
    whole = of_two_ranks(a, tmp_path / "a")
    lost = of_two_ranks(
        a, tmp_path / "b", changed_phases(lambda entries: entries.pop(name), only=phase)
    )
    status, printed = compare(capsys, whole, lost)
    assert status == 1
    assert f"first difference: step 0, {phase}: {name}, rank 1: only in A\n" in printed
    status, printed = compare(capsys, lost, whole)
    assert f"first difference: step 0, {phase}: {name}, rank 1: only in B\n" in printed


def test_another_dtype_names_the_ranks_that_have_it(records, tmp_path, capsys):
    def narrow(entries):
        entries["0.weight"][1] = "bf16"

    a = of_two_ranks(records / "a", tmp_path / "a")
    b = of_two_ranks(records / "a", tmp_path / "b", changed_phases(narrow, only="clip"))
    status, printed = compare(capsys, a, b)
    assert status == 1
    expected = "step 0, clip: 0.weight, rank 1: f32[16, 8] in A, bf16[16, 8] in B"
    assert f"first difference: {expected}\n" in printed


def test_what_was_not_recorded_is_not_equal(records, tmp_path, capsys):
    """Both sides give the same reason, which says nothing of the values."""

    def unknown(entries):
        entries["0.weight"] = "not recorded: a meta tensor holds no values"

    edit = changed_phases(unknown, only="clip")
    a, b = edited(records / "a", tmp_path / "a", edit), edited(records / "a", tmp_path / "b", edit)
    status, printed = compare(capsys, a, b)
    assert status == 0
    assert "not compared, because it was not recorded: clip: 0.weight\n" in printed
    number = int(printed.partition("equal: ")[2].partition(" ")[0])
    status, printed = compare(capsys, records / "a", tmp_path / "a")
    assert status == 1
    words = "f32[16, 8] in A, not recorded: a meta tensor holds no values in B"
    assert f"first difference: step 0, clip: 0.weight, rank 0: {words}\n" in printed
    _, printed = compare(capsys, records / "a", edited(records / "a", tmp_path / "c", list))
    assert int(printed.partition("equal: ")[2].partition(" ")[0]) == number + 3


def test_records_without_values_are_not_equal(records, tmp_path, capsys):
    edit = changed_phases(dict.clear)
    a, b = edited(records / "a", tmp_path / "a", edit), edited(records / "a", tmp_path / "b", edit)
    status, printed = compare(capsys, a, b)
    assert status == 2
    assert printed.endswith("no value of one record is compared with one of the other\n")


def test_rows_are_counted():
    """Replicas of a batch are the batch; a row that comes twice on one side is not."""

    def of(*ranks):
        values = {}
        for rank, rows in enumerate(ranks):
            values[rank] = [Entry(tuple(rows), "i64", (len(rows), 8), "rows")]
        return whole_of(values)

    assert of(["a", "b"]) == of(["a"], ["b"]) == of(["b", "a"], ["a", "b"]) != of(["a"], ["a"])
    assert of(["a", "b"]) != of(["a", "b"], ["b"])

    # A row that comes m times for n of another one: the batch is known by that ratio.
    numbers = range(1, 7)
    for a, b, c, d in itertools.product(numbers, repeat=4):
        is_same = a * d == b * c
        assert (of(["x"] * a, ["y"] * b) == of(["x"] * c + ["y"] * d)) == is_same, (a, b, c, d)


def test_calls_that_one_rank_lacks_are_no_whole():
    def part(offset):
        return Entry(("1",), "f32", (4,), ((offset,), (2,)))

    assert whole_of({0: [part(0)], 1: [part(2)]}) is not None
    assert whole_of({0: [part(0), part(0)], 1: [part(2)]}) is None


def test_parts_of_a_tensor_are_its_whole_if_replicas_agree_and_nothing_is_missing():
    def part(number, offset, size=2):
        return [Entry((f"{number:x}",), "f32", (4,), ((offset,), (size,)))]

    whole = whole_of({0: part(1, 0), 1: part(2, 2)})
    assert whole == whole_of({0: part(2, 2), 1: part(2, 2), 2: part(1, 0)})
    assert whole == whole_of({0: part(3, 0, 4)})
    assert whole == whole_of({0: part(2**64 - 1, 0), 1: part(4, 2)})
    assert whole != whole_of({0: part(1, 0), 1: part(3, 2)})
    for wrong in (part(7, 2), part(2, 0)):
        for ranks in itertools.permutations([part(1, 0), part(2, 2), wrong]):
            assert whole_of(dict(enumerate(ranks))) is None
    assert whole_of({0: part(1, 0)}) is None
    assert whole_of({0: part(1, 0), 1: part(2, 2, 1)}) is None


def written(folder, *phases, values=b"", **fields):
    """Write a record of one rank, a step for each of ``phases``."""
    folder.mkdir()
    lines = [{"format": FORMAT, "version": VERSION, "world_size": 1} | fields]
    lines += [{"step": number, "phases": each} for number, each in enumerate(phases)]
    lines.append({"end": ""})
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rank0.values").write_bytes(values)
    return folder


SETTINGS = {"a": "1", "b": "2", "c": "3"}


@pytest.mark.parametrize(
    ("a", "b", "lines"),
    [
        ({}, {}, []),
        ({"torch": "1"}, {"torch": "2"}, ["other torch: 1 in A, 2 in B"]),
        (
            {"python": "3.11", "device": "cpu", "threads": 2, "every": 1},
            {"python": "3.12", "device": "H", "threads": 3, "every": 5},
            [
                "other python: 3.11 in A, 3.12 in B",
                "other device: cpu in A, H in B",
                "other threads: 2 in A, 3 in B",
                "other every: 1 in A, 5 in B",
            ],
        ),
        (
            {"model": "M", "optimizers": ["Adam", "SGD"], "compiled": []},
            {"model": "N", "optimizers": ["Adam"], "compiled": ["a", "b"]},
            [
                "other model: M in A, N in B",
                "other optimizers: Adam, SGD in A, Adam in B",
                "other compiled: nothing in A, a, b in B",
            ],
        ),
        ({"model": "M"}, {}, ["other model: M in A, None in B"]),
        ({"settings": SETTINGS}, {"settings": SETTINGS}, []),
        (
            {"settings": SETTINGS},
            {"settings": {"c": "3", "d": "4", "a": "9"}},
            [
                "other setting a: 1 in A, 9 in B",
                "other setting b: 2 in A, unknown in B",
                "other setting d: unknown in A, 4 in B",
            ],
        ),
        ({"settings": {"a": "1"}}, {}, ["other setting a: 1 in A, unknown in B"]),
        ({}, {"settings": {"a": "1"}}, ["other setting a: unknown in A, 1 in B"]),
        ({"arguments": []}, {"arguments": ["-x", 1]}, ["other arguments: '' in A, '-x 1' in B"]),
        ({"arguments": ["a b"]}, {}, ["other arguments: 'a b' in A, '' in B"]),
        ({"arguments": ["a"]}, {"arguments": ["a"]}, []),
    ],
)
def test_what_differs_around_the_runs_is_said_in_one_order(tmp_path, a, b, lines):
    """Also what only one side knows, as a setting that came with a later torch."""
    step = {"loss": {"root": [1.0, "f32"]}}
    runs = [written(tmp_path / "a", step, **a), written(tmp_path / "b", step, **b)]
    result = compare_runs(*map(read_run, runs))
    assert result.surroundings == lines
    assert list(result.lines()) == [
        f"A: {runs[0]}, 1 rank, steps 0 to 0",
        f"B: {runs[1]}, 1 rank, steps 0 to 0",
        *lines,
        "equal: 1 value in 1 step",
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    ("part", "origin"), [(None, (0, 0)), ([[0, 0], [2, 3]], (0, 0)), ([[4, 5], [2, 3]], (4, 5))]
)
def test_an_element_of_a_part_is_named_in_the_whole_tensor(tmp_path, capsys, number, part, origin):
    """The part is a block of a mesh of two dimensions."""
    folders = []
    for side in range(2):
        values = torch.arange(6.0)
        values[number] += 10 * side
        entry = [f"{side:016x}", "f32", [8, 9] if part else [2, 3], part, [0, 24]]
        content = struct.pack("<6f", *values.tolist())
        folders.append(written(tmp_path / f"{side}", {"clip": {"w": entry}}, values=content))
    status, printed = compare(capsys, *folders)
    assert status == 1
    element = [origin[0] + number // 3, origin[1] + number % 3]
    expected = f"element {element}: {number} in A, {number + 10} in B; "
    assert f"  {expected}1 of 6 elements of rank 0 differ\n" in printed


def test_of_several_calls_within_a_step_the_first_that_differs_is_shown(tmp_path, capsys):
    def losses(name, *numbers):
        calls = {"calls": [[number, "f32"] for number in numbers]}
        return written(tmp_path / name, {"loss": {"root": calls}})

    whole = losses("whole", 1.0, 2.0, 3.0)
    for name, numbers, said in (
        ("first", (7.0, 8.0, 9.0), "1.0 in A, 7.0 in B"),
        ("second", (1.0, 8.0, 9.0), "2.0 in A, 8.0 in B"),
        ("last", (1.0, 2.0, 9.0), "3.0 in A, 9.0 in B"),
    ):
        status, printed = compare(capsys, whole, losses(name, *numbers))
        assert status == 1
        assert f"first difference: step 0, loss: root, rank 0: {said}\n" in printed
    status, printed = compare(capsys, whole, losses("fewer", 1.0, 2.0))
    assert status == 1
    assert "loss: root: in all, on ranks or calls that are others\n" in printed


def test_what_another_world_has_loaded_is_compared_with_what_the_step_before_left(tmp_path):
    """Sums are rounded otherwise there, and what is loaded is not."""

    def tensor(number):
        return [f"{number:016x}", "f32", [2], None]

    def step(number):
        return {"data": {"x": tensor(0)}, "optimiser": {"w": tensor(number)}}

    begun = {"load": {"w": tensor(0)}} | step(1)
    whole = read_run(written(tmp_path / "whole", begun, step(2), step(3)))
    for loaded, status in ((2, 0), (1, 1), (3, 1)):
        resumed = {"load": {"w": tensor(loaded)}} | step(9)
        other = read_run(written(tmp_path / f"{loaded}", resumed))
        result = compare_runs(whole, other, at=2, rounds=True)
        assert (result.status, result.steps) == (status, [2])
        assert [each.phase for each in result.differences] == ["load"] * status
        assert result.compared == 2


def test_steps_are_named_as_they_are_compared(records, capsys, tmp_path):
    other = edited(records / "a", tmp_path / "b", list)
    status, printed = compare(capsys, records / "a", other, "--at=7")
    assert status == 2
    assert printed == "no step is in both records: 0 to 2 in A, 7 to 9 in B\n"


def test_files_beside_those_of_ranks(records, tmp_path, capsys):
    other = edited(records / "a", tmp_path / "b", list)
    shutil.copy(other / "rank0.jsonl", other / "rank0 copy.jsonl")
    assert compare(capsys, records / "a", other)[0] == 0
    (other / "rank0.jsonl").unlink()
    (other / "rank0.jsonl").mkdir()
    status, printed = compare(capsys, records / "a", other)
    assert (status, printed) == (2, f"{other / 'rank0.jsonl'} cannot be read: Is a directory\n")
    edited(records / "a", tmp_path / "c", header({"world_size": "1"}))
    status, printed = compare(capsys, records / "a", tmp_path / "c")
    assert (status, "line 1, is not a line of a record" in printed) == (2, True)


def test_an_option_that_chooses_an_implementation_is_said(records, tmp_path, capsys):
    """Its results are compared; a rate that differs is a difference."""

    def fused(entries):
        entries["param_groups.0.fused"] = True

    other = edited(records / "a", tmp_path / "b", changed_phases(fused, only="optimiser"))
    status, printed = compare(capsys, records / "a", other)
    assert status == 0
    assert "options of an implementation that differ: param_groups.0.fused\n" in printed

    def narrow(entries):
        fused(entries)
        entries["0.weight"][1] = "bf16"

    other = edited(records / "a", tmp_path / "c", changed_phases(narrow, only="optimiser"))
    status, printed = compare(capsys, records / "a", other)
    assert "first difference: step 0, optimiser: 0.weight, rank 0: " in printed


def train_scaled(folder, factors):
    """Record a step in which each gradient is multiplied after the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters())
    with record_training(model, optimizer, folder, values=True):
        model(torch.ones(2, 3)).square().sum().backward()
        for parameter, factor in zip(model.parameters(), factors, strict=True):
            parameter.grad.mul_(factor)
        optimizer.step()


def test_tensors_that_one_factor_has_changed_are_gathered(tmp_path, capsys):
    """The furthest come first, and what no factor explains is said by its size."""
    bend = torch.eye(3) + 0.5
    train_scaled(tmp_path / "a", [1.0] * 10)
    train_scaled(tmp_path / "b", [1.01, 2.0, 1.01, 2.0, 1.01, 2.0, 1.01, 1.0, bend, 1.01])
    status, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "first difference: step 0, clip: 0.weight, rank 0" in printed
    twice = "B is 2 times A: 3 tensors, 0.bias, 1.bias, 2.bias\n"
    slightly = "B is 1.01 times A: 5 tensors, 0.weight, 1.weight, 2.weight and 2 more\n"
    assert f"  {twice}  {slightly}  changes in norms of A, the largest: 4.weight 0." in printed
    assert "3.bias" not in printed


def test_the_factor_furthest_from_one_comes_first(tmp_path, capsys):
    """Halved is further away than a fifth more, and the other sign is furthest."""
    train_scaled(tmp_path / "a", [1.0] * 10)
    train_scaled(tmp_path / "b", [1.25, 0.5, -1.0, 0.0, 3.0, 1.25, 1.0, 1.0, 1.0, 1.0])
    _, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    factors = re.findall(r"B is (.*) times A: (\d)", printed)
    assert factors[0] in (("3", "1"), ("-1", "1"))
    assert sorted(factors[:2]) == [("-1", "1"), ("3", "1")]
    assert factors[2:] == [("0", "1"), ("0.5", "1"), ("1.25", "2")]


@pytest.mark.parametrize(
    ("factor", "said"), [(1 + 2**-14, "1.000061"), (1 - 3 * 2**-17, "0.999977")]
)
def test_a_factor_near_one_is_not_said_to_be_one(tmp_path, capsys, factor, said):
    """Weight decay multiplies by 1 - 1e-5, for example."""
    train_scaled(tmp_path / "a", [1.0] * 10)
    train_scaled(tmp_path / "b", [1.0, *[factor] * 9])
    _, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert re.findall(r"B is (.*) times A: (\d) tensors", printed) == [(said, "9")]


def test_all_differences_are_listed_on_request(tmp_path, capsys):
    train_scaled(tmp_path / "a", [1.0] * 10)
    train_scaled(tmp_path / "b", [2.0] * 9 + [1.0])
    _, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert "and 1 more difference in this phase: --all" in printed
    assert "clip: 4.weight" not in printed
    _, printed = compare(capsys, tmp_path / "a", tmp_path / "b", "--all")
    assert "--all" not in printed
    assert "step 0, clip: 4.weight, rank 0" in printed


def held(*numbers, part=None):
    """Return the entries that each rank has recorded of one tensor."""
    return {rank: [Entry((number,), "f32", (2,), part)] for rank, number in enumerate(numbers)}


def sharded(*numbers):
    """Two shards, each on two ranks."""
    return {
        rank: [Entry((number,), "f32", (4,), ((rank % 2 * 2,), (2,)))]
        for rank, number in enumerate(numbers)
    }


@pytest.mark.parametrize("phase", ["load", "clip", "optimiser"])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        (held("1", "2"), (1,)),
        (held("1", "1", "2"), (2,)),
        (held("1", "2", "1", "2"), (1, 3)),
        (sharded("1", "2", "1", "3"), (3,)),
        (held("1", "1"), ()),
        (sharded("1", "2", "1", "2"), ()),
        (held("1", "2", part="partial"), ()),
        (held("1", "2", part="rows"), ()),
    ],
)
def test_replicas_that_disagree_on_other_ranks(phase, values, ranks):
    """Z2: weights, moments and clipped gradients are no rank's own; what both have so, is."""
    alone = held("1")
    found = _disagreement(3, phase, "w", alone, values)
    assert (found.ranks if found else ()) == ranks
    back = _disagreement(3, phase, "w", values, alone)
    assert (back.ranks if back else ()) == ranks
    if ranks:
        assert found.words == "other values than on other ranks of B"
        assert back.words == "other values than on other ranks of A"
    assert _disagreement(3, phase, "w", held("1", "2"), held("3", "4", "5")) is None
    assert _disagreement(3, "gradient", "w", alone, values) is None
    assert _disagreement(3, "loss", "w", alone, values) is None


@pytest.mark.parametrize("rounds", [False, True])
def test_ranks_that_drift_apart_are_told(tmp_path, rounds):
    """Z2: a reduction of gradients is forgotten on two ranks, beside a run on one."""
    for folder, scale in (("a", 1), ("b", 1), ("other", 2)):
        train(2, tmp_path / folder, nudge=slice(0, scale) if folder == "other" else None)
    shutil.copy(tmp_path / "other" / "rank0.jsonl", tmp_path / "b" / "rank1.jsonl")
    two = tmp_path / "b"
    for rank in range(2):
        path = two / f"rank{rank}.jsonl"
        first, *lines = path.read_text().splitlines(keepends=True)
        own = json.loads(first) | {"rank": rank, "world_size": 2}
        path.write_text(json.dumps(own) + "\n" + "".join(lines))
    result = compare_runs(read_run(tmp_path / "a"), read_run(two), rounds=rounds)
    assert result.status == 1
    assert str(result.differences[0]) == (
        "step 1, clip: 0.weight, rank 1: other values than on other ranks of B"
    )
