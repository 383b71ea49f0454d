"""Which operators mix rows: whether what a chunk computes depends on which rows are in it.

*Idea.* ``Rows`` have the chunk dimension; a ``Statistic`` is over all rows of a chunk. An operator mixes if it works
along that dimension (``_ALONG``), picks rows by their number (``_BY_NUMBER``), relates each row to each other one, or
brings a statistic back into rows. *Routing* is free: integers may be computed across rows, and sort and split them, but
no floating-point number may be computed from such integers. What the module makes itself, as ``zeros``, may choose rows
by their own number, and else not meet them. An operator that no table, tag (pointwise), rule of dimensions, or forward
of the same operator judges is refused.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, pytree, schema
from pytest_gtrainer.graph.nodes import is_view
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, ChunkWarning, is_inexact

INPUT, ROUTED, ROUTING = "input", "routed", "routing"
"""What rows hold: data in place; data in an order of the data; integers across rows."""
MADE, NUMBERS, COUNTED = "made", "numbers", "counted"
"""Without data: the same in every row; 0, 1, ...; something else that depends on a row's number, or on how many rows
there are."""
_WITHOUT_DATA = {MADE, NUMBERS, COUNTED}
HOW_MANY = "how many rows there are"


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor with the chunk dimension: where it has it, and what its rows hold."""

    dims: tuple[int, ...]
    hold: str = INPUT
    front: int = (
        1  # of a dimension that is merged of others, positions in front of the chunk dimension
    )

    def in_front(self, tensor: torch.Tensor) -> int:
        """Positions in front of the chunk dimension in all."""
        return math.prod(tensor.shape[: self.dims[0]]) * self.front


@dataclass(frozen=True, slots=True)
class Statistic:
    """A value over all rows of a chunk, and the operator that made it, in words."""

    made_by: str


