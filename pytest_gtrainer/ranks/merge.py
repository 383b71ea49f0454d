"""From what ranks have said of a test to the reports that pytest gets; the same for every launcher
of ranks.

What a test came to on one rank is its *result*; ``shown_rank`` says which result is the test's.
What the parent finds wrong afterwards, a golden for one, is an *objection*: see ``objections``.
Outcome, exit status, JUnit file, summary and page all follow from the reports made here.

The *headline* of a failure is the earliest event in time (of ranks that fail alike within moments
the lowest), unless exceptions say themselves where the fault lies (``gt_origin``): then the
smallest of those. A rank that only failed because another one had left the collective is a
*consequence*: one line, never the headline.
"""

import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import pytest

from pytest_gtrainer import devices, options
from pytest_gtrainer.marker import id_of
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.objections import (
    JUDGES,
    Objection,
    Xfail,
    are_expected,
    conclude,
    objections_of,
)
from pytest_gtrainer.ranks.watch import RanksOutcome
from pytest_gtrainer.report.collected import select_shown
from pytest_gtrainer.worlds import by_value, ranks_by, ranks_text

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
RankReports = Mapping[Phase, pytest.TestReport]
Subtests = Mapping[int, list[pytest.TestReport]]  # the reports of subtests, by rank

CARRIED = (*JUDGES.values(), "gt_facts")
FIELDS = (
    "nodeid",
    "location",
    "keywords",
    "outcome",
    "longrepr",
    "when",
    "sections",
    "duration",
    *CARRIED,
)


def reports_of(item: pytest.Item, outcome: RanksOutcome) -> list[pytest.TestReport]:
    """The reports of a test that ran on ranks, in the order of their phases; its warnings are given
    to pytest.

    Reports of subtests stand before the report of the call, as pytest has them.
    """
    _repeat_warnings(item, outcome)
    merge = _merge_of(item, outcome)
    reports = merge.by_rank
    merged = merge.reports()
    if not reports and "gt_world" in getattr(item, "fixturenames", ()):  # nobody has lived to tell
        found = devices.resolve(item.config)
        world = {
            "world": "ranks",
            "size": outcome.size,
            "device": found.kind,
            "backend": found.backend,
        }
        merged[-1].gt_facts = [{"kind": "world", **world}]  # type: ignore[attr-defined]
    # What every rank reports for the page of the run, not only the rank whose report is shown. Read
    # before the parent judges: what it finds is added to one of these reports.
    shown = {rank: select_shown(facts) for rank, facts in _claims(reports, "gt_facts").items()}
    objections = _judge(item, merged, merge)
    _tell_left_behind(item, outcome, merged)
    if "setup" in objections:  # without ranks the test would have ended there
        merged = [report for report in merged if report.when != "call"]
    else:
        merged = [*merge.subtest_reports(), *merged]
        merged.sort(key=lambda report: PHASES.index(report.when))
    for report in merged:
        report.gt_shown = shown if report is merged[-1] else {}  # type: ignore[attr-defined]
    return merged


def passes(item: pytest.Item, outcome: RanksOutcome) -> bool:
    """Return whether a test passed on all ranks; gives nothing to pytest, and judges no goldens."""
    return not any(report.failed for report in _merge_of(item, outcome).reports())


def _merge_of(item: pytest.Item, outcome: RanksOutcome) -> "_Merge":
    """Read what the ranks have reported of a test."""
    reports: dict[int, RankReports] = {}
    subtests: dict[int, list[pytest.TestReport]] = {}
    in_subtests: dict[int, Counter[str]] = {}
    for rank, answer in outcome.done.items():
        if answer.reports:
            reports[rank], subtests[rank], in_subtests[rank] = _rank_reports(item, answer)
    return _Merge(item, outcome, reports, subtests, in_subtests)


def _repeat_warnings(item: pytest.Item, outcome: RanksOutcome) -> None:
    """Give the ranks' warnings to pytest as if they came from here, equal ones once."""
    for record in dict.fromkeys(
        record for answer in outcome.done.values() for record in answer.warnings
    ):
        module, name = record.category
        found = getattr(sys.modules.get(module), name, None)
        category = found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
        message = warnings.WarningMessage(record.text, category, record.filename, record.lineno)
        told = {"when": record.when, "nodeid": record.nodeid, "location": record.location}
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, **told}
        )


