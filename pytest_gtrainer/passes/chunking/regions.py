"""Find the bodies of the regions: the nodes that each chunk repeats.

*Idea.* A node of a root belongs to the body if the chunk dimension influences it: its extents or
literals differ between the twins; it reads the body, or something outside that carries the
dimension; it draws random numbers, writes, or meets memory that a body writes to. All else is
shared: parameters, their all-gathers and casts. Nodes without a module follow those around them.
"""

import operator
from dataclasses import dataclass, field
from operator import attrgetter

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
    walk,
    written_operands,
)
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, is_inexact
from pytest_gtrainer.passes.chunking.twins import Twins
from pytest_gtrainer.passes.collectives import PADDING


class Storages:
    """The memory of a graph's values.

    Attributes:
        of: the node that made the storage of each node's value.
        written: the storages that a node writes to, for the nodes that write.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.of = {node: storage_of(node) for node in graph.nodes}
        self.written: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            operands = written_operands(node)
            if operands:
                self.written[node] = [self.of[operand] for operand in operands]


def gradient_reductions(graph: fx.Graph) -> set[fx.Node]:
    """Return the collectives that reduce gradients.

    The result of such a collective reaches the output by unary steps only. Or it is padded and
    reduced by another one: hybrid sharding reduces twice.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target not in (REDUCE_SCATTER, ALL_REDUCE) or direction(node) != BACKWARD:
            continue
        wait = only_wait(node)
        if wait is None:
            continue
        behind = walk(wait.users, attrgetter("users"), lambda n: n in found or n.target in PADDING)
        if chain_to_output(wait, graph.output_node()) is not None or behind & found:
            found.add(node)
    return found


def reduction_steps(graph: fx.Graph, *, up_to_casts: bool = False) -> set[fx.Node]:
    """Return all nodes of the reductions of gradients.

    These are casts and pads in front of the collectives, and what is after them up to the next
    addition.

    Args:
        up_to_casts: return only what a sum of gradients may move in front of. A cast to another
            dtype rounds each term, so a sum after it has other bits.
    """

    def goes_on(node: fx.Node) -> bool:
        return node.op == "call_function" and not is_engine_addition(node)

    steps: set[fx.Node] = set()
    for launch in gradient_reductions(graph):
        behind = walk(launch.users, attrgetter("users"), goes_on)
        if up_to_casts and any(map(_casts, behind)):
            continue
        steps |= {launch} | behind
        number = launch.meta.get("seq_nr")
        if number is None:
            continue

        def is_before(node: fx.Node, number: int = number) -> bool:
            # Casts and pads in front run in the backward of the same operator of the forward.
            is_same = direction(node) == BACKWARD and node.meta.get("seq_nr") == number
            return is_same and goes_on(node) and not (up_to_casts and _casts(node))

        steps |= walk(launch.all_input_nodes, attrgetter("all_input_nodes"), is_before)
    return steps


