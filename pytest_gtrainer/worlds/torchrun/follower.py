"""The pytest process of a rank other than 0: it collects and reports nothing, and obeys."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from pytest_gtrainer import launch as launches
from pytest_gtrainer.worlds.torchrun.messages import Farewell

# torchrun kills what has not ended 30 s after its SIGTERM.
HOLD_SECONDS = 15.0


def follow(config: pytest.Config) -> int | None:
    """Stand in for pytest's own main loop in a rank that follows; None where there is nothing to follow."""
    launch = launches.of(config)
    if launch is None or launch.leads:
        return None
    if config.option.help or config.option.version:
        return 0
    from pytest_gtrainer.worlds.torchrun.member import Member, connect

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    member = Member(launch, connect(), lambda: config)
    while not isinstance(command := member.next_command(), Farewell):
        signal.signal(signal.SIGTERM, _hold)
        member.obey(command)
    member.close()
    member.tell(command)
    return command.status


def _hold(signum: int, frame: FrameType | None) -> None:
    """When torchrun ends the run because a rank has died, rank 0 still wants to tell of the test, and needs us."""
    timer = threading.Timer(HOLD_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()
