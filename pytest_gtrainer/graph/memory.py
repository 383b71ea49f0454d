"""Peak memory of a graph by liveness: the bytes alive while each node runs, in the order of the
graph's generated code.

An *allocation* is held from the node that makes it to the last use of any name that shows it,
inputs and constants throughout. Views, writes in place, ``out=`` and waits show an operand's
memory, as schemas say; Python functions and higher-order operators if storages are shared. A
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
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.graph_text import number_of
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
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopted
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    DYNAMIC_DIMS,
    direction,
    graphs_called,
    is_view,
    is_wait,
    node_fqn,
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
    """

    nbytes: int
    node: fx.Node
    tensor: Tensor | None
    first: int
    last: int
    kind: str = ""
    name: str = ""

    def __str__(self) -> str:
        told = [self.name or self.node.name]
        if self.tensor is not None:
            told.append(f"{self.tensor.dtype}{list(self.tensor.shape)}".removeprefix("torch."))
        if self.node.op not in ("placeholder", "get_attr"):
            told.append(_called(self.node))
        return f"{self.nbytes:>15,}  {self.kind:<10}  {'  '.join(told)}"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """How much memory a graph holds at once; its text is a table.

    Attributes:
        peak: in bytes; at: name of the first node while which that much is alive; module: its FQN;
            where: it in words.
        curve: bytes alive while each node runs, by its name, in order; placeholders are left out.
        by_kind: bytes at the peak by ``Allocation.kind``, the largest first.
        alive: what is alive at the peak, the largest first.
    """

    peak: int
    at: str
    module: str
    where: str
    curve: Mapping[str, int]
    by_kind: Mapping[str, int]
    alive: tuple[Allocation, ...]

    def table(self, most: int = 10) -> str:
        """The largest allocations that are alive at the peak, a line each."""
        more = [f"{'':>15}  and {len(self.alive) - most} more"] if len(self.alive) > most else []
        return "\n".join([*map(str, self.alive[:most]), *more])

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {spell_bytes(nbytes)}" for kind, nbytes in self.by_kind.items())
        return f"peak {spell_bytes(self.peak)} ({self.peak:,} bytes) at {self.where}\n{kinds}\n{self.table()}"


def spell_bytes(nbytes: int) -> str:
    """
    >>> spell_bytes(100), spell_bytes(1536), spell_bytes(3 << 30)
    ('100 B', '1.50 KiB', '3.00 GiB')
    """
    unit = next((unit for unit in reversed(_UNITS) if nbytes >= _UNITS[unit]), "B")
    return f"{nbytes} B" if unit == "B" else f"{nbytes / _UNITS[unit]:.2f} {unit}"


def peak_memory(
    gm: AnyGraph, *, names: Names | None = None, sizes: Mapping[str, int] | None = None
) -> PeakMemory:
    """Return the bytes that a graph holds at each node, computed from its metadata in one walk;
    nothing runs.

    Args:
        gm: a graph of any tracer, with fake values on its nodes.
        names: what the inputs are, if the graph does not say it.
        sizes: values of dynamic sizes, as ``{"u0": 128}``; by default those with which the graph
            was traced.

    Raises:
        ValueError: a node has no value; a size is known only when the graph runs; no node has a
            tensor.
        TypeError: this is no graph.
    """
    gm = adopted(gm, names)
    dynamic = gm.graph.output_node().meta.get(DYNAMIC_DIMS, {})
    walk = _Walk(
        gm,
        {str(symbol): extent for symbol, extent in dynamic.values()} | dict(sizes or {}),
        {},
        None,
    )
    for held in walk.pending.values():
        _extend(held, len(walk.nodes) - 1)  # nobody waits: never let go
    peak = walk.told()
    facts.notify("memory", peak=peak)
    return peak


