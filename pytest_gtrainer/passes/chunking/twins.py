"""Twins: two graphs of one step, at extents B and B/N, aligned node for node; what differs is the chunk dimension's.

*Idea.* A value whose extents differ carries the chunk dimension there; a literal that differs is each chunk's own. A
body takes arguments and metadata from the part. *Invariant.* Operators and operands correspond by position, else the
step is refused (G18). *Cost.* Linear. Two traces give twins, or one symbolic trace with numbers for its symbols: none
of them is left anywhere (H1), and what the trace relied on is checked (H2). Symbols of data stay.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import (
    Expression,
    Symbol,
    expression_of,
    failed_guards,
    replaced,
    symbols_of,
)
from pytest_gtrainer._torch.graph_modules import empty_graph, finished
from pytest_gtrainer._torch.values import SYMBOLIC, value_like
from pytest_gtrainer.graph.nodes import DYNAMIC_DIMS, leaves_of
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, described


class Twins:
    """The full graph and its part, at extent B and at B/N."""

    def __init__(self, full: fx.GraphModule, part: fx.GraphModule, num_chunks: int) -> None:
        self.full, self.part, self.num_chunks = full, part, num_chunks
        self.part_of = dict(aligned(full, part))
        self.full_of = {part: full for full, part in self.part_of.items()}
        # nodes of the full graph whose own extents, literals or constant depend on the chunk dimension
        self.differing = {
            node for node, twin in self.part_of.items() if _differ(full, node, part, twin)
        }
        tensors = (
            (n, value)
            for n in self.differing
            if isinstance(value := n.meta.get("val"), torch.Tensor)
        )
        dims = (
            (node, differing_dims(value, self.part_of[node].meta["val"])) for node, value in tensors
        )
        # for tensors whose known extents depend on it, the dimensions that differ
        self.dims = {node: found for node, found in dims if found}

    def dim(self, node: fx.Node) -> int | None:
        """The dimension along which the full tensor is the chunks' tensors one behind the other; None without one."""
        if node not in self.dims:
            return None
        (dim, *others), part = self.dims[node], self.part_of[node].meta["val"]
        if others or node.meta["val"].shape[dim] != self.num_chunks * part.shape[dim]:
            raise ChunkError(
                f"{described(node)} is {list(part.shape)} for one chunk of {self.num_chunks}: it can neither be cut "
                "into chunks nor joined from them; keep it inside the chunked module"
            )
        return dim


def unknown_dims(value: Any) -> list[int]:
    """The first dimension of an extent that is known only at run time: rows that the data counts."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [dim for dim, extent in enumerate(shape) if isinstance(extent, torch.SymInt)][:1]


def constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a ``get_attr`` node names."""
    return attrgetter(str(node.target))(gm)


