"""One test on ranks: send it, gather the reports, merge them, report to pytest."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_gtrainer import options
from pytest_gtrainer._pytest_private import tear_down
from pytest_gtrainer.ranks import left_behind, wire
from pytest_gtrainer.ranks.launcher import RanksError
from pytest_gtrainer.ranks.leases import LeaseError
from pytest_gtrainer.ranks.merge import PHASES, Phase, RankReports, merge
from pytest_gtrainer.ranks.outcome import Incident, Outcome, disagreement
from pytest_gtrainer.ranks.pool import Launcher
from pytest_gtrainer.report.collected import shown_only
from pytest_gtrainer.worlds.spec import WorldSpec

GOLDENS = "gtrainer-goldens"
# The plugins that compare what the ranks have sent with their reports, and the attribute it is in.
JUDGES = {GOLDENS: "gt_goldens", "gtrainer-inline": "gt_inline"}
CARRIED = (*JUDGES.values(), "gt_facts")
# Anything else that strikes during dispatch, a plugin's time limit for one, is the test's failure.
NOT_A_FAILURE = (KeyboardInterrupt, pytest.exit.Exception)


_CHAIN = pytest.StashKey[tuple[str, ...]]()


def dispatch(
    pool: Launcher,
    item: pytest.Item,
    spec: WorldSpec,
    next_on_ranks: pytest.Item | None,
    nextitem: pytest.Item | None,
) -> None:
    """Stand in for pytest's own protocol of ``item``: the same hooks, the phases on ranks."""
    hooks = item.ihook
    hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports(pool, item, spec, next_on_ranks)
    for report in reports:
        if report.when != "teardown":
            hooks.pytest_runtest_logreport(report=report)
    # What earlier tests have set up in this process, and the next one does not share: if that fails,
    # it must be told before the last report, with which goldens are written.
    _tear_down_here(item, nextitem)
    for report in reports:
        if report.when == "teardown":
            hooks.pytest_runtest_logreport(report=report)
    hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if pool.broken is not None:
        item.session.shouldfail = pool.broken


def _reports(
    pool: Launcher, item: pytest.Item, spec: WorldSpec, next_on_ranks: pytest.Item | None
) -> list[pytest.TestReport]:
    outcomes: list[Outcome] = []
    call = pytest.CallInfo.from_call(
        lambda: outcomes.append(_run(pool, item, spec, next_on_ranks)),
        "call",
        reraise=NOT_A_FAILURE,
    )
    if not outcomes:
        return [item.ihook.pytest_runtest_makereport(item=item, call=call)]
    _repeat_warnings(item, outcomes[0])
    return _merged(item, outcomes[0])


def _run(pool: Launcher, item: pytest.Item, spec: WorldSpec, next_on_ranks: pytest.Item | None) -> Outcome:
    following = item_ref(next_on_ranks) if next_on_ranks is not None else None
    command = wire.RunItem(item_ref(item), following, item.location)
    try:
        return pool.run(spec.size, command, limit_of(item.config, spec), item.nodeid)
    except (RanksError, LeaseError) as error:
        pytest.fail(str(error), pytrace=False)


def limit_of(config: pytest.Config, spec: WorldSpec | None) -> float:
    """The limit of a test in seconds: the marker's, else ``--gt-timeout``."""
    if spec is not None and spec.timeout is not None:
        return spec.timeout
    return float(options.get(config, "timeout"))


def item_ref(item: pytest.Item) -> wire.ItemRef:
    """How a rank finds the test."""
    return wire.ItemRef(item.nodeid, chain_of(item))


def chain_of(item: pytest.Item) -> tuple[str, ...]:
    """The directories and the file that lead to a test, outermost first."""
    home = item.parent or item
    if _CHAIN not in home.stash:
        nodes = (node for node in item.listchain() if isinstance(node, pytest.Directory | pytest.File))
        home.stash[_CHAIN] = tuple(str(node.path) for node in nodes)
    return home.stash[_CHAIN]


def _merged(item: pytest.Item, outcome: Outcome) -> list[pytest.TestReport]:
    """The merged reports, judged also by what only the parent can compare."""
    agreed = _agreed(item, outcome)
    if agreed is not None:
        merged, reports = list(agreed.values()), dict.fromkeys(outcome.answers, agreed)
    else:
        reports = {rank: _rank_reports(item, answer) for rank, answer in outcome.answers.items()
                   if isinstance(answer, wire.ItemDone) and answer.reports}  # fmt: skip
        merged = merge(item, _with_disagreement(outcome), reports)
    _judge(item, merged, reports)
    _gather_shown(merged, reports)
    left_behind.tell(item, outcome, merged)
    return merged


def _agreed(item: pytest.Item, outcome: Outcome) -> RankReports | None:
    """The reports of any rank where all said the same, none failed, and none wrote anything; None elsewhere.

    What ``merge`` makes of these, for the price of reading them once.
    """
    first = outcome.agreed()
    if first is None or not first.reports:
        return None
    reports = _rank_reports(item, first)
    if len(reports) != len(first.times) or any(each.sections or not each.passed for each in reports.values()):
        return None
    answers = [answer for answer in outcome.answers.values() if isinstance(answer, wire.ItemDone)]
    for report, *times in zip(reports.values(), *(answer.times for answer in answers), strict=True):
        report.duration = max(duration for _, _, duration in times)
    return reports


