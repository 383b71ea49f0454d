"""What is packed into a collective and where its result goes, read off data movement: whoever
bucketed the graph.

The way up: each value is told as its *parts*, graph inputs and their bytes in memory order.
``cat``, copies into a buffer and torch's packing operators join parts; what has one parameter above
it is one part. The way down follows a piece of the result to the graph's outputs. A value that
depends on a user's input is an *activation*, no payload. What has parameters above it and cannot be
read is *unread*, with the node at which the order is lost.
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
    arguments_given,
    held,
    is_view,
    is_wait,
    short_name,
    walked,
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
_TURNS = (
    "flip",
    "rev",
    "rot90",
    "shuffle",
    "roll",
    "take",
    "gather",
    "index",
)  # what they give has another order
_MOVES = ("copy", "cat", "stack", "scatter", "split", "slice", "select", "where", "set_", *_TURNS)


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` that come from one graph input; from none, so filling."""

    source: fx.Node | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unread:
    """Parameters went in, and at ``node`` the order in which they lie is lost."""

    node: fx.Node


ACTIVATION = "activation"
State = tuple[Part, ...] | Unread | str  # parts, unread, or ``ACTIVATION``


def packed(gm: fx.GraphModule) -> dict[fx.Node, list[State]]:
    """For each collective what goes in at its launch, in one walk; a ValueError if the graph is not
    sorted.
    """
    reader = _Reader()
    return {node: sent for node in gm.graph.nodes if (sent := reader.step(node)) is not None}


class _Reader:
    """The state of every value so far."""

    def __init__(self) -> None:
        self._state: dict[fx.Node, State] = {}
        self._of_rank: dict[
            fx.Node, tuple[Part, ...]
        ] = {}  # of buffers for all ranks, the parts of this one
        self._inputs_are_told = False

    def step(self, node: fx.Node) -> list[State] | None:
        """Read the next node; of a collective what goes in."""
        state = self._state
        if node.op == "placeholder":
            self._inputs_are_told |= "gt_input" in node.meta
            state[node] = _of_input(node)
        elif node.op == "output":
            return None
        elif node.op == "get_attr":
            value = held(node.graph.owning_module, str(node.target))
            # a parameter that the module holds; other constants are filling
            state[node] = (
                Part(node if isinstance(value, torch.nn.Parameter) else None, nbytes_of(value)),
            )
        elif late := [operand for operand in node.all_input_nodes if operand not in state]:
            raise ValueError(
                f"the graph is not sorted: {node.name} uses {late[0].name} before it is defined, as torch's bucketing "
                "leaves a graph; call torch._inductor.pattern_matcher.stable_topological_sort(gm.graph) first"
            )
        else:
            sent = (
                [state[operand] for operand in sent_operands(node)]
                if launches(node.target)
                else None
            )
            state[node] = result = self._result(node)
            for written in written_operands(node):
                for alias in _aliases(written):
                    if alias in state:
                        known = alias is written and node.target is _aten.copy_.default
                        state[alias] = result if known or isinstance(result, str) else Unread(node)
            return sent
        return None

    def _result(self, node: fx.Node) -> State:
        operands = [self._state[operand] for operand in _operands(node)]
        parts = self._state.get(scaled_operand(node) or node) if len(operands) > 1 else None
        if isinstance(parts, tuple) and any(part.source for part in parts):
            return _scaled(parts, nbytes_of(node.meta.get("val"))) or Unread(node)
        if any(isinstance(operand, str) for operand in operands):
            has_parameter = any(
                part.source for parts in operands if isinstance(parts, tuple) for part in parts
            )
            return (
                Unread(node) if has_parameter and _packs(node) else ACTIVATION
            )  # a bucket of both is no activation
        if (joined := self._joined(node)) is not None:
            return joined
        unread = next((operand for operand in operands if isinstance(operand, Unread)), None)
        sources = {
            part.source: None for parts in operands if isinstance(parts, tuple) for part in parts
        }
        sources.pop(None, None)
        if unread is None and len(sources) <= 1:
            return (Part(next(iter(sources), None), nbytes_of(node.meta.get("val"))),)
        only = operands[0] if len(operands) == 1 else None
        if isinstance(only, tuple) and (is_wait(node) or short_name(node) in _KEEPS_ORDER):
            return _scaled(only, nbytes_of(node.meta.get("val"))) or Unread(node)
        if len(operands) > 1 and computes(node) and not self._inputs_are_told:
            # of parameters and inputs, which only a tracer's metadata would tell apart
            return ACTIVATION
        return unread or Unread(node)

    def _joined(self, node: fx.Node) -> State | None:
        """The parts of an operator that packs; None for all others."""
        target: Any = node.target
        args: Any = node.args
        if target is _aten.cat.default and _is_outermost(node, node, 1):
            width = node.meta[
                "val"
            ].element_size()  # that of the widest dtype: the others are cast to it
            values = [tensor.meta.get("val") for tensor in args[0]]
            sizes = [
                nbytes_of(one) * width // getattr(one, "element_size", lambda: width)()
                for one in values
            ]
            return self._concatenated(args[0], sizes)
        if target is _aten.copy_.default:
            return self._concatenated([args[1]], [nbytes_of(node.meta.get("val"))])
        name = schema(target).name if isinstance(target, OpOverload) else ""
        if name == PRE_BUCKET_ALL_GATHER:
            tensors: Any = args[0]
            widths = [dtypes_of_buckets()[index].itemsize for index in args[3]]
            sizes = [
                tensor.meta["val"].numel() * size
                for tensor, size in zip(tensors, widths, strict=True)
            ]
        elif name == COPY_IN:
            tensors = args[0]
            sizes = [size * args[1].meta["val"].element_size() for size in args[2]]
        else:
            base = args[0] if args else None
            if isinstance(base, fx.Node) and base in self._of_rank and _is_part_of_rank(node, base):
                return self._of_rank[base]
            return None
        parts = self._concatenated(tensors, sizes)
        if isinstance(parts, tuple):
            self._of_rank[node] = parts
            return Unread(node)
        return parts

    def _concatenated(self, tensors: Any, sizes: Iterable[int]) -> State:
        """The parts of tensors one behind the other, each brought to its size."""
        found: list[Part] = []
        for tensor, size in zip(tensors, sizes, strict=True):
            parts = self._state[tensor]
            scaled = _scaled(parts, size) if isinstance(parts, tuple) else None
            if scaled is None:
                return parts if isinstance(parts, Unread) else Unread(tensor)
            found += scaled
        return tuple(found)


