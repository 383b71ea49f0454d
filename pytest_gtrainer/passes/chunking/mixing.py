"""Find operators that mix rows: the result for one row depends on other rows of its chunk.

*Idea.* Each value is ``Rows``, which have the chunk dimension, a ``Statistic`` over all rows, or
neither. An operator mixes rows if it

- works along the chunk dimension (``_ALONG``), as a softmax over it;
- picks rows by a fixed number (``_BY_NUMBER``), as ``x[:2]``;
- relates each row to each other one, as ``x @ x.T``;
- or brings a statistic back into rows, as ``x - x.mean(0)``.

*Routing* is free: integers may be computed across rows, and may sort and split them. No
floating-point number may be computed from such integers, and they may not leave rows out.
*Invariant.* An operator that no table, no tag of torch and no rule about dimensions judges is
refused. The backward of an operator in a table is judged by its entry.
*Cost.* Constant for each call.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, pytree, schema
from pytest_gtrainer.graph.nodes import is_view, named_arguments
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError, ChunkWarning, is_inexact

HOW_MANY = "how many rows there are"
_OWN_KIND = "bias[expert[order]] in place of bias.repeat_interleave(counts)"


class Content(Enum):
    """The content of rows. The first four are computed of data, the others the module makes."""

    DATA = auto()
    """Data of the same row: ``linear(x)``."""
    ROUTED = auto()
    """Data in an order, or as many rows, as the data decide: ``x[order]``, ``x[mask]``."""
    ROUTING = auto()
    """Integers computed across rows: ``order = experts.argsort()``, ``experts.cumsum(0)``."""
    CHOOSING = auto()
    """Choices of rows that depend on other rows: ``experts.cumsum(0) <= 4``, its ``nonzero()``."""
    UNIFORM = auto()
    """The same in every row: ``zeros(len(x), 8)``."""
    ROW_NUMBERS = auto()
    """Each row's own number: ``arange(len(x))``."""
    POSITIONAL = auto()
    """Other values that depend on a row's number, or on the number of rows: ``eye(len(x))``."""


_WITHOUT_DATA = {Content.UNIFORM, Content.ROW_NUMBERS, Content.POSITIONAL}
_ACROSS_ROWS = {Content.ROUTING, Content.CHOOSING}
_ORDERED = {Content.ROUTED, Content.ROUTING, Content.CHOOSING}
_OF_A_CHUNK = {Content.ROW_NUMBERS, Content.POSITIONAL}
"""A chunk makes other values than the whole: its rows are numbered from 0, and are fewer."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor that has the chunk dimension.

    Attributes:
        dims: the dimensions where it has it, as a rule one.
        content: what its rows hold.
        front: positions in front of the chunk dimension, within the dimension it is merged into.
            ``x.flatten(0, 1)`` of ``[4, 6, 8]`` with the chunk dimension 1 has 4.
        filled: how many rows were written to memory that may have room for more; None if it was
            made otherwise.
        is_order: they are numbers below the extent of the chunk dimension, as a sort gives.
    """

    dims: tuple[int, ...]
    content: Content = Content.DATA
    front: int = 1
    filled: int | None = None
    is_order: bool = False

    def positions_in_front(self, tensor: torch.Tensor) -> int:
        """Return how many positions of ``tensor`` are in front of the chunk dimension."""
        return math.prod(tensor.shape[: self.dims[0]]) * self.front


@dataclass(frozen=True, slots=True)
class Statistic:
    """A value over all rows of a chunk.

    Attributes:
        made_by: the operator that made it, in words.
        is_count: it depends on nothing but how many rows there are.
    """

    made_by: str
    is_count: bool = False


RowInfo = Rows | Statistic | None
"""What the analysis knows of a value; None if it depends on no row."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """A way in which an operator mixes rows.

    Attributes:
        predicate: in words, "sums over dimension 0".
        is_of_chunk: by row numbers or the number of rows, which may be meant of each chunk.
        is_unknown: what the operator does along its dimensions is not known.
    """

    predicate: str
    is_of_chunk: bool = False
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor or number among the arguments of an operator, and what is known of it."""

    value: Any
    known: RowInfo

    @property
    def is_float(self) -> bool:
        return is_inexact(self.value) or isinstance(self.value, torch.SymFloat)


