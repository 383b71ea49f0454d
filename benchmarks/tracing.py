"""Tracing a training step, against plain ``make_fx`` of the same step.

    python -m benchmarks.tracing [--layers 8 32 64 126] [--rounds 3]
    python -m benchmarks.tracing --wide
    python -m benchmarks.tracing --once [--rounds 3]

Llama 3 (debug) with sharded parameters under a fake world of 8. Both sides trace the same forward,
loss and backward on the same fake tensors, in turns, with garbage collection off; times are CPU
seconds, medians. The plain side gets neither module names nor the backward's marks. The exponent is
of a power of the number of nodes; where it is missed, a profile shows which calls take the time at
the largest depth.

``--wide`` traces, buckets and writes Llama 3 of 126 layers as rank 0 of 4,096, which do not divide
its sizes: 4 GB at most, and the CPU seconds are printed. ``--once`` traces on 8 gloo ranks, on all
of them and by ``trace_once`` in turns: CPU seconds of the 8 processes together, a third at most.
Two of eight traces are a quarter.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.passes import collection_frozen, exponent
from fixtures.models import llama3
from fixtures.models.loss import ce_step
from fixtures.training import llama3_training, token_batches
from pytest_gtrainer import (
    MixedPrecisionPolicy,
    apply_graph_passes,
    construct_default_graph_passes,
    data_parallel,
    graphtext,
    trace_once,
    trace_step,
)
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import shard_traceably
from pytest_gtrainer.tracing.model import ModelState, local, rewrap
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import World, make_spec

MAX_RATIO, MAX_EXPONENT = 1.1, 1.2
OURS, PLAIN = "trace_step", "plain make_fx"
Inputs = tuple[torch.Tensor, ...]
Tracer = Callable[[nn.Module, Inputs], fx.GraphModule]


def sharded(n_layers: int, world: World) -> tuple[nn.Module, Inputs]:
    """A debug model with so many layers, on the meta device, and a batch."""
    config = replace(llama3.FLAVORS["debug"], n_layers=n_layers)
    with torch.device("meta"):
        model = llama3.Llama3(config)
    data_parallel(
        model, make_mesh(world), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    return model, token_batches(config.vocab_size, "cpu")(0, 0)


def ours(model: nn.Module, inputs: Inputs) -> fx.GraphModule:
    return trace_step(model, ce_step, inputs).gm


def plain(model: nn.Module, inputs: Inputs) -> fx.GraphModule:
    """What one would write without us: parameters in, loss and gradients out."""
    state, mode = ModelState.of(model), new_fake_mode()

    def joint(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(state.fqns)
        tensors = [rewrap(t, own) for t, own in zip(flat[:count], state.tensors, strict=True)]
        wanted = [
            t.requires_grad_()
            for t, own in zip(tensors, state.tensors, strict=True)
            if own.requires_grad
        ]
        with state.exchanged(tensors):
            loss = ce_step(model, *flat[count:])
            gradients = torch.autograd.grad(loss, wanted)
        return (loss.detach(), *(local(gradient) for gradient in gradients))

    plain_tensors = [local(tensor) for tensor in [*state.tensors, *inputs]]
    with mode:
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in plain_tensors]
        return make_fx(joint)(*fakes)


TRACERS: dict[str, Tracer] = {OURS: ours, PLAIN: plain}


def measure(n_layers: int, rounds: int) -> tuple[int, dict[str, float]]:
    """Nodes of our graph, and the median CPU seconds of each; a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in TRACERS}
    nodes = 0
    with fake_world(make_spec("fake", size=8)) as world:
        model, inputs = sharded(n_layers, world)
        for _ in range(rounds + 1):
            for name, trace in TRACERS.items():
                with collection_frozen():
                    start = time.process_time()
                    gm = trace(model, inputs)
                    times[name].append(time.process_time() - start)
                nodes = len(gm.graph.nodes) if name == OURS else nodes
    return nodes, {name: statistics.median(taken[1:]) for name, taken in times.items()}


def print_profile(n_layers: int) -> None:
    with (
        fake_world(make_spec("fake", size=8)) as world,
        collection_frozen(),
        cProfile.Profile() as profile,
    ):
        ours(*sharded(n_layers, world))
    pstats.Stats(profile).sort_stats("tottime").print_stats(12)


