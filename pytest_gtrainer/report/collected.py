"""Tests of a run, put together from the reports that reach the process that ends the run."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_gtrainer.facts import Fact, of_kind
from pytest_gtrainer.numerics.verdict import page_order
from pytest_gtrainer.worlds import ranks_text

ORDER = ("failed", "error", "xpassed", "passed", "xfailed", "skipped")
"""Outcomes in the order of the page: failures first."""
SHOWN = (
    "graph_text",
    "pass",
    "schedule",
    "memory",
    "layout",
    "comparison",
    "calls",
    "golden_difference",
    "golden_text",
    "imported",
    "not_shown",
)
"""Kinds of the facts that only the report reads; ``witness`` explains them."""
_ONCE_A_TEST = ("graph_text", "schedule", "memory", "imported")
_MILDEST_FIRST = (
    "equal on this rank",  # of a control: one rank that differs is enough
    "equal",
    "held",
    "different as required",
    "refused",
    "not claimed",
    "not judged",
    "proves nothing",
    "unverified",
    "different",
    "UNKNOWN",
    "broken",
    "error",
    "FAILED",
)
_FOUND = ("outcome", "tensors", "equal", "result", "why", "says", "graph")
"""Fields of a fact that say what a check found; the others say what was checked."""


@dataclass(slots=True)
class Test:
    """One test: its reports in order, and the facts that only the report reads, by rank."""

    __test__ = False

    name: str
    reports: list[pytest.TestReport] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    shown: dict[int, list[Fact]] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        """Add the report of a phase; begin anew at a second setup, of a test that runs again."""
        # Of a test that is repeated, the first failure stays.
        if getattr(report, "gt_repetition", 1) > 1 and self.outcome in ("failed", "error"):
            return
        if report.when == "setup" and any(known.when == "setup" for known in self.reports):
            self.reports, self.facts = [], []
            # One witness watches all runs of a test, and sends each graph once, in the first.
            for rank, sent in self.shown.items():
                self.shown[rank] = of_kind(sent, *_ONCE_A_TEST)

        self.reports.append(report)
        own: list[Fact] = getattr(report, "gt_facts", [])
        self.facts += own
        by_rank: Mapping[Any, list[Fact]] | None = getattr(report, "gt_shown", None)
        if by_rank is not None:
            # Ranks have sent their own; goldens are judged in the pytest process, for all of them.
            own = of_kind(own, "golden_difference", "golden_text")
        for rank, sent in [(0, select_shown(own)), *(by_rank or {}).items()]:
            self.shown.setdefault(int(rank), []).extend(sent)

    @property
    def outcome(self) -> str:
        """The outcome: failed, error (outside the call), xpassed, xfailed, skipped or passed.

        A subtest that fails makes its test fail. Its skip or expected failure is not the test's.
        """
        failed = {report.when for report in self.reports if report.failed}
        if "call" in failed:
            return "failed"
        if failed:
            return "error"
        outcome = "passed"
        for report in self.reports:
            # By exact type: pytest's SubtestReport is a subclass, and sent as a report of the call.
            if type(report) is pytest.TestReport:
                if hasattr(report, "wasxfail"):
                    return "xfailed" if report.skipped else "xpassed"
                if report.skipped:
                    outcome = "skipped"

        return outcome

    @property
    def world(self) -> str:
        """The worlds that the test ran in, in words."""
        return ", ".join(dict.fromkeys(map(world_label, of_kind(self.facts, "world"))))

    @property
    def message(self) -> str:
        """The message of the failure, or ""."""
        for report in self.reports:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                return report.longreprtext if crash is None else str(crash.message)
        return ""

    @property
    def headline(self) -> str:
        """The first line of the failure, as in the terminal's short summary, or ""."""
        return self.message.strip().partition("\n")[0][:300]

    def find(self, kind: str) -> list[Fact]:
        """Return the shown facts of a kind, of the lowest rank that has any.

        Only one rank sends graphs, since a graph is the same on all ranks but for the rank's
        number.
        """
        for rank in sorted(self.shown):
            found = of_kind(self.shown[rank], kind)
            if found:
                return found
        return []

    def comparisons(self) -> list[dict[str, Any]]:
        """Return the comparisons of all ranks; the n-th of one subject of each rank are merged.

        The first difference is that of the smallest step, then rank.
        """
        groups: dict[tuple[Any, ...], list[Fact]] = {}
        for _, sent in sorted(self.shown.items()):
            seen: Counter[Any] = Counter()
            for fact in of_kind(sent, "comparison"):
                subject = fact.get("what"), fact.get("must_differ")
                seen[subject] += 1
                groups.setdefault((*subject, seen[subject]), []).append(fact)
        return [_merge_comparisons(parts) for parts in groups.values()]

    def verdicts_alone(self) -> list[str]:
        """Return the names of verdicts of which no numbers are kept, such as those of proofs.

        Two runs with the same verdicts may have had other numbers.
        """
        kept = {
            fact.get("what") for sent in self.shown.values() for fact in of_kind(sent, "comparison")
        }
        names = [fact.get("what") for fact in of_kind(self.facts, "verdict")]
        return [name or "a check" for name in dict.fromkeys(names) if name not in kept]


