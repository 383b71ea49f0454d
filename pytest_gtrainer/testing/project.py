"""Running a project under pytest, in a process of its own, and reading what its tests told.

    run = run_project(tmp_path, files={"test_it.py": TEXT})
    assert run["test_bits"].verdicts == ("graph against eager: equal",)

What a test tells stands in the JUnit file that pytest writes. No torch here.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_JUNIT = "gtrainer-project.xml"


@dataclass(frozen=True, slots=True)
class ToldByTest:
    """What one test of a project came to.

    Attributes:
        outcome: "passed", "failed" (in its call), "error" (in set-up or tear-down) or "skipped".
        message: of the failure or skip, as pytest shows it; "" if it passed.
        world: as "ranks(2, gloo on cpu)"; "" without one.
        verdicts: "what was compared: outcome", one for each comparison.
        goldens: "name: outcome", one for each check.
        digests: a line for each step of each comparison of records.
    """

    outcome: str
    message: str = ""
    world: str = ""
    verdicts: tuple[str, ...] = ()
    goldens: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProjectRun:
    """A run: pytest's exit status, what it printed, and its tests by name, ``module::test[parameter]``."""

    status: int
    output: str
    tests: Mapping[str, ToldByTest]

    def __getitem__(self, name: str) -> ToldByTest:
        """The test of a name, with or without its module.

        Raises:
            KeyError: no test has that name, or several have; names those that there are, or what pytest printed.
        """
        found = [
            told for known, told in self.tests.items() if name in (known, known.rpartition("::")[2])
        ]
        if len(found) != 1:
            there = (
                f"the run has {', '.join(self.tests)}"
                if self.tests
                else f"the run has none:\n{self.output}"
            )
            raise KeyError(f"{len(found)} tests are called {name!r}; {there}")
        return found[0]


def run_project(
    folder: Path, *options: str, files: Mapping[str, str] | None = None, timeout: float = 300
) -> ProjectRun:
    """Write ``files`` into a folder and run pytest there, as its owner would.

    Args:
        options: of pytest, as on its command line.
        files: contents by path, relative to the folder; what stands there already stays.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: the run took longer.
    """
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    # what the run that we are in has set is not meant for this one
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    (folder / _JUNIT).unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={_JUNIT}", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    told = folder / _JUNIT
    tests: dict[str, ToldByTest] = {}
    for case in ElementTree.parse(told).getroot().iter("testcase") if told.exists() else ():
        properties = [(each.get("name"), each.get("value") or "") for each in case.iter("property")]
        worlds, *others = (
            tuple(value for name, value in properties if name == f"gt_{kind}")
            for kind in ("world", "verdict", "golden", "digest")
        )
        outcome, message = "passed", ""
        for tag, word in (("skipped", "skipped"), ("error", "error"), ("failure", "failed")):
            if (found := case.find(tag)) is not None:
                outcome, message = word, found.text or found.get("message") or ""
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        tests[name] = ToldByTest(outcome, message, "".join(worlds[:1]), *others)
    return ProjectRun(done.returncode, done.stdout, tests)
