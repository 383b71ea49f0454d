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
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_gtrainer._torch.autograd import TorchDispatchMode, hooks_of
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
    Mixing,
    Operand,
    RowInfo,
    Rows,
    Statistic,
    has_static_shape,
    indices_of,
    is_row_numbers,
    propagate,
    refuse_mixing,
)
from pytest_gtrainer.passes.chunking.regions import Storages, find_regions
from pytest_gtrainer.passes.chunking.twins import Twins, differing_dims, unknown_dims
from pytest_gtrainer.tracing.model import ModelState, holds_as_object, tensor_text

_logger = logging.getLogger(__name__)


def returned_error(
    fqn: str, tensor: Tensor, place: int, dims: Sequence[int] | None, config: ChunkConfig
) -> ChunkError:
    """Return the refusal of a result that has the chunk dimension elsewhere, or has lost it."""
    where = "nowhere, as far as can be seen"
    if dims:
        where = f"in dimension {dims[0]}"
    in_place = f" in place {place}" if place else ""
    return ChunkError(
        f"{fqn} returns {tensor_text(tensor)}{in_place}, which has the {config.chunk_dim} {where}. "
        f"Chunks are joined along dimension {config.dim}: return it there; compiled code cannot be "
        "looked into: chunk modules before they are compiled, or answer: "
        f"ChunkConfig(row_wise=({config.module_fqn!r},))"
    )


def has_memory(value: Any) -> bool:
    """Return whether a value is a tensor with bytes and strides of its own."""
    return (
        isinstance(value, Tensor)
        and not is_traceable_wrapper_subclass(value)
        and value.layout == torch.strided
    )


def check_twins(fqn: str, graphs: tuple[Any, Any], config: ChunkConfig) -> None:
    """Judge a forward by its graphs on all rows and on those of a chunk.

    Raises:
        ChunkError: something mixes rows, or a result does not have them where chunks are joined.
    """
    twins = Twins(*graphs, config.num_chunks)
    storages = Storages(twins.full.graph)
    if any(node.op == "call_function" for node in twins.full.graph.nodes):
        check_bodies(twins, find_regions(twins, config, storages), storages, config)

    for place, node in enumerate(twins.full.graph.output_node().all_input_nodes):
        value, dims = node.meta["val"], twins.dims.get(node)
        if value.ndim > config.dim and dims != [config.dim] and not unknown_dims(value):
            raise returned_error(fqn, value, place, dims, config)


