"""A sweep ends in one table: equal, known to differ, not judged; unknown cells and wrong claims
fail.
"""

import unittest

import pytest
import torch

from pytest_gtrainer import Rule, Sweep, facts
from pytest_gtrainer.numerics.sweep import UnknownCell

TEST = """
    import pytest, torch
    from pytest_gtrainer import Rule, Sweep

    SWEEP = Sweep("sums", {"order": ("up", "down"), "graph": (False, True), "chunks": (1, 2, 3)}, [
        Rule("not judged", {"graph": True}, reason="needs a GPU"),
        Rule("different", {"order": "down", "chunks": (1, 2)}, reason="adds backwards"),
        Rule("equal", {"chunks": (1, 2)}, to="the sum in order"),
    ])

    @pytest.mark.parametrize("cell", SWEEP.cells, ids=str)
    def test_sweep(cell):
        with SWEEP.judging(cell) as judge:
            value = 1.0 if cell["order"] == "up" or (cell["chunks"] == 2 and WRONG) else 2.0
            judge(torch.tensor(value), torch.tensor(1.0))

    WRONG = False
"""


@pytest.fixture(autouse=True)
def told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_sinks", [])


def test_every_cell_is_in_the_table(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=4, failed=2, skipped=6)
    result.stdout.fnmatch_lines(
        [
            "*- sweep sums -*",
            "order  graph  chunks  result     why",
            "up     off    1       equal      to the sum in order",
            "up     off    2       equal      to the sum in order",
            "up     off    3       UNKNOWN    no rule fits",
            "down   off    1       different  adds backwards",
            "down   off    2       different  adds backwards",
            "down   off    3       UNKNOWN    no rule fits",
            "6 cells not judged: needs a GPU",
            "2 equal, 2 UNKNOWN, 6 not judged, 2 different",
        ],
        consecutive=True,
    )
    result.stdout.fnmatch_lines(
        ["E*UnknownCell: sweep 'sums' claims nothing about up-graph_off-chunks3: add a rule*"]
    )
    result.stdout.no_fnmatch_line("*contextlib*")


def test_a_wrong_claim_fails_and_shows(pytester: pytest.Pytester):
    """The twin: one cell that is known to differ does not."""
    pytester.makepyfile(test_it=TEST.replace("WRONG = False", "WRONG = True"))
    result = pytester.runpytest_inprocess("-k", "chunks1 or chunks2")
    result.assert_outcomes(passed=3, failed=1, skipped=4, deselected=4)
    result.stdout.fnmatch_lines(
        [
            "E*ControlFailed: sweep sums, down-graph_off-chunks2",
            "down   off    2       FAILED     claimed to be different",
        ]
    )


@pytest.mark.parametrize(
    ("chosen", "idle"),
    [
        ("graph_on", "1 sweep sums: none of its 6 cells was judged"),
        ("graph_on and up-graph_on-chunks1", "1 sweep sums: its cell was not judged"),
        ("chunks1", None),
    ],
)
def test_a_sweep_of_which_no_cell_was_judged_is_named(pytester, chosen, idle):
    """Its tests are skipped, so the run is green."""
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess("-k", chosen)
    assert result.ret == 0
    found = [line for line in result.outlines if line.startswith("idle ")]
    assert found == ([] if idle is None else [f"idle      {idle}"])


def test_a_cell_whose_test_compares_nothing_fails():
    sweep = Sweep("s", {"a": (1,)}, [Rule("equal", to="itself")])
    with (
        pytest.raises(AssertionError, match="the test of a1 compared nothing"),
        sweep.judging(sweep.cells[0]),
    ):
        pass


def test_a_cell_that_cannot_be_judged_is_skipped_with_the_reason():
    sweep = Sweep("s", {"a": (1,)}, [Rule("not judged", reason="needs a GPU")])
    with (
        facts.collecting() as seen,
        pytest.raises(unittest.SkipTest, match=r"^not judged: needs a GPU$"),
        sweep.judging(sweep.cells[0]),
    ):
        pass
    [fact] = seen
    assert fact == {
        "kind": "sweep",
        "sweep": "s",
        "settings": {"a": "1"},
        "result": "not judged",
        "why": "needs a GPU",
    }


REFUSED = Sweep("s", {"a": (1,)}, [Rule("refused", reason="give an even number")])
KNOWN = Sweep("s", {"a": (1,)}, [Rule("different", reason="adds backwards")])
SAME = Sweep("s", {"a": (1,)}, [Rule("equal", to="itself")])
EVEN = ValueError("odd: give an even number")


