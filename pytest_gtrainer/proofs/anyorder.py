"""A net that adds in no order: for the field, where every order gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.rings import check_reduction


@dataclass(frozen=True, slots=True)
class AnyOrder(Net):
    """The groups of ``net``; each reduction is one operator, so it is rounded once.

    Make one by ``AnyOrder.of(net)``.
    """

    by_destination: ClassVar[bool] = True  # each shard is reduced by itself

    net: Net
    members: tuple[int, ...] | None = None

    @classmethod
    def of(cls, net: Net) -> AnyOrder:
        return cls(net, net.members)

    @property
    def world_size(self) -> int:
        return self.net.world_size

    def for_group(self, ranks: Sequence[int]) -> AnyOrder:
        return AnyOrder.of(self.net.for_group(ranks))

    def reduce_scatter(self, inputs: Tensor, op: str, destinations: range | None = None) -> Tensor:
        shards = len(destinations or range(self.size))
        return self.all_reduce(inputs, op).view(shards, -1)

    def all_reduce(self, inputs: Tensor, op: str) -> Tensor:
        check_reduction("a reduction", op, inputs.dtype)
        if op == "avg":
            return inputs.mean(0)
        if op == "product":
            return inputs.prod(0)
        if op == "max":
            return inputs.amax(0)
        if op == "min":
            return inputs.amin(0)
        return torch.sum(inputs, 0, dtype=inputs.dtype)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.explain(*args, **kwargs)