class Call:
    """One call of an operator.

    Args:
        args, kwargs: its arguments, with an ``Operand`` for each tensor or node.
        results: its results, each with the dimensions where it has the chunk dimension.
        part: the same arguments at the extent of one chunk, with values for nodes, if they are
            known.

    Attributes:
        arguments: the arguments by the names of the schema.
        name: the operator without namespace and overload; with its namespace if it is not torch's.
        operands: its tensors and nodes.
        counts_rows: a number among the arguments depends on how many rows there are. Not known
            without ``part``.
        part: the arguments at the extent of one chunk by the same names; empty if not known.
        pointwise: it treats each element by itself.
        is_backward: it is the backward of an operator in the tables, whose rows it has.
        rule: the words and dimensions of the operator in the tables, or those of its forward.
        is_vouched: the user answers for it (``ChunkConfig.row_wise``).
        chunk_dim: the chunk dimension of the module's activation.
    """

    def __init__(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[tuple[Any, Sequence[int]]],
        part: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self.target, self.results, self.is_vouched, self.chunk_dim = target, results, False, 0
        self.name, self.full_name = _names_of(target)
        self.arguments = _arguments_by_name(target, args, kwargs)
        self.part: Mapping[str, Any] = {}
        if part is not None and isinstance(target, OpOverload):
            self.part = named_arguments(target, *part)
        self.counts_rows = _counts_rows(target, self.arguments, self.part)
        is_tagged = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
        self.pointwise = is_tagged or self.name in _POINTWISE
        leaves = pytree.tree_leaves([args, kwargs])
        self.operands = [leaf for leaf in leaves if isinstance(leaf, Operand)]
        # ``_softmax_backward_data`` is the backward of ``_softmax``.
        forward = self.name.replace("_backward_data", "").replace("_backward", "")
        self.is_backward = forward != self.name and forward in _RULES.keys() | _WITH_BACKWARD
        # The backward of a softmax works along the same dimension. That of a slice, which picks
        # rows by their numbers, only puts rows of the gradient back.
        self.rule = _RULES.get(self.name, _ALONG.get(forward))

    def rows(self) -> list[tuple[Operand, Rows]]:
        """Return the operands that have the chunk dimension."""
        found = []
        for operand in self.operands:
            if isinstance(operand.known, Rows):
                found.append((operand, operand.known))
        return found

    @property
    def ndim(self) -> int:
        """The number of dimensions of the first tensor."""
        for operand in self.operands:
            if isinstance(operand.value, torch.Tensor):
                return operand.value.ndim
        return 0


def _names_of(target: Any) -> tuple[str, str]:
    """Return ``Call.name`` and the name with the namespace: "add" and "aten::add_"."""
    if isinstance(target, HigherOrderOperator):
        return target.name(), target.name()
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__name__", target)), str(target)
    full_name = schema(target).name
    namespace, _, name = full_name.partition("::")
    if namespace not in _NAMESPACES:
        return full_name, full_name
    if not name.startswith("__"):
        name = name.removesuffix("_")  # ``add_`` mixes rows as ``add`` does
    return name, full_name


def _arguments_by_name(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by the names of the schema; without one, positional ones by their number."""
    if isinstance(target, OpOverload):
        return named_arguments(target, args, kwargs)
    return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def _counts_rows(target: Any, whole: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Return whether a number that an operator computes with is another one for a chunk."""
    if not part:
        return False
    for argument in schema(target).arguments:
        # Numbers of these types are computed with. An int is a dimension or a size, which a chunk
        # has of its own.
        if not re.search("number|float|Tensor", str(argument.type)):
            continue
        ours, theirs = whole[argument.name], part[argument.name]
        if not (isinstance(ours, int | float) and isinstance(theirs, int | float)):
            continue
        if ours != theirs and not (math.isnan(ours) and math.isnan(theirs)):
            return True
    return False


Rule = Callable[[Call], Iterable[int]]


def _named(argument: str) -> Rule:
    """Return a rule for the dimensions that an argument names; all of them if it is not given."""

    def dims(call: Call) -> Iterable[int]:
        found = call.arguments.get(argument)
        if isinstance(found, int):
            return [found]
        return list(found) if found else range(call.ndim)

    return dims


def _last_two(call: Call) -> Iterable[int]:
    return range(-2, 0)


def _all_but_first(call: Call) -> Iterable[int]:
    return range(1, call.ndim)


def _normalised(call: Call) -> Iterable[int]:
    return range(-len(call.arguments["normalized_shape"]), 0)


def _batch_norm(call: Call) -> Iterable[int]:
    """Return all dimensions but the channels' where statistics are those of the batch."""
    # In evaluation it normalises by running statistics, which are the same for all rows.
    default = "no_training" not in call.name
    names = ("training", "train", "update")
    training = next((call.arguments[name] for name in names if name in call.arguments), default)
    if not training or "no_update" in call.name:
        return ()
    return [dim for dim in range(call.ndim) if dim != 1]


def _pooled(call: Call) -> Iterable[int]:
    (count,) = (n for n in (1, 2, 3) if f"{n}d" in call.name)
    return range(-count, 0)


def _sliced(call: Call) -> Iterable[int]:
    dim: int = call.arguments["dim"]
    extent = call.operands[0].value.shape[dim]
    start, end, step = map(call.arguments.get, ("start", "end", "step"))
    is_end = end is None or (type(end) is type(extent) is int and end >= extent)
    if start in (None, 0) and is_end and step == 1:
        return ()  # ``x[:]`` is traced as a slice
    return [dim]


def _repeated(call: Call) -> Iterable[int]:
    repeats = reversed(call.arguments["repeats"])
    return [-1 - place for place, count in enumerate(repeats) if count != 1]


def _padded(call: Call) -> Iterable[int]:
    # Pads come in pairs, those of the last dimension first.
    pads: Any = call.arguments.get("pad", call.arguments.get("padding"))
    return [-1 - place // 2 for place, pad in enumerate(pads) if pad != 0]


def _concatenated(call: Call) -> Iterable[int]:
    if len(call.arguments["tensors"]) == 1:
        return ()
    return [call.arguments["dim"]]


def _diagonal(call: Call) -> Iterable[int]:
    return [call.arguments["dim1"], call.arguments["dim2"]]


def _by_name(*entries: tuple[str, Rule, tuple[str, ...]]) -> dict[str, tuple[str, Rule]]:
    table = {}
    for words, rule, names in entries:
        table.update(dict.fromkeys(names, (words, rule)))
    return table


_ALONG = _by_name(
    (
        "takes the softmax over",
        _named("dim"),
        ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"),
    ),
    (
        "accumulates along",
        _named("dim"),
        (
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "cummax",
            "cummin",
            "_cummax_helper",
            "_cummin_helper",
        ),
    ),
    ("orders the rows of", _named("dim"), ("sort", "argsort", "topk")),
    (
        "normalises over",
        _normalised,
        ("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"),
    ),
    ("normalises over", _all_but_first, ("native_group_norm", "group_norm")),
    (
        "takes batch statistics over",
        _batch_norm,
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "cudnn_batch_norm",
            "_native_batch_norm_legit_no_training",
            "miopen_batch_norm",
            "batch_norm",
            "_batch_norm_with_update",
            "_batch_norm_with_update_functional",
            "_batch_norm_no_update",
        ),
    ),
    (
        "attends over",
        _last_two,
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "scaled_dot_product_attention",
            "flex_attention",
        ),
    ),
    (
        "convolves over",
        _all_but_first,
        ("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"),
    ),
    (
        "pools over",
        _pooled,
        (
            "avg_pool1d",
            "avg_pool2d",
            "avg_pool3d",
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d",
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "adaptive_max_pool2d",
            "adaptive_max_pool3d",
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_nearest3d",
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_trilinear3d",
            "upsample_bicubic2d",
        ),
    ),
    ("transforms", _named("dim"), ("_fft_r2c", "_fft_c2c", "_fft_c2r")),
    ("gates one half by the other along", _named("dim"), ("glu",)),
)
"""Operators whose values depend on others along some dimensions: words, dimensions, names."""

_BY_NUMBER = _by_name(
    ("reverses", _named("dims"), ("flip",)),
    ("rolls", _named("dims"), ("roll",)),
    ("rotates", _named("dims"), ("rot90",)),
    ("takes a part of", _sliced, ("slice", "narrow", "slice_scatter")),
    ("takes a part of", _named("dim"), ("select", "unbind", "select_scatter")),
    ("splits", _named("dim"), ("split", "split_with_sizes", "chunk")),
    ("puts windows over", _named("dimension"), ("unfold",)),
    (
        "shows memory across",
        lambda call: range(call.ndim),
        ("as_strided", "as_strided_copy", "as_strided_scatter"),
    ),
    ("takes the diagonal of", _diagonal, ("diagonal", "diagonal_copy")),
    ("cuts a triangle out of", _last_two, ("tril", "triu")),
    ("repeats", _repeated, ("repeat",)),
    ("puts rows after each other along", _concatenated, ("cat",)),
    (
        "pads",
        _padded,
        (
            "constant_pad_nd",
            "reflection_pad1d",
            "reflection_pad2d",
            "replication_pad1d",
            "replication_pad2d",
        ),
    ),
)
"""Operators that choose rows by their number, which in a chunk is another one."""
_RULES = _ALONG | _BY_NUMBER
_CUTS = frozenset(
    {
        "slice",
        "narrow",
        "slice_scatter",
        "select",
        "unbind",
        "select_scatter",
        "split",
        "split_with_sizes",
        "chunk",
    }
)
"""Those of them that may leave rows out."""

_LOOKUPS = frozenset(
    {"index", "_unsafe_index", "gather", "index_select", "take_along_dim", "embedding"}
)
_WRITES = frozenset(
    {
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_put",
        "_unsafe_index_put",
        "_index_put_impl",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
    }
)
INDEXING = _LOOKUPS | _WRITES
_BY_ELEMENTS = frozenset({"gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce"})
"""Their index names a row for each element, not for each row."""
RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten"})
_UNIFORM_FACTORIES = frozenset(
    {
        "zeros",
        "ones",
        "full",
        "empty",
        "empty_strided",
        "empty_permuted",
        "scalar_tensor",
        "rand",
        "randn",
        "randint",
        "normal",
        "bernoulli",
        "expand",
        "repeat",
    }
)
"""They make rows that are all the same, or random: a chunk's are as good as the whole's."""
_SEARCHES = frozenset({"bucketize", "searchsorted"})
_POINTWISE = frozenset(
    {
        "_to_copy",
        "copy",
        "fill",
        "zero",
        "masked_fill",
        "floor_divide",
        "lift_fresh_copy",
        "detach",
        "alias",
        "clone",
        "where",
        "_wrap_tensor_autograd",
    }
)
"""Operators that treat each element by itself, without torch's tag."""
_BY_DIMENSIONS = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "aminmax",
        "prod",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "linalg_vector_norm",
        "norm",
        "any",
        "all",
        "argmax",
        "argmin",
        "logsumexp",
        "nansum",
        "count_nonzero",
        "histc",
        "bincount",
        "median",
        "nanmedian",
        "kthvalue",
        "mode",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "mv",
        "dot",
        "vdot",
        "linear",
        "matmul",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "_int_mm",
        "native_dropout",
        "dropout",
        "stack",
        "nonzero",
        "nonzero_static",
        "masked_select",
        "_local_scalar_dense",
        "bernoulli",
        "wait_tensor",
        "all_to_all_single",
        "sym_size",
        "sym_numel",
        "_assert_scalar",
        "_assert_async",
        "_assert_tensor_metadata",
        "embedding_dense_backward",
        "equal",
        "item",
        "squeeze",
    }
)
"""The dimensions of the results show whether they mix: the chunk dimension is gone, or is twice."""
_WITH_BACKWARD = INDEXING | RESHAPES | _POINTWISE | _BY_DIMENSIONS | {"embedding_dense"}
"""Operators without a rule whose backward is known with them."""
_LIKE = re.compile(r"[^:]+_like$|^new_.+")
# Another library's ``norm`` is not torch's.
_NAMESPACES = ("aten", "prims", "_c10d_functional", "_c10d_functional_autograd")


