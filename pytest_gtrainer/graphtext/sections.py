"""Sections of the schedule, and the records that a text unfolds to. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_gtrainer.graphtext.paths import Layer

_REACH = 4
"""At most so many stretches of other layers lie inside one."""


class Key(NamedTuple):
    """What a section belongs to: a space, and in it a layer or none."""

    space: str
    layer: Layer | None

    def __str__(self) -> str:
        return f"{self.space}.{self.layer}" if self.layer else self.space


class Line(NamedTuple):
    """One statement under its ``with`` heading ("" for none), spelled as seen from its section.

    ``source`` is its syntax tree where ``syntax`` has read it; ``text`` is then only its name.
    """

    heading: str
    text: str
    source: Any = None

    @property
    def name(self) -> str:
        """What it defines; a statement that defines nothing is its own name."""
        target, colon, _ = self.text.partition(": ")
        return target if colon else self.text


class Record(NamedTuple):
    """One line of one section, unfolded."""

    section: str
    heading: str
    text: str

    def __str__(self) -> str:
        return " | ".join(part for part in self if part)


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of the schedule of one layer in one space."""

    key: Key
    lines: tuple[Line, ...]

    def records(self) -> Iterable[Record]:
        section = str(self.key)
        return [Record(section, line.heading, line.text) for line in self.lines]


def section_keys(own: Sequence[Key], floating: Sequence[bool]) -> list[Key]:
    """In which section each line stands, given where it belongs and whether it may float.

    A floating line (a collective, or a value of no known module) never opens a section: it
    stands with its own layer if that comes next, else where the schedule has put it.

    >>> a, b = Key("fwd", Layer("layers", 0)), Key("fwd", Layer("layers", 1))
    >>> [str(key) for key in section_keys([a, b, b, b], [False, True, True, False])]
    ['fwd.layers[0]', 'fwd.layers[1]', 'fwd.layers[1]', 'fwd.layers[1]']
    >>> [str(key) for key in section_keys([a, b, a], [False, True, False])]
    ['fwd.layers[0]', 'fwd.layers[0]', 'fwd.layers[0]']
    >>> [str(key) for key in section_keys([a, b, a, a, b], [False] * 5)]
    ['fwd.layers[0]', 'fwd.layers[0]', 'fwd.layers[0]', 'fwd.layers[0]', 'fwd.layers[1]']
    """
    keys = _joined_to_what_follows(own, floating)
    ahead = _next_known(keys)
    for place, key in enumerate(keys):
        if key is not None:
            continue
        here, before, after = own[place], keys[place - 1] if place else None, ahead[place]
        if before is None:
            keys[place] = Key(here.space, None)
        elif before.space != here.space and after is not None and after.space == here.space:
            keys[place] = after  # the first collective of the backward does not stand in the forward
        else:
            keys[place] = before
    return _absorbed([key for key in keys if key is not None])


def _absorbed(keys: list[Key]) -> list[Key]:
    """Give a layer the short stretches of its neighbours that the schedule has put inside it.

    Prefetching casts the parameters of layer 1 in the middle of layer 0; were that a section of
    its own, no two layers would be alike.
    """
    lengths = [(key, here.stop - here.start) for key, here in stretches(keys)]
    absorbed: list[Key] = []
    place = 0
    while place < len(lengths):
        key, _ = lengths[place]
        last = place
        while key.layer is not None and (again := _continuation(lengths, last)) is not None:
            last = again
        absorbed += [key] * sum(length for _, length in lengths[place : last + 1])
        place = last + 1
    return absorbed


def stretches(keys: Sequence[Key]) -> Iterable[tuple[Key, slice]]:
    """Neighbours of one key, with where they stand.

    >>> a, b = Key("fwd", None), Key("bwd", None)
    >>> [(key.space, here.start, here.stop) for key, here in stretches([a, a, b])]
    [('fwd', 0, 2), ('bwd', 2, 3)]
    """
    start = 0
    for key, members in itertools.groupby(keys):
        stop = start + len(list(members))
        yield key, slice(start, stop)
        start = stop


def _continuation(lengths: Sequence[tuple[Key, int]], place: int) -> int | None:
    """Where the layer of a stretch goes on, if what lies between is less than what comes then."""
    key, between = lengths[place][0], 0
    for later in range(place + 1, min(place + 2 + _REACH, len(lengths))):
        found, length = lengths[later]
        if found == key:
            return later if between < length else None
        if found.space != key.space:
            return None
        between += length
    return None


def _joined_to_what_follows(own: Sequence[Key], floating: Sequence[bool]) -> list[Key | None]:
    """The keys of fixed lines, and of floating lines directly before a line of their own key."""
    keys: list[Key | None] = [None] * len(own)
    for place in range(len(own) - 1, -1, -1):
        if not floating[place] or (place + 1 < len(own) and keys[place + 1] == own[place]):
            keys[place] = own[place]
    return keys


def _next_known(keys: Sequence[Key | None]) -> list[Key | None]:
    known: list[Key | None] = [None] * len(keys)
    ahead: Key | None = None
    for place in range(len(keys) - 1, -1, -1):
        ahead = keys[place] or ahead
        known[place] = ahead
    return known
