"""Made-up runs, every dtype, and a way to spoil one bit."""

from itertools import product

import torch
from hypothesis import settings

from pytest_gtrainer import Record

# A busy machine is no reason for a property to fail.
unhurried = settings(deadline=None)

NAMES = ("lm_head.weight", "layers.0.wq.weight")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
OTHERS = [
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint32,
]
ALL = FLOATS + FP8 + OTHERS


def make_run(world_size: int = 2, steps: int = 2, rank: int | None = None) -> Record:
    record = Record(world_size, rank)
    for step in range(steps):
        for each in record.expected_ranks:
            record.add(step, each, "loss", "loss", torch.tensor(2.5 - step / 4 + each / 8))
            for number, (phase, name) in enumerate(
                product(("gradient", "weight", "optimizer"), NAMES)
            ):
                record.add(step, each, phase, name, _values(20 * step + 10 * each + number))
    return record


def _values(offset: int) -> torch.Tensor:
    """Numbers in [-2, 2) that differ between neighbours and between offsets: ``bf16[8, 8]``."""
    return ((torch.arange(64) * 7 + offset) % 61).sub(30).div(16).reshape(8, 8).to(torch.bfloat16)


def flip_bit(tensor: torch.Tensor, element: int = 0, bit: int = 0) -> None:
    """Flip one bit of one element in place."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(width).view(-1)[element] ^= 1 << bit
