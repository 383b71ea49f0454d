"""Describe the arguments of ``python -m pytest_gtrainer reduce``. This module imports no torch."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("file", type=Path, help="a graph: .fxgraph, or a dump of tlparse")
    oracle = parser.add_mutually_exclusive_group(required=True)
    oracle.add_argument(
        "--proof",
        metavar="MODULE:PASS",
        help="the graph fails if this pass changes its function, or raises",
    )
    oracle.add_argument(
        "--test",
        metavar="COMMAND",
        help="the graph fails if this command does; {} stands for the file",
    )
    parser.add_argument(
        "--at-least",
        metavar="KIND",
        default="reordered",
        help="with --proof, the weakest kind of equal that is right (default: reordered)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="limit of one run of --test (default: 60)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: FILE.reduced.fxgraph"
    )
