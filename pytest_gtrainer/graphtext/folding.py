"""Folding and unfolding: runs of equal layers print once, and layers much like another as
differences.

Presentation only: ``unfold`` gives the same lines whatever was folded. It reads canonical texts
line by line and does not look inside statements, which is all that comparing goldens needs; no
torch here.
"""

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.header import TextError, nearest
from pytest_gtrainer.graphtext.sections import GraphLine, Layer, Line, Section, SectionKey, spell

INDENT = "  "
MOST_LAYERS = 10_000
"""Layers of one heading: a damaged number must take neither all memory nor minutes."""
MOST_LINES = 1 << 20
"""Lines of a text to compare, its layers counted out."""
MOST_ADDED = 1 << 16
"""Lines that layers may add to a text to parse. Each becomes a node, which takes a hundred times
longer.
"""
_SHORT = 8  # sections of at most so many lines are read faster than their differences from another
_LAYERS = re.compile(
    r"for i in (?P<path>.+)\[(?P<first>[0-9]{1,9})(?P<range>:(?P<stop>[0-9]{0,9})(?P<down>:-1)?)?\]:(  # .*)?"
)
_SPACE = re.compile(r"if (?P<space>\w+):")
_UNDER_A_MODULE = 2 * INDENT
_EDIT = re.compile(r"(?P<kind>like|drop|after)\((?P<name>.*)\)")


@dataclass(frozen=True, slots=True)
class LayerRun:
    """``count`` sections with equal lines, their layers ``step`` apart."""

    section: Section
    count: int
    step: int
    visit: int  # for the how many-th time the schedule comes to each of them

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
    runs = list(_runs_of(sections))
    models: dict[
        tuple[str, str, int], LayerRun
    ] = {}  # at each place the run of most layers: others are told by it
    for run in runs:
        if run.section.key.layer is not None and run.section.key.space in ("fwd", "bwd"):
            models[run.place] = max(
                models.get(run.place, run), run, key=lambda r: (r.count, len(r.section.lines))
            )
    text: list[str] = []
    for run in runs:
        model, size = models.get(run.place, run), len(run.section.lines)
        edits = None if model is run else _difference(model.section.lines, run.section.lines)
        if (
            edits is None or 2 * len(edits) >= size or (edits and size <= _SHORT)
        ):  # not much shorter
            text += [run.heading, *_body(run.section.lines)]
            continue
        visit = f", visit={model.visit}" if model.visit > 1 else ""
        note = f"as {model.section.key}{visit}" + (", but for" if edits else "")
        heading = f"{run.heading}, {note}" if "  # " in run.heading else f"{run.heading}  # {note}"
        text += [heading, f"{INDENT}like({model.section.key}{visit})", *edits]
    return text


def _runs_of(sections: Sequence[Section]) -> Iterator[LayerRun]:
    seen: Counter[SectionKey] = Counter()
    visits = []
    for section in sections:
        seen[section.key] += 1
        visits.append(seen[section.key])
    place = 0
    while place < len(sections):
        section, count, step = sections[place], 1, 0
        space, layer = section.key
        for other, visit in zip(sections[place + 1 :], visits[place + 1 :], strict=True):
            found = other.key.layer
            if (
                layer is None
                or found is None
                or visit != visits[place]
                or other.lines != section.lines
            ):
                break
            step = step or found.number - layer.number
            if abs(step) != 1 or other.key != (
                space,
                Layer(layer.container, layer.number + step * count),
            ):
                break
            count += 1
        yield LayerRun(section, count, step if count > 1 else 0, visits[place])
        place += count


def _body(lines: Iterable[Line]) -> list[str]:
    text: list[str] = []
    heading = ""
    for line in lines:
        if line.heading and line.heading != heading:
            text.append(f"{INDENT}with {line.heading}:")
        heading = line.heading
        text.append((_UNDER_A_MODULE if heading else INDENT) + line.text)
    return text


def _edit_name(line: Line) -> str:
    """How an edit names a line: ``bucket(L).wait_tensor``."""
    return f"{line.heading}.{line.name}" if line.heading else line.name


def _difference(model: Sequence[Line], lines: Sequence[Line]) -> list[str] | None:
    """``lines`` as edits of ``model``: ``drop(name)``, new lines, ``after``; None if names do not
    tell lines apart.
    """
    old = {_edit_name(line): line for line in model}
    new = {_edit_name(line): line for line in lines}
    if len(old) != len(model) or len(new) != len(lines):
        return None
    places = {name: place for place, name in enumerate(old)}
    common = [name for name in new if name in places]
    kept = {
        common[place] for place in rising([places[name] for name in common])
    }  # most names in one order
    text = [f"{INDENT}drop({name})" for name in old if name not in kept]
    text += _body(line for name, line in new.items() if name in kept and line != old[name])
    anchor = ""
    for is_kept, members in itertools.groupby(new, kept.__contains__):
        names_here = list(members)
        if not is_kept:
            text += [f"{INDENT}after({anchor})", *_body(new[name] for name in names_here)]
        anchor = names_here[-1]
    return text


def rising(numbers: Sequence[int]) -> list[int]:
    """Places of a longest rising subsequence of different numbers; n log n (patience sorting)."""
    ends: list[int] = []  # ends[k]: the smallest number with which k+1 rising ones end
    lengths = []
    for number in numbers:
        lengths.append(bisect.bisect_left(ends, number))
        ends[lengths[-1] : lengths[-1] + 1] = [number]
    places: list[int] = []
    for place in range(len(numbers) - 1, -1, -1):
        if lengths[place] == len(ends) - len(places) - 1:
            places.append(place)
    return places[::-1]


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A heading's layers (none: one section without a layer) and the lines below, as printed."""

    number: int
    keys: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def model(self) -> str | None:
        """The section that this one is told by."""
        edit = _EDIT.fullmatch(self.lines[0].text) if self.lines else None
        return edit["name"] if edit and edit["kind"] == "like" else None


