"""Every pass at several depths, and joint bucketing against torch's ``manual_overlap_bucketing``.

    python -m benchmarks.passes [--layers 8 32 64 126] [--rounds 3]

Llama 3 (debug) with sharded parameters, traced under a fake world of 8. Everyone works on a copy of
the same canonicalised graph, in turns, with garbage collection off; times are CPU seconds, medians.
Torch's does the forward half only; the estimate of a GPU's speed that it asks for, and throws away,
is stubbed, since there may be no GPU. The exponent is of a power of the number of nodes.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from benchmarks.paired import Goal
from fixtures.models import llama3
from fixtures.models.loss import ce_step
from fixtures.training import token_batches
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    canonicalize_graph_pass,
    construct_default_graph_passes,
    data_parallel,
    get_default_transformer_block_buckets,
    tag_with_memory_policy_pass,
    trace_step,
)
from pytest_gtrainer._torch.graph_modules import copied_lazily
from pytest_gtrainer.graph.nodes import BACKWARD, direction, node_fqn
from pytest_gtrainer.passes.graph_pass import REWRITE
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import World, make_spec

OURS, THEIRS, RECOMPILE = (
    "joint bucketing, recompiled",
    "torch, forward only, recompiled",
    "recompile",
)
GOALS = [Goal(OURS, THEIRS, 1 / 5), Goal(OURS, RECOMPILE, 1.5)]
MAX_EXPONENT = 1.1

Contestant = Callable[[fx.GraphModule], object]


def traced(n_layers: int, world: World) -> fx.GraphModule:
    """The joint graph of a debug model with so many layers."""
    config = replace(llama3.FLAVORS["debug"], n_layers=n_layers)
    with torch.device("meta"):
        model = llama3.Llama3(config)
    mesh = make_mesh(world)
    data_parallel(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return trace_step(model, ce_step, token_batches(config.vocab_size, "cpu")(0, 0)).gm


def rewrites(n_layers: int) -> dict[str, Contestant]:
    """Our passes without lint and recompile, by name, each with its default options."""
    found: dict[str, Contestant] = {}
    for step in construct_default_graph_passes(n_layers=n_layers, reshard_after_forward=True):
        rewrite = getattr(step.function, REWRITE, None)
        assert rewrite is not None
        found[step.name] = lambda gm, rewrite=rewrite, step=step: rewrite(gm, None, **step.options)
    return found


def joint_and_recompile(n_layers: int) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """Joint bucketing and reordering as a user calls it: lint and recompile included."""
    *_, bucketing = construct_default_graph_passes(n_layers=n_layers)
    return lambda gm: bucketing.function(_compiled(gm), None, **bucketing.options)


def torchs(n_layers: int) -> Contestant:
    """Torch's manual bucketing of the forward's all-gathers: nodes of the backward belong to no
    module.
    """
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    def stack(node: fx.Node) -> list[tuple[str, type[Any]]]:
        fqn = node_fqn(node)
        return [] if not fqn or direction(node) == BACKWARD else [(fqn, torch.nn.Module)]

    plan = get_default_transformer_block_buckets(n_layers)
    return lambda gm: manual_overlap_bucketing(_compiled(gm), plan, module_stack_fn=stack)


def _compiled(gm: fx.GraphModule) -> fx.GraphModule:
    """An eager GraphModule whose own first compilation is not counted: it is replaced by what the
    pass does.
    """
    with mock.patch.object(fx.GraphModule, "recompile"):
        return fx.GraphModule(gm, gm.graph)


def measure(
    contestants: Mapping[str, Contestant], gm: fx.GraphModule, rounds: int
) -> dict[str, float]:
    """Median CPU seconds on a fresh copy each; everyone runs once a round, and a first round is not
    counted.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, run in contestants.items():
            copy = copied_lazily(gm)
            with collection_frozen():
                start = time.process_time()
                run(copy)
                times[name].append(time.process_time() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


@contextmanager
def collection_frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log time over log nodes, fitted over all depths."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(second, 1e-9)) for second in seconds]
    middle_x, middle_y = statistics.mean(xs), statistics.mean(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread


def report(sizes: list[int], times: list[dict[str, float]]) -> bool:
    """Print times, exponents and goals; whether every goal is met."""
    ours = set(rewrites(1))
    met = True
    for name in times[0]:
        seconds = [found[name] for found in times]
        row = " ".join(f"{second:9.4f}" for second in seconds)
        slope = exponent(sizes, seconds) if len(sizes) > 1 else float("nan")
        judged = name in ours
        met &= not judged or not slope > MAX_EXPONENT
        word = (
            ""
            if not judged
            else f"at most {MAX_EXPONENT}: {'MISSED' if slope > MAX_EXPONENT else 'met'}"
        )
        print(f"{name:<52} {row}   exponent {slope:5.2f} {word}")
    for goal in GOALS:
        ratio = times[-1][goal.ours] / times[-1][goal.yardstick]
        met &= ratio <= goal.limit
        word = "met" if ratio <= goal.limit else "MISSED"
        print(f"{goal.ours} / {goal.yardstick} = {ratio:.3f}, at most {goal.limit:.3g}: {word}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 64, 126])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes, times = [], []
    for n_layers in options.layers:
        with fake_world(make_spec("fake", size=8)) as world, _no_gpu():
            gm = tag_with_memory_policy_pass(canonicalize_graph_pass(traced(n_layers, world)))
            joint = joint_and_recompile(n_layers)
            result = joint(copied_lazily(gm))
            contestants = {
                **rewrites(n_layers),
                OURS: joint,
                THEIRS: torchs(n_layers),
                RECOMPILE: lambda gm, result=result: result.recompile(),
            }
            sizes.append(len(gm.graph.nodes))
            times.append(measure(contestants, gm, options.rounds))
            print(f"{n_layers} layers, {sizes[-1]} nodes: measured", file=sys.stderr)
    print(f"{'nodes':<52} " + " ".join(f"{size:9d}" for size in sizes))
    return 0 if report(sizes, times) else 1


@contextmanager
def _no_gpu() -> Iterator[None]:
    """Torch's scheduler asks triton for the GPU and dies without one."""
    utils = "torch._inductor.utils"
    bandwidth = mock.patch(f"{utils}.get_gpu_dram_gbps", return_value=1000)
    speed = mock.patch(f"{utils}.get_device_tflops", return_value=100)
    with bandwidth, speed:
        yield


if __name__ == "__main__":
    sys.exit(main())