@facts.check
def assert_peak_memory(
    gm: AnyGraph,
    *,
    at_most: int | str,
    names: Names | None = None,
    sizes: Mapping[str, int] | None = None,
) -> PeakMemory:
    """Assert that ``gm`` never holds more than ``at_most`` bytes (or "1.5 GiB"); ``names``,
    ``sizes``: ``peak_memory``

    Raises:
        AssertionError: it does; with node, module and the five largest tensors alive there.
        ValueError: ``at_most`` is no size; and as ``peak_memory``.
    """
    found = _SIZE.fullmatch(at_most) if isinstance(at_most, str) else None
    bound = int(float(found[1]) * _UNITS[found[2]]) if found else at_most
    if type(bound) is not int or bound <= 0:
        wrong = f"at_most is a number of bytes above 0, or a text of one of {', '.join(_UNITS)}, as '1.5 GiB'"
        raise ValueError(f"{wrong}; not {at_most!r}")
    told = peak_memory(gm, names=names, sizes=sizes)
    if told.peak > bound:
        raise facts.FailedCheck(
            f"the graph holds {spell_bytes(told.peak)} ({told.peak:,} bytes) at once, at_most is {spell_bytes(bound)} "
            f"({bound:,} bytes): {told.peak - bound:,} too many\nthe peak is at {told.where}, where the largest are\n"
            f"{told.table(5)}\nall of them: print(peak_memory(gm).table(1000)); bytes by node: peak_memory(gm).curve"
        )
    return told


