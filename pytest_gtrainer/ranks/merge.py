"""Merge what ranks report of a test into the reports that pytest gets.

The outcome of a test on one rank is its *result*; ``shown_rank`` says which result is the test's.
A fault that the parent finds afterwards, such as a golden that differs, is an *objection*: see
``objections``.
Outcome, exit status, JUnit file, summary and page all follow from the reports made here, for every
launcher of ranks.

The *headline* of a failure is the earliest event in time (of ranks that fail alike within moments
the lowest). If exceptions say where the fault lies (``gt_origin``), it is the smallest of those. A
rank that failed only because another one had left the collective is a *consequence*: it gets one
line, and is never the headline.
"""

import copy
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from pytest_gtrainer.report.collected import merge_facts, select_shown
from pytest_gtrainer.worlds import by_value, ranks_by, ranks_text

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
RankReports = Mapping[Phase, pytest.TestReport]
Subtests = Mapping[int, list[pytest.TestReport]]  # the reports of subtests, by rank

CARRIED = (*JUDGES.values(), "gt_facts")
"""Attributes of reports that carry what a rank claims, for the parent to judge or count."""
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

STRICT = "passed against a strict xfail"
_STRICT_WORDS = "[XPASS(strict)]"
_NEVER = float("inf")


def reports_of(item: pytest.Item, outcome: RanksOutcome) -> list[pytest.TestReport]:
    """Return the reports of a test that ran on ranks, in the order of their phases.

    Reports of subtests stand before the report of the call, as pytest has them. The warnings of the
    ranks are given to pytest.
    """
    _repeat_warnings(item, outcome)
    test = _read_ranks(item, outcome)
    merged = test.reports()
    if not test.by_rank and "gt_world" in getattr(item, "fixturenames", ()):
        # No rank has lived to report its world.
        found = devices.resolve(item.config)
        world = {
            "kind": "world",
            "world": "ranks",
            "size": outcome.size,
            "device": found.kind,
            "backend": found.backend,
        }
        merged[-1].gt_facts = [world]  # type: ignore[attr-defined]

    objections = _judge(item, merged, test)
    _report_left_behind(item, outcome, merged)
    if "setup" in objections:
        # Without ranks the test would have ended there.
        merged = [report for report in merged if report.when != "call"]
    else:
        merged = [*test.subtest_reports(), *merged]
        merged.sort(key=lambda report: PHASES.index(report.when))

    # What every rank reports for the page of the run, not only the rank whose report is shown.
    for report in merged:
        report.gt_shown = {}  # type: ignore[attr-defined]
    if merged:
        # Of the last phase, as pytest's JUnit file does; those before have what was recorded then.
        merged[-1].user_properties = _properties_of(test.by_rank)
    for rank, facts in _claims(test.by_rank, "gt_facts").items():
        merged[-1].gt_shown[rank] = select_shown(facts)
    return merged


def _properties_of(by_rank: Mapping[int, RankReports]) -> list[tuple[str, object]]:
    """Return what the first rank has recorded for JUnit, and of the others what differs from it.

    Those are named after their ranks.
    """
    first: list[tuple[str, object]] | None = None
    others: dict[tuple[str, str], list[int]] = {}
    for rank, phases in by_rank.items():
        recorded = list[tuple[str, object]]()
        for report in phases.values():
            if report.user_properties:
                recorded = [(name, value) for name, value in report.user_properties]
        if first is None:
            first = recorded
        for name, value in dict.fromkeys((name, str(value)) for name, value in recorded):
            if (name, value) not in [(own, str(known)) for own, known in first]:
                others.setdefault((name, value), []).append(rank)
    found = first or []
    for (name, value), ranks in others.items():
        found.append((f"{name} ({ranks_text(ranks)})", value))
    return found


def passes(item: pytest.Item, outcome: RanksOutcome) -> bool:
    """Return whether a test passed on all ranks. No report goes to pytest, no golden is judged."""
    return not any(report.failed for report in _read_ranks(item, outcome).reports())


