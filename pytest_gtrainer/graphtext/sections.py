"""Module paths, layers, scopes, sections, and the lines that a text unfolds to. No torch here.

``layers.3.attention.wq`` is a *path*; ``layers.3`` is its *layer*. A *scope* is the module or
bucket in which values are numbered; its *key* names the section of its lines.
"""

import functools
import itertools
import keyword
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pytest_gtrainer.graph import name_of, split_path

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
    """Return the layer that a module belongs to, and the rest of its path.

    >>> split_layer("layers.3.moe.experts.0"), split_layer("norm.weight")
    ((Layer(container='layers', number=3), 'moe.experts.0'), (None, 'norm.weight'))
    """
    parts = split_path(fqn)
    for place, part in enumerate(parts):
        if place and _is_index(part):
            return Layer(".".join(parts[:place]), int(part)), ".".join(parts[place + 1 :])
    return None, fqn


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal() and str(int(part)) == part


@functools.lru_cache(maxsize=1 << 16)
def spell(fqn: str) -> str:
    """Return a module path as a Python expression; the root is ``_``.

    >>> spell("layers.3.moe.experts.0"), spell("heads.en-de"), spell("L.x"), spell("")
    ('layers[3].moe.experts[0]', 'heads["en-de"]', '_["L"].x', '_')
    """
    if not fqn:
        return "_"
    first, *rest = split_path(fqn)
    if not is_word(first) or first in RESERVED:
        first = f"_[{_quoted(name_of(first))}]"
    return first + _tail(rest)


def _tail(parts: list[str]) -> str:
    spelled = ""
    for part in parts:
        if _is_index(part):
            spelled += f"[{part}]"
        elif is_word(part):
            spelled += f".{part}"
        else:
            spelled += f"[{_quoted(name_of(part))}]"
    return spelled


def is_word(part: str) -> bool:
    """Return whether Python reads a name as it is: it normalizes some letters to others."""
    is_name = part.isidentifier() and not keyword.iskeyword(part)
    return is_name and (part.isascii() or unicodedata.normalize("NFKC", part) == part)


def _quoted(part: str) -> str:
    escaped = part.replace("\\", "\\\\").replace('"', '\\"')
    printable = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped]
    return f'"{"".join(printable)}"'


@functools.lru_cache(maxsize=1 << 16)
def spell_from(fqn: str, here: Layer | None) -> str:
    """Return a module path as seen from a layer.

    >>> here = Layer("layers", 3)
    >>> [spell_from(f"layers.{number}.wq", here) for number in (3, 4, 9)]
    ['L.wq', 'layers[i+1].wq', 'layers[9].wq']
    """
    layer, rest = split_layer(fqn)
    if layer is None or here is None or layer.container != here.container:
        return spell(fqn)
    distance = layer.number - here.number
    if abs(distance) > NEAR:
        return spell(fqn)
    head = "L"
    if distance:
        head = f"{spell(layer.container)}[i{distance:+d}]"
    if rest:
        head += _tail(split_path(rest))
    return head


@functools.lru_cache(maxsize=1 << 16)
def spell_input(space: str, fqn: str, here: Layer | None) -> str:
    """Return a graph input as seen from a layer: ``P.L.wq.weight``, ``I[0]``."""
    if _is_index(fqn.partition(".")[0]):
        return space + _tail(split_path(fqn))
    return f"{space}.{spell_from(fqn, here)}"


def common_parent(fqns: list[str]) -> str:
    """Return the longest path that all of them begin with."""
    common = []
    for names in zip(*map(split_path, fqns), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


_REACH = 4  # the most stretches of other layers that a section may have inside it


class SectionKey(NamedTuple):
    """The space of a section, and its layer if it has one."""

    space: str
    layer: Layer | None

    def __str__(self) -> str:
        if self.layer is None:
            return self.space
        return f"{self.space}.{self.layer}"


class Scope(NamedTuple):
    """The module, or the modules of a bucket, in which values of one space are numbered."""

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
    def is_movable(self) -> bool:
        """Return whether its lines may stand in the section of another layer."""
        return self.is_bucket or self.is_nowhere


NOWHERE = Scope(("",), "fwd")


class Line(NamedTuple):
    """One statement under its ``with`` heading ("" for none), spelled as seen from its section."""

    heading: str
    text: str
    # Its syntax tree, if ``parsing`` has read the line; ``text`` is then only its name.
    source: Any = None

    @property
    def name(self) -> str:
        """The name that it defines; a statement that defines nothing is its own name."""
        return self.text.partition(": ")[0]


class GraphLine(NamedTuple):
    """One line of one section, unfolded."""

    section: str
    heading: str
    text: str

    def __str__(self) -> str:
        return " | ".join(filter(None, self))


class Section(NamedTuple):
    """A stretch of the schedule of one layer in one space."""

    key: SectionKey
    lines: tuple[Line, ...]

    def unfolded(self) -> list[GraphLine]:
        return [GraphLine(str(self.key), line.heading, line.text) for line in self.lines]


def section_keys(own: Sequence[SectionKey], are_movable: Sequence[bool]) -> list[SectionKey]:
    """Return the key of the section in which each line stands.

    A movable line never opens a section. It stands in the section of its own layer if that comes
    next, else where the schedule has put it.

    Args:
        own: the keys of the lines' scopes.
        are_movable: whether each line may stand in the section of another layer, as collectives
            and values of no known module may.
    """
    # From the last line to the first, after a None that ends them: the key of each line that stands
    # in its own section, and the next such key. A movable line does if the next line has its key.
    fixed: list[SectionKey | None] = [None]
    ahead: list[SectionKey | None] = [None]
    for here, is_movable in zip(reversed(own), reversed(are_movable), strict=True):
        fixed.append(here if not is_movable or fixed[-1] == here else None)
        ahead.append(fixed[-1] or ahead[-1])
    keys: list[SectionKey] = []
    for here, key, after in zip(own, fixed[:0:-1], ahead[:0:-1], strict=True):
        if key is not None:
            keys.append(key)
        elif not keys:
            keys.append(SectionKey(here.space, None))
        elif keys[-1].space != here.space and after is not None and after.space == here.space:
            # The first collective of the backward does not stand in the forward.
            keys.append(after)
        else:
            keys.append(keys[-1])

    return _absorb(keys)


def _absorb(keys: list[SectionKey]) -> list[SectionKey]:
    """Give a layer the short stretches of its neighbours inside it.

    Prefetching puts collectives of one layer into the middle of another. Cut there, sections of
    equal layers would not be equal.
    """
    lengths = [(key, here.stop - here.start) for key, here in stretches(keys)]
    absorbed: list[SectionKey] = []
    first = 0
    while first < len(lengths):
        key, last, between, place = lengths[first][0], first, 0, first + 1
        while key.layer is not None and place < min(last + 2 + _REACH, len(lengths)):
            found, length = lengths[place]
            # The layer goes on only if its next stretch is longer than all that lies between.
            if found.space != key.space or (found == key and between >= length):
                break
            if found == key:
                last, between = place, 0
            else:
                between += length
            place += 1
        absorbed += [key] * sum(length for _, length in lengths[first : last + 1])
        first = last + 1

    return absorbed


def stretches(keys: Sequence[SectionKey]) -> Iterable[tuple[SectionKey, slice]]:
    """Yield each key with the slice of neighbours that have it."""
    start = 0
    for key, members in itertools.groupby(keys):
        stop = start + len(list(members))
        yield key, slice(start, stop)
        start = stop
