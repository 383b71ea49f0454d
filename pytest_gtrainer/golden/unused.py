"""Find goldens that no test checks after a full run; report or remove them, or fail the run.

docs/goldens.md has the rules.

A golden belongs to the test that its path is made from. It is *unused* if

- its test has run and passed, and has not checked it;
- or no test that was collected is its test, although the file of its test was collected, or is
  gone.

A golden that only a GPU could judge is *not judged* on a machine without one. A run is *full* if it
asks for no part of the tests (``asks_for_a_part``) and came to its end. Under xdist each worker
sends the goldens without a test when it ends; the outcome of a test is known to all processes that
its reports pass through.
"""

import functools
import glob
import os
import re
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pytest

from pytest_gtrainer import devices
from pytest_gtrainer.environment import installed_minor
from pytest_gtrainer.facts import counted
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.naming import (
    FOLDER,
    SUFFIXES,
    place_of_tests,
    safe,
    stem_of_golden,
    stem_of_test,
    torch_of,
)
from pytest_gtrainer.golden.plugin import PRUNE, GoldenPlugin, given, has_passed
from pytest_gtrainer.marker import id_of

_WORKER_OUTPUT = "gt_unowned_goldens"
_STOPPED = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.USAGE_ERROR,
)
_MOST_SHOWN = 8
_ON_GPU = re.compile(r"""device\(["']cuda|@ cuda""")
_GPU_WORD = re.compile(r"cuda|gpu|nccl", re.IGNORECASE)
_PARTS = {
    "keyword": "-k selects tests",
    "lf": "--lf selects tests",
    "stepwise": "--stepwise stops at a failure",
    "collectonly": "--collect-only runs no test",
    "setupplan": "--setup-plan runs no test",  # it sets the next one, too
    "setuponly": "--setup-only runs no test",
}


