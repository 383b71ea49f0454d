"""Properties of every difference: something is reported exactly if something differs, in bounds, in
linear time.
"""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.graphdiff import cases, forget
from pytest_gtrainer.graphtext import GraphLine, diff, unfold

pytestmark = pytest.mark.second_tier

ROOT = Path(__file__).parents[2]
TEXTS = sorted(
    [*ROOT.glob("fixtures/graphs/*/*.fxgraph"), *ROOT.glob("golden/tests/passes/**/*.fxgraph")]
)
_NUMBERED = re.compile(r"(.+)\[(\d+)\]")


def text_of(records: Sequence[GraphLine]) -> str:
    """The records as a text, with nothing folded."""
    lines = []
    for section, members in itertools.groupby(records, key=lambda record: record.section):
        if section:
            lines.append(
                f"for i in {section}:" if _NUMBERED.fullmatch(section) else f"if {section}:"
            )
        for _, heading, text in members:
            lines += (
                [f"  with {heading}:", f"    {text}"]
                if heading
                else [f"  {text}" if section else text]
            )
    return "\n".join(lines) + "\n"


def small() -> list[tuple[GraphLine, ...]]:
    found = [unfold(path.read_text()) for path in TEXTS]
    return [
        records for records in found if len(records) < 200 and unfold(text_of(records)) == records
    ]


def dropped(draw: st.DrawFn, records: list[GraphLine]) -> None:
    del records[draw(st.integers(0, len(records) - 1))]


def repeated(draw: st.DrawFn, records: list[GraphLine]) -> None:
    place = draw(st.integers(0, len(records) - 1))
    records.insert(draw(st.integers(0, len(records))), records[place])


def exchanged(draw: st.DrawFn, records: list[GraphLine]) -> None:
    place = draw(st.integers(1, len(records) - 1))
    records[place - 1 : place + 1] = records[place - 1 : place + 1][::-1]


def reworded(draw: st.DrawFn, records: list[GraphLine]) -> None:
    """One word of a line for another one that stands somewhere."""
    place, other = draw(st.integers(0, len(records) - 1)), draw(st.integers(0, len(records) - 1))
    words, others = (re.findall(r"\w+", records[number].text) for number in (place, other))
    if words and others:
        word, now = draw(st.sampled_from(words)), draw(st.sampled_from(others))
        text = re.sub(rf"\b{word}\b", now, records[place].text, count=1)
        records[place] = records[place]._replace(text=text)


def moved(draw: st.DrawFn, records: list[GraphLine]) -> None:
    record = records.pop(draw(st.integers(0, len(records) - 1)))
    records.insert(draw(st.integers(0, len(records))), record)


SMALL = small()
EDITS = [dropped, repeated, exchanged, reworded, reworded, moved]


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, str]:
    records = draw(st.sampled_from(SMALL))
    other = list(records)
    for edit in draw(st.lists(st.sampled_from(EDITS), min_size=0, max_size=5)):
        if len(other) > 2:
            edit(draw, other)
    return text_of(records), text_of(other)


def test_the_corpus():
    assert len(SMALL) > 10


A_DETACH = (
    "if I:\n  I.x: f32[2, 3]\nif fwd:\n  detach: f32[2, 3] = aten.detach(I.x)\nif out:\n"
    "  yield fwd._.detach\n"
)


@settings(max_examples=150)
@given(edited())
@example((A_DETACH, A_DETACH.replace("I.x: f32", "I.x: _")))  # a type without a dtype
def test_something_is_said_exactly_if_records_differ(texts):
    old, new = texts
    said = diff(old, new)
    assert bool(said) == (unfold(old) != unfold(new))
    if said:
        words, _, lines = said.partition("\n\n")
        assert 1 <= len(words.splitlines()) <= 12
        assert all(len(line) <= 160 for line in said.splitlines())
        assert "\0" not in said
        assert "\1" not in said
        assert any(line[0] in "+-" for line in lines.splitlines()[2:])


@settings(max_examples=60)
@given(edited())
def test_words_are_those_of_the_other_direction_too(texts):
    """The dataflow is the same from both sides."""
    one, other = (diff(*pair).startswith("same dataflow") for pair in (texts, texts[::-1]))
    assert one == other


# -- time


def calls_of(function: Callable[..., object], *arguments: object) -> int:
    """Count the function calls, ours and the interpreter's."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("case", cases(400))
def test_work_grows_as_the_graph_does(case):
    """Counted in calls: four times the nodes are about four times the work."""
    counts = []
    for nodes in (1000, 4000):
        forget()
        counts.append(calls_of(diff, *("\n".join(side) for side in cases(nodes)[case])))
    assert counts[1] < 4.5 * counts[0]
