"""One report per phase from the reports of all ranks; the same for every launcher of ranks.

A rank's *verdict* is what its test came to. Failed wins over everything; xfailed over passed;
a skip must be agreed. The *headline* of a failure is the earliest event in time, unless
exceptions say themselves where the fault lies (``gt_origin``): then the smallest of those.
A rank that only failed because another one had left the collective is a *consequence*: one
line, never the headline.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from pytest_gtrainer.ranks.outcome import Incident, Outcome, by_value, rank_list

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
RankReports = Mapping[Phase, pytest.TestReport]


class Verdict(enum.Enum):
    """What a test came to on one rank."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED_STRICT = "passed against a strict xfail"

    def __str__(self) -> str:
        return self.value


def verdict_of(reports: RankReports) -> Verdict:
    """The verdict of a rank from its phases."""
    failed = [report for report in reports.values() if report.failed]
    if failed:
        strict = all(str(report.longrepr).startswith("[XPASS(strict)]") for report in failed)
        return Verdict.XPASSED_STRICT if strict else Verdict.FAILED
    for report in reports.values():
        if report.skipped:
            return Verdict.XFAILED if hasattr(report, "wasxfail") else Verdict.SKIPPED
    return Verdict.PASSED


def merge(item: pytest.Item, outcome: Outcome, reports: Mapping[int, RankReports]) -> list[pytest.TestReport]:
    """The reports of a test that ran on ranks, in the order of their phases."""
    return _Merge(item, outcome, reports).reports()


def earliest_incident(outcome: Outcome) -> Incident | None:
    """The first incident that is not a mere consequence."""
    causes = [incident for incident in outcome.incidents if not incident.is_consequence]
    return min(causes, key=lambda incident: incident.time, default=None)


@dataclass(slots=True)
class _Event:
    """Something that makes the test fail: a rank's exception, or an incident."""

    time: float
    rank: int | None
    phase: Phase
    text: str
    origin: tuple[Any, ...] | None = None
    report: pytest.TestReport | None = None
    incident: Incident | None = None


