"""Folding and unfolding of graph texts. No torch here.

A run of equal layers is printed once, and layers much like another run as edits of it.

Folding is presentation only: ``unfold`` returns the same lines whatever was folded. It reads
canonical texts line by line and does not look inside statements, which is all that comparing
goldens needs.
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
"""Layers of one heading. A text with a damaged number must not take all memory, or minutes."""
MOST_LINES = 1 << 20
"""Lines of a text to compare; a line of a heading counts once for each of its layers."""
MOST_ADDED = 1 << 16
"""Lines that layers may add to a text to parse. Each becomes a node, which takes a hundred times
longer.
"""
_SHORT = 8  # people read sections of at most so many lines faster than edits of another
_LAYERS = re.compile(
    r"for i in (?P<path>.+)"
    r"\[(?P<first>[0-9]{1,9})(?P<range>:(?P<stop>[0-9]{0,9})(?P<down>:-1)?)?\]:(  # .*)?"
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
    visit: int  # 1 if these sections are the first ones of their layers, 2 for the second ones

    @property
    def place(self) -> tuple[str, str, int]:
        """Space, container and visit: runs that share them may be edits of one another."""
        space, layer = self.section.key
        container = ""
        if layer:
            container = layer.container
        return space, container, self.visit

    @property
    def heading(self) -> str:
        """``for i in fwd.layers[1:6]:  # x5``"""
        space, layer = self.section.key
        if layer is None:
            return f"if {space}:"
        if self.count == 1:
            return f"for i in {space}.{layer}:"
        stop = layer.number + self.step * self.count
        bounds = f"{layer.number}:{stop}"
        if self.step < 0:
            # A slice that ends at layer 0 has no stop: ``[5::-1]``.
            bounds = f"{layer.number}:{stop if stop >= 0 else ''}:-1"
        return f"for i in {space}.{spell(layer.container)}[{bounds}]:  # x{self.count}"


def fold(sections: Sequence[Section]) -> list[str]:
    """Return the text of the sections."""
    runs = list(_runs_of(sections))
    # By space, container and visit the run of most layers: the others may be printed as its edits.
    models: dict[tuple[str, str, int], LayerRun] = {}
    for run in runs:
        if run.section.key.layer is not None and run.section.key.space in ("fwd", "bwd"):
            best = models.get(run.place, run)
            models[run.place] = max(best, run, key=lambda r: (r.count, len(r.section.lines)))

    text: list[str] = []
    for run in runs:
        model, size = models.get(run.place, run), len(run.section.lines)
        edits = None if model is run else _edits(model.section.lines, run.section.lines)
        # Edits have to save more than half of the lines, and a short section is read faster whole.
        if edits is None or 2 * len(edits) >= size or (edits and size <= _SHORT):
            text += [run.heading, *_body(run.section.lines)]
            continue
        name = str(model.section.key)
        if model.visit > 1:
            name += f", visit={model.visit}"
        note = f"as {name}"
        if edits:
            note += ", but for"
        # A heading of several layers ends with a comment, their number.
        sign = ", " if "  # " in run.heading else "  # "
        text += [f"{run.heading}{sign}{note}", f"{INDENT}like({name})", *edits]

    return text


def _runs_of(sections: Sequence[Section]) -> Iterator[LayerRun]:
    """Yield the longest runs of equal sections whose layers rise, or fall, by one."""
    seen: Counter[SectionKey] = Counter()
    visits = []
    for section in sections:
        seen[section.key] += 1
        visits.append(seen[section.key])
    place = 0
    while place < len(sections):
        section, visit, count, step = sections[place], visits[place], 1, 0
        space, layer = section.key
        while layer is not None and place + count < len(sections):
            other = sections[place + count]
            if other.key.layer is None or visits[place + count] != visit:
                break
            step = step or other.key.layer.number - layer.number
            expected = Layer(layer.container, layer.number + step * count)
            if abs(step) != 1 or other != Section(SectionKey(space, expected), section.lines):
                break
            count += 1
        yield LayerRun(section, count, step if count > 1 else 0, visit)
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
    """Return the name of a line in an edit: ``bucket(L).wait_tensor``."""
    if line.heading:
        return f"{line.heading}.{line.name}"
    return line.name


