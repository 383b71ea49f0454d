"""Digest and comparison of a model against reading its memory once, and against sha256.

    python -m benchmarks.digest [--gib 1] [--rounds 5] [--threads N]

Two tables: CPU seconds on one thread, and time on the clock with all of torch's threads, or ``--threads``. The
yardsticks: an int64 sum over the same memory on as many threads, and ``sha256(tensor.numpy().tobytes())`` over as
many bytes in fp16. Against sha256, which knows no threads, throughput counts, so its goal belongs to the clock: where
the processor has instructions for sha256, one thread reads memory less than twenty times as fast as that.
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

GOALS = [Goal("digest", "read", 1.5), Goal("compare equal", "read both", 2)]
THROUGHPUT = Goal("digest", "sha256 of tobytes", 1 / 20)


def model_of(gib: float, dtype: torch.dtype) -> nn.Module:
    """A module of 32 layers with this many GiB of parameters that are not zero."""
    rows = int(gib * 2**30 / 32 / 1024 / dtype.itemsize)
    model = nn.Module()
    for layer in range(32):
        values = torch.arange(rows * 1024, dtype=torch.int32).to(torch.int16).view(dtype)
        model.register_parameter(f"w{layer}", nn.Parameter(values.reshape(rows, 1024), requires_grad=False))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the second table")
    options = parser.parse_args()
    model, twin = (model_of(options.gib, torch.bfloat16) for _ in range(2))
    contestants = {
        "read": lambda: read(model),
        "digest": lambda: digest(model),
        "read both": lambda: read(model, twin),
        "compare equal": lambda: compare(model, twin),
    }
    half = model_of(options.gib, torch.float16)
    contestants["sha256 of tobytes"] = lambda: sha256(half)
    sizes = {name: options.gib * (2 if name in ("read both", "compare equal") else 1) for name in contestants}
    met = True
    for threads, clock, unit, goals in (
        (1, time.process_time, "CPU seconds", GOALS),
        (options.threads, time.perf_counter, "seconds on the clock", [*GOALS, THROUGHPUT]),
    ):
        torch.set_num_threads(threads)
        print(f"-- threads: {threads}, {unit}")
        met &= report(measure(contestants, options.rounds, clock), sizes, goals)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
