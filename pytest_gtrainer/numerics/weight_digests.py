"""One line a step instead of every tensor: digests of the weights, for runs whose records would not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable

import xxhash
from torch import Tensor

from pytest_gtrainer.numerics.digest import digest


class WeightDigests:
    """Takes what a ``Record`` takes and keeps of each step and rank a digest of its weights.

    >>> import torch
    >>> kept = WeightDigests()
    >>> kept.add(0, 0, "weight", "w", torch.ones(2)); kept.add(0, 0, "loss", "loss", torch.ones(()))
    >>> other = WeightDigests()
    >>> other.add(0, 0, "weight", "w", -torch.ones(2))
    >>> list(kept.steps), kept.steps == other.steps
    ([0], False)
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._place: tuple[int, int] | None = None
        self._ranks: dict[int, dict[int, str]] = {}

    def add(self, step: int, rank: int, phase: str, name: str, tensor: Tensor) -> None:
        """Note a tensor; of weights a digest is made as soon as another step or rank begins."""
        if phase != "weight":
            return
        if self._place != (step, rank):
            self._close()
            self._place = (step, rank)
        self._tensors[name] = tensor.detach().clone()

    def _close(self) -> None:
        if self._place is not None:
            step, rank = self._place
            self._ranks.setdefault(step, {})[rank] = digest(self._tensors)
        self._place, self._tensors = None, {}

    @property
    def steps(self) -> dict[int, str]:
        """One digest for all ranks of every step."""
        self._close()
        return {step: _joined(ranks) for step, ranks in sorted(self._ranks.items())}

    @classmethod
    def merged(cls, parts: Iterable[WeightDigests]) -> WeightDigests:
        """The digests of ranks that were kept apart."""
        whole = cls()
        for part in parts:
            part._close()
            for step, ranks in part._ranks.items():
                whole._ranks.setdefault(step, {}).update(ranks)
        return whole


def _joined(ranks: dict[int, str]) -> str:
    text = "\n".join(f"{rank} {told}" for rank, told in sorted(ranks.items()))
    return f"xxh3_128:{xxhash.xxh3_128(text.encode()).hexdigest()}"


VARIABLE = "GT_WEIGHT_HASH"


def tell_weights(step: int, rank: int, side: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Print a digest of this rank's weights if ``GT_WEIGHT_HASH=1``: a line per step and rank, to be compared by eye.

    Weights that lie on a GPU stay there: of them it is a ``mix128``.

    >>> import torch
    >>> os.environ[VARIABLE] = "1"
    >>> tell_weights(3, 5, "eager", [("w", torch.zeros(2))])
    weights step 3 rank 5 xxh3_128:2997c89bb6d3041c53e8ce44f4f6f76f eager
    >>> del os.environ[VARIABLE]
    """
    if os.environ.get(VARIABLE) == "1":
        told = dict(weights)
        on_host = all(tensor.device.type == "cpu" for tensor in told.values())
        made = digest(told, algorithm="xxh3_128" if on_host else "mix128")
        print(f"weights step {step} rank {rank} {made} {side}", flush=True)
