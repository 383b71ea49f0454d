"""What a run has shown of the goldens that its tests use: what was collected, and what each test came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

from pytest_gtrainer.golden import tree
from pytest_gtrainer.golden.naming import id_of, place_of_tests, stem_of_test


@dataclass(slots=True)
class Collection:
    """What a process has collected, before anything was deselected."""

    stems: set[PurePosixPath] = field(default_factory=set)
    empty_sets: set[PurePosixPath] = field(default_factory=set)  # stems of tests without any parameters here
    collected: set[PurePosixPath] = field(default_factory=set)  # places of files
    uncertain: set[PurePosixPath] = field(default_factory=set)  # places of files that were skipped, or failed

    def add(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            nodeid = id_of(item)
            self.stems.add(stem_of_test(nodeid))
            if _has_empty_parameters(item):
                self.empty_sets.add(stem_of_test(nodeid.partition("[")[0]))

    def add_file(self, nodeid: str, outcome: str) -> None:
        places = self.collected if outcome == "passed" else self.uncertain
        places.add(place_of_tests(nodeid))

    def owns(self, stem: PurePosixPath) -> bool:
        """Whether a golden of this stem is one of a collected test, as far as can be known."""
        without_parameters = any(stem.parent == test.parent and stem.name.startswith(f"{test.name}-")
                                 for test in self.empty_sets)  # fmt: skip
        return stem in self.stems or without_parameters or stem.parent in self.uncertain

    def unowned(self, root: Path) -> list[PurePosixPath]:
        """The goldens of which it is known that no test is theirs."""
        gone: dict[PurePosixPath, bool] = {}
        found = []
        for stem, files in tree.by_stem(tree.goldens(root)).items():
            place = stem.parent
            if self.owns(stem):
                continue
            if place not in self.collected and place not in gone:
                gone[place] = not tree.has_test_file(place, root)
            if place in self.collected or gone[place]:
                found += files
        return found


def _has_empty_parameters(item: pytest.Item) -> bool:
    reasons = (mark.kwargs.get("reason", "") for mark in item.iter_markers("skip"))
    return any(str(reason).startswith("got empty parameter set") for reason in reasons)


@dataclass(slots=True)
class Outcome:
    """What the reports of a test have told."""

    outcomes: list[tuple[str | None, str]] = field(default_factory=list)
    claims: set[str] | None = None  # paths; None: nobody has told
    lacks_devices: bool = False

    def add(self, report: pytest.TestReport) -> None:
        self.outcomes.append((report.when, report.outcome))
        told: list[str] | None = getattr(report, "gt_claims", None)
        if told is not None:
            self.claims = {*(self.claims or ()), *told}
        self.lacks_devices |= any(fact["kind"] == "skip" for fact in getattr(report, "gt_facts", ()))

    @property
    def has_ended(self) -> bool:
        return any(when == "teardown" for when, _ in self.outcomes)

    @property
    def is_complete(self) -> bool:
        """Whether the test has come to all of its checks, so that what it has not claimed it does not use."""
        phases = {when for when, _ in self.outcomes}
        passed = all(outcome == "passed" for _, outcome in self.outcomes)
        return passed and {"call", "teardown"} <= phases and self.claims is not None
