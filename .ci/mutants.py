"""Mutation testing by mutmut: a seeded sample of mistakes in each package, and those that no first-tier test sees.

    make mutants                               # 200 mutants of all packages
    make mutants PACKAGES=passes SAMPLE=60 SEED=3

mutmut writes every mutant of a file beside the original and chooses one in a process that it forks, after torch and the
tests have been imported: about one second a mutant. It knows which tests call which function, and runs those alone.
cosmic-ray was not taken: it starts the whole test command for each mutant, so each pays for the import of torch (5 s)
and for tests that never reach the mutant. mutmut's plain ``fork`` is not used either: it forks from a process in which
torch's threads have run, and a child then waits for them for ever; its fork server has run no test.

Each package is copied to ``build/mutants/PACKAGE`` and mutated there. A mutant that survives is printed as a diff; one
that no test can see, because nothing changes, is named with its reason in ``tests/equivalent_mutants.txt``.

Exit status: 0; 1 if a mutant survives that is not listed as equivalent; 2 if mutmut could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
TOOL = ROOT / "build" / "mutants-tool"
"""Where ``make mutants`` installs mutmut."""
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
TESTS = {
    "passes": ["tests/passes"],
    "tracing": ["tests/tracing", "tests/models"],
    "references": ["tests/references", "tests/parity"],
    "worlds/simulated": ["tests/worlds/simulated"],
    "graphtext": [
        "tests/graphtext",
        "tests/checks",
        "tests/golden/test_differences.py",
        "tests/golden/test_torch_spellings.py",
    ],
    "graph": ["tests/passes", "tests/graphtext"],
    "numerics": ["tests/numerics"],
}
"""What is mutated, and the tests whose task it is to see that."""

CONFIGURATION = """
[tool.mutmut]
source_paths = ["pytest_gtrainer/"]
only_mutate = ["pytest_gtrainer/{package}/*"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:xdist", "-m", "not long and not second_tier", "--gt-gpus=8"]
process_isolation = "forkserver"
# a mutant gets four times what its tests take and five seconds more: one that made a loop endless must not hold us up
timeout_multiplier = 4.0
timeout_constant = 5.0
use_git_change_detection = false
also_copy = {copied}
"""
KILLED_BY = {1: "killed", 3: "killed", 0: "survived", 33: "no test", 34: "skipped", None: "not run"}
"""mutmut's exit codes; all others are a mutant that hung, or that killed its process."""


@dataclass
class Package:
    """The mutants of one package, in the copy that holds them."""

    name: str
    outcomes: dict[str, str] = field(default_factory=dict)  # of the sample, by mutmut's name
    count: int = 0

    @property
    def copy(self) -> Path:
        return BUILD / self.name.replace("/", ".")

    def prepare(self) -> None:
        """A fresh copy of the working tree, mutated by mutmut, with its record of which test calls what."""
        shutil.rmtree(self.copy, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
            (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.copy / name)
        copied = sorted(path.name for path in self.copy.iterdir() if path.name not in ("pytest_gtrainer", "tests"))
        with (self.copy / "pyproject.toml").open("a") as file:
            file.write(
                CONFIGURATION.format(package=self.name, tests=json.dumps(TESTS[self.name]), copied=json.dumps(copied))
            )
        (self.copy / "mutants").mkdir()  # before Python starts, or it forgets this entry of its path
        # mutmut has no command that only prepares: a name that fits no mutant ends it right after that
        done = self._mutmut("run", "--max-children", "2", "nothing is called so")
        if "nothing matches" not in done.stdout + done.stderr:
            sys.exit(f"mutmut could not prepare {self.name}, see {self._log(done)}")

    def run(self, share: int, seed: int, children: int) -> None:
        """Draw ``share`` mutants and try them."""
        names = sorted(self._results())
        self.count = len(names)
        drawn = random.Random(f"{seed} {self.name}").sample(names, min(share, len(names)))
        done = self._mutmut("run", "--max-children", str(children), *drawn)
        results = self._results()
        self.outcomes = {name: KILLED_BY.get(results[name], "hung or died") for name in sorted(drawn)}
        if "not run" in self.outcomes.values():
            sys.exit(f"mutmut could not run the mutants of {self.name}, see {self._log(done)}")

    def difference(self, mutant: str) -> str:
        """The mutant as a diff."""
        shown = self._mutmut("show", mutant).stdout.splitlines()
        return "\n".join(line for line in shown if not line.startswith(("#", "---", "+++")))

    def _results(self) -> dict[str, int | None]:
        """mutmut's exit code of each mutant; None before it has been tried."""
        found: dict[str, int | None] = {}
        for path in (self.copy / "mutants" / "pytest_gtrainer" / self.name).rglob("*.meta"):
            found |= json.loads(path.read_text())["exit_code_by_key"]
        return found

    def _mutmut(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": f"{self.copy / 'mutants'}:{TOOL}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "mutmut", *arguments]
        return subprocess.run(command, cwd=self.copy, env=environ, capture_output=True, text=True, check=False)

    def _log(self, done: subprocess.CompletedProcess[str]) -> Path:
        log = self.copy / "mutmut.log"
        log.write_text(done.stdout + done.stderr)
        return log


def equivalents() -> dict[tuple[str, str], str]:
    """Reasons by the function and the line that a mutant puts into it."""
    found = {}
    for line in EQUIVALENT.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            function, changed, reason = (part.strip() for part in line.split(" | "))
            found[function, changed] = reason
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(TESTS)}; all of them unless told")
    parser.add_argument("--sample", type=int, default=200, help="how many mutants in all (200)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others (0)")
    parser.add_argument("--children", type=int, default=2, help="how many are tried at a time (2)")
    options = parser.parse_args()
    for name in options.packages:
        if name not in TESTS:
            parser.error(f"{name!r} is none of the packages: {', '.join(TESTS)}")
    packages = [Package(name) for name in options.packages or TESTS]
    for package in packages:
        print(f"{package.name}: mutating, and finding out which test calls what ...", flush=True)
        package.prepare()
    sizes = {package.name: len(package._results()) for package in packages}
    known, survivors = equivalents(), 0
    for package in packages:
        share = max(round(options.sample * sizes[package.name] / sum(sizes.values())), 1)
        print(f"{package.name}: {share} of {sizes[package.name]} mutants ...", flush=True)
        package.run(share, options.seed, options.children)
        for mutant, outcome in package.outcomes.items():
            if outcome not in ("survived", "no test"):
                continue
            difference = package.difference(mutant)
            added = [line[1:].strip() for line in difference.splitlines() if line.startswith("+")]
            function = mutant.removeprefix("pytest_gtrainer.").rpartition("__mutmut_")[0]
            reason = next((known[function, line] for line in added if (function, line) in known), None)
            if reason is not None:
                package.outcomes[mutant] = "equivalent"
                print(f"\n{mutant}: equivalent, {reason}")
            else:
                survivors += 1
                print(f"\n{mutant}: {outcome}\n{difference}", flush=True)
    columns = ["killed", "survived", "no test", "hung or died", "equivalent", "skipped"]
    print("\n" + "  ".join(["package".ljust(18), "mutants", "tried", *columns]))
    for package in packages:
        told = Counter(package.outcomes.values())
        cells = [str(told[column]).rjust(len(column)) for column in columns]
        print(
            "  ".join(
                [package.name.ljust(18), str(package.count).rjust(7), str(len(package.outcomes)).rjust(5), *cells]
            )
        )
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