@pytest.mark.parametrize(
    ("sweep", "raised", "values", "result", "failure"),
    [
        (REFUSED, EVEN, (), ("refused", "give an even number"), None),
        (REFUSED, TypeError("give an even number"), (), ("refused", "give an even number"), None),
        (
            REFUSED,
            None,
            (),
            ("FAILED", "nothing refused it"),
            "a1 is not refused, with 'give an even number'",
        ),
        (REFUSED, ValueError("too large"), (), ("FAILED", "claimed to be refused"), "too large"),
        (
            REFUSED,
            ValueError("give an even numbering"),
            (),
            ("FAILED", "claimed to be refused"),
            "give an even numbering",
        ),
        (
            REFUSED,
            KeyError("give an even number"),
            (),
            ("FAILED", "claimed to be refused"),
            "give an even number",
        ),
        (SAME, EVEN, (), ("FAILED", "claimed to be equal"), "odd: give an even number"),
        (SAME, None, (1.0, 1.0), ("equal", "to itself"), None),
        (SAME, None, (1.0, 2.0), ("FAILED", "claimed to be equal"), "different: 1 of 1 tensor"),
        (KNOWN, None, (1.0, 2.0), ("different", "adds backwards"), None),
        (KNOWN, None, (1.0, 1.0), ("FAILED", "claimed to be different"), "this check cannot fail"),
        (KNOWN, None, (), ("FAILED", "nothing was compared"), "the test of a1 compared nothing"),
    ],
)
def test_a_claim_holds_or_its_cell_fails(sweep, raised, values, result, failure):
    """The kind of error and its words count for a refusal; a cell that was not compared is no
    verdict.
    """

    def judged():
        with sweep.judging(sweep.cells[0]) as judge:
            if raised is not None:
                raise raised
            if values:
                judge(*map(torch.tensor, values))

    with facts.collecting() as seen:
        if failure is None:
            judged()
        else:
            with pytest.raises((AssertionError, ValueError, KeyError), match=failure):
                judged()
    found = [(fact["result"], fact["why"]) for fact in seen if fact["kind"] == "sweep"]
    assert found == [result]


def test_the_first_rule_that_fits_counts():
    rules = [
        Rule("different", {"a": (1, 2), "b": 1}, reason="x"),
        Rule("equal", {"a": 2}, to="y"),
        Rule("not judged", reason="z"),
    ]
    sweep = Sweep("s", {"a": (1, 2, 3), "b": (1, 2)}, rules)
    claims = {str(cell): sweep.rule(cell).claim for cell in sweep.cells}
    assert claims == {
        "a1-b1": "different",
        "a1-b2": "not judged",
        "a2-b1": "different",
        "a2-b2": "equal",
        "a3-b1": "not judged",
        "a3-b2": "not judged",
    }


def test_a_cell_that_no_rule_fits():
    """The loop of docs/numerics.md asks for the claim first."""
    sweep = Sweep("s", {"a": (1, 2)}, [Rule("equal", {"a": 1}, to="x")])
    assert [sweep.rule(cell).claim for cell in sweep.cells] == ["equal", "unknown"]
    with (
        pytest.raises(UnknownCell, match="sweep 's' claims nothing about a2: add a rule"),
        sweep.judging(sweep.cells[1]),
    ):
        raise AssertionError("the block runs")


def test_a_rule_that_needs_a_gpu_gives_way_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    rules = [Rule("not judged", reason="needs a GPU", needs_gpu=True), Rule("equal", to="eager")]
    sweep = Sweep("s", {"a": (1,)}, rules)
    claims = []
    for there in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        claims.append(sweep.rule(sweep.cells[0]).claim)
    assert claims == ["not judged", "equal"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("equal"), "a rule that claims equality says what to"),
        (lambda: Rule("different"), "a rule that claims 'different' needs its reason"),
        (lambda: Rule("eqaul", to="x", reason="y"), "claims 'eqaul': use one of 'equal', 'diff"),
        (
            lambda: Sweep("s", {"a": (1,)}, [Rule("equal", {"b": 1}, to="x")]),
            "speaks of b=1, which no cell has",
        ),
        (
            lambda: Sweep("s", {"a": (1,)}, [Rule("equal", {"a": (1, 2)}, to="x")]),
            r"speaks of a=\(1, 2\), which no",
        ),
        (lambda: Sweep("s", {"a": ()}, [Rule("equal", to="x")]), "axis 'a' has no setting"),
        (lambda: Sweep("s", {"a": (1,), "b": []}, [Rule("equal", to="x")]), "axis 'b' has no"),
    ],
)
def test_rules_that_could_never_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cell_of_another_sweep_is_refused():
    """Also one of more axes, which every rule would fit."""
    sweep = Sweep("sums", {"order": ("up", "down")}, [Rule("equal", to="the sum in order")])
    for axes in ({"graph": (True,)}, {"order": ("up",), "graph": (True,)}):
        (cell,) = Sweep("other", axes, []).cells
        with pytest.raises(ValueError, match="is no cell of sweep 'sums', whose axes are order"):
            sweep.rule(cell)


ALL, FIRST, REST = {}, {"a": 1}, {"a": (2, 3)}
ON_GPU = Rule("not judged", reason="needs a GPU", needs_gpu=True)


@pytest.mark.parametrize(
    ("wheres", "number"),
    [
        ([ALL, FIRST], 2),
        ([ALL, ALL], 2),
        ([FIRST, REST, ALL], 3),
        ([FIRST, {"a": (1, 2)}, {"a": 2}, ALL], 3),
        ([ON_GPU, ALL, ON_GPU], 3),
    ],
)
def test_a_rule_that_earlier_ones_leave_no_cell_is_refused(wheres, number):
    """A rule that needs a GPU leaves all cells."""
    rules = []
    for where in wheres:
        rules.append(where if isinstance(where, Rule) else Rule("equal", where, to="x"))
    axes = {"a": (1, 2, 3), "b": (False, True)}
    with pytest.raises(ValueError, match=f"no cell is left for rule {number}, .* put it before"):
        Sweep("s", axes, rules)
    Sweep("s", axes, rules[: number - 1])


@pytest.mark.parametrize("settings", [(1, 1), ["x", "y", "x"], (0, False), (1, 2, 1.0)])
def test_a_setting_that_comes_twice_is_refused(settings):
    with pytest.raises(ValueError, match=r"the axis .b. has .* twice: take one out"):
        Sweep("s", {"a": (1, 2), "b": settings}, [])
