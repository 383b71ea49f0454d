"""The order in which gloo adds, exactly: the net by which the simulated world is checked against
real ranks (S8).

gloo cuts a tensor into segments and deals them to the ranks in equal runs. The run of rank c is
summed as c-1, c-2, ..., c (modulo n), one rounding per hop in the dtype of the tensor; an average
divides the sum. A reduce-scatter of one tensor is an all-reduce of it of which every rank keeps its
part; the form that takes a list of tensors adds in another order and is not modelled.

Established against torch 2.13's gloo: no differing element for 2 to 8 ranks, fp64, fp32, bf16 and
fp16.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.net import Net, SumOrder, check_count
from pytest_gtrainer.worlds.simulated.rings import (
    Stretch,
    check_reduction,
    ring_orders,
    ring_sum,
    split_into_chunks,
)

SEGMENT_BYTES = 1 << 20
SEGMENTS_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class GlooNet(Net):
    """gloo over ``ranks`` ranks; it knows nothing of the world around a subgroup.

    Raises:
        ValueError: in one sentence, naming the value.
    """

    by_destination: ClassVar[bool] = False

    ranks: int
    members: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks)
        self._check_members()

    @property
    def world_size(self) -> int:
        return self.ranks

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        """Reduce all shards together: segments know no shards."""
        if destinations is not None:
            raise ValueError(
                f"gloo reduces all shards together, not those of {destinations} alone: leave it out"
            )
        return self.all_reduce(inputs, op).view(self.size, -1)

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        check_reduction("all_reduce", op, inputs.dtype)
        count, itemsize = inputs.shape[1], inputs.dtype.itemsize
        stretches = self._stretches(count, itemsize)
        return ring_sum(
            inputs, stretches, self._orders(), op, accumulator=inputs.dtype, average="divide"
        )

    def explain(
        self,
        collective: str,
        offset: int,
        count: int,
        dtype: torch.dtype,
        destination: int = 0,
        op: str = "sum",
    ) -> SumOrder:
        if collective == "reduce_scatter":
            offset, count = destination * count + offset, self.size * count
        part = next(part for part in self._stretches(count, dtype.itemsize) if offset in part)
        members = self.members or range(self.ranks)
        return SumOrder(
            0, tuple(members[rank] for rank in self._orders()[0, :, part.place].tolist())
        )

    def _stretches(self, count: int, itemsize: int) -> list[Stretch]:
        if not count:
            return []
        return split_into_chunks(Stretch(0, 0, count), run_length(count, itemsize, self.size))

    def _orders(self) -> Tensor:
        return ring_orders(((0, *range(self.size - 1, 0, -1)),), "rank")


def run_length(count: int, itemsize: int, ranks: int) -> int:
    """Elements of the run of segments that one rank reduces.

    >>> run_length(33, 4, ranks=4), run_length(5_000_000, 4, ranks=4)
    (10, 1250000)
    """
    size = count * itemsize
    segments = max(-(-size // SEGMENT_BYTES), SEGMENTS_PER_RANK * ranks)
    per_rank = -(-segments // ranks)
    segment = -(-size // (per_rank * ranks))
    return per_rank * -(-segment // itemsize)