def _rank_reports(
    item: pytest.Item, answer: wire.ItemDone
) -> tuple[RankReports, list[pytest.TestReport], Counter[str]]:
    """One report a phase, the reports of subtests, and how many claims of the call came with these,
    by attribute.

    The first subtest that failed stands for the call.
    """
    restored: dict[Phase, pytest.TestReport] = {}
    subtests = []
    in_subtests: Counter[str] = Counter()
    for told in answer.reports:
        data = {**told, "nodeid": item.nodeid}
        report: Any = item.config.hook.pytest_report_from_serializable(
            config=item.config, data=data
        )
        if type(report) is not pytest.TestReport:
            subtests.append(report)
            in_subtests.update({name: len(getattr(report, name, [])) for name in CARRIED})
        known = restored.get(report.when)
        kept = known if known is not None and known.failed else report
        for name in CARRIED:
            setattr(kept, name, [*getattr(known, name, []), *getattr(report, name, [])])
        restored[report.when] = kept
    for phase, kept in restored.items():
        if (
            type(kept) is not pytest.TestReport
        ):  # pytest counts its kind for subtests apart, and not as a failed test
            restored[phase] = pytest.TestReport(**{name: getattr(kept, name) for name in FIELDS})
            restored[phase].gt_raised = getattr(kept, "gt_raised", None)  # type: ignore[attr-defined]
    return {phase: restored[phase] for phase in PHASES if phase in restored}, subtests, in_subtests


def _judge(item: pytest.Item, merged: list[pytest.TestReport], merge: "_Merge") -> set[str | None]:
    """Let the parent compare what the ranks claim, phase by phase, up to the first phase that
    failed.

    A test that skipped or failed as expected is judged, too: without ranks a wrong golden raises
    before that. Returns the phases with objections.
    """
    in_subtests = merge.in_subtests
    early = [rank for rank, result in merge.results.items() if result in ("xfailed", "skipped")]
    found: set[str | None] = set()
    for report in merged:
        if report.failed and not str(report.longrepr).startswith(_STRICT_WORDS):
            break
        claims = {
            attribute: _claims(merge.by_rank, attribute, report.when) for attribute in CARRIED
        }
        every = [
            claim for claimed in claims[JUDGES["gtrainer-inline"]].values() for claim in claimed
        ]
        objections, is_unexpected = [], False
        if report.when == "call" and any(each.total() for each in in_subtests.values()):
            inner = {}
            for attribute, by_rank in claims.items():
                inner[attribute] = {
                    rank: told[: in_subtests[rank][attribute]] for rank, told in by_rank.items()
                }
                claims[attribute] = {
                    rank: told[in_subtests[rank][attribute] :] for rank, told in by_rank.items()
                }
            objections = objections_of(item, inner, early, report)
            is_unexpected = bool(objections) and not are_expected(
                objections, _xfail_of(merge.subtests.values())
            )
            if not is_unexpected:
                objections = []  # pytest tells an expected failure of a subtest, and goes on
        objections += objections_of(item, claims, early, report)
        in_phase = [
            [phases[report.when]] for phases in merge.by_rank.values() if report.when in phases
        ]
        conclude(report, objections, None if is_unexpected else _xfail_of(in_phase))
        if objections:
            found.add(report.when)
        # Some expectations may be met by some ranks only; they are written where the run ends.
        report.gt_inline = [claim for n, claim in enumerate(every) if claim not in every[:n]]  # type: ignore[attr-defined]
    return found


def _xfail_of(by_rank: Iterable[Iterable[pytest.TestReport]]) -> Xfail | None:
    """Return the xfail mark that held in all these reports, with what it expects in each; None if
    one had none.

    A test may add the mark while it runs, so it holds from some phase on.
    """
    marks = []
    for reports in by_rank:
        for report in reports:
            sent = getattr(report, "gt_xfail", None)
            if not sent:
                return None
            marks.append(Xfail(*sent))
    if not marks:
        return None
    expected = set.intersection(*(set(mark.kinds) for mark in marks))
    return Xfail(
        marks[0].reason, sorted(expected), [pattern for mark in marks for pattern in mark.patterns]
    )


def _raised_of(report: pytest.TestReport) -> wire.Raised | None:
    """Return the exception that a rank has sent with a report."""
    sent = getattr(report, "gt_raised", None)
    return wire.Raised(*sent) if sent else None


