"""Results of a run, put together from reports: outcomes, comparisons of several ranks, a test that
runs again.
"""

import pytest

from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.collected import merge_facts, world_label


def report(when="call", outcome="passed", longrepr=None, **more):
    made = pytest.TestReport("t", ("t.py", 0, "t"), {}, outcome, longrepr, when)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def collected(*reports):
    test = Collected("t")
    for each in reports:
        test.add(each)
    return test


SETUP, CALL, TEARDOWN = report("setup"), report(), report("teardown")


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([SETUP, CALL, TEARDOWN], "passed"),
        ([SETUP, report(outcome="failed"), TEARDOWN], "failed"),
        ([report("setup", "failed"), TEARDOWN], "error"),
        ([SETUP, CALL, report("teardown", "failed")], "error"),
        ([SETUP, report(outcome="failed"), report("teardown", "failed")], "failed"),
        ([SETUP, report(outcome="skipped"), TEARDOWN], "skipped"),
        ([report("setup", "skipped"), TEARDOWN], "skipped"),
        ([SETUP, report(outcome="skipped", wasxfail="known"), TEARDOWN], "xfailed"),
        ([SETUP, report(wasxfail="known"), TEARDOWN], "xpassed"),
        (
            [SETUP, report(outcome="skipped", wasxfail="known"), report("teardown", "failed")],
            "error",
        ),
    ],
)
def test_outcomes(reports, outcome):
    """A failure wins; "error" is one outside the call."""
    assert collected(*reports).outcome == outcome


def test_the_headline_is_the_first_line_of_the_first_failure():
    test = collected(
        report("setup"),
        report(outcome="failed", longrepr="  first\nmore"),
        report("teardown", "failed", "second"),
    )
    assert test.headline == "first"
    assert collected(SETUP, CALL).headline == ""
    assert len(collected(report(outcome="failed", longrepr="x" * 1000)).headline) == 300


def compared(first, tensors=1, actual=(), expected=(), differing=()):
    found = {
        "kind": "comparison",
        "first": first,
        "tensors": tensors,
        "actual": actual,
        "expected": expected,
    }
    return {**found, "differing": differing, "more": 1}


def test_the_nth_comparison_of_every_rank_is_one_and_its_first_difference_the_smallest():
    """L4: by step, then rank; a rank that is equal leads only where all are; one that compared less
    often is no gap.
    """
    shown = {
        1: [compared([3, 1, "at 3, 1"], 5, [[0, 1, "loss", "b"]], differing=["x"])],
        0: [
            compared(None, 2, actual=[[1, 0, "loss", "c"], [0, 0, "weight", "a"]]),
            compared([1, 0, "later"]),
        ],
        2: [compared([2, 2, "at 2, 2"], 7, expected=[[0, 2, "loss", "d"]], differing=["y"])],
    }
    both = collected(report(gt_facts=[], gt_shown=shown)).comparisons()
    assert [one["first"][2] for one in both] == ["at 2, 2", "later"]
    assert [one["tensors"] for one in both] == [14, 1], "those of all ranks together"
    assert [(one["differing"], one["more"]) for one in both] == [(["x", "y"], 3), ([], 1)]
    order = [tuple(row[:3]) for row in both[0]["actual"]]
    assert order == [(0, 1, "loss"), (0, 0, "weight"), (1, 0, "loss")], "by step, phase and rank"
    assert [row[3] for row in both[0]["expected"]] == ["d"]
    (equal,) = collected(report(gt_shown={0: [compared(None)], 1: [compared(None)]})).comparisons()
    assert equal["first"] is None


def test_comparisons_of_other_subjects_stay_apart():
    """A rank may check something that the others do not, in between."""

    def of(what, outcome="equal"):
        return {**compared(None), "what": what, "outcome": outcome, "must_differ": False}

    shown = {0: [of("A"), of("B"), of("B")], 1: [of("B", "different"), of("C"), of("B")]}
    found = collected(report(gt_shown=shown)).comparisons()
    assert [(one["what"], one["outcome"], one["tensors"]) for one in found] == [
        ("A", "equal", 1),
        ("B", "different", 2),
        ("B", "equal", 2),
        ("C", "equal", 1),
    ]


def test_graphs_are_those_of_the_lowest_rank_that_has_any():
    test = collected(
        report(gt_shown={2: [{"kind": "pass", "of": 2}], 1: [{"kind": "pass", "of": 1}], 0: []})
    )
    assert test.find("pass") == [{"kind": "pass", "of": 1}]
    assert test.find("layout") == []


def test_goldens_of_ranks_are_judged_here_and_shown_once():
    """The parent's own fact of a difference stands beside what ranks have sent, and nothing is
    taken twice.
    """
    difference, other = {"kind": "golden_difference", "name": "a"}, {"kind": "pass", "name": "b"}
    test = collected(report(gt_facts=[difference, other], gt_shown={1: [other]}))
    assert test.shown == {0: [difference], 1: [other]}
    alone = collected(report(gt_facts=[difference, other, {"kind": "verdict"}]))
    assert alone.shown == {0: [difference, other]}
    assert [fact["kind"] for fact in alone.facts] == ["golden_difference", "pass", "verdict"]