def _read_ranks(item: pytest.Item, outcome: RanksOutcome) -> "MergedTest":
    reports: dict[int, RankReports] = {}
    subtests: dict[int, list[pytest.TestReport]] = {}
    in_subtests: dict[int, Counter[str]] = {}
    for rank, answer in outcome.done.items():
        if answer.reports:
            reports[rank], subtests[rank], in_subtests[rank] = _read_rank(item, answer)
    return MergedTest(item, outcome, reports, subtests, in_subtests)


def _repeat_warnings(item: pytest.Item, outcome: RanksOutcome) -> None:
    """Report the ranks' warnings to pytest as if they were issued here; equal ones once."""
    records: dict[Any, None] = {}
    for answer in outcome.done.values():
        records |= dict.fromkeys(answer.warnings)
    for record in records:
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warnings.WarningMessage(
                    record.text, record.class_here(), record.filename, record.lineno
                ),
                "when": record.when,
                "nodeid": record.nodeid,
                "location": record.location,
            }
        )


def _read_rank(
    item: pytest.Item, answer: wire.ItemDone
) -> tuple[RankReports, list[pytest.TestReport], Counter[str]]:
    """Read the reports of one rank.

    Returns:
        One report a phase; the first subtest that failed stands for the call. The reports of
        subtests. How many claims of the call came with these, by attribute.
    """
    by_phase: dict[Phase, pytest.TestReport] = {}
    subtests = []
    in_subtests: Counter[str] = Counter()
    for sent in answer.reports:
        report: Any = item.config.hook.pytest_report_from_serializable(
            config=item.config, data={**sent, "nodeid": item.nodeid}
        )
        if type(report) is not pytest.TestReport:
            subtests.append(report)
            for name in CARRIED:
                in_subtests[name] += len(getattr(report, name, []))
        earlier = by_phase.get(report.when)
        # The first failure of a phase is kept, with the claims of all its reports.
        kept = earlier if earlier is not None and earlier.failed else report
        for name in CARRIED:
            claimed = getattr(report, name, [])
            setattr(kept, name, claimed if earlier is None else [*getattr(earlier, name), *claimed])
        by_phase[report.when] = kept

    for phase, kept in by_phase.items():
        if type(kept) is not pytest.TestReport:
            # pytest counts its kind for subtests apart, and not as a failed test.
            plain = pytest.TestReport(**{name: getattr(kept, name) for name in FIELDS})
            plain.gt_raised = getattr(kept, "gt_raised", None)  # type: ignore[attr-defined]
            by_phase[phase] = plain

    ordered = {phase: by_phase[phase] for phase in PHASES if phase in by_phase}
    return ordered, subtests, in_subtests


def _judge(
    item: pytest.Item, merged: list[pytest.TestReport], test: "MergedTest"
) -> set[str | None]:
    """Compare in the parent what the ranks claim, phase by phase, up to the first that failed.

    A test that skipped or failed as expected is judged, too: without ranks a wrong golden raises
    before that. Returns the phases with objections.
    """
    # Ranks that did not come to the end may lack claims that the others have.
    early = [rank for rank, result in test.results.items() if result in ("xfailed", "skipped")]
    objected: set[str | None] = set()
    for report in merged:
        if report.failed and not str(report.longrepr).startswith(_STRICT_WORDS):
            break
        claims = {}
        for attribute in CARRIED:
            claims[attribute] = _claims(test.by_rank, attribute, report.when)

        # Some expectations may be met by some ranks only; they are written where the run ends.
        inline: list[Any] = []
        for claimed in claims[JUDGES["gtrainer-inline"]].values():
            inline += [claim for claim in claimed if claim not in inline]
        report.gt_inline = inline  # type: ignore[attr-defined]

        objections: list[Objection] = []
        xfail = _xfail_of([each] for each in _of_phase(test.by_rank, report.when).values())
        if report.when == "call" and any(counts.total() for counts in test.in_subtests.values()):
            inner = _take_claims_of_subtests(claims, test.in_subtests)
            objections = objections_of(item, inner, early, report)
            if are_expected(objections, _xfail_of(test.subtests.values())):
                objections = []  # pytest reports an expected failure of a subtest, and goes on
            elif objections:
                xfail = None
        objections += objections_of(item, claims, early, report)
        conclude(report, objections, xfail)
        if objections:
            objected.add(report.when)

    return objected