def refuse_mixing(
    what: str, mixing: Mixing, where: str, config: ChunkConfig, warned: set[str]
) -> None:
    """Refuse an operator, ``what``, in module ``where``.

    Row numbers and numbers of rows may be meant of each chunk, so they only warn, once a config.

    Args:
        mixing: how it mixes rows.
        warned: patterns of modules that have warned already.
    """
    answer = ""
    if mixing.is_unknown:
        answer = (
            "; if it treats each row by itself, say so: ChunkConfig(row_wise=(its name,)), as "
            "'mylib::norm'"
        )
    elif mixing.is_of_chunk:
        answer = (
            "; if you mean those of each chunk, say so: "
            f"ChunkConfig(row_wise=({config.module_fqn!r},))"
        )
    message = (
        f"{what} {mixing.predicate} inside {where}: there lies the {config.chunk_dim} dimension, "
        f"by which {where} is chunked, so rows of a chunk would not see those of the others and "
        "the numbers would not be the model's. Keep that dimension apart from those that the "
        f"operator works along, or chunk modules without it{answer}"
    )
    if not mixing.is_of_chunk:
        raise ChunkError(message)
    if config.module_fqn not in warned:
        warned.add(config.module_fqn)
        warnings.warn(message, ChunkWarning, stacklevel=2)