def test_a_test_that_runs_again_begins_anew():
    """Its first failure is gone, and what a witness sends once for the whole test stays."""
    graph, passed = {"kind": "graph_text", "name": "g"}, {"kind": "pass", "name": "p"}
    test = collected(
        SETUP, report(outcome="failed", gt_facts=[graph, passed, {"kind": "verdict"}]), TEARDOWN
    )
    assert (test.outcome, len(test.facts)) == ("failed", 3)
    for again in (SETUP, report(gt_facts=[passed]), TEARDOWN):
        test.add(again)
    assert (test.outcome, len(test.reports)) == ("passed", 3)
    assert test.facts == [passed], "the facts of the run that counts"
    assert test.shown[0] == [graph, passed]


def test_worlds_are_told_once_each():
    fake = {"kind": "world", "world": "fake", "size": 4, "backend": "fake", "device": "cpu"}
    ranks = {"kind": "world", "world": "ranks", "size": 8, "backend": "gloo", "device": "cpu"}
    assert collected(report("setup", gt_facts=[fake, ranks]), report(gt_facts=[fake])).world == (
        "fake(4), ranks(8, gloo on cpu)"
    )
    assert (
        world_label({**ranks, "world": "simulated", "backend": "simulated"})
        == "simulated(8, simulated on cpu)"
    )


class Subtest(pytest.TestReport):
    """A report like pytest's for a subtest, which the report of the test is not."""


@pytest.mark.parametrize(
    ("outcome", "mark", "expected"),
    [
        ("skipped", {}, "passed"),
        ("skipped", {"wasxfail": "known"}, "passed"),
        ("passed", {}, "passed"),
        ("failed", {}, "failed"),
    ],
)
def test_a_subtest_decides_for_its_test_only_if_it_failed(outcome, mark, expected):
    """V1"""
    subtest = Subtest("t", ("t.py", 0, "t"), {}, outcome, None, "call")
    vars(subtest).update(mark)
    assert collected(SETUP, subtest, CALL, TEARDOWN).outcome == expected


EQUAL = {"kind": "verdict", "outcome": "equal", "tensors": 1, "what": "loss"}


def verdict(outcome, **more):
    return {**EQUAL, "outcome": outcome, **more}


@pytest.mark.parametrize(
    ("outcomes", "merged"),
    [
        (["equal"], "equal"),
        (["equal", "equal"], "equal"),
        (["equal", "equal (not finite)"], "equal (not finite) on rank 1"),
        (["equal (not finite)", "equal"], "equal (not finite) on rank 0"),
        (["equal (not finite)", "equal (not finite)"], "equal (not finite)"),
        (["equal", "equal", "unverified"], "unverified on rank 2"),
        (["unverified", "different", "different"], "different on ranks 1, 2"),
        (["equal (not finite)", "unverified"], "unverified on rank 1"),
        (["different", "equal, control failed"], "equal, control failed on rank 1"),
        (["equal on this rank, judged over all", "different as required"], "different as required"),
        (["proves nothing", "broken"], "broken on rank 1"),
        (["error", "proves nothing", "not claimed"], "error on rank 0"),
        (["held", "proves nothing", "not claimed"], "proves nothing on rank 1"),
        (["held", "not judged", "held"], "not judged on rank 1"),
        (["FAILED", "not judged", "refused"], "FAILED on rank 0"),
        (["UNKNOWN", "not judged"], "UNKNOWN on rank 0"),
        (["not judged", "different"], "different on rank 1"),
        (["equal, as a later version has it", "surprising"], "surprising on rank 1"),
    ],
)
def test_the_worst_outcome_of_all_ranks_counts_and_names_its_ranks(outcomes, merged):
    facts = merge_facts({rank: [verdict(each)] for rank, each in enumerate(outcomes)})
    assert [fact["outcome"] for fact in facts] == [merged]


def test_the_nth_fact_of_a_subject_is_one_on_all_ranks():
    """Ranks of two groups check other things, and a rank may check more than the others."""
    other = verdict("equal", what="state")
    by_rank = {
        0: [verdict("equal"), verdict("equal")],
        1: [verdict("equal"), verdict("unverified", tensors=0)],
        2: [other, verdict("equal")],
        3: [other],
    }
    assert merge_facts(by_rank) == [
        verdict("equal"),
        verdict("unverified on rank 1", tensors=0),
        other,
    ]


def test_facts_that_only_the_page_reads_are_not_merged():
    """They are large, and the page has those of each rank."""
    assert merge_facts({0: [{"kind": "graph_text", "packed": "x"}], 1: [EQUAL]}) == [EQUAL]


def test_a_sweep_is_as_bad_as_on_its_worst_rank():
    cell = {"kind": "sweep", "sweep": "s", "settings": {"size": 1}, "result": "equal", "why": ""}
    failed = {**cell, "result": "FAILED", "why": "claimed to be equal"}
    assert merge_facts({0: [cell], 1: [failed]}) == [failed]


@pytest.mark.parametrize("worst", [0, 1, 2])
def test_a_comparison_that_only_one_rank_could_not_verify_is_unverified(worst):
    part = {"kind": "comparison", "first": None, "tensors": 1, "actual": [], "expected": []}
    part |= {"more": 0, "differing": [], "what": ""}
    shown = {}
    for rank in range(3):
        shown[rank] = [{**part, "outcome": "unverified" if rank == worst else "equal"}]
    test = collected(report(gt_shown=shown))
    assert [each["outcome"] for each in test.comparisons()] == ["unverified"]
