"""From what ranks have said of a test to the reports that pytest gets; the same for every launcher of ranks.

What a test came to on one rank is its *result*. Failed wins over all, xfailed over passed; a skip must be agreed.
The *headline* of a failure is the earliest event in time (of ranks that fail alike within moments the lowest), unless
exceptions say themselves where the fault lies (``gt_origin``): then the smallest of those. A rank that only failed
because another one had left the collective is a *consequence*: one line, never the headline.
"""

import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import pytest

from pytest_gtrainer import devices, options
from pytest_gtrainer.marker import id_of
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.watch import RanksOutcome
from pytest_gtrainer.report.collected import shown_only
from pytest_gtrainer.worlds import by_value, ranks_by, ranks_text

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
RankReports = Mapping[Phase, pytest.TestReport]

# The plugins that compare what the ranks have sent with their reports, and the attribute it is in.
JUDGES = {"gtrainer-goldens": "gt_goldens", "gtrainer-inline": "gt_inline"}
CARRIED = (*JUDGES.values(), "gt_facts")
FIELDS = ("nodeid", "location", "keywords", "outcome", "longrepr", "when", "sections", "duration", *CARRIED)


def reports_of(item: pytest.Item, outcome: RanksOutcome) -> list[pytest.TestReport]:
    """The reports of a test that ran on ranks, in the order of their phases; its warnings are given to pytest."""
    _repeat_warnings(item, outcome)
    reports = {rank: _rank_reports(item, answer) for rank, answer in outcome.done.items() if answer.reports}
    merged = _Merge(item, outcome, reports).reports()
    if not reports and "gt_world" in getattr(item, "fixturenames", ()):  # nobody has lived to tell
        found = devices.resolve(item.config)
        world = {"world": "ranks", "size": outcome.size, "device": found.kind, "backend": found.backend}
        merged[-1].gt_facts = [{"kind": "world", **world}]  # type: ignore[attr-defined]
    _judge(item, merged, reports)
    _tell_left_behind(item, outcome, merged)
    # what every rank has told for the report of the run, not only the rank whose report is shown
    shown = {rank: shown_only(facts) for rank, facts in _claims(reports, "gt_facts").items()}
    for report in merged:
        report.gt_shown = shown if report is merged[-1] else {}  # type: ignore[attr-defined]
    return merged


def passes(item: pytest.Item, outcome: RanksOutcome) -> bool:
    """Return whether a test passed on all ranks; gives nothing to pytest, and judges no goldens."""
    reports = {rank: _rank_reports(item, answer) for rank, answer in outcome.done.items() if answer.reports}
    return not any(report.failed for report in _Merge(item, outcome, reports).reports())


def _repeat_warnings(item: pytest.Item, outcome: RanksOutcome) -> None:
    """Give the ranks' warnings to pytest as if they came from here, equal ones once."""
    for record in dict.fromkeys(record for answer in outcome.done.values() for record in answer.warnings):
        module, name = record.category
        found = getattr(sys.modules.get(module), name, None)
        category = found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
        message = warnings.WarningMessage(record.text, category, record.filename, record.lineno)
        told = {"when": record.when, "nodeid": record.nodeid, "location": record.location}
        item.ihook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **told})


def _rank_reports(item: pytest.Item, answer: wire.ItemDone) -> RankReports:
    """One report a phase. A rank sends more where the test has subtests: the first that failed counts."""
    restored: dict[Phase, pytest.TestReport] = {}
    for told in answer.reports:
        data = {**told, "nodeid": item.nodeid}
        report: Any = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        known = restored.get(report.when)
        kept = known if known is not None and known.failed else report
        for name in CARRIED:
            setattr(kept, name, [*getattr(known, name, []), *getattr(report, name, [])])
        restored[report.when] = kept
    for phase, kept in restored.items():
        if type(kept) is not pytest.TestReport:  # pytest counts its kind for subtests apart, and not as a failed test
            restored[phase] = pytest.TestReport(**{name: getattr(kept, name) for name in FIELDS})
    return {phase: restored[phase] for phase in PHASES if phase in restored}


def _judge(item: pytest.Item, merged: list[pytest.TestReport], reports: Mapping[int, RankReports]) -> None:
    """Let the plugins of goldens and inline expectations compare what the ranks claim; an objection fails the call."""
    call: Any = next((report for report in merged if report.when == "call" and report.passed), None)
    if call is None:
        return
    objections = [*controls_that_never_differ(_claims(reports, "gt_facts").values())]
    for plugin, attribute in JUDGES.items():
        judge = getattr(item.config.pluginmanager.getplugin(plugin), "judge_ranks", None)
        objection = judge(item, _claims(reports, attribute)) if judge is not None else None
        objections += [] if objection is None else [objection]
    if objections:
        call.outcome, call.longrepr = "failed", "\n\n".join(objections)
    # Some expectations may be met by some ranks only; they are written where the run ends.
    every = [claim for claimed in _claims(reports, JUDGES["gtrainer-inline"]).values() for claim in claimed]
    call.gt_inline = [claim for n, claim in enumerate(every) if claim not in every[:n]]


