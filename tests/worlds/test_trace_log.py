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


COMPILES = """
import logging
import torch
from torch.fx.experimental.proxy_tensor import make_fx

class Kept(logging.Handler):
    def emit(self, record):
        self.seen = True

def test_first_fails():
    make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.ones(2))
    assert False

def test_fails():
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    assert False

def test_own_handler_sees_the_trace():
    log, mine = logging.getLogger("torch.__trace"), Kept()
    log.addHandler(mine)
    torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(2))
    log.removeHandler(mine)
    assert mine.seen
"""


@pytest.mark.second_tier
@pytest.mark.parametrize("option", [[], ["--gt-trace-log"]], ids=["", "flag"])
def test_no_test_captures_the_structured_trace_unless_asked(pytester, option):
    """pytest attaches its handlers to a logger that does not propagate; torch then writes its whole
    trace to them.

    So does pytest 9.2. Version 9.0 leaves such loggers alone, and the flag then shows what it
    shows: nothing.
    """
    pytester.makepyfile(COMPILES)

    def captured(*options):
        result = pytester.runpytest_subprocess("--show-capture=log", *options)
        result.assert_outcomes(passed=1, failed=2)
        return [
            line for line in result.outlines if "torch.__trace" in line or line.startswith("DEBUG")
        ]

    by_itself = captured("-p", "no:gtrainer")
    assert bool(by_itself) == (pytest.version_tuple >= (9, 1))
    assert bool(captured(*option)) == bool(option and by_itself)
