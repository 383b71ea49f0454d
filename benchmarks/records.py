"""Comparison of two equal records on disk against reading both.

    python -m benchmarks.records [--gib 1] [--rounds 5] [--folder DIR]

Both records lie in files that were just written, so in the page cache if it is large enough; every
round maps them anew. The yardstick maps them, too, and adds up their bytes as int64. CPU seconds on
one thread, and the most memory that is not of files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.paired import Goal, measure, report
from pytest_gtrainer import Record, compare

GOALS = [Goal("compare", "read both", 2)]
_LAYERS = 32


def write(path: Path, gib: float, spool: Path) -> None:
    """A record of weights and optimiser state of 32 layers, bf16 and fp32."""
    record = Record(spool=spool)
    for layer in range(_LAYERS):
        elements = int(gib * 2**30 / _LAYERS / 6)
        # Without the highest bit of the exponent all patterns are finite numbers, as weights are.
        values = torch.arange(elements, dtype=torch.int32) & 0xBFFF
        record.add(
            0, 0, "weight", f"layers.{layer}.weight", values.to(torch.int16).view(torch.bfloat16)
        )
        record.add(0, 0, "optimizer", f"layers.{layer}.weight.exp_avg", values.view(torch.float32))
    record.save(path)


def read(*paths: Path) -> int:
    return sum(
        int(_words(tensor).sum()) for path in paths for _, tensor in Record.load(path).items()
    )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    row = tensor.view(-1).view(torch.uint8)
    return row[: row.numel() // 8 * 8].view(torch.int64)


def compared(*paths: Path) -> None:
    verdict = compare(*map(Record.load, paths))
    assert verdict.outcome == "equal", verdict


def _private_mebibytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) // 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of each record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the files are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = [Path(folder) / name for name in ("actual", "expected")]
        for path in paths:
            write(path, options.gib, Path(folder))
        before = _private_mebibytes()
        times = measure(
            {"read both": lambda: read(*paths), "compare": lambda: compared(*paths)}, options.rounds
        )
        print(f"memory that is not of files: {before} MiB before, {_private_mebibytes()} MiB after")
    return 0 if report(times, dict.fromkeys(times, 2 * options.gib), GOALS) else 1


if __name__ == "__main__":
    sys.exit(main())
