"""The front of the page: a card for each failed test, and what the passed tests have shown."""

import pytest

from pytest_gtrainer.report.cards import build_card, shown_by_world
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import PageContent, render_page

FAKE = {"kind": "world", "world": "fake", "size": 4}


def report(outcome="passed", when="call", message="", found=(), sections=()):
    made = pytest.TestReport(
        "test_it", ("test_it.py", 1, "test_it"), {}, outcome, message or None, when
    )
    made.gt_facts = list(found)
    made.sections = list(sections)
    return made


def a_test(*reports, name="test_it.py::test_it"):
    test = Collected(name)
    for each in reports or [report()]:
        test.add(each)
    return test


def fact(kind, outcome, **more):
    return {"kind": kind, "outcome": outcome, **more}


def called(name, held=True):
    return {"kind": "check", "name": name, "held": held}


def card(message, *found, when="call", sections=()):
    failed = report("failed", when, message, found, sections)
    return build_card(a_test(failed), "pytest test_it.py::test_it --gt-gpus=2")


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [
        (
            "another function",
            "pytest_gtrainer.AnotherFunction: x",
            [fact("verdict", "another function")],
        ),
        ("bits differ", "pytest_gtrainer.BitwiseDifference: x", [fact("verdict", "different")]),
        (
            "bits differ on rank 1",
            "[rank 1] pytest_gtrainer.BitwiseDifference: x",
            [fact("verdict", "different on rank 1")],
        ),
        (
            "reordered",  # the proof that follows a difference says more than its bits
            "pytest_gtrainer.BitwiseDifference: x",
            [fact("verdict", "different"), fact("kind", "reordered")],
        ),
        (
            "golden different",
            "pytest_gtrainer.GoldenMismatch: x",
            [fact("verdict", "equal"), fact("golden", "different")],
        ),
        (
            "rule broken",
            "pytest_gtrainer.RuleBroken: x",
            [{"kind": "conformance", "result": "broken"}],
        ),
        ("PeakExceeded", "pytest_gtrainer.graph.PeakExceeded: x", []),
        (
            "PeakExceeded",  # which says no outcome, behind a check that held
            "pytest_gtrainer.graph.PeakExceeded: x",
            [fact("verdict", "equal"), called("assert_bitwise_equal"), called("peak", held=False)],
        ),
        (
            "bits differ",
            "pytest_gtrainer.BitwiseDifference: x",
            [fact("kind", "identical"), called("proof"), fact("verdict", "different")]
            + [called("assert_bitwise_equal", held=False)],
        ),
        (
            "bits differ",  # what other ranks found stands behind
            "pytest_gtrainer.BitwiseDifference: x",
            [fact("verdict", "different"), called("bits", held=False)]
            + [fact("verdict", "equal"), called("bits")],
        ),
        # An assertion of the test's own, behind a check that held.
        ("AssertionError", "AssertionError: x", [fact("verdict", "equal")]),
        ("AssertionError", "[rank 3] AssertionError: x", []),
        ("failed", "no class", []),
    ],
)
def test_a_card_names_the_kind_of_the_check_that_failed(kind, message, found):
    assert card(message, *found).kind == kind


def test_a_failure_outside_of_the_call_says_in_which_phase():
    assert card("ValueError: no", when="setup").kind == "ValueError in setup"
    assert card("ValueError: no", when="teardown").kind == "ValueError in teardown"


@pytest.mark.parametrize("last", ["reordered", "identical"])
def test_of_two_failed_checks_the_kind_is_that_of_the_last(last):
    """The test has caught the first failure, and ended by the second."""
    first = fact("verdict", "different"), called("first", held=False)
    then = fact("kind", last), called("then", held=False)
    said = fact("verdict", "equal")  # behind the failure that ended the test
    assert card("pytest_gtrainer.AnotherFunction: x", *first, *then, said).kind == last


