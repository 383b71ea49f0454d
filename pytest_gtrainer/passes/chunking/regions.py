"""Which nodes each chunk repeats: the bodies of the regions.

*Idea.* A node of a root belongs to the body if the chunk dimension influences it: its own extents or literals
differ between the twins; it reads another node of the body, or something outside that carries the dimension;
it draws random numbers, writes, or has to do with memory that a body writes to (each chunk must see what the
chunk before has left). Everything else of the root is shared: parameters, their all-gathers and casts (G4).
Nodes without a module follow those around them: autograd's additions of gradients, parts of several results,
backwards of hand-written functions. *Cost.* Two walks over the graph.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import is_engine_addition
from pytest_gtrainer.graph.conventions import BACKWARD, FORWARD, direction, node_fqn
from pytest_gtrainer.graph.effects import is_random, mutates
from pytest_gtrainer.passes.chunking.config import ChunkConfig
from pytest_gtrainer.passes.chunking.errors import ChunkError
from pytest_gtrainer.passes.chunking.reductions import gathers_once, reduction_steps
from pytest_gtrainer.passes.chunking.storages import Storages
from pytest_gtrainer.passes.chunking.twins import Twins


@dataclass(frozen=True, slots=True)
class Key:
    """A region: one root in one direction."""

    root: str
    direction: str


@dataclass(slots=True, eq=False)
class Region:
    """What every chunk of one root repeats in one direction, in graph order."""

    key: Key
    body: list[fx.Node] = field(default_factory=list)


def find_regions(twins: Twins, config: ChunkConfig, storages: Storages) -> list[Region]:
    """The regions of a graph, each with a body that is not empty, in graph order.

    Raises:
        ChunkError: no module of the graph matches (G2), or the chunk dimension reaches none that does.
    """
    search = _Search(twins, config, storages)
    regions: dict[Key, Region] = {}
    for node, key in search.members().items():
        regions.setdefault(key, Region(key)).body.append(node)
    _check_matches(search.roots, regions, config, twins.full)
    return list(regions.values())


class _Search:
    """One search for bodies; ``roots`` is the root of every node that lies in one."""

    def __init__(self, twins: Twins, config: ChunkConfig, storages: Storages) -> None:
        self.twins, self.graph, self.storages = twins, twins.full.graph, storages
        self.shared = _left_to_the_sum(self.graph, config)
        self.roots = {
            node: root for node in self.graph.nodes if (root := config.root_of(node_fqn(node))) and _calls(node)
        }
        self.written = self._written()
        self.found: dict[fx.Node, Key] = {}
        self.entering: dict[Key, dict[fx.Node, None]] = {}

    def members(self) -> dict[fx.Node, Key]:
        """Every node of a body, with its region."""
        loose: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if not _calls(node) or node in self.shared:
                continue
            root = self.roots.get(node)
            if node.target is operator.getitem:
                key = self.found.get(node.all_input_nodes[0])
                loose |= {node: None} if node.all_input_nodes[0] in loose else {}
            elif root and not is_engine_addition(node):
                own = Key(root, direction(node))
                key = own if self._is_influenced(node, own) else None
            else:
                key = None if node_fqn(node) and not is_engine_addition(node) else self._followed(node)
                loose |= {node: None} if key is not None else {}
            if key is not None:
                self._add(node, key)
        for node in reversed(loose):
            if not self._stays(node):
                del self.found[node]
        return self.found

    def _add(self, node: fx.Node, key: Key) -> None:
        self.found[node] = key
        entering = [source for source in node.all_input_nodes if self.twins.carries(source)]
        self.entering.setdefault(key, {}).update((s, None) for s in entering if self.found.get(s) != key)

    def _written(self) -> dict[Key, set[fx.Node]]:
        """Per region the memory that it writes to."""
        written: dict[Key, set[fx.Node]] = {}
        for node, storages in self.storages.written.items():
            if root := self.roots.get(node):
                written.setdefault(Key(root, direction(node)), set()).update(storages)
        return written

    def _is_influenced(self, node: fx.Node, key: Key) -> bool:
        if self.twins.differs(node) or is_random(node) or mutates(node):
            return True
        written = self.written.get(key)
        if written and any(self.storages.of[near] in written for near in (node, *node.all_input_nodes)):
            return True
        return any(self._influences(source, key) for source in node.all_input_nodes)

    def _influences(self, source: fx.Node, key: Key) -> bool:
        home = self.found.get(source)
        if home is not None and home.root == key.root:
            return True
        return self.twins.carries(source) or (source.op == "get_attr" and self.twins.differs(source))

    def _followed(self, node: fx.Node) -> Key | None:
        """The region that a node without a module may belong to: that of its newest operand."""
        for source in reversed(node.all_input_nodes):
            home = self.found.get(source)
            if home is not None and home.direction == direction(node):
                return home
        return None

    def _stays(self, node: fx.Node) -> bool:
        """Whether a node without a module is part of the body: the body reads it, or it is a chunk's own gradient."""
        key = self.found[node]
        if any(self._reads(user, key) for user in node.users):
            return True
        return is_engine_addition(node) and self.twins.carries(node) and self._adds_within(node, key)

    def _reads(self, user: fx.Node, key: Key) -> bool:
        home = self.found.get(user)
        return home is not None and home.root == key.root

    def _adds_within(self, node: fx.Node, key: Key) -> bool:
        """Whether all that an addition adds comes from uses inside the region.

        An operand from outside may be the gradient that enters the region, passed on by a residual
        addition inside it. It comes from outside if a value that enters the region forwards is used outside, too.
        """
        if all(self.found.get(source) == key for source in node.all_input_nodes):
            return True
        forward, value = Key(key.root, FORWARD), node.meta["val"]
        entering = (source for source in self.entering.get(forward, ()) if alike(source.meta["val"], value))
        return not any(
            self.found.get(user) != forward and propagates(user) for source in entering for user in source.users
        )


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether one may be the other's gradient."""
    return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def propagates(user: fx.Node) -> bool:
    """Whether a use may have a gradient."""
    value = user.meta.get("val")
    return direction(user) != BACKWARD and isinstance(value, torch.Tensor) and value.is_floating_point()


def _left_to_the_sum(graph: fx.Graph, config: ChunkConfig) -> set[fx.Node]:
    """The steps of gradients' reductions that no chunk repeats."""
    if gathers_once(graph):
        return reduction_steps(graph)
    return reduction_steps(graph, up_to_casts=True) if config.early_grad_accumulation else set()


def _calls(node: fx.Node) -> bool:
    return node.op == "call_function"


def _check_matches(
    roots: dict[fx.Node, str], regions: dict[Key, Region], config: ChunkConfig, gm: fx.GraphModule
) -> None:
    names = set(roots.values())
    if not names:
        outermost = sorted({node_fqn(node).partition(".")[0] for node in gm.graph.nodes} - {""})
        raise ChunkError(
            f"module_fqn={config.module_fqn!r} matches no module of the graph; its outermost modules are "
            f"{', '.join(outermost) or 'not annotated'}"
        )
    untouched = sorted(names - {key.root for key in regions})
    if untouched:
        raise ChunkError(
            f"nothing in {', '.join(untouched)} depends on the {config.chunk_dim} dimension: "
            "is the twin traced at another extent of it?"
        )
