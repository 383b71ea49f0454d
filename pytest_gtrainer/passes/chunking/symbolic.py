"""Numbers for the symbols of dynamic dimensions: graphs of static shapes from a symbolic one.

*Idea.* Replace a symbol by a number in arguments, values and nested graphs, and compute what follows: sizes
become literals, their arithmetic and true guards disappear. Done at extent B and at B/N, this makes twins of one
symbolic trace. *Invariant.* Strides are kept; no symbol that was replaced is left anywhere (H1); what the trace
relied on is checked with the numbers (H2). Symbols of data stay. *Cost.* Linear in nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import (
    Expression,
    Symbol,
    expression_of,
    failed_guards,
    replaced,
    strided_like,
    symbols_of,
)
from pytest_gtrainer._torch.graph_modules import empty_graph, finished
from pytest_gtrainer.graph.nodes import DYNAMIC_DIMS
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, described
from pytest_gtrainer.passes.chunking.twins import constant

aten = torch.ops.aten
Extents = dict[Symbol, int]
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_RANGES = ("sym_constrain_range", "sym_constrain_range_for_size")


def concretize_chunk_symbolic_shapes_pass(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> fx.GraphModule:
    """The graph at the extents of its example: a new one, or the given one if its inputs have no symbols.

    Args:
        example_inputs: tensors whose extents are taken; without them the extents of the traced example.

    Raises:
        ChunkError: an extent is not known, a guard is false for the numbers (H2), or a symbol is left (H1).
    """
    extents = input_extents(gm, example_inputs)
    return at_extents(gm, extents) if extents else gm


def symbolic_twins(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None, config: ChunkConfig
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """The graph at its extents, and with the chunk dimension's divided by N; None if its inputs have no symbols.

    Raises:
        ChunkError: which symbol the chunk dimension is cannot be told, or N does not divide its extent (G9).
    """
    extents = input_extents(gm, example_inputs)
    if not extents:
        return None
    named = gm.graph.output_node().meta.get(DYNAMIC_DIMS, {})
    if config.chunk_dim in named:
        symbol: Symbol = expression_of(named[config.chunk_dim][0])
    elif len(extents) == 1 and not named:
        [symbol] = extents
    else:
        known = ", ".join([*named, *(f"{symbol} = {extent}" for symbol, extent in extents.items() if not named)])
        raise ChunkError(
            f"the graph's dynamic dimensions are {known}: which of them is the {config.chunk_dim} dimension cannot be "
            f"told; trace with trace_step(..., dynamic_dims=config.dynamic_dims(inputs))"
        )
    part = config.chunk_extent(extents[symbol], f"{config.module_fqn}, symbol {symbol}")
    return at_extents(gm, extents), at_extents(gm, {**extents, symbol: part})


def input_extents(gm: fx.GraphModule, example_inputs: Sequence[Any] | None) -> Extents:
    """A number for every symbol that is an extent of an input: the example's, else that of the trace.

    Raises:
        ChunkError: neither is known.
    """
    named: Mapping[str, tuple[torch.SymInt, int]] = gm.graph.output_node().meta.get(DYNAMIC_DIMS, {})
    traced = {expression_of(symbol): extent for symbol, extent in named.values()}
    extents: Extents = {}
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        given = example_inputs[index] if example_inputs is not None and index < len(example_inputs) else None
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
    """A new graph with numbers for symbols.

    Raises:
        ChunkError: a guard is false for these numbers (H2), or a symbol is left (H1).
    """
    numbers = ", ".join(f"{symbol} = {number}" for symbol, number in extents.items())
    for message in failed_guards(gm, extents):
        raise ChunkError(
            f"with {numbers} the graph's guard is false: {message}; choose extents and num_chunks for which it holds, "
            "or trace a static twin instead"
        )
    made = _Substitution(gm, extents, numbers).run()
    made.graph.output_node().meta.pop(DYNAMIC_DIMS, None)
    for node in (n for module in made.modules() if isinstance(module, fx.GraphModule) for n in module.graph.nodes):
        seen: list[Expression] = [*symbols_of(node.meta.get("val")), *symbols_of([node.args, node.kwargs])]
        left = [symbol for symbol in seen if symbol in extents]
        if left:  # H1
            raise ChunkError(
                f"{described(node)} still refers to {left[0]} after its extent was put in: values may hold symbols "
                "in tensors, numbers, and lists or tuples of them"
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
            copied = self.graph.create_node(
                node.op, node.target, self._mapped(node.args), self._mapped(node.kwargs), node.name
            )
            copied.meta = dict(node.meta)
            if "val" in node.meta:
                copied.meta["val"] = self.value(node.meta["val"])
            if symbols_of(node.meta.get("val")):
                copied.meta.pop("tensor_meta", None)
            self.known[node] = copied
            if node.op == "get_attr":
                found = constant(self.gm, node)
                is_graph = isinstance(found, fx.GraphModule)
                found = _Substitution(found, self.extents, self.numbers).run() if is_graph else found
                self.attributes[str(node.target)] = found
        return finished(self.graph, self.gm, self.attributes)

    def _mapped(self, arguments: Any) -> Any:
        """Arguments with the new nodes, literals for sizes, and numbers for symbols."""
        with_nodes = fx.node.map_aggregate(
            arguments, lambda item: self.known[item] if isinstance(item, fx.Node) else item
        )
        return fx.node.map_aggregate(with_nodes, lambda item: self.value(item) if isinstance(item, _SYMBOLIC) else item)

    def _disappears(self, node: fx.Node) -> bool:
        """Whether a node only computes a size, which is a literal now, or states a fact about literals."""
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC) and not node.meta.get("unbacked_bindings"):
            number = self.value(value)
            if not isinstance(number, _SYMBOLIC):
                self.known[node] = number
                return True
        if node.target is aten._assert_scalar.default:
            return self._states(node, self._mapped(node.args)[0], str(node.args[1]))
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        number = self._mapped(node.args)[0] if name in _RANGES else None
        if not isinstance(number, int):
            return False
        least, most = node.kwargs.get("min"), node.kwargs.get("max")
        inside = (least is None or number >= least) and (most is None or number <= most)
        return self._states(node, inside, f"{number} is not within {least} and {most}")

    def _states(self, node: fx.Node, fact: Any, message: str) -> bool:
        if isinstance(fact, fx.Node | torch.SymBool):
            return False
        if not fact:
            raise ChunkError(
                f"with {self.numbers} the assertion {described(node)} is false: {message}; choose extents and "
                "num_chunks for which it holds"
            )
        return True

    def value(self, value: Any) -> Any:
        """A value with numbers for symbols; sizes that depend on data stay symbolic."""
        if isinstance(value, _SYMBOLIC):
            return replaced(value, self.extents)
        if isinstance(value, list | tuple):
            return fx.node.map_aggregate(value, self.value)
        if isinstance(value, torch.Tensor) and symbols_of(value):
            shape, stride = [self.value(e) for e in value.shape], [self.value(e) for e in value.stride()]
            return strided_like(value, shape, stride)
        return value
