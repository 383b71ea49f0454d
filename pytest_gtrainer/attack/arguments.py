"""Describe the arguments of ``python -m pytest_gtrainer reduce`` and ``fuzz``, without torch."""

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add ``reduce`` and ``fuzz`` to the parsers of subcommands."""
    reduce = commands.add_parser(
        "reduce",
        help="make a graph on which a pass or a test fails as small as it can be",
        description="Make a graph on which a pass or a test fails as small as it can be. Exit "
        "status: 0 if it was reduced, 1 if it does not fail, 2 for arguments that cannot be used.",
    )
    _add_reduce_arguments(reduce)
    fuzz = commands.add_parser(
        "fuzz",
        help="prove a pass on generated graphs, and reduce those on which it fails",
        description="Prove a pass on generated graphs, and reduce those on which it fails. Exit "
        "status: 0 if it fails on none, 1 if it fails or nothing is proven, 2 for arguments that "
        "cannot be used.",
    )
    _add_fuzz_arguments(fuzz)


def _add_reduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of ``reduce``."""
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
        "--claims",
        metavar="WORDS",
        help="with --proof, what the pass keeps besides values, split by commas: memory, cost, "
        "order, idempotence (default: none)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="limit of one run of the pass, or of the command (default: 60)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="default: FILE.reduced.fxgraph"
    )


def _add_fuzz_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of ``fuzz``."""
    parser.add_argument(
        "--gt-pass", metavar="MODULE:PASS", required=True, help="the pass, (gm, inputs) -> gm"
    )
    parser.add_argument(
        "--gt-model",
        metavar="MODULE:FUNCTION",
        help="graphs are cut from this model of yours and grow from there; it returns (model, "
        "inputs), a TrainConfig, a graph, ...",
    )
    parser.add_argument(
        "--models",
        action="store_true",
        help="graphs are cut from models that are made of what training code combines: norms, "
        "gates, experts, ties, dropout; with --ranks also FSDP, replicas, tensor, sequence and "
        "expert parallelism",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1.0,
        help="how long graphs are tried and failures reduced (default: 1); a failure that is found "
        "is reduced to its end",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first graph (default: 0)")
    parser.add_argument(
        "--nodes", type=int, default=60, help="of a graph, about as many (default: 60)"
    )
    parser.add_argument(
        "--functional",
        action="store_true",
        help="graphs in which nothing is written to, as AOTAutograd leaves them to Inductor",
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="2 or more: graphs with collectives of so many ranks"
    )
    parser.add_argument(
        "--at-least",
        metavar="KIND",
        default="reordered",
        help="the weakest kind of equal that is right (default: reordered)",
    )
    parser.add_argument(
        "--claims",
        metavar="WORDS",
        help="what the pass keeps besides values, split by commas: memory, cost, order, "
        "idempotence (default: none)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="limit of one run of the pass (default: 60)",
    )
    parser.add_argument(
        "--failures", metavar="N", type=int, default=3, help="end after N failures (default: 3)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("fuzz"),
        help="for a pass file of each failure (default: fuzz)",
    )