def propagate(
    call: Call, what: str, where: str, config: ChunkConfig, warned: set[str]
) -> list[RowInfo]:
    """Return what is known of a call's results; refuse the call if it mixes rows.

    Raises:
        ChunkError: in the words of ``refuse_mixing``.
    """
    call.is_vouched = call.full_name in config.row_wise
    call.chunk_dim = config.dim
    if _is_of_statistics(call):
        call.results = [(value, _known_dims(value, dims)) for value, dims in call.results]
    if not call.is_vouched:
        mixing = _find_mixing(call)
        if mixing is not None:
            refuse_mixing(what, mixing, where, config, warned)
    return [_info_of_result(call, value, tuple(dims), what) for value, dims in call.results]


def _is_of_statistics(call: Call) -> bool:
    """Return whether a call only goes on with values over all rows: ``bincount(experts) + 1``."""
    if call.rows() or not (call.pointwise or call.rule or is_view(call.target)):
        return False
    return any(isinstance(one.known, Statistic) for one in call.operands)


def _known_dims(value: Any, dims: Sequence[int]) -> list[int]:
    """Return the dimensions without those whose extents the data decide."""
    return [dim for dim in dims if type(value.shape[dim]) is int]


def _find_mixing(call: Call) -> Mixing | None:
    """Return how a call mixes rows, or None."""
    for _, dims in call.results:
        if len(dims) > 1:
            both = " and ".join(map(str, dims))
            return Mixing(f"relates every row to every other one (dimensions {both})")
    if _LIKE.match(call.name):
        return None  # ``zeros_like`` and ``new_ones`` read nothing but shape and dtype
    # A backward combines its gradient with statistics that its forward, which is judged, has made.
    if not call.is_backward:
        inexact = [dims for value, dims in call.results if is_inexact(value)]
        statistic = _find_statistic(call) if any(inexact) else None
        if statistic is not None:
            return Mixing(
                f"brings into rows a value over all of them ({statistic.made_by})",
                is_of_chunk=statistic.is_count,
            )
        if inexact and _meets_positions(call):
            return Mixing(
                "brings into rows what depends on their number, or on how many there are, and is "
                "another one in a chunk",
                is_of_chunk=True,
            )
    if not call.rows():
        return None
    predicate = _describe_order(call) or _describe_capacity(call)
    if predicate is None and call.name in INDEXING:
        predicate = _describe_index(call)
    elif predicate is None:
        predicate = _describe_dims(call)
        if predicate is None and _is_unknown(call):
            dims = sorted({dim for _, known in call.rows() for dim in known.dims})
            where = ", ".join(map(str, dims))
            return Mixing(
                f"may mix dimension {where}: what it does along its dimensions is not known",
                is_unknown=True,
            )
    if predicate is None:
        return None
    return Mixing(predicate)


def _find_statistic(call: Call) -> Statistic | None:
    """Return the statistic, or routing, that a call would bring into floating-point rows."""
    if call.counts_rows and any(known.content not in _WITHOUT_DATA for _, known in call.rows()):
        return Statistic(HOW_MANY, is_count=True)
    for operand in call.operands:
        known = operand.known
        if isinstance(known, Statistic) and (operand.is_float or call.pointwise):
            return known
        if isinstance(known, Rows) and known.content in _ACROSS_ROWS and call.pointwise:
            return Statistic("integers computed across rows")
    return None


