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


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="a class or function that returns the model without arguments, or the model itself",
    )
