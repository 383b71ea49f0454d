"""Scratch memory: where the ranks' payloads lie side by side until they are reduced.

A new buffer for every reduction would cost more than the reduction: the operating system has to clear
it. One buffer serves them all, because a payload is given up as soon as it is reduced.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 64


class Scratch:
    """One buffer, cut into rows until it is given back."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def rows(self, count: int, like: Tensor) -> Tensor:
        """``[count, *like.shape]`` of uninitialised memory."""
        size = count * like.numel() * like.itemsize
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + size > self._buffer.numel():
            if self._used:
                return like.new_empty(count, *like.shape)
            start, self._buffer = 0, torch.empty(size, dtype=torch.uint8)
        self._used = start + size
        return self._buffer[start : start + size].view(like.dtype).view(count, *like.shape)

    def give_back(self) -> None:
        """Nobody reads the rows any more."""
        self._used = 0