def _of_input(node: fx.Node) -> State:
    """A parameter; of an unknown kind too, unless it holds indices. A buffer is filling, as no
    layout names it.
    """
    value, kind = node.meta.get("val"), node.meta.get("gt_input", {}).get("kind")
    is_number = not isinstance(value, torch.Tensor) or value.dtype in (torch.int64, torch.bool)
    if kind == "input" or (kind is None and is_number):
        return ACTIVATION
    return (Part(None if kind == "buffer" else node, nbytes_of(value)),)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The values that a node computes from; a control dependency reads none of those that it only
    stands behind.
    """
    if is_control_dependency(node):
        return [operand for operand in node.args[2:] if isinstance(operand, fx.Node)]
    return node.all_input_nodes


def sent_operands(launch: fx.Node) -> list[fx.Node]:
    """The tensors that go into a collective, without those that it only writes its result to."""
    found: list[fx.Node] = []
    for argument, given in arguments_given(launch):
        if not argument.name.startswith("out"):
            fx.node.map_arg(given, found.append)
    return found


def nbytes_of(value: Any) -> int:
    """Bytes of a tensor or of several; 0 for what is none, or of a size that only the run knows."""
    if isinstance(value, list | tuple):
        return sum(map(nbytes_of, value))
    size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
    return size if type(size) is int else 0


def _scaled(parts: tuple[Part, ...], nbytes: int) -> tuple[Part, ...] | None:
    """The parts after a cast that makes ``nbytes`` of all; None if they do not divide so."""
    if (total := sum(part.nbytes for part in parts)) == nbytes:
        return parts
    if len(parts) == 1:
        return (Part(parts[0].source, nbytes),)
    if not total or any(part.nbytes * nbytes % total for part in parts):
        return None
    return tuple(Part(part.source, part.nbytes * nbytes // total) for part in parts)


def _packs(node: fx.Node) -> bool:
    """Return whether an operator can be nothing but a bucket: torch's own, or ``cat`` of flat
    tensors.
    """
    if node.target is _aten.cat.default:
        return getattr(node.meta.get("val"), "ndim", 0) == 1
    return isinstance(node.target, OpOverload) and schema(node.target).name in (
        PRE_BUCKET_ALL_GATHER,
        COPY_IN,
    )


def _is_outermost(node: fx.Node, whole: fx.Node, place: int) -> bool:
    """Return whether ``cat`` or ``split``, whose argument at ``place`` is the dim, has its parts
    one behind the other.
    """
    value, dim = (
        whole.meta.get("val"),
        node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0),
    )
    if not isinstance(value, torch.Tensor) or type(dim) is not int:
        return False
    return all(size == 1 for size in value.shape[: dim % value.ndim])


def _is_part_of_rank(node: fx.Node, base: fx.Node) -> bool:
    """Return whether a node takes this rank's part out of a buffer for all ranks."""
    if node.target is getitem:
        return node.args[1] == 0  # `all_gather_copy_in` gives it first
    if node.target is not _aten.slice.Tensor or schema(base.target).name != PRE_BUCKET_ALL_GATHER:
        return False
    args: Any = base.args
    share = base.meta["val"].numel() // args[1]
    begin: Any = node.args[2] if len(node.args) > 2 else 0
    return bool(begin == share * args[4]) and _numel(node) == share


