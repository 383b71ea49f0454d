"""Stream jitter: a run that waits for its inputs keeps its bits, one that forgets to is caught."""

import time

import pytest
import torch

from pytest_gtrainer import assert_run_to_run
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.run_to_run import PRESSURES, late_streams

NAMES = ["stream jitter", "a late stream"]
LATE = {pressure.name: pressure for pressure in PRESSURES if pressure.name in NAMES}


def on_two_streams(*, waits: bool, late: str) -> torch.Tensor:
    """A product on one stream, used on another; ``waits`` says whether that one waits for it."""
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    makes, uses = (side, here) if late == "stream jitter" else (here, side)
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    result, copy = torch.zeros_like(x), torch.zeros_like(x)
    makes.wait_stream(here)
    with torch.cuda.stream(makes):
        result.copy_(x * 2)
    time.sleep(0.01)  # without pressure the race goes well
    if waits:
        uses.wait_stream(makes)
    with torch.cuda.stream(uses):
        copy.copy_(result + 1)
    torch.cuda.synchronize()
    return copy


@pytest.mark.parametrize("late", NAMES)
def test_a_run_that_waits_is_equal(cuda, late):
    torch.cuda.init()
    report = assert_run_to_run(
        lambda: on_two_streams(waits=True, late=late), pressures=[LATE[late]]
    )
    assert report.equal[-1] == late


@pytest.mark.parametrize("late", NAMES)
def test_a_run_that_does_not_wait_is_caught(cuda, late):
    """The race goes well on a quiet GPU; with late streams it does not, unless both share a queue
    of the hardware.
    """
    torch.cuda.init()
    with pytest.raises(BitwiseDifference) as caught:
        assert_run_to_run(
            lambda: on_two_streams(waits=False, late=late), 2, pressures=[LATE[late]] * 5
        )
    assert "does not repeat itself under this pressure" in str(caught.value)


def test_streams_are_really_late(cuda, record_property):
    """Each of torch's streams sleeps before the run's own work, by irregular times; the run's own
    does not.

    A GPU has 8 queues for all of them, so the run's own may wait for the first of its queue.
    """
    torch.cuda.init()
    with late_streams(own=False):
        start, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begun = [(torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)) for _ in range(8)]
        for stream, event in begun:
            event.record(stream)
        done.record()
    times = [start.elapsed_time(event) for _, event in begun]
    own = start.elapsed_time(done)
    record_property(
        "measured",
        f"late by {min(times):.0f} to {max(times):.0f} ms, the run's own by {own:.1f} ms",
    )
    assert min(times) > 10
    assert max(own, min(times)) + 10 < max(times)
