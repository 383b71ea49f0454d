"""A report that is missing, or of a later phase or mark, is no silent pass."""

from typing import Any

import pytest
from _pytest.subtests import SubtestContext, SubtestReport

from pytest_gtrainer.golden.naming import Claim
from pytest_gtrainer.ranks.inside.session import plain
from pytest_gtrainer.ranks.merge import reports_of
from pytest_gtrainer.ranks.watch import RanksOutcome
from pytest_gtrainer.ranks.wire import GroupState, ItemDone, Raised

XFAIL = ("known", ["gtrainer-goldens", "gtrainer-inline", "control"])
LOST = Raised(5.0, "RuntimeError: closed", False, "barrier", None)


def sent(request, when, outcome="passed", *, lost=False, **more):
    """A report as a rank sends it.

    A phase that ``lost`` its collective raised there after another rank had left.
    """
    node = request.node
    made = pytest.TestReport(node.nodeid, node.location, {}, outcome, None, when)
    made.longrepr = "AssertionError: of its own" if outcome == "failed" else None
    own = (
        Raised(6.0, "AssertionError: of its own", False, None, None)
        if outcome == "failed"
        else None
    )
    made.gt_raised = LOST if lost else own
    for name, value in more.items():
        setattr(made, name, value)
    return plain(
        request.config.hook.pytest_report_to_serializable(config=request.config, report=made)
    )


def merged(request, *ranks, answers=None, **outcome):
    """Merge reports; ``answers`` are the ranks in the order in which they answered."""
    done = {}
    for rank in answers or range(len(ranks)):
        done[rank] = ItemDone(tuple(ranks[rank]), (), None, GroupState(True, 1))
    return reports_of(request.node, RanksOutcome(len(ranks), done, **outcome))


def failed_phases(reports):
    return [each.when for each in reports if each.failed and not hasattr(each, "wasxfail")]


PHASES = ("setup", "call", "teardown")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    "missing", [PHASES, ("setup",), ("call",), ("teardown",), ("call", "teardown")], ids="+".join
)
@pytest.mark.parametrize("reason", [None, "known"], ids=["plain", "xpassed"])
def test_a_rank_without_a_report_of_a_phase_fails_the_test(request, rank, missing, reason) -> None:
    """V1: a hook of that rank has taken the test away, and the others pass."""
    more: dict[str, Any] = {} if reason is None else {"wasxfail": reason}
    whole = [sent(request, when, **(more if when == "call" else {})) for when in PHASES]
    ranks = [list(whole) for _ in range(3)]
    assert failed_phases(merged(request, *ranks)) == [], "the twin"
    ranks = [
        [sent(request, when, **(more if when == "call" else {})) for when in PHASES]
        for _ in range(3)
    ]
    ranks[rank] = [each for each in ranks[rank] if each["when"] not in missing]
    found = merged(request, *ranks)
    assert failed_phases(found) == ["call"]
    assert f"rank {rank} has given no report of {', '.join(missing)}" in "".join(
        each.longreprtext for each in found
    )


