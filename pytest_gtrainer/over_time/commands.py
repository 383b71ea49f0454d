"""The commands ``record`` and ``compare`` of ``python -m pytest_gtrainer``."""

import argparse
import os
import runpy
import sys
import warnings
from pathlib import Path

from pytest_gtrainer.over_time.comparing import compare_runs
from pytest_gtrainer.over_time.files import RecordError, read_run
from pytest_gtrainer.over_time.page import write_page
from pytest_gtrainer.over_time.recorder import Recorder


def run(options: argparse.Namespace) -> int:
    """Run the command that the options name, and return the exit status."""
    if options.command == "compare":
        return compare(options)
    return record(options)


def record(options: argparse.Namespace) -> int:
    """Run a script with a recorder around it, as ``python`` would run it."""
    is_file = os.path.isfile(options.script)
    if not options.module and not is_file:
        return _complain(f"there is no script {options.script}")
    try:
        recorder = Recorder(
            options.to,
            every=options.every,
            activations=options.activations,
            values=options.values,
        )
    except ValueError as error:
        return _complain(str(error))

    # The script finds what it would find without a recorder: its arguments, its folder first.
    sys.argv = [options.script, *options.arguments]
    recorder.start()
    # torch.compile warns of hooks on all modules, which only look for the model.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are")
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as error:
        # exit() and exit(0) are an end in order.
        ended_by = None
        if error.code:
            ended_by = error
        recorder.stop(ended_by)
        if error.code:
            raise
    except BaseException as error:
        recorder.stop(error)
        raise
    recorder.stop()
    if recorder.has_failed:
        # It has said why, and the script has ended in order.
        return 2 * (not recorder.recorded)
    if not recorder.recorded:
        return _complain(
            f"nothing of {options.script} was recorded: in this process no optimiser of torch has "
            "stepped after a backward, or with new gradients that are not 0"
        )
    return 0


def compare(options: argparse.Namespace) -> int:
    """Compare two records and print the first difference."""
    try:
        result = compare_runs(read_run(options.a), read_run(options.b), at=options.at)
    except RecordError as error:
        return _complain(str(error))
    if options.page:
        try:
            write_page(result, Path(options.page))
        except OSError as error:
            return _complain(f"{options.page} cannot be written: {error.strerror}")
    lines = result.lines(markdown=options.markdown, has_all=options.all, option="--all")
    print("\n".join(lines))
    has_values = any(any(Path(folder).glob("*.values")) for folder in (options.a, options.b))
    if result.differences and not has_values and not options.markdown:
        print("next: record both with --values, and compare names elements and common factors")
    return int(bool(result.status or result.shorter))


def _complain(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2
