"""``run_threads``: a function on many ranks of one process."""

import ctypes
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pytest_gtrainer._torch import threads as torch_threads
from pytest_gtrainer._torch.process_groups import forget_meshes
from pytest_gtrainer.facts import long_work
from pytest_gtrainer.worlds import ranks_text
from pytest_gtrainer.worlds.hygiene import restored
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.group import SharedGroups, ThreadGroup
from pytest_gtrainer.worlds.simulated.threads.team import (
    NotOnThreads,
    Released,
    ThreadTeam,
    TimeLimit,
    state_kept,
)

LIMIT = 300.0
_GRACE = 2.0
_NAMES_A_RUN = 1_000_000
_M_MMAP_THRESHOLD = -3
_runs = itertools.count(1)


class NoStore(dist.Store):
    """The store of ranks on threads: there is none, as a rank that waits for a key would keep the turn."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotOnThreads(
            "ranks on threads have no store: exchange values by collectives (broadcast_object_list)"
        )

    set = get = add = wait = check = compare_set = delete_key = num_keys = _refuse


def run_threads(
    size: int, function: Callable[..., Any], *args: Any, net: Net, timeout: float = LIMIT
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``size`` ranks of this process: the results, in the order of ranks. Every rank
    finds ``torch.distributed`` initialised, and adds in the order of ``net``. The first error of any rank is raised
    here with a note that names the rank: Standstill if every rank waits for another, TimeLimit if one ran for
    ``timeout`` seconds without coming to a collective or to its end."""
    if size < 1:
        raise ValueError(f"run_threads: size is a whole number, 1 or more; not {size!r}")
    if net.size != size:
        raise ValueError(
            f"run_threads: a net of {net.size} ranks for {size} ranks; make both the same"
        )
    if not timeout > 0:
        raise ValueError(f"run_threads: timeout is a number of seconds above 0; not {timeout!r}")
    crew = _Crew(size, function, args, net)
    with ExitStack() as stack:
        for context in (restored(), state_kept(), warnings.catch_warnings()):
            stack.enter_context(context)
        stack.enter_context(torch_threads.tracing_hooks(crew.refuse_tracing))
        stack.enter_context(torch_threads.isolated_threads(_refuse))
        if size >= 64:  # from then on memory matters more than a few percent of time
            stack.enter_context(freed_at_once())
        stack.callback(forget_meshes)
        torch.set_num_threads(1)  # a thread that enters a parallel region starts a pool of its own
        with long_work(f"simulating {size} ranks"):
            return crew.run(timeout)


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, glibc hands blocks of 128 KiB and more back as they are freed (mallopt(3)), which hundreds of ranks need.
    By itself it raises this bound to 32 MiB, and holes between tensors take as much as these."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # macOS has none
    mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _refuse(what: str) -> NoReturn:
    raise NotOnThreads(what)


class _Crew:
    def __init__(
        self, size: int, function: Callable[..., Any], args: tuple[Any, ...], net: Net
    ) -> None:
        self._team = ThreadTeam(size)
        self._groups = SharedGroups(self._team, net)
        self._function, self._args = function, args
        self._results: list[Any] = [None] * size
        self._first_group = (
            next(_runs) * _NAMES_A_RUN
        )  # no name of a group means anything elsewhere
        thread = partial(threading.Thread, target=self._be_rank, daemon=True)
        self._threads = [thread(args=(rank,), name=f"rank {rank}") for rank in range(size)]

    def refuse_tracing(self, what: str) -> None:
        """Nothing is traced or compiled on a rank (W2): torch's tracers keep process-wide state, of one at a time."""
        if threading.get_ident() in self._team.threads.values():
            wrong = f"{what} inside run_threads: ranks on threads run eager code only"
            raise NotOnThreads(f"{wrong}; trace in the test itself and replay with train_graph")

    def run(self, timeout: float) -> list[Any]:
        team = self._team
        try:
            self._start()
            while not team.all_ended.wait(team.last_turn + timeout - time.monotonic()):
                if time.monotonic() > team.last_turn + timeout:
                    what = f"a rank ran for {timeout:g} seconds without coming to a collective: {team.situation()}"
                    team.fail(None, TimeLimit(what))
                    break
        except BaseException as error:  # an interrupt of the thread that waits
            team.fail(None, error)
        stuck = self._end()
        if (failure := team.take_error()) is None:
            return self._results
        rank, raised = failure
        if rank is not None:
            raised.add_note(f"raised on rank {rank} of {team.size} ranks on threads")
        if stuck:
            raised.add_note(f"{ranks_text(stuck)}: still in a call that cannot be interrupted")
        try:
            raise raised
        finally:
            del failure, raised  # the error's traceback has this frame

    def _start(self) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:  # the system gives no more threads
            self._team.fail(None, error)
            for rank, thread in enumerate(self._threads):
                if thread.ident is None:
                    self._team.abandon(rank)
        self._team.hand_on()

    def _be_rank(self, rank: int) -> None:
        team = self._team
        try:
            team.join(rank)
            torch_threads.become_rank(self._first_group)
            with torch.autograd.set_multithreading_enabled(False):
                group = ThreadGroup(self._groups, rank, str(self._first_group), range(team.size))
                torch_threads.register_default_group(group, NoStore())
                try:
                    self._results[rank] = self._function(rank, *self._args)
                finally:
                    if rank not in team.abandoned:
                        torch_threads.drop_groups()
        except Released:
            pass
        except BaseException as error:
            team.fail(rank, error)
        finally:
            try:
                team.end(rank)
            except Released:  # an interrupt that came late; there is one at most
                team.end(rank)

    def _end(self) -> list[int]:
        """Get every thread to its end, by an interrupt if it keeps the turn: those that are stuck in a call of C."""
        team, stuck = self._team, []
        while (rank := team.running) is not None:
            begin, interrupted = time.monotonic(), False
            while team.running == rank and time.monotonic() < begin + _GRACE:
                time.sleep(0.005)
                interrupted = interrupted or (
                    time.monotonic() > begin + _GRACE / 4 and team.interrupt(rank)
                )
            if team.running == rank:
                stuck.append(rank)
                team.abandon(rank)
        for rank, thread in enumerate(self._threads):
            if rank not in team.abandoned:
                thread.join(_GRACE)
        return stuck
