"""Run a project under pytest, in a process of its own, and read the results of its tests.

    run = run_project(tmp_path, files={"test_it.py": TEXT})
    assert run["test_bits"].verdicts == ("graph against eager: equal",)

The results come from the JUnit file that pytest writes. This module does not import torch.
"""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

_JUNIT = "gtrainer-project.xml"
_IN_TEAR_DOWN = "\n\nand in its tear-down:\n"


@dataclass(frozen=True, slots=True)
class ToldByTest:
    """The result of one test of a project.

    Attributes:
        outcome: "passed", "failed" (in its call), "error" (in set-up or tear-down) or "skipped".
            "failed" if the call and the tear-down fail. Of a test that runs several times, a
            failure counts more than a success.
        message: of the failure or skip, as pytest shows it; "" if the test passed. A failure of the
            call stands before that of the tear-down.
        world: as "ranks(2, gloo on cpu)"; "" without one.
        verdicts: "title: outcome", one for each comparison.
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
    """A run of a project.

    Attributes:
        status: pytest's exit status.
        output: what pytest printed.
        tests: the tests by name, ``module::test[parameter]``.
    """

    status: int
    output: str
    tests: Mapping[str, ToldByTest]

    def __getitem__(self, name: str) -> ToldByTest:
        """Return the test of a name, with or without its module.

        Raises:
            KeyError: no test has that name, or several have. The message names the tests of the
                run; if it has none, it shows what pytest printed.
        """
        found = []
        for known, test in self.tests.items():
            if name in (known, known.rpartition("::")[2]):
                found.append(test)
        if len(found) == 1:
            return found[0]
        shown = ", ".join(self.tests) or f"none:\n{self.output}"
        raise KeyError(f"{len(found)} tests are called {name!r}; the run has {shown}")


def run_project(
    folder: Path, *options: str, files: Mapping[str, str] | None = None, timeout: float = 300
) -> ProjectRun:
    """Write ``files`` into a folder and run pytest there, as its owner would.

    Args:
        folder: the working directory of the run; files that it has already stay.
        options: of pytest, as on its command line.
        files: contents by path, relative to the folder.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: the run took longer.
    """
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    junit = folder / _JUNIT
    junit.unlink(missing_ok=True)
    # PYTEST_ADDOPTS, PYTEST_PLUGINS and variables of xdist are those of the calling run.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--junitxml={_JUNIT}", *options],
        cwd=folder,
        env=environ,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    tests: dict[str, ToldByTest] = {}
    if junit.exists():  # a usage error ends pytest before it writes one
        for case in ElementTree.parse(junit).getroot().iter("testcase"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}".strip(":")
            test = _read_test(case)
            # A test that fails and whose tear-down fails, too, has two entries, the call's first.
            earlier = tests.get(name)
            has_failed = earlier is not None and earlier.outcome in ("failed", "error")
            if earlier is not None and earlier.outcome == "failed" and test.outcome == "error":
                messages = earlier.message, test.message
                test = replace(earlier, message=_IN_TEAR_DOWN.join(messages))
            elif has_failed and test.outcome in ("passed", "skipped"):
                continue  # it ran again, as under ``--dist=each``: one failure is a failure
            tests[name] = test
    return ProjectRun(done.returncode, done.stdout, tests)


def _read_test(case: ElementTree.Element) -> ToldByTest:
    values: dict[str | None, list[str]] = defaultdict(list)
    for each in case.iter("property"):
        values[each.get("name")].append(each.get("value") or "")
    outcome, messages = "passed", []
    # The last that is there counts: a failed test may have an error in its tear-down.
    for tag, word in (("skipped", "skipped"), ("error", "error"), ("failure", "failed")):
        found = case.findall(tag)
        if found:  # two errors are those of set-up and tear-down
            outcome = word
            messages = [each.text or each.get("message") or "" for each in found]

    return ToldByTest(
        outcome,
        _IN_TEAR_DOWN.join(messages),
        world="".join(values["gt_world"][:1]),
        verdicts=tuple(values["gt_verdict"]),
        goldens=tuple(values["gt_golden"]),
        digests=tuple(values["gt_digest"]),
    )
