"""What it costs to capture digests of every operator's output, on top of the step itself.

    python -m benchmarks.operators [--dim 512] [--tokens 512] [--rounds 5]

A step of Llama 3 with its backward, eager and replayed. Hashing a value costs about as much as
reading it, and every call some 20 microseconds of Python; so what is on top is the smaller, the
larger the operators are. CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.paired import measure
from fixtures.models import llama3
from fixtures.models.loss import ce_step
from pytest_gtrainer import capture_operators, trace_step
from pytest_gtrainer.numerics.operators import OperatorCapture

LIMIT = 2.0


def contestants(dim: int, tokens: int) -> dict[str, Callable[[], object]]:
    config = replace(
        llama3.FLAVORS["debug"], dim=dim, ffn_dim=3 * dim, vocab_size=2048, max_seq_len=tokens
    )
    model = llama3.Llama3(config)
    model.init_weights(seed=0)
    ids = torch.arange(2 * tokens).reshape(2, tokens) % config.vocab_size
    traced = trace_step(model, ce_step, (ids, ids))

    def eager() -> None:
        model.zero_grad()
        ce_step(model, ids, ids).backward()

    def captured() -> None:
        with capture_operators(model):
            eager()

    def replayed(gm: Callable[..., object]) -> None:
        model.zero_grad()
        traced.with_graph(gm).replay(model, ids, ids)  # type: ignore[arg-type]

    return {
        "eager": eager,
        "eager, captured": captured,
        "graph": lambda: replayed(traced.gm),
        "graph, captured": lambda: replayed(OperatorCapture().watch(traced.gm)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(contestants(options.dim, options.tokens), options.rounds)
    met = True
    for side in ("eager", "graph"):
        step, on_top = times[side], times[f"{side}, captured"] - times[side]
        met &= on_top <= LIMIT * step
        print(
            f"{side}: {1000 * step:.0f} ms a step, {1000 * on_top:.0f} ms on top of it, {on_top / step:.2f} x, "
            f"at most {LIMIT:g}: {'met' if on_top <= LIMIT * step else 'MISSED'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
