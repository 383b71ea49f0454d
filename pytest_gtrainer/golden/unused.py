"""Goldens that no test checks: found after a full run, told, failed for, or removed.
docs/goldens.md has the rules.

A golden belongs to the test that its path is made from. It is *unused* if

- its test has run and passed, and has not checked it;
- or no test that was collected is its test, although the file of its test was collected, or is
  gone.

One that only a GPU could judge is *not judged* where there is none. A run is *full* if it asks for
no part of the tests (``asks_for_a_part``) and came to its end. Under xdist each worker sends what
it has collected when it ends; what a test came to is known to all processes that its reports pass
through.
"""

import functools
import glob
import os
import re
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from pytest_gtrainer import devices
from pytest_gtrainer.environment import installed_minor
from pytest_gtrainer.facts import counted
from pytest_gtrainer.golden import store, values
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
        self._selected: set[str] = set()
        self._tests: dict[str, Outcome] = {}
        self._cut: str | None = None  # why the run has not come to its end
        self._workers_unowned: set[PurePosixPath] | None = None
        self.lines: list[str] = []  # what the run's summary says of them
        is_asked = given(config, PRUNE) and not hasattr(config, "workerinput")
        if (
            is_asked
            and (part := asks_for_a_part(config, store.goldens_below(self.root))) is not None
        ):
            raise pytest.UsageError(
                f"--gt-prune-goldens removes goldens only after a run of all tests, and {part}"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.File):
            places = self._collection.collected if report.passed else self._collection.uncertain
            places.add(place_of_tests(collector.nodeid))
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
        self._collection.add(items)  # a plugin may add tests
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected |= {item.nodeid for item in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" or report.nodeid not in self._tests:
            self._tests[report.nodeid] = Outcome()  # again: a plugin repeats the test
        self._tests[report.nodeid].add(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        told = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT)
        if error is not None or told is None:
            self._cut = f"worker {node.gateway.id} has died"
        else:
            agreed, paths = self._workers_unowned, set(map(PurePosixPath, told))
            self._workers_unowned = paths if agreed is None else agreed & paths

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output[_WORKER_OUTPUT] = [str(path) for path in self._collection.unowned(self.root)]
            return
        lacking = {
            stem_of_test(nodeid) for nodeid, test in self._tests.items() if test.lacks_devices
        }
        files = store.goldens_below(self.root) if lacking or self._mode != "ignore" else []
        if not files:
            return
        unjudged = {path for path in files if stem_of_golden(path) in lacking}
        # a project that never checks goldens may use the folder's name for something else
        are_texts = all(path.name.endswith(SUFFIXES["text"]) for path in files)
        are_ours = not are_texts or any(test.claims for test in self._tests.values())
        ended = {
            nodeid for nodeid, test in self._tests.items() if "teardown" in dict(test.outcomes)
        }
        left = self._selected - ended
        cut = self._cut or ("the run was stopped" if exitstatus in _STOPPED else None)
        cut = cut or (f"{counted(len(left), 'test')} did not run" if left else None)
        part = asks_for_a_part(self.config, files) or cut
        if part is None:
            loose = self._loose(files) - unjudged
            used = {
                os.path.realpath(self.root / path) for path in files if path not in loose
            }  # where links lead to
            has_gpu = devices.resolve(self.config).kind == "cuda"
            on_gpu = {path for path in loose if not has_gpu and needs_gpu(path, self.root)}
            unjudged |= on_gpu
            if self._mode != "ignore" and are_ours:
                unused = {path: self.root / path for path in sorted(loose - on_gpu)}
                gone = [
                    name
                    for name, at in unused.items()
                    if at.is_symlink() or os.path.realpath(at) not in used
                ]
                self._tell(session, gone)
        elif self._mode in ("fail", "prune") and are_ours:
            self.lines.append(f"unused goldens were not looked for: {part}")
        self._count("not judged", sorted(unjudged))

    def _loose(self, files: list[PurePosixPath]) -> set[PurePosixPath]:
        """Goldens without a test, and those of tests that passed without checking them; not those
        for another torch.
        """
        unowned = self._workers_unowned
        found = (
            set(self._collection.unowned(self.root)) if unowned is None else unowned & set(files)
        )
        stems = by_stem(path for path in files if torch_of(path) in (None, installed_minor()))
        for nodeid, test in self._tests.items():
            if test.claims is not None and has_passed(
                test.outcomes
            ):  # so it has come to all of its checks
                found |= {
                    path
                    for path in stems.get(stem_of_test(nodeid), ())
                    if str(path) not in test.claims
                }
        return found

    def _tell(self, session: pytest.Session, unused: list[PurePosixPath]) -> None:
        for path in [*unused] if self._mode == "prune" else ():
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
        facts = ({"kind": "golden", "outcome": outcome, "name": str(path)} for path in paths)
        self._goldens.late_facts += facts


@dataclass(slots=True)
class Collection:
    """What a process has collected, before anything was deselected."""

    stems: set[PurePosixPath] = field(default_factory=set)
    empty_sets: set[PurePosixPath] = field(
        default_factory=set
    )  # stems of tests without any parameters here
    collected: set[PurePosixPath] = field(default_factory=set)  # places of files
    uncertain: set[PurePosixPath] = field(
        default_factory=set
    )  # places of files that were skipped, or failed

    def add(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            nodeid = id_of(item)
            self.stems.add(stem_of_test(nodeid))
            skips = (str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skip"))
            if any(reason.startswith("got empty parameter set") for reason in skips):
                self.empty_sets.add(stem_of_test(nodeid.partition("[")[0]))

    def unowned(self, root: Path) -> list[PurePosixPath]:
        """The goldens of which it is known that no test is theirs."""
        has_tests = functools.cache(has_test_file)
        found = []
        for stem, files in by_stem(store.goldens_below(root)).items():
            place = stem.parent
            kin = (
                test
                for test in self.empty_sets
                if test.parent == place and stem.name.startswith(f"{test.name}-")
            )
            if stem in self.stems or any(kin) or place in self.uncertain:
                continue
            if place in self.collected or not has_tests(place, root):
                found += files
        return found


@dataclass(slots=True)
class Outcome:
    """What the reports of a test have told."""

    outcomes: set[tuple[str | None, str]] = field(default_factory=set)  # phase, outcome
    claims: set[str] | None = None  # paths; None: nobody has told
    lacks_devices: bool = False

    def add(self, report: pytest.TestReport) -> None:
        self.outcomes.add((report.when, report.outcome))
        if (told := getattr(report, "gt_claims", None)) is not None:
            self.claims = {*told}  # all so far
        self.lacks_devices |= any(
            fact["kind"] == "skip" for fact in getattr(report, "gt_facts", ())
        )


def asks_for_a_part(config: pytest.Config, goldens: Iterable[PurePosixPath]) -> str | None:
    """Return what on the command line asks for a part of the tests, or None; paths must cover
    ``testpaths`` or all goldens.
    """
    reasons = [reason for name, reason in _PARTS.items() if getattr(config.option, name, None)]
    reasons += [f"{argument} names a test" for argument in config.args if "::" in argument]
    if reasons:
        return reasons[0]
    root = config.rootpath
    starts = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    patterns: list[str] = config.getini("testpaths")
    homes = [
        root / path
        for pattern in patterns
        for path in glob.iglob(pattern, root_dir=root, recursive=True)
    ]
    if all(
        any(home.resolve().is_relative_to(start) for start in starts) for home in homes or [root]
    ):
        return None
    inside = [start for start in starts if start.is_relative_to(root.resolve())]
    places = [
        place_of_tests(s.relative_to(root.resolve()).as_posix(), is_file=s.is_file())
        for s in inside
    ]
    if all(any(golden.is_relative_to(place) for place in places) for golden in goldens):
        return None
    return f"{' '.join(config.args)} does not hold all tests"


def by_stem(files: Iterable[PurePosixPath]) -> Mapping[PurePosixPath, list[PurePosixPath]]:
    """Goldens by the test that they belong to."""
    found: dict[PurePosixPath, list[PurePosixPath]] = defaultdict(list)
    for file in files:
        if (stem := stem_of_golden(file)) is not None:
            found[stem].append(file)
    return found


def has_test_file(place: PurePosixPath, root: Path) -> bool:
    """Return whether a file lies where the tests of a folder of goldens would."""

    def lies_in(folder: Path, part: str, *below: str) -> bool:
        try:
            entries = list(folder.iterdir())
        except OSError:  # a file, or a folder that may not be read: it has no tests either
            return False
        if below:
            return any(
                lies_in(entry, *below)
                for entry in entries
                if safe(entry.name, fold_case=False) == part
            )
        return any(
            entry.is_file() and safe(entry.stem, fold_case=False) == part for entry in entries
        )

    return lies_in(root, *place.relative_to(FOLDER).parts)


def needs_gpu(path: PurePosixPath, root: Path) -> bool:
    """Return whether only a run with a GPU could judge a golden: its devices or environments say
    so, or its name.
    """
    if _GPU_WORD.search(path.name):
        return True
    try:
        text = store.read(root / path, root) or ""
    except store.GoldenFileError:
        return False
    if path.name.endswith(SUFFIXES["numbers"]):
        return values.devices(text) - {"cpu"} != set()
    return path.suffix == SUFFIXES["graph"] and _ON_GPU.search(text) is not None
