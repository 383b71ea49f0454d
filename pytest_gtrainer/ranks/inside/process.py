"""From a forked process to a rank: signals, standard streams, environment, then its commands."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.channel import Channel
from pytest_gtrainer.ranks.stacks import STACK_SIGNAL, log_file, stack_file

_PR_SET_PDEATHSIG = 1


def become_rank(setup: wire.RankSetup, fds: Sequence[int], forkserver: int) -> NoReturn:
    """Serve the parent on the channel of ``fds`` as a rank; never returns into the forkserver's code."""
    code = 1
    try:
        _die_with(forkserver)
        channel = Channel(*fds)
        _open_streams(setup)
        _open_stacks(setup)
        _take_environment(setup)
        code = _serve(setup, channel)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _die_with(forkserver: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != forkserver:  # it died before the line above
        os._exit(1)
    os.setpgid(0, 0)  # so that a rank can be killed with its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams(setup: wire.RankSetup) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if not setup.live_output:
        log = os.open(log_file(setup.folder, setup.rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a standard stream lives as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _open_stacks(setup: wire.RankSetup) -> None:
    """On a fatal error or on STACK_SIGNAL, write the Python stacks; needs no working interpreter."""
    file = open(stack_file(setup.folder, setup.rank), "w")  # noqa: SIM115 - as above
    faulthandler.enable(file)
    faulthandler.register(STACK_SIGNAL, file, all_threads=True)


def _take_environment(setup: wire.RankSetup) -> None:
    rank, size = str(setup.rank), str(setup.size)
    os.environ.clear()
    os.environ.update(setup.environ)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    # Connecting all pairs while a group is made fails now and then on a loaded machine when groups
    # come and go ("connectFullMesh failed"); connecting at first use did not, and is faster.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    sys.path[:] = setup.sys_path
    os.chdir(setup.cwd)


def _serve(setup: wire.RankSetup, channel: Channel) -> int:
    from pytest_gtrainer.ranks.inside.commands import serve

    return serve(setup, channel)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