def _merge_comparisons(parts: list[Fact]) -> dict[str, Any]:
    first = min(parts, key=lambda part: (part["first"] is None, (part["first"] or [])[:2]))
    if first["first"] is None:
        first = max(parts, key=lambda part: severity(part.get("outcome", "")))
    merged: dict[str, Any] = {**first, "tensors": 0, "more": 0}
    merged |= {"differing": [], "actual": [], "expected": [], "values": []}
    for part in parts:
        merged["values"] += part.get("values", ())  # by rank
        for name in ("tensors", "more", "differing"):
            merged[name] += part[name]
        for side in ("actual", "expected"):
            merged[side] += map(tuple, part[side])

    for side in ("actual", "expected"):
        merged[side].sort(key=lambda row: page_order(*row[:3]))
    return merged


def world_label(fact: Fact) -> str:
    """Return a world in words, from its fact.

    >>> world_label({"world": "ranks", "size": 8, "backend": "gloo", "device": "cpu"})
    'ranks(8, gloo on cpu)'
    """
    if fact["world"] == "fake":
        return f"fake({fact['size']})"
    return f"{fact['world']}({fact['size']}, {fact['backend']} on {fact['device']})"


def select_shown(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts that only the report reads."""
    return of_kind(facts, *SHOWN)


def severity(outcome: str) -> tuple[int, int]:
    """Return a key that sorts the outcomes of one check on several ranks, the mildest first.

    >>> sorted(["different", "equal (not finite)", "equal", "unverified"], key=severity)
    ['equal', 'equal (not finite)', 'unverified', 'different']
    """
    known = [each for each in _MILDEST_FIRST if outcome.startswith(each)]
    if not known or outcome.endswith("control failed"):
        return len(_MILDEST_FIRST), len(outcome)
    # The longest: "different as required" begins with "different", too.
    return _MILDEST_FIRST.index(max(known, key=len)), len(outcome)


def merge_facts(by_rank: Mapping[int, Sequence[Fact]]) -> list[Fact]:
    """Return the facts of all ranks as those of one test, without those that only the page reads.

    The n-th fact of one subject is one fact on all ranks. If the ranks found different outcomes,
    the worst counts, and it names its ranks.

    >>> equal = {"kind": "verdict", "outcome": "equal", "what": "loss"}
    >>> merge_facts({0: [equal], 1: [{**equal, "outcome": "unverified"}], 2: [equal]})
    [{'kind': 'verdict', 'outcome': 'unverified on rank 1', 'what': 'loss'}]
    """
    groups: dict[tuple[str, int], dict[int, Fact]] = {}
    seen: Counter[tuple[int, str]] = Counter()
    for rank, facts in sorted(by_rank.items()):
        for fact in facts:
            if fact["kind"] not in SHOWN:
                checked = {name: value for name, value in fact.items() if name not in _FOUND}
                subject = json.dumps(checked, sort_keys=True, default=str)
                seen[rank, subject] += 1
                groups.setdefault((subject, seen[rank, subject]), {})[rank] = fact
    return list(map(_worst, groups.values()))


def _worst(by_rank: Mapping[int, Fact]) -> Fact:
    """Return the worst of one fact on several ranks."""
    field = "result" if "result" in next(iter(by_rank.values())) else "outcome"
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, fact in by_rank.items():
        ranks_of[str(fact.get(field, ""))].append(rank)
    worst = max(ranks_of, key=severity)
    ranks = ranks_of[worst]
    fact = by_rank[ranks[0]]
    if len(ranks) < len(by_rank) and field == "outcome" and worst != "different as required":
        return {**fact, field: f"{worst} on {ranks_text(ranks)}"}
    return fact
