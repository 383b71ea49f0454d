"""Peak memory of a graph by liveness: the bytes alive while each node runs, in the order of the
graph's generated code.

An *allocation* is held from the node that makes it to the last use of any name that shows it,
inputs and constants throughout. Views, writes in place, ``out=`` and waits show an operand's
memory, as schemas say; Python functions and higher-order operators if storages are shared. What an
operand is resized to counts from where it was made. A
gather, reduce-scatter or exchange holds its operands until it is waited for, as NCCL does. A graph
inside the graph adds what it makes at the node that runs it. Not seen: workspaces inside an
operator, an allocator's rounding and fragments, what happens outside of the graph.

Why not ``torch.distributed._tools.MemTracker``: around a run on fake tensors its peak is the same
to the byte, but it knows modules of an eager run and no nodes. It has no node of the peak, no
curve, no names of what is alive there, and it has to run every operator.
"""

import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.graph_text import number_of, size_symbols
from pytest_gtrainer._torch.passes import is_bucketed_by_torch, is_control_dependency
from pytest_gtrainer._torch.values import (
    OpOverload,
    is_composite,
    parts_of,
    pytree,
    schema,
    storage_id,
)
from pytest_gtrainer.graph.collectives import kind_of, launches
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopt
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    DYNAMIC_DIMS,
    argument_of,
    arguments_given,
    direction,
    graphs_called,
    is_view,
    is_wait,
    node_fqn,
    places_of,
    short_name,
    tensors_in,
)

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")
_SHOW_OPERAND = (
    "_unsafe_view",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "lift",
    "_wrap_tensor_autograd",
)
"""Operators that show their operand's memory although their schema does not say so; waits do, too.
"""
_RESIZE = ("resize_", "resize_as_", "_resize_output_", "set_")
"""Operators after which an operand has other memory; so it may have after those with ``out=``."""
_STACKING = ("scan", "map_impl")
_LOOPS = ("while_loop", *_STACKING)
_OF_OPTIMIZER = re.compile(
    r"\.(exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|acc_delta|step)$"
)
_SEND_OPERANDS = ("all_gather", "reduce_scatter", "all_to_all")
_FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory of ``nbytes`` that is alive from the ``first`` to the ``last`` place of a graph's
    order.

    Attributes:
        node: what made it; tensor: the value that it was made for, None of what a graph inside
            holds.
        kind: "parameter", "buffer", "optimizer", "input", "constant", "gradient", "saved" (from the
            forward for the backward), "collective" (buckets, and what collectives give), "output",
            or "temporary".
        name: FQN of an input or of a result; else the name of the node.
        device: where the memory is, as ``"cuda:0"``.
    """

    nbytes: int
    node: fx.Node
    tensor: Tensor | None
    first: int
    last: int
    kind: str = ""
    name: str = ""
    device: str = ""

    def __str__(self) -> str:
        cells = [self.name or self.node.name]
        if self.tensor is not None:
            cells.append(f"{self.tensor.dtype}{list(self.tensor.shape)}".removeprefix("torch."))
        if self.node.op not in ("placeholder", "get_attr"):
            cells.append(_call_text(self.node))
        return f"{self.nbytes:>15,}  {self.kind:<10}  {'  '.join(cells)}"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most memory that a graph holds at once on one device; its text is a table.

    Attributes:
        peak: the bytes alive at the node where most are.
        at: the name of that node, the first if there are several.
        module: the FQN of that node.
        where: that node with its operator, module and place, for a message.
        curve: bytes alive while each node runs, by its name, in order; placeholders are left out.
        by_kind: bytes at the peak by ``Allocation.kind``, the largest first.
        alive: what is alive at the peak, the largest first.
        device: the device whose bytes these are, as ``"cuda:0"``.
        by_device: the peak of each device on which the graph holds tensors, in bytes. Peaks may
            be at several nodes.
    """

    peak: int
    at: str
    module: str
    where: str
    curve: Mapping[str, int]
    by_kind: Mapping[str, int]
    alive: tuple[Allocation, ...]
    device: str
    by_device: Mapping[str, int]

    def table(self, most: int = 10) -> str:
        """Return the largest allocations that are alive at the peak, a line each."""
        lines = list(map(str, self.alive[:most]))
        if len(self.alive) > most:
            lines.append(f"{'':>15}  and {len(self.alive) - most} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {spell_bytes(nbytes)}" for kind, nbytes in self.by_kind.items())
        peak = f"peak {spell_bytes(self.peak)} ({self.peak:,} bytes) at {self.where}"
        lines = [peak, kinds, self.table()]
        others = []
        for device, nbytes in self.by_device.items():
            if device != self.device:
                others.append(f"{spell_bytes(nbytes)} on {device}")

        if others:
            lines.insert(1, f"on {self.device}; the peaks of others: {', '.join(others)}")
        return "\n".join(lines)