Known = Rows | Statistic | None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor or number among the arguments of an operator, and what is known of it."""

    value: Any
    known: Known

    @property
    def is_float(self) -> bool:
        return is_inexact(self.value) or isinstance(self.value, torch.SymFloat)


class Call:
    """One call of an operator; ``part``: the arguments at a chunk's extent; ``counts``: a number depends on rows."""

    def __init__(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[tuple[Any, Sequence[int]]],
        part: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self.target, self.results, self.counts = target, results, False
        self.given: dict[str, Any] = {str(place): value for place, value in enumerate(args)} | dict(
            kwargs
        )
        self.name, self.full_name = str(getattr(target, "__name__", target)), str(target)
        if isinstance(target, HigherOrderOperator):
            self.name = self.full_name = target.name()
        elif isinstance(target, OpOverload):
            self.full_name = schema(target).name
            space, _, name = self.full_name.partition("::")
            if space in _OURS:  # another library's `norm` is not torch's
                self.name = name.removesuffix("_") if not name.startswith("__") else name
            else:
                self.name = self.full_name
            arguments = schema(target).arguments
            self.given = _bound(arguments, args, kwargs)
            theirs = _bound(arguments, *part) if part is not None else self.given
            numbers = [a.name for a in arguments if re.search("number|float|Tensor", str(a.type))]
            pairs = [(self.given[name], theirs[name]) for name in numbers]
            self.counts = any(
                isinstance(a, int | float) and isinstance(b, int | float) and a != b
                for a, b in pairs
            )
        self.operands = [
            leaf for leaf in pytree.tree_leaves([args, kwargs]) if isinstance(leaf, Operand)
        ]
        tags = target.tags if isinstance(target, OpOverload) else ()
        self.pointwise = torch.Tag.pointwise in tags or self.name in _POINTWISE
        self.is_backward = "backward" in self.name and "::" not in self.name

    def rows(self) -> list[tuple[Operand, Rows]]:
        return [
            (operand, operand.known) for operand in self.operands if isinstance(operand.known, Rows)
        ]

    @property
    def ndim(self) -> int:
        """Dimensions of the first tensor."""
        return next((o.value.ndim for o in self.operands if isinstance(o.value, torch.Tensor)), 0)


def _bound(
    arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by their names in a schema."""
    pairs = enumerate(arguments)
    return {
        a.name: args[place] if place < len(args) else kwargs.get(a.name, a.default_value)
        for place, a in pairs
    }


Rule = Callable[[Call], Iterable[int]]


def _named(argument: str) -> Rule:
    """The dimensions that an argument names; all without one."""

    def dims(call: Call) -> Iterable[int]:
        found = call.given.get(argument)
        if isinstance(found, int):
            return [found]
        return list(found) if found else range(call.ndim)

    return dims


def _batch_norm(call: Call) -> Iterable[int]:
    training = call.given.get("training", call.given.get("train", "no_training" not in call.name))
    return (
        [dim for dim in range(call.ndim) if dim != 1]
        if training and "no_update" not in call.name
        else ()
    )


def _sliced(call: Call) -> Iterable[int]:
    dim: int = call.given["dim"]
    start, end, step = (call.given.get(name) for name in ("start", "end", "step"))
    extent = call.operands[0].value.shape[dim]
    whole = (
        start in (None, 0)
        and step == 1
        and (end is None or (type(end) is type(extent) is int and end >= extent))
    )
    return () if whole else [dim]


def _padded(call: Call) -> Iterable[int]:
    pads = call.given["pad"] if "pad" in call.given else call.given["padding"]
    return [-1 - place // 2 for place, pad in enumerate(pads) if pad != 0]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _table(*entries: tuple[str, str, Rule]) -> dict[str, tuple[str, Rule]]:
    return {name: (words, rule) for words, names, rule in entries for name in names.split()}


_ALONG = _table(
    (
        "takes the softmax over",
        "_softmax _log_softmax _safe_softmax softmax log_softmax",
        _named("dim"),
    ),
    (
        "accumulates along",
        "cumsum cumprod logcumsumexp cummax cummin _cummax_helper _cummin_helper",
        _named("dim"),
    ),
    ("orders the rows of", "sort argsort topk", _named("dim")),
    (
        "normalises over",
        "native_layer_norm _fused_rms_norm layer_norm rms_norm",
        lambda call: range(-len(call.given["normalized_shape"]), 0),
    ),
    ("normalises over", "native_group_norm group_norm", lambda call: range(1, call.ndim)),
    (
        "takes batch statistics over",
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "cudnn_batch_norm _native_batch_norm_legit_no_training miopen_batch_norm batch_norm _batch_norm_with_update "
        "_batch_norm_with_update_functional _batch_norm_no_update",
        _batch_norm,
    ),
    (
        "attends over",
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention flex_attention",
        lambda call: range(-2, 0),
    ),
    (
        "convolves over",
        "convolution _convolution convolution_overrideable mkldnn_convolution",
        lambda call: range(1, call.ndim),
    ),
    (
        "pools over",
        "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool2d_with_indices "
        "max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
        lambda call: range(-next(n for n in (1, 2, 3) if f"{n}d" in call.name), 0),
    ),
    ("transforms", "_fft_r2c _fft_c2c _fft_c2r", _named("dim")),
)
"""Operators whose values depend on others along some dimensions: in words, the names, and which dimensions."""

_BY_NUMBER = _table(
    ("reverses", "flip", _named("dims")),
    ("rolls", "roll", _named("dims")),
    ("rotates", "rot90", _named("dims")),
    ("takes a part of", "slice narrow slice_scatter", _sliced),
    ("takes a part of", "select unbind select_scatter", _named("dim")),
    ("splits", "split split_with_sizes chunk", _named("dim")),
    ("puts windows over", "unfold", _named("dimension")),
    (
        "shows memory across",
        "as_strided as_strided_copy as_strided_scatter",
        lambda call: range(call.ndim),
    ),
    (
        "takes the diagonal of",
        "diagonal diagonal_copy",
        lambda call: [call.given["dim1"], call.given["dim2"]],
    ),
    ("cuts a triangle out of", "tril triu", lambda call: range(-2, 0)),
    (
        "repeats",
        "repeat",
        lambda c: [-1 - dim for dim, n in enumerate(reversed(c.given["repeats"])) if n != 1],
    ),
    (
        "puts rows behind each other along",
        "cat",
        lambda c: [c.given["dim"]] * (len(c.given["tensors"]) > 1),
    ),
    (
        "pads",
        "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d",
        _padded,
    ),
)
"""Operators that choose rows by their number, which in a chunk is another one."""

_LOOKUPS = _names("index _unsafe_index gather index_select take_along_dim embedding")
_WRITES = _names(
    "scatter scatter_add scatter_reduce index_put _unsafe_index_put _index_put_impl index_add index_copy index_fill "
    "index_reduce"
)
INDEXING = _LOOKUPS | _WRITES
RESHAPES = _names("view _unsafe_view reshape _reshape_alias unflatten flatten")
_SAME_IN_EVERY_ROW = _names(
    "zeros ones full empty empty_strided empty_permuted scalar_tensor rand randn randint normal bernoulli expand repeat"
)
"""What makes rows that are all the same, or random, of no rows: those that a chunk makes are as good as the whole's."""
_SEARCHES = _names("bucketize searchsorted")
_POINTWISE = _names(
    "_to_copy copy fill zero masked_fill floor_divide lift_fresh_copy detach alias clone where _wrap_tensor_autograd"
)
_BY_DIMENSIONS = _names(
    "sum mean amax amin max min aminmax prod var std var_mean std_mean linalg_vector_norm norm any all argmax argmin "
    "logsumexp nansum count_nonzero histc bincount median nanmedian kthvalue mode mm bmm addmm baddbmm addbmm addmv mv "
    "dot vdot linear matmul _grouped_mm _scaled_mm _scaled_grouped_mm _int_mm native_dropout dropout stack glu nonzero "
    "nonzero_static masked_select _local_scalar_dense bernoulli wait_tensor all_to_all_single sym_size sym_numel "
    "_assert_scalar _assert_async _assert_tensor_metadata embedding_dense_backward equal item squeeze"
)
_LIKE = re.compile(r"[^:]+_like$|^new_.+")
_OURS = (
    "aten",
    "prims",
    "_c10d_functional",
    "_c10d_functional_autograd",
)  # the namespaces whose names the tables mean


def refuse_mixing(what: str, wrong: str, where: str, config: ChunkConfig, told: set[str]) -> None:
    """Refuse an operator, ``what``, in module ``where``; warn once of numbers that are each chunk's own (G15)."""
    vouch, is_number = "", HOW_MANY in wrong or "their number" in wrong
    if "not known" in wrong:
        vouch = "; if it treats each row by itself, say so: ChunkConfig(row_wise=(its name,)), as 'mylib::norm'"
    elif is_number:
        vouch = f"; if you mean those of each chunk, say so: ChunkConfig(row_wise=({config.module_fqn!r},))"
    message = (
        f"{what} {wrong} inside {where}: there lies the {config.chunk_dim} dimension, by which {where} is chunked, so "
        "rows of a chunk would not see those of the others and the numbers would not be the model's. Keep that "
        f"dimension apart from those that the operator works along, or chunk modules without it{vouch}"
    )
    if not is_number:
        raise ChunkError(message)
    if config.module_fqn not in told:
        told.add(config.module_fqn)
        warnings.warn(message, ChunkWarning, stacklevel=2)


def judge(call: Call, what: str, where: str, config: ChunkConfig, told: set[str]) -> list[Known]:
    """What is known of a call's results; refuse it, with the words of ``refuse_mixing``, if it mixes rows."""
    if call.full_name not in config.row_wise and (wrong := _wrong(call)) is not None:
        refuse_mixing(what, wrong, where, config, told)
    return [_result(call, value, tuple(dims), what) for value, dims in call.results]


def _wrong(call: Call) -> str | None:
    """What is wrong, as a predicate ("sums over dimension 0")."""
    rows = call.rows()
    if pair := next((dims for _, dims in call.results if len(dims) > 1), None):
        return f"relates every row to every other one (dimensions {' and '.join(map(str, pair))})"
    if _LIKE.match(call.name):
        return None
    if statistic := _statistic_in_rows(call):
        return f"brings into rows a value over all of them ({statistic})"
    if not rows:
        return None
    last = _wrong_index if call.name in INDEXING else _wrong_along
    return _made_in_rows(call) or _wrong_order(call) or last(call)


def _wrong_along(call: Call) -> str | None:
    """Whether the operator works along the chunk dimension, or is not known."""
    rows = call.rows()
    if call.name in _SEARCHES:
        sequence: Operand = call.given[
            "boundaries" if call.name == "bucketize" else "sorted_sequence"
        ]
        last = sequence.value.ndim - 1
        return (
            f"searches along dimension {last}"
            if last in getattr(sequence.known, "dims", ())
            else None
        )
    words, rule = _ALONG.get(call.name) or _BY_NUMBER.get(call.name) or ("", None)
    if rule is not None:
        free = {ROUTED, ROUTING} if call.name in _BY_NUMBER else set()
        for operand, known in rows:
            computes_routing = (
                call.name in _ALONG and not operand.is_float and known.hold not in (NUMBERS, MADE)
            )
            if operand.value.ndim != call.ndim or known.hold in free or computes_routing:
                continue
            if hit := {dim % call.ndim for dim in rule(call)}.intersection(known.dims):
                return f"{words} dimension {min(hit)}"
        return None
    if call.pointwise or is_view(call.target) or call.name in _BY_DIMENSIONS or call.is_backward:
        return None
    numbers = [value for value, _ in _tensors(call)]
    if not numbers or not any(map(is_inexact, [*numbers, *(o.value for o, _ in rows)])):
        return None  # a size, or routing
    dims = sorted({dim for _, known in rows for dim in known.dims})
    return f"may mix dimension {', '.join(map(str, dims))}: what it does along its dimensions is not known"


def _tensors(call: Call) -> list[tuple[torch.Tensor, Sequence[int]]]:
    return [(value, dims) for value, dims in call.results if isinstance(value, torch.Tensor)]


def _made_in_rows(call: Call) -> str | None:
    """Whether numbers of rows, or what depends on them, would meet rows of data in floating-point numbers."""
    if call.is_backward or not any(is_inexact(value) for value, _ in _tensors(call)):
        return None
    index = [operand for _, operand in chosen_by(call)[1]] if call.name in INDEXING else []
    holds = {
        known.hold for operand, known in call.rows() if all(operand is not one for one in index)
    }
    if holds <= _WITHOUT_DATA or holds.isdisjoint((NUMBERS, COUNTED)):
        return None
    return "brings into rows what depends on their number, or on how many there are, and is another one in a chunk"


def _wrong_order(call: Call) -> str | None:
    """Whether a reshape tears rows apart, or rows in two orders would stand beside each other."""
    rows = [
        (o.value, known)
        for o, known in call.rows()
        if is_plain(o.value) and known.hold not in (MADE, ROUTED, ROUTING)
    ]
    if (
        call.name in RESHAPES
        and rows
        and is_plain(result := call.results[0][0])
        and call.results[0][1]
    ):
        ((source, known), *_), (dim, *_) = rows, call.results[0][1]
        if known.in_front(source) % math.prod(result.shape[:dim]):
            return (
                f"folds rows into dimensions in front of dimension {dim}, so that a chunk is folded otherwise than the "
                "whole: write x.shape[i], or -1, for the dimension of the rows"
            )
    if call.pointwise and not call.is_backward:
        fronts = {(dim - value.ndim, known.front) for value, known in rows for dim in known.dims}
        if len(fronts) > len({dim for dim, _ in fronts}):
            return f"puts rows beside others, in another order, in dimension {min(rows[0][1].dims)}"
    return None


def is_plain(tensor: Any) -> bool:
    """Whether its extents are numbers, none of the data."""
    return isinstance(tensor, torch.Tensor) and all(type(extent) is int for extent in tensor.shape)


def _statistic_in_rows(call: Call) -> str | None:
    """The statistic, or routing, that this call would bring into rows of floating-point numbers."""
    if call.is_backward or not any(dims and is_inexact(value) for value, dims in _tensors(call)):
        return None
    if call.counts and any(known.hold not in _WITHOUT_DATA for _, known in call.rows()):
        return HOW_MANY
    for operand in call.operands:
        known = operand.known
        if isinstance(known, Statistic) and (operand.is_float or call.pointwise):
            return known.made_by
        if isinstance(known, Rows) and known.hold == ROUTING and call.pointwise:
            return "integers computed across rows"
    return None


def _wrong_index(call: Call) -> str | None:
    """Whether rows are chosen by a fixed number; by their own number, or by numbers of the data, they may be."""
    into, chosen = chosen_by(call)
    for dim, index in chosen:
        hold = index.known.hold if isinstance(index.known, Rows) else None
        if isinstance(into.known, Rows) and dim in into.known.dims:
            fixed = hold in (None, MADE, COUNTED) and not isinstance(index.known, Statistic)
            fixed = fixed or (hold == NUMBERS and index.value.numel() != into.value.shape[dim])
            of_rows = into.known.hold not in (ROUTED, ROUTING)
            if fixed and of_rows and (into.known.hold != MADE or call.name in _WRITES):
                return f"chooses rows of dimension {dim} by a fixed number"
        elif into.known is None and hold == ROUTING and into.is_float and call.name in _LOOKUPS:
            return "looks up numbers by integers computed across rows"
    return None


def chosen_by(call: Call) -> tuple[Operand, list[tuple[int, Operand]]]:
    """What an indexing operator indexes, and in which of its dimensions by which tensor."""
    into: Operand = call.given["self"] if "self" in call.given else call.given["weight"]
    indices = call.given.get("indices", call.given.get("index"))
    if isinstance(indices, Operand):
        return into, [(call.given.get("dim", 0) % max(into.value.ndim, 1), indices)]
    chosen: list[tuple[int, Operand]] = []
    place = 0
    for index in indices or ():
        is_mask = index is not None and index.value.dtype in (torch.bool, torch.uint8)
        width = index.value.ndim if is_mask else 1
        chosen += [(place + axis, index) for axis in range(width) if index is not None]
        place += width
    return into, chosen


def _result(call: Call, value: Any, dims: tuple[int, ...], what: str) -> Known:
    rows = call.rows()
    statistics = [o.known for o in call.operands if isinstance(o.known, Statistic)]
    if (is_like := _LIKE.match(call.name)) or not (rows or statistics):
        if not dims:
            return Statistic(f"{what}, by {HOW_MANY}") if call.counts else None
        if (
            call.name == "arange"
            and call.given.get("start", 0) == 0
            and call.given.get("step", 1) == 1
        ):
            return Rows(dims, NUMBERS)
        same = (is_like or call.name in _SAME_IN_EVERY_ROW) and not call.counts
        return Rows(dims, MADE if same else COUNTED)
    if not dims:
        return statistics[0] if statistics and not rows else Statistic(what)
    hold = _hold(call, {known.hold for _, known in rows}, bool(statistics), value)
    unknown = hold == INPUT and any(isinstance(value.shape[dim], torch.SymInt) for dim in dims)
    return Rows(dims, ROUTED if unknown else hold, _front(call, value, dims[0]))


def _front(call: Call, value: Any, dim: int) -> int:
    rows = [(operand.value, known) for operand, known in call.rows()]
    if not rows or not all(map(is_plain, [value, *(source for source, _ in rows)])):
        return 1
    if call.name in RESHAPES:
        ((source, known),) = rows
        return max(1, known.in_front(source) // (math.prod(value.shape[:dim]) or 1))
    return max(
        (known.front for source, known in rows if source.shape[known.dims[0]] == value.shape[dim]),
        default=1,
    )


def _hold(call: Call, holds: set[str], has_statistics: bool, value: Any) -> str:
    is_float = is_inexact(value)
    counted, of_data = bool(holds & {NUMBERS, COUNTED}), holds - _WITHOUT_DATA
    if call.name in INDEXING:
        return _hold_of_indexed(call, holds, is_float)
    if not is_float:
        along = _ALONG.get(call.name)
        dims = {dim % call.ndim for dim in along[1](call)} if along and call.ndim else set()
        across = (
            ROUTING in holds
            or has_statistics
            or any(dims.intersection(known.dims) for _, known in call.rows())
        )
        if (counted or call.counts) and getattr(value, "dtype", None) is torch.bool:
            return COUNTED
        if across or (of_data and (counted or call.counts)):
            return ROUTING
    if call.name == "all_to_all_single":
        return ROUTED
    if of_data or not (counted or call.counts):
        return _first(holds)
    own = (
        holds == {NUMBERS} and not call.counts and value.numel() == call.rows()[0][0].value.numel()
    )
    return (
        NUMBERS if own and (is_view(call.target) or call.name in ("_to_copy", "clone")) else COUNTED
    )


def _hold_of_indexed(call: Call, holds: set[str], is_float: bool) -> str:
    """What rows hold that are looked up or written to."""
    into, chosen = chosen_by(call)
    if not isinstance(into.known, Rows):
        return (
            ROUTED
            if call.name in _WRITES
            else COUNTED
            if holds <= {NUMBERS, COUNTED}
            else _first(holds)
        )
    by_data = [i.known for dim, i in chosen if dim in into.known.dims and isinstance(i.known, Rows)]
    if any(known.hold not in _WITHOUT_DATA for known in by_data):
        if into.known.hold in (NUMBERS, COUNTED):
            return COUNTED if is_float else ROUTING
        given = [
            known.hold
            for operand, known in call.rows()
            if all(operand is not index for _, index in chosen)
        ]
        if call.name in _WRITES and _WITHOUT_DATA.issuperset(given):  # it counts rows
            return ROUTING
        return ROUTING if into.known.hold == ROUTING else ROUTED
    if into.known.hold != MADE:
        return into.known.hold
    return _first(holds) if holds - _WITHOUT_DATA or holds <= {MADE} else COUNTED


def _first(holds: set[str]) -> str:
    return next((hold for hold in (INPUT, ROUTED, ROUTING, MADE) if hold in holds), INPUT)
