"""Mutation testing by mutmut: a seeded sample of mistakes in each package, and those that no
first-tier test sees.

    make mutants                               # 200 mutants of all packages make mutants
    PACKAGES=passes SAMPLE=60 SEED=3 .venv/bin/python .ci/mutants.py numerics --only
    "*.compare.x__some__mutmut_12"      # does it die by now?

mutmut writes every mutant of a file beside the original and chooses one in a process that it forks,
after torch and the tests have been imported: about one second a mutant. It knows which tests call
which function, and runs those alone. cosmic-ray was not taken: it starts the whole test command for
each mutant, so each pays for the import of torch (5 s) and for tests that never reach the mutant.
mutmut's plain ``fork`` is not used either: it forks from a process in which torch's threads have
run, and a child then waits for them for ever; its fork server has run no test.

Each package is copied to ``build/mutants/PACKAGE`` and mutated there; a tree that has not changed
is not copied again. Examples in docstrings are tests, too. A mutant that lives is tried once more
in a process of its own, ten seconds each: what was remembered before the fork is then made anew.
mutmut does not see what other processes call, ranks for example: a mutant that no test seems to
call is tried so with all tests of its package, half a minute each.

A mutant that survives is printed as a diff; one that no test can see is named with its reason in
``tests/equivalent_mutants.txt``. Changed letters of a sentence are counted as wording: tests hold a
message's facts, not its words.

Exit status: 0; 1 if a mutant survives that is not listed as equivalent, or if mutmut could not run;
2 for a wrong name.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
TOOL = ROOT / "build" / "mutants-tool"
"""Where ``make mutants`` installs mutmut."""
PASS = "graph_pass"
"""The decorator of passes."""
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
TESTS = {
    "passes": ["tests/passes"],
    "tracing": [
        "tests/tracing",
        "tests/models",
        "tests/passes/test_stages.py",
        "tests/parity/test_pipeline.py",
    ],
    "references": [
        "tests/references",
        "tests/parity",
        "tests/passes/chunking/test_mixing.py",
        # both sides in one process, where mutmut sees what they call
        *(
            f"tests/worlds/simulated/test_{name}.py"
            for name in ("parity_failures", "paths", "replicas", "same_graph")
        ),
    ],
    "worlds/simulated": ["tests/worlds/simulated"],
    "graphtext": [
        "tests/graphtext",
        "tests/checks",
        *(
            f"tests/golden/test_{name}.py"
            for name in (
                "differences",
                "differences_buckets",
                "differences_lines",
                "differences_schedule",
                "differences_values",
                "torch_spellings",
            )
        ),
    ],
    "graph": ["tests/passes", "tests/graphtext"],
    "numerics": [
        "tests/numerics",
        "tests/report/test_sweep_table.py",
        "tests/report/test_verdicts.py",
    ],
}
"""What is mutated, and the tests whose task it is to see that."""
EXAMPLES = "tests/test_examples_in_docstrings.py"
"""In the copy: runs the examples once, where ``tests/test_doctests.py`` would run those of each
mutant's docstring.
"""
EXAMPLES_TEXT = """
import doctest, importlib, pkgutil
import pytest, torch
import {package} as package