def _meets_positions(call: Call) -> bool:
    """Return whether rows of data would meet what depends on row numbers, or on their count."""
    contents = _contents_beside_indices(call)
    return not contents <= _WITHOUT_DATA and not contents.isdisjoint(_OF_A_CHUNK)


def _describe_dims(call: Call) -> str | None:
    """Return how a call works along the chunk dimension, if a table says so."""
    rows = call.rows()
    if call.name in _SEARCHES:
        name = "boundaries" if call.name == "bucketize" else "sorted_sequence"
        sequence: Operand = call.arguments[name]
        last = sequence.value.ndim - 1
        if isinstance(sequence.known, Rows) and last in sequence.known.dims:
            return f"searches along dimension {last}"
        return None
    if call.rule is None:
        return None
    words, rule = call.rule
    for operand, known in rows:
        if operand.is_float and _cuts_order(call, operand, known):
            return f"{words} dimension {known.dims[0]}, whose order the data decide,"
        if call.name in _ALONG or call.is_backward:
            # Integers of the data may be computed across rows: that is routing.
            is_routing = not operand.is_float and known.content not in (
                Content.ROW_NUMBERS,
                Content.UNIFORM,
            )
        else:
            # The data have decided the order of these rows, so numbers in it are their choice.
            is_routing = known.content in _ORDERED
        if is_routing or operand.value.ndim != call.ndim:
            continue
        hit = {dim % call.ndim for dim in rule(call)}.intersection(known.dims)
        if hit:
            return f"{words} dimension {min(hit)}"
    return None


def _cuts_order(call: Call, operand: Operand, known: Rows) -> bool:
    """Return whether a call takes a fixed number of rows whose order the data decide.

    So does a capacity: ``order[: len(order) // 2]``. The counts of a router are no fixed numbers,
    and ``rows[:-1]`` only takes pads away again.
    """
    if call.name not in _CUTS or not call.part or known.content not in _ORDERED:
        return False
    _, rule = _BY_NUMBER[call.name]
    (dim, *_), part = known.dims, call.part.get("self", call.part.get("input"))
    results = [value for value, _ in call.results]
    if not all(map(has_static_shape, [operand.value, part, *results])):
        return False
    has_pads = operand.value.shape[dim] % part.shape[dim] != 0
    return not has_pads and dim in {one % call.ndim for one in rule(call)}


def _describe_capacity(call: Call) -> str | None:
    """Return how integers across rows leave rows out, or put others in their place.

    They may be an order of all rows. If they are compared, or fewer, other rows decide whether a
    row is among them.
    """
    chosen = []
    if "grouped_mm" in call.name and call.part:
        rows, ends = call.operands[0], call.arguments.get("offs")
        is_grouped = isinstance(rows.known, Rows) and rows.value.ndim - 2 in rows.known.dims
        if is_grouped and isinstance(ends, Operand) and not _is_of_data(ends.known):
            return f"groups rows of dimension {rows.value.ndim - 2} by fixed numbers"
    if call.name == "masked_select":
        chosen = [(dim, call.operands[1]) for _, known in call.rows() for dim in known.dims]
        into = call.operands[0]
    elif call.name in INDEXING:
        into, chosen = indices_of(call)
    for dim, index in chosen:
        if not (into.is_float and isinstance(into.known, Rows) and dim in into.known.dims):
            continue
        content = index.known.content if isinstance(index.known, Rows) else None
        # Without twins, memory of as many rows as there are experts is taken for rows.
        is_rows = bool(call.part) or into.known.content is not Content.UNIFORM
        is_rows = is_rows and not _contents_beside_indices(call) <= _WITHOUT_DATA
        if content is Content.DATA and is_rows and not _is_mask(index):
            return f"takes data for the numbers of rows of dimension {dim}"
        if isinstance(index.known, Statistic):
            leaves_out = call.name in _WRITES and bool(call.part)
        else:
            leaves_out = content is Content.CHOOSING
            if content is Content.ROUTING and into.known.content is not Content.UNIFORM:
                leaves_out = _is_shorter(call, index, dim, into)
        if leaves_out:
            return (
                f"leaves out rows of dimension {dim} by integers computed across rows, as a "
                "capacity does (each row's own numbers may choose, as x[expert == 2])"
            )
    return None


def _is_of_data(known: RowInfo) -> bool:
    if isinstance(known, Rows):
        return known.content not in _WITHOUT_DATA
    return known is not None and not known.is_count


def _is_shorter(call: Call, index: Operand, dim: int, into: Operand) -> bool:
    """Return whether a fixed number of entries cannot name all rows.

    Memory has rows where rows were written to. What is beyond them is room, as for alignment.
    """
    extent = into.value.shape[dim]
    if isinstance(into.known, Rows) and into.known.filled is not None:
        extent = into.known.filled
    is_fixed = bool(call.part) and has_static_shape(index.value) and type(extent) is int
    return is_fixed and _entries(call, index, dim) < extent


def _entries(call: Call, index: Operand, dim: int) -> int:
    """Return how many rows an index names."""
    if call.name in _BY_ELEMENTS:
        return int(index.value.shape[dim])
    return int(index.value.numel())


def _is_listed(call: Call) -> bool:
    """Return whether a table, a tag of torch or a rule judges an operator."""
    if call.rule is not None or call.pointwise or call.is_backward or is_view(call.target):
        return True
    return call.name in _BY_DIMENSIONS | _SEARCHES


