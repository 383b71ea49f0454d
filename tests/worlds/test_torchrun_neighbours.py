"""Under torchrun: which process of a node watches which, and what it can tell of its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from pytest_gtrainer.devices import Launch, launch_in
from pytest_gtrainer.ranks.torchrun.mailbox import ended_with
from tests.worlds.test_torchrun import ENVIRONMENT


def test_who_watches_whom_on_a_node():
    """Each sees the next one, in a circle; rank 0 sees all and all see it; ranks 4 to 6 are those of one node."""
    assert [Launch(rank, 8, rank - 4, 3).watched for rank in (4, 5, 6)] == [(5,), (6,), (4,)]
    assert Launch(3, 4, 0, 1).watched == Launch(0, 4, 0, 1).watched == ()
    assert [Launch(rank, 3, rank, 3).watched for rank in range(3)] == [(1, 2), (0, 2), (0,)]
    assert [Launch(rank, 4, rank % 2, 2).is_beside_the_driver for rank in range(4)] == [True, True, False, False]
    assert launch_in(ENVIRONMENT) == Launch(0, 4, 0, 4)


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 15), reason="Linux 6.15 tells it, and later ones"
)
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGKILL, -9), (signal.SIGUSR1, 3)])
def test_how_a_process_ended_is_known_when_its_parent_has_forgotten_it(signum, status):
    """T2: torchrun looks every 0.1 s, and may do so before a neighbour does."""
    process = subprocess.Popen(["bash", "-c", "trap 'exit 3' USR1; echo; while :; do sleep 0.01; done"], stdout=-1)
    process.stdout.readline()
    fd = os.pidfd_open(process.pid)
    process.send_signal(signum)
    assert process.wait() == status
    assert ended_with(fd, process.pid) == status
    os.close(fd)