class UnusedGoldens:
    """Gathers what was collected and what ran; registered as ``gtrainer-unused-goldens``."""

    def __init__(self, config: pytest.Config, goldens: GoldenPlugin) -> None:
        self.config = config
        self.root = config.rootpath
        self._goldens = goldens
        self._mode = goldens.modes.unused
        self._collection = Collection()
        self._selected: list[pytest.Item] = []
        self._tests: dict[str, OutcomeOfTest] = {}
        self._cut: str | None = None  # the reason why the run has not come to its end
        self._workers_unowned: set[PurePosixPath] | None = None
        self.lines: list[str] = []  # for the summary of the run
        if given(config, PRUNE) and not hasattr(config, "workerinput"):
            part = asks_for_a_part(config, store.goldens_below(self.root))
            if part is not None:
                raise pytest.UsageError(
                    f"--gt-prune-goldens removes goldens only after a run of all tests, and {part}"
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.File):
            place = place_of_tests(collector.nodeid)
            if report.passed:
                self._collection.collected.add(place)
            else:
                self._collection.uncertain.add(place)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._cut = "collection failed"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        self._collection.add(items)
        result = yield
        self._collection.add(items)  # those that a plugin has added
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected += session.items

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A plugin that repeats a test begins with its setup again.
        if report.when == "setup" or report.nodeid not in self._tests:
            self._tests[report.nodeid] = OutcomeOfTest()
        self._tests[report.nodeid].add(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        unowned = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT)
        if error is not None or unowned is None:
            self._cut = f"worker {node.gateway.id} has died"
            return
        # A golden has no test if no worker has collected one.
        paths = set(map(PurePosixPath, unowned))
        if self._workers_unowned is not None:
            paths &= self._workers_unowned
        self._workers_unowned = paths

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Report or remove unused goldens after a full run; a worker sends what it knows."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            # execnet sends plain types only.
            output[_WORKER_OUTPUT] = list(map(str, self._collection.unowned(self.root)))
            return

        lacking = set()
        has_claims = False
        for nodeid, test in self._tests.items():
            has_claims |= bool(test.claims)
            if test.lacks_devices:
                lacking.add(stem_of_test(nodeid))

        files = []
        if lacking or self._mode != "ignore":
            files = store.goldens_below(self.root)
        if not files:
            return
        not_judged = {path for path in files if stem_of_golden(path) in lacking}
        # A project that never checks goldens may use the folder's name for something else.
        are_texts = all(path.name.endswith(SUFFIXES["text"]) for path in files)
        are_ours = has_claims or not are_texts
        part = asks_for_a_part(self.config, files) or self._reason_of_cut(exitstatus)
        if part is None:
            unused = self._unused(files) - not_judged
            if devices.resolve(self.config).kind != "cuda":
                on_gpu = {path for path in unused if needs_gpu(path, self.root)}
                unused -= on_gpu
                not_judged |= on_gpu
            if self._mode != "ignore" and are_ours:
                # A file that a link in use leads to is in use; the link to it may still go.
                used = {os.path.realpath(self.root / path) for path in files if path not in unused}
                linked = store.linked_folders(self.root)
                gone = [path for path in sorted(unused) if self._may_go(path, used, linked)]
                self._report(session, gone)
        elif self._mode in ("fail", "prune") and are_ours:
            self.lines.append(f"unused goldens were not looked for: {part}")

        self._count("not judged", sorted(not_judged))

    def _may_go(self, path: PurePosixPath, used: set[str], linked: list[Path]) -> bool:
        file = self.root / path
        if file.is_symlink():
            return True
        # Behind a link to its folder a golden has another name, whose test may check it.
        real = os.path.realpath(file)
        return real not in used and not any(map(Path(real).is_relative_to, linked))

    def _reason_of_cut(self, exitstatus: int) -> str | None:
        """Return the reason why the run has not come to its end; None if it has."""
        if self._cut is not None:
            return self._cut
        if exitstatus in _STOPPED:
            return "the run was stopped"
        left = {item.nodeid for item in self._selected}
        for nodeid, test in self._tests.items():
            # A test that was cut has no report of its teardown.
            if any(when == "teardown" for when, _ in test.outcomes):
                left.discard(nodeid)
        return f"{counted(len(left), 'test')} did not run" if left else None

    def _unused(self, files: list[PurePosixPath]) -> set[PurePosixPath]:
        """Return goldens without a test, and those that a test which has passed did not check.

        Goldens kept for another version of torch count only if they have no test.
        """
        if self._workers_unowned is None:
            found = set(self._collection.unowned(self.root))
        else:
            found = self._workers_unowned & set(files)
        stems = by_stem(path for path in files if torch_of(path) in (None, installed_minor()))
        for nodeid, test in self._tests.items():
            # A test that failed, or skipped a subtest, may not have come to all of its checks.
            if test.claims is not None and has_passed(test.outcomes):
                for path in stems.get(stem_of_test(nodeid), ()):
                    if str(path) not in test.claims:
                        found.add(path)
        return found

    def _report(self, session: pytest.Session, unused: list[PurePosixPath]) -> None:
        """Remove unused goldens if asked to; report those that are left, or fail the run."""
        if self._mode == "prune":
            for path in list(unused):
                try:
                    store.remove(self.root / path, self.root)
                except store.GoldenFileError as error:
                    self.lines.append(str(error))
                else:
                    self.lines.append(f"removed {path}")
                    self._count("removed", [path])
                    unused.remove(path)

        self._count("unused", unused)
        if not unused:
            return
        self.lines.append("goldens that no test checks (--gt-prune-goldens removes them):")
        self.lines += [f"  {path}" for path in unused[:_MOST_SHOWN]]
        if len(unused) > _MOST_SHOWN:
            self.lines.append(f"  … and {len(unused) - _MOST_SHOWN} more")
        if self._mode == "warn":
            return
        self.lines.append(
            "a run with unused goldens has failed, as --gt-unused-goldens=fail was given"
        )
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _count(self, outcome: str, paths: Iterable[PurePosixPath]) -> None:
        for path in paths:
            fact = {"kind": "golden", "outcome": outcome, "name": str(path)}
            self._goldens.late_facts.append(fact)