def _claims(
    reports: Mapping[int, RankReports], attribute: str, when: str | None = None
) -> dict[int, list[Any]]:
    """Return what each rank has sent with its reports, of one phase or of all."""
    found = {}
    for rank, phases in reports.items():
        found[rank] = [
            claim
            for phase, report in phases.items()
            if when in (None, phase)
            for claim in getattr(report, attribute, ())
        ]
    return found


def _tell_left_behind(
    item: pytest.Item, outcome: RanksOutcome, merged: list[pytest.TestReport]
) -> None:
    """Add what the ranks say was left to the last of the merged reports, as
    ``--gt-leaked-resources`` has it.
    """
    left = dict.fromkeys(what for answer in outcome.done.values() for what in answer.left)
    reaction = options.get(item.config, "leaked-resources") if left else "ignore"
    if reaction == "ignore":
        return
    last: Any = merged[-1]
    facts = [{"kind": "left", "test": item.nodeid, "what": what} for what in left]
    last.gt_facts = [*getattr(last, "gt_facts", []), *facts]
    if reaction == "fail" and not last.failed:
        advice = "destroy the groups that it makes, and drop the references to tensors on the GPU"
        conclude(
            last,
            [Objection("left behind", f"the test has left {', '.join(left)} behind: {advice}")],
        )


STRICT = "passed against a strict xfail"
_STRICT_WORDS = "[XPASS(strict)]"


def result_of(reports: RankReports) -> str:
    """Return what a test came to on one rank: passed, xpassed, failed, skipped, xfailed, or
    ``STRICT``.
    """
    if failed := [report for report in reports.values() if report.failed]:
        return (
            STRICT
            if all(str(report.longrepr).startswith(_STRICT_WORDS) for report in failed)
            else "failed"
        )
    skipped = [
        "xfailed" if hasattr(report, "wasxfail") else "skipped"
        for report in reports.values()
        if report.skipped
    ]
    if skipped:
        return skipped[0]
    return (
        "xpassed" if any(hasattr(report, "wasxfail") for report in reports.values()) else "passed"
    )


def shown_rank(results: Mapping[int, str]) -> int | None:
    """Return the rank whose reports stand for those of all; None if the ranks do not agree.

    Not for failures, which win over all, but for those that are mere consequences. An expected
    failure on one rank is one of the test: the others may have had no part in it. A skip must be
    agreed, or what some ranks did not check would look like a check.

    >>> shown_rank({0: "passed", 1: "xpassed"}), shown_rank({0: "passed", 1: "xfailed"})
    (1, 1)
    >>> shown_rank({0: "passed", 1: "skipped"}), shown_rank({0: "skipped", 1: "xfailed"})
    (None, None)
    """
    found = set(results.values())
    if len(found) > 1 and "skipped" in found:
        return None
    if len(found) > 1 and "failed" in found and "xfailed" not in found:
        return None
    for result in ("xfailed", STRICT, "xpassed", *found):
        for rank, own in results.items():
            if own == result:
                return rank
    return None


def _shown_rank_of(subtest: Mapping[int, pytest.TestReport]) -> int | None:
    return shown_rank({rank: result_of({"call": report}) for rank, report in subtest.items()})


class _Event(NamedTuple):
    """Something that makes the test fail: a rank's exception, or, without a report, an incident."""

    time: float
    rank: int | None
    phase: Phase
    text: str
    origin: tuple[Any, ...] | None = None
    report: pytest.TestReport | None = None