def _take_claims_of_subtests(
    claims: dict[str, dict[int, list[Any]]], in_subtests: Mapping[int, Counter[str]]
) -> dict[str, dict[int, list[Any]]]:
    """Take out of ``claims`` those that came with reports of subtests, and return them.

    They are the first ones of the call: its own report comes after those of its subtests.
    """
    inner: dict[str, dict[int, list[Any]]] = {}
    for attribute, by_rank in claims.items():
        inner[attribute] = {}
        for rank, claimed in by_rank.items():
            count = in_subtests[rank][attribute]
            inner[attribute][rank], by_rank[rank] = claimed[:count], claimed[count:]
    return inner


def _xfail_of(by_rank: Iterable[Iterable[pytest.TestReport]]) -> Xfail | None:
    """Return the xfail mark that held in all these reports, with what it expects in each.

    None if a report had none: a test may add the mark while it runs, so it holds from some phase
    on.
    """
    reasons, kinds = [], []
    patterns: list[tuple[str, int]] = []
    for reports in by_rank:
        for report in reports:
            sent = getattr(report, "gt_xfail", None)
            if not sent:
                return None
            mark = Xfail(*sent)
            reasons.append(mark.reason)
            kinds.append(set(mark.kinds))
            patterns += mark.patterns

    if not reasons:
        return None
    return Xfail(reasons[0], sorted(set.intersection(*kinds)), patterns)


def _raised_of(report: pytest.TestReport) -> wire.Raised | None:
    """Return the exception that a rank has sent with a report."""
    sent = getattr(report, "gt_raised", None)
    if not sent:
        return None
    return wire.Raised(*sent)  # pytest's serialisation makes lists of tuples


def _of_phase(by_rank: Mapping[int, RankReports], phase: Any) -> dict[int, pytest.TestReport]:
    """Return the reports of one phase, of the ranks that came to it."""
    found = {}
    for rank, phases in by_rank.items():
        if phase in phases:
            found[rank] = phases[phase]
    return found


def _claims(
    reports: Mapping[int, RankReports], attribute: str, when: str | None = None
) -> dict[int, list[Any]]:
    """Return what each rank has sent with its reports, of one phase or of all."""
    claims: dict[int, list[Any]] = {}
    wanted: tuple[Any, ...] = PHASES if when is None else (when,)
    for rank, phases in reports.items():
        claims[rank] = []
        for phase in wanted:
            if phase in phases:
                claims[rank] += getattr(phases[phase], attribute, ())
    return claims


def _report_left_behind(
    item: pytest.Item, outcome: RanksOutcome, merged: list[pytest.TestReport]
) -> None:
    """Add what the test left on the ranks to its last report.

    The test fails with ``--gt-leaked-resources=fail``.
    """
    left: dict[str, None] = {}
    for answer in outcome.done.values():
        left |= dict.fromkeys(answer.left)
    reaction = options.get(item.config, "leaked-resources")
    if not left or reaction == "ignore":
        return
    last: Any = merged[-1]
    facts = list(getattr(last, "gt_facts", []))
    for what in left:
        facts.append({"kind": "left", "test": item.nodeid, "what": what})
    last.gt_facts = facts
    if reaction == "fail" and not last.failed:
        text = (
            f"the test has left {', '.join(left)} behind: destroy the groups that it makes, "
            "and drop the references to tensors on the GPU"
        )
        conclude(last, [Objection("left behind", text)])


def result_of(reports: RankReports) -> str:
    """Return the result on one rank: passed, xpassed, failed, skipped, xfailed, or ``STRICT``."""
    result = "passed"
    for report in reports.values():
        # pytest marks an xfail by this attribute, on a skipped report as on a passed one.
        is_marked = hasattr(report, "wasxfail")
        if report.failed:
            if not str(report.longrepr).startswith(_STRICT_WORDS):
                return "failed"
            result = STRICT
        elif report.skipped and result in ("passed", "xpassed"):
            result = "xfailed" if is_marked else "skipped"
        elif result == "passed" and is_marked:
            result = "xpassed"

    return result


