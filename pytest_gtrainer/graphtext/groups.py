"""Process groups as symbols: ``fsdp = group(range(0, 8))`` instead of a name that drifts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from pytest_gtrainer.graphtext._torch import ResolvedGroup, resolve_group
from pytest_gtrainer.graphtext.operators import operator_of, word

_MESH = "mesh_"
_UNSAID = ("undefined", "default_pg", "")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as the text shows it."""

    symbol: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.symbol} = group({spell_ranks(self.ranks)})"


def spell_ranks(ranks: Sequence[int] | None) -> str:
    """Ranks as a range where they are one.

    >>> spell_ranks([0, 1, 2, 3]), spell_ranks([0, 4]), spell_ranks([0, 1, 3]), spell_ranks([5])
    ('range(0, 4)', 'range(0, 8, 4)', '[0, 1, 3]', '[5]')
    """
    if ranks is None:
        return "None"
    if len(ranks) < 2:
        return repr(list(ranks))
    step = ranks[1] - ranks[0]
    if step <= 0 or list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)):
        return repr(list(ranks))
    end = ranks[0] + step * len(ranks)
    return f"range({ranks[0]}, {end})" if step == 1 else f"range({ranks[0]}, {end}, {step})"


def mesh_dimension(ranks: Sequence[int], mesh: Mapping[str, int]) -> str | None:
    """The dimension of a mesh over all ranks, outermost first, along which these ranks lie.

    >>> mesh = {"dp": 2, "fsdp": 4}
    >>> mesh_dimension([0, 4], mesh), mesh_dimension([4, 5, 6, 7], mesh), mesh_dimension([0, 1], mesh)
    ('dp', 'fsdp', None)
    """
    stride = math.prod(mesh.values())
    for name, extent in mesh.items():
        stride //= extent
        first = ranks[0] // stride % extent if ranks else 0
        if first == 0 and list(ranks) == [ranks[0] + place * stride for place in range(extent)]:
            return name
    return None


def groups_of(gm: fx.GraphModule, mesh: Mapping[str, int]) -> dict[str, Group]:
    """The groups that a graph's collectives name, in order of first use."""
    groups: dict[str, Group] = {}
    taken: set[str] = set()
    for name in _group_names(gm):
        if name not in groups:
            found = resolve_group(name)
            symbol = _unused(_role(found, mesh), taken)
            groups[name] = Group(symbol, found.ranks if found else None)
    return groups


def _group_names(gm: fx.GraphModule) -> list[str]:
    names = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        for place in operator_of(node).group_arguments:
            value = _argument(node, place)
            if isinstance(value, str):
                names.append(value)
    return names


def _argument(node: fx.Node, place: int | str) -> object:
    if isinstance(place, str):
        return node.kwargs.get(place)
    return node.args[place] if place < len(node.args) else None


def _role(found: ResolvedGroup | None, mesh: Mapping[str, int]) -> str:
    if found is None:
        return "group"
    if found.description.startswith(_MESH) and found.description != "mesh_default":
        return word(found.description.removeprefix(_MESH))
    dimension = mesh_dimension(found.ranks, mesh)
    if dimension is not None:
        return word(dimension)
    if found.description not in _UNSAID and found.description.isidentifier():
        return found.description
    return "world" if found.description == "default_pg" else "group"


def _unused(symbol: str, taken: set[str]) -> str:
    count, name = 1, symbol
    while name in taken:
        count += 1
        name = f"{symbol}_{count}"
    taken.add(name)
    return name