names = [package.__name__, *(found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."))]
modules = [importlib.import_module(name) for name in names]
found = [each for module in modules
         for each in doctest.DocTestFinder().find(module, extraglobs={{**vars(module), "torch": torch}})
         if each.examples and not each.name.rpartition("__mutmut_")[2].isdigit()]

@pytest.mark.parametrize("example", found, ids=lambda example: example.name)
def test_example(example):
    wrong = []
    doctest.DocTestRunner(verbose=False).run(example, out=wrong.append)
    assert not wrong, "".join(wrong)
"""

STACKS = """

from mutmut.mutation import trampoline

_wrap_in_trampoline = trampoline.wrap_in_trampoline


def _in_the_file_of_the_function(*args, **kwargs):
    def wrap(function):
        made = _wrap_in_trampoline(*args, **kwargs)(function)
        for part in (made, *(cell.cell_contents for cell in made.__closure__ or ())):
            if getattr(getattr(part, "__code__", None), "co_filename", "") == trampoline.__file__:
                part.__code__ = part.__code__.replace(co_filename=function.__code__.co_filename)
        return made

    return wrap


trampoline.wrap_in_trampoline = _in_the_file_of_the_function
"""
"""Behind the copy's ``conftest.py``. mutmut puts a function of its own around each of ours, and
code that reads stacks, as the ranks on threads do, would name mutmut's file: eleven tests of them
failed without a mutant.
"""

CONFIGURATION = """
[tool.mutmut]
source_paths = ["pytest_gtrainer/"]
only_mutate = ["pytest_gtrainer/{package}/*"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = {options}
process_isolation = "forkserver"
# a mutant gets four times what its tests take and five seconds more: one that made a loop endless must not hold us up
timeout_multiplier = 4.0
timeout_constant = 5.0
use_git_change_detection = false
also_copy = {copied}
"""
# By exit codes of pytest and mutmut: 2, 4 and 255 are tests that cannot be collected. With any
# other a mutant hung.
OUTCOMES = {
    **dict.fromkeys((1, 2, 3, 4, 255), "killed"),
    0: "survived",
    33: "no test",
    None: "not run",
}
# deselected: a control is told by the line that calls it, and every call goes through a function of
# mutmut
OPTIONS = [
    "-p",
    "no:xdist",
    "-m",
    "not long and not second_tier",
    "--gt-gpus=8",
    "-k",
    "not told_to_who_judges_all",
]


@dataclass
class Package:
    """The mutants of one package, in the copy that holds them."""

    name: str
    outcomes: dict[str, str] = field(default_factory=dict)  # of those tried, by mutmut's name

    @property
    def copy(self) -> Path:
        return BUILD / self.name.replace("/", ".")

    @property
    def tests(self) -> list[str]:
        return [*TESTS[self.name], EXAMPLES]

    @property
    def mutants(self) -> list[str]:
        return sorted(self._results())

    def prepare(self) -> None:
        """A copy of the working tree, mutated by mutmut, with its record of which test calls what."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        names = [name for name in listed if (ROOT / name).is_file()]
        state = hashlib.sha256(
            b"".join(b"%s %s" % (name.encode(), (ROOT / name).read_bytes()) for name in names)
        )
        mark = self.copy / "prepared"
        if mark.exists() and mark.read_text() == state.hexdigest():
            return
        shutil.rmtree(self.copy, ignore_errors=True)
        for name in names:
            (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.copy / name)
        for file in (self.copy / "pytest_gtrainer" / self.name).rglob("*.py"):
            file.write_text(undecorated(file.read_text()))
        dotted = f"pytest_gtrainer.{self.name.replace('/', '.')}"
        (self.copy / EXAMPLES).write_text(EXAMPLES_TEXT.format(package=dotted))
        with (self.copy / "conftest.py").open("a") as file:
            file.write(STACKS)
        copied = sorted(
            path.name
            for path in self.copy.iterdir()
            if path.name not in ("pytest_gtrainer", "tests")
        )
        tests, options, copied = map(json.dumps, (self.tests, OPTIONS, copied))
        with (self.copy / "pyproject.toml").open("a") as file:
            file.write(
                CONFIGURATION.format(package=self.name, tests=tests, options=options, copied=copied)
            )
        (
            self.copy / "mutants"
        ).mkdir()  # before Python starts, or it forgets this entry of its path
        # mutmut has no command that only prepares: a name that fits no mutant ends it right after
        # that
        done = self._python(
            "-m", "mutmut", "run", "--max-children", "2", "nothing is called so", folder=self.copy
        )
        if "nothing matches" not in done.stdout + done.stderr:
            print(self._alone("").stdout)  # mutmut does not tell which test failed
            sys.exit(f"mutmut could not prepare {self.name}, see {self._log(done)}")
        mark.write_text(state.hexdigest())

    def run(self, names: list[str], children: int) -> None:
        """Try these mutants."""
        done = self._python(
            "-m", "mutmut", "run", "--max-children", str(children), *names, folder=self.copy
        )
        if "Failed to run clean test" in done.stdout:
            log = self._log(self._alone(""))
            sys.exit(f"a test of {self.name} fails without a mutant, maybe now and then: see {log}")
        results = self._results()
        self.outcomes = {name: OUTCOMES.get(results[name], "hung") for name in sorted(names)}
        if "not run" in self.outcomes.values():
            sys.exit(f"mutmut could not run the mutants of {self.name}, see {self._log(done)}")
        alive = [
            name for name, outcome in self.outcomes.items() if outcome in ("survived", "no test")
        ]
        with ThreadPoolExecutor(children) as pool:
            for name, done in zip(alive, pool.map(self._alone, alive), strict=True):
                if done.returncode != 0:
                    self.outcomes[name] = OUTCOMES.get(done.returncode, "hung")

    def _alone(self, mutant: str) -> subprocess.CompletedProcess[str]:
        """A new process with the tests that call it, or with all where mutmut knows of none."""
        shown = (
            self._python("-m", "mutmut", "tests-for-mutant", mutant, folder=self.copy).stdout
            if mutant
            else ""
        )
        tests = [line for line in shown.splitlines() if "::" in line] or self.tests
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *OPTIONS, *tests]
        return self._python(*command, folder=self.copy / "mutants", MUTANT_UNDER_TEST=mutant)

    def difference(self, mutant: str) -> str:
        """The mutant as a diff."""
        shown = self._python("-m", "mutmut", "show", mutant, folder=self.copy).stdout.splitlines()
        return "\n".join(line for line in shown if not line.startswith(("#", "---", "+++")))

    def _results(self) -> dict[str, int | None]:
        """mutmut's exit code of each mutant; None before it has been tried."""
        found: dict[str, int | None] = {}
        for path in (self.copy / "mutants" / "pytest_gtrainer" / self.name).rglob("*.meta"):
            found |= json.loads(path.read_text())["exit_code_by_key"]
        return found

    def _python(
        self, *arguments: str, folder: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = f"{self.copy / 'mutants'}:{TOOL}"
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False
        )

    def _log(self, done: subprocess.CompletedProcess[str]) -> Path:
        log = self.copy / "mutmut.log"
        log.write_text(done.stdout + done.stderr)
        return log


def undecorated(source: str) -> str:
    """The same module with ``f = graph_pass(f)`` behind ``f``: mutmut passes over functions that
    are decorated.
    """
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and [
            ast.unparse(each) for each in node.decorator_list
        ] == [PASS]:
            lines.insert(
                node.end_lineno or 0, f"\n\n{node.name} = {PASS}({node.name})  # type: ignore"
            )
            del lines[node.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


def function_of(mutant: str) -> str:
    return mutant.removeprefix("pytest_gtrainer.").rpartition("__mutmut_")[0]


def equivalents() -> dict[tuple[str, str], str]:
    """Reasons by the function and the line that a mutant puts into it; ``*`` is every line of the
    function.
    """
    found = {}
    for line in EQUIVALENT.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            function, changed, reason = (part.strip() for part in line.split(" | "))
            found[function, changed] = reason
    return found


def only_rewords(before: str, after: str) -> bool:
    """Whether nothing but letters of a sentence changed, one of four words or more: no test should
    hold those.

    >>> only_rewords('raise ValueError("no ranks are left")', 'raise ValueError("NO RANKS ARE LEFT")')
    True
    >>> only_rewords('emit("verdict")', 'emit("XXverdictXX")')
    False
    """
    texts = zip(*(re.findall(r'"([^"]*)"', line) for line in (before, after)), strict=False)
    sentence = any(old != new and old.count(" ") >= 3 for old, new in texts)
    return sentence and before.casefold() == after.replace("XX", "").casefold()


_GUARD = re.compile(r",\s*(strict=\w+)?\)")


def judge(package: Package, known: dict[tuple[str, str], str]) -> None:
    """Print the mutants that were not killed: each with its reason, or as a diff."""
    for mutant, outcome in package.outcomes.items():
        if outcome in ("killed", "hung"):
            continue
        difference, function = package.difference(mutant), function_of(mutant)
        removed, changed = (
            [line[1:].strip() for line in difference.splitlines() if line[0] == sign]
            for sign in "-+"
        )
        reason = next(
            (known[function, line] for line in [*changed, "*"] if (function, line) in known), None
        )
        if len({_GUARD.sub(")", "".join(lines)) for lines in (removed, changed)}) == 1:
            reason = "whether zip looks at the lengths, which are equal"
        if only_rewords("\n".join(removed), "\n".join(changed)):
            package.outcomes[mutant] = "wording"
        elif reason is not None:
            package.outcomes[mutant] = "equivalent"
            print(f"\n{mutant}: equivalent, {reason}")
        else:
            package.outcomes[mutant] = "survived"
            print(
                f"\n{mutant}: {outcome.replace('no test', 'no test calls it')}\n{difference}",
                flush=True,
            )


def table(packages: list[Package]) -> str:
    """How many of each module's mutants came to which end; the last line is the sum."""
    columns = ["killed", "hung", "wording", "equivalent", "survived"]
    lines = ["  ".join(["module".ljust(40), "mutants", "tried", *columns])]
    ends: dict[str, Counter[str]] = {}
    for package in packages:
        for mutant in package.mutants:
            module = re.split(r"\.x[_ǁ]", function_of(mutant))[0]
            told = ends.setdefault(module, Counter())
            told.update(
                [
                    "mutants",
                    *(["tried", package.outcomes[mutant]] if mutant in package.outcomes else []),
                ]
            )
    together = sum(ends.values(), Counter())
    ends = {module: told for module, told in ends.items() if told["tried"]} | {"together": together}
    for name, told in ends.items():
        cells = [str(told[column]).rjust(len(column)) for column in ("mutants", "tried", *columns)]
        lines.append("  ".join([name.ljust(40), *cells]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "packages", nargs="*", help=f"of {', '.join(TESTS)}; all of them unless told"
    )
    parser.add_argument("--sample", type=int, default=200, help="how many mutants in all (200)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others (0)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="try those of these names, which may hold *"
    )
    parser.add_argument("--children", type=int, default=2, help="how many are tried at a time (2)")
    options = parser.parse_args()
    for name in options.packages:
        if name not in TESTS:
            parser.error(f"{name!r} is none of the packages: {', '.join(TESTS)}")
    packages = [Package(name) for name in options.packages or TESTS]
    began = time.monotonic()
    for package in packages:
        print(f"{package.name}: mutating, and finding out which test calls what ...", flush=True)
        package.prepare()
    prepared = time.monotonic()
    whole, known = sum(len(package.mutants) for package in packages), equivalents()
    for package in packages:
        names = package.mutants
        if options.only:
            drawn = [
                name
                for name in names
                if any(fnmatch.fnmatchcase(name, wanted) for wanted in options.only)
            ]
        else:
            share = max(round(options.sample * len(names) / whole), 1)
            drawn = random.Random(f"{options.seed} {package.name}").sample(
                names, min(share, len(names))
            )
        if drawn:
            print(f"{package.name}: {len(drawn)} of {len(names)} mutants ...", flush=True)
            package.run(drawn, options.children)
            judge(package, known)
    outcomes = [outcome for package in packages for outcome in package.outcomes.values()]
    if not outcomes:
        parser.error(f"no mutant is named {' or '.join(options.only)}")
    seconds = time.monotonic() - prepared
    print(f"\n{table(packages)}\n")
    print(
        f"{prepared - began:.0f} s to prepare, then {seconds:.0f} s: {seconds / len(outcomes):.1f} s a mutant"
    )
    sys.exit(1 if "survived" in outcomes else 0)


if __name__ == "__main__":
    main()
