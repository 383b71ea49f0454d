"""Read what is packed into a collective and where its result goes, whoever bucketed the graph.

The way up: each value is described by its *parts*, graph inputs and their bytes in memory order.
``cat``, copies into a buffer and torch's packing operators join parts. A value with one parameter
above it is one part. A value that depends on a user's input is an *activation*, no payload. A value
with parameters above it that cannot be read is *unread*, with the node at which the order is lost.

The way down follows each piece of the result to the outputs of the graph.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import (
    COPY_IN,
    PRE_BUCKET_ALL_GATHER,
    dtypes_of_buckets,
    is_control_dependency,
)
from pytest_gtrainer._torch.values import OpOverload, schema
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import (
    argument_of,
    arguments_given,
    held,
    is_view,
    is_wait,
    short_name,
    walk,
    written_operands,
)

_aten = torch.ops.aten
_KEEPS_ORDER = frozenset(
    {
        "view",
        "reshape",
        "_unsafe_view",
        "_reshape_alias",
        "flatten",
        "squeeze",
        "unsqueeze",
        "alias",
        "detach",
        "clone",
        "contiguous",
        "lift_fresh_copy",
        "_to_copy",
        "convert_element_type",
    }
)
# Operators, by a part of their names, whose results have another order.
_TURNS = ("flip", "rev", "rot90", "shuffle", "roll", "take", "gather", "index")
_SPLITS = ("split", "split_with_sizes", "unbind", "chunk")
_MOVES = ("copy", "cat", "stack", "scatter", "split", "slice", "select", "where", "set_", *_TURNS)


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` that come from the graph input ``source``; filling if that is None."""

    source: fx.Node | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unread:
    """Parameters went in, and at ``node`` the order in which they lie is lost."""

    node: fx.Node


ACTIVATION = "activation"
State = tuple[Part, ...] | Unread | str  # parts, unread, or ``ACTIVATION``


def read_sent_states(gm: fx.GraphModule) -> dict[fx.Node, list[State]]:
    """Return for each collective the states of its operands when it is launched.

    Raises:
        ValueError: the graph is not sorted.
    """
    reader = _Reader()
    found = {}
    for node in gm.graph.nodes:
        sent = reader.step(node)
        if sent is not None:
            found[node] = sent
    return found


