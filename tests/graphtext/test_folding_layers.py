"""Equal layers are shown once, and what was folded can be read back."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gtrainer.graphtext import TextError, lines_of, render, unfold
from pytest_gtrainer.graphtext.folding import fold
from pytest_gtrainer.graphtext.sections import Layer, Line, Section, SectionKey
from tests.graphtext.toy import toy_graph


def test_the_text_does_not_grow_with_the_layers():
    assert len(render(toy_graph(40)).splitlines()) == len(render(toy_graph(6)).splitlines())


def test_a_text_unfolds_to_its_records():
    for graph in (
        toy_graph(1),
        toy_graph(6),
        toy_graph(6, {2: torch.sin}),
        toy_graph(6, {5: torch.sin}),
    ):
        assert unfold(render(graph)) == lines_of(graph)


def section(number: int, *lines: str, space: str = "fwd") -> Section:
    return Section(
        SectionKey(space, Layer("layers", number)), tuple(Line("L", line) for line in lines)
    )


BODY = [
    f"{name}: f32[2] = aten.{name}({operand})" for operand, name in pairwise("xabcdefghijklmnop")
]


def test_backward_layers_count_down_to_zero():
    assert (
        fold([section(n, *BODY, space="bwd") for n in (2, 1, 0)])[0]
        == "for i in bwd.layers[2::-1]:  # x3"
    )


def test_a_layer_much_like_the_others_is_told_by_its_differences():
    odd = [
        "a: f32[2] = aten.a(x)",
        "new: f32[2] = aten.new(a)",
        "c: f32[2] = aten.c(new)",
        *BODY[3:],
    ]
    text = fold([section(0, *odd), section(1, *BODY), section(2, *BODY)])
    assert text[:9] == [
        "for i in fwd.layers[0]:  # as fwd.layers[1], but for",
        "  like(fwd.layers[1])",
        "  drop(L.b)",
        "  with L:",
        "    c: f32[2] = aten.c(new)",
        "  after(L.a)",
        "  with L:",
        "    new: f32[2] = aten.new(a)",
        "for i in fwd.layers[1:3]:  # x2",
    ]


def test_a_second_visit_folds_with_none_of_the_first():
    """Layer 1, then layer 0, and layer 1 again: 0 and 1 are no run, as the schedule comes to 1 for
    the second time.
    """
    visits = [section(number, *BODY) for number in (1, 5, 0, 1)]
    runs = [line.split(":")[0] for line in fold(visits) if line.startswith("for")]
    assert runs == [f"for i in fwd.layers[{number}]" for number in (1, 5, 0, 1)], (
        "a run holds layers of one visit"
    )


def test_lines_in_front_of_all_others_are_read_back_in_front():
    sections = [
        section(0, *BODY),
        section(1, *BODY),
        section(2, "new: f32[2] = aten.new(x)", *BODY),
    ]
    text = fold(sections)
    assert "  after()" in text
    assert unfold("\n".join(text)) == tuple(line for each in sections for line in each.unfolded())


@pytest.mark.parametrize("times", [(2, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_a_layer_of_two_lines_of_one_name_is_told_in_full(times):
    """View ``schedule`` can show a layer that computes twice as much: the odd one, or its likes."""
    sections = [section(n, *BODY, *["compute(3)"] * count) for n, count in enumerate(times)]
    text = fold(sections)
    assert "like" not in "\n".join(text)
    assert unfold("\n".join(text)) == tuple(line for each in sections for line in each.unfolded())


def test_a_layer_that_shares_little_is_told_in_full():
    assert "like" not in "\n".join(
        fold([section(0, *BODY[:4], "z: f32[2] = aten.z(d)"), section(1, *BODY)])
    )


names = st.sampled_from("abcdefgh")
lines = st.lists(st.tuples(names, names), max_size=8, unique_by=lambda pair: pair[0]).map(
    lambda pairs: tuple(f"{name}: f32[2] = aten.op({operand})" for name, operand in pairs)
)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(lines, st.just(tuple(BODY)))), max_size=8))
def test_folding_loses_nothing(layers: list[tuple[int, tuple[str, ...]]]):
    sections = [section(number, *body) for number, body in layers if body]
    neighbours = [s for k, s in enumerate(sections) if k == 0 or sections[k - 1].key != s.key]
    expected = tuple(record for section in neighbours for record in section.unfolded())
    assert unfold("\n".join(fold(neighbours))) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("  x: f32[2]", "line 1: expected a section (`if fwd:`), found an indented line"),
        (
            "for j in layers:\n  x",
            "line 1: expected `for i in fwd.layers[0:8]:`, found 'for j in layers:'",
        ),
        (
            "for i in fwd.layers[0]:\n  like(fwd.layers[9])",
            "line 1: like(fwd.layers[9]): no section of that name is printed in full",
        ),
        (
            "if fwd:\n  a: b\nfor i in fwd.layers[0]:\n  like(fwd)\n  drop(L.x)",
            "line 3: fwd has no line L.x",
        ),
        (
            "for i in fwd.layers[3:3]:\n  x: b",
            "line 1: expected 1 to 10000 layers in a heading, found 0",
        ),
        (
            "for i in fwd.layers[0:999999999]:\n  x: b",
            "line 1: expected 1 to 10000 layers in a heading, found 999999999",
        ),
        (
            f"for i in fwd.layers[0:{'9' * 5000}]:\n  x: b",
            f"line 1: expected `for i in fwd.layers[0:8]:`, found 'for i in "
            f"fwd.layers[0:{'9' * 58}'",
        ),
        (
            "for i in a[0:9999]:\n" + "  x: b\n" * 110 + "if fwd:\n",
            "line 1: expected at most 1048576 lines, layers counted out, found 1099890: give "
            "the heading fewer layers",
        ),
        (
            "if fwd:\n"
            + "".join(f"  x{n}: b\n" for n in range(2000))
            + "for i in fwd.layers[0:999]:\n  like(fwd)",
            "line 2002: expected at most 1048576 lines, layers counted out, found 2000000:"
            " give the heading fewer layers",
        ),
    ],
)
def test_a_damaged_text_is_refused_with_the_line(text, problem):
    with pytest.raises(TextError) as error:
        unfold(text)
    assert str(error.value) == problem