@pytest.mark.parametrize("answers", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_lowest_rank_without_a_report_is_named(request, answers):
    """Whichever rank answers first."""
    whole = [sent(request, when) for when in PHASES]
    without_call = [whole[0], whole[2]]
    _, call, _ = merged(request, whole, without_call, without_call, answers=answers)
    assert call.longreprtext.startswith("rank 1 has given no report of call")


def test_a_rank_whose_setup_skipped_needs_no_call(request):
    skipped = ("t.py", 3, "Skipped: not here")
    ranks = []
    for _ in range(2):
        setup = sent(request, "setup", "skipped")
        setup["longrepr"] = skipped
        ranks.append([setup, sent(request, "teardown")])
    assert [each.outcome for each in merged(request, *ranks)] == ["skipped", "passed"]


@pytest.mark.parametrize(
    ("teardown", "expected"),
    [({"outcome": "failed"}, ["teardown"]), ({"outcome": "failed", "lost": True}, []), ({}, [])],
    ids=["fails by itself", "lost, too", "passes"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_behind_a_lost_collective_counts(request, teardown, expected, rank):
    """V1: a rank fails as its mark expects; the rank that waits is freed and fails in teardown."""
    waits = [
        sent(request, "setup"),
        sent(request, "call", "failed", lost=True),
        sent(request, "teardown", **teardown),
    ]
    fails = [
        sent(request, "setup"),
        sent(request, "call", "skipped", wasxfail="known"),
        sent(request, "teardown"),
    ]
    ranks = [waits, fails] if rank == 0 else [fails, waits]
    found = merged(request, *ranks, raised={rank: LOST}, unblocked_at=4.0)
    assert failed_phases(found) == expected


def golden(name):
    claim = Claim("", f"{name}.txt", "text", "no such golden\n", "")
    return {field: getattr(claim, field) for field in claim.__match_args__}


@pytest.mark.parametrize(
    ("in_setup", "in_call"),
    [(None, XFAIL), (None, None), (XFAIL, XFAIL)],
    ids=["added in the call", "no mark", "from the beginning"],
)
@pytest.mark.parametrize("phase", ["setup", "call", "teardown"])
def test_a_mark_that_a_test_adds_expects_nothing_of_earlier_phases(
    request, in_setup, in_call, phase
):
    """V1: a golden that a fixture checks is missing before the test adds its mark."""
    marks = {"setup": in_setup, "call": in_call, "teardown": in_call}
    ranks = []
    for _ in range(2):
        claims = {each: [golden("never")] if each == phase else [] for each in PHASES}
        ranks.append(
            [sent(request, each, gt_xfail=marks[each], gt_goldens=claims[each]) for each in PHASES]
        )
    found = merged(request, *ranks)
    assert failed_phases(found) == ([] if marks[phase] else [phase])
    if marks[phase]:
        assert [each.wasxfail for each in found if each.when == phase] == ["known"]


@pytest.mark.parametrize(
    ("in_subtest", "phases"), [(None, ["call"]), (XFAIL, [])], ids=["added behind it", "before"]
)
def test_a_mark_that_a_test_adds_expects_nothing_of_earlier_subtests(request, in_subtest, phases):
    """V1: pytest asks the mark when the subtest ends, and the test adds it for what comes later."""
    config, ranks = request.config, []
    for _ in range(2):
        call = sent(request, "call", gt_xfail=XFAIL, gt_goldens=[])
        report = pytest.TestReport(
            request.node.nodeid, request.node.location, {}, "passed", None, "call"
        )
        report.gt_xfail, report.gt_goldens = in_subtest, [golden("never")]
        context = SubtestContext(msg="checks", kwargs={})
        subtest = SubtestReport._new(report, context, captured_output=None, captured_logs=None)
        part = plain(config.hook.pytest_report_to_serializable(config=config, report=subtest))
        ranks.append(
            [sent(request, "setup", gt_xfail=in_subtest), part, call, sent(request, "teardown")]
        )
    assert failed_phases(merged(request, *ranks)) == phases


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fails", [False, True], ids=["passes", "fails"])
def test_a_verdict_of_any_rank_is_counted(request, rank, fails):
    """The summary does not say "equal" where one rank had nothing but NaN."""
    ranks = []
    for each in range(3):
        outcome = "equal (not finite)" if each == rank else "equal"
        facts = [{"kind": "verdict", "outcome": outcome, "tensors": 1, "what": ""}]
        result = "failed" if fails and each == 0 else "passed"
        call = sent(request, "call", result, gt_facts=facts)
        ranks.append([sent(request, "setup"), call, sent(request, "teardown")])
    found = merged(request, *ranks)
    counted = [fact["outcome"] for report in found for fact in report.gt_facts]
    assert counted == [f"equal (not finite) on rank {rank}"]
    assert found[-1].gt_shown == {0: [], 1: [], 2: []}
