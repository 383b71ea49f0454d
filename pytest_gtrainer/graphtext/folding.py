"""Folding: runs of equal layers print once, and layers much like another as differences.

Presentation only: ``unfolding.unfold`` gives the same records whatever was folded. Cost: a
walk over the lines and, for each layer that starts no run, one sort-like pass over its lines.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.sections import Line, Section, spell

INDENT = "  "
_SHORT = 8
"""Sections of at most so many lines are read faster than their differences from another."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """``count`` sections with equal lines, their layers ``step`` apart.

    ``visit`` says for the how many-th time the schedule comes to each of them.
    """

    section: Section
    count: int
    step: int
    visit: int = 1

    @property
    def size(self) -> int:
        return len(self.section.lines)

    @property
    def place(self) -> tuple[str, str, int]:
        """Space, container and visit: where runs may be told by one another."""
        space, layer = self.section.key
        return space, layer.container if layer else "", self.visit

    @property
    def heading(self) -> str:
        """``for i in fwd.layers[1:6]:  # x5``"""
        space, layer = self.section.key
        if layer is None:
            return f"if {space}:"
        if self.count == 1:
            return f"for i in {space}.{layer}:"
        stop = layer.number + self.step * self.count
        bounds = f"{layer.number}:{stop if stop >= 0 else ''}" + (":-1" if self.step < 0 else "")
        return f"for i in {space}.{spell(layer.container)}[{bounds}]:  # x{self.count}"


def fold(sections: Sequence[Section]) -> list[str]:
    """The text of the sections."""
    runs = list(runs_of(sections))
    models = _models(runs)
    text: list[str] = []
    for run in runs:
        told = _told_by_model(run, models.get(run.place))
        text += [run.heading, *_body(run.section.lines)] if told is None else told
    return text


def _told_by_model(run: LayerRun, model: LayerRun | None) -> list[str] | None:
    """The run as differences from its model; None if that is not much shorter."""
    if model is None or model is run:
        return None
    edits = difference(model.section.lines, run.section.lines)
    if edits is None or 2 * len(edits) >= run.size or (edits and run.size <= _SHORT):
        return None
    visit = f", visit={model.visit}" if model.visit > 1 else ""
    note = f"as {model.section.key}{visit}" + (", but for" if edits else "")
    heading = f"{run.heading}, {note}" if "  # " in run.heading else f"{run.heading}  # {note}"
    return [heading, f"{INDENT}like({model.section.key}{visit})", *edits]


def runs_of(sections: Sequence[Section]) -> Iterable[LayerRun]:
    """Cut the sections into runs, greedily."""
    visits = visits_of(section.key for section in sections)
    place = 0
    while place < len(sections):
        count, step = 1, 0
        while place + count < len(sections) and visits[place + count] == visits[place]:
            found = _step(sections[place + count - 1], sections[place + count])
            if found == 0 or (step and found != step):
                break
            count, step = count + 1, found
        yield LayerRun(sections[place], count, step, visits[place])
        place += count


def visits_of(keys: Iterable[Hashable]) -> list[int]:
    """For each key the number of times it has come so far.

    >>> visits_of("abac")
    [1, 1, 2, 1]
    """
    seen: Counter[Hashable] = Counter()
    visits = []
    for key in keys:
        seen[key] += 1
        visits.append(seen[key])
    return visits


def _step(one: Section, other: Section) -> int:
    """+1 or -1 if ``other`` is the same text one layer further; 0 if it is not."""
    (space, layer), (other_space, other_layer) = one.key, other.key
    if layer is None or other_layer is None:
        return 0
    if space != other_space or layer.container != other_layer.container or one.lines != other.lines:
        return 0
    step = other_layer.number - layer.number
    return step if abs(step) == 1 else 0


def _models(runs: Sequence[LayerRun]) -> dict[tuple[str, str, int], LayerRun]:
    """For each place the run that stands for most layers: others are told by it."""
    models: dict[tuple[str, str, int], LayerRun] = {}
    for run in runs:
        if run.section.key.layer is not None and run.section.key.space in ("fwd", "bwd"):
            models[run.place] = max(models.get(run.place, run), run, key=lambda r: (r.count, r.size))
    return models


def _body(lines: Iterable[Line]) -> list[str]:
    text: list[str] = []
    heading = ""
    for line in lines:
        if line.heading and line.heading != heading:
            text.append(f"{INDENT}with {line.heading}:")
        heading = line.heading
        text.append((INDENT * 2 if heading else INDENT) + line.text)
    return text


def spell_line_name(line: Line) -> str:
    """How an edit names a line: ``bucket(L).wait_tensor``."""
    return f"{line.heading}.{line.name}" if line.heading else line.name


def difference(model: Sequence[Line], lines: Sequence[Line]) -> list[str] | None:
    """``lines`` as edits of ``model``, printed; None where lines have no names to tell them apart.

    Three kinds, in this order: ``drop(name)``; lines that replace the model's line of the same
    name in its place; ``after(name)`` with lines to insert there, ``after()`` at the front.
    """
    old = {spell_line_name(line): line for line in model}
    new = {spell_line_name(line): line for line in lines}
    if len(old) != len(model) or len(new) != len(lines):
        return None
    places = {name: place for place, name in enumerate(old)}
    common = [name for name in new if name in places]
    kept = {common[place] for place in rising([places[name] for name in common])}  # most names in one order
    drops = [f"{INDENT}drop({name})" for name in old if name not in kept]
    changed = [line for name, line in new.items() if name in kept and line != old[name]]
    return drops + _body(changed) + _insertions(new, kept)


def rising(numbers: Sequence[int]) -> list[int]:
    """Places of a longest rising subsequence of different numbers; n log n (patience sorting).

    >>> rising([0, 1, 5, 2, 3, 4])
    [0, 1, 3, 4, 5]
    """
    ends: list[int] = []  # ends[k]: the smallest number with which k+1 rising ones end
    holders: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect.bisect_left(ends, number)
        before.append(holders[length - 1] if length else -1)
        ends[length : length + 1], holders[length : length + 1] = [number], [place]
    places = []
    place = holders[-1] if holders else -1
    while place >= 0:
        places.append(place)
        place = before[place]
    return places[::-1]


def _insertions(new: dict[str, Line], kept: set[str]) -> list[str]:
    text: list[str] = []
    anchor, inserted = "", list[Line]()
    for name, line in [*new.items(), ("", Line("", ""))]:
        if name and name not in kept:
            inserted.append(line)
            continue
        if inserted:
            text += [f"{INDENT}after({anchor})", *_body(inserted)]
            inserted = []
        anchor = name
    return text