class _Merge:
    def __init__(self, item: pytest.Item, outcome: Outcome, reports: Mapping[int, RankReports]) -> None:
        self.item, self.outcome, self.by_rank = item, outcome, reports
        self.verdicts = {rank: verdict_of(phases) for rank, phases in reports.items()}
        self.events = sorted(self._events(), key=lambda event: event.time)

    def reports(self) -> list[pytest.TestReport]:
        if not self.events and not self.by_rank:
            self.events = [self._without_reports()]
        if self.events:
            return self._failed(self._headline())
        xfailed = self._ranks_with(Verdict.XFAILED)
        if xfailed:
            return self._like(xfailed[0])
        text = self._disagreement()
        if text is not None:
            return self._failed(_Event(0.0, None, "call", text))
        if self._ranks_with(Verdict.XPASSED_STRICT):
            return self._like(self._ranks_with(Verdict.XPASSED_STRICT)[0])
        return self._like(min(self.by_rank))

    # --- what happened ----------------------------------------------------------------------

    def _events(self) -> Iterable[_Event]:
        for incident in self.outcome.incidents:
            if not incident.is_consequence:
                yield _Event(incident.time, incident.rank, "call", incident.text, incident=incident)
        for rank, verdict in self.verdicts.items():
            if verdict is Verdict.FAILED and not self.outcome.is_consequence(rank):
                yield from self._failures(rank)

    def _failures(self, rank: int) -> Iterable[_Event]:
        """A rank's failed phases; what it told while it ran is about the first."""
        told = self.outcome.raised.get(rank)
        for phase, report in self.by_rank[rank].items():
            if report.failed:
                time = told.time if told else float("inf")
                origin = told.origin if told and phase == "call" else None
                yield _Event(time, rank, phase, self._summary(rank), origin, report)
                told = None

    def _without_reports(self) -> _Event:
        """No rank came to a report, and each was waiting for another: what was told first."""
        raised = min(self.outcome.raised.items(), key=lambda told: told[1].time, default=None)
        if raised is not None:
            rank, told = raised
            return _Event(told.time, rank, "call", f"rank {rank} raised {told.summary}")
        first = min(self.outcome.incidents, key=lambda incident: incident.time, default=None)
        text = first.text if first is not None else "no rank has given a report"
        return _Event(0.0, first.rank if first is not None else None, "call", text, incident=first)

    def _headline(self) -> _Event:
        with_origin = [event for event in self.events if event.origin is not None]
        if with_origin and self.events[0].phase == "call" and self.events[0].incident is None:
            return _smallest_origin(with_origin)
        return self.events[0]

    def _ranks_with(self, *verdicts: Verdict) -> list[int]:
        return sorted(rank for rank, verdict in self.verdicts.items() if verdict in verdicts)

    def _disagreement(self) -> str | None:
        """Why a test without a failure of its own fails all the same: skip here, pass there."""
        if len(set(self.verdicts.values())) <= 1 or set(self.verdicts.values()) == {
            Verdict.PASSED, Verdict.XPASSED_STRICT,
        }:  # fmt: skip
            return None
        said = {rank: self._verdict_line(rank) for rank in self.verdicts}
        return f"the ranks do not agree: {by_value(said)}"

    def _verdict_line(self, rank: int) -> str:
        verdict = self.verdicts[rank]
        if verdict is Verdict.FAILED:
            return self._summary(rank)
        if verdict is Verdict.SKIPPED:
            reason = next(report.longrepr for report in self.by_rank[rank].values() if report.skipped)
            said = str(reason[-1]) if isinstance(reason, tuple) else str(reason)
            return f"skipped: {said.removeprefix('Skipped: ')}"
        return str(verdict)

    def _summary(self, rank: int) -> str:
        """A rank's failure in one line."""
        told = self.outcome.raised.get(rank)
        if told is None:
            failed = next(report for report in self.by_rank[rank].values() if report.failed)
            return str(failed.longrepr).strip().splitlines()[-1][:300]
        if self.outcome.is_consequence(rank):
            return f"waited in {told.waiting_in}"
        return told.summary

    # --- the reports --------------------------------------------------------------------------

    def _like(self, base: int) -> list[pytest.TestReport]:
        """The reports of one rank, with the output of all."""
        return [self._with_output(report, phase) for phase, report in self.by_rank[base].items()]

    def _failed(self, headline: _Event) -> list[pytest.TestReport]:
        failure = self._failure_report(headline)
        merged = []
        for phase in PHASES:
            others = [event for event in self.events if event.phase == phase and event.report is not None]
            if phase == headline.phase:
                merged.append(failure)
            elif others:
                merged.append(self._failure_report(others[0]))
            elif not (phase == "call" and headline.phase == "setup"):
                merged.append(self._passed(phase))
        return [self._with_output(report, report.when) for report in merged]

    def _failure_report(self, headline: _Event) -> pytest.TestReport:
        if headline.report is not None:
            report = headline.report
            _name_rank(report, headline.rank)
        else:
            report = self._made(headline.phase, "failed", headline.text)
        _append(report, "ranks", self._other_ranks(headline))
        for (title, text), ranks in self._details().items():
            _append(report, f"{title} [{rank_list(ranks)}]", text)
        return report

    def _details(self) -> dict[tuple[str, str], list[int]]:
        """The stacks and last outputs, equal texts once."""
        found: dict[tuple[str, str], list[int]] = {}
        for incident in self.outcome.incidents:
            for detail in incident.details if incident.rank is not None else ():
                found.setdefault(detail, []).append(incident.rank)  # type: ignore[arg-type]
        return found

    def _other_ranks(self, headline: _Event) -> str:
        """A line for each thing that the ranks did, beginning with the headline's."""
        said = {rank: self._verdict_line(rank) for rank in self.verdicts}
        for incident in self.outcome.incidents:
            if incident.rank is not None:
                said[incident.rank] = incident.text.removeprefix(f"rank {incident.rank} ")
        first = said.get(headline.rank) if headline.rank is not None else None
        lines = {text: rank_list([rank for rank in said if said[rank] == text]) for text in said.values()}
        ordered = sorted(lines, key=lambda text: (text != first, min(r for r in said if said[r] == text)))
        return "\n".join(f"{lines[text]}: {text}" for text in ordered)

    def _passed(self, phase: Phase) -> pytest.TestReport:
        """A phase that did not fail by itself: a rank's report of it if one passed, else an empty one."""
        for rank in sorted(self.by_rank):
            report = self.by_rank[rank].get(phase)
            if report is not None and report.passed:
                return report
        return self._made(phase, "passed", None)

    def _made(
        self, phase: Phase, outcome: Literal["passed", "failed"], longrepr: str | None
    ) -> pytest.TestReport:
        keywords: Mapping[str, Literal[1]] = dict.fromkeys(self.item.keywords, 1)
        return pytest.TestReport(self.item.nodeid, self.item.location, keywords, outcome, longrepr, phase)

    def _with_output(self, report: pytest.TestReport, phase: Phase) -> pytest.TestReport:
        """Add what every rank wrote in that phase, equal texts once."""
        writers: dict[tuple[str, str], list[int]] = {}
        phases = [(rank, self.by_rank[rank].get(phase)) for rank in sorted(self.by_rank)]
        for rank, other in phases:
            for section in other.sections if other is not None else ():
                writers.setdefault(section, []).append(rank)
        report.sections = [
            (f"{title} [{rank_list(ranks)}]", text) for (title, text), ranks in writers.items()
        ]
        report.duration = max((other.duration for _, other in phases if other is not None), default=0.0)
        return report


def _smallest_origin(events: list[_Event]) -> _Event:
    """The first of ``events``, which are in the order of time, with the smallest origin."""
    try:
        return min(events, key=lambda event: event.origin or ())
    except TypeError:  # origins that do not compare
        return events[0]


def _name_rank(report: pytest.TestReport, rank: int | None) -> None:
    """Put the rank before the message that the short summary shows."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and rank is not None:
        crash.message = f"[rank {rank}] {crash.message}"


def _append(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a titled text to a failure; unlike captured output it is always shown."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n\n--- {title} ---\n{text}"