def _is_float_item(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the call is ``.item()`` or ``float()`` of a floating-point tensor.

    Integers do not count, as they are sizes: a router's counts of tokens for each expert. Nor do
    decisions, which many modules make of masks.
    """
    return func is torch.ops.aten._local_scalar_dense.default and bool(args[0].is_floating_point())


class _NoBackward(Exception):
    """The backward does not run on fake tensors."""


class _Recorder(TorchDispatchMode):
    """Record a forward on fake tensors as a graph.

    ``make_fx`` does so too, but its state is the process's, so ranks on threads must not use it.

    Raises:
        NotImplementedError: it runs a collective in place, or a higher-order operator.
    """

    supports_higher_order_operators = True

    def __init__(self, fqn: str, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.constants, self.kept = fx.Graph(), SimpleNamespace(), list[Any]()
        self.nodes: dict[int, fx.Node] = {}
        self.meta: dict[str, Any] = {"custom": {"module_fqn": fqn}}
        for place, tensor in enumerate(inputs):
            self._note(tensor, self.graph.placeholder(f"input_{place}"))

    def _note(self, value: Any, node: fx.Node) -> None:
        node.meta = {"val": value, **self.meta}
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
            self.kept.append(value)  # once a tensor is freed, its id may be another's

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:  # neither an input nor computed: a constant
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
        # A graph has no node for a number, so the forward is followed instead.
        if _is_float_item(func, args):
            raise NotImplementedError(func)
        made = func(*args, **(kwargs or {}))
        # An operator that gives a size or a device computes no value.
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(made)):
            given = pytree.tree_map_only(Tensor, self._node_of, (args, kwargs or {}))
            node = self.graph.create_node("call_function", func, *given)
            self._note(made, node)
            if isinstance(made, tuple | list):
                for place, item in enumerate(made):
                    self._note(item, self.graph.call_function(operator.getitem, (node, place)))

        return made

    def record_backward(self, returned: Any, sources: Sequence[Tensor]) -> None:
        """Record the backward, too, if it runs code of the module.

        Such are hooks on activations and the backward of an ``autograd.Function``. All else that a
        backward runs follows from the forward, which is judged.

        Raises:
            _NoBackward: it does not run on fake tensors.
        """
        leaves = pytree.tree_leaves(returned)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        sources = [source for source in sources if source.requires_grad]
        tensors = [value for value in self.kept if isinstance(value, Tensor)]
        is_own = any(map(hooks_of, tensors)) or _has_own_function(results)
        if not sources or not is_own:
            return
        # The gradients that come in have rows of data, as the results have.
        gradients = [result.detach().clone() for result in results]
        self.meta["autograd_backward"] = True
        try:
            torch.autograd.grad(results, sources, gradients, allow_unused=True)
        except Exception as error:
            # Hooks may read numbers, which fake gradients do not have.
            raise _NoBackward from error

    def finish(self, returned: Any) -> Any:
        """Return an object with the graph and its constants, as ``Twins`` reads them."""
        self.graph.output(pytree.tree_map_only(Tensor, self._node_of, returned))
        self.constants.graph = self.graph
        return self.constants


def _has_own_function(results: Sequence[Tensor]) -> bool:
    """Return whether an ``autograd.Function`` written in Python is in the backward."""
    found, waiting = set[Any](), [result.grad_fn for result in results]
    while waiting:
        function = waiting.pop()
        if function is None or function in found:
            continue
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            return True
        found.add(function)
        waiting += [each for each, _ in function.next_functions]
    return False


def twin_graphs(
    fqn: str, run: Callable[..., Any], whole: Mapping[str, Any], part: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """Return graphs of a module's forward on all rows and on a chunk's; None if it cannot run so.

    A copy of the module runs, on fake tensors.
    """
    if not isinstance(run, MethodType):
        # ``forward`` under a decorator, such as ``functools.wraps`` leaves it.
        run = getattr(run, "__wrapped__", run)

    module = getattr(run, "__self__", None)
    if not isinstance(run, MethodType) or not isinstance(module, nn.Module):
        return None

    # Fake tensors are made from sizes and strides.
    given = [value for value in (*whole.values(), *part.values()) if value is not None]
    if not all(map(has_memory, [*given, *module.parameters(), *module.buffers()])):
        return None
    for inner in module.modules():
        # An instance's own forward is bound to the module itself, not to its copy.
        if inner is not module and "forward" in inner.__dict__:
            return None

    try:
        # Compiled parts run eagerly, or Dynamo's caches would change. What the module warns of, it
        # warns of when it runs.
        with unseen_by_modes(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            mode = new_fake_mode(real_inputs=True)
            record = partial(_record, fqn, module, run.__func__, mode)
            try:
                return record(whole, True), record(part, True)
            except _NoBackward as error:
                _logger.debug("the backward of %s is not judged: %r", fqn, error.__cause__)
                return record(whole, False), record(part, False)
    # Any error means only that the twins cannot run: the real run is judged then, so nothing goes
    # unchecked.
    except Exception as error:
        _logger.debug("%s is followed while it runs: on fake tensors it raises %r", fqn, error)
        return None


def _record(
    fqn: str,
    module: nn.Module,
    forward: Callable[..., Any],
    mode: FakeTensorMode,
    arguments: Mapping[str, Any],
    with_backward: bool,
) -> Any:
    # A copy, since a forward may keep tensors in its module, and these would be fake ones.
    copied = _copy_module(module)
    state = ModelState.of(copied)

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        return made.clone()  # no leaf, since autograd forbids writing to a leaf in place

    with mode:
        fakes = list(map(fake, state.tensors))
        inputs = {}
        for name, value in arguments.items():
            if value is not None:
                inputs[name] = fake(value)
        recorder = _Recorder(fqn, [*inputs.values(), *fakes])
        with state.exchanged(fakes), recorder:
            returned = forward(copied, **{**arguments, **inputs})
            if with_backward:
                recorder.record_backward(returned, [*inputs.values(), *fakes])
            return recorder.finish(returned)


def _copy_containers(value: Any, depth: int) -> Any:
    """Copy the containers that a forward may keep tensors in, up to ``depth`` levels deep.

    These are lists, dicts, sets, and objects of plain classes. The tensors stay the same.
    """
    if not depth or not (holds_as_object(value) or isinstance(value, dict | list | set)):
        return value
    made = copy.copy(value)
    if isinstance(made, list):
        made[:] = [_copy_containers(item, depth - 1) for item in made]
    elif not isinstance(made, set):
        table = made if isinstance(made, dict) else made.__dict__
        for name, item in table.items():
            table[name] = _copy_containers(item, depth - 1)

    return made


def _copy_module(module: nn.Module) -> nn.Module:
    """Copy a module and what it holds, on the same tensors."""
    copied = object.__new__(type(module))
    for name, value in module.__dict__.items():
        copied.__dict__[name] = _copy_containers(value, 3)
    children = modules_of(copied)
    for name, child in children.items():
        children[name] = child and _copy_module(child)
    return copied


class ForwardJudge(TorchDispatchMode):
    """Judge one chunk's forward while it runs, operator by operator.

    Args:
        arguments: the arguments that are cut, with their chunk dimension.

    Attributes:
        known: what is known of each tensor, by ``_key``.
        row_numbers: keys of tensors 0, 1, ..., which may be row numbers.
        extents: extents that rows have had in the chunk dimension.
        part: the chunk's extent in the chunk dimension.
        kept: memory that the chunk has made, and that of its arguments, so that it is not reused.
    """

    supports_higher_order_operators = True

    def __init__(
        self, fqn: str, config: ChunkConfig, arguments: Sequence[tuple[Tensor, int]]
    ) -> None:
        super().__init__()
        self.fqn, self.config = fqn, config
        self.known: dict[Any, RowInfo] = {}
        self.warned: set[str] = set()
        self.row_numbers: set[Any] = set()
        self.extents: set[int] = set()
        self.part = arguments[0][0].shape[arguments[0][1]] if arguments else 0
        self.kept: dict[int, Any] = {}
        for tensor, dim in arguments:
            self._note(tensor, Rows((dim,)))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave a compiled part compiled; what it does to rows is not seen."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Memory of parameters and buffers, which the chunk has not made.
        foreign = set()
        for leaf in pytree.tree_leaves([args, kwargs]):
            if has_memory(leaf):
                foreign.add(storage_id(leaf))

        foreign -= self.kept.keys()
        made = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        if not results:  # a size, a device, a number
            if _is_float_item(func, args):
                self._judge_number(args[0])
            return made

        def operand(tensor: Tensor) -> Operand:
            return Operand(tensor, self.known.get(self._key(tensor)))

        given, named = pytree.tree_map_only(Tensor, operand, (list(args), dict(kwargs)))
        call = Call(func, given, named, [])
        if not any(one.known for one in call.operands):
            self._note_unrelated(call, results, foreign)
            return made
        # Experts exchange rows by an all-to-all; every other collective is refused.
        if launches(func) and "all_to_all" not in call.name:
            group = call.arguments.get("group_name")
            raise collective_error(str(func), group if isinstance(group, str) else None, self.fqn)

        given, named = self._recognise_indexing(call, given, named)
        call = Call(func, given, named, [])
        call.results = list(zip(results, self._dims(call, given, named, results), strict=True))
        tensors = [one.value for one in call.operands if isinstance(one.value, Tensor)]
        what = f"{func} of {', '.join(map(tensor_text, tensors))}"
        known = propagate(call, what, self.fqn, self.config, self.warned)
        for result, of_result in zip(results, known, strict=True):
            self._note(result, of_result, foreign)
        return made

    def _judge_number(self, tensor: Tensor) -> None:
        """Warn of a number that is read of rows: nobody sees what Python code makes of it."""
        if self.known.get(self._key(tensor)) is None:
            return
        reason = Mixing(
            "is read by Python code, and is made of the rows that are there", is_of_chunk=True
        )
        what = f"the number of {tensor_text(tensor)}"
        refuse_mixing(what, reason, self.fqn, self.config, self.warned)

    def _note_unrelated(
        self, call: Call, results: Sequence[Tensor], foreign: Collection[int]
    ) -> None:
        """Note results of operands without rows; 0, 1, ... and its views may be row numbers."""
        are_row_numbers = is_row_numbers(call)
        if is_view(call.target) and call.operands:
            are_row_numbers |= self._key(call.operands[0].value) in self.row_numbers
        for result in results:
            self._note(result, None, foreign)
            if are_row_numbers:
                self.row_numbers.add(self._key(result))

    def _recognise_indexing(self, call: Call, given: Any, named: Any) -> tuple[Any, Any]:
        """Return the arguments, with what an indexing operator shows of them.

        A forward makes these tensors of sizes that have become plain numbers. So nothing was known
        of them, until they index or are indexed along the chunk dimension:

        - ``arange(len(x))``, one index for each row: ROW_NUMBERS;
        - an order that a router has made of its counts, for rows in such an order: ROUTING;
        - ``zeros(len(x), 8)``, to which rows are written: UNIFORM, before they come.
        """
        if call.name not in mixing.INDEXING:
            return given, named
        into, chosen = indices_of(call)
        is_own = has_memory(into.value) and storage_id(into.value) in self.kept
        found: dict[int, RowInfo] = {}  # by the id of the tensor
        for dim, index in chosen:
            extent = 0  # of a scalar
            if into.value.ndim:
                extent = into.value.shape[dim]
            if index.value.shape[:1] == (extent,):
                content = self._content_of_index(index, into.known, dim)
                if content is not None:
                    found[id(index.value)] = Rows((0,), content)

            is_by_rows = index.known is not None or id(index.value) in found
            has_extent_of_rows = type(extent) is int and extent in self.extents
            if into.known is None and is_own and is_by_rows and has_extent_of_rows:
                found[id(into.value)] = Rows((dim,), Content.UNIFORM)

        def recognised(operand: Operand) -> Operand:
            return replace(operand, known=found.get(id(operand.value), operand.known))

        return pytree.tree_map_only(Operand, recognised, (given, named))

    def _content_of_index(self, index: Operand, into: RowInfo, dim: int) -> Content | None:
        """Return what an index with one entry for each place of ``dim`` holds, if it shows."""
        if index.known is None and self._key(index.value) in self.row_numbers:
            return Content.ROW_NUMBERS
        is_routed = isinstance(into, Rows) and into.content is Content.ROUTED and dim in into.dims
        if is_routed and isinstance(index.known, Statistic):
            return Content.ROUTING
        return None

    def _dims(
        self, call: Call, given: Any, named: Any, results: Sequence[Tensor]
    ) -> list[tuple[int, ...]]:
        """Return where each result has the chunk dimension."""
        rows = call.rows()
        if not rows:
            return [()] * len(results)
        if call.name in mixing.RESHAPES:
            return [self._reshaped_dims(rows[0][0].value, rows[0][1], results[0])]
        if call.name == "all_to_all_single":
            return [(0,)] * len(results)
        if call.pointwise or call.name in ("expand", "wait_tensor"):
            # Broadcasting aligns dimensions from the right.
            places: set[int] = set()
            for operand, known in rows:
                places.update(dim - operand.value.ndim for dim in known.dims)
            found = []
            for result in results:
                dims = [result.ndim + place for place in sorted(places)]
                found.append(tuple(dim for dim in dims if dim >= 0))
            return found

        def lengthen(operand: Operand) -> Any:
            if not isinstance(operand.value, Tensor):
                return operand.value
            shape = list(operand.value.shape)
            if isinstance(operand.known, Rows):
                for dim in operand.known.dims:
                    shape[dim] = 2 * shape[dim] or 2
            return torch.empty(shape, dtype=operand.value.dtype, device="meta")

        # The dimensions that grow when rows are doubled are those that have the rows.
        try:
            with unseen_by_modes():
                args, kwargs = pytree.tree_map_only(Operand, lengthen, (given, named))
                leaves = pytree.tree_leaves(call.target(*args, **kwargs))
            longer = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            return [tuple(differing_dims(a, b)) for a, b in zip(results, longer, strict=True)]
        except Exception:  # its shapes depend on data, or it has no meta kernel
            return list(map(self._dims_by_extent, results))

    def _dims_by_extent(self, result: Tensor) -> tuple[int, ...]:
        """Guess the chunk dimension: by an unknown extent, by one that rows had, or the first."""
        for dim, extent in enumerate(result.shape):
            if type(extent) is not int:
                return (dim,)
        for dim, extent in enumerate(result.shape):
            if extent in self.extents:
                return (dim,)
        return (0,) if result.ndim else ()

    def _reshaped_dims(self, source: Tensor, known: Rows, result: Tensor) -> tuple[int, ...]:
        """Return where the rows are after a reshape, which keeps the elements in front of them."""
        if not has_static_shape(source) or not has_static_shape(result):
            return self._dims_by_extent(result)
        front = known.positions_in_front(source)
        # An extent of 1 has no place of its own: it is alone, or merged with what is in front.
        alone: list[int] = []
        merged: list[int] = []
        found: list[int] = []
        passed = itertools.accumulate(result.shape, operator.mul, initial=1)
        for dim, (before, behind) in enumerate(itertools.pairwise(passed)):
            if before <= front < behind:
                found.append(dim)
            elif self.part == 1 and before == behind == front:
                alone.append(dim)
            elif self.part == 1 and before < behind == front:
                merged.append(dim)

        return (*alone, *merged, *found)[:1] or self._dims_by_extent(result)

    def _note(self, tensor: Tensor, known: RowInfo, foreign: Collection[int] = ()) -> None:
        if has_memory(tensor):
            if storage_id(tensor) in foreign:
                return  # a buffer, which goes from chunk to chunk, or a parameter
            self.kept[storage_id(tensor)] = tensor.untyped_storage()
        else:
            self.kept[id(tensor)] = tensor
        self.known[self._key(tensor)] = known
        if isinstance(known, Rows):
            for dim in known.dims:
                extent = tensor.shape[dim]
                if type(extent) is int:
                    self.extents.add(extent)

    def _key(self, tensor: Tensor) -> Any:
        """Return a key of a tensor; autograd hands on views as other objects of one geometry."""
        if type(tensor).__name__ == "AsyncCollectiveTensor":
            return self._key(tensor.elem)
        if not has_memory(tensor):
            return id(tensor)
        geometry = str((tensor.storage_offset(), tensor.shape, tensor.stride()))
        return (storage_id(tensor), tensor.dtype, geometry)

    def check_returned(self, returned: Any) -> None:
        """Refuse results that have the chunk dimension elsewhere than where chunks are joined."""
        results = returned if isinstance(returned, tuple | list) else [returned]
        for place, tensor in enumerate(results):
            known = self.known.get(self._key(tensor))
            dims: tuple[int, ...] = ()
            if isinstance(known, Rows):
                if known.content is not Content.DATA:
                    continue
                dims = known.dims
            if dims != (self.config.dim,):
                raise returned_error(self.fqn, tensor, place, dims, self.config)
