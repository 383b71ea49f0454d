"""Process groups as symbols: ``fsdp = group(range(0, 8))`` instead of a name that drifts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from pytest_gtrainer._torch.graph_text import ResolvedGroup, groups_with_ranks, named_groups, resolve_group
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


def groups_of(
    gm: fx.GraphModule, mesh: Mapping[str, int], collectives: Iterable[fx.Node] | None = None
) -> dict[str, Group]:
    """The groups that a graph's collectives name, in order of first use; all nodes are asked if they are not given."""
    told: Mapping[str, tuple[int, ...] | None] = gm.meta.get("gt_groups", {})  # what the text said that it came from
    groups: dict[str, Group] = {}
    taken: set[str] = set()
    for name in _group_names(gm.graph.nodes if collectives is None else collectives):
        if name not in groups:
            found = resolve_group(name)
            role = word(name) if found is None and name in told else _role(found, mesh)
            groups[name] = Group(_unused(role, taken), found.ranks if found else told.get(name))
    return groups


def names_of_groups(told: Mapping[str, tuple[int, ...] | None], given: Mapping[str, str]) -> dict[str, str]:
    """For each symbol of a text the name of a group of this process, each group for one symbol only.

    A group of its ranks that the text would call so, else any other of its ranks; where there is none
    the symbol itself.
    """
    names = {symbol: given[symbol] for symbol in told if symbol in given}
    free = {name: group for name, group in named_groups().items() if name not in names.values()}
    for is_wanted in (_is_called, _is_any):
        for symbol, ranks in told.items():
            fits = (name for name, group in free.items() if group.ranks == ranks and is_wanted(group, symbol))
            if symbol not in names and (name := next(fits, None)) is not None:
                names[symbol] = name
                del free[name]
    return {symbol: names.get(symbol, symbol) for symbol in told}


def _is_called(group: ResolvedGroup, symbol: str) -> bool:
    return group.description == _MESH + symbol or _role(group, {}) == symbol


def _is_any(group: ResolvedGroup, symbol: str) -> bool:
    return True


def groups_of_ranks(
    needed: Iterable[tuple[int, ...]], mesh: Mapping[str, int], known: Mapping[tuple[int, ...], str]
) -> dict[tuple[int, ...], Group]:
    """Groups that are known by their ranks alone, in order of first use; some may have a symbol already."""
    groups: dict[tuple[int, ...], Group] = {}
    taken = set(known.values())
    for ranks in needed:
        if ranks not in groups:
            symbol = known.get(ranks) or _unused(_role_of_ranks(ranks, mesh), taken)
            groups[ranks] = Group(symbol, ranks)
    return groups


def _role_of_ranks(ranks: tuple[int, ...], mesh: Mapping[str, int]) -> str:
    """As the mesh that made a group of these ranks called it, else as any other."""
    found = sorted(groups_with_ranks(ranks), key=lambda group: (not _is_of_mesh(group), group.description))
    return _role(found[0] if found else ResolvedGroup(ranks, ""), mesh)


def _is_of_mesh(group: ResolvedGroup) -> bool:
    return group.description.startswith(_MESH) and group.description != "mesh_default"


def _group_names(nodes: Iterable[fx.Node]) -> list[str]:
    names = []
    for node in nodes:
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
    if _is_of_mesh(found):
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
