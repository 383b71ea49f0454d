"""Where an element that differs sits on either side of a comparison, and in which order each side adds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pytest_gtrainer.graph.layout import ALL_REDUCE_NAME, REDUCE_SCATTER_NAME, BucketLayout, Payload
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.numerics.verdict import Difference, Verdict
from pytest_gtrainer.worlds.simulated.net import Net

GroupOf = Callable[[int, tuple[int, ...]], tuple[int, ...]]
_AROUND = 2
_REDUCTIONS = (REDUCE_SCATTER_NAME, ALL_REDUCE_NAME)


@dataclass(frozen=True, slots=True)
class Paths:
    """Tells the path of a gradient's element through the reductions of several sides.

    Attributes:
        layouts: by side, "graph" and "eager"; of rank 0.
        group_of: the group of a rank that stands for the same dimension of the mesh as these ranks of rank 0.
    """

    net: Net
    layouts: Mapping[str, BucketLayout]
    group_of: GroupOf

    def of_first(self, verdict: Verdict, record: Record) -> Iterator[str]:
        """Lines about the first gradient that differs, which ``record`` has; none if no gradient does."""
        for found in verdict.differences:
            if found.key.phase == "gradient" and found.element is not None:
                element = _Element.of(found, record[found.key])
                for side, layout in self.layouts.items():
                    yield from self._of_side(side, layout, element)
                return

    def _of_side(self, side: str, layout: BucketLayout, element: _Element) -> Iterator[str]:
        payloads = [payload for name in _REDUCTIONS for payload in layout.of(name)]
        own = [payload for payload in payloads if element.parameter in payload.parameters]
        if not layout.payloads:
            yield f"  {side}: {self._path_alone(element)}"
        elif not own:
            yield f"  {side}: no reduction of its layout holds {element.parameter}"
        for payload in own:
            place = payload.parameters.index(element.parameter)
            yield f"  {side}: bucket {payload.label!r}, {payload.collective}, {self._path(element, payload, place)}"
            yield from (f"    {line}" for line in _neighbours(payload, place))

    def _path(self, element: _Element, payload: Payload, place: int) -> str:
        item = payload.dtype.itemsize
        offset = payload.slots[place].offset // item + element.offset
        count = sum(slot.nbytes for slot in payload.slots) // item
        ranks = self.group_of(element.rank, payload.ranks)
        net = self.net if len(ranks) == self.net.size else self.net.for_group(ranks)
        path = net.explain(payload.collective, offset, count, payload.dtype, ranks.index(element.rank))
        return f"element {offset} of {count}, {path}"

    def _path_alone(self, element: _Element) -> str:
        """Of a replicated parameter's gradient, which no bucket holds."""
        path = self.net.explain(ALL_REDUCE_NAME, element.offset, element.count, element.dtype)
        return f"reduced by itself, element {element.offset} of {element.count}, {path}"


@dataclass(frozen=True, slots=True)
class _Element:
    """One element of one rank's gradient: its number ``offset`` among the ``count`` that the rank holds."""

    rank: int
    parameter: str
    offset: int
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, found: Difference, gradient: torch.Tensor) -> _Element:
        assert found.element is not None
        shape = gradient.shape
        offset = sum(index * math.prod(shape[dim + 1 :]) for dim, index in enumerate(found.element))
        return cls(found.key.rank, found.key.name, offset, gradient.numel(), gradient.dtype)


def _neighbours(payload: Payload, place: int) -> Iterator[str]:
    for at in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(payload.slots))):
        slot = payload.slots[at]
        mark = ">" if at == place else " "
        yield f"{mark} byte {slot.offset}: {slot.parameter}, {slot.nbytes} bytes"
