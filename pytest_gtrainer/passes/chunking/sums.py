"""Gradients that autograd adds up, and in which order an eager run in chunks adds them.

The engine keeps one buffer per tensor and adds what arrives: ``((a + b) + c)``, older plus newer. In an
eager run in chunks the newest chunk's backward runs first, so contributions to a shared tensor arrive last
chunk first: ``((c1.a + c1.b) + c0.a) + c0.b``. To the activation that was cut, each chunk contributes
its own sum, and the joined whole arrives in the place of the region's contributions. The gradient that enters
a region may be such a contribution, too: a residual addition inside passes it on as it is. It is told from one
that a use outside makes by counting these uses: those behind the region in the forward contribute before it,
those in front after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from pytest_gtrainer._torch.chunking import is_engine_addition
from pytest_gtrainer.graph.conventions import FORWARD
from pytest_gtrainer.passes.chunking.regions import Key, Region, alike, propagates
from pytest_gtrainer.passes.chunking.twins import Twins


@dataclass(frozen=True, slots=True)
class Contributions:
    """Consecutive contributions of one region, or (``region`` None) one from outside, as they arrive.

    Of a region, nodes may be outside: gradients that enter it and are passed on as they are.
    """

    region: Region | None
    nodes: tuple[fx.Node, ...]


class Sums:
    """Additions outside of all bodies to which a body contributes.

    Attributes:
        tops: per sum its last addition, and what arrives in order.
        partial: its additions before that; only the next one reads them.
    """

    def __init__(self, twins: Twins, region_of: Mapping[fx.Node, Region]) -> None:
        self.tops: dict[fx.Node, list[Contributions]] = {}
        self.partial: set[fx.Node] = set()
        arriving: dict[fx.Node, list[fx.Node]] = {}
        regions = {region.key: region for region in region_of.values()}
        for node in twins.full.graph.nodes:
            if node not in region_of and is_engine_addition(node):
                older, newer = operands(node)
                if older in arriving and len(older.users) == 1:
                    self.partial.add(older)
                    arriving[node] = [*arriving[older], newer]
                else:
                    arriving[node] = [older, newer]
        for node, nodes in arriving.items():
            if node not in self.partial and any(source in region_of for source in nodes):
                groups = _grouped(nodes, region_of)
                self.tops[node] = _with_passed_on(groups, node, twins, regions) if twins.carries(node) else groups
        involved = {add for top in self.tops for add in _chain(top, self.partial)}
        self.partial &= involved


def operands(addition: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The older and the newer gradient that an addition of the engine's adds."""
    older, newer = addition.args
    assert isinstance(older, fx.Node)
    assert isinstance(newer, fx.Node)
    return older, newer


def _chain(top: fx.Node, partial: set[fx.Node]) -> list[fx.Node]:
    chain = []
    node, _ = operands(top)
    while node in partial:
        chain.append(node)
        node, _ = operands(node)
    return chain


def _grouped(nodes: list[fx.Node], region_of: Mapping[fx.Node, Region]) -> list[Contributions]:
    groups: list[Contributions] = []
    for node in nodes:
        region = region_of.get(node)
        if groups and region is not None and groups[-1].region is region:
            groups[-1] = Contributions(region, (*groups[-1].nodes, node))
        else:
            groups.append(Contributions(region, (node,)))
    return groups


def _with_passed_on(
    groups: list[Contributions], top: fx.Node, twins: Twins, regions: Mapping[Key, Region]
) -> list[Contributions]:
    """The groups of an activation's gradient, with what is passed on inside a region in that region's group."""
    contributing = [group.region for group in groups if group.region is not None]
    if len(contributing) != 1:
        return groups
    (region,) = contributing
    place = next(place for place, group in enumerate(groups) if group.region is region)
    behind, before = _uses_outside(regions.get(Key(region.key.root, FORWARD)), top, twins)
    first, last = min(place, behind), max(place, len(groups) - 1 - before)
    inner = tuple(node for group in groups[first : last + 1] for node in group.nodes)
    return [*groups[:first], Contributions(region, inner), *groups[last + 1 :]]


def _uses_outside(forward: Region | None, gradient: fx.Node, twins: Twins) -> tuple[int, int]:
    """How many uses the activation has behind the region in the forward, and how many in front of it."""
    if forward is None:
        return 0, 0
    body = set(forward.body)
    entering = {s: None for node in forward.body for s in node.all_input_nodes if s not in body and twins.carries(s)}
    uses = [
        user
        for source in entering
        if alike(source.meta["val"], gradient.meta["val"])
        for user in source.users
        if user not in body and propagates(user)
    ]
    behind = sum(use > forward.body[0] for use in uses)
    return behind, len(uses) - behind
