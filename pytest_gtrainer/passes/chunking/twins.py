"""Align twins: two graphs of one step, at extents B and B/N of the chunk dimension.

*Idea.* A value has the chunk dimension where its extents differ; a literal that differs is each
chunk's own. A body takes arguments and metadata from the part, the graph at B/N. *Invariant.*
Operators and operands correspond by position, else the step is refused. *Cost.* Linear.

Twins are two static traces, or one symbolic trace whose symbols are replaced by the numbers of
either extent. Such a replacement checks the guards of the trace, and leaves no symbol of an input.
Sizes that depend on data stay symbolic.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import (
    Symbol,
    expression_of,
    failed_guards,
    replaced,
    symbols_of,
)
from pytest_gtrainer._torch.graph_modules import empty_graph, finished
from pytest_gtrainer._torch.values import SYMBOLIC, value_like
from pytest_gtrainer.graph.nodes import DYNAMIC_DIMS, leaves_of
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, describe


class Twins:
    """The full graph and its part, at extents B and B/N, node for node.

    Attributes:
        part_of, full_of: the corresponding node of the other graph.
        differing: nodes of the full graph whose own extents, literals or constant depend on B.
        dims: the dimensions that differ, of the tensors of the full graph whose extents do.
    """

    def __init__(self, full: fx.GraphModule, part: fx.GraphModule, num_chunks: int) -> None:
        self.full, self.part, self.num_chunks = full, part, num_chunks
        self.part_of = dict(aligned(full, part))
        self.full_of = {part: full for full, part in self.part_of.items()}
        self.differing: set[fx.Node] = set()
        self.dims: dict[fx.Node, list[int]] = {}
        for node, twin in self.part_of.items():
            if not _differ(full, node, part, twin):
                continue
            self.differing.add(node)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                dims = differing_dims(value, twin.meta["val"])
                if dims:
                    self.dims[node] = dims

    def dim(self, node: fx.Node) -> int | None:
        """Return the dimension along which chunks of a tensor are joined; None if it has none."""
        if node not in self.dims:
            return None
        (dim, *others), part = self.dims[node], self.part_of[node].meta["val"]
        if others or node.meta["val"].shape[dim] != self.num_chunks * part.shape[dim]:
            raise ChunkError(
                f"{describe(node)} is {list(part.shape)} for one chunk of {self.num_chunks}: it "
                "can neither be cut into chunks nor joined from them; keep it inside the chunked "
                "module"
            )
        return dim


def unknown_dims(value: Any) -> list[int]:
    """Return the first dimension whose extent the data decide, as a list; it may be empty."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [dim for dim, extent in enumerate(shape) if isinstance(extent, torch.SymInt)][:1]


def constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    """Return the value that a ``get_attr`` node reads."""
    return attrgetter(str(node.target))(gm)