class _Reader:
    """The states of all values, in the order of the graph."""

    def __init__(self) -> None:
        self._state: dict[fx.Node, State] = {}
        # By a buffer that holds the parts of all ranks, those of this rank.
        self._of_rank: dict[fx.Node, tuple[Part, ...]] = {}
        self._inputs_are_named = False

    def step(self, node: fx.Node) -> list[State] | None:
        """Read the next node; return the states of its operands if it launches a collective."""
        state = self._state
        sent = None
        if node.op == "placeholder":
            self._inputs_are_named |= "gt_input" in node.meta
            state[node] = _input_state(node)
        elif node.op == "get_attr":
            # The module may hold parameters; its other constants are filling.
            value = held(node.graph.owning_module, str(node.target))
            source = node if isinstance(value, torch.nn.Parameter) else None
            state[node] = (Part(source, nbytes_of(value)),)
        elif node.op != "output":
            for operand in node.all_input_nodes:
                if operand not in state:
                    raise ValueError(
                        f"the graph is not sorted: {node.name} uses {operand.name} before it is "
                        "defined, as torch's bucketing leaves a graph; call torch._inductor."
                        "pattern_matcher.stable_topological_sort(gm.graph) first"
                    )
            if launches(node.target):
                sent = [state[operand] for operand in sent_operands(node)]
            state[node] = result = self._result(node)
            for written in written_operands(node):
                for alias in _aliases(written) & state.keys():
                    # Only copy_ says what lies in memory then, and not in other views of it.
                    is_known = alias is written and node.target is _aten.copy_.default
                    state[alias] = result if is_known or result == ACTIVATION else Unread(node)

        return sent

    def _result(self, node: fx.Node) -> State:
        """Return the state of what an operator gives."""
        operands = [self._state[operand] for operand in _operands(node)]
        nbytes = nbytes_of(node.meta.get("val"))
        scaled = scaled_operand(node)
        if len(operands) > 1 and scaled is not None:
            parts = self._state[scaled]
            if isinstance(parts, tuple) and sources_of([parts]):
                return _scaled(parts, nbytes) or Unread(node)

        sources = sources_of(operands)
        if ACTIVATION in operands:
            # A bucket of activations and parameters is no activation.
            if sources and _packs(node):
                return Unread(node)
            return ACTIVATION

        joined = self._joined(node)
        if joined is not None:
            return joined

        unread = next((operand for operand in operands if isinstance(operand, Unread)), None)
        if unread is None and len(sources) <= 1:
            return (Part(next(iter(sources), None), nbytes),)
        keeps_order = is_wait(node) or short_name(node) in _KEEPS_ORDER
        if keeps_order and len(operands) == 1 and isinstance(operands[0], tuple):
            return _scaled(operands[0], nbytes) or Unread(node)
        # Without metadata, parameters and inputs are alike, and their product is no bucket.
        if len(operands) > 1 and computes(node) and not self._inputs_are_named:
            return ACTIVATION
        return unread or Unread(node)

    def _joined(self, node: fx.Node) -> State | None:
        """Return the parts of an operator that packs; None for all others."""
        target: Any = node.target
        args: Any = node.args
        if target is _aten.cat.default and _is_outermost(node, node, 1):
            # The result has the widest dtype, to which the other tensors are cast.
            width = node.meta["val"].element_size()
            return self._concatenated(args[0], [_numel(tensor) * width for tensor in args[0]])

        if target is _aten.copy_.default:
            return self._concatenated([args[1]], [nbytes_of(node.meta.get("val"))])

        name = schema(target).name if isinstance(target, OpOverload) else ""
        sizes: list[int] = []
        if name == PRE_BUCKET_ALL_GATHER:
            for tensor, index in zip(args[0], args[3], strict=True):
                dtype = dtypes_of_buckets()[index]
                sizes.append(tensor.meta["val"].numel() * dtype.itemsize)
        elif name == COPY_IN:
            width = args[1].meta["val"].element_size()
            sizes += [size * width for size in args[2]]
        else:
            base = args[0] if args else None
            if isinstance(base, fx.Node) and base in self._of_rank and _is_part_of_rank(node, base):
                return self._of_rank[base]
            return None

        parts = self._concatenated(args[0], sizes)
        if isinstance(parts, tuple):
            # What they give has the parts of all ranks, and those of the others are unknown.
            self._of_rank[node] = parts
            return Unread(node)

        return parts

    def _concatenated(self, tensors: Any, sizes: Iterable[int]) -> State:
        """Return the parts of tensors one after the other, each brought to its size."""
        found: list[Part] = []
        for tensor, size in zip(tensors, sizes, strict=True):
            parts = self._state[tensor]
            if isinstance(parts, Unread):
                return parts
            scaled = None
            if isinstance(parts, tuple):
                scaled = _scaled(parts, size)
            if scaled is None:
                return Unread(tensor)
            found += scaled
        return tuple(found)


def sources_of(states: Iterable[State]) -> dict[fx.Node, None]:
    """Return the parameters among the parts of states, each once, in order."""
    found: dict[fx.Node, None] = {}
    for parts in states:
        if not isinstance(parts, tuple):
            continue
        for part in parts:
            if part.source is not None:
                found[part.source] = None
    return found


def _input_state(node: fx.Node) -> State:
    """Return the state of a placeholder; an unknown one is a parameter unless it holds indices."""
    value = node.meta.get("val")
    kind = node.meta.get("gt_input", {}).get("kind")
    is_number = not isinstance(value, torch.Tensor) or value.dtype in (torch.int64, torch.bool)
    if kind == "input" or (kind is None and is_number):
        return ACTIVATION
    # A buffer is filling, because no layout names it.
    return (Part(None if kind == "buffer" else node, nbytes_of(value)),)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the values that a node computes from.

    A control dependency does not read the values that it only stands after.
    """
    if is_control_dependency(node):
        return [operand for operand in node.args[2:] if isinstance(operand, fx.Node)]
    return node.all_input_nodes


def sent_operands(launch: fx.Node) -> list[fx.Node]:
    """Return the tensors that go into a collective, without those that only take its result."""
    found: list[fx.Node] = []
    for argument, given in arguments_given(launch):
        if not argument.name.startswith("out"):
            fx.node.map_arg(given, found.append)
    return found


def nbytes_of(value: Any) -> int:
    """Return the bytes of one or several tensors; 0 for no tensor, or if only the run knows."""
    if isinstance(value, list | tuple):
        return sum(map(nbytes_of, value))
    return _numel_of(value) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _scaled(parts: tuple[Part, ...], nbytes: int) -> tuple[Part, ...] | None:
    """Return the parts after a cast to ``nbytes`` in all; None if they do not divide so."""
    total = sum(part.nbytes for part in parts)
    if total == nbytes:
        return parts
    if len(parts) == 1:
        return (Part(parts[0].source, nbytes),)
    if not total or any(part.nbytes * nbytes % total for part in parts):
        return None
    return tuple(Part(part.source, part.nbytes * nbytes // total) for part in parts)


def _packs(node: fx.Node) -> bool:
    """Return whether an operator can only be a bucket: torch's own, or ``cat`` of flat tensors."""
    if node.target is _aten.cat.default:
        return getattr(node.meta.get("val"), "ndim", 0) == 1
    packing = (PRE_BUCKET_ALL_GATHER, COPY_IN)
    return isinstance(node.target, OpOverload) and schema(node.target).name in packing


