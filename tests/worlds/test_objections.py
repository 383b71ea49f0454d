"""A check may fail in the parent after the ranks have given their reports."""

import re

import pytest

from pytest_gtrainer import ControlFailed
from pytest_gtrainer.ranks import objections
from pytest_gtrainer.ranks.inside.session import plain
from pytest_gtrainer.ranks.merge import _xfail_of
from pytest_gtrainer.ranks.objections import (
    Objection,
    Xfail,
    as_if_to_the_end,
    conclude,
    objections_of,
    xfail_of,
)
from tests.worlds.test_merged_reports import PASSED, SKIPPED, XFAILED, XPASSED, control, report

GOLDEN, CONTROL = (
    Objection("gtrainer-goldens", "a.txt differs"),
    Objection("control", "cannot fail"),
)
LEFT = Objection("left behind", "a group is left behind")
KNOWN = Xfail("known", ["gtrainer-goldens"])


def copy_of(before, **more):
    return report(
        before.when,
        before.outcome,
        before.longrepr,
        **{
            **more,
            **{name: value for name, value in vars(before).items() if name == "wasxfail"},
        },
    )


@pytest.mark.parametrize(
    "before",
    [PASSED, report(wasxfail="known"), SKIPPED, XFAILED, XPASSED],
    ids=["passed", "xpassed", "skipped", "xfailed", "strict"],
)
@pytest.mark.parametrize(
    ("found", "xfail", "outcome", "reason"),
    [
        ([GOLDEN], None, "failed", None),
        ([GOLDEN], KNOWN, "skipped", "known"),
        ([CONTROL], KNOWN, "failed", None),
        ([GOLDEN, CONTROL], KNOWN, "failed", None),
        ([LEFT], KNOWN, "failed", None),
    ],
    ids=["no mark", "expected", "not expected", "one of two is not expected", "left behind"],
)
def test_an_objection_is_what_pytest_makes_of_its_error(before, found, xfail, outcome, reason):
    """V1: and a report that failed keeps no mark, or pytest would not count it."""
    concluded = copy_of(before)
    conclude(concluded, found, xfail)
    assert (concluded.outcome, getattr(concluded, "wasxfail", None)) == (outcome, reason)
    assert concluded.longrepr == "\n\n".join(each.text for each in found)


@pytest.mark.parametrize(
    ("raises", "outcome"),
    [
        (pytest.RaisesExc(AssertionError), "skipped"),
        (pytest.RaisesExc(AssertionError, match=r"a\.txt dif"), "skipped"),
        (pytest.RaisesExc(AssertionError, match=re.compile("A.TXT", re.IGNORECASE)), "skipped"),
        (pytest.RaisesExc(match="^b.txt"), "failed"),
        (pytest.RaisesExc(match="A.TXT"), "failed"),
        (pytest.RaisesExc(ValueError, match="a.txt"), "failed"),
        (pytest.RaisesExc(check=lambda error: True), "failed"),
    ],
)
def test_a_mark_that_looks_at_the_text_is_heeded_where_the_text_is_made(
    request, monkeypatch, raises, outcome
):
    """V1: a rank sends what of the mark is plain; a function cannot be asked in the parent."""
    monkeypatch.setattr(objections, "active_xfail", lambda item: ("known", raises))
    concluded = report(gt_xfail=plain(xfail_of(request.node)))
    conclude(concluded, [GOLDEN], _xfail_of([[concluded], [concluded]]))
    assert concluded.outcome == outcome


def test_without_an_objection_a_report_stays():
    concluded = copy_of(XFAILED)
    conclude(concluded, [], KNOWN)
    assert (concluded.outcome, concluded.wasxfail) == ("skipped", "known")


ALL = {"gtrainer-goldens", "gtrainer-inline", "control"}


@pytest.mark.parametrize(
    ("mark", "kinds"),
    [
        ({}, ALL),
        ({"raises": AssertionError}, ALL),
        ({"raises": (ValueError, AssertionError)}, ALL),
        ({"raises": ValueError}, set()),
        ({"raises": pytest.RaisesExc(AssertionError)}, ALL),
        ({"raises": pytest.RaisesExc((ValueError, ControlFailed))}, {"control"}),
        ({"raises": pytest.RaisesExc(match="differs")}, ALL),
        ({"raises": pytest.RaisesExc(check=lambda error: True)}, set()),
        ({"raises": pytest.RaisesGroup(AssertionError)}, set()),
    ],
)
def test_a_mark_expects_what_its_errors_cover(request, monkeypatch, mark, kinds):
    """V1"""
    active = {"reason": "known", "raises": None, **mark}
    monkeypatch.setattr(
        objections, "active_xfail", lambda item: (active["reason"], active["raises"])
    )
    found = xfail_of(request.node)
    assert found is not None
    assert (found.reason, set(found.kinds)) == ("known", kinds)
    monkeypatch.setattr(objections, "active_xfail", lambda item: None)
    assert xfail_of(request.node) is None


@pytest.mark.parametrize(
    ("early", "expected"),
    [([], ["control"]), ([1], [])],
    ids=["all came to the end", "rank 1 ended before its control"],
)
def test_a_control_that_a_rank_did_not_reach_is_not_judged(request, early, expected):
    claims = {
        "gt_facts": {0: [control(True)], 1: []},
        "gt_goldens": {0: [], 1: []},
        "gt_inline": {0: [], 1: []},
    }
    found = objections_of(request.node, claims, early, report())
    assert [each.kind for each in found] == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [("A", ["control"]), ("B", [])],
    ids=["rank 1 made it", "rank 1 made another"],
)
def test_a_control_before_a_rank_ended_is_judged(request, first, expected):
    facts = {0: [control(True, "A")], 1: [control(first == "A", first)]}
    claims = {"gt_facts": facts, "gt_goldens": {0: [], 1: []}, "gt_inline": {0: [], 1: []}}
    assert [each.kind for each in objections_of(request.node, claims, [1], report())] == expected


def test_a_rank_that_ended_early_is_judged_up_to_there():
    assert as_if_to_the_end({0: ["a"], 1: ["x", "b"]}, {0}) == {0: ["a", "b"], 1: ["x", "b"]}
