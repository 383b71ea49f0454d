"""Where things stand: module paths, layers, scopes, sections, and the lines that a text unfolds to.
No torch here.

``layers.3.attention.wq`` is a *path*; ``layers.3`` is its *layer*. A *scope* is the module or
bucket in which values are numbered, a *key* says to which section its lines belong.
"""

import functools
import itertools
import keyword
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pytest_gtrainer.graph import name_of, parts_of

NEAR = 2  # layers up to this far away are spelled relative to the section's own

RESERVED = frozenset({"P", "B", "I", "A", "L", "_", "fwd", "bwd", "saved", "bucket"})
"""First words of a reference, which no module path may begin with unquoted."""


class Layer(NamedTuple):
    """An element of a numbered container: ``layers.3``."""

    container: str
    number: int

    def __str__(self) -> str:
        return f"{spell(self.container)}[{self.number}]"


@functools.lru_cache(maxsize=1 << 16)
def split_layer(fqn: str) -> tuple[Layer | None, str]:
    """The layer that a module belongs to, and the rest of its path."""
    parts = parts_of(fqn)
    for place, part in enumerate(parts):
        if place and _is_index(part):
            return Layer(".".join(parts[:place]), int(part)), ".".join(parts[place + 1 :])
    return None, fqn


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal() and str(int(part)) == part


@functools.lru_cache(maxsize=1 << 16)
def spell(fqn: str) -> str:
    """A module path as a Python expression; the root is ``_``.

    >>> spell("layers.3.moe.experts.0"), spell("heads.en-de"), spell("L.x"), spell("")
    ('layers[3].moe.experts[0]', 'heads["en-de"]', '_["L"].x', '_')
    """
    if not fqn:
        return "_"
    first, *rest = parts_of(fqn)
    return (
        first if is_word(first) and first not in RESERVED else f"_[{_quoted(name_of(first))}]"
    ) + _tail(rest)


def _tail(parts: list[str]) -> str:
    return "".join(
        f"[{p}]" if _is_index(p) else f".{p}" if is_word(p) else f"[{_quoted(name_of(p))}]"
        for p in parts
    )


def is_word(part: str) -> bool:
    """Return whether Python reads it as this name: some letters it reads as others."""
    is_name = part.isidentifier() and not keyword.iskeyword(part)
    return is_name and (part.isascii() or unicodedata.normalize("NFKC", part) == part)


def _quoted(part: str) -> str:
    escaped = part.replace("\\", "\\\\").replace('"', '\\"')
    return (
        '"'
        + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped)
        + '"'
    )


@functools.lru_cache(maxsize=1 << 16)
def spell_from(fqn: str, here: Layer | None) -> str:
    """A module path as seen from a layer."""
    layer, rest = split_layer(fqn)
    if layer is None or here is None or layer.container != here.container:
        return spell(fqn)
    distance = layer.number - here.number
    if abs(distance) > NEAR:
        return spell(fqn)
    head = f"{spell(layer.container)}[i{distance:+d}]" if distance else "L"
    return head + _tail(parts_of(rest) if rest else [])


@functools.lru_cache(maxsize=1 << 16)
def spell_input(space: str, fqn: str, here: Layer | None) -> str:
    """A graph input as seen from a layer."""
    return (
        space + _tail(parts_of(fqn))
        if _is_index(fqn.partition(".")[0])
        else f"{space}.{spell_from(fqn, here)}"
    )


def common_parent(fqns: list[str]) -> str:
    """The longest path that all of them begin with."""
    levels = zip(*(parts_of(fqn) for fqn in fqns))  # noqa: B905 - the shortest path ends it
    return ".".join(
        names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels)
    )


_REACH = 4  # at most so many stretches of other layers lie inside one


class SectionKey(NamedTuple):
    """What a section belongs to: a space, and in it a layer or none."""

    space: str
    layer: Layer | None

    def __str__(self) -> str:
        return f"{self.space}.{self.layer}" if self.layer else self.space