def _aliases(node: fx.Node) -> set[fx.Node]:
    """The values that share memory with this one, by views."""
    while is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return {node} | walked(node.users, lambda one: one.users, lambda one: is_view(one.target))


def computes(node: fx.Node) -> bool:
    """Return whether an operator of torch makes new numbers of its operands, more than to move or
    to cast them.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return not any(word in short_name(node) for word in _MOVES)


def reduces(node: fx.Node) -> bool:
    """Return whether an operator makes few numbers of all elements, as a norm does."""
    return isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags


def is_pointwise(node: fx.Node) -> bool:
    """Return whether every element of the result is made of the elements at its place: the order
    stays.
    """
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def scaled_operand(node: fx.Node) -> fx.Node | None:
    """Return what an operator multiplies, divides or else changes by tensors of one element: by a
    count, by a loss scale.
    """
    if not is_pointwise(node) or len(operands := node.all_input_nodes) < 2:
        return None
    first = max(operands, key=_numel)
    is_scaled = _numel(first) == _numel(node) and all(
        _numel(one) <= 1 for one in operands if one is not first
    )
    return first if is_scaled else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``at`` to ``at + numel`` of a result lie at ``low`` and following of ``node``."""

    node: fx.Node
    low: int
    at: int
    numel: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a piece of a result ends: at outputs of the graph by position, or at a node that uses
    it.
    """

    piece: Piece
    outputs: tuple[int, ...]
    used_by: fx.Node | None = None
    added: bool = False


def arrivals(result: fx.Node, outputs: dict[fx.Node, list[int]]) -> list[Arrival]:
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
            if user.op == "output" or (
                is_control_dependency(user) and piece.node not in user.args[2:]
            ):
                continue
            below = _below(piece, user, begins)
            joins = added or (
                len(user.all_input_nodes) > 1
                and is_pointwise(user)
                and scaled_operand(user) is None
            )
            todo += [(one, joins) for one in below or ()]
            if below is None:
                found.append(Arrival(piece, (), user))
    return sorted(found, key=lambda arrival: arrival.piece.at)


def _begins(user: fx.Node) -> dict[fx.Node, list[int]]:
    """Return where in the result of a ``cat`` each of its tensors begins; one may stand there
    twice.
    """
    found: dict[fx.Node, list[int]] = defaultdict(list)
    tensors: Any = user.args[0]
    for tensor, at in zip(tensors, accumulate(map(_numel, tensors), initial=0), strict=False):
        found[tensor].append(at)
    return found


def _below(
    piece: Piece, user: fx.Node, begins: Callable[[fx.Node], dict[fx.Node, list[int]]]
) -> list[Piece] | None:
    """The piece in what a user makes of it; None if it computes with it, or the order is lost."""
    node, name = piece.node, short_name(user)
    size = _numel(node)
    is_whole = piece.low == 0 and piece.numel >= size  # more where its pads have gone
    if name in ("split", "split_with_sizes", "unbind", "chunk") and _is_outermost(
        user, user.all_input_nodes[0], 2
    ):
        at = [0, *accumulate(tensor.numel() for tensor in user.meta["val"])]
        return [
            one for n, item in _items(user) for one in _cut(piece, item, at[n], at[n + 1] - at[n])
        ]
    given: Any = user.args[0] if user.args else None
    value = user.meta.get("val")
    both = (
        isinstance(given, list | tuple)
        and isinstance(value, list | tuple)
        and len(given) == len(value)
    )
    is_coalesced = both and launches(user.target)
    if is_coalesced or name.startswith("_foreach"):
        items = [item for n, item in _items(user) if given[n] is node]
        alike = [item for item in items if (is_coalesced and is_whole) or _numel(item) == size]
        return [Piece(item, piece.low, piece.at, piece.numel) for item in alike] or None
    if user.target is getitem and isinstance(
        node.meta.get("val"), list | tuple
    ):  # of a collective in place
        return [Piece(user, 0, piece.at, _numel(user))]
    begin = _begin(user) if name == "slice" else None
    # the only reader of a whole takes its padding off; beside others it is a member
    alone = is_whole and all(
        other is user or other.op == "output" or reduces(other) for other in node.users
    )
    if begin or (begin == 0 and not alone):
        return _cut(piece, user, begin, _numel(user))
    if user.target is _aten.cat.default and _is_outermost(user, user, 1):
        return [Piece(user, piece.low + at, piece.at, piece.numel) for at in begins(user)[node]]
    is_number = scaled_operand(user) not in (None, node)  # by which others are scaled
    if len(_operands(user)) > 1 and (
        is_number or not is_pointwise(user) or not _numel(user) == size > 0
    ):
        return None
    keeps = is_whole and not any(word in name for word in _TURNS)
    keeps = (
        keeps
        or is_wait(user)
        or launches(user.target)
        or name in _KEEPS_ORDER
        or is_pointwise(user)
    )
    if _numel(user) == size and keeps:
        return [Piece(user, piece.low, piece.at, piece.numel)]
    # a part as a whole: padding goes, or a further reduce-scatter takes a rank's share of it
    is_known = isinstance(user.target, OpOverload) and (
        is_view(user.target) or launches(user.target)
    )
    return [Piece(user, 0, piece.at, piece.numel)] if is_whole and is_known else None


def _items(node: fx.Node) -> list[tuple[int, fx.Node]]:
    return [
        (user.args[1] % len(node.meta["val"]), user)
        for user in node.users
        if user.target is getitem
    ]


def _cut(piece: Piece, into: fx.Node, begin: int, width: int) -> list[Piece]:
    """Return what of a piece lies in ``width`` elements from ``begin``, if anything does."""
    low, high = max(piece.low, begin), min(piece.low + piece.numel, begin + width)
    return [Piece(into, low - begin, piece.at + low - piece.low, high - low)] if low < high else []


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, torch.Tensor) else 0
    return size if type(size) is int else 0


def _begin(node: fx.Node) -> int | None:
    """The first element of a slice of what lies one behind the other; None for another slice."""
    args: Any = node.args
    given: list[Any] = list(args[1:])
    dim, begin, _, step = given + [0, None, None, 1][len(given) :]
    value = args[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or dim != 0 or step != 1:
        return None
    if type(begin) is not int:
        return 0 if begin is None else None
    row = value.numel() // value.shape[0] if value.shape[0] else 0
    return (begin if begin >= 0 else begin + value.shape[0]) * row
