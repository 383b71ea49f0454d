"""Sees at once that another process of the same machine has ended, though it is no child of ours."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path


def watch(pid: int, tell: Callable[[int | None], None]) -> None:
    """Call ``tell`` from a thread when the process ends, with its status as ``subprocess`` has it, None if unknown."""
    threading.Thread(target=_wait, args=(pid, tell), name="gtrainer-neighbour", daemon=True).start()


def _wait(pid: int, tell: Callable[[int | None], None]) -> None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        tell(None)
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    tell(status_of(pid))
    os.close(fd)


def status_of(pid: int) -> int | None:
    """The exit status of a process that ended and was not yet reaped by its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


def in_words(status: int | None) -> str:
    """The end of a process in words.

    >>> in_words(-9), in_words(3)
    ('was killed by SIGKILL', 'exited with status 3')
    """
    if status is None:
        return "has ended; torchrun tells how"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
