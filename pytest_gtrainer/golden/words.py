"""What differs between two graphs, in words of the field, before any line is shown."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from pytest_gtrainer.graphtext.sections import Record

_T = TypeVar("_T", bound=Hashable)
_LIMIT = 12
_STATEMENT = re.compile(r"(?P<name>\w+): (?P<type>.*?) = (?P<operator>[\w.]+)\((?P<arguments>.*)\)")
_SECTION = re.compile(r"(?P<space>fwd|bwd)(\.(?P<container>.+)\[(?P<number>\d+)\])?")
_NEIGHBOUR = re.compile(r"\[i([+-]\d+)\]")


class Operation(NamedTuple):
    """A computed value: where it belongs, what computes it, of which type, from what."""

    container: str | None
    number: int | None
    module: str
    operator: str
    type: str
    arguments: str

    @property
    def is_collective(self) -> bool:
        return self.operator.startswith("_c10d_functional.")


def operations(records: Iterable[Record]) -> list[Operation]:
    """The computed values among the records, in the order of the schedule."""
    found = []
    for section, heading, text in records:
        place, statement = _SECTION.fullmatch(section), _STATEMENT.fullmatch(text)
        if place is None or statement is None:
            continue
        foreign = heading.startswith(("fwd.", "bwd."))
        module = heading.replace(".", " ", 1) if foreign else f"{place['space']} {heading}"
        number = int(place["number"]) if place["number"] else None
        details = statement.group("operator", "type", "arguments")
        found.append(Operation(place["container"], number, module, *details))
    return found


def differences_in_words(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """At most a dozen sentences, the weightiest first; at least one if the records differ."""
    before, after = operations(old), operations(new)
    said = [
        *_operators_changed(before, after),
        *_collectives_changed(before, after),
        *_definitions_changed(old, new),
    ]
    if not said:
        said = _same_operators(before, after)
    left = len(said) - _LIMIT
    return said if left <= 0 else [*said[:_LIMIT], f"… and {left} more such differences"]


def _change(before: Iterable[_T], after: Iterable[_T]) -> tuple[Counter[_T], Counter[_T]]:
    """What was lost and what was gained."""
    old, new = Counter(before), Counter(after)
    return old - new, new - old


def _operators_changed(before: list[Operation], after: list[Operation]) -> list[str]:
    """Operators gained and lost per module; what happened to many layers is said once."""
    changes = _change([op[:4] for op in before], [op[:4] for op in after])
    by_module: dict[tuple[str | None, int | None, str], list[str]] = defaultdict(list)
    for verb, counts in zip(("lost", "gained"), changes, strict=True):
        for (container, number, module, operator), count in counts.items():
            times = f"{count} " if count > 1 else ""
            by_module[container, number, module].append(f"{verb} {times}{operator}")
    layers: dict[tuple[str, str | None, str], list[int | None]] = defaultdict(list)
    for (container, number, module), what in by_module.items():
        layers[", ".join(what), container, module].append(number)
    return [f"{_where(place, seen, module)}: {what}" for (what, place, module), seen in layers.items()]


def _where(container: str | None, numbers: Sequence[int | None], module: str) -> str:
    """The module with its layers spelled out.

    >>> _where("layers", [0, 1, 2, 5], "fwd L.attention"), _where(None, [None], "bwd norm")
    ('fwd layers[0..2, 5].attention', 'bwd norm')
    >>> _where("layers", [3], "fwd bucket(layers[i+1])")
    'fwd bucket(layers[4])'
    """
    known = [number for number in numbers if number is not None]
    if container is None or not known:
        return module
    if len(known) == 1:
        module = _NEIGHBOUR.sub(lambda found: f"[{known[0] + int(found[1])}]", module)
    layers = f"{container}[{', '.join(ranges(sorted(known)))}]"
    here = re.sub(r"\bL\b", layers, module)
    return here if here != module or len(known) == 1 else f"{module}, seen from {layers}"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Rising numbers with runs of three and more drawn together.

    >>> ranges([0, 1, 2, 5, 7, 8])
    ['0..2', '5', '7', '8']
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    spelled = []
    for first, last in spans:
        spelled += [f"{first}..{last}"] if last - first > 1 else [str(n) for n in range(first, last + 1)]
    return spelled


def _collectives_changed(before: list[Operation], after: list[Operation]) -> list[str]:
    old = Counter(op.operator for op in before if op.is_collective)
    new = Counter(op.operator for op in after if op.is_collective)
    return [
        f"{operator.rpartition('.')[2]}: {old[operator]} became {new[operator]}"
        for operator in dict.fromkeys([*old, *new])
        if old[operator] != new[operator]
    ]


def _definitions_changed(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """Inputs, outputs and process groups: what is not computed."""
    said = []
    for title, spaces in (("process groups", ("",)), ("inputs", ("P", "B", "I")), ("outputs", ("out",))):
        before, after = _in_spaces(old, spaces), _in_spaces(new, spaces)
        lost, gained = _change(before, after)
        if lost or gained:
            said.append(f"{title} changed: {lost.total()} lines lost, {gained.total()} gained")
        elif before != after:
            said.append(f"{title} stand in another order")
    return said


def _in_spaces(records: Sequence[Record], spaces: tuple[str, ...]) -> list[Record]:
    return [record for record in records if record.section.partition(".")[0] in spaces]


def _same_operators(before: list[Operation], after: list[Operation]) -> list[str]:
    """The same operators in each module: types, operands or the order must differ."""
    untyped = [[op._replace(arguments="") for op in side] for side in (before, after)]
    for what, sides in (("types", untyped), ("operands", [before, after])):
        lost, _ = _change(*sides)
        if lost:
            first = next(iter(lost))
            place = f"{_where(first.container, [first.number], first.module)}: {first.operator}"
            return [f"the same operators, but {what} differ in {lost.total()}, first in {place}"]
    return ["the same operations in another order: only the schedule differs"]
