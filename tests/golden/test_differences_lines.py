"""Diffs of lines: right, about shortest, and linear in time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gtrainer.graphtext import diff, unfold
from pytest_gtrainer.graphtext.differences import LIMIT, text_diff
from pytest_gtrainer.graphtext.differences.lines import Change, changes, graph_diff

NUMBERED = [f"line {number}" for number in range(4000)]
REPEATED = [f"line {number * 7 % 200}" for number in range(4000)]
"""Each line 20 times: none of them is an anchor."""


def applied(old, found, new):
    """The new lines, made of the old ones and the changes."""
    made, place = [], 0
    for first, last, begin, end in found:
        made += [*old[place:first], *new[begin:end]]
        assert len(made) == end, "changes are in order"
        place = last
    return [*made, *old[place:]]


def size(found: list[Change]) -> int:
    return sum(last - first + end - begin for first, last, begin, end in found)


@given(st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd")))
def test_changes_make_the_one_of_the_other(old, new):
    assert applied(old, changes(old, new), new) == new


@given(st.integers(0, 10_000), st.booleans(), st.integers(0, 12))
def test_a_few_edits_in_long_lists_are_found(seed, repeated, edits):
    draw = random.Random(seed)
    old = (REPEATED if repeated else NUMBERED)[:600]
    new = list(old)
    for number in range(edits):
        if draw.random() < 0.5:
            new.insert(draw.randrange(len(new)), f"new {number}")
        else:
            del new[draw.randrange(len(new))]
    found = changes(old, new)
    assert applied(old, found, new) == new
    assert size(found) <= edits


@pytest.mark.parametrize("repeated", [False, True])
def test_lines_inserted_far_apart(repeated):
    old = REPEATED if repeated else NUMBERED
    new = [*old[:10], "one", *old[10:3990], "two", *old[3990:]]
    assert changes(old, new) == [Change(10, 10, 10, 11), Change(3990, 3990, 3991, 3992)]


class Counted(str):
    """A line that counts how often it is read."""

    reads = 0

    def __eq__(self, other: object) -> bool:
        Counted.reads += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.reads += 1
        return str.__hash__(self)


def shuffled(lines):
    return random.Random(1).sample(lines, len(lines))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda lines: lines[2000:] + lines[:2000], id="exchanged"),
        pytest.param(shuffled, id="shuffled"),
        pytest.param(lambda lines: [line + "!" for line in lines], id="all"),
        pytest.param(
            lambda lines: [line + "!" if n % 3 else line for n, line in enumerate(lines)],
            id="a third",
        ),
        pytest.param(lambda lines: [f"line {n * 11 % 200}" for n in range(4000)], id="repeated"),
    ],
)
@pytest.mark.parametrize("lines", [NUMBERED, REPEATED], ids=["numbered", "repeated"])
def test_a_line_is_read_a_few_times_only(lines, change):
    old, new = [Counted(line) for line in lines], [Counted(line) for line in change(lines)]
    Counted.reads = 0
    changes(old, new)
    assert Counted.reads < 100 * len(lines)


def test_a_text_diff_is_unified():
    assert text_diff(["a", "b", "c"], ["a", "c", "d"]) == [
        "--- golden",
        "+++ obtained",
        "@@ -1,3 +1,3 @@",
        " a",
        "-b",
        " c",
        "+d",
    ]
    assert (
        text_diff(NUMBERED, [*NUMBERED[:3000], "new", *NUMBERED[3000:]])[2]
        == "@@ -2998,6 +2998,7 @@"
    )


def test_it_is_bounded():
    shown = text_diff(REPEATED, [f"line {number * 11 % 200}" for number in range(4000)])
    assert len(shown) <= LIMIT + 1
    assert "-… 3983 more lines" in shown
    many = [line + "!" if number % 20 == 0 else line for number, line in enumerate(NUMBERED)]
    assert len(text_diff(NUMBERED, many)) == LIMIT + 1
    assert text_diff(NUMBERED, many)[-1] == "… and more"


GRAPH = """\
for i in fwd.layers[0]:
  with L:
    mm: f32[2] = aten.mm(embed.x)
    relu: f32[2] = aten.relu(mm)
for i in fwd.layers[1:4]:  # x3
  with L:
    mm: f32[2] = aten.mm(layers[i-1].relu)
    relu: f32[2] = aten.relu(mm)
"""


def lines_of(old: str, new: str) -> list[str]:
    return graph_diff(unfold(old), unfold(new))[2:]


def test_the_same_change_in_many_layers_is_shown_once():
    """Layers whose other lines differ, too."""
    assert lines_of(GRAPH, GRAPH.replace("aten.relu", "aten.gelu")) == [
        "@@ fwd.layers[0..3] @@",
        " L | mm: f32[2] = aten.mm(embed.x)",
        "-L | relu: f32[2] = aten.relu(mm)",
        "+L | relu: f32[2] = aten.gelu(mm)",
    ]


def test_sections_that_change_places():
    heads = [f"for i in fwd.layers[{layer}]:\n  x: f32[2] = aten.op()\n" for layer in (0, 1, 2)]
    assert lines_of("".join(heads), "".join([heads[1], heads[0], heads[2]])) == [
        "@@ order of the sections @@",
        "+fwd.layers[1]",
        " fwd.layers[0]",
        "-fwd.layers[1]",
        " fwd.layers[2]",
    ]


def test_sections_that_are_cut_otherwise():
    """The same lines in each section, and the sections in the same order: where the schedule leaves
    one differs.
    """
    one, two, three = (f"  x{number}: f32[2] = aten.op()\n" for number in range(3))
    between = f"for i in fwd.layers[1]:\n{one}"
    head = "for i in fwd.layers[0]:\n"
    old, new = head + one + two + between + head + three, head + one + between + head + two + three
    assert [line for line in lines_of(old, new) if line[0] in "+-"] == [
        "+fwd.layers[1] | x0: f32[2] = aten.op()",
        "-fwd.layers[1] | x0: f32[2] = aten.op()",
    ]


def test_one_operator_renumbers_names_that_are_not_shown():
    module = "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n    mul: f32[2] = aten.mul(I[0])\n"
    old = module + "".join(
        f"    mul_{n + 1}: f32[2] = aten.mul(mul{f'_{n}' if n else ''}, {n})\n" for n in range(50)
    )
    new = module + "    mul_1: f32[2] = aten.mul(mul, 7.5)\n"
    new += "".join(f"    mul_{n + 2}: f32[2] = aten.mul(mul_{n + 1}, {n})\n" for n in range(50))
    words, _, lines = diff(old, new).partition("\n\n")
    assert words.splitlines()[1:] == ["fwd m: gained aten.mul"]
    assert [line for line in lines.splitlines()[3:] if not line.startswith(" ")] == [
        "-m | mul_1: f32[2] = aten.mul(mul, 0)",
        "+m | mul_1: f32[2] = aten.mul(mul, 7.5)",
        "+m | mul_2: f32[2] = aten.mul(mul_1, 0)",
    ]
