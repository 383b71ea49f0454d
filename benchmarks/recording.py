"""Training with a record of every tenth step against training without one.

    python -m benchmarks.recording [--rounds 7]

CPU seconds on one thread, of ten steps each, of which the first is recorded: ``small`` is a model
whose steps are as short as those of a debug model, ``wide`` one with more parameters than its batch
gives work to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from benchmarks.paired import Goal, measure, report
from pytest_gtrainer import record_training

GOALS = [Goal(f"{name}, recorded", name, 1.05) for name in ("small", "wide")]
_EVERY = 10


def trainer(
    width: int, layers: int, tokens: int, folder: Path | None, stack: ExitStack
) -> Callable[[], None]:
    """A function that trains for ten steps, recorded until the stack ends if there is a folder."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(tokens // 128, 128, width)
    if folder is not None:
        stack.enter_context(record_training(model, optimizer, folder, every=_EVERY))

    def train() -> None:
        for _ in range(_EVERY):
            model(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return train


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contestants = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name, sizes in {"small": (64, 6, 1024), "wide": (256, 4, 1024)}.items():
            contestants[name] = trainer(*sizes, None, stack)
            contestants[f"{name}, recorded"] = trainer(*sizes, Path(folder) / name, stack)
        times = measure(contestants, options.rounds)
    return 0 if report(times, None, GOALS) else 1


if __name__ == "__main__":
    sys.exit(main())