def shown_rank(results: Mapping[int, str]) -> int | None:
    """Return the rank whose reports stand for those of all; None if the ranks do not agree.

    Failures of their own are reported before this is asked; a rank that only lost its collective
    still counts as failed here. An expected failure on one rank is one of the test, as the others
    may have had no part in it. All ranks have to skip, or what some did not check would look like a
    check.

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
    """A reason why the test fails: the failed report of a rank, or an incident without a report."""

    time: float
    rank: int | None
    phase: Phase
    text: str
    origin: tuple[Any, ...] | None = None
    report: pytest.TestReport | None = None


class MergedTest:
    """A test that ran on ranks: the reports of each rank, and those of the test made from them.

    The reports of the ranks are left as they came. ``reports`` and ``subtest_reports`` give copies.
    """

    def __init__(
        self,
        item: pytest.Item,
        outcome: RanksOutcome,
        reports: Mapping[int, RankReports],
        subtests: Subtests | None = None,
        in_subtests: Mapping[int, Counter[str]] | None = None,
    ) -> None:
        """Read the results. ``in_subtests`` counts claims that came with subtests."""
        self.item = item
        self.outcome = outcome
        self.by_rank = dict(sorted(reports.items()))
        self.subtests = dict(sorted((subtests or {}).items()))
        self.in_subtests = in_subtests or {}
        self.results: dict[int, str] = {}
        for rank, phases in self.by_rank.items():
            self.results[rank] = result_of(phases)
        events = []
        for incident in outcome.causes():
            events.append(_Event(incident.time, incident.rank, "call", incident.text))
        events += [*self._failures(), *self._missing_reports()]
        self.events = sorted(events, key=lambda event: event.time)  # the lowest rank first
        if not events and not self.by_rank:
            self.events = [self._reason_of_no_report()]

    def reports(self) -> list[pytest.TestReport]:
        """Return a report for each phase."""
        if self.events:
            return self._failed(self._headline())
        shown = shown_rank(self.results)
        if shown is None:  # a skip here, a pass there
            text = f"the ranks do not agree: {by_value(self._result_lines())}"
            return self._failed(_Event(0.0, None, "call", text))
        if self.results[shown] != "xfailed":
            for (name, _), by_rank in self._by_subtest().items():
                if _shown_rank_of(by_rank) is None:
                    lines = {rank: _line_of({"call": report}) for rank, report in by_rank.items()}
                    text = f"the ranks do not agree on the subtest {name}: {by_value(lines)}"
                    return self._failed(_Event(0.0, None, "call", text))

        merged = []
        for phase, report in self.by_rank[shown].items():
            merged.append(self._with_all_ranks(_copied(report), phase))
        return merged

    def subtest_reports(self) -> list[pytest.TestReport]:
        """Return a report for each subtest, for pytest to count.

        None for a subtest that is a rank's failure of the call: the call reports it.
        """
        first_failures = set()
        for reports in self.subtests.values():
            for report in reports:
                if report.failed:
                    first_failures.add(id(report))
                    break

        merged = []
        for by_rank in self._by_subtest().values():
            if first_failures.intersection(map(id, by_rank.values())):
                continue
            failed = [rank for rank, report in by_rank.items() if report.failed]
            shown = failed[0] if failed else _shown_rank_of(by_rank)
            if shown is None:
                continue  # the call failed for it
            report = _copied(by_rank[shown])
            if failed:
                _name_rank(report, shown)
            for name in CARRIED:  # the call carries them
                setattr(report, name, [])
            report.sections = _sections(by_rank)
            merged.append(report)

        return merged

    def _by_subtest(self) -> dict[tuple[str, int], dict[int, pytest.TestReport]]:
        """Return the reports of each subtest by rank.

        The n-th subtests of one name on all ranks are one subtest.
        """
        found: dict[tuple[str, int], dict[int, pytest.TestReport]] = {}
        seen: Counter[tuple[int, str]] = Counter()
        for rank, reports in self.subtests.items():
            for report in reports:
                name = str(report.head_line)
                found.setdefault((name, seen[rank, name]), {})[rank] = report
                seen[rank, name] += 1
        return found

    def _failures(self) -> Iterator[_Event]:
        """Yield the failed phases of ranks.

        A phase that failed only because another rank left the collective is not one of them. A
        later phase of that rank may still fail by itself.
        """
        for rank, result in self.results.items():
            if result != "failed":
                continue
            first = self.outcome.raised.get(rank)  # sent while the test ran, at its first failure
            is_first = True
            for phase, report in self.by_rank[rank].items():
                if not report.failed:
                    continue
                raised = _raised_of(report)
                if raised is None and is_first:
                    raised = first
                is_first = False
                if self.outcome.lost_its_collective(raised):
                    continue
                time, origin = _NEVER, None
                if raised is not None:
                    time = raised.time
                    if phase == "call":
                        origin = raised.origin
                    if raised == first:
                        time = self.outcome.failed_at(rank)
                yield _Event(time, rank, phase, self._summary(rank), origin, report)

    def _missing_reports(self) -> Iterator[_Event]:
        """Yield the ranks that are through with the test and have no report of a phase.

        A hook of the rank took it away.
        """
        for rank, answer in self.outcome.done.items():
            phases = self.by_rank.get(rank, {})
            needed = list(PHASES)
            if "setup" in phases and not phases["setup"].passed:
                needed.remove("call")
            missing = [phase for phase in needed if phase not in phases]
            if missing and answer.trouble is None:
                text = f"rank {rank} has given no report of {', '.join(missing)}"
                yield _Event(_NEVER, rank, "call", text)

    def _reason_of_no_report(self) -> _Event:
        """Return the first thing that any rank said, if none came to a report.

        Each was waiting for another, so nothing that befell them counts as a cause.
        """
        events = []
        for rank, raised in self.outcome.raised.items():
            text = f"rank {rank} raised {raised.summary}"
            events.append(_Event(raised.time, rank, "call", text))
        if not events:
            for each in self.outcome.incidents:
                events.append(_Event(each.time, each.rank, "call", each.text))
        none = _Event(0.0, None, "call", "no rank has given a report")
        return min(events, key=lambda event: event.time, default=none)

    def _headline(self) -> _Event:
        first = self.events[0]
        with_origin = [event for event in self.events if event.origin is not None]
        if with_origin and first.phase == "call" and first.report is not None:
            try:
                return min(with_origin, key=lambda event: event.origin or ())
            except TypeError:  # origins that do not compare
                return with_origin[0]
        return first

    def _result_lines(self) -> dict[int, str]:
        lines = {}
        for rank, result in self.results.items():
            if result == "failed":
                lines[rank] = self._summary(rank)
            else:
                lines[rank] = _line_of(self.by_rank[rank])
        return lines

    def _summary(self, rank: int) -> str:
        """Return the failure of a rank in a line."""
        raised = self.outcome.raised.get(rank)
        if raised is None:
            failed = next(report for report in self.by_rank[rank].values() if report.failed)
            lines = str(failed.longrepr or "").strip().splitlines()
            if not lines:
                return f"failed in its {failed.when}, without a text"
            return textwrap.shorten(lines[-1], 300, placeholder=" …")
        if self.outcome.is_consequence(rank):
            return f"waited in {raised.waiting_in}"
        return raised.summary

    def _failed(self, headline: _Event) -> list[pytest.TestReport]:
        """Return the reports of a test that failed, with that headline."""
        merged = []
        for phase in PHASES:
            report: pytest.TestReport | None = None
            if phase == headline.phase:
                report = self._failure_report(headline)
            elif phase == "call" and headline.phase == "setup":
                continue
            else:
                for event in self.events:
                    if event.phase == phase and event.report is not None:
                        report = self._failure_report(event)
                        break
            if report is None:
                # It did not fail by itself: a rank's report of it if one passed, else an empty one.
                for phases in self.by_rank.values():
                    if phase in phases and phases[phase].passed:
                        report = _copied(phases[phase])
                        break
            if report is None:
                report = self._made(phase, "passed", None)
            merged.append(self._with_all_ranks(report, phase))

        return merged

    def _failure_report(self, headline: _Event) -> pytest.TestReport:
        if headline.report is None:
            report = self._made(headline.phase, "failed", headline.text)
        else:
            report = _copied(headline.report)
            if headline.rank is not None:
                _name_rank(report, headline.rank)

        append_section(report, "ranks", self._lines_of_ranks(headline))

        # Stacks and last outputs, equal texts once.
        details = []
        has_timed_out = False
        for incident in self.outcome.incidents:
            has_timed_out |= "did not end within" in incident.text
            if incident.rank is not None:
                details += [(incident.rank, detail) for detail in incident.details]

        for (title, text), ranks in ranks_by(details).items():
            append_section(report, f"{title} [{ranks_text(ranks)}]", text)
        if has_timed_out:
            advice = (
                "If the test is only slow: --gt-timeout=SECONDS, or timeout= of its marker. "
                "To look inside, put breakpoint() before that line and run\n"
                f'pytest -n 0 "{id_of(self.item)}"'
            )
            append_section(report, "next", advice)

        return report

    def _lines_of_ranks(self, headline: _Event) -> str:
        """Return a line for each thing that the ranks did, beginning with the headline's."""
        lines = self._result_lines()
        for incident in self.outcome.incidents:
            if incident.rank is not None:
                lines[incident.rank] = incident.text.removeprefix(f"rank {incident.rank} ")
        first = None
        if headline.rank is not None:
            first = lines.get(headline.rank)
        ordered = sorted(
            ranks_by(lines.items()).items(), key=lambda line: (line[0] != first, min(line[1]))
        )
        return "\n".join(f"{ranks_text(ranks)}: {text}" for text, ranks in ordered)

    def _made(
        self, phase: Phase, outcome: Literal["passed", "failed"], longrepr: str | None
    ) -> pytest.TestReport:
        keywords: Mapping[str, Literal[1]] = dict.fromkeys(self.item.keywords, 1)
        return pytest.TestReport(
            self.item.nodeid, self.item.location, keywords, outcome, longrepr, phase
        )

    def _with_all_ranks(self, report: pytest.TestReport, phase: Phase) -> pytest.TestReport:
        """Give a report of the test what all ranks wrote and counted in that phase."""
        of_phase = _of_phase(self.by_rank, phase)
        report.sections = _sections(of_phase)
        # If no rank has lived to report the call, the time that it took is known from outside.
        in_call = self.outcome.spent if phase == "call" else 0.0
        report.duration = max((each.duration for each in of_phase.values()), default=in_call)
        facts = merge_facts(_claims(self.by_rank, "gt_facts", phase))
        report.gt_facts = facts  # type: ignore[attr-defined]
        return report