def _shown(value: Any) -> list[frozenset[Allocation]]:
    """The allocations of a value's tensors, a set for each; of a subclass that holds several, all."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, frozenset)]


def _allocations(value: Any) -> set[Allocation]:
    return {one for leaf in _shown(value) for one in leaf}


def _extend(allocations: Iterable[Allocation], last: int) -> None:
    for one in allocations:
        one.last = max(one.last, last)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _called(node: fx.Node) -> str:
    target = (
        str(node.target)
        if isinstance(node.target, OpOverload | str)
        else getattr(node.target, "__name__", "")
    )
    return f"{target or node.target}{f' in {node_fqn(node)}' if node_fqn(node) else ''}"


class _Walk:
    """One graph, walked in its order: what each node's value shows, and until when that is alive."""

    def __init__(
        self,
        gm: fx.GraphModule,
        sizes: Mapping[str, int],  # numbers of symbols
        pending: dict[
            Allocation, set[Allocation]
        ],  # by what a collective gives what it holds until its wait
        bound: Sequence[Any] | None,  # what the inputs of a body show
    ) -> None:
        self.gm, self.nodes, self.pending, self._sizes = gm, list(gm.graph.nodes), pending, sizes
        self._order = {node: place for place, node in enumerate(self.nodes)}
        self._inputs: dict[int, Allocation] = {}  # by the storage of their values
        self.allocations: list[Allocation] = []
        self.values: dict[fx.Node, Any] = {}
        self.values.update(zip(gm.graph.find_nodes(op="placeholder"), bound or (), strict=False))
        for place, node in enumerate(self.nodes[:-1]):
            if node.op in ("placeholder", "get_attr"):
                is_given = node.op == "placeholder" and bound is not None
                self.values.setdefault(node, None if is_given else self._held(node))
                continue
            value = self.values[node] = self._computed(node)
            _extend(
                _allocations(value), max((self._order[user] for user in node.users), default=place)
            )
            if launches(node.target) and node.target.namespace in _FUNCTIONAL:
                sent = (
                    node.all_input_nodes if kind_of(node) in _SEND_OPERANDS else []
                )  # others copy them first
                held = {one for given in sent for one in _allocations(self.values[given])}
                self.pending.update({one: held | {one} for one in _allocations(value)})

    def _held(self, node: fx.Node) -> Any:
        """Inputs and constants; two that share a storage are one allocation."""
        told, value = (
            node.meta.get("gt_input") or {"kind": "input", "fqn": str(node.target)},
            node.meta.get("val"),
        )
        if node.op == "get_attr":
            told, value = (
                {"kind": "constant", "fqn": str(node.target)},
                operator.attrgetter(str(node.target))(self.gm),
            )
        elif value is None and "val" not in node.meta and node.users:
            raise self._without_value(node)
        value = self._by_storages(node, value, self._inputs)
        for one in _allocations(value):
            one.first, one.last, one.name = 0, len(self.nodes) - 1, one.name or told["fqn"]
            one.kind = one.kind or ("optimizer" if _OF_OPTIMIZER.search(one.name) else told["kind"])
        return value

    def _computed(self, node: fx.Node) -> Any:
        target = node.target
        if (
            target is operator.getitem
            and isinstance(node.args[0], fx.Node)
            and type(node.args[1]) in (int, str)
        ):
            given = self.values[node.args[0]]
            if isinstance(given, list | tuple | dict):
                return given[node.args[1]]
        if is_wait(node):
            value = fx.node.map_arg(node.args[0], self.values.__getitem__)
            for one in _allocations(value):
                _extend(
                    self.pending.pop(one, ()), self._order[node] - 1
                )  # the wait itself lets go of them
            return value
        if bodies := graphs_called(self.gm, node):
            return self._of_bodies(node, bodies)
        if "val" not in node.meta:
            returns = schema(target).returns if isinstance(target, OpOverload) else ()
            given = any(_shown(self.values[source]) for source in node.all_input_nodes)
            if any("Tensor" in str(each.type) for each in returns) or (given and node.users):
                raise self._without_value(node)
            return None
        if isinstance(target, OpOverload) and not is_composite(target):
            return self._by_schema(node, schema(target))
        return self._of_function(node)

    def _of_function(self, node: fx.Node) -> Any:
        value, known = node.meta.get("val"), dict[int, Allocation]()
        # reshape, contiguous, to: a pass may have left a value with a storage of its own
        is_reshape = (
            isinstance(node.target, OpOverload)
            and is_view(node.target)
            and isinstance(value, Tensor)
        )
        for source in node.all_input_nodes:
            for tensor, leaf in zip(
                _tensors(source.meta.get("val")), _shown(self.values[source]), strict=False
            ):
                if len(leaf) > 1:
                    continue
                known.update(dict.fromkeys(map(storage_id, parts_of(tensor)), *leaf))
                is_static = tensor.layout is torch.strided and all(
                    type(extent) is int for extent in tensor.shape
                )
                is_whole = is_reshape and (tensor.numel(), tensor.dtype) == (
                    value.numel(),
                    value.dtype,
                )
                if is_whole and is_static and tensor.is_contiguous():
                    known[storage_id(value)] = next(iter(leaf))
        return self._by_storages(node, value, known)

    def _by_schema(self, node: fx.Node, told: Any) -> Any:
        names = [argument.name for argument in told.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        given = {
            name: _shown(fx.node.map_arg(value, self.values.__getitem__))
            for name, value in given.items()
        }
        value, silently = node.meta["val"], told.name.partition("::")[2] in _SHOW_OPERAND
        results = []
        for each, result in zip(
            told.returns, value if len(told.returns) > 1 else [value], strict=False
        ):
            shown = [
                given.get(one.name, [])
                for one in told.arguments
                if _is_shown(one.alias_info, each.alias_info)
            ]
            sources = list(chain.from_iterable(shown)) or (
                next(filter(None, given.values()), []) if silently else []
            )
            count = len(_tensors(result))
            pairs = iter(sources if len(sources) == count else sources[:1] * count)
            results.append(
                pytree.tree_map_only(
                    Tensor, lambda t, pairs=pairs: next(pairs, None) or self._new(node, t), result
                )
            )
        return results if len(results) != 1 else results[0]

    def _by_storages(self, node: fx.Node, value: Any, known: dict[int, Allocation]) -> Any:
        """Return what shares a storage with what is ``known`` shows its memory; all else is made
        here, a storage once.
        """

        def show(tensor: Tensor) -> frozenset[Allocation]:
            for part in parts_of(tensor):
                if storage_id(part) not in known:
                    (known[storage_id(part)],) = self._new(
                        node, part, part.untyped_storage().nbytes()
                    )
            return frozenset(known[storage_id(part)] for part in parts_of(tensor))

        return pytree.tree_map_only(Tensor, show, value)

    def _new(self, node: fx.Node, tensor: Tensor, nbytes: Any = None) -> frozenset[Allocation]:
        """Memory that the node makes: ``nbytes``, or what the strides of each part span."""
        made, place = [], self._order[node]
        for part in parts_of(tensor):
            size, stride = (
                [self._number(node, each) for each in told] for told in (part.shape, part.stride())
            )
            span = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
            held = (
                self._number(node, nbytes)
                if nbytes is not None
                else span * part.itemsize
                if 0 not in size
                else 0
            )
            made.append(Allocation(held, node, part, place, place))
        self.allocations += made
        return frozenset(made)

    def _number(self, node: fx.Node, size: Any) -> int:
        number = size if type(size) is int else number_of(size, self._sizes)
        if not isinstance(number, int):
            raise ValueError(
                f"how much memory {node.name} ({_called(node)}) takes is known only when the graph runs: give the "
                f"numbers of its sizes, sizes={{{', '.join(f'{name!r}: 128' for name in number)}}}"
            )
        return number

    def _without_value(self, node: fx.Node) -> ValueError:
        return ValueError(
            f"{node.name} ({_called(node)}) has no value in its metadata, so its size is unknown: trace on fake "
            'tensors (make_fx(..., tracing_mode="fake"), torch.compile, torch.export), or run '
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp(gm).propagate(*inputs) first"
        )

    def _of_bodies(self, node: fx.Node, bodies: Sequence[fx.GraphModule]) -> Any:
        """Return what a node gives that runs graphs, whose inputs are its last operands; what they
        hold beside is one more.
        """
        place, walks = self._order[node], []
        operands = [
            self.values[arg] if isinstance(arg, fx.Node) else None
            for arg in pytree.tree_leaves(node.args)
        ]
        for body in bodies:
            count = len(body.graph.find_nodes(op="placeholder"))
            bound = [None] * (count - len(operands)) + operands[max(0, len(operands) - count) :]
            walks.append(_Walk(body, self._sizes, self.pending, bound))
        inside, known = max(max(walk.curve()) for walk in walks), len(self.allocations)
        if (
            node.op == "call_module"
            or is_control_dependency(node)
            or _called(node).startswith("invoke_subgraph")
        ):
            value = fx.node.map_arg(
                bodies[0].graph.output_node().args[0], walks[0].values.__getitem__
            )
            for one in _allocations(value) & set(walks[0].allocations):  # from now on this graph's
                one.first = one.last = place
                self.allocations.append(one)
        else:
            value = self._of_function(node)
        if (inside := inside - sum(one.nbytes for one in self.allocations[known:])) > 0:
            self.allocations.append(
                Allocation(inside, node, None, place, place, "temporary", f"in {node.name}")
            )
        return value

    def curve(self) -> list[int]:
        """Bytes alive at each place."""
        steps = [0] * (len(self.nodes) + 1)
        for one in self.allocations:
            steps[one.first] += one.nbytes
            steps[one.last + 1] -= one.nbytes
        return list(accumulate(steps[:-1]))

    def told(self) -> PeakMemory:
        if not self.allocations:
            raise ValueError(
                "the graph holds no tensors, so there is no memory to measure: is this the right graph?"
            )
        self._name_kinds()
        curve = self.curve()
        by_name = {
            node.name: curve[at] for at, node in enumerate(self.nodes) if node.op != "placeholder"
        }
        name = max(by_name, key=by_name.__getitem__)
        at, node = next((at, node) for at, node in enumerate(self.nodes) if node.name == name)
        where = f"{name} ({_called(node)}), node {list(by_name).index(name) + 1} of {len(by_name)}"
        alive = sorted(
            (a for a in self.allocations if a.first <= at <= a.last and a.nbytes),
            key=lambda a: -a.nbytes,
        )
        kinds: Counter[str] = Counter()
        for one in alive:
            kinds[one.kind] += one.nbytes
        return PeakMemory(
            curve[at], name, node_fqn(node), where, by_name, dict(kinds.most_common()), tuple(alive)
        )

    def _name_kinds(self) -> None:
        """What each allocation is for; what the graph returns is named after its result."""
        output = self.gm.graph.output_node()
        results, inputs = (
            pytree.tree_leaves(output.args[0]),
            {one.name for one in self.allocations if one.kind},
        )
        for name, result in zip(
            output.meta.get("gt_outputs") or [""] * len(results), results, strict=False
        ):
            for one in _allocations(self.values[result]) if isinstance(result, fx.Node) else ():
                if not one.kind:
                    one.kind = (
                        "gradient"
                        if name in inputs
                        else "saved"
                        if name.startswith("kept.")
                        else "output"
                    )
                    one.name = name
        for one in self.allocations:
            of_forward = (
                direction(one.node) != BACKWARD and direction(self.nodes[one.last]) == BACKWARD
            )
            packed = (
                launches(one.node.target)
                or "fsdp_bucket" in one.node.meta
                or is_bucketed_by_torch(one.node)
            )
            one.kind = one.kind or (
                "collective" if packed else "saved" if of_forward else "temporary"
            )


def _is_shown(argument: Any, result: Any) -> bool:
    """Return whether a result shows an argument, by their alias annotations; that of a list says
    not what it shows.
    """
    return None not in (argument, result) and bool(
        argument.before_set & result.before_set or not result.before_set
    )
