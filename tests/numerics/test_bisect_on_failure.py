"""--gt-bisect: a failing comparison names the pass; without the flag, and in passing tests, nothing is replayed."""

from __future__ import annotations

import pytest

from pytest_gtrainer import bisect_passes, facts
from tests.numerics.test_bisect import BATCH, Net, pipeline, traced_net

TEST = """
    import pytest, torch
    from pytest_gtrainer import apply_graph_passes, assert_bitwise_equal, trace_step
    from tests.numerics.test_bisect import BATCH, Net, pipeline, step, HARMLESS

    def gradients(traced, seed=0, scale=1.0):
        model = Net()
        torch.manual_seed(seed)
        traced.replay(model, *(each * scale for each in BATCH))
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def rewritten(passes):
        traced = trace_step(Net(), step, BATCH)
        return traced.with_graph(apply_graph_passes(traced.gm, traced.example_inputs, passes))

    def test_wrong():
        assert_bitwise_equal(gradients(rewritten(pipeline(2))), gradients(trace_step(Net(), step, BATCH)))

    def test_right():
        assert_bitwise_equal(gradients(rewritten(HARMLESS)), gradients(trace_step(Net(), step, BATCH)))

    def test_wrong_by_something_else():
        assert_bitwise_equal(gradients(rewritten(HARMLESS)), gradients(trace_step(Net(), step, BATCH), seed=1))

    def test_wrong_without_a_graph():
        assert_bitwise_equal(torch.zeros(1), torch.ones(1))

    @pytest.mark.gt_world("ranks", size=2)
    def test_wrong_on_one_rank(gt_world):
        scale = float(gt_world.rank)  # sums of zeros do not depend on their order: rank 0 is equal
        expected = gradients(trace_step(Net(), step, BATCH), scale=scale)
        assert_bitwise_equal(gradients(rewritten(pipeline(2)), scale=scale), expected)
"""


@pytest.fixture(autouse=True, scope="module")
def everything_is_imported() -> None:
    """Pytester forgets what a run inside this process imports, and parts of torch cannot be imported twice."""
    bisect_passes(traced_net(), pipeline(2), (Net(), *BATCH))


@pytest.fixture(autouse=True)
def told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_sinks", [])


def test_a_failing_comparison_names_the_pass(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess("--gt-bisect", "--gt-gpus=2")
    result.assert_outcomes(failed=4, passed=1)
    text = result.stdout.str()
    assert text.count("E       bisection: introduced by pass 3 of 6, reassociate_pass (7 replays)") == 2
    assert "rank 1: BitwiseDifference" in text
    assert "bisection: no pass of 5 changes a bit (2 replays)" in text
    assert "bisection: no graph was rewritten by apply_graph_passes and replayed before this comparison" in text


def test_without_the_flag_nothing_is_bisected(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess("-k", "test_wrong and not rank")
    result.assert_outcomes(failed=3, deselected=2)
    result.stdout.no_fnmatch_line("*bisection*")