def _casts(node: fx.Node) -> bool:
    """Return whether a node changes the dtype or the device."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (value.dtype, value.device) != (source.dtype, source.device)


@dataclass(frozen=True, slots=True)
class RegionKey:
    """A region: one root in one direction."""

    root: str
    direction: str


@dataclass(slots=True, eq=False)
class Region:
    """A body: the nodes that every chunk of one root repeats in one direction, in graph order."""

    key: RegionKey
    body: list[fx.Node] = field(default_factory=list)


def find_regions(twins: Twins, config: ChunkConfig, storages: Storages) -> list[Region]:
    """Return the regions of a graph in graph order.

    Raises:
        ChunkError: no module matches, or a matching one has no body.
    """
    search = _BodySearch(twins, config, storages)
    regions: dict[RegionKey, Region] = {}
    for node, key in search.find_bodies().items():
        regions.setdefault(key, Region(key)).body.append(node)
    names = set(search.roots.values())
    if not names:
        modules = {node_fqn(node).partition(".")[0] for node in twins.full.graph.nodes}
        outermost = ", ".join(sorted(modules - {""}))
        raise ChunkError(
            f"module_fqn={config.module_fqn!r} matches no module of the graph; its outermost "
            f"modules are {outermost or 'not annotated'}"
        )
    untouched = sorted(names - {key.root for key in regions})
    if untouched:
        raise ChunkError(
            f"nothing in {', '.join(untouched)} depends on the {config.chunk_dim} dimension: is "
            "the twin traced at another extent of it?"
        )
    return list(regions.values())


class _BodySearch:
    """One search for bodies.

    Attributes:
        roots: the root of every node that lies in one.
        shared: steps of the reductions of gradients that no chunk repeats.
        written: per region the memory that it writes to.
        forward_of: the nodes of a root's forward by autograd's number (``seq_nr``).
        with_backward: numbers of forwards whose backward runs an operator.
        found: the nodes of bodies, with their region.
        entering: per region the nodes with the chunk dimension that it reads from outside.
    """

    def __init__(self, twins: Twins, config: ChunkConfig, storages: Storages) -> None:
        self.twins, self.graph, self.storages = twins, twins.full.graph, storages
        self.found: dict[fx.Node, RegionKey] = {}
        self.entering: dict[RegionKey, dict[fx.Node, None]] = {}
        self.shared: set[fx.Node] = set()
        # Where parameters are gathered once, their gradients are complete before the reduction.
        gathers_once = self.graph.output_node().meta.get(GATHERS_ONCE)
        if gathers_once or config.early_grad_accumulation:
            self.shared = reduction_steps(self.graph, up_to_casts=not gathers_once)
        self.roots: dict[fx.Node, str] = {}
        self.written: dict[RegionKey, set[fx.Node]] = {}
        self.forward_of: dict[tuple[str, int | None], list[fx.Node]] = {}
        self.with_backward: set[int | None] = {None}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            root = config.root_of(node_fqn(node))
            if root:
                self.roots[node] = root
                key = RegionKey(root, direction(node))
                self.written.setdefault(key, set()).update(storages.written.get(node, ()))
            number = node.meta.get("seq_nr")
            if direction(node) != BACKWARD and root:
                self.forward_of.setdefault((root, number), []).append(node)
            elif direction(node) == BACKWARD and not is_engine_addition(node):
                self.with_backward.add(number)

    def find_bodies(self) -> dict[fx.Node, RegionKey]:
        """Return every node of a body, with its region."""
        loose: dict[fx.Node, None] = {}  # nodes that name no module
        for node in self.graph.nodes:
            if node.op != "call_function" or node in self.shared:
                continue
            key = None
            if node.target is operator.getitem:
                source = node.all_input_nodes[0]
                key = self.found.get(source)
                if source in loose:
                    loose[node] = None
            elif node in self.roots and not is_engine_addition(node):
                own = RegionKey(self.roots[node], direction(node))
                key = own if self._is_influenced(node, own) else None
            elif not node_fqn(node) or is_engine_addition(node):
                key = self._region_of_last_operand(node)
                if key is not None:
                    loose[node] = None
            if key is not None:
                self._add_to_body(node, key)
        # Last first: a node stays if one that reads it stays.
        for node in reversed(loose):
            if not self._stays(node):
                del self.found[node]
        return self.found

    def _add_to_body(self, node: fx.Node, key: RegionKey) -> None:
        self.found[node] = key
        entering = self.entering.setdefault(key, {})
        for source in node.all_input_nodes:
            if source in self.twins.dims and self.found.get(source) != key:
                entering[source] = None

    def _region_of_last_operand(self, node: fx.Node) -> RegionKey | None:
        """Return the region of the last operand that has one in the node's direction.

        Autograd adds a newer gradient to an older one, which is the first operand.
        """
        for source in reversed(node.all_input_nodes):
            home = self.found.get(source)
            if home is not None and home.direction == direction(node):
                return home
        return None

    def _is_influenced(self, node: fx.Node, key: RegionKey) -> bool:
        if node in self.twins.differing or is_random(node) or mutates(node):
            return True
        written = self.written[key]
        if self.storages.of[node] in written:
            return True
        for source in node.all_input_nodes:
            is_of_chunk = self._is_in(source, key.root) or source in self.twins.dims
            is_constant_of_chunk = source.op == "get_attr" and source in self.twins.differing
            if is_of_chunk or is_constant_of_chunk or self.storages.of[source] in written:
                return True
        return False

    def _differentiated(self, node: fx.Node, root: str) -> fx.Node | None:
        """Return the value that a gradient belongs to, if each chunk computes it from parameters.

        Only values are returned whose own backward runs no operator, as that of a sum: their
        gradient goes on to the parameters as it is, so it is chunked, too.
        """
        if is_engine_addition(node):
            first, *others = (self._differentiated(source, root) for source in node.all_input_nodes)
            return first if all(other is first for other in others) else None
        for use in self.forward_of.get((root, node.meta.get("seq_nr")), ()):
            for source in use.all_input_nodes:
                is_shared = self.roots.get(source) == root and source not in self.found
                is_handed_on = source.meta.get("seq_nr") not in self.with_backward
                if is_shared and is_handed_on and not is_view(source.target):
                    return source
        return None

    def _is_in(self, node: fx.Node, root: str) -> bool:
        home = self.found.get(node)
        return home is not None and home.root == root

    def _stays(self, node: fx.Node) -> bool:
        """Return whether a node without a module is the body's.

        It is if the body reads it, or if it adds only gradients that come from inside.
        """
        key = self.found[node]
        if any(self._is_in(user, key.root) for user in node.users):
            return True
        if self._differentiated(node, key.root) is not None:
            return True
        if not is_engine_addition(node) or node not in self.twins.dims:
            return False
        if all(self.found.get(source) == key for source in node.all_input_nodes):
            return True
        # A use outside of the forward's body may have sent a term of this sum.
        # Then eager code adds it outside of the module.
        forward = RegionKey(key.root, FORWARD)
        for source in self.entering.get(forward, ()):
            if not may_be_gradient_of(source.meta["val"], node.meta["val"]):
                continue
            for user in source.users:
                if self.found.get(user) != forward and may_have_gradient(user):
                    return False
        return True


def may_be_gradient_of(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether one may be the gradient of the other."""
    return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def may_have_gradient(user: fx.Node) -> bool:
    """Return whether a use may have a gradient."""
    return direction(user) != BACKWARD and is_inexact(user.meta.get("val"))