def _copied(report: pytest.TestReport) -> pytest.TestReport:
    """Return a copy of a report, to whose failure sections can be added."""
    copied = copy.copy(report)
    copied.longrepr = copy.deepcopy(report.longrepr)
    return copied


def _line_of(reports: RankReports) -> str:
    """Return a result in a line, with the reason of a skip."""
    result = result_of(reports)
    if result == "skipped":
        reason = next(report.longrepr for report in reports.values() if report.skipped)
        text = str(reason[-1]) if isinstance(reason, tuple) else str(reason)
        return f"skipped: {text.removeprefix('Skipped: ')}"
    return result


def _name_rank(report: pytest.TestReport, rank: int) -> None:
    """Put the rank before the message that pytest's short summary shows."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"[rank {rank}] {crash.message}"


def _sections(reports: Mapping[int, pytest.TestReport]) -> list[tuple[str, str]]:
    """Return what every rank wrote, equal texts once."""
    written = []
    for rank, report in reports.items():
        written += [(rank, section) for section in report.sections]
    merged = []
    for (title, text), ranks in ranks_by(written).items():
        merged.append((f"{title} [{ranks_text(ranks)}]", text))
    return merged


def append_section(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a titled text to a failure; unlike captured output it is always shown."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = f"{report.longrepr}\n\n--- {title} ---\n{text}"