class LineBudget:
    """How many lines a text, with the graphs inside it, may still have, its layers counted out."""

    def __init__(self, most: int) -> None:
        self.most, self.spent = most, 0

    def spend(self, block: TextBlock, lines: int) -> None:
        """Count ``lines`` for each layer of a block; a TextError if the text has too many."""
        self.spent += len(block.keys) * lines
        if self.spent > self.most:
            message = f"expected at most {self.most} lines, layers counted out, found {self.spent}"
            raise TextError(f"{message}: give the heading fewer layers", block.number)


def unfold(text: str, budget: LineBudget | None = None) -> tuple[GraphLine, ...]:
    """The lines of a graph text, without comments at its head; a TextError says the line.

    Graphs inside a graph share one ``budget``.
    """
    budget = budget or LineBudget(MOST_LINES)
    unfolded = []
    for block, lines in expand(list(_blocks(text, budget)), budget):
        for key in block.keys:
            unfolded += [GraphLine(key, heading, statement) for heading, statement, _ in lines]
    return tuple(unfolded)


def expand(
    blocks: Sequence[TextBlock], budget: LineBudget
) -> list[tuple[TextBlock, Sequence[Line]]]:
    """Give every block the lines of each of its layers, edits applied; a TextError if an edit names
    nothing.

    The budget pays for lines that edits add; those that stand in the text have been counted by its
    reader.
    """
    models: dict[
        str, Sequence[Line]
    ] = {}  # what `like` may name: sections printed in full, by key and visit
    visits: Counter[str] = Counter()
    for block in blocks:
        visits.update(block.keys)
        if block.model is None:
            models |= {
                f"{key}, visit={visits[key]}" if visits[key] > 1 else key: block.lines
                for key in block.keys
            }
    expanded: list[tuple[TextBlock, Sequence[Line]]] = []
    for block in blocks:
        lines: Sequence[Line] = block.lines
        if block.model is not None:
            if block.model not in models:
                hint = nearest(block.model, models)
                raise TextError(
                    f"like({block.model}): no section of that name is told in full{hint}",
                    block.number,
                )
            lines = tuple(_edited(models[block.model], block))
            budget.spend(block, max(len(lines) - len(block.lines), 0))
        expanded.append((block, lines))
    return expanded


def _blocks(text: str, budget: LineBudget) -> Iterator[TextBlock]:
    head: tuple[int, tuple[str, ...]] | None = None
    lines: list[Line] = []
    heading = ""
    for number, raw in enumerate([*text.splitlines(), "."], start=1):  # the last one ends the text
        line = raw.removeprefix(INDENT)
        if raw.startswith("#") or not raw or raw.isspace():
            continue
        if not raw.startswith(INDENT):  # a heading, or a definition at the head of the text
            if head:
                block = TextBlock(*head, tuple(lines))
                budget.spend(block, max(len(block.lines), 1))
                yield block
            head = number, section_names(raw, number)
            lines, heading = [Line("", raw)] if head[1] == ("",) else [], ""
        elif not head:
            raise TextError("expected a section (`if fwd:`), found an indented line", number)
        elif lines and lines[0].text.startswith(
            "def "
        ):  # a graph inside the graph: as it stands there
            lines.append(Line("", raw))
        elif raw.startswith(_UNDER_A_MODULE):
            lines.append(Line(heading, raw[len(_UNDER_A_MODULE) :]))
        elif line.startswith("with ") and line.endswith(":"):
            heading = line[len("with ") : -1]
        else:
            heading = ""
            lines.append(Line(heading, line))


def section_names(raw: str, number: int, column: int = 0) -> tuple[str, ...]:
    """The sections that a heading stands for; a definition stands for itself."""
    if found := _SPACE.fullmatch(raw):
        return (found["space"],)
    if not raw.startswith("for "):
        return ("",)
    if not (found := _LAYERS.fullmatch(raw)):
        raise TextError(f"expected `for i in fwd.layers[0:8]:`, found {raw[:80]!r}", number, column)
    first = int(found["first"])
    if found["range"] is None:
        return (f"{found['path']}[{first}]",)
    layers = range(first, int(found["stop"] or -1), -1 if found["down"] else 1)
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TextError(
            f"expected 1 to {MOST_LAYERS} layers in a heading, found {len(layers)}", number, column
        )
    return tuple([f"{found['path']}[{index}]" for index in layers])


def _edited(model: Sequence[Line], block: TextBlock) -> list[Line]:
    lines = {_edit_name(line): [line] for line in model}
    front: list[Line] = []
    target: list[Line] | None = None
    for line in block.lines[1:]:
        edit = _EDIT.fullmatch(line.text) if not line.heading else None
        if edit is None and target is not None:
            target.append(line)
            continue
        name = edit["name"] if edit else _edit_name(line)
        if name and name not in lines:
            raise TextError(f"{block.model} has no line {name}{nearest(name, lines)}", block.number)
        if edit is None:
            lines[name][0] = line
        elif edit["kind"] == "drop":
            del lines[name]
        else:
            target = lines[name] if name else front
    return front + [line for group in lines.values() for line in group]
