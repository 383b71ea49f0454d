"""``python -m pytest_gtrainer``: commands besides the tests."""

import argparse
import sys
from collections.abc import Sequence

import pytest_gtrainer
from pytest_gtrainer.attack.arguments import add_arguments as add_reduce_arguments
from pytest_gtrainer.over_time.arguments import add_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 if all is in order, 1 if not, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_gtrainer", description="pytest-gtrainer beside the tests."
    )
    parser.add_argument(
        "--version", action="version", version=f"pytest-gtrainer {pytest_gtrainer.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="what this installation can do: torch, pytest, devices, and every private name that "
        "we rely on",
        description="What this installation can do. "
        "Exit status: 0 if everything is in order, 1 if not.",
    )
    doctor.add_argument(
        "-v", "--verbose", action="store_true", help="list every name and every part"
    )
    reduce = commands.add_parser(
        "reduce",
        help="make a graph on which a pass or a test fails as small as it can be",
        description="Make a graph on which a pass or a test fails as small as it can be. Exit "
        "status: 0 if it was reduced, 1 if it does not fail, 2 for arguments that cannot be used.",
    )
    add_reduce_arguments(reduce)
    add_commands(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    if given.command == "reduce":
        from pytest_gtrainer.attack.command import run

        return run(given)
    if given.command in ("record", "compare"):
        from pytest_gtrainer.over_time import commands as over_time

        return over_time.run(given)
    from pytest_gtrainer.doctor import report

    text, in_order = report(verbose=given.verbose)
    print(text)
    return 0 if in_order else 1


if __name__ == "__main__":
    sys.exit(main())
