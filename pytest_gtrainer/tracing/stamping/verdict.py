"""What a proof says: where layers are refused and why, and whether two graphs are equal."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import Expression, Symbol
from pytest_gtrainer._torch.values import SYMBOLIC, OpOverload, storage_id
from pytest_gtrainer.graph.nodes import node_fqn

VALUES = ("val", "tensor_meta", "eager_input_vals", "unbacked_bindings")
"""Keys of ``node.meta`` that hold tensors and symbols: compared by what they describe."""


class Refused(Exception):
    """What is not proven alike, and where: ``module`` is the run's container, "" for all of them."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module, self.reason = module, reason


class StampedGraphError(AssertionError):
    """The stamped graph is not the one that a full trace gives."""


def described(value: Any, symbols: dict[Symbol, Expression]) -> Any:
    """What can be compared of a value of ``node.meta``: of tensors all but their memory, in renamed symbols."""
    if isinstance(value, torch.Tensor):
        extents = (*value.shape, *value.stride(), value.storage_offset())
        kind = type(value).__name__, value.dtype, value.device, value.requires_grad
        return kind, *(described(extent, symbols) for extent in extents)
    if isinstance(value, SYMBOLIC):
        return value.node.expr.xreplace(symbols)
    if isinstance(value, dict):
        return tuple((described(key, symbols), described(item, symbols)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, *(described(item, symbols) for item in value)
    if hasattr(value, "free_symbols"):
        return value.xreplace(symbols)
    return (type(value).__name__, repr(value)) if isinstance(value, bool | float | complex) else value


def symbol_pairs(one: fx.Node, other: fx.Node) -> Iterator[tuple[Symbol, Expression]]:
    """The data-dependent symbols that one node makes, with those of the other."""
    bound = (node.meta.get("unbacked_bindings") or {} for node in (one, other))
    yield from zip(*bound, strict=False)


def differing_key(one: fx.Node, other: fx.Node, symbols: dict[Symbol, Expression], but: tuple[str, ...]) -> str | None:
    """The first key of ``meta`` in which two nodes differ; ``symbols`` name those of ``one`` as ``other`` does."""
    for key in sorted(one.meta.keys() | other.meta.keys()):
        if (key in one.meta) != (key in other.meta):
            return key
        if key in but:
            continue
        ours, theirs = one.meta[key], other.meta[key]
        if key in VALUES:
            ours, theirs = described(ours, symbols), described(theirs, {})
        if isinstance(ours, OpOverload):  # not one object for one operator everywhere
            ours, theirs = str(ours), str(theirs)
        if ours is not theirs and not bool(ours == theirs):
            return key
    return None


def assert_stamped_equal(full: fx.Graph, stamped: fx.Graph) -> None:
    """Raise a StampedGraphError that names the first node in which the stamped graph is not the full one."""
    if (found := first_difference(full, stamped)) is not None:
        raise StampedGraphError(
            f"the stamped graph is not that of a full trace: {found}. Something made these layers differ that their "
            'attributes do not show, global state for example: trace with repeat_layers="off"'
        )


def first_difference(full: fx.Graph, stamped: fx.Graph, but: tuple[str, ...] = ()) -> str | None:
    """The first node in which the stamped graph is not the full one, in words; None where they are equal. Compared is
    all but the keys ``but`` of metadata: values by what they describe and whose memory they share, and ``seq_nr``,
    which counts what a thread has done before, by its order."""
    theirs: dict[fx.Node, fx.Node] = {}
    memory: dict[tuple[int, int], int] = {}
    symbols: dict[Symbol, Expression] = {}
    numbers: dict[int, int] = {}
    for index, (node, copy) in enumerate(zip(full.nodes, stamped.nodes, strict=False)):
        theirs[node] = copy
        symbols.update(symbol_pairs(node, copy))
        where = f"node {index}, %{node.name} of {node_fqn(node) or 'the model itself'}"
        if (node.op, node.target, node.name) != (copy.op, copy.target, copy.name):
            return f"{where}: {node.op} {node.target} in full, {copy.op} {copy.target} as %{copy.name} stamped"
        wanted = described(fx.map_arg((node.args, node.kwargs), theirs.__getitem__), symbols)
        if wanted != described((copy.args, copy.kwargs), {}):
            ours, its = shown((*node.args, node.kwargs)), shown((*copy.args, copy.kwargs))
            return f"{where}: operands {ours} in full, {its} stamped"
        if (key := differing_key(node, copy, symbols, but=("seq_nr", *but))) is not None:
            return f"{where}: meta {key!r} is {shown(node.meta.get(key))} in full, {shown(copy.meta.get(key))} stamped"
        number = copy.meta.get("seq_nr")
        if number is not None and numbers.setdefault(node.meta["seq_nr"], number) != number:
            return f"{where}: meta 'seq_nr' belongs to another forward node than in full"
        for one, other in zip(tensors_of(node), tensors_of(copy), strict=True):
            if memory.setdefault((0, storage_id(one)), index) != memory.setdefault((1, storage_id(other)), index):
                return f"{where}: its memory is shared with another node than in full"
    if len(full.nodes) != len(stamped.nodes):
        return f"{len(full.nodes)} nodes in full, {len(stamped.nodes)} stamped"
    ranked = [numbers[number] for number in sorted(numbers)]
    if any(after <= before for before, after in itertools.pairwise(ranked)):
        return "meta 'seq_nr' is in another order than in full"
    return None


def shown(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of a node's value, in order."""
    value = node.meta.get("val")
    leaves = value if isinstance(value, list | tuple) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
