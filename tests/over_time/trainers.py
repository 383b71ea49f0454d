"""Run ``examples/trainer`` in this process, copied, with a mistake planted, under the commands."""

import sys
from pathlib import Path

import pytest

from pytest_gtrainer.__main__ import main

SCRIPT = Path(__file__).parents[2] / "examples" / "trainer" / "train.py"


def planted(folder, *changes):
    """Return a copy of the trainer in which each ``(old, new)`` of its text is changed."""
    text = SCRIPT.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / "train.py"
    copy.write_text(text)
    return copy


def record(to, script, *arguments, options=()):
    """Record a run of a script in this process, and return the exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", sys.path[:])
        return main(["record", f"--to={to}", *options, str(script), *map(str, arguments)])


def compare(capsys, a, b, *options):
    """Compare two records, and return the exit status and what is printed."""
    capsys.readouterr()
    status = main(["compare", str(a), str(b), *options])
    printed = capsys.readouterr()
    return status, printed.out + printed.err
