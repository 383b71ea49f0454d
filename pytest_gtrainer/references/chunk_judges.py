"""Judge a module's forward before eager code runs it in chunks, once a module.

An operator that mixes rows is refused. There are two ways, because neither can replace the
other:

*Twins.* A copy of the module runs on fake tensors, once on all rows and once on a chunk's.
``passes.chunking.chunk.BodyJudge`` judges the two graphs, as it does for ``chunk_pass``. Only two
extents side by side show a size, or a row number, that is used as a value.

*Following.* Some modules do not run on fake tensors: a module inside is sharded by ``fully_shard``,
the data decide something, experts exchange rows in place, or FlexAttention runs. Then
``ForwardJudge`` sees each operator while the first chunk runs. There is no second extent, so the
chunk dimension of a result is found on meta tensors of twice the extent; for reshapes, by the
elements in front of it.

Both ask ``passes.chunking.mixing`` about each operator.
"""

import copy
import itertools
import logging
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_gtrainer._torch.autograd import TorchDispatchMode
from pytest_gtrainer._torch.threads import unseen_by_modes
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer._torch.values import (
    FakeTensorMode,
    OpOverload,
    is_traceable_wrapper_subclass,
    modules_of,
    pytree,
    storage_id,
)
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import is_view
from pytest_gtrainer.passes.chunking import mixing
from pytest_gtrainer.passes.chunking.chunk import check_bodies, collective_error
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError
from pytest_gtrainer.passes.chunking.mixing import (
    Call,
    Content,
    Known,
    Operand,
    Rows,
    Statistic,
    indices_of,
    is_plain,
    is_row_numbers,
    judge,
)
from pytest_gtrainer.passes.chunking.regions import Storages, find_regions
from pytest_gtrainer.passes.chunking.twins import Twins, differing_dims, unknown_dims
from pytest_gtrainer.tracing.model import ModelState, tensor_text

_logger = logging.getLogger(__name__)


def returned_error(
    fqn: str, tensor: Tensor, place: int, dims: Sequence[int] | None, config: ChunkConfig
) -> ChunkError:
    """The refusal of what a chunk returns, which has the chunk dimension elsewhere, or has lost it."""
    where = f"in dimension {dims[0]}" if dims else "nowhere, as far as can be seen"
    return ChunkError(
        f"{fqn} returns {tensor_text(tensor)}{f' in place {place}' if place else ''}, which has the {config.chunk_dim} "
        f"{where}. Chunks are joined along dimension {config.dim}: return it there; compiled code cannot be looked "
        f"into: chunk modules before they are compiled, or answer: ChunkConfig(row_wise=({config.module_fqn!r},))"
    )


def has_memory(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not is_traceable_wrapper_subclass(value)
        and value.layout == torch.strided
    )


def check_twins(fqn: str, graphs: tuple[Any, Any], config: ChunkConfig) -> None:
    """A ChunkError unless nothing in a forward mixes rows, and what it returns has them where chunks are joined."""
    twins = Twins(*graphs, config.num_chunks)
    storages = Storages(twins.full.graph)
    check_bodies(twins, find_regions(twins, config, storages), storages, config)
    for place, node in enumerate(twins.full.graph.output_node().all_input_nodes):
        value, dims = node.meta["val"], twins.dims.get(node)
        if value.ndim > config.dim and dims != [config.dim] and not unknown_dims(value):
            raise returned_error(fqn, value, place, dims, config)


