"""Gradients that autograd adds up, and in which order an eager run in chunks adds them.

The engine keeps one buffer per tensor and adds what arrives: ``((a + b) + c)``, older plus newer. In an
eager run in chunks the newest chunk's backward runs first, so contributions to a shared tensor arrive last
chunk first: ``((c1.a + c1.b) + c0.a) + c0.b``. To the activation that was cut, each chunk contributes
its own sum, and the joined whole arrives in the place of the region's contributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from pytest_gtrainer.passes.chunking._torch import is_engine_addition
from pytest_gtrainer.passes.chunking.regions import Region


@dataclass(frozen=True, slots=True)
class Contributions:
    """Consecutive contributions of one region, or (``region`` None) one from outside, as they arrive."""

    region: Region | None
    nodes: tuple[fx.Node, ...]


class Sums:
    """Additions outside of all bodies to which a body contributes.

    Attributes:
        tops: per sum its last addition, and what arrives in order.
        partial: its additions before that; only the next one reads them.
    """

    def __init__(self, graph: fx.Graph, region_of: Mapping[fx.Node, Region]) -> None:
        self.tops: dict[fx.Node, list[Contributions]] = {}
        self.partial: set[fx.Node] = set()
        arriving: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if node not in region_of and is_engine_addition(node):
                older, newer = operands(node)
                if older in arriving and len(older.users) == 1:
                    self.partial.add(older)
                    arriving[node] = [*arriving[older], newer]
                else:
                    arriving[node] = [older, newer]
        for node, nodes in arriving.items():
            if node not in self.partial and any(source in region_of for source in nodes):
                self.tops[node] = _grouped(nodes, region_of)
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
