"""Two records: what is said before the first difference, and what cannot be compared."""

import json
import shutil

import pytest

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


def test_no_record_at_all(records, tmp_path, capsys):
    status, printed = compare(capsys, records / "a", tmp_path)
    assert (status, printed) == (2, f"{tmp_path} holds no record: no file rank0.jsonl\n")


def test_a_record_that_was_cut_is_compared_as_far_as_it_goes(records, tmp_path, capsys):
    cut = edited(records / "a", tmp_path / "b", lambda lines: [*lines[:2], lines[2][:70]])
    status, printed = compare(capsys, records / "a", cut)
    assert status == 1
    assert "B: rank 0 was cut after step 0: its last line is missing" in printed
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
    assert (
        printed
        == "the records are of different models: no name of a tensor is in both, 0.weight in A and first.weight in B\n"
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
