"""The page of a test, from its reports and facts."""

import re

import pytest

from pytest_gtrainer.numerics.verdict import PHASES
from pytest_gtrainer.report import html
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import PageContent, build_details, render_page


def a_test(name="test_it", outcome="passed", longrepr=None, sections=(), **attributes):
    made = pytest.TestReport(name, ("a.py", 0, "a"), {}, outcome, longrepr, "call", list(sections))
    for key, value in attributes.items():
        setattr(made, key, value)
    test = Collected(name)
    test.add(made)
    return test


def test_goldens_verdicts_skips_and_what_is_not_shown_are_a_line_each():
    found = [
        {"kind": "golden", "name": "golden/a.fxgraph", "outcome": "equal"},
        {"kind": "verdict", "what": "ours against theirs", "outcome": "different"},
        {"kind": "verdict", "outcome": "equal"},
        {"kind": "skip", "cause": "8 ranks, 4 devices"},
        {"kind": "not_shown", "what": "a pass", "why": "no text"},
    ]
    assert build_details(a_test(gt_facts=found))["said"] == [
        "golden golden/a.fxgraph: equal",
        "verdict on ours against theirs: different",
        "verdict: equal",
        "skipped: 8 ranks, 4 devices",
        "not shown: a pass: no text",
    ]


def test_long_output_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(html, "_MOST_OUTPUT", 4)
    (section,) = build_details(a_test(sections=[("Captured stdout call", "123456")]))["sections"]
    assert section == ["Captured stdout call", "1234\n[... 2 more]"]


def test_a_failures_first_line_stands_in_the_list_and_in_what_is_searched():
    page = render_page(
        PageContent("run", "", [], [a_test(outcome="failed", longrepr="ValueError: Twice\nmore")])
    )
    assert '<pre class="message">ValueError: Twice\nmore</pre>' in page
    assert "valueerror: twice" in re.search(r'data-words="([^"]*)"', page)[1]


def test_what_tests_are_called_is_text_and_no_markup():
    page = render_page(PageContent("<b>run", "<i>made", ["<u>summary"], [a_test('t[<script>"]')]))
    assert "t[&lt;script&gt;&#34;]" in page
    for markup in ("<b>run", "<i>made", "<u>summary", "[<script>"):
        assert markup not in page


def test_digests_of_several_ranks_stand_in_the_order_of_a_step():
    """Random states first, clipped gradients behind gradients: the phases of ``numerics``, not an
    order of the page.
    """
    rows = [[0, rank, phase, "digest"] for phase in sorted(PHASES) for rank in (1, 0)]
    found = {
        "kind": "comparison",
        "first": None,
        "tensors": 1,
        "expected": [],
        "differing": [],
        "more": 0,
    }
    halves = {0: [{**found, "actual": rows[::2]}], 1: [{**found, "actual": rows[1::2]}]}
    [merged] = Collected("test", shown=halves).comparisons()
    assert [(phase, rank) for _, rank, phase, _ in merged["actual"]] == [
        (p, r) for p in PHASES for r in (0, 1)
    ]


def test_a_curve_that_a_test_asked_for_is_drawn_in_its_place_and_one_of_a_pass_beside_the_graph():
    found = [
        {"kind": "memory", "key": key, "asked": asked, "packed": key}
        for key, asked in (("one", True), ("two", False))
    ]
    test = a_test(gt_facts=found)
    assert build_details(test)["memories"] == ["one"]
    page = render_page(PageContent("run", "", [], [test]))
    assert all(
        f'<script type="text/plain" id="m-{key}">{key}</script>' in page for key in ("one", "two")
    )


@pytest.mark.parametrize("first", [0, 1, 7])
def test_pipelines_of_a_test_count_from_0_in_their_order_whatever_ran_before(first):
    """Its witness counts on if a test is run again; a later run compares them by their numbers."""
    test = Collected("a")
    report = pytest.TestReport("a", ("a", 0, "a"), {}, "passed", None, "call")
    report.gt_facts = []
    for kind, number in (("layout", 2), ("pass", 0), ("pass", 1), ("pass", 1), ("layout", 0)):
        fact = {"kind": kind, "pipeline": first + number, "name": f"{kind}{number}", "sides": []}
        report.gt_facts.append(fact)
    report.gt_facts.append({"kind": "layout", "pipeline": None, "problems": [], "sides": []})
    test.add(report)
    details = build_details(test)
    found = []
    for pipeline in details["pipelines"]:
        passes = [fact["name"] for fact in pipeline["passes"]]
        layouts = [fact["name"] for fact in pipeline["layouts"]]
        found.append((pipeline["number"], passes, layouts))
    assert found == [
        (0, ["pass0"], ["layout0"]),
        (1, ["pass1", "pass1"], []),
        (2, [], ["layout2"]),
    ]
    assert [fact["pipeline"] for fact in details["layouts"]] == [None]