class _Recorder(TorchDispatchMode):
    """A forward on fake tensors as a graph; NotImplementedError of a collective or an operator with a graph."""

    supports_higher_order_operators = True

    def __init__(self, fqn: str, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.constants, self.kept = fx.Graph(), SimpleNamespace(), list[Any]()
        self.nodes: dict[int, fx.Node] = {}
        self.meta = {"module_fqn": fqn}
        for place, tensor in enumerate(inputs):
            self._note(tensor, self.graph.placeholder(f"input_{place}"))

    def _note(self, value: Any, node: fx.Node) -> None:
        node.meta = {"val": value, "custom": self.meta}
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
            self.kept.append(value)  # an id is another's once its tensor is gone

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:  # nobody gave it: a constant
            name = f"constant_{len(self.kept)}"
            setattr(self.constants, name, tensor)
            self._note(tensor, self.graph.create_node("get_attr", name))
        return self.nodes[id(tensor)]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not isinstance(func, OpOverload) or func.namespace == "c10d":
            raise NotImplementedError(func)
        made = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(made)):
            given = pytree.tree_map_only(Tensor, self._node_of, (args, kwargs or {}))
            node = self.graph.create_node("call_function", func, *given)
            self._note(made, node)
            for place, item in enumerate(made if isinstance(made, tuple | list) else ()):
                self._note(item, self.graph.call_function(operator.getitem, (node, place)))
        return made

    def finish(self, returned: Any) -> Any:
        """The graph with its constants, as twins are read."""
        self.graph.output(pytree.tree_map_only(Tensor, self._node_of, returned))
        self.constants.graph = self.graph
        return self.constants