def controls_that_never_differ(told: Iterable[Iterable[Mapping[str, Any]]]) -> Iterator[str]:
    """What to say of each control run, the n-th of every rank as one, that is equal on all ranks."""
    for nth in zip_longest(*([fact for fact in each if fact["kind"] == "control"] for each in told)):
        parts = [fact for fact in nth if fact is not None]
        if all(fact["equal"] for fact in parts):
            what = f"{parts[0]['what']}: " if parts[0]["what"] else ""
            wrong = "the control run is equal on all ranks: this check cannot fail"
            yield f"{what}{wrong}; the mistake changes no bit here"


def _claims(reports: Mapping[int, RankReports], attribute: str) -> dict[int, list[Any]]:
    """What each rank has sent with its reports of all phases."""
    return {
        rank: [claim for report in phases.values() for claim in getattr(report, attribute, ())]
        for rank, phases in reports.items()
    }


def _tell_left_behind(item: pytest.Item, outcome: RanksOutcome, merged: list[pytest.TestReport]) -> None:
    """Add what the ranks say was left to the last of the merged reports, as ``--gt-leaked-resources`` has it."""
    left = dict.fromkeys(what for answer in outcome.done.values() for what in answer.left)
    reaction = options.get(item.config, "leaked-resources") if left else "ignore"
    if reaction == "ignore":
        return
    last: Any = merged[-1]
    facts = [{"kind": "left", "test": item.nodeid, "what": what} for what in left]
    last.gt_facts = [*getattr(last, "gt_facts", []), *facts]
    if reaction == "fail" and not last.failed:
        last.outcome = "failed"
        advice = "destroy the groups that it makes, and drop the references to tensors on the GPU"
        last.longrepr = f"the test has left {', '.join(left)} behind: {advice}"


STRICT = "passed against a strict xfail"


def result_of(reports: RankReports) -> str:
    """What a test came to on one rank: passed, failed, skipped, xfailed, or ``STRICT``."""
    if failed := [report for report in reports.values() if report.failed]:
        return STRICT if all(str(report.longrepr).startswith("[XPASS(strict)]") for report in failed) else "failed"
    skipped = ["xfailed" if hasattr(report, "wasxfail") else "skipped" for report in reports.values() if report.skipped]
    return skipped[0] if skipped else "passed"


class _Event(NamedTuple):
    """Something that makes the test fail: a rank's exception, or, without a report, an incident."""

    time: float
    rank: int | None
    phase: Phase
    text: str
    origin: tuple[Any, ...] | None = None
    report: pytest.TestReport | None = None


