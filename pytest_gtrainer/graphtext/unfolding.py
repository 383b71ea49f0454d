"""Reading a graph text back into records, without torch and without looking inside statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.errors import TextError, nearest
from pytest_gtrainer.graphtext.folding import INDENT, spell_line_name, visits_of
from pytest_gtrainer.graphtext.sections import Line, Record

MOST_LAYERS = 100_000
MOST_LINES = 1 << 20
"""Of a heading, and of a text with its layers counted out: a damaged number must not take all memory."""
_LAYERS = re.compile(
    r"for i in (?P<path>.+)\[(?P<first>[0-9]{1,9})(?P<range>:(?P<stop>[0-9]{0,9})(?P<down>:-1)?)?\]:(  # .*)?"
)
_SPACE = re.compile(r"if (?P<space>\w+):")
_HEADINGS = re.compile(rf"\n(?!{INDENT}|\n|\Z)")
"""Before a heading or a definition; empty and indented lines belong to the one above."""
_UNDER_A_MODULE = 2 * INDENT
_EDIT = re.compile(r"(?P<kind>like|drop|after)\((?P<name>.*)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A heading's layers (none: one section without a layer) and the lines below, as printed."""

    number: int
    keys: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def model(self) -> str | None:
        """The section that this one is told by."""
        edit = _EDIT.fullmatch(self.lines[0].text) if self.lines else None
        return edit["name"] if edit and edit["kind"] == "like" else None


def unfold(text: str) -> tuple[Record, ...]:
    """The records of a graph text. Comments at its head count for nothing.

    Raises:
        TextError: with the line.
    """
    records: list[Record] = []
    for key, lines in _sections(list(_blocks(text))):
        records += [Record(key, heading, told) for heading, told, _ in lines]
    return tuple(records)


def are_alike(text: str, other: str) -> bool:
    """Whether two texts have the same records, told quickly; False may also be for sections cut in another way.

    Raises:
        TextError: as ``unfold``.
    """
    known: dict[str, tuple[Line, ...]] = {}
    return list(_sections(list(_blocks(text, known)))) == list(_sections(list(_blocks(other, known))))


def expand(blocks: Sequence[Block]) -> Iterator[tuple[str, Line]]:
    """Every line with the section that it stands in: layers counted out, edits applied.

    Raises:
        TextError: a `like`, `drop` or `after` names nothing.
    """
    for key, lines in _sections(blocks):
        for line in lines:
            yield key, line


def _sections(blocks: Sequence[Block]) -> Iterator[tuple[str, Sequence[Line]]]:
    models = _models(blocks)
    total = 0
    for block in blocks:
        lines = block.lines
        if block.model is not None:
            if block.model not in models:
                hint = nearest(block.model, models)
                raise TextError(f"like({block.model}): no section of that name is told in full{hint}", block.number)
            lines = tuple(_edited(models[block.model], block))
        total = counted(block, lines, total)
        for key in block.keys:
            yield key, lines


def counted(block: Block, lines: Sequence[Line], before: int) -> int:
    """How many lines a text has after a block of these lines, its layers counted out.

    Raises:
        TextError: more than ``MOST_LINES``.
    """
    total = before + len(block.keys) * max(len(lines), 1)
    if total > MOST_LINES:
        raise TextError(f"expected at most {MOST_LINES} lines, layers counted out, found {total}", block.number)
    return total


def _models(blocks: Sequence[Block]) -> dict[str, Sequence[Line]]:
    """What `like` may name: sections printed in full, by key and visit."""
    keys = [(key, block) for block in blocks for key in block.keys]
    visits = visits_of(key for key, _ in keys)
    return {
        key if visit == 1 else f"{key}, visit={visit}": block.lines
        for (key, block), visit in zip(keys, visits, strict=True)
        if block.model is None
    }


def _blocks(text: str, known: dict[str, tuple[Line, ...]] | None = None) -> Iterator[Block]:
    """The blocks of a text; ``known`` holds what stands below headings, as layers repeat it."""
    known = {} if known is None else known
    head: tuple[int, tuple[str, ...]] | None = None
    lines: tuple[Line, ...] = ()
    number, total = 1, 0
    told = ["" if line.startswith("#") or line.isspace() else line for line in text.splitlines()]
    for piece in _HEADINGS.split("\n".join(told)):
        first, _, body = piece.partition("\n")
        if not first or first.startswith(INDENT):  # before the first heading
            _refuse_lines(piece, number)
        else:
            if head:
                block = Block(*head, lines)
                total = counted(block, lines, total)
                yield block
            head = number, _keys(first, number)
            if body not in known:
                known[body] = tuple(_lines(body))
            lines = known[body]
            if head[1] == ("",):
                lines = (Line("", first), *lines)  # a definition at the head of the text
        number += piece.count("\n") + 1
    if head:
        yield Block(*head, lines)


def _refuse_lines(piece: str, number: int) -> None:
    for place, line in enumerate(piece.split("\n")):
        if line:
            raise TextError("expected a section (`if fwd:`), found an indented line", number + place)


def _lines(body: str) -> Iterator[Line]:
    """The lines below a heading, with the modules that they stand under."""
    heading = ""
    for raw in body.split("\n"):
        if raw.startswith(_UNDER_A_MODULE):  # most are
            yield Line(heading, raw[len(_UNDER_A_MODULE) :])
            continue
        line = raw.removeprefix(INDENT)
        if line.startswith("with ") and line.endswith(":"):
            heading = line[len("with ") : -1]
        elif line:
            heading = ""
            yield Line(heading, line)


def _keys(raw: str, number: int) -> tuple[str, ...]:
    """The sections that a heading stands for; a definition stands for itself."""
    if found := _SPACE.fullmatch(raw):
        return (found["space"],)
    if not raw.startswith("for "):
        return ("",)
    if not (found := _LAYERS.fullmatch(raw)):
        raise TextError(f"expected `for i in fwd.layers[0:8]:`, found {raw[:80]!r}", number)
    first = int(found["first"])
    if found["range"] is None:
        return (f"{found['path']}[{first}]",)
    step = -1 if found["down"] else 1
    stop = int(found["stop"]) if found["stop"] else -1
    layers = range(first, stop, step)
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TextError(f"expected 1 to {MOST_LAYERS} layers, found {len(layers)}", number)
    return tuple([f"{found['path']}[{index}]" for index in layers])


def _edited(model: Sequence[Line], block: Block) -> list[Line]:
    """Apply the edits that ``folding.difference`` printed."""
    lines = {spell_line_name(line): [line] for line in model}
    front: list[Line] = []
    target: list[Line] | None = None
    for line in block.lines[1:]:
        edit = _EDIT.fullmatch(line.text) if not line.heading else None
        if edit is None and target is not None:
            target.append(line)
            continue
        name = edit["name"] if edit else spell_line_name(line)
        if name and name not in lines:
            raise TextError(f"{block.model} has no line {name}{nearest(name, lines)}", block.number)
        if edit is None:
            lines[name][0] = line
        elif edit["kind"] == "drop":
            del lines[name]
        else:
            target = lines[name] if name else front
    return front + [line for group in lines.values() for line in group]
