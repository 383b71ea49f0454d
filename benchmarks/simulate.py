"""A long simulated training, as multi-node validation runs are read: digests of the weights, step
by step.

    python -m benchmarks.simulate [--ranks 64 128 256] [--steps 25] [--nodes-of 8] [--tp 4]
    python -m benchmarks.simulate --ranks 1024 --replicate 16 --sides graph

The rewritten graph and eager ``fully_shard`` train Llama 3 of two layers, as wide as the ranks
divide, in one process, with sums in the order of the default rings. Every line is one step; the two
digests of all ranks' weights must be equal. Times and peak memory of each side are printed, with
the limits that they should keep on two cores: 1 minute for 64 ranks of 25 steps by graph, 5 minutes
and 2 GB for 256; eagerly twice the time, and 3 GB. Each side runs in a process of its own. Limits
are on CPU time: one thread computes at a time, so that is what a machine with nothing else to do
takes; the time on the clock is told, too. ``--tp 4`` lets four ranks share a model by tensor and
sequence parallelism, inside a node if nodes are of eight, with FSDP across; it has no limits. Of
``--tp 8`` equal digests prove less: with one data rank a node, every channel adds in the same
order. ``--replicate 16`` is hybrid sharding with 16 replicas. The ranks of one replica have to
divide every dimension, so 1,024 ranks can then train a narrow model.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fixtures.models import llama3
from fixtures.training import Parallelism, llama3_training
from pytest_gtrainer import TrainConfig, digest
from pytest_gtrainer.references.simulated import SimulatedGraphRun, simulated_eager
from pytest_gtrainer.worlds.fake import net_of, simulated_world
from pytest_gtrainer.worlds.spec import make_spec

LIMITS = {
    ("graph", 64): (60, 2),
    ("eager", 64): (120, 4),
    ("graph", 256): (300, 2),
    ("eager", 256): (600, 3),
    ("graph", 1024): (300, 4),
}
"""CPU seconds and GB for 25 steps, by side and ranks."""


@dataclass
class Run:
    """One side of one world."""

    digests: dict[int, str]
    cpu_seconds: float
    wall_seconds: float
    gigabytes: float


class WeightDigests:
    """Takes what a ``Record`` takes and keeps of each step and rank a digest of its weights."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, int], str] = {}
        self._tensors: dict[str, Tensor] = {}
        self._place: tuple[int, int] | None = None

    def add(self, step: int, rank: int, phase: str, name: str, tensor: Tensor) -> None:
        """Note a tensor; of weights a digest is made as soon as another step or rank begins."""
        if phase == "weight":
            if self._place != (step, rank):
                self.close()
            self._place = (step, rank)
            self._tensors[name] = tensor.detach().clone()

    def close(self) -> None:
        if self._place is not None:
            self.ranks[self._place] = digest(self._tensors)
        self._place, self._tensors = None, {}


def steps_of(parts: Iterable[WeightDigests]) -> dict[int, str]:
    """One digest for all ranks of every step."""
    steps: dict[int, list[str]] = {}
    for (step, rank), digested in sorted(place for part in parts for place in part.ranks.items()):
        steps.setdefault(step, []).append(f"{rank} {digested}")
    return {
        step: hashlib.sha256("\n".join(lines).encode()).hexdigest() for step, lines in steps.items()
    }


def config_of(mesh: DeviceMesh, steps: int) -> TrainConfig:
    """Llama 3 of two layers whose every dimension the ranks that share a replica divide."""
    sharing = mesh.size() // (
        mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1
    )
    width, vocabulary = max(64, sharing), max(256, sharing)
    sizes = llama3.Llama3Config(
        width, n_heads=8, n_kv_heads=8, ffn_dim=2 * width, vocab_size=vocabulary
    )
    parallel = Parallelism({"sequence": True} if "tp" in (mesh.mesh_dim_names or ()) else None)

    def model() -> nn.Module:
        built = llama3.Llama3(sizes)
        built.init_weights(seed=0)
        parallel.apply(built, mesh)
        return built

    return llama3_training(mesh, "bf16_fp32", parallel=parallel, model=model, steps=steps)


def train(side: str, ranks: int, nodes: int, steps: int, tp: int = 1, replicate: int = 1) -> Run:
    """Train all ranks; memory is the peak of this process."""
    config = functools.partial(config_of, steps=steps)
    wall, cpu = time.perf_counter(), time.process_time()
    extents = {"replicate": replicate, "dp": ranks // tp // replicate, "tp": tp}
    mesh = {name: extent for name, extent in extents.items() if extent > 1 or name == "dp"}
    with simulated_world(make_spec("simulated", size=ranks, nodes=nodes, mesh=mesh)) as world:
        if side == "graph":
            parts = [WeightDigests()]
            SimulatedGraphRun(config, world).run(parts[0])
        else:
            parts = [WeightDigests() for _ in range(ranks)]
            simulated_eager(config, net_of(world), mesh=world.mesh, recorders=parts)
    for part in parts:
        part.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # it counts KiB
    return Run(steps_of(parts), time.process_time() - cpu, time.perf_counter() - wall, peak)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256])
    options.add_argument("--steps", type=int, default=25)
    options.add_argument("--nodes-of", type=int, default=8, help="ranks a node")
    options.add_argument("--tp", type=int, default=1, help="ranks that share a model")
    options.add_argument(
        "--replicate", type=int, default=1, help="replicas, each sharded over the other ranks"
    )
    options.add_argument(
        "--sides", nargs="+", choices=["graph", "eager"], default=["graph", "eager"]
    )
    chosen = options.parse_args()
    good = True
    for ranks in chosen.ranks:
        sizes = (ranks, ranks // chosen.nodes_of, chosen.steps, chosen.tp, chosen.replicate)
        good &= compare_sides(chosen.sides, *sizes)
    return 0 if good else 1


def compare_sides(
    sides: Sequence[str], ranks: int, nodes: int, steps: int, tp: int, replicate: int
) -> bool:
    """Train the sides, print their table; whether all digests are equal and the limits kept."""
    runs = {}
    for side in sides:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            runs[side] = pool.apply(train, (side, ranks, nodes, steps, tp, replicate))
    kinds = f"{f', {tp} of them a model' if tp > 1 else ''}{f', {replicate} replicas' if replicate > 1 else ''}"
    print(f"{ranks} ranks on {nodes} nodes{kinds}, digests of all ranks' weights")
    same = True
    for step in range(steps):
        digests = {side: run.digests[step] for side, run in runs.items()}
        same &= len(set(digests.values())) == 1
        told = "" if len(digests) == 1 else "equal" if same else "DIFFERENT"
        print(
            f"  step {step:>2}  {'  '.join(f'{side} {digest}' for side, digest in digests.items())}  {told}".rstrip()
        )
    kept = [_within(side, ranks, run, steps if tp == 1 else 0) for side, run in runs.items()]
    return same and all(kept)


def _within(side: str, ranks: int, run: Run, steps: int) -> bool:
    limit = LIMITS.get((side, ranks)) if steps == 25 else None
    said = f"  {side}: {run.cpu_seconds:.0f} s of CPU, {run.wall_seconds:.0f} s on the clock, {run.gigabytes:.1f} GB"
    if limit is None:
        print(said)
        return True
    kept = run.cpu_seconds <= limit[0] and run.gigabytes <= limit[1]
    print(f"{said}; limit {limit[0]} s of CPU, {limit[1]} GB: {'kept' if kept else 'MISSED'}")
    return kept


if __name__ == "__main__":
    sys.exit(main())