def _is_unknown(call: Call) -> bool:
    """Return whether nothing says what a call of rows does along its dimensions."""
    if _is_listed(call):
        return False
    results = [value for value, _ in call.results if isinstance(value, torch.Tensor)]
    values = [*results, *(operand.value for operand, _ in call.rows())]
    # Without a result it is a size; of integers it is routing.
    return bool(results) and any(map(is_inexact, values))


def _may_number_rows(call: Call) -> bool:
    """Return whether integers that a call makes of data may depend on other rows.

    ``nonzero`` gives row numbers. An operator that nobody knows may do anything, as the inverse of
    ``unique`` does: which number a row gets depends on all of them.
    """
    if call.name == "isin":
        among = call.arguments.get("test_elements")
        return isinstance(among, Operand) and among.known is not None
    if call.name in ("nonzero", "nonzero_static"):
        return True
    return not (call.is_vouched or _is_listed(call))


def _describe_order(call: Call) -> str | None:
    """Return whether a reshape tears rows apart, or rows of two orders would stand side by side."""
    unordered = {Content.UNIFORM, *_ORDERED}
    if call.name in RESHAPES and call.operands[0].is_float and call.part and not call.chunk_dim:
        # Nothing is in front of the batch, so experts in front of rows cut their order by number.
        # What is in front of a sequence is not known of memory to which rows are written.
        unordered = {Content.UNIFORM}
    rows = []
    for operand, known in call.rows():
        if has_static_shape(operand.value) and known.content not in unordered:
            rows.append((operand.value, known))
    result, dims = call.results[0]
    if call.name in RESHAPES and rows and has_static_shape(result) and dims:
        source, known = rows[0]
        if known.positions_in_front(source) % math.prod(result.shape[: dims[0]]):
            return (
                f"folds rows into dimensions in front of dimension {dims[0]}, so that a chunk is "
                "folded otherwise than the whole: write x.shape[i], or -1, for the dimension of "
                "the rows"
            )
    if call.pointwise and not call.is_backward:
        front_of: dict[int, int] = {}  # by dimension from the right, as broadcasting counts
        # Row i of ``x.flatten(0, 1)`` is not row i of ``x.transpose(0, 1).flatten(0, 1)``.
        for value, known in rows:
            for dim in known.dims:
                if front_of.setdefault(dim - value.ndim, known.front) != known.front:
                    first = min(rows[0][1].dims)
                    return f"puts rows beside others, in another order, in dimension {first}"
    return None


def has_static_shape(tensor: Any) -> bool:
    """Return whether the extents of a tensor are all numbers, and none depends on data."""
    return isinstance(tensor, torch.Tensor) and all(type(extent) is int for extent in tensor.shape)


def _describe_index(call: Call) -> str | None:
    """Return how rows are chosen by a fixed number; their own numbers, or the data, may choose."""
    into, chosen = indices_of(call)
    is_own_float = into.known is None and into.is_float
    for dim, index in chosen:
        content = index.known.content if isinstance(index.known, Rows) else None
        if isinstance(into.known, Rows) and dim in into.known.dims:
            if into.known.content in _ORDERED:
                continue
            if into.known.content is Content.UNIFORM and call.name not in _WRITES:
                continue  # every row is the same
            if content is Content.ROW_NUMBERS:
                is_fixed = index.value.numel() != into.value.shape[dim]
            else:
                is_fixed = content in (None, Content.UNIFORM, Content.POSITIONAL)
                is_fixed = is_fixed and not isinstance(index.known, Statistic)
            if is_fixed:
                return f"chooses rows of dimension {dim} by a fixed number"
        elif content in _ACROSS_ROWS and call.name in _LOOKUPS and is_own_float:
            return (
                "looks up numbers by integers computed across rows (each row's own numbers may: "
                f"{_OWN_KIND})"
            )
    return None


def indices_of(call: Call) -> tuple[Operand, list[tuple[int, Operand]]]:
    """Return the tensor that an indexing operator reads or writes, and (dimension, index) pairs.

    A mask has a dimension for each of its own: ``x[mask]`` of a 2-D mask gives ``(0, mask)``,
    ``(1, mask)``.
    """
    arguments = call.arguments
    into: Any = arguments.get("self", arguments.get("weight"))  # ``embedding`` has a weight
    indices = arguments.get("indices", arguments.get("index"))
    if isinstance(indices, Operand):
        return into, [(arguments.get("dim", 0) % max(into.value.ndim, 1), indices)]
    chosen: list[tuple[int, Operand]] = []
    place = 0
    for index in indices or ():
        if index is None:
            place += 1
            continue
        for _ in range(index.value.ndim if _is_mask(index) else 1):
            chosen.append((place, index))
            place += 1
    return into, chosen


def _is_mask(index: Operand) -> bool:
    return index.value.dtype in (torch.bool, torch.uint8)


def _contents_beside_indices(call: Call) -> set[Content]:
    """Return what the operands hold, without the indices of an indexing operator."""
    # By identity: ``==`` of two operands would compare their tensors.
    indices: set[int] = set()
    if call.name in INDEXING:
        indices.update(id(index) for _, index in indices_of(call)[1])
    return {known.content for one, known in call.rows() if id(one) not in indices}


