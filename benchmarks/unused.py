"""What the plugin costs a project that does not use it.

    python -m benchmarks.unused [--rounds 9]

CPU seconds of whole processes, with the plugin and without it (``-p no:gtrainer``): ``pytest --co``
on a project of 1,000 tests in 20 files, and ``-n 4`` on one of these files, which starts five
processes. ``import pytest_gtrainer`` is compared with an interpreter that imports nothing, and has
a limit of 30 ms.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.paired import Goal, measure, report

GOALS = [
    Goal("collect", "collect, without", 1.03),
    Goal("start -n 4", "start -n 4, without", 1.05),
]
IMPORT_SECONDS = 0.030
_FILES, _TESTS = 20, 50


def make_project(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for file in range(_FILES):
        lines = [f"def test_{test}():\n    pass\n" for test in range(_TESTS)]
        (folder / f"test_{file}.py").write_text("\n".join(lines))


def process(*arguments: str, folder: Path) -> Callable[[], None]:
    """Return a function that runs Python and waits for it."""
    # Bytecode is kept, as it is for a user; else each start would compile the package anew.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def run() -> None:
        command = [sys.executable, *arguments]
        subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)

    return run


def seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_project(folder)
        collect, without = ("-m", "pytest", "--co", "-q"), ("-p", "no:gtrainer")
        workers = ("-m", "pytest", "-q", "-n", "4", "test_0.py")
        contestants = {
            "collect": process(*collect, folder=folder),
            "collect, without": process(*collect, *without, folder=folder),
            "start -n 4": process(*workers, folder=folder),
            "start -n 4, without": process(*workers, *without, folder=folder),
            "import": process("-c", "import pytest_gtrainer", folder=folder),
            "import nothing": process("-c", "pass", folder=folder),
        }
        times = measure(contestants, options.rounds, clock=seconds_of_children)
    met = report(times, None, GOALS)
    imports = times["import"] - times["import nothing"]
    word = "met" if imports <= IMPORT_SECONDS else "MISSED"
    print(f"import pytest_gtrainer: {imports:.4f} s, at most {IMPORT_SECONDS:.3f} s: {word}")
    return 0 if met and imports <= IMPORT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
