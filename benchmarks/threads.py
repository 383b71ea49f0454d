"""What a rank costs on a thread among many, against the same rank alone in a process: eager
``fully_shard``.

    python -m benchmarks.threads [--ranks 16 64] [--steps 4] [--rounds 2]

debug llama3, bf16 with fp32 reduction, AdamW, everything recorded, two nodes. CPU seconds of a step
after the first two, which fill DTensor's caches. The yardstick is torch's own cost of the step,
without any collective.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fixtures.training import llama3_training
from pytest_gtrainer import NetModel
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.worlds.simulated.threads import run_threads

LIMIT = 2.0
_WARM = 2


def train(rank: int, size: int, steps: int, begins: list[float]) -> None:
    """Train, and note when each step begins on the first rank."""
    config = llama3_training(
        init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)), "bf16_fp32"
    )

    def batch(step: int, of_rank: int) -> Any:
        if rank == 0:
            begins.append(time.process_time())
        return config.batch(step, of_rank)

    EagerRun(dataclasses.replace(config, batch=batch, steps=steps + _WARM + 1)).run()


def alone(steps: int) -> float:
    """Seconds of a step in a world of one."""
    begins: list[float] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(0, 1, steps, begins)
    dist.destroy_process_group()
    return _a_step(begins)


def among(size: int, steps: int) -> float:
    """Seconds of a step of one rank of ``size``."""
    begins: list[float] = []
    run_threads(size, train, size, steps, begins, net=NetModel.of_world(size, nodes=2))
    return _a_step(begins) / size


def _a_step(begins: list[float]) -> float:
    return statistics.median(
        end - begin for begin, end in zip(begins[_WARM:], begins[_WARM + 1 :], strict=False)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[int, list[float]] = {size: [] for size in (1, *options.ranks)}
    for _ in range(options.rounds):
        times[1].append(alone(options.steps))
        for size in options.ranks:
            times[size].append(among(size, options.steps))
    yardstick, met = min(times[1]), True
    print(f"a step alone in a process       {1000 * yardstick:7.1f} ms")
    for size in options.ranks:
        ratio = min(times[size]) / yardstick
        met &= ratio <= LIMIT
        print(
            f"a step of one of {size:4d} ranks     {1000 * min(times[size]):7.1f} ms, {ratio:.2f} times as much, "
            f"at most {LIMIT:g}: {'met' if ratio <= LIMIT else 'MISSED'}"
        )
    print(
        f"most memory of the process      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:7d} MB"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