def _info_of_result(call: Call, value: Any, dims: tuple[int, ...], what: str) -> RowInfo:
    rows = call.rows()
    statistics = [o.known for o in call.operands if isinstance(o.known, Statistic)]
    is_like = _LIKE.match(call.name) is not None
    if is_like or not (rows or statistics):  # the module makes it itself
        if not dims:
            if not call.counts_rows:
                return None
            return Statistic(f"{what}, by {HOW_MANY}", is_count=True)
        if is_row_numbers(call):
            return Rows(dims, Content.ROW_NUMBERS)
        is_uniform = (is_like or call.name in _UNIFORM_FACTORIES) and not call.counts_rows
        return Rows(dims, Content.UNIFORM if is_uniform else Content.POSITIONAL)
    # ``bincount`` has an extent that the data decide, which is no number of rows.
    if not dims or call.name == "bincount":
        if not statistics or rows:
            return Statistic(what)
        if call.name == "repeat_interleave":
            # In which order the rows are that it would meet is not known.
            return Statistic(f"{statistics[0].made_by}, repeated: write {_OWN_KIND}")
        return statistics[0]
    content = _content_of(call, bool(statistics), value)
    is_bool = getattr(value, "dtype", None) is torch.bool
    if content is Content.ROUTING and (is_bool or _chooses(call)):
        content = Content.CHOOSING
    is_selected = any(isinstance(value.shape[dim], torch.SymInt) for dim in dims)
    if content is Content.DATA and is_selected:
        # The data decide how many rows there are, so these are not the rows that came in.
        content = Content.ROUTED
    return Rows(
        dims,
        content,
        _front_of(call, value, dims[0]),
        _filled_of(call, value, dims[0]),
        _is_order(call, value, dims[0]),
    )


def is_row_numbers(call: Call) -> bool:
    """Return whether the result is 0, 1, ..."""
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    return call.name == "arange" and start == 0 and step == 1


