"""What chunking costs beside the traces that it needs, and how it grows with the number of layers.

    python -m benchmarks.chunking [--layers 8 32] [--rounds 3]

DeepSeek-V3's debug size, all layers MoE layers, by batch into two chunks. All sizes take turns in
one process; times are CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from fixtures.models import deepseek_v3
from fixtures.models.loss import ce_step
from pytest_gtrainer import ChunkConfig, TracedStep, chunk_pass, trace_step

GROWTH = 5.0  # from a quarter of the layers to all of them, at most
SHARE = 1 / 3  # of the two traces, at most
CONFIG = ChunkConfig("layers.*.moe", num_chunks=2)
T = TypeVar("T")


def model_of(layers: int) -> torch.nn.Module:
    with torch.device("meta"):
        return deepseek_v3.DeepSeekV3(
            replace(deepseek_v3.FLAVORS["debug"], n_layers=layers, n_dense_layers=0)
        )


def timed(run: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    start = time.process_time()
    return run(), time.process_time() - start


def once(layers: int) -> tuple[float, float, int]:
    """CPU seconds of the two traces and of the rewriting, and the nodes of the graph."""
    model, tokens = model_of(layers), torch.zeros(4, 16, dtype=torch.int64, device="meta")
    traced, tracing = timed(lambda: trace_step(model, ce_step, (tokens, tokens), chunk=CONFIG))
    _, rewriting = timed(lambda: _rewrite(traced))
    return tracing, rewriting, len(traced.gm.graph.nodes)


def _rewrite(traced: TracedStep) -> None:
    chunk_pass(traced.gm, traced.example_inputs, config=CONFIG, twin=traced.twin)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs=2, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[int, list[tuple[float, float, int]]] = {layers: [] for layers in options.layers}
    for _ in range(options.rounds):
        for layers, runs in found.items():
            runs.append(once(layers))
    medians = {
        layers: [statistics.median(column) for column in zip(*runs, strict=True)]
        for layers, runs in found.items()
    }
    for layers, (tracing, rewriting, nodes) in medians.items():
        print(
            f"{layers:3} layers, {nodes:.0f} nodes: two traces {tracing:.2f} s, rewriting {rewriting:.2f} s"
        )
    few, many = (medians[layers] for layers in options.layers)
    growth, share = many[1] / few[1], many[1] / many[0]
    print(
        f"rewriting grows {growth:.2f} times (at most {GROWTH}); {share:.2f} of the traces (at most {SHARE:.2f})"
    )
    return 0 if growth <= GROWTH and share < SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