def spell_bytes(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that fits.

    >>> spell_bytes(100), spell_bytes(1536), spell_bytes(3 << 30)
    ('100 B', '1.50 KiB', '3.00 GiB')
    """
    for unit in reversed(_UNITS):
        if unit != "B" and nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.2f} {unit}"
    return f"{nbytes} B"


def peak_memory(
    gm: AnyGraph,
    *,
    names: Names | None = None,
    sizes: Mapping[str, int] | None = None,
    device: str | None = None,
) -> PeakMemory:
    """Compute the bytes that a graph holds at each node from its metadata; nothing runs.

    What is away on another device, as an activation that was offloaded, is not counted.

    Args:
        gm: a graph of any tracer, with fake values on its nodes.
        names: what the inputs are, if the graph does not say it.
        sizes: values of dynamic sizes, as ``{"u0": 128}``; by default those with which the graph
            was traced.
        device: the device whose memory counts, as ``"cuda"`` or ``"cuda:1"``. By default the
            accelerator that holds most, and the CPU if the graph has tensors nowhere else.

    Raises:
        ValueError: a node has no value; a size is known only when the graph runs; ``sizes`` has a
            name that no size has, or no number; no node has a tensor, or none on ``device``.
        TypeError: this is no graph.
    """
    peak, symbols = _measured(gm, names, sizes, device)
    _refuse_unknown(sizes, symbols)
    return peak


def _measured(
    gm: AnyGraph, names: Names | None, sizes: Mapping[str, int] | None, device: str | None
) -> tuple[PeakMemory, set[str]]:
    """Return the peak of a graph, and the names of its dynamic sizes."""
    facts.check_type(sizes or {}, Mapping, "sizes", 'sizes by name, {"s0": 64}')
    for name, size in (sizes or {}).items():
        if type(size) is not int or size < 0:
            raise ValueError(f"sizes={{{name!r}: {size!r}}}: give a whole number, 0 or more")
    gm = adopt(gm, names)
    dynamic = gm.graph.output_node().meta.get(DYNAMIC_DIMS, {})
    extents = {str(symbol): extent for symbol, extent in dynamic.values()} | dict(sizes or {})
    liveness = _Liveness(gm, extents, pending={}, symbols=set())
    peak = liveness.peak(device)
    facts.notify("memory", peak=peak)
    return peak, liveness.symbols


def _refuse_unknown(sizes: Mapping[str, int] | None, symbols: set[str]) -> None:
    """Raise a ValueError for a size that no tensor has: its number would change nothing."""
    unknown = sorted(set(sizes or {}) - symbols)
    if unknown:
        raise ValueError(
            f"sizes names {', '.join(unknown)}, which no tensor of the graph has; its dynamic "
            f"sizes are {', '.join(sorted(symbols)) or 'none'}"
        )


@facts.check
def assert_peak_memory(
    gm: AnyGraph,
    *,
    at_most: int | str,
    control: AnyGraph | None = None,
    names: Names | None = None,
    sizes: Mapping[str, int] | None = None,
    device: str | None = None,
) -> PeakMemory:
    """Assert that ``gm`` never holds more than ``at_most`` bytes (or "1.5 GiB") on a device.

    ``names``, ``sizes`` and ``device`` are those of ``peak_memory``.

    Args:
        control: a graph that has to hold more than ``at_most``, such as the one before a memory
            policy. For small inputs all policies may have one peak, and the bound proves nothing.

    Raises:
        AssertionError: it does; with node, module and the five largest tensors alive there. Or the
            control does not.
        ValueError: ``at_most`` is no size; and as ``peak_memory``.
    """
    bound = at_most
    if isinstance(at_most, str):
        found = _SIZE.fullmatch(at_most)
        if found:
            bound = int(float(found[1]) * _UNITS[found[2]])

    if type(bound) is not int or bound <= 0:
        raise ValueError(
            "at_most is a number of bytes above 0, or a text of one of "
            f"{', '.join(_UNITS)}, as '1.5 GiB'; not {at_most!r}"
        )

    memory, symbols = _measured(gm, names, sizes, device)
    _refuse_unknown(sizes, symbols)
    if memory.peak > bound:
        raise facts.FailedCheck(
            f"the graph holds {spell_bytes(memory.peak)} ({memory.peak:,} bytes) at once, "
            f"at_most is {spell_bytes(bound)} ({bound:,} bytes): {memory.peak - bound:,} too many\n"
            f"the peak is at {memory.where}, where the largest are\n{memory.table(5)}\n"
            "all of them: print(peak_memory(gm).table(1000)); "
            "bytes by node: peak_memory(gm).curve"
        )

    if control is not None:
        # It may have fewer dynamic sizes. A control on another device would compare nothing.
        other, _ = _measured(control, names, sizes, memory.device)
        if other.peak <= bound:
            raise facts.FailedCheck(
                f"the control holds {spell_bytes(other.peak)} ({other.peak:,} bytes) at once, "
                f"which at_most={at_most!r} allows, too, so this check cannot fail: take more "
                f"tokens or layers, or a smaller bound; the graph holds {memory.peak:,} bytes"
            )

    return memory


# A value stands here as the tree of a node's results, in which a set of allocations replaces each
# tensor. A tensor subclass that wraps several tensors has several allocations.


def _by_tensor(value: Any) -> list[frozenset[Allocation]]:
    """Return the allocations of each tensor of a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, frozenset)]


