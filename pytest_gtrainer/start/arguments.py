"""Describe the arguments of ``plan`` and ``init``. This module imports no torch."""

import argparse
from typing import Any


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of ``python -m pytest_gtrainer``."""
    plan = commands.add_parser(
        "plan",
        help="suggest a bucket plan for a model, and say why",
        description="Suggest a bucket plan for a model: the modules whose parameters travel in one "
        "collective. Exit status: 0, or 2 if there is none.",
    )
    _add_model(plan)
    plan.add_argument(
        "--experts",
        action="store_true",
        help="give routed experts a bucket of their own, as expert parallelism needs it",
    )

    init = commands.add_parser(
        "init",
        help="write a first test, a golden folder and a CI job, after asking",
        description="Write a first test of a model, a golden folder and a CI job into this "
        "folder, after asking. A file that exists is kept. Exit status: 0, 1 if the answer is no, "
        "2 if there is nothing that could be tested.",
    )
    _add_model(init)
    init.add_argument(
        "--inputs",
        metavar="PYTHON",
        help="inputs of the model, as 'torch.randint(0, 100, (2, 16))' (default: guessed)",
    )
    init.add_argument(
        "--parallel",
        metavar="MODULE:FUNCTION",
        help="a function of the mesh that returns the parallel model of a rank: the test compares "
        "it with the model, and there is no golden",
    )
    init.add_argument(
        "--mesh",
        metavar="DP=2,TP=2",
        help="dimensions and sizes of the mesh of --parallel (default: dp=2,tp=2)",
    )
    init.add_argument("--yes", action="store_true", help="write without asking")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="a class or function that returns the model without arguments, or the model itself",
    )
