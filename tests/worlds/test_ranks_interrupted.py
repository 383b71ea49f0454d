"""T6: however a run ends, no process and no folder is left behind; and no rank waits for who sits
at the terminal.
"""

import signal
import time

import pytest

from pytest_gtrainer.ranks.team import SERVER_END_LIMIT

pytestmark = pytest.mark.second_tier

SUITE = """
import subprocess
import time
import pytest
from late import dist

@pytest.mark.gt_world("ranks", size=2)
def test_waits():
    subprocess.Popen(["sleep", "601"], start_new_session=True)
    open(f"started{dist.get_rank()}", "w").close()
    if dist.get_rank() == 0: time.sleep(600)
    dist.barrier()
"""


def _wait_for(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    "how",
    # to SIGTERM pytest reacts as little as to SIGKILL
    [signal.SIGINT, signal.SIGTERM, signal.SIGKILL],
    ids=lambda how: how.name,
)
def test_ending_the_run_ends_its_ranks(suite, how):
    """T6: what ranks have started in sessions of their own ends, too; the soak kills workers."""
    suite.write("test_it.py", SUITE)
    process = suite.start()
    try:
        _wait_for(lambda: len(list(suite.folder.glob("started*"))) == 2, "the ranks did not start")
        assert sum("sleep 601" in line for line in suite.left_over()) == 2
        process.send_signal(how)
        output, _ = process.communicate(timeout=SERVER_END_LIMIT + 80)
    finally:
        process.kill()
    assert how is not signal.SIGINT or "KeyboardInterrupt" in output
    _wait_for(lambda: not suite.left_over(), suite.left_over())


LEAVES_ITS_CHILD = """
import subprocess
import pytest

@pytest.mark.gt_world("ranks", size=2)
def test_passes():
    subprocess.Popen(["sleep", "603"], start_new_session=True)

def test_the_child_goes_on():
    assert b"sleep 603" in subprocess.run(["ps", "-ef"], stdout=-1).stdout

LAST
def test_last(): KILL
"""


@pytest.mark.parametrize("way", ["passes", "its forkserver is stopped"])
def test_what_a_test_has_started_ends_with_the_run(suite, way):
    """Also if nobody can end it but the parent: who forks ranks does not react, and is killed."""
    kill, last = (
        "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
        '@pytest.mark.gt_world("ranks", size=1)',
    )
    source = LEAVES_ITS_CHILD.replace("KILL", kill if way != "passes" else "pass")
    suite.write("test_it.py", source.replace("LAST", last))
    run = suite.run("--gt-gpus=2")
    assert "3 passed" in run.output, run.output
    _wait_for(lambda: not suite.left_over(), suite.left_over())


AT_A_TERMINAL = """
import fcntl, os, pty, termios
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.setsid()
        config.terminal = pty.openpty()
        fcntl.ioctl(config.terminal[1], termios.TIOCSCTTY, 0)
"""

ASKS = """
import pytest

@pytest.mark.gt_world("ranks", size=2, timeout=20)
def test_asks():
    with pytest.raises(OSError, match="No such device"):
        open("/dev/tty").read(1)

def test_this_process_has_a_terminal():
    open("/dev/tty").close()
"""


def test_a_rank_that_asks_at_the_terminal_gets_an_error(suite):
    """T3: in the background, where ranks are, who reads from a terminal is stopped until a signal
    continues it.
    """
    suite.write("conftest.py", AT_A_TERMINAL)
    suite.write("test_it.py", ASKS)
    run = suite.run("--gt-gpus=2")
    assert "2 passed" in run.output, run.output
