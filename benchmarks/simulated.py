"""The simulated world: the interpreter against LocalTensorMode, a ring sum against the memory it
reads.

    python -m benchmarks.simulated [--ranks 16 64] [--rounds 3] [--steps 0]

Everything runs on one thread. The graph is a rewritten training step of Llama 3 in the debug depth,
as wide as the ranks divide. The yardstick of a ring sum is one pass over the same payloads, which
must come from memory at least once, and as many additions of numbers in the cache.

``--steps 25`` also trains that many steps on 64 and 256 ranks and prints time and memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from benchmarks.paired import Goal, measure, report
from fixtures.models import llama3
from fixtures.training import llama3_training
from pytest_gtrainer import NetModel, TrainConfig
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.values import at
from pytest_gtrainer.worlds.spec import make_spec

SUM_RANKS, SUM_MIB = 256, 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SUM_GOALS = {"fp32": 3, "bf16": 2}
LEARNING_RATE = 0.1


def config_for(ranks: int, mesh: Any) -> TrainConfig:
    """Llama 3 of two layers whose every dimension the ranks divide."""
    width = max(64, ranks)
    sizes = llama3.Llama3Config(width, n_heads=8, n_kv_heads=8, ffn_dim=2 * width)

    def model() -> nn.Module:
        built = llama3.Llama3(sizes)
        built.init_weights(seed=0)
        return built

    return llama3_training(mesh, "bf16_fp32", model=model)


@dataclass
class Step:
    """A rewritten training step, and what all ranks put into it."""

    ranks: int

    def __post_init__(self) -> None:
        with fake_world(make_spec("fake", size=self.ranks)) as world:
            self.config = config_for(self.ranks, make_mesh(world))
            self.gm = GraphRun(self.config).traced.gm
            graph = RankGraph.of(self.gm, self.config.mesh)
        net = NetModel.of_world(self.ranks, nodes=max(1, self.ranks // 8))
        self.interpreter = Interpreter(graph, net)
        model = new_model(self.config)
        self.shards = [
            PerRank(own.clone() for own in parameter.detach().chunk(self.ranks))
            for parameter in model.parameters()
        ]
        self.buffers = list(model.buffers())

    def inputs(self, step: int) -> list[Any]:
        batches = [self.config.batch(step, rank) for rank in range(self.ranks)]
        return [
            *self.shards,
            *self.buffers,
            *(PerRank(values) for values in zip(*batches, strict=True)),
        ]

    def interpret(self) -> None:
        self.interpreter.run(self.inputs(0))

    def in_local_tensor_mode(self) -> None:
        inputs = self.inputs(0)  # made outside: what is made inside is of all ranks already
        with (
            fake_world(make_spec("fake", size=self.ranks)),
            torch.no_grad(),
            LocalTensorMode(self.ranks),
        ):
            self.gm(
                *(
                    LocalTensor({rank: at(value, rank) for rank in range(self.ranks)})
                    for value in inputs
                )
            )

    def train(self, steps: int) -> None:
        """Plain gradient descent."""
        for step in range(steps):
            _, *gradients = self.interpreter.run(self.inputs(step))
            for shards, gradient in zip(self.shards, gradients, strict=True):
                for shard, own in zip(shards, gradient, strict=True):
                    shard.sub_(own, alpha=LEARNING_RATE)


@dataclass
class RingSum:
    """A reduce-scatter of 256 ranks on 32 nodes, and its yardsticks."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        elements = SUM_MIB * 2**20 // SUM_RANKS // self.dtype.itemsize
        self.net = NetModel.of_world(SUM_RANKS, nodes=SUM_RANKS // 8)
        self.payloads = torch.randn(SUM_RANKS, elements).to(self.dtype)

    def sum(self) -> Tensor:
        return self.net.reduce_scatter(self.payloads, "sum")

    def average(self) -> Tensor:
        return self.net.reduce_scatter(self.payloads, "avg")

    def read(self) -> Tensor:
        return self.payloads.view(torch.int64).sum()

    def read_and_add(self) -> None:
        self.read()
        own, partial = self.payloads[0, : 2**16].clone(), self.payloads[1, : 2**16].clone()
        for _ in range(self.payloads.numel() // own.numel()):
            torch.add(partial, own, out=partial)


def interpreters(ranks: list[int], rounds: int) -> bool:
    steps = {count: Step(count) for count in ranks}
    contestants: dict[str, Any] = {}
    for count, step in steps.items():
        contestants[f"interpreter, {count} ranks"] = step.interpret
        contestants[f"LocalTensorMode, {count} ranks"] = step.in_local_tensor_mode
    goals = [
        Goal(f"interpreter, {count} ranks", f"LocalTensorMode, {count} ranks", 1 / 4)
        for count in ranks
    ]
    times = measure(contestants, rounds)
    for count, step in steps.items():
        for name in (f"interpreter, {count} ranks", f"LocalTensorMode, {count} ranks"):
            print(
                f"{name}: {1e6 * times[name] / len(step.gm.graph.nodes) / count:.1f} us for each node and rank"
            )
    return report(times, None, goals)


def ring_sums(rounds: int) -> bool:
    met = True
    for name, dtype in DTYPES.items():
        sums = RingSum(dtype)
        times = measure(
            {
                f"read {name}": sums.read,
                f"ring sum {name}": sums.sum,
                f"ring average {name}": sums.average,
                f"read and add {name}": sums.read_and_add,
            },
            rounds,
        )
        goal = Goal(f"ring sum {name}", f"read and add {name}", SUM_GOALS[name])
        met &= report(times, dict.fromkeys(times, SUM_MIB / 1024), [goal])
    return met


def training(ranks: int, steps: int) -> None:
    step = Step(ranks)
    start = time.process_time()
    step.train(steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{ranks} ranks, {steps} steps: {time.process_time() - start:.1f} s of CPU, {peak:.2f} GiB at most"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.steps:
        for ranks in (64, 256):
            training(ranks, options.steps)
    met = interpreters(options.ranks, options.rounds)
    met &= ring_sums(options.rounds)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
