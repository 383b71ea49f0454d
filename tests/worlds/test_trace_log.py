"""Torch's structured trace does not reach pytest's log capture."""

import pytest


@pytest.mark.gt_world("fake", size=2)
def test_a_trace_logs_nothing_into_the_test(gt_world, caplog):
    import torch

    from pytest_gtrainer import trace_step

    model = torch.nn.Linear(2, 2)
    trace_step(model, lambda m, x: m(x).sum(), (torch.ones(1, 2),))
    assert [record for record in caplog.records if record.name == "torch.__trace"] == []


@pytest.mark.gt_world("fake", size=2)
def test_without_the_switch_the_capture_would_see_it(gt_world, caplog):
    """The twin: what is kept quiet is there."""
    import logging

    from torch._logging import trace_structured

    logging.getLogger("torch.__trace").addHandler(caplog.handler)
    try:
        trace_structured("artifact", metadata_fn=lambda: {"name": "twin"})
    finally:
        logging.getLogger("torch.__trace").removeHandler(caplog.handler)
    assert "torch.__trace" in {record.name for record in caplog.records}