def _allocations(value: Any) -> set[Allocation]:
    """Return all allocations of a value."""
    return set().union(*_by_tensor(value))


def _call_text(node: fx.Node) -> str:
    """Return the operator of a node, and its module: ``aten.mm.default in layers.0``."""
    target: Any = node.target
    if not isinstance(target, OpOverload | str):
        target = getattr(target, "__name__", "") or target
    fqn = node_fqn(node)
    if fqn:
        return f"{target} in {fqn}"
    return str(target)


class _Liveness:
    """The allocations of one graph, found in one walk in the graph's order.

    Args:
        sizes: numbers of symbolic sizes.
        pending: by each allocation that a collective gives, those that it holds until its wait.
            A wait may stand in another graph than the collective, so they share one.
        symbols: the names of dynamic sizes that were met, which graphs inside share, too.
        bound: values of the inputs of a graph inside the graph; None for the outer graph.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        sizes: Mapping[str, int],
        pending: dict[Allocation, set[Allocation]],
        symbols: set[str],
        bound: Sequence[Any] | None = None,
    ) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.pending = pending
        self.symbols = symbols
        self.allocations: dict[Allocation, None] = {}  # an ordered set
        self.values: dict[fx.Node, Any] = {}
        self._sizes = sizes
        self._order = places_of(self.nodes)
        self._held_storages: dict[int, Allocation] = {}
        if bound is not None:
            self.values.update(zip(gm.graph.find_nodes(op="placeholder"), bound, strict=True))
        for node in self.nodes[:-1]:
            if node.op in ("placeholder", "get_attr"):
                if node not in self.values:
                    self.values[node] = self._held(node)
                continue
            value = self.values[node] = self._result(node)
            if isinstance(node.target, OpOverload):
                self._resize(node)
                value = self.values[node]
            for user in node.users:
                self._extend(_allocations(value), self._order[user])
            if launches(node.target) and node.target.namespace in _FUNCTIONAL:
                # An all-reduce copies its operand first; the others read it where it is.
                sent: set[Allocation] = set()
                if kind_of(node) in _SEND_OPERANDS:
                    for operand in node.all_input_nodes:
                        sent |= _allocations(self.values[operand])
                for allocation in _allocations(value):
                    self.pending[allocation] = sent | {allocation}
        for held in self.pending.values():
            # NCCL holds the operands of a collective that nobody waits for until the graph ends.
            self._extend(held, len(self.nodes) - 1)

    def _extend(self, allocations: Iterable[Allocation], last: int) -> None:
        """Keep allocations of this graph alive up to the place ``last`` at least.

        Those of the graph around it count in the places of that graph, which keeps them alive.
        """
        for allocation in allocations:
            if allocation in self.allocations:
                allocation.last = max(allocation.last, last)

    def _held(self, node: fx.Node) -> Any:
        """Return the value of an input or constant; two that share a storage are one allocation."""
        if node.op == "get_attr":
            known = {"kind": "constant", "fqn": str(node.target)}
            value = operator.attrgetter(str(node.target))(self.gm)
        else:
            known = node.meta.get("gt_input") or {"kind": "input", "fqn": str(node.target)}
            value = node.meta.get("val")
            if "val" not in node.meta and node.users:
                raise self._without_value(node)
            if value is None and _is_read_as_tensor(node):
                raise self._of_unknown_size(node, "a sparse tensor")

        value = self._by_storages(node, value, self._held_storages)
        for allocation in _allocations(value):
            allocation.first, allocation.last = 0, len(self.nodes) - 1
            allocation.name = allocation.name or known["fqn"]
            if _OF_OPTIMIZER.search(allocation.name):
                allocation.kind = allocation.kind or "optimizer"
            allocation.kind = allocation.kind or known["kind"]

        return value

    def _result(self, node: fx.Node) -> Any:
        """Return the value of a node that is neither an input nor a constant."""
        target = node.target
        if target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = self.values[node.args[0]]
            if type(node.args[1]) in (int, str) and isinstance(source, list | tuple | dict):
                return source[node.args[1]]

        if is_wait(node):
            value = fx.node.map_arg(node.args[0], self.values.__getitem__)
            for allocation in _allocations(value):
                # The wait itself lets go of what its collective held.
                self._extend(self.pending.pop(allocation, ()), self._order[node] - 1)
            return value

        if bodies := graphs_called(self.gm, node):
            return self._run_bodies(node, bodies)
        if "val" not in node.meta:
            # Asserts have no value by right; what may give a tensor has one.
            returns = schema(target).returns if isinstance(target, OpOverload) else ()
            reads = any(_by_tensor(self.values[source]) for source in node.all_input_nodes)
            if any("Tensor" in str(each.type) for each in returns) or (reads and node.users):
                raise self._without_value(node)
            return None

        if node.meta["val"] is None and _returns_a_tensor(target):
            # A trace on real tensors keeps no value of a sparse one.
            raise self._of_unknown_size(node, "a sparse tensor")
        if isinstance(target, OpOverload) and not is_composite(target):
            return self._by_schema(node)
        return self._by_operands(node)

    def _by_operands(self, node: fx.Node) -> Any:
        """Return the value of a node without a schema: it shows operands that share its storage."""
        value = node.meta.get("val")
        known: dict[int, Allocation] = {}
        # reshape, contiguous, to: a pass may have left a value with a storage of its own.
        is_view_of_one = isinstance(value, Tensor) and is_view(node.target)
        for source in node.all_input_nodes:
            tensors = tensors_in(source.meta.get("val"))
            for tensor, shown in zip(tensors, _by_tensor(self.values[source]), strict=False):
                if len(shown) != 1:
                    continue
                (allocation,) = shown
                for part in parts_of(tensor):
                    known[storage_id(part)] = allocation
                if is_view_of_one and _may_be_whole(node, tensor, value):
                    known[storage_id(value)] = allocation

        return self._by_storages(node, value, known)

    def _by_schema(self, node: fx.Node) -> Any:
        """Return the value of an operator, whose schema says which operands its results show."""
        declared = schema(node.target)
        operands: dict[str, list[frozenset[Allocation]]] = {}
        for argument, given in arguments_given(node):
            shown = fx.node.map_arg(given, self.values.__getitem__)
            operands[argument.name] = _by_tensor(shown)
        values = node.meta["val"]
        if len(declared.returns) <= 1:
            values = [values]
        results = []
        for returned, result in zip(declared.returns, values, strict=False):
            sources = []
            for argument in declared.arguments:
                if _is_shown(argument.alias_info, returned.alias_info):
                    sources += operands.get(argument.name, [])
            if not sources and declared.name.partition("::")[2] in _SHOW_OPERAND:
                sources = next(filter(None, operands.values()), [])
            # A list of views, as that of split, shows its one operand each time.
            count = len(tensors_in(result))
            if len(sources) != count:
                sources = sources[:1] * count
            left = iter(sources)

            def show(tensor: Tensor, left: Any = left) -> frozenset[Allocation]:
                return next(left, None) or frozenset(
                    self._new(node, part, self._span(node, part))
                    for part in self._parts(node, tensor)
                )

            results.append(pytree.tree_map_only(Tensor, show, result))

        if len(results) == 1:
            return results[0]
        return results

    def _span(self, node: fx.Node, tensor: Tensor) -> int:
        """Return the bytes from the first to the last element of a tensor."""
        last = 0
        for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
            number = self._number(node, extent)
            if number == 0:
                return 0
            last += (number - 1) * self._number(node, stride)
        return (last + 1) * tensor.itemsize

    def _by_storages(self, node: fx.Node, value: Any, known: dict[int, Allocation]) -> Any:
        """Return a value that shows ``known`` allocations, by storage.

        The node makes any other storage, and ``known`` gets it.
        """

        def show(tensor: Tensor) -> frozenset[Allocation]:
            for part in self._parts(node, tensor):
                if storage_id(part) not in known:
                    nbytes = self._number(node, part.untyped_storage().nbytes())
                    known[storage_id(part)] = self._new(node, part, nbytes)
            return frozenset(known[storage_id(part)] for part in parts_of(tensor))

        return pytree.tree_map_only(Tensor, show, value)

    def _parts(self, node: fx.Node, tensor: Tensor) -> list[Tensor]:
        """Return the tensors with memory of a tensor.

        Raises:
            ValueError: one is sparse, or nested in one piece, so that no metadata has its bytes.
        """
        parts = parts_of(tensor)
        for part in parts:
            if part.layout is not torch.strided:
                layout = str(part.layout).removeprefix("torch.")
                raise self._of_unknown_size(node, f"of layout {layout}")
            if part.is_nested:
                raise self._of_unknown_size(node, "a nested tensor that is not jagged")
        return parts

    def _resize(self, node: fx.Node) -> None:
        """Let operands grow that an operator may resize, and keep what ``set_`` shows alive.

        They have their last size from where they are made, as earlier names show them, too.
        """
        name = short_name(node)
        operands = node.all_input_nodes
        if name == "resize_storage_bytes_":
            nbytes = self._number(node, argument_of(node, "new_size"))
            self._grow(node, self.values[operands[0]], nbytes, None)
            return
        given = [value for argument, value in arguments_given(node) if argument.is_out]
        if name in _RESIZE:
            given = operands[:1]
        if name == "set_" and len(operands) > 1:
            # It shows the other's memory. Its own stays alive, too, as views may show it.
            both = self.values[operands[0]], self.values[operands[1]]
            shown = frozenset(_allocations(both))
            self.values[node] = self.values[operands[0]] = shown
            for user in operands[0].users:
                self._extend(shown, self._order[user])
            return
        results = tensors_in(node.meta.get("val"))
        for operand, result in zip(given, results, strict=False):
            if isinstance(operand, fx.Node) and len(parts_of(result)) == 1:
                self._grow(node, self.values[operand], self._span(node, result), result)

    def _grow(self, node: fx.Node, value: Any, nbytes: int, result: Tensor | None) -> None:
        """Let the memory of a value have at least so many bytes; the smaller one is copied."""
        allocations = _allocations(value)
        if len(allocations) != 1:
            return
        (allocation,) = allocations
        if allocation.nbytes < nbytes:
            if allocation.nbytes and allocation.tensor is not None:
                self._new(node, allocation.tensor, allocation.nbytes)
            allocation.nbytes = nbytes
            allocation.tensor = result

    def _new(self, node: fx.Node, tensor: Tensor, nbytes: int) -> Allocation:
        place = self._order[node]
        device = str(tensor.device)
        allocation = Allocation(nbytes, node, tensor, place, place, device=device)
        self.allocations[allocation] = None
        return allocation

    def _number(self, node: fx.Node, size: Any) -> int:
        """Return a size as a number; a symbolic one by ``sizes``, else by the example's hint."""
        number = size
        if type(size) is not int:
            self.symbols |= size_symbols(size)
            number = number_of(size, self._sizes)
        if isinstance(number, int):
            return number
        sizes = ", ".join(f"{name!r}: 128" for name in number)
        raise ValueError(
            f"how much memory {node.name} ({_call_text(node)}) takes is known only when the graph "
            f"runs: give the numbers of its sizes, sizes={{{sizes}}}"
        )

    def _without_value(self, node: fx.Node) -> ValueError:
        return ValueError(
            f"{node.name} ({_call_text(node)}) has no value in its metadata, so its size is "
            'unknown: trace on fake tensors (make_fx(..., tracing_mode="fake"), torch.compile, '
            "torch.export), or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp(gm).propagate(*inputs) first"
        )

    def _of_unknown_size(self, node: fx.Node, what: str) -> ValueError:
        return ValueError(
            f"{node.name} ({_call_text(node)}) is {what}, and how many bytes it holds is known "
            "only when the graph runs: no bound of this graph can be checked"
        )

    def _run_bodies(self, node: fx.Node, bodies: Sequence[fx.GraphModule]) -> Any:
        """Return the value of a node that runs graphs, whose inputs are its last operands.

        One more allocation stands for what the graphs hold besides the node's results.
        """
        place = self._order[node]
        operands = []
        for argument in pytree.tree_leaves(node.args):
            operands.append(self.values[argument] if isinstance(argument, fx.Node) else None)
        inside = []
        before = dict(self.pending)
        for body in bodies:
            # Inputs that the operator makes itself come first, as the indices of flex attention.
            count = len(body.graph.find_nodes(op="placeholder"))
            bound = [None] * (count - len(operands)) + operands[max(0, len(operands) - count) :]
            inside.append(_Liveness(body, self._sizes, self.pending, self.symbols, bound))

        released = place
        if is_control_dependency(node):
            released -= 1  # the body is the wait alone, which lets go as it does outside
        for launched, held in before.items():
            if launched not in self.pending:  # a body waited for it
                self._extend(held, released)
        made = _bytes_inside(inside, short_name(node) in _LOOPS)
        is_inlined = node.op == "call_module" or is_control_dependency(node)
        if is_inlined or _call_text(node).startswith("invoke_subgraph"):
            results = bodies[0].graph.output_node().args[0]
            value = fx.node.map_arg(results, inside[0].values.__getitem__)
            # From here on they are allocations of this graph, as is what a collective holds.
            kept = _allocations(value).union(*self.pending.values())
            for allocation in inside[0].allocations:
                if allocation in kept:
                    allocation.first = allocation.last = place
                    self.allocations[allocation] = None
                    made[allocation.device] -= allocation.nbytes
        else:
            known = len(self.allocations)
            value = self._by_operands(node)
            # Results of a scan are there from its first iteration on, beside what this one makes.
            if short_name(node) not in _STACKING:
                made.subtract(_by_device(list(self.allocations)[known:]))

        name = f"in {node.name}"
        for device, nbytes in made.items():
            inner = Allocation(nbytes, node, None, place, place, "temporary", name, device)
            if nbytes > 0:
                self.allocations[inner] = None
        return value

    def bytes_returned(self) -> Counter[str]:
        """Return the bytes of those results that the graph itself makes, by device."""
        results = fx.node.map_arg(self.nodes[-1].args[0], self.values.__getitem__)
        return _by_device(one for one in _allocations(results) if one in self.allocations)

    def devices(self) -> list[str]:
        """Return the devices on which the graph holds tensors; "meta" if it names no other."""
        found = dict.fromkeys(allocation.device for allocation in self.allocations)
        return [device for device in found if device != "meta"] or list(found)

    def curve(self, device: str) -> list[int]:
        """Return the bytes of a device that are alive at each place.

        Where a tensor on "meta" will be is not known, so it counts on every device.
        """
        steps = [0] * (len(self.nodes) + 1)
        for allocation in self.allocations:
            if allocation.device in (device, "meta"):
                steps[allocation.first] += allocation.nbytes
                steps[allocation.last + 1] -= allocation.nbytes
        return list(accumulate(steps[:-1]))

    def peak(self, device: str | None) -> PeakMemory:
        """Return the curve of a device, and what is alive there at its highest place."""
        if not self.allocations:
            raise ValueError(
                "the graph holds no tensors, so there is no memory to measure: "
                "is this the right graph?"
            )

        self._name_results()
        self._name_kinds()
        # Placeholders are alive before the graph runs, so no peak is at one of them.
        places = [at for at, node in enumerate(self.nodes) if node.op != "placeholder"]
        peaks = {}
        for each in self.devices():
            whole = self.curve(each)
            peaks[each] = max(whole[place] for place in places)

        device = _chosen(device, peaks)
        curve = self.curve(device)
        at = max(places, key=curve.__getitem__)
        node = self.nodes[at]
        where = f"{node.name} ({_call_text(node)}), "
        where += f"node {places.index(at) + 1} of {len(places)}"
        alive = []
        kinds: Counter[str] = Counter()
        for allocation in sorted(self.allocations, key=lambda one: -one.nbytes):
            is_alive = allocation.first <= at <= allocation.last and allocation.nbytes
            if is_alive and allocation.device in (device, "meta"):
                alive.append(allocation)
                kinds[allocation.kind] += allocation.nbytes

        return PeakMemory(
            peak=curve[at],
            at=node.name,
            module=node_fqn(node),
            where=where,
            curve={self.nodes[place].name: curve[place] for place in places},
            by_kind=dict(kinds.most_common()),
            alive=tuple(alive),
            device=device,
            by_device=peaks,
        )

    def _name_results(self) -> None:
        """Name the allocations that the graph returns, unless they are its inputs."""
        output = self.gm.graph.output_node()
        results = pytree.tree_leaves(output.args[0])
        # By now only inputs and constants have a kind.
        inputs = {allocation.name for allocation in self.allocations if allocation.kind}
        names = output.meta.get("gt_outputs") or [""] * len(results)
        for name, result in zip(names, results, strict=False):
            if not isinstance(result, fx.Node):
                continue
            kind = "output"
            if name in inputs:  # a gradient has the name of its parameter
                kind = "gradient"
            elif name.startswith("kept."):
                kind = "saved"
            for allocation in _allocations(self.values[result]):
                if not allocation.kind:
                    allocation.kind, allocation.name = kind, name

    def _name_kinds(self) -> None:
        """Give a kind to what is neither an input, nor a constant, nor a result."""
        for allocation in self.allocations:
            node, last = allocation.node, self.nodes[allocation.last]
            if allocation.kind:
                continue
            allocation.kind = "temporary"
            if direction(node) != BACKWARD and direction(last) == BACKWARD:
                allocation.kind = "saved"
            if launches(node.target) or "fsdp_bucket" in node.meta or is_bucketed_by_torch(node):
                allocation.kind = "collective"