class _Merge:
    """The reports of a test that ran on ranks, in the order of their phases, from those of each rank."""

    def __init__(self, item: pytest.Item, outcome: RanksOutcome, reports: Mapping[int, RankReports]) -> None:
        self.item, self.outcome, self.by_rank = item, outcome, dict(sorted(reports.items()))
        self.results = {rank: result_of(phases) for rank, phases in self.by_rank.items()}
        incidents = [_Event(incident.time, incident.rank, "call", incident.text) for incident in outcome.causes()]
        self.events = sorted([*incidents, *self._failures()], key=lambda event: event.time)  # the lowest rank first

    def reports(self) -> list[pytest.TestReport]:
        if not self.events and not self.by_rank:
            # no rank came to a report, and each was waiting for another: what was told first
            raised = self.outcome.raised.items()
            told = [_Event(told.time, rank, "call", f"rank {rank} raised {told.summary}") for rank, told in raised]
            told = told or [_Event(each.time, each.rank, "call", each.text) for each in self.outcome.incidents]
            none = _Event(0.0, None, "call", "no rank has given a report")
            self.events = [min(told, key=lambda event: event.time, default=none)]
        if self.events:
            return self._failed(self._headline())
        found = set(self.results.values())
        if "xfailed" not in found and len(found) > 1 and found != {"passed", STRICT}:
            said = {rank: self._result_line(rank) for rank in self.results}  # skip here, pass there
            return self._failed(_Event(0.0, None, "call", f"the ranks do not agree: {by_value(said)}"))
        shown = next(result for result in ("xfailed", STRICT, *found) if result in found)
        like = next(rank for rank, result in self.results.items() if result == shown)
        return [self._with_output(report, phase) for phase, report in self.by_rank[like].items()]

    def _failures(self) -> Iterable[_Event]:
        """The failed phases of ranks; what a rank told while it ran is about the first."""
        for rank, result in self.results.items():
            told = self.outcome.raised.get(rank)
            if result != "failed" or self.outcome.is_consequence(rank):
                continue
            for phase, report in self.by_rank[rank].items():
                if report.failed:
                    time = self.outcome.failed_at(rank) if told else float("inf")
                    origin = told.origin if told and phase == "call" else None
                    yield _Event(time, rank, phase, self._summary(rank), origin, report)
                    told = None

    def _headline(self) -> _Event:
        first, with_origin = self.events[0], [event for event in self.events if event.origin is not None]
        if with_origin and first.phase == "call" and first.report is not None:
            try:
                return min(with_origin, key=lambda event: event.origin or ())
            except TypeError:  # origins that do not compare
                return with_origin[0]
        return first

    def _result_line(self, rank: int) -> str:
        result = self.results[rank]
        if result == "failed":
            return self._summary(rank)
        if result == "skipped":
            reason = next(report.longrepr for report in self.by_rank[rank].values() if report.skipped)
            said = str(reason[-1]) if isinstance(reason, tuple) else str(reason)
            return f"skipped: {said.removeprefix('Skipped: ')}"
        return result

    def _summary(self, rank: int) -> str:
        if (told := self.outcome.raised.get(rank)) is None:
            failed = next(report for report in self.by_rank[rank].values() if report.failed)
            return textwrap.shorten(str(failed.longrepr).strip().splitlines()[-1], 300, placeholder=" …")
        if self.outcome.is_consequence(rank):
            return f"waited in {told.waiting_in}"
        return told.summary

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
                # it did not fail by itself: a rank's report of it if one passed, else an empty one
                told = (phases[phase] for phases in self.by_rank.values() if phase in phases)
                passed = next((report for report in told if report.passed), None)
                merged.append(passed or self._made(phase, "passed", None))
        return [self._with_output(report, report.when) for report in merged]

    def _failure_report(self, headline: _Event) -> pytest.TestReport:
        if headline.report is not None:
            report = headline.report
            crash: Any = getattr(report.longrepr, "reprcrash", None)
            if crash is not None and headline.rank is not None:  # it is what the short summary shows
                crash.message = f"[rank {headline.rank}] {crash.message}"
        else:
            report = self._made(headline.phase, "failed", headline.text)
        _append(report, "ranks", self._other_ranks(headline))
        incidents = self.outcome.incidents
        told = [(each.rank, detail) for each in incidents if each.rank is not None for detail in each.details]
        for (title, text), ranks in ranks_by(told).items():  # stacks and last outputs, equal texts once
            _append(report, f"{title} [{ranks_text(ranks)}]", text)
        if any("did not end within" in each.text for each in incidents):
            slow = "If the test is only slow: --gt-timeout=SECONDS, or timeout= of its marker."
            look = f'To look inside, put breakpoint() before that line and run\npytest -n 0 "{id_of(self.item)}"'
            _append(report, "next", f"{slow} {look}")
        return report

    def _other_ranks(self, headline: _Event) -> str:
        """A line for each thing that the ranks did, beginning with the headline's."""
        said = {rank: self._result_line(rank) for rank in self.results}
        for incident in self.outcome.incidents:
            if incident.rank is not None:
                said[incident.rank] = incident.text.removeprefix(f"rank {incident.rank} ")
        first = said.get(headline.rank) if headline.rank is not None else None
        ordered = sorted(ranks_by(said.items()).items(), key=lambda line: (line[0] != first, min(line[1])))
        return "\n".join(f"{ranks_text(ranks)}: {text}" for text, ranks in ordered)

    def _made(self, phase: Phase, outcome: Literal["passed", "failed"], longrepr: str | None) -> pytest.TestReport:
        keywords: Mapping[str, Literal[1]] = dict.fromkeys(self.item.keywords, 1)
        return pytest.TestReport(self.item.nodeid, self.item.location, keywords, outcome, longrepr, phase)

    def _with_output(self, report: pytest.TestReport, phase: Phase) -> pytest.TestReport:
        """Add what every rank wrote in that phase, equal texts once."""
        others = {rank: phases[phase] for rank, phases in self.by_rank.items() if phase in phases}
        writers = ranks_by((rank, section) for rank, other in others.items() for section in other.sections)
        report.sections = [(f"{title} [{ranks_text(ranks)}]", text) for (title, text), ranks in writers.items()]
        in_call = self.outcome.spent if phase == "call" else 0.0
        report.duration = max((other.duration for other in others.values()), default=in_call)
        return report


def _append(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a titled text to a failure; unlike captured output it is always shown."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n\n--- {title} ---\n{text}"