def _edits(model: Sequence[Line], lines: Sequence[Line]) -> list[str] | None:
    """Return the edits of ``model`` that give ``lines``: ``drop(name)``, new lines, ``after``.

    Returns None if several lines of one side have one name.
    """
    old = {_edit_name(line): line for line in model}
    new = {_edit_name(line): line for line in lines}
    if len(old) != len(model) or len(new) != len(lines):
        return None
    places = {name: place for place, name in enumerate(old)}
    common = [name for name in new if name in places]
    # A longest sequence of names that have the same order on both sides stays where it is.
    kept = {common[place] for place in rising([places[name] for name in common])}
    text = [f"{INDENT}drop({name})" for name in old if name not in kept]
    text += _body(line for name, line in new.items() if name in kept and line != old[name])
    anchor = ""
    for is_kept, members in itertools.groupby(new, kept.__contains__):
        names = list(members)
        if not is_kept:
            text += [f"{INDENT}after({anchor})", *_body(map(new.__getitem__, names))]
        anchor = names[-1]

    return text


def rising(numbers: Sequence[int]) -> list[int]:
    """Return the places of a longest rising subsequence of different numbers.

    Patience sorting, n log n: ``ends[k]`` is the smallest number that ends k+1 rising ones so far.
    A number that ends more than any before is appended, as the slice of one place is empty there.
    """
    ends: list[int] = []
    lengths = []
    for number in numbers:
        lengths.append(bisect.bisect_left(ends, number))
        ends[lengths[-1] : lengths[-1] + 1] = [number]
    places: list[int] = []
    for place in range(len(numbers) - 1, -1, -1):
        if lengths[place] == len(ends) - len(places) - 1:
            places.append(place)
    return places[::-1]


def rising_pairs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the most pairs, in their order, whose second numbers rise."""
    return [pairs[place] for place in rising([second for _, second in pairs])]


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A heading and the lines below it, as printed."""

    number: int  # of the heading's line
    keys: tuple[str, ...]  # the names of its sections, one for each layer
    lines: tuple[Line, ...]

    @property
    def model(self) -> str | None:
        """The section that this one is an edit of."""
        if not self.lines:
            return None
        edit = _EDIT.fullmatch(self.lines[0].text)
        if edit is None or edit["kind"] != "like":
            return None
        return edit["name"]


class LineBudget:
    """The number of lines that a text may have, those of each layer and of its bodies counted."""

    def __init__(self, most: int) -> None:
        self.most, self.spent = most, 0

    def spend(self, block: TextBlock, lines: int) -> None:
        """Count ``lines`` for each layer of a block; a TextError if the text has too many."""
        self.spent += len(block.keys) * lines
        if self.spent > self.most:
            message = f"expected at most {self.most} lines, layers counted out, found {self.spent}"
            raise TextError(f"{message}: give the heading fewer layers", block.number)


def unfold(text: str, budget: LineBudget | None = None) -> tuple[GraphLine, ...]:
    """Return the lines of a graph text, without comments at its head.

    Bodies share the ``budget`` of their graph.

    Raises:
        TextError: this is no graph text; says the line.
    """
    budget = budget or LineBudget(MOST_LINES)
    unfolded = []
    for block, lines in expand(list(_blocks(text, budget)), budget):
        for key in block.keys:
            for heading, statement, _ in lines:
                unfolded.append(GraphLine(key, heading, statement))
    return tuple(unfolded)