def _front_of(call: Call, value: Any, dim: int) -> int:
    """Return ``Rows.front`` of a result that has the chunk dimension in ``dim``."""
    rows = call.rows()
    if (
        not rows
        or not has_static_shape(value)
        or not all(has_static_shape(one.value) for one, _ in rows)
    ):
        return 1
    if call.name in RESHAPES:
        ((source, known),) = rows
        in_front = math.prod(value.shape[:dim]) or 1
        return max(1, known.positions_in_front(source.value) // in_front)
    front = 1
    for source, known in rows:
        if source.value.shape[known.dims[0]] == value.shape[dim]:
            front = max(front, known.front)
    return front


def _filled_of(call: Call, value: Any, dim: int) -> int | None:
    """Return ``Rows.filled`` of a result that has the chunk dimension in ``dim``."""
    if not call.part or call.name in _CUTS or not has_static_shape(value):
        return None
    if call.name in INDEXING:
        into, chosen = indices_of(call)
        if call.name not in _WRITES or not isinstance(into.known, Rows):
            return None
        filled = into.known.filled
        if filled is None and into.known.content is Content.UNIFORM:
            for at, index in chosen:
                if at == dim and has_static_shape(index.value) and not _is_mask(index):
                    filled = _entries(call, index, dim)
        return filled
    for source, known in call.rows():
        if known.filled is None or not has_static_shape(source.value):
            continue
        if call.name in RESHAPES or source.value.shape[known.dims[0]] == value.shape[dim]:
            return known.filled
    return None


def _is_order(call: Call, value: Any, dim: int) -> bool:
    """Return ``Rows.is_order`` of a result that has the chunk dimension in ``dim``."""
    rows = call.rows()
    if not rows or is_inexact(value):
        return False
    source = rows[0][0].value
    if not (has_static_shape(source) and has_static_shape(value) and source.shape == value.shape):
        return False
    if call.name in ("sort", "argsort"):
        return value is call.results[-1][0] and call.arguments["dim"] % value.ndim == dim
    return rows[0][1].is_order and (_copies_all(call, value) or _clamps_nothing(call))


def _clamps_nothing(call: Call) -> bool:
    """Return whether the largest number that a clamp allows is that of the last row, or more.

    So a guard of an index does. Numbers computed of an order may be larger than that.
    """
    largest, smallest = call.arguments.get("max"), call.arguments.get("min")
    if call.name not in ("clamp", "clamp_max") or not isinstance(smallest or 0, int):
        return False
    ((source, known),) = call.rows()
    extent = source.value.shape[known.dims[0]]
    is_known = known.is_order and type(largest) is int and type(extent) is int
    return is_known and largest >= extent - 1 and (smallest or 0) <= 0


def _content_of(call: Call, has_statistics: bool, value: Any) -> Content:
    """Return the content of a result that has rows. The first line that fits decides:

    - looked up or written to: as ``_content_of_indexed`` says;
    - bools of row numbers, which pick rows by them, as ``arange(len(x)) < 2``: POSITIONAL;
    - rows that ranks exchange, as many as their routers have counted: ROUTED; integers across
      rows stay what they are;
    - integers of those that choose rows: CHOOSING;
    - integers that are sorted: ROUTED;
    - integers computed across rows, or of data and row numbers, or as nobody knows: ROUTING;
    - computed of data: that of the operands, DATA before ROUTED before ROUTING;
    - neither of row numbers nor of their count: UNIFORM;
    - a copy or a view of row numbers: ROW_NUMBERS;
    - else POSITIONAL.
    """
    contents = {known.content for _, known in call.rows()}
    if call.name in INDEXING:
        return _content_of_indexed(call, contents, is_inexact(value))
    is_positional = call.counts_rows or not contents.isdisjoint(_OF_A_CHUNK)
    has_data = not contents <= _WITHOUT_DATA
    is_exchange = call.name == "all_to_all_single"
    if is_exchange and contents.isdisjoint(_ACROSS_ROWS):
        return Content.ROUTED
    if not is_inexact(value):
        if is_positional and getattr(value, "dtype", None) is torch.bool:
            return Content.POSITIONAL
        if Content.CHOOSING in contents:
            return Content.CHOOSING
        # Of ``sort`` the first result has the numbers themselves, the other one the order.
        is_sorted = call.name == "sort" and value is call.results[0][0]
        if is_sorted and has_data and contents.isdisjoint(_ACROSS_ROWS):
            return Content.ROUTED
        is_across_rows = has_statistics or Content.ROUTING in contents or _works_along_rows(call)
        if is_across_rows or (has_data and (is_positional or _may_number_rows(call))):
            return Content.ROUTING
    if is_exchange:
        return Content.ROUTED
    if has_data or not is_positional:
        return _first_of(contents)
    is_of_row_numbers = contents == {Content.ROW_NUMBERS} and not call.counts_rows
    if is_of_row_numbers and _copies_all(call, value):
        return Content.ROW_NUMBERS
    return Content.POSITIONAL


def _chooses(call: Call) -> bool:
    """Return whether a call makes of integers across rows those that choose among rows.

    Bools do so, too. ``clamp`` and ``minimum`` put what is beyond a capacity in one place, and
    ``repeat_interleave`` leaves out what is repeated no times.
    """
    rows = [pair for pair in call.rows() if pair[1].content is Content.ROUTING]
    if not rows or _clamps_nothing(call):
        return False
    if call.name == "clamp":
        return call.arguments.get("max") is not None
    if call.name in _CUTS:
        return any(_cuts_order(call, one, known) for one, known in rows)
    return call.name in ("nonzero", "nonzero_static", "clamp_max", "minimum", "repeat_interleave")


def _works_along_rows(call: Call) -> bool:
    """Return whether an operator, such as ``cumsum``, works along the chunk dimension."""
    if call.name not in _ALONG or not call.ndim:
        return False
    _, rule = _ALONG[call.name]
    dims = {dim % call.ndim for dim in rule(call)}
    return any(dims.intersection(known.dims) for _, known in call.rows())


def _copies_all(call: Call, value: Any) -> bool:
    """Return whether a result has all numbers of its operand, and no others."""
    if not (is_view(call.target) or call.name in ("_to_copy", "clone")):
        return False
    return bool(value.numel() == call.rows()[0][0].value.numel())


def _content_of_indexed(call: Call, contents: set[Content], is_float: bool) -> Content:
    """Return the content of the result of an indexing operator.

    - a table without rows: ``table[tokens]`` is DATA, ``table[arange(len(x))]`` POSITIONAL; rows
      that are written to one are ROUTED;
    - rows that the data choose: ``x[order]`` is ROUTED, ``arange(len(x))[order]`` ROUTING, and so
      is the count ``zeros(len(x)).index_add_(0, experts, ones(len(x)))``;
    - other rows keep their content, unless they are UNIFORM: then it is that of what is written;
    - integers that rows look up in a value over all of them are ROUTING: ``counts[experts]``.

    Args:
        contents: of all operands that have rows.
        is_float: the result has floating-point numbers.
    """
    into, chosen = indices_of(call)
    is_write = call.name in _WRITES
    if Content.CHOOSING in contents and not is_float:
        return Content.CHOOSING
    if not isinstance(into.known, Rows):
        if is_write:
            return Content.ROUTED
        if isinstance(into.known, Statistic) and not is_float:
            return Content.ROUTING
        return Content.POSITIONAL if contents <= _OF_A_CHUNK else _first_of(contents)

    before = into.known.content
    if _data_choose_rows(into.known, chosen):
        if before in _OF_A_CHUNK:
            return Content.POSITIONAL if is_float else Content.ROUTING
        counts = is_write and _contents_beside_indices(call) <= _WITHOUT_DATA
        return Content.ROUTING if counts or before is Content.ROUTING else Content.ROUTED
    if before is not Content.UNIFORM:
        return before
    if contents <= _WITHOUT_DATA and contents != {Content.UNIFORM}:
        return Content.POSITIONAL
    return _first_of(contents)


def _data_choose_rows(into: Rows, chosen: Sequence[tuple[int, Operand]]) -> bool:
    """Return whether an index into the chunk dimension depends on data."""
    for dim, index in chosen:
        content = index.known.content if isinstance(index.known, Rows) else Content.UNIFORM
        if dim in into.dims and content not in _WITHOUT_DATA:
            return True
    return False


def _first_of(contents: set[Content]) -> Content:
    """Return the content of a result: that of an operand of data, if there is one."""
    order = (
        Content.DATA,
        Content.ROUTED,
        Content.CHOOSING,
        Content.ROUTING,
        Content.UNIFORM,
    )
    return next((content for content in order if content in contents), Content.DATA)
