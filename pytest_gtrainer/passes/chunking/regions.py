"""Which nodes each chunk repeats: the bodies of the regions.

*Idea.* A node of a root belongs to the body if the chunk dimension influences it: its extents or literals differ
between the twins; it reads the body, or something outside that carries the dimension; it draws random numbers, writes,
or meets memory that a body writes to. All else is shared: parameters, their all-gathers and casts (G4). Nodes without a
module follow those around them.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import is_engine_addition
from pytest_gtrainer._torch.passes import ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.graph.collectives import chain_to_output, only_wait
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    GATHERS_ONCE,
    direction,
    is_random,
    is_view,
    mutates,
    node_fqn,
    storage_of,
    walked,
    written_operands,
)
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, is_inexact
from pytest_gtrainer.passes.chunking.twins import Twins
from pytest_gtrainer.passes.collectives import PADDING


class Storages:
    """The storage ``of`` every node, as the node that made it, and what is ``written`` by those that write."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of = {node: storage_of(node) for node in graph.nodes}
        written = {node: written_operands(node) for node in graph.nodes}
        self.written = {
            node: [self.of[each] for each in operands]
            for node, operands in written.items()
            if operands
        }


_REDUCTIONS = (REDUCE_SCATTER, ALL_REDUCE)


def gradient_reductions(graph: fx.Graph) -> set[fx.Node]:
    """The collectives of gradients: their result reaches the output by unary steps, or, padded, another of them."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.target in _REDUCTIONS
            and direction(node) == BACKWARD
            and (wait := only_wait(node)) is not None
        ):
            behind = walked(
                wait.users,
                operator.attrgetter("users"),
                lambda n: n in found or n.target in PADDING,
            )
            if chain_to_output(wait, graph.output_node()) is not None or behind & found:
                found.add(node)
    return found


def reduction_steps(graph: fx.Graph, *, up_to_casts: bool = False) -> set[fx.Node]:
    """All nodes of gradients' reductions: casts and pads before collectives, what is behind up to the next addition.
    ``up_to_casts``: only what a sum of gradients may move in front of, so no cast to another dtype or device (J2)."""

    def goes_on(node: fx.Node) -> bool:
        return node.op == "call_function" and not is_engine_addition(node)

    steps: set[fx.Node] = set()
    for launch in gradient_reductions(graph):
        behind = walked(launch.users, operator.attrgetter("users"), goes_on)
        if up_to_casts and any(map(_casts, behind)):
            continue
        steps |= {launch} | behind
        number = launch.meta.get("seq_nr")

        def is_before(node: fx.Node, number: int | None = number) -> bool:
            same = direction(node) == BACKWARD and node.meta.get("seq_nr") == number
            return same and goes_on(node) and not (up_to_casts and _casts(node))

        if number is not None:
            steps |= walked(
                launch.all_input_nodes, operator.attrgetter("all_input_nodes"), is_before
            )
    return steps


def _casts(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    value, given = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (value.dtype, value.device) != (given.dtype, given.device)


@dataclass(frozen=True, slots=True)
class RegionKey:
    """A region: one root in one direction."""

    root: str
    direction: str


@dataclass(slots=True, eq=False)
class Region:
    """What every chunk of one root repeats in one direction, in graph order."""

    key: RegionKey
    body: list[fx.Node] = field(default_factory=list)


def find_regions(twins: Twins, config: ChunkConfig, storages: Storages) -> list[Region]:
    """The regions of a graph in graph order; no module must match in vain (G2), and no body be empty."""
    search = _BodySearch(twins, config, storages)
    regions: dict[RegionKey, Region] = {}
    for node, key in search.members().items():
        regions.setdefault(key, Region(key)).body.append(node)
    names = set(search.roots.values())
    if not names:
        outermost = sorted(
            {node_fqn(node).partition(".")[0] for node in twins.full.graph.nodes} - {""}
        )
        wrong = f"module_fqn={config.module_fqn!r} matches no module of the graph"
        raise ChunkError(
            f"{wrong}; its outermost modules are {', '.join(outermost) or 'not annotated'}"
        )
    if untouched := sorted(names - {key.root for key in regions}):
        wrong = f"nothing in {', '.join(untouched)} depends on the {config.chunk_dim} dimension"
        raise ChunkError(f"{wrong}: is the twin traced at another extent of it?")
    return list(regions.values())


class _BodySearch:
    """One search for bodies; ``roots`` is the root of every node that lies in one."""

    def __init__(self, twins: Twins, config: ChunkConfig, storages: Storages) -> None:
        self.twins, self.graph, self.storages = twins, twins.full.graph, storages
        once = self.graph.output_node().meta.get(GATHERS_ONCE)
        is_shared = (
            once or config.early_grad_accumulation
        )  # steps of gradients' reductions that no chunk repeats
        self.shared = reduction_steps(self.graph, up_to_casts=not once) if is_shared else set()
        self.calls = [node for node in self.graph.nodes if node.op == "call_function"]
        self.roots = {node: root for node in self.calls if (root := config.root_of(node_fqn(node)))}
        self.written: dict[RegionKey, set[fx.Node]] = {}  # per region the memory that it writes to
        for node, written in storages.written.items():
            if node in self.roots:
                self.written.setdefault(RegionKey(self.roots[node], direction(node)), set()).update(
                    written
                )
        self.forward_of: dict[
            tuple[str, int | None], list[fx.Node]
        ] = {}  # by root and autograd's number
        self.with_backward: set[int | None] = {
            None
        }  # numbers of forwards whose backward runs an operator
        for node in self.calls:
            number = node.meta.get("seq_nr")
            if direction(node) == BACKWARD:
                self.with_backward |= set() if is_engine_addition(node) else {number}
            elif node in self.roots:
                self.forward_of.setdefault((self.roots[node], number), []).append(node)
        self.found: dict[fx.Node, RegionKey] = {}
        self.entering: dict[RegionKey, dict[fx.Node, None]] = {}

    def members(self) -> dict[fx.Node, RegionKey]:
        """Every node of a body, with its region."""
        loose: dict[fx.Node, None] = {}
        for node in self.calls:
            if node in self.shared:
                continue
            root, key = self.roots.get(node, ""), None
            if node.target is operator.getitem:
                key = self.found.get(node.all_input_nodes[0])
                loose |= {node: None} if node.all_input_nodes[0] in loose else {}
            elif root and not is_engine_addition(node):
                own = RegionKey(root, direction(node))
                key = own if self._is_influenced(node, own) else None
            elif not node_fqn(node) or is_engine_addition(
                node
            ):  # it follows its newest operand in this direction
                homes = (self.found.get(source) for source in reversed(node.all_input_nodes))
                key = next(
                    (home for home in homes if home and home.direction == direction(node)), None
                )
                loose |= {node: None} if key is not None else {}
            if key is not None:
                self.found[node] = key
                entering = [source for source in node.all_input_nodes if source in self.twins.dims]
                self.entering.setdefault(key, {}).update(
                    (s, None) for s in entering if self.found.get(s) != key
                )
        for node in reversed(loose):
            if not self._stays(node):
                del self.found[node]
        return self.found

    def _is_influenced(self, node: fx.Node, key: RegionKey) -> bool:
        if node in self.twins.differing or is_random(node) or mutates(node):
            return True
        written = self.written.get(key)
        if written and any(
            self.storages.of[near] in written for near in (node, *node.all_input_nodes)
        ):
            return True
        return any(
            self._is_in(source, key.root)
            or source in self.twins.dims
            or (source.op == "get_attr" and source in self.twins.differing)
            for source in node.all_input_nodes
        )

    def _differentiated(self, node: fx.Node, root: str) -> fx.Node | None:
        """What a gradient belongs to, if each chunk computes that from parameters, with no operator in its backward."""
        if is_engine_addition(node):
            first, *others = (self._differentiated(source, root) for source in node.all_input_nodes)
            return first if all(other is first for other in others) else None
        uses = self.forward_of.get((root, node.meta.get("seq_nr")), ())
        read = [source for use in uses for source in use.all_input_nodes]
        computed = (
            source for source in read if self.roots.get(source) == root and source not in self.found
        )
        handed_on = (
            source for source in computed if source.meta.get("seq_nr") not in self.with_backward
        )
        return next((source for source in handed_on if not is_view(source.target)), None)

    def _is_in(self, node: fx.Node, root: str) -> bool:
        home = self.found.get(node)
        return home is not None and home.root == root

    def _stays(self, node: fx.Node) -> bool:
        """Whether a node without a module is the body's: the body reads it, or it adds only what comes from inside."""
        key = self.found[node]
        if any(self._is_in(user, key.root) for user in node.users) or self._differentiated(
            node, key.root
        ):
            return True
        if not is_engine_addition(node) or node not in self.twins.dims:
            return False
        if all(self.found.get(source) == key for source in node.all_input_nodes):
            return True
        forward, value = RegionKey(key.root, FORWARD), node.meta["val"]
        entering = (
            source for source in self.entering.get(forward, ()) if alike(source.meta["val"], value)
        )
        return not any(
            self.found.get(user) != forward and propagates(user)
            for source in entering
            for user in source.users
        )


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether one may be the other's gradient."""
    return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def propagates(user: fx.Node) -> bool:
    """Whether a use may have a gradient."""
    return direction(user) != BACKWARD and is_inexact(user.meta.get("val"))