class Scope(NamedTuple):
    """Where values are numbered: the owning modules (several only of a bucket) in one space."""

    owners: tuple[str, ...]
    space: str
    is_bucket: bool = False

    @property
    def layer(self) -> Layer | None:
        return split_layer(self.owners[0])[0]

    @property
    def key(self) -> SectionKey:
        """The section that its lines belong to."""
        return SectionKey(self.space, self.layer)

    @property
    def is_nowhere(self) -> bool:
        """Return whether no module is known."""
        return self.owners == ("",)

    @property
    def floats(self) -> bool:
        """Return whether its lines may stand in the section of another layer."""
        return self.is_bucket or self.is_nowhere


NOWHERE = Scope(("",), "fwd")


class Line(NamedTuple):
    """One statement under its ``with`` heading ("" for none), spelled as seen from its section."""

    heading: str
    text: str
    source: Any = (
        None  # its syntax tree where ``syntax`` has read it; ``text`` is then only its name
    )

    @property
    def name(self) -> str:
        """Return what it defines; a statement that defines nothing is its own name."""
        target, colon, _ = self.text.partition(": ")
        return target if colon else self.text


class GraphLine(NamedTuple):
    """One line of one section, unfolded."""

    section: str
    heading: str
    text: str

    def __str__(self) -> str:
        return " | ".join(part for part in self if part)


class Section(NamedTuple):
    """A stretch of the schedule of one layer in one space."""

    key: SectionKey
    lines: tuple[Line, ...]

    def unfolded(self) -> list[GraphLine]:
        return [GraphLine(str(self.key), line.heading, line.text) for line in self.lines]


def section_keys(own: Sequence[SectionKey], floating: Sequence[bool]) -> list[SectionKey]:
    """In which section each line stands, given where it belongs and whether it may float. A
    floating line (a collective, or a value of no known module) never opens a section: it stands
    with its own layer if that comes next, else where the schedule has put it.
    """
    fixed: list[SectionKey | None] = [None]
    ahead: list[SectionKey | None] = [None]  # the next key that is known
    for here, floats in zip(reversed(own), reversed(floating), strict=True):
        fixed.append(here if not floats or fixed[-1] == here else None)
        ahead.append(fixed[-1] or ahead[-1])
    keys: list[SectionKey] = []
    for here, key, after in zip(own, fixed[:0:-1], ahead[:0:-1], strict=True):
        if key is not None:
            keys.append(key)
        elif not keys:
            keys.append(SectionKey(here.space, None))
        elif keys[-1].space != here.space and after is not None and after.space == here.space:
            keys.append(after)  # the first collective of the backward does not stand in the forward
        else:
            keys.append(keys[-1])
    return _absorbed(keys)


def _absorbed(keys: list[SectionKey]) -> list[SectionKey]:
    """Give a layer the short stretches of its neighbours inside it, as prefetching puts there: else
    none are alike.
    """
    lengths = [(key, here.stop - here.start) for key, here in stretches(keys)]
    absorbed: list[SectionKey] = []
    first = 0
    while first < len(lengths):
        key, last, between, place = lengths[first][0], first, 0, first + 1
        while key.layer is not None and place < min(last + 2 + _REACH, len(lengths)):
            found, length = lengths[place]
            if found.space != key.space or (found == key and between >= length):
                break  # the layer goes on only if what lies between is less than what comes then
            if found == key:
                last, between = place, 0
            else:
                between += length
            place += 1
        absorbed += [key] * sum(length for _, length in lengths[first : last + 1])
        first = last + 1
    return absorbed


def stretches(keys: Sequence[SectionKey]) -> Iterable[tuple[SectionKey, slice]]:
    """Neighbours of one key, with where they stand."""
    start = 0
    for key, members in itertools.groupby(keys):
        stop = start + len(list(members))
        yield key, slice(start, stop)
        start = stop
