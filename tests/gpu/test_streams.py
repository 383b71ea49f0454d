"""Stream jitter: a run that waits for its inputs keeps its bits, one that forgets to is caught."""

from __future__ import annotations

import pytest
import torch

from pytest_gtrainer import assert_run_to_run
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.run_to_run import PRESSURES

JITTER = [pressure for pressure in PRESSURES if pressure.name == "stream jitter"]


def on_two_streams(*, waits: bool) -> torch.Tensor:
    """A product on another stream, used on this one; ``waits`` says whether this one waits for it."""
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    result = torch.zeros_like(x)
    here.synchronize()
    with torch.cuda.stream(side):
        result.copy_(x * 2)
        result.record_stream(side)
    if waits:
        here.wait_stream(side)
    copy = result + 1
    side.synchronize()
    return copy


def test_a_run_that_waits_is_equal(cuda):
    torch.cuda.init()
    report = assert_run_to_run(lambda: on_two_streams(waits=True), pressures=JITTER)
    assert report.equal[-1] == "stream jitter"


def test_a_run_that_does_not_wait_is_caught(cuda):
    """The race may go well on a quiet GPU; with late streams it does not."""
    with pytest.raises(BitwiseDifference) as caught:
        assert_run_to_run(lambda: on_two_streams(waits=False), 2, pressures=JITTER)
    assert "does not repeat itself under this pressure" in str(caught.value)


def test_streams_are_really_late(cuda, record_property):
    """Each of torch's streams sleeps before the run's own work, by irregular times."""
    from pytest_gtrainer.numerics.run_to_run import stream_jitter

    times = []
    with stream_jitter():
        begun = [(torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)) for _ in range(8)]
        start = torch.cuda.Event(enable_timing=True)
        start.record(torch.cuda.default_stream())
        for stream, event in begun:
            event.record(stream)
    torch.cuda.synchronize()
    times = [start.elapsed_time(event) for _, event in begun]
    record_property("measured", f"late by {min(times):.2f} to {max(times):.2f} ms")
    assert max(times) - min(times) > 0.2