def aligned(full: fx.GraphModule, part: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield corresponding nodes of two graphs.

    Raises:
        ChunkError: a pair has other operators, numbers of dimensions, or operands.
    """
    known: dict[fx.Node | None, fx.Node | None] = {}
    for node, twin in itertools.zip_longest(full.graph.nodes, part.graph.nodes):
        if node is None or twin is None or not _correspond(node, twin, known):
            ours = "nothing" if node is None else describe(node)
            theirs = "nothing" if twin is None else describe(twin)
            raise ChunkError(
                "the operators of the step depend on the chunk dimension's extent. The first that "
                f"differ: at full extent {ours}, at the extent of one chunk {theirs}. Leave loops "
                "over that dimension and branches on its extent (an extent of 1 included) out of "
                "the model"
            )
        known[node] = twin
        yield node, twin


def _correspond(node: fx.Node, twin: fx.Node, known: Mapping[Any, Any]) -> bool:
    if node.op != twin.op:
        return False
    value, twin_value = node.meta.get("val"), twin.meta.get("val")
    if getattr(value, "ndim", None) != getattr(twin_value, "ndim", None):
        return False
    if node.op == "call_function" and node.target != twin.target:
        return False
    return [known.get(source) for source in _operands(node)] == _operands(twin)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments, in order.

    One that is read twice is there twice: ``all_input_nodes`` of ``cat([a, b, a])`` and of
    ``cat([a, a, b])`` are the same.
    """
    return [leaf for leaf in leaves_of((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def _differ(full: fx.GraphModule, node: fx.Node, part: fx.GraphModule, twin: fx.Node) -> bool:
    """Return whether nodes that correspond differ in extents, in a literal, or in a constant."""
    ours, theirs = node.meta.get("val"), twin.meta.get("val")
    is_known = ours is not None and theirs is not None
    if is_known and any(map(_extents_differ, leaves_of(ours), leaves_of(theirs))):
        return True
    if node.op == "get_attr":
        return _constants_differ(constant(full, node), constant(part, twin))
    ours, theirs = leaves_of((node.args, node.kwargs)), leaves_of((twin.args, twin.kwargs))
    if len(ours) != len(theirs):
        return True
    for one, other in zip(ours, theirs, strict=True):
        # Symbols that are left are sizes of the data, not of the chunk dimension.
        if not isinstance(one, (fx.Node, *SYMBOLIC)) and (
            type(one) is not type(other) or bool(one != other)
        ):
            return True
    return False


def _constants_differ(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, fx.GraphModule) and isinstance(theirs, fx.GraphModule):
        return any(_differ(ours, inner, theirs, other) for inner, other in aligned(ours, theirs))
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    for attribute in ("shape", "dtype", "device"):
        if getattr(ours, attribute) != getattr(theirs, attribute):
            return True
    # Meta tensors hold no values that could differ.
    return not ours.is_meta and not torch.equal(ours, theirs)


def _extents_differ(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return theirs is not None and bool(differing_dims(ours, theirs))
    return type(ours) is int and ours != theirs


def differing_dims(ours: torch.Tensor, theirs: torch.Tensor) -> list[int]:
    """Return the dimensions whose extents are known and differ."""
    pairs = enumerate(zip(ours.shape, theirs.shape, strict=True))
    return [dim for dim, (a, b) in pairs if type(a) is int and type(b) is int and a != b]


aten = torch.ops.aten
Extents = dict[Symbol, int]
_RANGES = ("sym_constrain_range", "sym_constrain_range_for_size")


def concretize_chunk_symbolic_shapes_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> fx.GraphModule:
    """Return a new graph at the extents of its example; the given one if it has no symbols.

    Args:
        example_inputs: tensors whose extents are taken; without them the extents of the traced
            example.

    Raises:
        ChunkError: an extent is not known, a guard is false for the numbers, or a symbol is left.
    """
    extents = input_extents(gm, example_inputs)
    if not extents:
        return gm
    return at_extents(gm, extents)


def symbolic_twins(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None, config: ChunkConfig
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Return the graph at its extents, and at those of one chunk; None if it has no symbols."""
    extents = input_extents(gm, example_inputs)
    if not extents:
        return None
    named = gm.graph.output_node().meta.get(DYNAMIC_DIMS, {})
    if config.chunk_dim in named:
        symbol: Symbol = expression_of(named[config.chunk_dim][0])
    elif len(extents) == 1 and not named:
        [symbol] = extents
    else:
        unnamed = [f"{symbol} = {extent}" for symbol, extent in extents.items()]
        raise ChunkError(
            f"the graph's dynamic dimensions are {', '.join(named or unnamed)}: which of them is "
            f"the {config.chunk_dim} dimension is not known; trace with trace_step(..., "
            "dynamic_dims=config.dynamic_dims(inputs))"
        )
    part = config.chunk_extent(extents[symbol], f"{config.module_fqn}, symbol {symbol}")
    return at_extents(gm, extents), at_extents(gm, {**extents, symbol: part})


def input_extents(gm: fx.GraphModule, example_inputs: Sequence[Any] | None) -> Extents:
    """Return the extent of each symbol of the inputs: the example's, or else the trace's."""
    named: Mapping[str, tuple[torch.SymInt, int]] = gm.graph.output_node().meta.get(
        DYNAMIC_DIMS, {}
    )
    traced = {expression_of(symbol): extent for symbol, extent in named.values()}
    examples = itertools.chain(example_inputs or (), itertools.repeat(None))
    extents: Extents = {}
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=False):
        for dim, extent in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if not isinstance(extent, torch.SymInt) or not expression_of(extent).is_symbol:
                continue
            symbol = expression_of(extent)
            number = None
            if isinstance(example, torch.Tensor):
                number = example.shape[dim]
            # Fake examples may have symbols, too.
            if type(number) is not int:
                number = traced.get(symbol, extent.node.hint)
            if number is None:
                raise ChunkError(
                    f"the extent of {describe(node)} in dimension {dim} is not known: give "
                    "example_inputs"
                )
            extents.setdefault(symbol, int(number))
    return extents


def at_extents(gm: fx.GraphModule, extents: Extents) -> fx.GraphModule:
    """Return a new graph with numbers for symbols; refuse numbers that make a guard false."""
    numbers = ", ".join(f"{symbol} = {number}" for symbol, number in extents.items())
    for message in failed_guards(gm, extents):
        raise ChunkError(
            f"with {numbers} the graph's guard is false: {message}; choose extents and num_chunks "
            "for which it holds, or trace a static twin instead"
        )
    made = _Substitution(gm, extents, numbers).run()
    made.graph.output_node().meta.pop(DYNAMIC_DIMS, None)
    for node in nodes_within(made):
        for symbol in [*symbols_of(node.meta.get("val")), *symbols_of([node.args, node.kwargs])]:
            if symbol in extents:
                raise ChunkError(
                    f"{describe(node)} still refers to {symbol} after its extent was put in: "
                    "values may hold symbols in tensors, numbers, and lists or tuples of them"
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
            if node.op == "call_function" and (
                self._becomes_number(node) or self._asserts_numbers(node)
            ):
                continue
            args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
            copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            copied.meta = dict(node.meta)
            if "val" in node.meta:
                copied.meta["val"] = self.value(node.meta["val"])
            if symbols_of(node.meta.get("val")):
                copied.meta.pop("tensor_meta", None)  # it holds the symbols, too
            self.known[node] = copied
            if node.op == "get_attr":
                held = constant(self.gm, node)
                if isinstance(held, fx.GraphModule):
                    held = _Substitution(held, self.extents, self.numbers).run()
                self.attributes[str(node.target)] = held
        return finished(self.graph, self.gm, self.attributes)

    def _mapped(self, arguments: Any) -> Any:
        """Return arguments with the new nodes, literals for sizes, and numbers for symbols."""

        def mapped(item: Any) -> Any:
            return self.known[item] if isinstance(item, fx.Node) else self.value(item)

        return fx.node.map_aggregate(arguments, mapped)

    def _becomes_number(self, node: fx.Node) -> bool:
        """Return whether a node only computes a size; if so, note its number in place of it."""
        value = node.meta.get("val")
        if not isinstance(value, SYMBOLIC) or node.meta.get("unbacked_bindings"):
            return False
        number = self.value(value)
        if isinstance(number, SYMBOLIC):
            return False  # it depends on data as well
        self.known[node] = number
        return True

    def _asserts_numbers(self, node: fx.Node) -> bool:
        """Return whether a node asserts something of numbers alone; refuse a false assertion."""
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if node.target is aten._assert_scalar.default:
            fact, message = self._mapped(node.args[0]), str(node.args[1])
            if isinstance(fact, fx.Node | torch.SymBool):
                return False
        elif name in _RANGES and isinstance(number := self._mapped(node.args[0]), int):
            least, most = node.kwargs.get("min"), node.kwargs.get("max")
            fact = (least is None or number >= least) and (most is None or number <= most)
            message = f"{number} is not within {least} and {most}"
        else:
            return False
        if not fact:
            raise ChunkError(
                f"with {self.numbers} the assertion {describe(node)} is false: {message}; choose "
                "extents and num_chunks for which it holds"
            )
        return True

    def value(self, value: Any) -> Any:
        """Return a value with numbers for symbols; sizes that depend on data stay symbolic."""
        if isinstance(value, SYMBOLIC):
            return replaced(value, self.extents)
        if isinstance(value, list | tuple):
            return fx.node.map_aggregate(value, self.value)
        if isinstance(value, torch.Tensor) and symbols_of(value):
            shape = [self.value(extent) for extent in value.shape]
            return value_like(value, shape, [self.value(stride) for stride in value.stride()])
        return value