def _is_outermost(node: fx.Node, whole: fx.Node, place: int) -> bool:
    """Return whether the parts of a ``cat`` or ``split`` lie one after the other in memory.

    Args:
        whole: the node with all parts, the ``cat`` or the operand of the ``split``.
        place: that of the dim among the arguments.
    """
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    value = whole.meta.get("val")
    if not isinstance(value, torch.Tensor) or type(dim) is not int:
        return False
    return all(size == 1 for size in value.shape[: dim % value.ndim])


def _is_part_of_rank(node: fx.Node, base: fx.Node) -> bool:
    """Return whether a node takes this rank's part out of a buffer for all ranks."""
    if node.target is getitem:
        return node.args[1] == 0  # all_gather_copy_in returns this rank's part first
    if node.target is not _aten.slice.Tensor or schema(base.target).name != PRE_BUCKET_ALL_GATHER:
        return False
    _, group_size, _, _, rank, *_ = base.args
    share = base.meta["val"].numel() // group_size
    begin = argument_of(node, "start") or 0
    return bool(begin == share * rank) and _numel(node) == share


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Return the values that share memory with this one, by views."""
    while is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return {node} | walk(node.users, lambda one: one.users, lambda one: is_view(one.target))


def computes(node: fx.Node) -> bool:
    """Return whether an operator of torch makes new numbers: it does more than move or cast."""
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return not any(word in short_name(node) for word in _MOVES)


def reduces(node: fx.Node) -> bool:
    """Return whether an operator makes few numbers of all elements, as a norm does."""
    return isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result comes from the elements at its place."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def scaled_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand that is changed by tensors of one element: by a count, by a loss scale."""
    operands = node.all_input_nodes
    if not is_pointwise(node) or len(operands) < 2:
        return None
    largest = max(operands, key=_numel)
    if _numel(largest) != _numel(node):
        return None
    is_scaled = all(_numel(operand) <= 1 for operand in operands if operand is not largest)
    return largest if is_scaled else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``at`` to ``at + numel`` of a result lie at ``low`` and following of ``node``."""

    node: fx.Node
    low: int
    at: int
    numel: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of a piece of a result.

    Attributes:
        outputs: positions among the results of the graph, if it arrives there.
        used_by: else the node that computes with it.
        added: other values were added to it on the way.
    """

    piece: Piece
    outputs: tuple[int, ...]
    used_by: fx.Node | None = None
    added: bool = False


def follow_result(result: fx.Node, outputs: dict[fx.Node, list[int]]) -> list[Arrival]:
    """Return where the parts of a collective's result go, in the order in which they lie in it."""
    found: list[Arrival] = []
    todo = [(Piece(result, 0, 0, _numel(result)), False)]
    seen: set[tuple[Piece, bool]] = set()
    begins = functools.cache(_begins)
    while todo:
        piece, added = todo.pop()
        if (piece, added) in seen:
            continue
        seen.add((piece, added))
        if piece.node in outputs:
            found.append(Arrival(piece, tuple(outputs[piece.node]), added=added))
        for user in piece.node.users:
            only_orders = is_control_dependency(user) and piece.node not in user.args[2:]
            if user.op == "output" or only_orders:
                continue
            below = _below(piece, user, begins)
            if below is None:
                found.append(Arrival(piece, (), user))
                continue
            is_sum = len(user.all_input_nodes) > 1 and is_pointwise(user)
            joins = added or (is_sum and scaled_operand(user) is None)
            todo += [(each, joins) for each in below]

    return sorted(found, key=lambda arrival: arrival.piece.at)


def _begins(user: fx.Node) -> dict[fx.Node, list[int]]:
    """Return where in a ``cat`` each of its tensors begins; one tensor may stand there twice."""
    found: dict[fx.Node, list[int]] = defaultdict(list)
    begin = 0
    tensors: Any = user.args[0]
    for tensor in tensors:
        found[tensor].append(begin)
        begin += _numel(tensor)
    return found


