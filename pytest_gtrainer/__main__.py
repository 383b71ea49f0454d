"""``python -m pytest_gtrainer``: commands besides the tests."""

import argparse
import sys
from collections.abc import Sequence

import pytest_gtrainer
from pytest_gtrainer.attack import arguments as attack
from pytest_gtrainer.over_time import arguments as over_time
from pytest_gtrainer.start import arguments as start


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
    attack.add_commands(commands)
    over_time.add_commands(commands)
    start.add_commands(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    if given.command in ("reduce", "fuzz"):
        from pytest_gtrainer.attack import command

        return command.run(given)
    if given.command in ("record", "compare"):
        from pytest_gtrainer.over_time import commands as recording

        return recording.run(given)
    if given.command == "plan":
        from pytest_gtrainer.start import plan

        return plan.run(given)
    if given.command == "init":
        from pytest_gtrainer.start import init

        return init.run(given)
    from pytest_gtrainer.doctor import report

    text, in_order = report(verbose=given.verbose)
    print(text)
    return 0 if in_order else 1


if __name__ == "__main__":
    sys.exit(main())