def _by_device(allocations: Iterable[Allocation]) -> Counter[str]:
    """Return the bytes of allocations, by device."""
    held: Counter[str] = Counter()
    for allocation in allocations:
        held[allocation.device] += allocation.nbytes
    return held


def _bytes_inside(bodies: Sequence[_Liveness], is_loop: bool) -> Counter[str]:
    """Return the most bytes, by device, that one of the graphs that a node runs makes."""
    made: Counter[str] = Counter()
    for body in bodies:
        for device in body.devices():
            made[device] = max(made[device], max(body.curve(device)))
    if is_loop:
        # An iteration reads what the one before has made.
        for body in bodies:
            made.update(body.bytes_returned())
    return made


def _chosen(device: str | None, peaks: Mapping[str, int]) -> str:
    """Return the device of ``peaks`` that a user named, else the accelerator that holds most.

    Raises:
        ValueError: no device has this name, or several have.
    """
    if device is None:
        accelerators = [each for each in peaks if each != "cpu"]
        return max(accelerators or peaks, key=peaks.__getitem__)

    found = [each for each in peaks if device in (each, each.partition(":")[0])]
    if len(found) != 1:
        raise ValueError(
            f"device={device!r} names {len(found)} devices of the graph, which holds tensors on "
            f"{', '.join(peaks)}: name one of these"
        )
    return found[0]