def report(sizes: list[int], times: list[dict[str, float]]) -> tuple[bool, bool]:
    """Print times, ratios and exponents; whether the ratio and the exponent are as they should be."""
    print(f"{'nodes':<16} " + " ".join(f"{size:9d}" for size in sizes))
    slopes = {}
    for name in TRACERS:
        seconds = [found[name] for found in times]
        slopes[name] = exponent(sizes, seconds) if len(sizes) > 1 else float("nan")
        print(
            f"{name:<16} "
            + " ".join(f"{second:9.3f}" for second in seconds)
            + f"   exponent {slopes[name]:.2f}"
        )
    ratios = [found[OURS] / found[PLAIN] for found in times]
    fast, straight = statistics.median(ratios) <= MAX_RATIO, not slopes[OURS] > MAX_EXPONENT
    shown = " ".join(f"{ratio:9.3f}" for ratio in ratios)
    print(f"{'ratio':<16} {shown}   median at most {MAX_RATIO}: {'met' if fast else 'MISSED'}")
    print(
        f"exponent of {OURS} {slopes[OURS]:.2f}, at most {MAX_EXPONENT}: {'met' if straight else 'MISSED'}"
    )
    return fast, straight


def report_wide(layers: int = 126, ranks: int = 4096) -> bool:
    """One run, from the model to the text, in a process that has imported all; each layer has to be
    a bucket.
    """
    config = replace(llama3.FLAVORS["debug"], n_layers=layers)
    with fake_world(make_spec("fake", size=ranks)) as world:
        start = time.process_time()
        with torch.device("meta"):
            model = llama3.Llama3(config)
        data_parallel(
            model, make_mesh(world), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        )
        traced = trace_step(model, ce_step, token_batches(config.vocab_size, "cpu")(0, 0))
        passes = construct_default_graph_passes(n_layers=layers)
        rewritten = apply_graph_passes(traced.gm, traced.example_inputs, passes)
        text = graphtext.render(rewritten)
        seconds = time.process_time() - start
    buckets = (
        len({str(node.meta.get("fsdp_bucket")) for node in rewritten.graph.nodes}) // 2
    )  # in both directions
    assert buckets > layers, buckets
    assert text
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    met = gigabytes <= 4
    print(
        f"{layers} layers on {ranks} ranks, {len(traced.gm.graph.nodes)} nodes, {buckets} buckets:",
        end=" ",
    )
    print(f"{seconds:.1f} CPU s, {gigabytes:.2f} GB; at most 4 GB: {'met' if met else 'MISSED'}")
    return met


def trace_in_turns(rank: int, size: int, store: str, rounds: int, seconds: Any) -> None:
    """One of ``size`` ranks: CPU seconds of a trace on every rank, and by ``trace_once``, after one
    to warm up.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    config = llama3_training(mesh, "bf16_fp32")
    model, inputs = shard_traceably(new_model(config), config), config.inputs(0)
    trace = partial(trace_step, model, config.step, inputs)
    for turn in range(rounds + 1):
        for place, tracer in enumerate((trace, partial(trace_once, trace, model, inputs, mesh))):
            dist.barrier()
            start = time.process_time()
            tracer()
            seconds[(2 * turn + place) * size + rank] = time.process_time() - start
    dist.destroy_process_group()


def report_once(rounds: int, size: int = 8) -> bool:
    seconds = torch.zeros(2 * (rounds + 1) * size).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, str(Path(folder) / "store"), rounds, seconds)
        torch.multiprocessing.spawn(trace_in_turns, arguments, nprocs=size)
    everywhere, once = seconds.view(rounds + 1, 2, size)[1:].sum(2).median(0).values.tolist()
    met = once / everywhere <= 1 / 3
    print(
        f"8 ranks trace Llama 3: {everywhere:.2f} CPU s on all, {once:.2f} by trace_once:", end=" "
    )
    print(f"{once / everywhere:.2f}, at most 0.33: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 64, 126])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wide", action="store_true", help="126 layers on 4,096 ranks")
    parser.add_argument("--once", action="store_true", help="8 ranks, each or two of them tracing")
    options = parser.parse_args()
    if options.once:
        return 0 if report_once(options.rounds) else 1
    if options.wide:
        return 0 if report_wide() else 1
    sizes, times = [], []
    for n_layers in options.layers:
        nodes, found = measure(n_layers, options.rounds)
        sizes.append(nodes)
        times.append(found)
        print(f"{n_layers} layers, {nodes} nodes: measured", file=sys.stderr)
    fast, straight = report(sizes, times)
    if not straight:
        print_profile(options.layers[-1])
    return 0 if fast and straight else 1


if __name__ == "__main__":
    sys.exit(main())