def _below(
    piece: Piece, user: fx.Node, begins: Callable[[fx.Node], dict[fx.Node, list[int]]]
) -> list[Piece] | None:
    """Return the piece in what a user makes of it.

    None means that the user computes with it, or that the order is lost.
    """
    node, size = piece.node, _numel(piece.node)
    is_whole = piece.low == 0 and piece.numel >= size  # more where its pads have gone
    value = user.meta.get("val")
    below: list[Piece] = []
    if short_name(user) in _SPLITS and _is_outermost(user, user.all_input_nodes[0], 2):
        ends = [0, *accumulate(tensor.numel() for tensor in value)]
        for number, item in _items(user):
            below += _cut(piece, item, ends[number], ends[number + 1] - ends[number])
        return below

    # Operators on lists do not mix the entries of their operand.
    if isinstance(value, list | tuple) and isinstance(user.args[0], list | tuple):
        is_coalesced = launches(user.target) and len(user.args[0]) == len(value)
        if is_coalesced or short_name(user).startswith("_foreach"):
            for number, item in _items(user):
                is_same = (is_coalesced and is_whole) or _numel(item) == size
                if user.args[0][number] is node and is_same:
                    below.append(Piece(item, piece.low, piece.at, piece.numel))
            return below or None

    # A collective in place returns a list.
    if user.target is getitem and isinstance(node.meta.get("val"), list | tuple):
        return [Piece(user, 0, piece.at, _numel(user))]

    begin = _slice_begin(user) if user.target is _aten.slice.Tensor else None
    # A slice from 0 on takes off the padding if nobody else reads the whole; beside other readers
    # it is a member.
    others = [each for each in node.users if each is not user and each.op != "output"]
    if begin or (begin == 0 and not (is_whole and all(map(reduces, others)))):
        return _cut(piece, user, begin, _numel(user))
    if user.target is _aten.cat.default and _is_outermost(user, user, 1):
        return [Piece(user, piece.low + at, piece.at, piece.numel) for at in begins(user)[node]]
    return _kept(piece, user, is_whole)


def _kept(piece: Piece, user: fx.Node, is_whole: bool) -> list[Piece] | None:
    """Return the piece in the result of a user that neither splits nor joins; None if lost."""
    name, size = short_name(user), _numel(piece.node)
    if len(_operands(user)) > 1:
        # A number by which others are scaled is no piece of the result.
        is_number = scaled_operand(user) not in (None, piece.node)
        if is_number or not is_pointwise(user) or not _numel(user) == size > 0:
            return None

    keeps_order = name in _KEEPS_ORDER or is_wait(user) or is_pointwise(user)
    keeps_order |= is_whole and not any(word in name for word in _TURNS)
    if _numel(user) == size and (keeps_order or launches(user.target)):
        return [Piece(user, piece.low, piece.at, piece.numel)]
    # A part that stands for the whole: its padding goes, or a further reduce-scatter takes the
    # share of a rank.
    if is_whole and (is_view(user.target) or launches(user.target)):
        return [Piece(user, 0, piece.at, piece.numel)]
    return None


def _items(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """Return the items of a list of results that the graph takes, each with its number."""
    items = []
    for user in node.users:
        if user.target is getitem:
            # FX does not normalise a negative index.
            items.append((user.args[1] % len(node.meta["val"]), user))
    return items


def _cut(piece: Piece, into: fx.Node, begin: int, width: int) -> list[Piece]:
    """Clip a piece to ``width`` elements from ``begin`` on; nothing if they do not overlap."""
    low, high = max(piece.low, begin), min(piece.low + piece.numel, begin + width)
    if low >= high:
        return []
    return [Piece(into, low - begin, piece.at + low - piece.low, high - low)]


def _numel_of(value: Any) -> int:
    """Return the number of elements; 0 for no tensor, or if only the run knows it."""
    size = value.numel() if isinstance(value, torch.Tensor) else 0
    # With dynamic shapes it is a SymInt, and a comparison would put a guard on it.
    return size if type(size) is int else 0


def _numel(node: fx.Node) -> int:
    """Return the number of elements of a node's value, as ``_numel_of``."""
    return _numel_of(node.meta.get("val"))


def _slice_begin(node: fx.Node) -> int | None:
    """Return the first element of a slice whose elements lie one after the other; else None."""
    value = node.all_input_nodes[0].meta.get("val")
    begin = argument_of(node, "start")
    if begin is None:
        begin = 0
    if not isinstance(value, torch.Tensor) or type(begin) is not int:
        return None
    if argument_of(node, "dim") != 0 or argument_of(node, "step") != 1:
        return None
    rows = value.shape[0]
    if begin < 0:
        begin += rows
    return begin * (value.numel() // max(rows, 1))
