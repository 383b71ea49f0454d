"""Shared by the parity suite."""

import pytest

from pytest_gtrainer import facts


@pytest.fixture
def pin(gt_golden, gt_world):
    """``pin(traced)``: compare the graph with its golden, on the device that the goldens were made on.

    Attention traces to another operator on a GPU, so there the golden is counted as not judged.
    """

    def check(traced):
        if gt_world.device == "cpu":
            gt_golden.check(traced)
        else:
            facts.emit("golden", outcome=f"not judged on {gt_world.device}")

    return check