def test_an_error_in_setup_whose_teardown_held_is_one_in_setup():
    test = a_test(report("failed", "setup", "ValueError: no"), report(when="teardown"))
    assert build_card(test, "pytest").kind == "ValueError in setup"
    test = a_test(report(), report("failed", "teardown", "ValueError: no"))
    assert build_card(test, "pytest").kind == "ValueError in teardown"


def test_a_card_has_the_message_without_the_class_of_our_own_exceptions():
    found = card("[rank 1] pytest_gtrainer.AnotherFunction: expected 'reordered'\n  first at w")
    assert found.lines == ["[rank 1] expected 'reordered'", "  first at w"]
    assert card("ValueError: no").lines == ["ValueError: no"]
    assert card("").lines == []


def test_long_messages_are_cut_and_say_how_much_is_below():
    found = card("\n".join(f"line {number}" for number in range(20))).lines
    assert found[13:] == ["line 13", "… and 6 more lines below"]
    assert card("x" * 5_000).lines == ["x" * 1_400 + "…"]
    assert card("x" * 1_399 + "\nyy").lines == ["x" * 1_399, "… and 1 more line below"]


def test_a_card_ends_in_what_to_run_next():
    accept = {"kind": "accept", "command": "pytest a --gt-update-goldens"}
    message = "pytest_gtrainer.GoldenMismatch: differs\n\nto accept what was obtained:\n  pytest a"
    found = card(
        message, accept, sections=[("gtrainer next [rank 0]", "which pass it was: pytest b")]
    )
    assert found.lines == ["differs"]
    assert found.commands == [
        ("if what was obtained is right", "pytest a --gt-update-goldens"),
        ("which pass it was", "pytest b"),
        ("run it again", "pytest test_it.py::test_it --gt-gpus=2"),
    ]


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
def test_only_a_failed_test_has_a_card(outcome):
    assert build_card(a_test(report(outcome)), "") is None


def test_the_table_has_what_passed_tests_have_shown_by_world():
    tests = [
        a_test(report(found=[FAKE, fact("golden", "equal"), fact("verdict", "reordered")])),
        a_test(report(found=[FAKE, fact("verdict", "identical"), fact("verdict", "reordered")])),
        a_test(report(found=[fact("verdict", "equal"), fact("verdict", "different as required")])),
        a_test(report(found=[{"kind": "conformance", "result": "held"}])),
        a_test(report("failed", message="x", found=[FAKE, fact("verdict", "identical")])),
        a_test(report("skipped", found=[fact("golden", "equal")])),
        # What a test expects to fail is no result of the run.
        a_test(report(found=[fact("verdict", "different"), fact("golden", "different")])),
    ]
    assert shown_by_world(tests) == [
        ["world", "tests passed", "proofs", "bits", "goldens", "rules"],
        ["fake(4)", "2", "2 reordered, 1 identical", "", "1 equal", ""],
        ["this process", "3", "", "1 equal, 1 different as required", "", "1 held"],
    ]


def test_columns_without_a_result_are_left_out_and_a_run_without_any_has_no_table():
    checked = a_test(report(found=[fact("golden", "equal")]))
    assert shown_by_world([checked, a_test()]) == [
        ["world", "tests passed", "goldens"],
        ["this process", "2", "1 equal"],
    ]
    assert shown_by_world([a_test()]) == shown_by_world([]) == []


def test_the_page_has_the_cards_and_the_table_as_text():
    failed = a_test(
        report("failed", message="ValueError: <b>no</b>\x1b[31m"), name="t.py::test_<i>"
    )
    shown = a_test(report(found=[fact("golden", "equal", name="a.txt")]))
    page = render_page(
        PageContent("run", "", [], [failed, shown], folder="a b/", options=["--gt-gpus=2"])
    )
    assert "ValueError: &lt;b&gt;no&lt;/b&gt;\\x1b[31m" in page
    assert "<code>pytest &#39;a b/t.py::test_&lt;i&gt;&#39; --gt-gpus=2</code>" in page
    assert '<th scope="row">this process</th><td>1</td><td>1 equal</td>' in page
