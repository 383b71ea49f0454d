"""Describe the arguments of ``record`` and ``compare``. This module imports no torch."""

import argparse
from typing import Any


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of ``python -m pytest_gtrainer``."""
    record = commands.add_parser(
        "record",
        help="run a training script and record its steps, without an edit of it",
        description="Run a training script and record its steps. Under torchrun: torchrun ... -m "
        "pytest_gtrainer record train.py. Exit status: that of the script, 2 if no step was "
        "recorded.",
    )
    record.add_argument(
        "--to", default="record", metavar="FOLDER", help="where the record goes (default: record)"
    )
    record.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="record the first step, and multiples of N",
    )
    record.add_argument(
        "--activations",
        action="append",
        default=[],
        metavar="PATTERN",
        help="also record what modules return whose names match, as 'layers.*'",
    )
    record.add_argument(
        "--values", action="store_true", help="also keep all bytes, so that elements are named"
    )
    record.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    record.add_argument("script", help="the training script, or with -m a module")
    record.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")

    compare = commands.add_parser(
        "compare",
        help="name the first step, phase, tensor and ranks in which two records differ",
        description="Compare two records. Exit status: 0 if they are equal, 1 if they differ or "
        "one was cut or ends before the other, 2 if they cannot be compared.",
    )
    compare.add_argument("a", metavar="A", help="folder of a record")
    compare.add_argument("b", metavar="B", help="folder of the other one")
    compare.add_argument(
        "--at", type=int, metavar="STEP", help="the step of A that the first step of B is"
    )
    compare.add_argument(
        "--all", action="store_true", help="list all differences of the phase, not only eight"
    )
    compare.add_argument("--page", metavar="FILE", help="also write an HTML page")
    compare.add_argument("--markdown", action="store_true", help="write Markdown")
