"""Before ranks write into tensors: memory that they share becomes memory of their own (S7).

A uniform value, or one tensor that a collective gave to many ranks, exists once. When the ranks write to it
each for itself, every live value that looks into that memory, through views too, gets a copy for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import storage_of
from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank, at, tensors_in

ALIGNMENT = 16
Values = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of one storage that a tensor can reach."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Span:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        stop = start + (last + 1) * tensor.itemsize if tensor.numel() else start
        return cls(storage_of(tensor), start, stop)


def make_private(values: Values, written: Iterable[fx.Node], size: int) -> set[int]:
    """Rebind ``values`` so that ranks can write to ``written`` without seeing each other's writes.

    Returns:
        The storages whose contents were copied, none if the ranks' memory was apart already.
    """
    storages = {storage for node in written for storage in storages_of(values[node])}
    shared = [node for node, value in values.items() if reaches(value, storages)]
    if _are_apart([values[node] for node in shared], storages):
        return set()
    copies = [_Copies(rank, [at(values[node], rank) for node in shared], storages) for rank in range(size)]
    for node in shared:
        values[node] = PerRank(copies[rank].moved(at(values[node], rank)) for rank in range(size))
    return storages


def storages_of(value: Any) -> set[int]:
    """The memory of all tensors in ``value``, of all ranks."""
    return {storage_of(tensor) for tensor in tensors_in(value)}


def reaches(value: Any, storages: set[int]) -> bool:
    """Whether a tensor in ``value``, of any rank, lies in one of ``storages``."""
    return any(storage_of(tensor) in storages for tensor in tensors_in(value))


def _are_apart(values: list[Any], storages: set[int]) -> bool:
    """No uniform value among them, and no two ranks reach the same byte."""
    if any(type(value) is not PerRank for value in values):
        return False
    reached = sorted(
        {
            (span.storage, span.start, span.stop, rank)
            for value in values
            for rank, own in enumerate(value)
            for span in map(_Span.of, tensors_in(own))
            if span.storage in storages
        }
    )
    furthest: dict[int, tuple[int, int]] = {}  # of each storage: where the spans so far end, and whose they are
    for storage, start, stop, rank in reached:
        end, owner = furthest.get(storage, (0, rank))
        if start < end and owner != rank:
            return False
        furthest[storage] = max((end, owner), (stop, rank))
    return True


class _Copies:
    """One rank's copies of what its values reach in shared storages."""

    def __init__(self, rank: int, own: list[Any], storages: set[int]) -> None:
        bounds: dict[int, tuple[int, int, Tensor]] = {}
        for tensor in tensors_in(own):
            span = _Span.of(tensor)
            if span.storage in storages:
                start, stop, _ = bounds.get(span.storage, (span.start, span.stop, tensor))
                bounds[span.storage] = (min(start, span.start), max(stop, span.stop), tensor)
        self._copies = {storage: _copied(*bound) for storage, bound in bounds.items()}

    def moved(self, own: Any) -> Any:
        """The value over the copies."""
        if isinstance(own, Tensor):
            copy = self._copies.get(storage_of(own))
            return own if copy is None else _over(own, *copy)
        if isinstance(own, list | tuple):
            return type(own)(self.moved(item) for item in own)
        return own


def _copied(start: int, stop: int, tensor: Tensor) -> tuple[Tensor, int]:
    """The bytes from ``start`` to ``stop`` of the tensor's storage, and where the copy begins."""
    start -= start % ALIGNMENT
    window = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (stop - start,), (1,))
    return window.clone(), start


def _over(tensor: Tensor, copy: Tensor, start: int) -> Tensor:
    offset = tensor.storage_offset() - start // tensor.itemsize
    return tensor.new_empty(0).set_(copy.untyped_storage(), offset, tensor.shape, tensor.stride())