def twin_graphs(
    fqn: str, run: Callable[..., Any], whole: Mapping[str, Any], part: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """A module's forward on all rows and on a chunk's, as graphs of a copy; None where fake tensors cannot run it."""
    run = run if isinstance(run, MethodType) else getattr(run, "__wrapped__", run)
    module = getattr(run, "__self__", None)
    given = [value for arguments in (whole, part) for value in arguments.values()]
    if not isinstance(run, MethodType) or not isinstance(module, nn.Module):
        return None
    if not all(value is None or has_memory(value) for value in given):
        return None
    inner = [m for m in module.modules() if m is not module]
    tensors = [*module.parameters(), *module.buffers()]
    if not all(map(has_memory, tensors)) or any("forward" in m.__dict__ for m in inner):
        return None
    try:
        # set_stance, or Dynamo's caches change; what the module warns of, it warns of when it runs
        with unseen_by_modes(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            mode = new_fake_mode(real_inputs=True)
            full, chunk = (
                _recorded(fqn, module, run.__func__, arguments, mode) for arguments in (whole, part)
            )
            return full, chunk
    except Exception as error:
        _logger.debug("%s is followed while it runs: on fake tensors it raises %r", fqn, error)
        return None


def _recorded(
    fqn: str,
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    mode: FakeTensorMode,
) -> Any:
    copied = _copied(module)
    state = ModelState.of(copied)

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        return made.clone()  # no leaf: a forward may write to it

    with mode:
        fakes = [fake(tensor) for tensor in state.tensors]
        inputs = {name: None if value is None else fake(value) for name, value in arguments.items()}
        recorder = _Recorder(
            fqn, [*(value for value in inputs.values() if value is not None), *fakes]
        )
        with state.exchanged(fakes), recorder:
            return recorder.finish(forward(copied, **inputs))


def _own(value: Any, depth: int) -> Any:
    """What a forward may keep something in, ``depth`` levels deep: containers, and objects of plain classes."""
    kind, is_torchs = (
        type(value),
        isinstance(value, nn.Module) or type(value).__module__.startswith("torch"),
    )
    plain = kind.__new__ is object.__new__ and hasattr(value, "__dict__") and not is_torchs
    if not depth or not (plain or isinstance(value, dict | list | set)):
        return value
    made = copy.copy(value)
    if isinstance(made, list):
        made[:] = [_own(item, depth - 1) for item in made]
    elif not isinstance(made, set):
        table = made if isinstance(made, dict) else made.__dict__
        table.update({name: _own(item, depth - 1) for name, item in table.items()})
    return made


def _copied(module: nn.Module) -> nn.Module:
    """The module, and objects that it holds, with tables, lists and dicts of their own, on the same tensors."""
    copied = object.__new__(type(module))
    copied.__dict__.update({name: _own(value, 3) for name, value in module.__dict__.items()})
    children = modules_of(copied)
    children.update({name: child and _copied(child) for name, child in children.items()})
    return copied


class ForwardJudge(TorchDispatchMode):
    """What is known of the tensors of one chunk's forward, operator by operator while it runs.

    Args:
        arguments: the arguments that are cut, with their chunk dimension.
    """

    supports_higher_order_operators = True

    def __init__(
        self, fqn: str, config: ChunkConfig, arguments: Sequence[tuple[Tensor, int]]
    ) -> None:
        super().__init__()
        self.fqn, self.config = fqn, config
        self.known: dict[Any, Known] = {}
        self.warned: set[str] = set()
        self.numbers: set[Any] = set()  # tensors of 0, 1, ...
        self.extents: set[int] = set()
        self.part = arguments[0][0].shape[arguments[0][1]] if arguments else 0
        self.kept: dict[int, Any] = {}  # memory that the chunk has made, and that of its arguments
        for tensor, dim in arguments:
            self._note(tensor, Rows((dim,)))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled part stays compiled; what it does to rows is not seen."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = {
            storage_id(leaf) for leaf in pytree.tree_leaves([args, kwargs]) if has_memory(leaf)
        }
        foreign = before - self.kept.keys()
        made = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        if not results:  # a size, a device
            return made
        given, named = pytree.tree_map_only(
            Tensor,
            lambda tensor: Operand(tensor, self.known.get(self._key(tensor))),
            (list(args), dict(kwargs)),
        )
        call = Call(func, given, named, [])
        if not any(operand.known for operand in call.operands):
            for result in results:
                self._note(result, None, foreign)
            whole = is_row_numbers(call)
            shown = (
                is_view(func)
                and call.operands
                and self._key(call.operands[0].value) in self.numbers
            )
            self.numbers.update(self._key(result) for result in results if whole or shown)
            return made
        if launches(func) and "all_to_all" not in call.name:
            group = call.arguments.get("group_name")
            raise collective_error(str(func), group if isinstance(group, str) else None, self.fqn)
        given, named = self._with_counted(call, given, named)
        what = f"{func} of {', '.join(tensor_text(o.value) for o in call.operands if isinstance(o.value, Tensor))}"
        dims = self._dims(func, given, named, Call(func, given, named, []), results)
        call = Call(func, given, named, list(zip(results, dims, strict=True)))
        known = judge(call, what, self.fqn, self.config, self.warned)
        for result, found in zip(results, known, strict=True):
            self._note(result, found, foreign)
        return made

    def _with_counted(self, call: Call, given: Any, named: Any) -> tuple[Any, Any]:
        """Arguments with what indexing tells of tensors that the forward has made: row numbers, memory for rows."""
        if call.name not in mixing.INDEXING:
            return given, named
        into, chosen = indices_of(call)
        found: dict[int, Known] = {}
        for dim, index in chosen:
            extent = into.value.shape[dim] if into.value.ndim else 0
            if (
                index.known is None
                and self._key(index.value) in self.numbers
                and index.value.shape[:1] == (extent,)
            ):
                found[id(index.value)] = Rows((0,), Content.ROW_NUMBERS)
            routed = (
                isinstance(into.known, Rows)
                and into.known.content == Content.ROUTED
                and dim in into.known.dims
            )
            if routed and isinstance(index.known, Statistic) and index.value.shape[:1] == (extent,):
                # an order of rows that counts of the data have made
                found[id(index.value)] = Rows((0,), Content.ROUTING)
            local = has_memory(into.value) and storage_id(into.value) in self.kept
            has_rows = index.known is not None or id(index.value) in found
            if (
                into.known is None
                and has_rows
                and local
                and type(extent) is int
                and extent in self.extents
            ):
                found[id(into.value)] = Rows((dim,), Content.UNIFORM)

        def told(operand: Any) -> Any:
            return replace(operand, known=found.get(id(operand.value), operand.known))

        return pytree.tree_map_only(Operand, told, (given, named))

    def _dims(
        self, func: Any, given: Any, named: Any, call: Call, results: Sequence[Tensor]
    ) -> list[tuple[int, ...]]:
        rows = call.rows()
        if not rows:
            return [()] * len(results)
        (first, known), *_ = rows
        if call.name in mixing.RESHAPES:
            return [self._reshaped(first.value, known, results[0])]
        if call.name == "all_to_all_single":
            return [(0,)] * len(results)
        if call.pointwise or call.name in (
            "expand",
            "wait_tensor",
        ):  # as they stand in what they are broadcast to
            places = {d - operand.value.ndim for operand, known in rows for d in known.dims}
            return [
                tuple(sorted(r.ndim + place for place in places if r.ndim + place >= 0))
                for r in results
            ]

        def longer(operand: Operand) -> Any:
            if not isinstance(operand.value, Tensor):
                return operand.value
            held = operand.known.dims if isinstance(operand.known, Rows) else ()
            shape = [
                (2 * extent or 2) if dim in held else extent
                for dim, extent in enumerate(operand.value.shape)
            ]
            return torch.empty(shape, dtype=operand.value.dtype, device="meta")

        try:
            with unseen_by_modes():
                args, kwargs = pytree.tree_map_only(Operand, longer, (given, named))
                twice = [
                    leaf
                    for leaf in pytree.tree_leaves(func(*args, **kwargs))
                    if isinstance(leaf, Tensor)
                ]
            return [tuple(differing_dims(a, b)) for a, b in zip(results, twice, strict=True)]
        except (
            Exception
        ):  # its shapes depend on data, or cannot be told: where extents are known, the rows lie
            return [self._with_known_extent(result) for result in results]

    def _with_known_extent(self, result: Tensor) -> tuple[int, ...]:
        """Where a result has an extent of the data, or else one that rows had before, or else the first dimension."""
        of_data = [dim for dim, extent in enumerate(result.shape) if type(extent) is not int]
        found = [
            dim
            for dim, extent in enumerate(result.shape)
            if type(extent) is int and extent in self.extents
        ]
        return tuple((of_data or found)[:1] or range(min(result.ndim, 1)))

    def _reshaped(self, source: Tensor, known: Rows, result: Tensor) -> tuple[int, ...]:
        """Where the rows lie behind a reshape, which leaves what is in front of them as it was."""
        if not is_plain(source) or not is_plain(result):
            return self._with_known_extent(result)
        front, passed = (
            known.positions_in_front(source),
            itertools.accumulate(result.shape, operator.mul, initial=1),
        )
        places = list(enumerate(itertools.pairwise(passed)))
        found = [dim for dim, (before, behind) in places if before <= front < behind]
        if (
            self.part == 1
        ):  # no place of its own tells it: alone, or merged with what is in front of it
            alone = [dim for dim, (before, behind) in places if before == behind == front]
            found = (
                alone
                + [dim for dim, (before, behind) in places if before < behind == front]
                + found
            )
        return tuple(found[:1]) or self._with_known_extent(result)

    def _note(self, tensor: Tensor, known: Known, foreign: Collection[int] = ()) -> None:
        if has_memory(tensor):
            if storage_id(tensor) in foreign:
                return  # a buffer, which goes from chunk to chunk, or a parameter
            self.kept[storage_id(tensor)] = tensor.untyped_storage()
        else:
            self.kept[id(tensor)] = tensor
        self.known[self._key(tensor)] = known
        if isinstance(known, Rows):
            self.extents.update(
                extent for dim in known.dims if type(extent := tensor.shape[dim]) is int
            )

    def _key(self, tensor: Tensor) -> Any:
        """What tells a tensor from others: autograd hands on views as other objects of the same geometry."""
        if type(tensor).__name__ == "AsyncCollectiveTensor":
            return self._key(tensor.elem)
        if not has_memory(tensor):
            return id(tensor)
        return (
            storage_id(tensor),
            tensor.dtype,
            str((tensor.storage_offset(), tensor.shape, tensor.stride())),
        )

    def check_returned(self, returned: Any) -> None:
        """A ChunkError unless what the chunk returns has the chunk dimension where it is joined."""
        for place, tensor in enumerate(
            returned if isinstance(returned, tuple | list) else [returned]
        ):
            known = self.known.get(self._key(tensor))
            if isinstance(known, Rows) and (
                known.content != Content.DATA or known.dims == (self.config.dim,)
            ):
                continue
            raise returned_error(
                self.fqn, tensor, place, known.dims if isinstance(known, Rows) else (), self.config
            )