class Collection:
    """The tests and files that a process has collected, before anything was deselected.

    Attributes:
        items: the tests, in order; the values are not used.
        stems: their stems, see ``golden.naming``.
        empty_sets: stems of tests whose parameters are an empty set here.
        collected: places of the goldens of files that were collected.
        uncertain: places of those of files that were skipped or failed.
    """

    def __init__(self) -> None:
        # The names of tests are read from the items only in a run that finds goldens.
        self.items: dict[pytest.Item, None] = {}
        self.stems: set[PurePosixPath] = set()
        self.empty_sets: set[PurePosixPath] = set()
        self.collected: set[PurePosixPath] = set()
        self.uncertain: set[PurePosixPath] = set()

    def add(self, items: Iterable[pytest.Item]) -> None:
        self.items.update(dict.fromkeys(items))

    def _read_names(self) -> None:
        for item in self.items:
            nodeid = id_of(item)
            self.stems.add(stem_of_test(nodeid))
            for mark in item.iter_markers("skip"):
                if str(mark.kwargs.get("reason", "")).startswith("got empty parameter set"):
                    self.empty_sets.add(stem_of_test(nodeid.partition("[")[0]))

    def unowned(self, root: Path) -> list[PurePosixPath]:
        """Return the goldens that surely have no test."""
        goldens = by_stem(store.goldens_below(root))
        if not goldens:
            return []
        self._read_names()
        has_tests = functools.cache(has_test_file)
        found = []
        for stem, files in goldens.items():
            place = stem.parent
            if stem in self.stems or place in self.uncertain:
                continue
            # Elsewhere the test may have the parameters that it lacks here.
            if any(
                test.parent == place and stem.name.startswith(f"{test.name}-")
                for test in self.empty_sets
            ):
                continue
            if place in self.collected or not has_tests(place, root):
                found += files

        return found


class OutcomeOfTest:
    """The outcome of a test by its reports."""

    def __init__(self) -> None:
        self.outcomes: set[tuple[str | None, str]] = set()  # phase, outcome
        self.claims: set[str] | None = None  # paths; None if no report has them
        self.lacks_devices = False

    def add(self, report: pytest.TestReport) -> None:
        self.outcomes.add((report.when, report.outcome))
        if (claims := getattr(report, "gt_claims", None)) is not None:
            self.claims = set(claims)  # each report has all claims so far
        if any(fact["kind"] == "skip" for fact in getattr(report, "gt_facts", ())):
            self.lacks_devices = True


def asks_for_a_part(config: pytest.Config, goldens: Iterable[PurePosixPath]) -> str | None:
    """Return what on the command line asks for a part of the tests; None if it asks for all.

    The paths given have to cover ``testpaths``, or the tests of all goldens.
    """
    for name, reason in _PARTS.items():
        if getattr(config.option, name, None):
            return reason
    for argument in config.args:
        if "::" in argument:
            return f"{argument} names a test"
    root = config.rootpath
    starts = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    homes = []
    for pattern in config.getini("testpaths"):
        for path in glob.iglob(pattern, root_dir=root, recursive=True):
            homes.append((root / path).resolve())
    if _lie_below(homes or [root.resolve()], starts):
        return None

    places = []
    for start in starts:
        if start.is_relative_to(root.resolve()):
            path = start.relative_to(root.resolve()).as_posix()
            places.append(place_of_tests(path, is_file=start.is_file()))

    if _lie_below(goldens, places):
        return None
    return f"{' '.join(config.args)} does not hold all tests"


def _lie_below(paths: Iterable[PurePath], folders: Sequence[PurePath]) -> bool:
    """Return whether each path is one of the folders, or lies below one."""
    return all(any(map(path.is_relative_to, folders)) for path in paths)


def by_stem(files: Iterable[PurePosixPath]) -> Mapping[PurePosixPath, list[PurePosixPath]]:
    """Return goldens by the stem of their test."""
    found: dict[PurePosixPath, list[PurePosixPath]] = defaultdict(list)
    for file in files:
        if (stem := stem_of_golden(file)) is not None:
            found[stem].append(file)
    return found


def has_test_file(place: PurePosixPath, root: Path) -> bool:
    """Return whether a file lies at the place of the tests of a folder of goldens.

    ``safe`` changes odd names, so each part of the path is compared with all names there.
    """

    def lies_in(folder: Path, part: str, *below: str) -> bool:
        try:
            entries = list(folder.iterdir())
        except OSError:  # a file, or a folder that may not be read: it has no tests either
            return False
        for entry in entries:
            if below and safe(entry.name, fold_case=False) == part and lies_in(entry, *below):
                return True
            if not below and safe(entry.stem, fold_case=False) == part and entry.is_file():
                return True
        return False

    return lies_in(root, *place.relative_to(FOLDER).parts)


def needs_gpu(path: PurePosixPath, root: Path) -> bool:
    """Return whether only a run with a GPU could judge a golden, by its name or its content."""
    if _GPU_WORD.search(path.name):
        return True
    try:
        text = store.read(root / path, root) or ""
    except store.GoldenFileError:
        return False
    if path.name.endswith(SUFFIXES["numbers"]):
        from pytest_gtrainer.golden import values

        return values.devices(text) - {"cpu"} != set()
    return path.suffix == SUFFIXES["graph"] and _ON_GPU.search(text) is not None