def expand(
    blocks: Sequence[TextBlock], budget: LineBudget
) -> list[tuple[TextBlock, Sequence[Line]]]:
    """Return every block with the lines of each of its layers, edits applied.

    The reader of the text has spent the budget of its lines; here it pays for those that edits add.

    Raises:
        TextError: an edit names a section or a line that does not exist.
    """
    # Sections printed in full, by the names that ``like`` may give.
    models: dict[str, Sequence[Line]] = {}
    visits: Counter[str] = Counter()
    for block in blocks:
        visits.update(block.keys)
        if block.model is None:
            for key in block.keys:
                name = key
                if visits[key] > 1:
                    name += f", visit={visits[key]}"
                models[name] = block.lines

    expanded: list[tuple[TextBlock, Sequence[Line]]] = []
    for block in blocks:
        lines: Sequence[Line] = block.lines
        if block.model is not None:
            if block.model not in models:
                hint = nearest(block.model, models)
                raise TextError(
                    f"like({block.model}): no section of that name is printed in full{hint}",
                    block.number,
                )
            lines = _edited(models[block.model], block)
            budget.spend(block, max(len(lines) - len(block.lines), 0))
        expanded.append((block, lines))

    return expanded


def _blocks(text: str, budget: LineBudget) -> Iterator[TextBlock]:
    """Yield the headings and definitions of a text, each with its lines."""
    head: tuple[int, tuple[str, ...]] | None = None
    lines: list[Line] = []
    heading = ""
    # "." is not indented, so it ends the last block as a heading would.
    for number, raw in enumerate([*text.splitlines(), "."], start=1):
        line = raw.removeprefix(INDENT)
        if raw.startswith("#") or not raw or raw.isspace():
            continue
        if not raw.startswith(INDENT):
            if head:
                block = TextBlock(*head, tuple(lines))
                budget.spend(block, max(len(block.lines), 1))
                yield block
            head = number, section_names(raw, number)
            lines, heading = [], ""
            if head[1] == ("",):  # a definition has no lines below it but those of a body
                lines.append(Line("", raw))
        elif not head:
            raise TextError("expected a section (`if fwd:`), found an indented line", number)
        elif lines and lines[0].text.startswith("def "):
            lines.append(Line("", raw))  # a body is one definition, whatever its lines are
        elif raw.startswith(_UNDER_A_MODULE):
            lines.append(Line(heading, raw[len(_UNDER_A_MODULE) :]))
        elif line.startswith("with ") and line.endswith(":"):
            heading = line[len("with ") : -1]
        else:
            heading = ""
            lines.append(Line(heading, line))


def section_names(raw: str, number: int, column: int = 0) -> tuple[str, ...]:
    """Return the names of a heading's sections; that of a definition is empty."""
    if found := _SPACE.fullmatch(raw):
        return (found["space"],)
    if not raw.startswith("for "):
        return ("",)
    if not (found := _LAYERS.fullmatch(raw)):
        raise TextError(f"expected `for i in fwd.layers[0:8]:`, found {raw[:80]!r}", number, column)
    first = int(found["first"])
    if found["range"] is None:
        return (f"{found['path']}[{first}]",)
    step = -1 if found["down"] else 1
    layers = range(first, int(found["stop"] or -1), step)
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TextError(
            f"expected 1 to {MOST_LAYERS} layers in a heading, found {len(layers)}", number, column
        )

    return tuple(f"{found['path']}[{index}]" for index in layers)


def _edited(model: Sequence[Line], block: TextBlock) -> list[Line]:
    """Return the lines of ``model`` after the edits of a block."""
    # Each line of the model, with the lines that were added after it.
    lines = {_edit_name(line): [line] for line in model}
    front: list[Line] = []
    target: list[Line] | None = None
    for line in block.lines[1:]:
        # Edits are never under a ``with`` heading. A line there is a statement, even if it looks
        # like an edit.
        edit = None if line.heading else _EDIT.fullmatch(line.text)
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
        elif name:
            target = lines[name]
        else:
            target = front

    return list(itertools.chain(front, *lines.values()))