def _may_be_whole(node: fx.Node, tensor: Tensor, value: Tensor) -> bool:
    """Return whether ``value`` may be all of ``tensor``, which lies in memory without gaps."""
    if (tensor.numel(), tensor.dtype) != (value.numel(), value.dtype):
        return False
    if tensor.layout is not torch.strided:
        return False
    # A cast, and another memory format, is a copy unless nothing changes.
    is_cast = short_name(node) in ("contiguous", "to")
    if is_cast and (argument_of(node, "copy") or tensor.stride() != value.stride()):
        return False
    # Symbolic extents would get guards from is_contiguous().
    return all(type(extent) is int for extent in tensor.shape) and tensor.is_contiguous()


def _returns_a_tensor(target: object) -> bool:
    """Return whether an operator returns one tensor, or a list of them, and never None."""
    if not isinstance(target, OpOverload):
        return False
    returned = [str(each.type) for each in schema(target).returns]
    return returned in (["Tensor"], ["List[Tensor]"])


def _is_read_as_tensor(node: fx.Node) -> bool:
    """Return whether an operator reads a node where it takes a tensor, and not None."""
    for user in node.users:
        if isinstance(user.target, OpOverload):
            for argument, given in arguments_given(user):
                if given is node and str(argument.type) == "Tensor":
                    return True
    return False


def _is_shown(argument: Any, result: Any) -> bool:
    """Return whether a result shows an argument, by their alias annotations.

    The annotation of a list does not say which of its elements is shown.
    """
    if argument is None or result is None:
        return False
    return bool(argument.before_set & result.before_set or not result.before_set)
