"""Follows the chunk dimension through the forward of one eager chunk, and refuses operators that mix rows.

This is for modules that ``references/twin_forwards`` cannot record.

*Idea.* A mode sees each operator that the first chunk of a module runs, and changes none. Which dimension of a result
is the chunk dimension is found by running the operator a second time on meta tensors whose chunk dimension is
twice as long; for reshapes, by how many elements lie in front of it. Whether the operator mixes rows is judged as in a
graph (``passes/chunking/mixing``). *Cost.* Some twenty microseconds an operator, once a module; the memory of what
that chunk computes is kept while it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_gtrainer._torch.autograd import TorchDispatchMode
from pytest_gtrainer._torch.threads import unseen_by_modes
from pytest_gtrainer._torch.values import is_traceable_wrapper_subclass, pytree, storage_id
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import is_view
from pytest_gtrainer.passes.chunking import mixing
from pytest_gtrainer.passes.chunking.chunk import collective_error
from pytest_gtrainer.passes.chunking.config import ChunkConfig, ChunkError
from pytest_gtrainer.passes.chunking.mixing import Call, Known, Operand, Rows, Statistic, chosen_by, is_plain, judge
from pytest_gtrainer.passes.chunking.twins import differing_dims
from pytest_gtrainer.tracing.model import tensor_text


class Following(TorchDispatchMode):
    """What is known of the tensors of one chunk's forward, while it runs: where there are no twin graphs.

    Args:
        fqn: the chunked module.
        arguments: its tensors that are cut, each with the dimension along which.

    Raises:
        ChunkError: from inside the forward: an operator mixes rows of the chunk.
    """

    supports_higher_order_operators = True

    def __init__(self, fqn: str, config: ChunkConfig, arguments: Sequence[tuple[Tensor, int]]) -> None:
        super().__init__()
        self.fqn, self.config = fqn, config
        self.known: dict[Any, Known] = {}
        self.told: set[str] = set()
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
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {storage_id(leaf) for leaf in pytree.tree_leaves([args, kwargs]) if has_memory(leaf)}
        foreign = before - self.kept.keys()
        made = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        if not results:  # a size, a device
            return made
        given, named = pytree.tree_map_only(
            Tensor, lambda tensor: Operand(tensor, self.known.get(self._key(tensor))), (list(args), dict(kwargs))
        )
        call = Call(func, given, named, [])
        if not any(operand.known for operand in call.operands):
            for result in results:
                self._note(result, None, foreign)
            whole = call.name == "arange" and call.given.get("start", 0) == 0 and call.given.get("step", 1) == 1
            shown = is_view(func) and call.operands and self._key(call.operands[0].value) in self.numbers
            self.numbers.update(self._key(result) for result in results if whole or shown)
            return made
        if launches(func) and "all_to_all" not in call.name:
            group = call.given.get("group_name")
            raise collective_error(str(func), group if isinstance(group, str) else None, self.fqn)
        given, named = self._with_counted(call, given, named)
        what = f"{func} of {', '.join(tensor_text(o.value) for o in call.operands if isinstance(o.value, Tensor))}"
        dims = self._dims(func, given, named, Call(func, given, named, []), results)
        call = Call(func, given, named, list(zip(results, dims, strict=True)))
        known = judge(call, what, self.fqn, self.config, self.told)
        for result, found in zip(results, known, strict=True):
            self._note(result, found, foreign)
        return made

    def _with_counted(self, call: Call, given: Any, named: Any) -> tuple[Any, Any]:
        """Arguments with what indexing tells of tensors that the forward has made: row numbers, memory for rows."""
        if call.name not in mixing.INDEXING:
            return given, named
        into, chosen = chosen_by(call)
        found: dict[int, Known] = {}
        for dim, index in chosen:
            extent = into.value.shape[dim] if into.value.ndim else 0
            if index.known is None and self._key(index.value) in self.numbers and index.value.shape[:1] == (extent,):
                found[id(index.value)] = Rows((0,), mixing.NUMBERS)
            routed = isinstance(into.known, Rows) and into.known.hold == mixing.ROUTED and dim in into.known.dims
            if routed and isinstance(index.known, Statistic) and index.value.shape[:1] == (extent,):
                # an order of rows that counts of the data have made
                found[id(index.value)] = Rows((0,), mixing.ROUTING)
            local = has_memory(into.value) and storage_id(into.value) in self.kept
            has_rows = index.known is not None or id(index.value) in found
            if into.known is None and has_rows and local and type(extent) is int and extent in self.extents:
                found[id(into.value)] = Rows((dim,), mixing.MADE)

        def told(operand: Any) -> Any:
            return replace(operand, known=found.get(id(operand.value), operand.known))

        return pytree.tree_map_only(Operand, told, (given, named))

    def _dims(self, func: Any, given: Any, named: Any, call: Call, results: Sequence[Tensor]) -> list[tuple[int, ...]]:
        rows = call.rows()
        if not rows:
            return [()] * len(results)
        (first, known), *_ = rows
        if call.name in mixing.RESHAPES:
            return [self._reshaped(first.value, known, results[0])]
        if call.name == "all_to_all_single":
            return [(0,)] * len(results)
        if call.pointwise or call.name in ("expand", "wait_tensor"):  # as they stand in what they are broadcast to
            places = {d - operand.value.ndim for operand, known in rows for d in known.dims}
            return [tuple(sorted(r.ndim + place for place in places if r.ndim + place >= 0)) for r in results]

        def longer(operand: Operand) -> Any:
            if not isinstance(operand.value, Tensor):
                return operand.value
            held = operand.known.dims if isinstance(operand.known, Rows) else ()
            shape = [(2 * extent or 2) if dim in held else extent for dim, extent in enumerate(operand.value.shape)]
            return torch.empty(shape, dtype=operand.value.dtype, device="meta")

        try:
            with unseen_by_modes():
                args, kwargs = pytree.tree_map_only(Operand, longer, (given, named))
                twice = [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            return [tuple(differing_dims(a, b)) for a, b in zip(results, twice, strict=True)]
        except Exception:  # its shapes depend on data, or cannot be told: where extents are known, the rows lie
            return [self._with_known_extent(result) for result in results]

    def _with_known_extent(self, result: Tensor) -> tuple[int, ...]:
        """Where a result has an extent of the data, or else one that rows had before, or else the first dimension."""
        of_data = [dim for dim, extent in enumerate(result.shape) if type(extent) is not int]
        found = [dim for dim, extent in enumerate(result.shape) if type(extent) is int and extent in self.extents]
        return tuple((of_data or found)[:1] or range(min(result.ndim, 1)))

    def _reshaped(self, source: Tensor, known: Rows, result: Tensor) -> tuple[int, ...]:
        """Where the rows lie behind a reshape, which leaves what is in front of them as it was."""
        if not is_plain(source) or not is_plain(result):
            return self._with_known_extent(result)
        front, passed = known.in_front(source), [1]
        for extent in result.shape:
            passed.append(passed[-1] * extent)
        places = list(enumerate(itertools.pairwise(passed)))
        found = [dim for dim, (before, behind) in places if before <= front < behind]
        if self.part == 1:  # no place of its own tells it: alone, or merged with what is in front of it
            alone = [dim for dim, (before, behind) in places if before == behind == front]
            found = alone + [dim for dim, (before, behind) in places if before < behind == front] + found
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
            self.extents.update(extent for dim in known.dims if type(extent := tensor.shape[dim]) is int)

    def _key(self, tensor: Tensor) -> Any:
        """What tells a tensor from others: autograd hands on views as other objects of the same geometry."""
        if type(tensor).__name__ == "AsyncCollectiveTensor":
            return self._key(tensor.elem)
        if not has_memory(tensor):
            return id(tensor)
        return storage_id(tensor), tensor.dtype, str((tensor.storage_offset(), tensor.shape, tensor.stride()))

    def check_returned(self, returned: Any) -> None:
        """What the chunk returns has the chunk dimension where it is joined.

        Raises:
            ChunkError: it has it elsewhere, or it was lost: in compiled code, or in a sum over all rows.
        """
        for place, tensor in enumerate(returned if isinstance(returned, tuple | list) else [returned]):
            known = self.known.get(self._key(tensor))
            if isinstance(known, Rows) and (known.hold != mixing.INPUT or known.dims == (self.config.dim,)):
                continue
            raise returned_error(self.fqn, tensor, place, known.dims if isinstance(known, Rows) else (), self.config)


def returned_error(fqn: str, tensor: Tensor, place: int, dims: Sequence[int] | None, config: ChunkConfig) -> ChunkError:
    """The refusal of what a chunk returns, which has the chunk dimension elsewhere, or has lost it."""
    where = f"in dimension {dims[0]}" if dims else "nowhere, as far as can be seen"
    return ChunkError(
        f"{fqn} returns {tensor_text(tensor)}{f' in place {place}' if place else ''}, which has the {config.chunk_dim} "
        f"{where}. Chunks are joined along dimension {config.dim}: return it there; compiled code cannot be looked "
        f"into: chunk modules before they are compiled, or answer: ChunkConfig(row_wise=({config.module_fqn!r},))"
    )


def has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) and value.layout == torch.strided