def _rank_reports(item: pytest.Item, answer: wire.ItemDone) -> dict[Phase, pytest.TestReport]:
    """One report a phase. A rank sends more where the test has subtests: the first that failed counts."""
    restored: dict[str, Any] = {}
    for told, times in zip(answer.reports, answer.times, strict=True):
        data = {**told, **dict(zip(wire.TIMES, times, strict=True))}
        report: Any = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        known = restored.get(report.when)
        kept = known if known is not None and known.failed else report
        for name in CARRIED:
            setattr(kept, name, _attached(known, name) + _attached(report, name))
        restored[report.when] = kept
    return {phase: _plain(restored[phase]) for phase in PHASES if phase in restored}


def _attached(report: pytest.TestReport | None, name: str) -> list[Any]:
    return list(getattr(report, name, []))


def _plain(report: Any) -> pytest.TestReport:
    """A subtest's report as the test's: pytest counts its own kind apart, and not as a failed test."""
    if type(report) is pytest.TestReport:
        return report
    arguments = {name: getattr(report, name) for name in ("nodeid", "location", "keywords", "outcome", "longrepr")}
    plain = pytest.TestReport(**arguments, when=report.when, sections=report.sections, duration=report.duration)
    for name in CARRIED:
        setattr(plain, name, _attached(report, name))
    return plain


def _with_disagreement(outcome: Outcome) -> Outcome:
    """Ranks that issued different collectives fail the test even if all passed."""
    clean = not outcome.incidents and outcome.unblocked_at is None and not outcome.raised
    states = {rank: answer.state for rank, answer in outcome.answers.items() if answer.state.intact}
    text = disagreement(states) if clean else None
    if text is not None:
        outcome.incidents.append(Incident(0.0, None, text))
    return outcome


# --- goldens and inline expectations ---------------------------------------------------------


def _judge(item: pytest.Item, merged: list[pytest.TestReport], reports: Mapping[int, RankReports]) -> None:
    """Let plugins compare what the ranks claim; an objection fails the call."""
    call = next((report for report in merged if report.when == "call" and report.passed), None)
    if call is None:
        return
    objections, claims = [], {attribute: _claims(reports, attribute) for attribute in JUDGES.values()}
    for name, attribute in JUDGES.items():
        judge = getattr(item.config.pluginmanager.getplugin(name), "judge_ranks", None)
        if judge is not None:
            objections.append(judge(item, claims[attribute]))
    found = [objection for objection in objections if objection is not None]
    if found:
        call.outcome, call.longrepr = "failed", "\n\n".join(found)
    # Some expectations may be met by some ranks only; they are written where the run ends.
    every = [claim for claimed in claims["gt_inline"].values() for claim in claimed]
    call.gt_inline = [claim for n, claim in enumerate(every) if claim not in every[:n]]  # type: ignore[attr-defined]


def _gather_shown(merged: list[pytest.TestReport], reports: Mapping[int, RankReports]) -> None:
    """Attach what every rank has told for the report of the run (``gt_shown``), not only that of the report shown."""
    for report in merged:
        report.gt_shown = {}  # type: ignore[attr-defined]
    if merged:
        merged[-1].gt_shown = {  # type: ignore[attr-defined]
            rank: shown_only(facts) for rank, facts in _claims(reports, "gt_facts").items()
        }


def _claims(reports: Mapping[int, RankReports], attribute: str) -> dict[int, list[Any]]:
    """What each rank has sent with its reports of all phases; ranks that agree share their reports."""
    found: dict[int, list[Any]] = {}
    for phases in reports.values():
        if id(phases) not in found:
            found[id(phases)] = [claim for report in phases.values() for claim in _attached(report, attribute)]
    return {rank: found[id(phases)] for rank, phases in reports.items()}


# --- this process ------------------------------------------------------------------------------


def _tear_down_here(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    call = pytest.CallInfo.from_call(
        lambda: tear_down(item.session, nextitem), "teardown", reraise=NOT_A_FAILURE
    )
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)


def _repeat_warnings(item: pytest.Item, outcome: Outcome) -> None:
    """Give the ranks' warnings to pytest as if they came from here, equal ones once."""
    answers = [answer for answer in outcome.answers.values() if isinstance(answer, wire.ItemDone)]
    for record in dict.fromkeys(record for answer in answers for record in answer.warnings):
        message = warnings.WarningMessage(record.text, _category(record), record.filename, record.lineno)
        arguments = {
            "warning_message": message,
            "when": record.when,
            "nodeid": record.nodeid,
            "location": record.location,
        }
        item.ihook.pytest_warning_recorded.call_historic(kwargs=arguments)


def _category(record: wire.WarningRecord) -> type[Warning]:
    module, name = record.category
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
