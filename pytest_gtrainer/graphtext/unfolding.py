"""Reading a graph text back into records, without torch and without looking inside statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_gtrainer.graphtext.errors import TextError, nearest
from pytest_gtrainer.graphtext.folding import INDENT, spell_line_name, visits_of
from pytest_gtrainer.graphtext.sections import Line, Record

_LAYERS = re.compile(r"for i in (?P<path>.+)\[(?P<first>\d+)(?P<range>:(?P<stop>\d*)(?P<down>:-1)?)?\]:(  # .*)?")
_SPACE = re.compile(r"if (?P<space>\w+):")
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
    return tuple(Record(key, line.heading, line.text) for key, line in expand(list(_blocks(text))))


def are_alike(text: str, other: str) -> bool:
    """Whether two texts have the same records, told quickly; False may also be for sections cut in another way.

    Raises:
        TextError: as ``unfold``.
    """
    return list(_sections(list(_blocks(text)))) == list(_sections(list(_blocks(other))))


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
    for block in blocks:
        lines = block.lines
        if block.model is not None:
            if block.model not in models:
                hint = nearest(block.model, models)
                raise TextError(f"like({block.model}): no section of that name is told in full{hint}", block.number)
            lines = tuple(_edited(models[block.model], block))
        for key in block.keys:
            yield key, lines


def _models(blocks: Sequence[Block]) -> dict[str, Sequence[Line]]:
    """What `like` may name: sections printed in full, by key and visit."""
    keys = [(key, block) for block in blocks for key in block.keys]
    visits = visits_of(key for key, _ in keys)
    return {
        key if visit == 1 else f"{key}, visit={visit}": block.lines
        for (key, block), visit in zip(keys, visits, strict=True)
        if block.model is None
    }


def _blocks(text: str) -> Iterator[Block]:
    head: tuple[int, tuple[str, ...]] | None = None
    lines: list[Line] = []
    heading = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        if not raw.strip() or raw.startswith("#"):
            continue
        if not raw.startswith(INDENT):
            if head:
                yield Block(*head, tuple(lines))
            head, lines, heading = (number, _keys(raw, number)), [], ""
            if head[1] == ("",):
                lines = [Line("", raw)]  # a definition at the head of the text
        elif head is None:
            raise TextError("expected a section (`if fwd:`), found an indented line", number)
        else:
            heading = _statement(raw, heading, lines)
    if head:
        yield Block(*head, tuple(lines))


def _statement(raw: str, heading: str, lines: list[Line]) -> str:
    """Add a line to ``lines``; returns the heading that holds now."""
    body = raw.removeprefix(INDENT)
    if body.startswith("with ") and body.endswith(":"):
        return body[len("with ") : -1]
    if not body.startswith(INDENT):
        heading = ""
    lines.append(Line(heading, body.removeprefix(INDENT)))
    return heading


def _keys(raw: str, number: int) -> tuple[str, ...]:
    """The sections that a heading stands for; a definition stands for itself."""
    if found := _SPACE.fullmatch(raw):
        return (found["space"],)
    if not raw.startswith("for "):
        return ("",)
    if not (found := _LAYERS.fullmatch(raw)):
        raise TextError(f"expected `for i in fwd.layers[0:8]:`, found {raw!r}", number)
    first = int(found["first"])
    if found["range"] is None:
        return (f"{found['path']}[{first}]",)
    step = -1 if found["down"] else 1
    stop = int(found["stop"]) if found["stop"] else -1
    return tuple(f"{found['path']}[{index}]" for index in range(first, stop, step))


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