def aligned(full: fx.GraphModule, part: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes of the two graphs in pairs; refuses a pair of other operators or dimensions, or that reads others (G18)."""
    known: dict[fx.Node | None, fx.Node | None] = {}
    for node, twin in itertools.zip_longest(full.graph.nodes, part.graph.nodes):
        same = node is not None and twin is not None and node.op == twin.op
        same = same and (node.op != "call_function" or node.target == twin.target)
        same = same and getattr(node.meta.get("val"), "ndim", None) == getattr(
            twin.meta.get("val"), "ndim", None
        )
        if (
            not same
            or [known.get(source) for source in node.all_input_nodes] != twin.all_input_nodes
        ):
            ours, theirs = (
                described(one) if one is not None else "nothing" for one in (node, twin)
            )
            raise ChunkError(
                "the operators of the step depend on the chunk dimension's extent. The first that differ: at full "
                f"extent {ours}, at the extent of one chunk {theirs}. Leave loops over that dimension and branches on "
                "its extent (an extent of 1 included) out of the model"
            )
        known[node] = twin
        yield node, twin


def _differ(full: fx.GraphModule, node: fx.Node, part: fx.GraphModule, twin: fx.Node) -> bool:
    """Whether two nodes that correspond differ in the extents of their values, in a literal, or in a constant."""
    ours, theirs = node.meta.get("val"), twin.meta.get("val")
    if not (ours is None or theirs is None) and any(
        map(_extents_differ, leaves_of(ours), leaves_of(theirs))
    ):
        return True
    if node.op != "get_attr":
        ours, theirs = leaves_of((node.args, node.kwargs)), leaves_of((twin.args, twin.kwargs))
        data = (fx.Node, *SYMBOLIC)  # no literals of the chunk dimension
        literals = [(a, b) for a, b in zip(ours, theirs, strict=False) if not isinstance(a, data)]
        return len(ours) != len(theirs) or any(
            type(a) is not type(b) or bool(a != b) for a, b in literals
        )
    ours, theirs = constant(full, node), constant(part, twin)
    if isinstance(ours, fx.GraphModule) and isinstance(theirs, fx.GraphModule):
        return any(_differ(ours, inner, theirs, other) for inner, other in aligned(ours, theirs))
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    same_kind = (
        ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.device == theirs.device
    )
    return not same_kind or not (ours.is_meta or torch.equal(ours, theirs))


def _extents_differ(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return theirs is not None and bool(differing_dims(ours, theirs))
    return type(ours) is int and ours != theirs


def differing_dims(ours: torch.Tensor, theirs: torch.Tensor) -> list[int]:
    """Dimensions of known extents that differ."""
    pairs = enumerate(zip(ours.shape, theirs.shape, strict=True))
    return [dim for dim, (a, b) in pairs if type(a) is int and type(b) is int and a != b]


aten = torch.ops.aten
Extents = dict[Symbol, int]
_RANGES = ("sym_constrain_range", "sym_constrain_range_for_size")


def concretize_chunk_symbolic_shapes_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> fx.GraphModule:
    """The graph at the extents of its example: a new one, or the given one if its inputs have no symbols.

    Args:
        example_inputs: tensors whose extents are taken; without them the extents of the traced example.

    Raises:
        ChunkError: an extent is not known, a guard is false for the numbers, or a symbol is left.
    """
    extents = input_extents(gm, example_inputs)
    return at_extents(gm, extents) if extents else gm


def symbolic_twins(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None, config: ChunkConfig
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """The graph at its extents, and with the chunk dimension's divided by N; None if its inputs have no symbols."""
    if not (extents := input_extents(gm, example_inputs)):
        return None
    named = gm.graph.output_node().meta.get(DYNAMIC_DIMS, {})
    if config.chunk_dim in named:
        symbol: Symbol = expression_of(named[config.chunk_dim][0])
    elif len(extents) == 1 and not named:
        [symbol] = extents
    else:
        known = ", ".join(
            [*named, *(f"{symbol} = {extent}" for symbol, extent in extents.items() if not named)]
        )
        raise ChunkError(
            f"the graph's dynamic dimensions are {known}: which of them is the {config.chunk_dim} dimension cannot be "
            f"told; trace with trace_step(..., dynamic_dims=config.dynamic_dims(inputs))"
        )
    part = config.chunk_extent(extents[symbol], f"{config.module_fqn}, symbol {symbol}")
    return at_extents(gm, extents), at_extents(gm, {**extents, symbol: part})


def input_extents(gm: fx.GraphModule, example_inputs: Sequence[Any] | None) -> Extents:
    """A number for every symbol that is an extent of an input: the example's, else that of the trace."""
    named: Mapping[str, tuple[torch.SymInt, int]] = gm.graph.output_node().meta.get(
        DYNAMIC_DIMS, {}
    )
    traced = {expression_of(symbol): extent for symbol, extent in named.values()}
    extents: Extents = {}
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        given = (
            example_inputs[index]
            if example_inputs is not None and index < len(example_inputs)
            else None
        )
        for dim, extent in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if not isinstance(extent, torch.SymInt) or not expression_of(extent).is_symbol:
                continue
            symbol = expression_of(extent)
            number = given.shape[dim] if isinstance(given, torch.Tensor) else None
            number = number if type(number) is int else traced.get(symbol, extent.node.hint)
            if number is None:
                raise ChunkError(
                    f"the extent of {described(node)} in dimension {dim} is not known: give example_inputs"
                )
            extents.setdefault(symbol, int(number))
    return extents


def at_extents(gm: fx.GraphModule, extents: Extents) -> fx.GraphModule:
    """A new graph with numbers for symbols; refuses numbers that make a guard false (H2)."""
    numbers = ", ".join(f"{symbol} = {number}" for symbol, number in extents.items())
    for message in failed_guards(gm, extents):
        wrong = f"with {numbers} the graph's guard is false: {message}"
        raise ChunkError(
            f"{wrong}; choose extents and num_chunks for which it holds, or trace a static twin instead"
        )
    made = _Substitution(gm, extents, numbers).run()
    made.graph.output_node().meta.pop(DYNAMIC_DIMS, None)
    for node in (
        n
        for module in made.modules()
        if isinstance(module, fx.GraphModule)
        for n in module.graph.nodes
    ):
        seen: list[Expression] = [
            *symbols_of(node.meta.get("val")),
            *symbols_of([node.args, node.kwargs]),
        ]
        if left := [symbol for symbol in seen if symbol in extents]:  # H1
            wrong = f"{described(node)} still refers to {left[0]} after its extent was put in"
            raise ChunkError(
                f"{wrong}: values may hold symbols in tensors, numbers, and lists or tuples of them"
            )
    return made


class _Substitution:
    """One graph, or nested graph, with numbers for symbols."""

    def __init__(self, gm: fx.GraphModule, extents: Extents, numbers: str) -> None:
        self.gm, self.extents, self.numbers = gm, extents, numbers
        self.graph = empty_graph(like=gm.graph)
        self.known: dict[fx.Node, Any] = {}
        self.attributes: dict[str, Any] = {}

    def run(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and self._disappears(node):
                continue
            args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
            copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            copied.meta = dict(node.meta)
            if "val" in node.meta:
                copied.meta["val"] = self.value(node.meta["val"])
            if symbols_of(node.meta.get("val")):
                copied.meta.pop("tensor_meta", None)
            self.known[node] = copied
            if node.op == "get_attr":
                if isinstance(found := constant(self.gm, node), fx.GraphModule):
                    found = _Substitution(found, self.extents, self.numbers).run()
                self.attributes[str(node.target)] = found
        return finished(self.graph, self.gm, self.attributes)

    def _mapped(self, arguments: Any) -> Any:
        """Arguments with the new nodes, literals for sizes, and numbers for symbols."""
        return fx.node.map_aggregate(
            arguments,
            lambda item: self.known[item] if isinstance(item, fx.Node) else self.value(item),
        )

    def _disappears(self, node: fx.Node) -> bool:
        """Whether a node only computes a size, which is a literal now, or states a fact about literals."""
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC) and not node.meta.get("unbacked_bindings"):
            number = self.value(value)
            if not isinstance(number, SYMBOLIC):
                self.known[node] = number
                return True
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if node.target is aten._assert_scalar.default:
            fact, message = self._mapped(node.args[0]), str(node.args[1])
        elif name in _RANGES and isinstance(number := self._mapped(node.args[0]), int):
            least, most = node.kwargs.get("min"), node.kwargs.get("max")
            fact = (least is None or number >= least) and (most is None or number <= most)
            message = f"{number} is not within {least} and {most}"
        else:
            return False
        if isinstance(fact, fx.Node | torch.SymBool):
            return False
        if not fact:
            wrong = f"with {self.numbers} the assertion {described(node)} is false"
            raise ChunkError(
                f"{wrong}: {message}; choose extents and num_chunks for which it holds"
            )
        return True

    def value(self, value: Any) -> Any:
        """A value with numbers for symbols; sizes that depend on data stay symbolic."""
        if isinstance(value, SYMBOLIC):
            return replaced(value, self.extents)
        if isinstance(value, list | tuple):
            return fx.node.map_aggregate(value, self.value)
        if isinstance(value, torch.Tensor) and symbols_of(value):
            return value_like(
                value, [self.value(e) for e in value.shape], [self.value(e) for e in value.stride()]
            )
        return value
