"""Equal must be equal, the control must differ, and each of the two can fail (L5)."""

import pickle
import re

import pytest
import torch

from pytest_gtrainer import Record, assert_bitwise_different, assert_bitwise_equal, facts
from pytest_gtrainer.numerics.compare import BitwiseDifference, ControlFailed
from tests.numerics.samples import NAMES
from tests.numerics.test_compare import faulty


def test_equal_passes(run):
    assert assert_bitwise_equal(run(), run()).compared == 28


def test_equal_fails_where_one_bit_differs(run):
    with pytest.raises(BitwiseDifference) as caught:
        assert_bitwise_equal(faulty((1, 0, "weight", NAMES[1])), run(), what="graph against eager")
    assert str(caught.value).splitlines() == [
        "graph against eager",
        "different: 1 of 28 tensors, 1 element",
        "  first at step 1, rank 0, weight of layers.0.wq.weight, element (3, 5)",
        "    actual   0.8164  0x3f51",
        "    expected 0.8125  0x3f50",
        "    1 ULP apart; 1 of 64 elements of this bf16[8, 8]",
    ]
    assert caught.value.gt_origin == (1, 0)


def test_equal_fails_where_nobody_looked(run):
    for nothing in (Record(2), Record.merged([run(rank=0)])):
        with pytest.raises(BitwiseDifference, match="unverified"):
            assert_bitwise_equal(nothing, nothing)


def test_different_passes_on_one_bit(run):
    verdict = assert_bitwise_different(faulty((1, 0, "weight", NAMES[1])), run())
    assert verdict.differing_elements == 1


def test_a_control_that_any_rank_may_fail_is_reported_to_the_judge_of_all(run):
    """The report has the place of the control and its result; the rank itself goes on."""
    with facts.collecting() as collected, facts.watching({"control": lambda **_: None}):
        assert_bitwise_different(run(), run(), on="any rank")
        assert_bitwise_different(
            faulty((1, 0, "weight", NAMES[1])), run(), on="any rank", what="swapped"
        )
    equal, different = [fact for fact in collected if fact["kind"] == "control"]
    assert equal["equal"]
    assert re.fullmatch(r"test_assertions\.py:\d+", equal["what"])
    assert different == {"kind": "control", "equal": False, "what": "swapped"}


def test_different_fails_where_all_is_equal(run):
    with pytest.raises(ControlFailed) as caught:
        assert_bitwise_different(run(), run(), what="members swapped")
    assert str(caught.value) == (
        "members swapped\nthe control run is equal: this check cannot fail\n"
        "equal: 28 tensors compared, no bit differs"
    )


def test_different_fails_where_nobody_looked():
    with pytest.raises(ControlFailed, match="the control run is unverified"):
        assert_bitwise_different({}, {})


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ({"a": torch.ones(1)}, {"a": torch.ones(1).double()}),
        ({"a": torch.ones(1)}, {"a": torch.ones(1, 1)}),
        ({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.zeros(1)}),
    ],
)
def test_different_fails_where_the_sides_cannot_be_compared(actual, expected):
    """A control that differs in names or shapes passes for the wrong reason."""
    with pytest.raises(ControlFailed, match="differ in bits alone"):
        assert_bitwise_different(actual, expected)


def test_different_fails_where_the_sides_are_of_other_ranks():
    """A bit differs in what both have, and yet these are two worlds."""
    records = Record(world_size=1), Record(world_size=2, rank=0)
    for value, record in enumerate(records):
        record.add(0, 0, "loss", "loss", torch.tensor(float(value)))
    with pytest.raises(ControlFailed, match=r"two sides are not comparable\n") as failed:
        assert_bitwise_different(*records)
    reason = (
        "not the same ranks: actual Record(world_size=1, 1 tensor), expected Record(world_size=2"
    )
    assert reason in failed.value.message


def test_the_error_is_an_assertion_error_and_travels_between_processes(run):
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(faulty((0, 1, "loss", "loss")), run())
    there = pickle.loads(pickle.dumps(caught.value))
    assert (str(there), there.gt_origin, there.verdict) == (
        str(caught.value),
        (0, 1),
        caught.value.verdict,
    )


def test_every_verdict_is_reported(run):
    """The summary and the page need each once, with the number of tensors and its ``what``."""
    one, other = run(), faulty((0, 0, "loss", "loss"))
    with facts.collecting() as seen:
        assert_bitwise_equal(one, run(), what="graph against eager")
        assert_bitwise_different(other, one, what="members swapped")
        for check, sides in (
            (assert_bitwise_equal, (other, one)),
            (assert_bitwise_equal, ({}, {})),
            (assert_bitwise_different, (one, run())),
        ):
            with pytest.raises(AssertionError):
                check(*sides)
    verdicts = [
        (fact["outcome"], fact["tensors"], fact["what"])
        for fact in seen
        if fact["kind"] == "verdict"
    ]
    assert verdicts == [
        ("equal", 28, "graph against eager"),
        ("different as required", 28, "members swapped"),
        ("different", 28, ""),
        ("unverified", 0, ""),
        ("equal, control failed", 28, ""),
    ]


@pytest.mark.parametrize(
    ("check", "must_differ"), [(assert_bitwise_equal, False), (assert_bitwise_different, True)]
)
def test_who_watches_comparisons_sees_both_sides_and_the_verdict(run, check, must_differ: bool):
    """The page of a failed test shows them; a bisection starts from them."""
    sides = (run(), faulty((0, 0, "loss", "loss")) if must_differ else run())
    seen = []
    with facts.watching({"comparison": lambda **event: seen.append(event)}):
        verdict = check(*sides, what="graph against eager")
    (event,) = seen
    assert event.pop("actual") is sides[0]
    assert event.pop("expected") is sides[1]
    assert event.pop("verdict") is verdict
    assert event == {"what": "graph against eager", "must_differ": must_differ}


def test_what_a_watcher_explains_is_part_of_the_message(run):
    """A bisection names the pass below the verdict that it received."""
    expected = run()

    def explain(verdict, expected, explanations):
        explanations.append(f"{len(verdict.differences)} of {len(expected)}: it was the pass")

    with facts.watching({"judged": explain}), pytest.raises(BitwiseDifference) as caught:
        assert_bitwise_equal(faulty((0, 0, "loss", "loss")), expected)
    assert str(caught.value).splitlines()[-1] == "1 of 28: it was the pass"


def test_the_failure_points_at_the_caller(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
        import torch
        from pytest_gtrainer import assert_bitwise_equal

        def test_it():
            assert_bitwise_equal(torch.zeros(2), torch.tensor([0.0, -0.0]), what="zeros")
        """
    )
    output = pytester.runpytest_inprocess().stdout
    output.fnmatch_lines(["E*BitwiseDifference: zeros", "E*first at the tensor, element (1)"])
    output.no_fnmatch_line("*assertions.py*")


@pytest.mark.parametrize("on", ["all ranks", "", None])
def test_another_word_for_the_ranks_of_a_control_is_refused(run, on):
    with pytest.raises(ValueError, match=f'on is "any rank" or "every rank", not {on!r}'):
        assert_bitwise_different(faulty((1, 0, "weight", NAMES[1])), run(), on=on)
