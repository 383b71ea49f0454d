"""The same tests at another git revision, for ``--gt-against``.

When the tests have run *here*, in the working tree, they run *there*: in a git worktree at the
revision, with the same interpreter and packages. The run there writes a page of ``--gt-report``,
with which the run here is compared. Goldens decide on neither side; what the tests claim for them
is compared, too.

Both runs prove nothing if they import the same code. So each test reports where its modules come
from, and modules of the working tree must come from the worktree there.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.devices import launch_of
from pytest_gtrainer.environment import lasting_environment
from pytest_gtrainer.report import keeper
from pytest_gtrainer.report.changes import Earlier
from pytest_gtrainer.report.collected import Test

_WRITES_GOLDENS = ("update-goldens", "create-goldens", "prune-goldens")
_OWN_FILES = ("artifacts", "conformance")
_MOST_OUTPUT = 4  # last lines of a run that has ended without a page


class NotComparable(Exception):
    """The tests did not run at the revision, or the two runs cannot be compared: a sentence."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A git revision, as the command line names it, and what it is compared with.

    Attributes:
        given: the revision in the user's words.
        commit: its full hash.
        top: root of the repository.
        root: the run's root in it.
        here: the working tree in words.
    """

    given: str
    commit: str
    top: Path
    root: Path
    here: str

    @classmethod
    def find(cls, config: pytest.Config, given: str) -> "Revision":
        """Find a revision in the repository of the run's root.

        Raises:
            pytest.UsageError: there is no such revision or repository, or another option does not
                go with the comparison.
        """
        option = f"--gt-against={given}"
        _refuse_options(config, option)
        try:
            found = _git(config.rootpath, "rev-parse", "--show-toplevel")
        except FileNotFoundError:
            raise pytest.UsageError(f"{option} needs the command git, which is missing") from None
        if found.returncode:
            raise pytest.UsageError(
                f"{option}: {config.rootpath} is in no git repository: {found.stderr.strip()}"
            )
        top = Path(found.stdout.rstrip("\n"))
        name = f"{given}^{{commit}}"
        found = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", name)
        if found.returncode:
            raise pytest.UsageError(
                f"{option}: there is no such revision in {top}. `git log --all --oneline` lists "
                "those that are; a shallow clone has few: `git fetch --unshallow`"
            )
        commit = found.stdout.strip()
        start = config.invocation_params.dir.resolve()
        if not start.is_relative_to(top.resolve()):
            raise pytest.UsageError(f"{option}: start pytest inside of the repository {top}")
        folder = start.relative_to(top.resolve())
        if folder.parts and _git(top, "cat-file", "-e", f"{commit}:{folder}").returncode:
            raise pytest.UsageError(f"{option}: there is no folder {folder} at that revision")

        head = _git(top, "rev-parse", "--verify", "HEAD").stdout.strip()
        changes = len(_git(top, "status", "--porcelain").stdout.splitlines())
        here = f"{head[:10]} with {facts.counted(changes, 'uncommitted change')}"
        if not changes:
            here = head[:10]
            if head == commit:
                here = "the same commit, unchanged: only what is not deterministic can move"
        return cls(given, commit, top, config.rootpath, here)

    def __str__(self) -> str:
        short = self.commit[:10]
        return short if self.commit.startswith(self.given) else f"{self.given} ({short})"

    def run(self, config: pytest.Config, tests: Sequence[Test]) -> Earlier:
        """Run the tests at the revision.

        Args:
            config: of the run here.
            tests: the tests that ran here.

        Raises:
            NotComparable: the tests do not run there, or run on the code of here.
        """
        here = _imports_here(tests)
        folder = Path(tempfile.mkdtemp(prefix="gtrainer-against-")).resolve()
        page = folder / "page.html"
        command = [sys.executable, "-P", "-m", "pytest", *self._arguments(config, folder)]
        environment = {
            **_environment_of_git(),
            "PYTHONPATH": os.pathsep.join(self._python_path(here, folder / "tree")),
            options.OTHER_SIDE: str(page),
        }
        start = config.invocation_params.dir.resolve().relative_to(self.top.resolve())
        with _kept(environment, str(self.top), self.commit, str(folder), str(start), *command) as (
            status
        ):
            if not page.exists():
                raise NotComparable(f"no test ran at {self}: {_ending(folder / 'output', status)}")
            earlier = Earlier.read(str(page), page)
        earlier.name, earlier.where, earlier.times = str(self), f"at {self}", True
        there = imports_of(
            fact for test in earlier.tests.values() for fact in test.get("imported", ())
        )
        # If no test of here ran there, nothing can be mixed, and the comparison says that.
        if any(test.name in earlier.tests for test in tests):
            problem = self._mixed(here, there, folder / "tree")
            if problem:
                raise NotComparable(problem)
        return earlier

    def command(self, config: pytest.Config, tests: Sequence[Test]) -> str:
        """Return the commands with which a person runs the tests at the revision."""
        short = self.commit[:10]
        tree = self.top.parent / f"at-{short}"
        start = config.invocation_params.dir.resolve().relative_to(self.top.resolve())
        path = os.pathsep.join(self._python_path(_imports_here(tests), tree))
        again = shlex.join(["python", "-P", "-m", "pytest", *_without_against(config)])
        return (
            f"git worktree add --detach {shlex.quote(str(tree))} {short} && "
            f"cd {shlex.quote(str(tree / start))} && PYTHONPATH={shlex.quote(path)} {again}"
        )

    def _arguments(self, config: pytest.Config, folder: Path) -> list[str]:
        """Return the arguments of the run there: those of here, and where its files go."""
        root = self.root.resolve().relative_to(self.top.resolve())
        own = [
            f"--rootdir={folder / 'tree' / root}",
            f"--basetemp={folder / 'temporary'}",
            f"--gt-report={folder / 'page.html'}",
            "--maxfail=0",  # a test that was not reached would be called new
            "--continue-on-collection-errors",
        ]
        if config.getoption("xmlpath", None):
            own.append(f"--junitxml={folder / 'junit.xml'}")
        for name in _OWN_FILES:
            if options.get(config, name):
                own.append(f"--gt-{name}={folder / name}")
        given = []
        for argument in _without_against(config):
            given.append(argument.replace(f"{self.top}/", f"{folder / 'tree'}/"))
        # The last of an option counts, and after "--" stand only paths.
        end = given.index("--") if "--" in given else len(given)
        return [*given[:end], *own, *given[end:]]

    def _python_path(self, here: Mapping[str, str], tree: Path) -> list[str]:
        """Return where Python looks for modules there: the folders of here, in the worktree."""
        entries = []
        for entry in [*sys.path, *here.values()]:
            path = Path(entry).resolve()
            if path.is_dir() and self._is_own(path):
                entries.append(str(tree / path.relative_to(self.top.resolve())))
        for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
            if not self._is_own(Path(entry).resolve()):
                entries.append(entry)
        return list(dict.fromkeys(entries))

    def _is_own(self, path: Path) -> bool:
        """Return whether a folder of modules belongs to the working tree, not to an environment."""
        is_installed = {"site-packages", "dist-packages"} & set(path.parts)
        return path.is_relative_to(self.top.resolve()) and not is_installed

    def _mixed(self, here: Mapping[str, str], there: Mapping[str, str], tree: Path) -> str | None:
        """Return a sentence if the two runs did not each import their own code."""
        for name, origin in here.items():
            is_ours = any(
                each.exists()
                for base in (self.top, self.top / "src", self.root, self.root / "src")
                for each in (base / name / "__init__.py", base / f"{name}.py")
            )
            if is_ours and not self._is_own(Path(origin)):
                return (
                    f"here, {name} was imported from {origin}, an installed copy, and not from the "
                    f"working tree {self.top}: install it with `pip install -e`, or set PYTHONPATH"
                )
        for name, origin in there.items():
            path = Path(origin)
            is_elsewhere = self._is_own(Path(here.get(name, "/")))
            if not path.is_relative_to(tree) and (self._is_own(path) or is_elsewhere):
                return (
                    f"the tests at {self} imported {name} from {origin}, so they did not run on "
                    "the code of that revision. An editable install whose finder comes before "
                    "PYTHONPATH does this: install the package without it, and set PYTHONPATH"
                )
        if not any(Path(path).is_relative_to(tree) for path in there.values()):
            return f"the tests at {self} do not say where they imported their modules from"
        return None


def _imports_here(tests: Sequence[Test]) -> dict[str, str]:
    found = []
    for test in tests:
        for sent in test.shown.values():
            found += sent
    return imports_of(found)


def imports_of(found: Iterable[facts.Fact]) -> dict[str, str]:
    """Return the folder of each top-level module that tests imported, from their facts."""
    imported: dict[str, str] = {}
    for fact in facts.of_kind(found, "imported"):
        imported |= fact["modules"]
    return imported


class Imports:
    """Reports with each test where the modules come from that were imported since the last one."""

    def __init__(self) -> None:
        self._seen: set[str] = set(sys.stdlib_module_names)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self) -> None:
        modules = {}
        for name, module in list(sys.modules.items()):
            if "." in name or name in self._seen:
                continue
            self._seen.add(name)
            place = folder_of(module)
            if place is not None:
                modules[name] = place
        if modules:
            facts.emit("imported", modules=modules)


def folder_of(module: ModuleType) -> str | None:
    """Return the real path of the folder in which Python found a top-level module."""
    # A module may answer any attribute, and even raise.
    with suppress(Exception):
        paths = list(getattr(module, "__path__", None) or ())
        found = paths[0] if paths else module.__file__
        if found is not None:
            return str(Path(found).resolve().parent)
    return None


class ChosenTests:
    """Runs those of the tests named on the command line that exist at this revision.

    Pytest ends a run if one name is missing, and a test may be new.
    """

    def __init__(self, config: pytest.Config) -> None:
        start = config.invocation_params.dir
        self._chosen: list[tuple[Path, str]] = []
        files: dict[str, None] = {}
        for argument in config.args:
            file, _, name = argument.partition("::")
            path = Path(start, file).resolve()
            if path.exists():
                self._chosen.append((path, name))
                files[file] = None
        if not files:
            raise pytest.UsageError(f"there is no {facts.spell_some(config.args)}")
        config.args[:] = files

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            (chosen if self._is_chosen(item) else others).append(item)
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = chosen

    def _is_chosen(self, item: pytest.Item) -> bool:
        name, path = item.nodeid.partition("::")[2], item.path.resolve()
        for file, wanted in self._chosen:
            if not path.is_relative_to(file):
                continue
            if not wanted or name == wanted or name.startswith((f"{wanted}::", f"{wanted}[")):
                return True
        return False


def _refuse_options(config: pytest.Config, option: str) -> None:
    for name in _WRITES_GOLDENS:
        if options.get(config, name):
            raise pytest.UsageError(
                f"{option} compares goldens of two runs and writes none: leave out --gt-{name}"
            )
    if options.get(config, "report-against") is not None:
        raise pytest.UsageError(f"{option} and --gt-report-against exclude each other: give one")
    if config.getoption("usepdb", False) or config.getoption("trace", False):
        raise pytest.UsageError(f"{option} runs tests where no debugger can ask: leave it out")
    if launch_of(config) is not None:
        raise pytest.UsageError(f"{option} starts pytest itself, without torchrun")


def _without_against(config: pytest.Config) -> list[str]:
    arguments = list(map(str, config.invocation_params.args))
    kept = []
    while arguments:
        argument = arguments.pop(0)
        name, equals, _ = argument.partition("=")
        if name not in ("--gt-against", "--gt-moved"):
            kept.append(argument)
        elif not equals:
            del arguments[:1]  # the value
    return kept


def _environment_of_git() -> dict[str, str]:
    """Return the environment without what git sets for its hooks, which names a repository."""
    environment = lasting_environment()
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"):
        environment.pop(name, None)
    return environment


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=_environment_of_git()
    )


@contextmanager
def _kept(environment: dict[str, str], *arguments: str) -> Iterator[str]:
    """Run ``keeper`` and yield the exit status of its command; at the end, its files are gone."""
    process = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # ctrl-C is for pytest, which then ends the keeper
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        status = process.stdout.readline().strip()
        if not status:
            assert process.stderr is not None
            process.stdin.close()
            said = process.stderr.read().strip().splitlines()
            raise NotComparable(f"git made no worktree: {' '.join(said[:2])}")
        yield status
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


def _ending(output: Path, status: str) -> str:
    """Return how a run of pytest has ended, from its last lines."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.strip()]
    errors = [line for line in said if line.startswith(("ERROR", "E  "))] or said
    return f"pytest ended with status {status}: {' / '.join(errors[-_MOST_OUTPUT:])}"