class _Merge:
    """The reports of a test that ran on ranks, in the order of their phases, from those of each
    rank.
    """

    def __init__(
        self,
        item: pytest.Item,
        outcome: RanksOutcome,
        reports: Mapping[int, RankReports],
        subtests: Subtests | None = None,
        in_subtests: Mapping[int, Counter[str]] | None = None,
    ) -> None:
        self.item, self.outcome, self.by_rank = item, outcome, dict(sorted(reports.items()))
        self.subtests = dict(sorted((subtests or {}).items()))
        self.in_subtests = (
            in_subtests or {}
        )  # how many of the call's claims came with subtests, by attribute
        self.results = {rank: result_of(phases) for rank, phases in self.by_rank.items()}
        incidents = [
            _Event(incident.time, incident.rank, "call", incident.text)
            for incident in outcome.causes()
        ]
        events = [*incidents, *self._failures(), *self._not_reported()]
        self.events = sorted(events, key=lambda event: event.time)  # the lowest rank first

    def reports(self) -> list[pytest.TestReport]:
        if not self.events and not self.by_rank:
            # no rank came to a report, and each was waiting for another: what was told first
            raised = self.outcome.raised.items()
            told = [
                _Event(told.time, rank, "call", f"rank {rank} raised {told.summary}")
                for rank, told in raised
            ]
            told = told or [
                _Event(each.time, each.rank, "call", each.text) for each in self.outcome.incidents
            ]
            none = _Event(0.0, None, "call", "no rank has given a report")
            self.events = [min(told, key=lambda event: event.time, default=none)]
        if self.events:
            return self._failed(self._headline())
        like = shown_rank(self.results)
        if like is None:
            said = {rank: self._result_line(rank) for rank in self.results}  # skip here, pass there
            return self._failed(
                _Event(0.0, None, "call", f"the ranks do not agree: {by_value(said)}")
            )
        if self.results[like] != "xfailed":
            for (name, _), by_rank in self._by_subtest().items():
                if _shown_rank_of(by_rank) is None:
                    said = {rank: _line_of({"call": report}) for rank, report in by_rank.items()}
                    text = f"the ranks do not agree on the subtest {name}: {by_value(said)}"
                    return self._failed(_Event(0.0, None, "call", text))
        return [self._with_output(report, phase) for phase, report in self.by_rank[like].items()]

    def _by_subtest(self) -> dict[tuple[str, int], dict[int, pytest.TestReport]]:
        """The reports of each subtest by rank; the n-th subtests of one name on all ranks are one."""
        found: dict[tuple[str, int], dict[int, pytest.TestReport]] = {}
        for rank, reports in self.subtests.items():
            seen: Counter[str] = Counter()
            for report in reports:
                name = str(report.head_line)
                found.setdefault((name, seen[name]), {})[rank] = report
                seen[name] += 1
        return found

    def subtest_reports(self) -> list[pytest.TestReport]:
        """A report for each subtest, for pytest to count; not of one that is a rank's failure of
        the call.
        """
        first_failures = []
        for reports in self.subtests.values():
            first_failures += [id(report) for report in reports if report.failed][:1]
        found = []
        for by_rank in self._by_subtest().values():
            failed = [rank for rank, report in by_rank.items() if report.failed]
            if any(id(by_rank[rank]) in first_failures for rank in failed):
                continue
            like = failed[0] if failed else _shown_rank_of(by_rank)
            if like is None:
                continue  # the call failed for it
            report = by_rank[like]
            if failed:
                _name_rank(report, like)
            for name in CARRIED:  # the call carries them
                setattr(report, name, [])
            report.sections = _sections(by_rank)
            found.append(report)
        return found

    def _failures(self) -> Iterable[_Event]:
        """The failed phases of ranks; what a rank told while it ran is about the first.

        A phase that only lost its collective is none, but a later one of that rank may fail by
        itself.
        """
        for rank, result in self.results.items():
            first = told = self.outcome.raised.get(rank)
            if result != "failed":
                continue
            for phase, report in self.by_rank[rank].items():
                if not report.failed:
                    continue
                raised, told = _raised_of(report) or told, None
                if self.outcome.is_lost(raised):
                    continue
                time = raised.time if raised is not None else float("inf")
                if raised is not None and raised == first:
                    time = self.outcome.failed_at(rank)
                origin = raised.origin if raised is not None and phase == "call" else None
                yield _Event(time, rank, phase, self._summary(rank), origin, report)

    def _not_reported(self) -> Iterable[_Event]:
        """Ranks that are through with the test and have no report of a phase, because a hook took
        it away.
        """
        for rank, answer in self.outcome.done.items():
            phases = self.by_rank.get(rank, {})
            needed = (
                PHASES if "setup" not in phases or phases["setup"].passed else ("setup", "teardown")
            )
            missing = [phase for phase in needed if phase not in phases]
            if missing and answer.trouble is None:
                yield _Event(
                    float("inf"),
                    rank,
                    "call",
                    f"rank {rank} has given no report of {', '.join(missing)}",
                )

    def _headline(self) -> _Event:
        first, with_origin = (
            self.events[0],
            [event for event in self.events if event.origin is not None],
        )
        if with_origin and first.phase == "call" and first.report is not None:
            try:
                return min(with_origin, key=lambda event: event.origin or ())
            except TypeError:  # origins that do not compare
                return with_origin[0]
        return first

    def _result_line(self, rank: int) -> str:
        return (
            self._summary(rank) if self.results[rank] == "failed" else _line_of(self.by_rank[rank])
        )

    def _summary(self, rank: int) -> str:
        if (told := self.outcome.raised.get(rank)) is None:
            failed = next(report for report in self.by_rank[rank].values() if report.failed)
            return textwrap.shorten(
                str(failed.longrepr).strip().splitlines()[-1], 300, placeholder=" …"
            )
        if self.outcome.is_consequence(rank):
            return f"waited in {told.waiting_in}"
        return told.summary

    def _failed(self, headline: _Event) -> list[pytest.TestReport]:
        failure = self._failure_report(headline)
        merged = []
        for phase in PHASES:
            others = [
                event for event in self.events if event.phase == phase and event.report is not None
            ]
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
            if headline.rank is not None:
                _name_rank(report, headline.rank)
        else:
            report = self._made(headline.phase, "failed", headline.text)
        append_section(report, "ranks", self._other_ranks(headline))
        incidents = self.outcome.incidents
        told = [
            (each.rank, detail)
            for each in incidents
            if each.rank is not None
            for detail in each.details
        ]
        for (title, text), ranks in ranks_by(
            told
        ).items():  # stacks and last outputs, equal texts once
            append_section(report, f"{title} [{ranks_text(ranks)}]", text)
        if any("did not end within" in each.text for each in incidents):
            slow = "If the test is only slow: --gt-timeout=SECONDS, or timeout= of its marker."
            look = f'To look inside, put breakpoint() before that line and run\npytest -n 0 "{id_of(self.item)}"'
            append_section(report, "next", f"{slow} {look}")
        return report

    def _other_ranks(self, headline: _Event) -> str:
        """A line for each thing that the ranks did, beginning with the headline's."""
        said = {rank: self._result_line(rank) for rank in self.results}
        for incident in self.outcome.incidents:
            if incident.rank is not None:
                said[incident.rank] = incident.text.removeprefix(f"rank {incident.rank} ")
        first = said.get(headline.rank) if headline.rank is not None else None
        ordered = sorted(
            ranks_by(said.items()).items(), key=lambda line: (line[0] != first, min(line[1]))
        )
        return "\n".join(f"{ranks_text(ranks)}: {text}" for text, ranks in ordered)

    def _made(
        self, phase: Phase, outcome: Literal["passed", "failed"], longrepr: str | None
    ) -> pytest.TestReport:
        keywords: Mapping[str, Literal[1]] = dict.fromkeys(self.item.keywords, 1)
        return pytest.TestReport(
            self.item.nodeid, self.item.location, keywords, outcome, longrepr, phase
        )

    def _with_output(self, report: pytest.TestReport, phase: Phase) -> pytest.TestReport:
        """Add what every rank wrote in that phase, equal texts once."""
        others = {rank: phases[phase] for rank, phases in self.by_rank.items() if phase in phases}
        report.sections = _sections(others)
        in_call = self.outcome.spent if phase == "call" else 0.0
        report.duration = max((other.duration for other in others.values()), default=in_call)
        return report


def _line_of(reports: RankReports) -> str:
    """A result in a line, with the reason of a skip."""
    result = result_of(reports)
    if result == "skipped":
        reason = next(report.longrepr for report in reports.values() if report.skipped)
        said = str(reason[-1]) if isinstance(reason, tuple) else str(reason)
        return f"skipped: {said.removeprefix('Skipped: ')}"
    return result


def _name_rank(report: pytest.TestReport, rank: int) -> None:
    """Put the rank before the message that pytest's short summary shows."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"[rank {rank}] {crash.message}"


def _sections(reports: Mapping[int, pytest.TestReport]) -> list[tuple[str, str]]:
    """Return what every rank wrote, equal texts once."""
    writers = ranks_by(
        (rank, section) for rank, report in reports.items() for section in report.sections
    )
    return [(f"{title} [{ranks_text(ranks)}]", text) for (title, text), ranks in writers.items()]


def append_section(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a titled text to a failure; unlike captured output it is always shown."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n\n--- {title} ---\n{text}"
