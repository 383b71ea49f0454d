"""Tables, cards, cells and sums of the report, each as a whole."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest

from pytest_gtrainer import facts
from pytest_gtrainer.facts import unpacked
from pytest_gtrainer.report import html, markdown
from pytest_gtrainer.report.cards import _cut, build_card, shown_by_world
from pytest_gtrainer.report.changes import Earlier
from pytest_gtrainer.report.collected import ORDER, merge_facts, severity
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.plugin import ReportPlugin, digests_by_step, junit_properties
from pytest_gtrainer.report.repeats import (
    calls_by_rank,
    describe_differences,
    find_operator,
    has_records,
)
from pytest_gtrainer.report.terminal import (
    ConformanceTable,
    SummaryPlugin,
    _find_idle,
    _read_table,
    bounded,
    in_columns,
    net_table,
    summary_lines,
    sweep_table,
)


def report(when="call", outcome="passed", longrepr=None, sections=(), found=(), **more):
    made = pytest.TestReport(
        "a.py::t", ("a.py", 0, "t"), {}, outcome, longrepr, when, list(sections), 0.25
    )
    made.gt_facts = list(found)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def collected(*reports, name="a.py::t"):
    test = Collected(name)
    for each in reports:
        test.add(each)
    return test


def failed(message, when="call", **how):
    """A failed report whose short summary is this message."""
    try:
        raise ValueError("x")
    except ValueError:
        text = pytest.ExceptionInfo.from_current().getrepr()
    text.reprcrash.message = message
    return report(when, "failed", text, **how)


WORLD = {"kind": "world", "world": "ranks", "size": 2, "backend": "gloo", "device": "cpu"}
FAKE = {"kind": "world", "world": "fake", "size": 4, "backend": "fake", "device": "cpu"}


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([], "passed"),
        ([report("setup"), report()], "passed"),
        ([report(outcome="failed")], "failed"),
        ([report("setup", "failed")], "error"),
        ([report(), report("teardown", "failed")], "error"),
        ([report(outcome="skipped")], "skipped"),
        ([report(outcome="skipped", wasxfail="")], "xfailed"),
        ([report(wasxfail="")], "xpassed"),
    ],
)
def test_the_outcome_of_a_test_is_that_of_its_reports(reports, outcome):
    assert collected(*reports).outcome == outcome
    assert outcome in ORDER


@pytest.mark.parametrize("length", [299, 300, 301])
def test_the_headline_is_the_first_line_of_the_failure(length):
    message = "a" * length
    assert collected(failed(f"\n{message}\nmore")).headline == message[:300]
    assert collected(report(outcome="failed", longrepr=f"{message}\nb")).headline == message[:300]
    assert collected(report()).headline == collected(report()).message == ""
    assert collected(failed("first"), failed("second")).message == "first"


CHECKS = [
    ({"kind": "verdict", "outcome": "different: 2"}, "bits differ: 2"),
    ({"kind": "kind", "outcome": "another function"}, "another function"),
    ({"kind": "golden", "outcome": "missing"}, "golden missing"),
    ({"kind": "inline", "outcome": "different"}, "golden different"),
    ({"kind": "conformance", "result": "broken"}, "rule broken"),
    ({"kind": "world"}, "Deadlock"),
]


@pytest.mark.parametrize(("fact", "kind"), CHECKS)
def test_the_card_of_a_failed_check_says_its_outcome_and_the_rank_stays(fact, kind):
    earlier = {"kind": "golden", "outcome": "equal"}
    given = [fact] if fact["kind"] == "world" else [earlier, fact]
    card = build_card(
        collected(failed("[rank 1] pytest_gtrainer.Deadlock: words\nmore", found=given)), "again"
    )
    assert (card.kind, card.lines) == (kind, ["[rank 1] words", "more"])
    assert card.commands == [("run it again", "again")]


@pytest.mark.parametrize(
    ("test", "kind", "lines"),
    [
        (collected(failed("ValueError: words")), "ValueError", ["ValueError: words"]),
        (collected(failed("torch.a.B_Error: w")), "B_Error", ["torch.a.B_Error: w"]),
        (collected(failed("assert 1 == 2")), "failed", ["assert 1 == 2"]),
        (collected(failed("KeyError: 1", "setup")), "KeyError in setup", ["KeyError: 1"]),
        (
            collected(report("setup"), failed("no: words here", "teardown")),
            "no in teardown",
            ["no: words here"],
        ),
    ],
)
def test_the_card_of_another_failure_says_its_class(test, kind, lines):
    card = build_card(test, "again")
    assert (card.kind, card.lines) == (kind, lines)


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
def test_only_failed_tests_have_cards(outcome):
    assert build_card(collected(report(outcome=outcome)), "again") is None


def test_commands_of_a_card_come_in_the_order_in_which_they_help():
    accept = {"kind": "accept", "command": "pytest --gt-update-goldens"}
    sections = [(facts.NEXT, "which pass it was: pytest --gt-bisect"), ("stdout", "a: b")]
    message = f"AssertionError: words\n{facts.TO_ACCEPT} pytest"
    card = build_card(collected(failed(message, found=[accept], sections=sections)), "pytest a\nb")
    assert card.commands == [
        ("if what was obtained is right", "pytest --gt-update-goldens"),
        ("which pass it was", "pytest --gt-bisect"),
        ("run it again", "pytest a\\nb"),
    ]
    assert card.lines == ["AssertionError: words"]


@pytest.mark.parametrize("number", [1, 13, 14, 15, 16, 30])
def test_a_card_shows_fourteen_lines_and_counts_the_others(number):
    shown = _cut("\n".join(f"line {each}" for each in range(number)))
    assert shown[:14] == [f"line {each}" for each in range(min(number, 14))]
    more = {15: ["… and 1 more line below"], 16: ["… and 2 more lines below"]}
    more[30] = ["… and 16 more lines below"]
    assert shown[14:] == more.get(number, [])


def test_a_card_shows_1400_letters():
    assert _cut("a" * 1400) == ["a" * 1400]
    assert _cut("a" * 1401) == ["a" * 1400 + "…"]
    assert _cut("a" * 700 + "\n" + "b" * 700) == ["a" * 700, "b" * 700]
    assert _cut("a" * 700 + "\n" + "b" * 701) == ["a" * 700, "… and 1 more line below"]
    assert _cut(" \n") == []


def test_what_passed_tests_have_shown_by_world():
    def shown(*found, outcome="passed"):
        longrepr = "no" if outcome == "failed" else None
        return collected(report(outcome=outcome, longrepr=longrepr, found=found))

    def kinds(kind, *outcomes):
        return [{"kind": kind, "outcome": outcome} for outcome in outcomes]

    tests = [
        shown(WORLD, *kinds("verdict", "identical", "reordered", "identical", "another function")),
        shown(WORLD, *kinds("verdict", "equal", "equal (not finite)", "different as required")),
        shown(WORLD, *kinds("verdict", "different", "unverified")),
        shown(*kinds("golden", "equal", "created", "updated", "different", "missing")),
        shown(*kinds("inline", "equal"), *kinds("other", "equal")),
        shown(FAKE, *[{"kind": "conformance", "result": each} for each in ("held", "broken")]),
        shown(WORLD, *kinds("verdict", "equal"), outcome="failed"),
        shown(WORLD, *kinds("verdict", "equal"), outcome="skipped"),
    ]
    tests[7].reports[0].wasxfail = ""
    assert shown_by_world(tests) == [
        ["world", "tests passed", "proofs", "bits", "goldens", "rules"],
        ["fake(4)", "1", "", "", "", "1 held"],
        [
            "ranks(2, gloo on cpu)",
            "3",
            "2 identical, 1 reordered",
            "1 equal, 1 equal (not finite), 1 different as required",
            "",
            "",
        ],
        ["this process", "2", "", "", "2 equal, 1 created, 1 updated", ""],
    ]
    assert shown_by_world(tests[6:]) == shown_by_world([shown(WORLD)]) == []
    assert shown_by_world(tests[5:6]) == [
        ["world", "tests passed", "rules"],
        ["fake(4)", "1", "1 held"],
    ]


def verdict(outcome, what="loss", **more):
    return {"kind": "verdict", "outcome": outcome, "what": what, **more}


@pytest.mark.parametrize(
    ("outcomes", "merged"),
    [
        (["equal"] * 3, "equal"),
        (["equal", "different", "different"], "different on ranks 1, 2"),
        (["unverified", "different", "equal"], "different on rank 1"),
        (["equal", "different as required", "equal"], "different as required"),
        (["different as required", "equal on this rank"], "different as required"),
        (["equal", "equal (not finite)"], "equal (not finite) on rank 1"),
        (["equal, control failed", "different"], "equal, control failed on rank 0"),
        (["something new", "FAILED"], "something new on rank 0"),
    ],
)
def test_the_worst_of_all_ranks_counts_and_names_its_ranks(outcomes, merged):
    by_rank = {rank: [verdict(outcome)] for rank, outcome in reversed([*enumerate(outcomes)])}
    assert merge_facts(by_rank) == [verdict(merged)]
    assert max(outcomes, key=severity) == merged.partition(" on rank")[0]


def test_facts_of_ranks_are_merged_by_what_they_check_and_how_often():
    first = [verdict("equal"), verdict("different"), verdict("equal", "w"), {"kind": "pass"}]
    second = [verdict("unverified", tensors=3), verdict("equal"), verdict("different", "v")]
    rules = [{"kind": "conformance", "rule": "r", "result": each} for each in ("held", "broken")]
    assert merge_facts({1: [*second, rules[0]], 0: [*first, rules[1]]}) == [
        verdict("unverified on rank 1", tensors=3),
        verdict("different on rank 0"),
        verdict("equal", "w"),
        rules[1],
        verdict("different", "v"),
    ]


def comparison(what, outcome="equal", first=None, must_differ=False, **more):
    made = {"kind": "comparison", "what": what, "outcome": outcome, "must_differ": must_differ}
    made |= {"tensors": 2, "more": 1, "first": first, "differing": [first] if first else []}
    made |= {"actual": [], "expected": [], "verdict": outcome, "values": ["v"]}
    return made | more


def test_comparisons_of_ranks_are_one_for_each_subject_in_its_turn():
    late = comparison("a", "different", [2, 0, "loss", "l"], actual=[[1, 0, "loss", "d"]])
    early = comparison("a", "different", [1, 1, "loss", "l"], actual=[[0, 1, "loss", "e"]])
    control = comparison("a", must_differ=True)
    test = collected()
    test.shown = {1: [early, control], 0: [late, comparison("a"), comparison("b", "unverified")]}
    first, second, third, fourth = test.comparisons()
    assert (first["what"], first["first"], first["outcome"]) == ("a", early["first"], "different")
    assert (first["tensors"], first["more"], first["values"]) == (4, 2, ["v", "v"])
    assert first["differing"] == [late["first"], early["first"]]
    assert first["actual"] == [(0, 1, "loss", "e"), (1, 0, "loss", "d")]
    assert (second["what"], second["must_differ"], second["tensors"]) == ("a", False, 2)
    assert (third["what"], third["outcome"]) == ("b", "unverified")
    assert (fourth["what"], fourth["must_differ"]) == ("a", True)
    test.shown = {0: [comparison("a")], 1: [comparison("a", "unverified")], 2: [comparison("a")]}
    assert [each["outcome"] for each in test.comparisons()] == ["unverified"]


def test_facts_are_those_of_the_lowest_rank_that_has_some():
    test = collected()
    test.shown = {3: [{"kind": "pass", "of": 3}], 1: [{"kind": "pass", "of": 1}], 0: []}
    assert test.find("pass") == [{"kind": "pass", "of": 1}]
    assert test.find("layout") == []


@hypothesis.given(st.lists(st.text("ab, ", max_size=12), max_size=6), st.integers(2, 5))
@hypothesis.settings(deadline=None)
def test_a_bounded_text_loses_only_what_it_says(lines, most):
    shown = bounded(lines, most=most, letters=6)
    assert len(shown) == min(len(lines), most)
    whole = shown if len(lines) <= most else shown[:-1]
    if len(lines) > most:
        left = len(lines) - most + 1
        assert shown[-1] == f"… and {left} more lines: --gt-report FILE has all of them"
    for line, cut in zip(lines, whole, strict=False):
        head = line[:6].rpartition(", ")[0]
        if len(line) > 6 and head:
            assert cut == f"{head}, …: --gt-report FILE has the whole line"
        else:
            assert cut == line


def test_columns_are_as_wide_as_their_widest_cell_and_whole_numbers_stand_right():
    assert in_columns([("a", "n", "mixed"), ("bbb", 5, 1), ("c", 1000, "x")]) == [
        "a       n  mixed",
        "bbb     5  1",
        "c    1000  x",
    ]


def test_a_sweep_shows_what_was_judged_and_counts_the_rest_by_reason():
    def row(result, why="", **settings):
        return {"settings": settings, "result": result, "why": why}

    judged = [row("held", "", ranks=2, kind="a"), row("broken", "w", ranks=16, kind="bb")]
    reasons = ("no GPU", "slow", "no GPU")
    others = [row("not judged", why, ranks=1, kind="c") for why in reasons]
    assert sweep_table([*others[:1], *judged, *others[1:]]) == [
        "ranks  kind  result  why",
        "    2  a     held",
        "   16  bb    broken  w",
        "2 cells not judged: no GPU",
        "1 cell not judged: slow",
        "3 not judged, 1 held, 1 broken",
    ]
    assert sweep_table(others[:1]) == ["1 cell not judged: no GPU", "1 not judged"]


def test_nets_are_sorted_by_number_and_then_by_word():
    names = ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate", "result")
    rows = [(16, 1, 2, "ring", "even", "f32", "equal"), (2, 1, "x", "ring", "even", "f32", "a")]
    rows.append((2, 1, 8, "tree", "even", "f32", "b"))
    table = net_table([dict(zip(names, row, strict=True)) for row in rows])
    assert [line.split() for line in table] == [
        list(names),
        *([str(cell) for cell in rows[place]] for place in (2, 1, 0)),
    ]


def fact(kind, **fields):
    return {"kind": kind, **fields}


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ([WORLD, FAKE, WORLD], ["worlds    1 test in fake(4), 2 tests in ranks(2, gloo on cpu)"]),
        ([fact("golden", outcome="equal")] * 11, ["goldens   11 equal"]),
        ([fact("inline", outcome="created")], ["inline    1 created"]),
        ([fact("kind", outcome="reordered")], ["kinds     1 reordered"]),
        (
            [
                fact("conformance", rule="r", result=result, **{"pass": "p"})
                for result in ("held", "held", "broken", "error", "not claimed")
            ],
            ["rules     2 held, 1 not claimed, 1 r of p broken, 1 r of p error"],
        ),
        ([fact("skip", cause="no GPU")] * 2, ["skipped   2 no GPU"]),
        ([fact("repeat", what="the same (3 times)")], ["repeated  1 the same (3 times)"]),
        ([fact("leak", test="t", what="seeds")], ["leaked    1 t changed seeds"]),
        ([fact("left", test="t", what="a file")], ["left      1 a file by t"]),
        ([], []),
    ],
)
def test_each_topic_of_the_summary_is_a_line_with_counts(found, lines):
    assert [sorted(re.split(", (?=[0-9])", line)) for line in summary_lines(found)] == [
        sorted(re.split(", (?=[0-9])", line)) for line in lines
    ]


def test_topics_come_in_one_order():
    kinds = ("world", "golden", "inline", "verdict", "kind", "conformance", "assumed", "idle")
    kinds += ("skip", "repeat", "leak", "left")
    found = [
        {**FAKE, "rule": "r", "pass": "p", "result": "held", "outcome": "o", "what": "w"}
        | {"cause": "c", "test": "t", "kind": kind}
        for kind in reversed(kinds)
    ]
    titles = "worlds goldens inline verdicts kinds rules assumed idle skipped repeated leaked left"
    assert [line.split()[0] for line in summary_lines(found)] == titles.split()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([fact("sweep", sweep="s", result="not judged")], ["sweep s: its cell was not judged"]),
        (
            [fact("sweep", sweep="s", result="not judged")] * 3,
            ["sweep s: none of its 3 cells was judged"],
        ),
        ([fact("sweep", sweep="s", result=each) for each in ("not judged", "held")], []),
        (
            [fact("conformance", **{"pass": "p"}, result="not claimed")] * 2,
            ["conformance of p: no rule is claimed"],
        ),
        (
            [fact("conformance", **{"pass": "p"}, result=each) for each in ("held", "not claimed")],
            [],
        ),
        (
            [fact("golden_use", test="t", checks=False)] * 2,
            ["t asks for gt_golden and checks nothing"] * 2,
        ),
        ([fact("golden_use", test="t", checks=each) for each in (False, True)], []),
    ],
)
def test_what_checked_nothing_in_a_whole_run_is_idle(found, words):
    other = [fact("sweep", sweep="other", result="held"), fact("golden_use", test="o", checks=True)]
    assert _find_idle([*other, *found]) == [fact("idle", what=what) for what in words]


CALLS = [("aten.add", "a.py:1", "1"), ("aten.mul", "a.py:2", "2"), ("aten.sin", "a.py:3", "3")]
REDUCE = ("_c10d_functional.all_reduce", "a.py:9", "9")


def other(call, digest="x"):
    return (*call[:2], digest)


ADD, MUL, SIN = (
    f"aten.{name} at a.py:{line}" for line, name in enumerate(("add", "mul", "sin"), 1)
)
NOTHING = (
    "no operator was called: fixtures, other threads and processes are not observed",
    "no operator differs: the difference is rare (repeat more often), or comes from compiled "
    "code, a trace, a fixture, another thread or process",
)


@pytest.mark.parametrize(
    ("repetitions", "words"),
    [
        (
            [{0: CALLS}, {0: CALLS}, {0: [*CALLS[:2], other(CALLS[2])]}],
            f"first operator: {SIN}, call 3 of 3",
        ),
        ([{0: CALLS}, {0: list(map(other, CALLS))}], f"first operator: {ADD}, call 1 of 3"),
        ([{0: CALLS}, {0: CALLS[:2]}], f"repetitions part at call 3: {SIN}, or the end"),
        ([{0: CALLS[:1]}, {0: CALLS}], f"repetitions part at call 2: {MUL}, or the end"),
        (
            [{0: CALLS}, {0: [CALLS[0], CALLS[2]]}],
            f"repetitions part at call 2: {MUL}, or {SIN}",
        ),
        (
            [{0: CALLS}, {0: [("aten.add", "b.py:7", "1")]}],
            f"repetitions part at call 1: {ADD}, or aten.add at b.py:7",
        ),
        ([{1: CALLS}, {1: [other(CALLS[0])]}], f"first operator: {ADD}, call 1 of 3, on rank 1"),
        (
            [{0: [REDUCE], 1: CALLS}, {0: [other(REDUCE)], 1: [*CALLS[:2], other(CALLS[2])]}],
            f"first operator: {SIN}, call 3 of 3, on rank 1",
        ),
        ([{0: CALLS, 2: CALLS}, {1: CALLS}], NOTHING[1]),
        ([{0: []}, {0: CALLS[:0]}, {0: []}], NOTHING[0]),
        ([{0: []}, {1: CALLS}], NOTHING[1]),
        ([{}, {}], NOTHING[0]),
    ],
)
def test_the_operator_that_differs_between_repetitions_is_named(repetitions, words):
    assert find_operator(repetitions) == words


def test_calls_are_gathered_by_rank_and_records_are_numbers_graphs_or_layouts():
    test = collected()
    test.shown = {
        2: [fact("calls", calls=[list(CALLS[0])]), fact("calls", calls=[list(CALLS[1])])],
        0: [fact("calls", calls=[]), fact("schedule")],
    }
    assert calls_by_rank(test) == {2: CALLS[:2], 0: []}
    assert not has_records(test)
    for kind in ("comparison", "pass", "layout"):
        test.shown = {1: [fact(kind)]}
        assert has_records(test), kind


def test_verdicts_of_which_no_numbers_are_kept_are_named():
    """Numbers of any rank count."""
    test = collected()
    test.facts = [
        fact("verdict", outcome="equal", what="loss"),
        fact("verdict", outcome="reordered", what="proof"),
        fact("verdict", outcome="equal", what=""),
        fact("verdict", outcome="identical", what="proof"),
    ]
    assert test.verdicts_alone() == ["loss", "proof", "a check"]
    test.shown = {0: [fact("schedule")], 2: [fact("comparison", what="loss")]}
    assert test.verdicts_alone() == ["proof", "a check"]
    test.shown[1] = [fact("comparison", what=""), fact("comparison", what="proof")]
    assert test.verdicts_alone() == []


@pytest.mark.parametrize("folder", ["", "tests/", "a b/"])
def test_a_test_is_run_again_from_the_working_directory(folder):
    run = html.PageContent(
        "t", "m", [], [collected(name="a.py::t[x y]")], folder=folder, options=["--o=1"]
    )
    quoted = f"'{folder}a.py::t[x y]'"
    assert run.again(run.tests[0]) == f"pytest {quoted} --o=1"


def test_tests_of_a_page_stand_failures_first_and_are_counted():
    tests = [
        collected(report(outcome="skipped"), name="s"),
        collected(report(), name="p1"),
        collected(failed("x"), name="f"),
        collected(report("setup", "failed"), name="e"),
        collected(report(), name="p2"),
    ]
    run = html.PageContent("a\nb", "c\nd", ["e\nf"], tests)
    assert [test.name for test in run.tests] == ["f", "e", "p1", "p2", "s"]
    assert [each["name"] for each in run.details] == ["f", "e", "p1", "p2", "s"]
    assert run.counts == [("failed", 1), ("error", 1), ("passed", 2), ("skipped", 1)]
    assert (run.title, run.provenance, run.summary) == ("a\\nb", "c\\nd", ["e\\nf"])


def test_details_of_a_test_say_what_was_checked_and_what_cannot_be_shown():
    rule = {"rule": "r", "says": "s", "pass": "p", "result": "held", "why": "w"}
    found = [
        fact("golden", name="g", outcome="equal"),
        verdict("equal"),
        verdict("different", ""),
        fact("kind", outcome="reordered"),
        fact("skip", cause="no GPU"),
        fact("conformance", **rule),
        fact("not_shown", what="a pass", why="KeyError: 1"),
        fact("memory", key="k1", asked=True),
        fact("memory", key="k2", asked=False),
        fact("layout", pipeline=None, sides=[], problems=[]),
        fact("layout", pipeline=3, sides=[], problems=[]),
        fact("layout", pipeline=5, sides=["x"], problems=[]),
        fact("pass", pipeline=3, name="f"),
        fact("golden_text", name="g", of="graph", key="k", packed="p"),
    ]
    sections = [["out", "a" * 200_001], ["err", "b" * 200_000]]
    test = collected(report("setup"), report(found=found), report("teardown", sections=sections))
    details = html.build_details(test)
    assert details["said"] == [
        "golden g: equal",
        "verdict on loss: equal",
        "verdict: different",
        "in exact arithmetic: reordered",
        "skipped: no GPU",
        "rule r (s) of p: held. w",
        "not shown: a pass: KeyError: 1",
    ]
    assert details["seconds"] == 0.75
    assert details["memories"] == ["k1"]
    assert [each["pipeline"] for each in details["layouts"]] == [None]
    pipelines = []
    for each in details["pipelines"]:
        pipelines.append((each["number"], len(each["passes"]), len(each["layouts"])))
    assert pipelines == [(0, 1, 1), (2, 0, 1)]
    assert details["claims"] == [{"name": "g", "of": "graph", "key": "k"}]
    assert details["sections"] == [["out", "a" * 200_000 + "\n[... 1 more]"], sections[1]]
    assert details["failures"] == []
    assert details["earlier"] == {"lines": [], "graphs": [], "moved": False}


@pytest.mark.parametrize("is_failed", [False, True])
def test_the_row_of_a_test_shows_its_time_and_what_its_card_does_not_say(is_failed):
    test = collected(failed("Own: words") if is_failed else report(found=[FAKE]))
    details = html.build_details(test)
    details["changed"], details["earlier"]["lines"] = ["own change"], ["e" * 400]
    details["pipelines"] = [{"passes": [{"name": "MyPass"}]}]
    row = html._build_row(test, details, "again")
    assert row["changed"] == ([] if is_failed else ["own change"]) + ["e" * 300]
    assert (row["name"], row["time"]) == ("a.py::t", "0.25 s")
    assert (row["card"] is not None) == is_failed
    begin = ["a.py::t", "failed" if is_failed else "passed", "" if is_failed else "fake(4)"]
    headline = "own: words" if is_failed else ""
    words = [*begin, "mypass", headline, "own change", *row["changed"]]
    assert row["words"] == " ".join(words)
    assert unpacked(row["packed"]) == html.json.dumps(details)
    test.name = "n" * 3000
    assert len(html._build_row(test, details, "again")["words"]) == 2000


@pytest.mark.parametrize("count", [1, 50, 51])
def test_a_summary_lists_fifty_failed_tests_and_counts_the_others(count):
    one = failed("words")
    tests = [collected(one, name=f"t{number}") for number in range(count)]
    text = markdown.render_summary(html.PageContent("T", "made", ["line"], tests))
    assert text.startswith(f"## T: {count} failed\n\nmade\n\n```text\nline\n```\n\n### Failed\n\n")
    assert text.count("<details>") == min(count, 50)
    assert text.endswith(f"… and {count - 50} more.\n") == (count > 50)
    assert "### Changed" not in text


def test_the_summary_of_a_test_as_a_whole():
    test = collected(failed("head*line\nmore", found=[WORLD]), name="a.py::t[`x`]")
    text = markdown._render_test(test, ["a *b*", "by @you"], "pytest 'a b'")
    head, _, rest = text.partition("\n<details>")
    assert head == (
        "**`` a.py::t[`x`] ``** failed, ranks(2, gloo on cpu)\n\n- a \\*b\\*\n- by `@you`\n"
    )
    assert rest.startswith("<summary>The failure</summary>\n\n```text\n")
    assert rest.endswith("\n```\n\nRun it again: `pytest 'a b'`\n\n</details>")
    assert markdown._render_test(collected(report()), ["c"], "x") == "**`a.py::t`** passed\n\n- c"
    run = html.PageContent("T", "m", [], [test])
    run.details[0]["changed"] = ["own change"]
    run.details[0]["earlier"]["lines"] = ["passed then, failed now"]
    shown = re.findall("^- (.*)", markdown.render_summary(run), re.M)
    assert shown == ["head\\*line", "own change", "passed then, failed now"]


_PIECES = ["`", "```", "`````", "a", "\n", " ", "*", "_", "[", "]", "|", "#", "@", "<"]


@hypothesis.given(st.lists(st.sampled_from(_PIECES), min_size=1).map("".join))
@hypothesis.settings(deadline=None)
def test_code_and_fences_hold_any_text(content):
    code = markdown.code(content)
    ticks = re.match("`+", code)[0]
    inner = code[len(ticks) : -len(ticks)]
    assert code.endswith(ticks)
    assert ticks not in re.findall("`+", inner)
    assert inner.strip() == " ".join(content.split())
    assert "`" not in content or (inner[0] == inner[-1] == " ")
    lines = markdown.fenced(content).split("\n")
    assert lines[0] == lines[-1] + "text"
    assert len(lines[-1]) == max(3, *(1 + len(each) for each in re.findall("`+", content) or [""]))
    assert "\n".join(lines[1:-1]) == facts.escaped(content)


def test_properties_of_a_test_in_a_junit_file():
    rows = [[1, 0, "loss", "a"], [0, 0, "loss", "b"], [0, 1, "loss", "c"], [0, 0, "weight", "d"]]
    made = comparison("w", actual=rows, expected=rows[:1])
    found = [WORLD, {**FAKE, "size": 4}, fact("golden", name="g", outcome="equal")]
    test = collected(report(found=[*found, verdict("equal"), verdict("different", None)]))
    test.shown = {0: [made, comparison(None, actual=rows[:1])]}
    # Rows of a merged comparison stand in the order of a page.
    digests = digests_by_step(test.comparisons()[0]["actual"])
    assert list(junit_properties(test)) == [
        ("gt_world", test.world),
        ("gt_ranks", "4"),
        ("gt_golden", "g: equal"),
        ("gt_verdict", "loss: equal"),
        ("gt_verdict", "comparison: different"),
        ("gt_digest", f"w, step 0: actual {digests[0]}"),
        ("gt_digest", f"w, step 1: actual {digests[1]}, expected {digests[1]}"),
        ("gt_digest", f"comparison, step 1: actual {digests[1]}"),
    ]
    assert re.fullmatch("[0-9a-f]{16}", digests[0])
    for place in range(4):
        changed = [list(row) for row in rows]
        changed[1][place] = {0: 5, 1: 7, 2: "gradient", 3: "x"}[place]
        assert digests_by_step(changed) != digests_by_step(rows)


def test_counts_of_outcomes_name_all():
    assert Counter(ORDER) == Counter(("failed", "error", "xpassed", "passed", "xfailed", "skipped"))


def rules(**results):
    return {rule: {"rule": rule, "result": result} for rule, result in results.items()}


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        (None, []),
        ({"p": rules(a="held", b="broken")}, ["no rule has another result than before"]),
        ({"q": rules(a="held", b="broken")}, ["no rule has another result than before"]),
        (
            {"q": rules(a="error"), "p": rules(a="broken", b="held")},
            ["a: was broken, is held", "b: was held, is broken"],
        ),
        ({"p": rules(a="held")}, ["b: was not judged, is broken"]),
        ({}, ["a: was not judged, is held", "b: was not judged, is broken"]),
        (
            {"p": rules(a="held", b="broken", c="held", d="error")},
            ["in the table before and not in this run: c (held), d (error)"],
        ),
    ],
)
def test_results_of_rules_are_compared_with_a_table_before(before, lines):
    table = SimpleNamespace(_before=before)
    assert ConformanceTable._changes(table, "p", rules(a="held", b="broken")) == lines


VAIN = (
    "no rule could have failed: p finds nothing to do in these graphs. Choose other rules, say "
    "which kind of pass it is (--gt-kind), or test it by pass files, on graphs of your own"
)
UNCLAIMED = "no rule was judged: p claims none of the rules that were chosen. Choose others"


@pytest.mark.parametrize(
    ("results", "is_asked", "words"),
    [
        ({"held"}, True, None),
        ({"held", "proves nothing"}, True, None),
        ({"broken", "not claimed"}, True, None),
        ({"error"}, True, None),
        ({"proves nothing"}, True, VAIN),
        ({"proves nothing"}, False, VAIN),
        ({"proves nothing", "not claimed"}, True, VAIN),
        ({"proves nothing", "held beside the graph"}, True, VAIN),
        ({"held beside the graph"}, True, None),
        ({"not claimed"}, True, UNCLAIMED),
        ({"not claimed"}, False, None),
    ],
)
def test_a_pass_of_which_no_rule_was_judged_is_said(results, is_asked, words):
    table = SimpleNamespace(
        _results={"p": results}, _names_a_pass=is_asked, _asked=[], _tests_ran=True, _rows={"p": {}}
    )
    assert ConformanceTable._nothing_judged(table) == ([words] if words else [])


@pytest.mark.parametrize(
    ("asked", "named", "ran", "rows", "shown"),
    [
        (["--gt-pass", "--gt-kind"], True, True, {}, "--gt-pass and --gt-kind"),
        ([], True, True, {}, "gt_pass"),
        (["--gt-conformance"], False, True, {}, "--gt-conformance"),
        ([], False, True, {}, None),
        (["--gt-pass"], True, False, {}, None),
        (["--gt-pass"], True, True, {"p": {}}, None),
    ],
)
def test_options_without_a_test_of_conformance_are_said(asked, named, ran, rows, shown):
    table = SimpleNamespace(
        _results={}, _names_a_pass=named, _asked=asked, _tests_ran=ran, _rows=rows
    )
    words = (
        f"no rule was judged for {shown}: no test of conformance has run. Choose some by --pyargs "
        "pytest_gtrainer.conformance; -rs says why those that were chosen are skipped"
    )
    assert ConformanceTable._nothing_judged(table) == ([words] if shown else [])


def test_the_worst_result_of_a_rule_counts_and_one_that_holds_beside_the_graph_alone_does_not():
    table = SimpleNamespace(_rows={}, _results={}, _tests_ran=False)

    def judged(rule, result, outcome="passed"):
        found = [{"kind": "conformance", "rule": rule, "pass": "p", "result": result}]
        ConformanceTable.pytest_runtest_logreport(table, report(outcome=outcome, found=found))

    for result in ("held", "error", "broken", "not claimed", "proves nothing"):
        judged("a", result)
    judged("state", "held")
    judged("state", "proves nothing", outcome="skipped")
    assert {rule: row["result"] for rule, row in table._rows["p"].items()} == {
        "a": "error",
        "state": "proves nothing",
    }
    assert table._results == {
        "p": {"held", "error", "broken", "held beside the graph", "proves nothing"}
    }
    assert table._tests_ran


@pytest.mark.parametrize("content", ["", "[]", '{"p": {"a": {}}}', '{"p": {"a": {"result": "x"}}}'])
def test_what_is_no_table_of_conformance_is_one_sentence(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_text('{"p": {"a": {"result": "held"}}}')
    assert _read_table("t", path) == {"p": {"a": {"result": "held"}}}
    path.write_text(content)
    with pytest.raises(pytest.UsageError) as caught:
        _read_table("a/t.json", path)
    begin = "--gt-conformance-against=a/t.json: this is no table that --gt-conformance wrote ("
    assert str(caught.value).startswith(begin)


@pytest.mark.parametrize(("second", "is_shown"), [({}, False), ({"ranks": 4}, True)])
def test_nets_of_a_test_are_a_table_if_there_are_several(second, is_shown):
    names = ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate", "result")
    net = {"kind": "net", **dict.fromkeys(names, 1)}
    plugin = SummaryPlugin(None)
    for number, more in enumerate(({}, second)):
        made = report(found=[{**net, **more}, {"kind": "pass"}])
        made.nodeid = f"a.py::test[{number}]"
        plugin.pytest_runtest_logreport(made)
    assert [fact["kind"] for fact in plugin.facts] == ["net", "net"]
    plugin.lines = list
    written = []
    reporter = SimpleNamespace(
        write_sep=lambda sign, title: written.append(title), write_line=written.append
    )
    plugin.pytest_terminal_summary(reporter)
    assert written[:1] == ["nets of a.py::test"] * is_shown
    assert len(written) == 4 * is_shown


def test_issues_of_any_number_are_in_code():
    assert markdown.text("see #1 and #12") == "see `#1` and `#12`"


def test_repetitions_that_differ_are_numbered_from_the_second():
    def repetition(digest):
        test = collected(report("setup"), report(), report("teardown"))
        test.shown = {0: [comparison("w", actual=[[0, 0, "loss", digest]])]}
        return test

    same, other = repetition("a"), repetition("b")
    words = "against 1: w: other numbers than then, first at step 0, rank 0, loss"
    assert describe_differences([same, same, other, same, other]) == [
        f"repetition 3 {words}",
        f"repetition 5 {words}",
    ]


def test_claims_of_both_runs_are_compared_by_their_texts():
    def claiming(content):
        test = collected(report("setup"), report(), report("teardown"))
        made = {"name": "g", "of": "text", "key": content, "packed": facts.packed(content)}
        test.shown = {0: [fact("golden_text", **made)]}
        return test

    then = claiming("one")
    earlier = Earlier(Path(), {then.name: html.build_details(then)}, {"one": facts.packed("one")})
    [line] = html.build_details(claiming("two"), earlier)["earlier"]["lines"]
    assert line.startswith("g: ")


@pytest.mark.parametrize("is_job_page", [False, True])
def test_the_page_of_a_job_is_appended_to_and_any_other_file_is_new(
    request, tmp_path, monkeypatch, is_job_page
):
    """Each step of a job on GitHub appends to one file."""
    files = {"summary": tmp_path / "s.md", "report": tmp_path / "r.html"}
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(files["summary"] if is_job_page else "other.md"))
    plugin = ReportPlugin.__new__(ReportPlugin)
    plugin.config, plugin.paths, plugin._session = request.config, files, None
    plugin.earlier = plugin.revision = None
    plugin._tests = {"test_it.py::test_it": Collected("test_it.py::test_it")}
    said = []
    for file in files.values():
        file.write_text("of an earlier step\n")
    for _ in range(2):
        said.append(plugin._write())
    summary, page = (file.read_text() for file in files.values())
    assert summary.count("of an earlier step") == is_job_page
    assert summary.count("pytest-gtrainer:") == 1 + is_job_page, "a summary for each run"
    assert page.count("<h1>") == 1
    assert "of an earlier step" not in page
    assert said[0] == said[1] == [(f"{name} in {file}", False) for name, file in files.items()]
