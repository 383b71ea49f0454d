"""Digest and comparison of a model against reading its memory once, and against sha256.

    python -m benchmarks.digest [--gib 1] [--rounds 5]

CPU seconds on one thread. The yardsticks: an int64 sum over the same memory, and
``sha256(tensor.numpy().tobytes())`` over as many bytes in fp16. A comparison reads both sides, and
one of them again if they are equal: numbers that are not finite prove nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time

import torch
from torch import Tensor, nn

from benchmarks.paired import Goal, measure, report
from pytest_gtrainer import compare, digest

GOALS = [Goal("digest", "read", 1.5), Goal("compare equal", "read three times", 2)]


def model_of(gib: float, dtype: torch.dtype) -> nn.Module:
    """A module of 32 layers with this many GiB of parameters that are not zero."""
    rows = int(gib * 2**30 / 32 / 1024 / dtype.itemsize)
    model = nn.Module()
    for layer in range(32):
        # Without the highest bit of the exponent all patterns are finite numbers, as weights are.
        values = (torch.arange(rows * 1024, dtype=torch.int32) & 0xBFFF).to(torch.int16).view(dtype)
        model.register_parameter(
            f"w{layer}", nn.Parameter(values.reshape(rows, 1024), requires_grad=False)
        )
    return model


def read(*models: nn.Module) -> int:
    return sum(int(_words(weight).sum()) for model in models for weight in model.parameters())


def _words(weight: Tensor) -> Tensor:
    return weight.detach().view(-1).view(torch.int64)


def sha256(model: nn.Module) -> str:
    hasher = hashlib.sha256()
    for weight in model.parameters():
        hasher.update(weight.detach().numpy().tobytes())
    return hasher.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, twin = (model_of(options.gib, torch.bfloat16) for _ in range(2))
    contestants = {
        "read": lambda: read(model),
        "digest": lambda: digest(model),
        "read three times": lambda: read(model, twin, twin),
        "compare equal": lambda: compare(model, twin),
    }
    half = model_of(options.gib, torch.float16)
    contestants["sha256 of tobytes"] = lambda: sha256(half)
    times_read = {"read three times": 3, "compare equal": 3}
    sizes = {name: options.gib * times_read.get(name, 1) for name in contestants}
    torch.set_num_threads(1)
    return 0 if report(measure(contestants, options.rounds, time.process_time), sizes, GOALS) else 1


if __name__ == "__main__":
    sys.exit(main())
