"""``run_threads``: a function on many ranks of one process."""

import ctypes
import itertools
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pytest_gtrainer import facts
from pytest_gtrainer._torch import threads as torch_threads
from pytest_gtrainer._torch.process_groups import forget_meshes
from pytest_gtrainer.facts import emit, long_work
from pytest_gtrainer.worlds import ranks_text
from pytest_gtrainer.worlds.hygiene import restored
from pytest_gtrainer.worlds.simulated import CollectiveMismatch
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.group import MakeContext, SharedGroups, ThreadGroup
from pytest_gtrainer.worlds.simulated.threads.team import (
    NotOnThreads,
    Released,
    ThreadTeam,
    TimeLimit,
    state_kept,
)

__tracebackhide__ = facts.hides_frames

LIMIT = 300.0
_GRACE = 2.0
_NAMES_A_RUN = 1_000_000
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_runs = itertools.count(1)


class NoStore(dist.Store):
    """The store of ranks on threads: none, as a rank that waits for a key would keep the turn."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotOnThreads(
            "ranks on threads have no store: exchange values by collectives (broadcast_object_list)"
        )

    set = get = add = wait = check = compare_set = delete_key = num_keys = _refuse


def run_threads(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    net: Net,
    timeout: float = LIMIT,
    under: MakeContext = nullcontext,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``size`` ranks of this process.

    Every rank finds ``torch.distributed`` initialised, and adds in the order of ``net``. Autocast
    of the caller is on in each.

    Args:
        under: makes a context for the function of each rank, and one for each collective, such as a
            dispatch mode. Modes that a rank enters itself do not see what a collective computes.

    Returns:
        The results, in the order of ranks.

    Raises:
        CollectiveMismatch: ranks disagree in a collective, or one that a rank began, or a message,
            has no counterpart.
        Standstill: every rank waits for another.
        TimeLimit: a rank ran for ``timeout`` seconds without a collective and without ending.
        Exception: the first error of any rank, with a note that names the rank.
    """
    if size < 1:
        raise ValueError(f"run_threads: size is a whole number, 1 or more; not {size!r}")
    if net.size != size:
        raise ValueError(
            f"run_threads: a net of {net.size} ranks for {size} ranks; make both the same"
        )
    if not 0 < timeout < math.inf:
        raise ValueError(f"run_threads: timeout is a number of seconds above 0; not {timeout!r}")

    crew = _Crew(size, function, args, net, under)
    with ExitStack() as stack:
        for context in (
            restored(),
            state_kept(),
            warnings.catch_warnings(),
            torch_threads.tracing_hooks(crew.refuse_tracing),
            torch_threads.isolated_threads(_refuse),
        ):
            stack.enter_context(context)
        # From 64 ranks on memory matters more than a few percent of time.
        if size >= 64:
            stack.enter_context(freed_at_once())
        stack.callback(forget_meshes)
        # A thread that enters a parallel region starts a pool of its own.
        torch.set_num_threads(1)
        emit("simulated", ranks=size)
        with long_work(f"simulating {size} ranks"):
            return crew.run(timeout)


def _autocasts_of_this_thread() -> dict[str, dict[str, Any]]:
    """Return the options of the autocast that is on, by device type.

    It belongs to a thread, and whoever enters it around a simulated world means all ranks.
    """
    found: dict[str, dict[str, Any]] = {}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            found[device] = {
                "dtype": torch.get_autocast_dtype(device),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
    return found


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Make glibc return blocks of 128 KiB and more as they are freed (mallopt(3)) inside.

    By itself glibc raises this bound to 32 MiB, and holes between the tensors of hundreds of ranks
    take as much memory as the tensors.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # macOS has none
    mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _refuse(what: str) -> NoReturn:
    raise NotOnThreads(what)


class _Crew:
    """The threads of one run, and what they return."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        net: Net,
        under: MakeContext,
    ) -> None:
        self._team = ThreadTeam(size)
        self._groups = SharedGroups(self._team, net, under)
        self._function, self._args, self._under = function, args, under
        self._autocasts = _autocasts_of_this_thread()
        self._results: list[Any] = [None] * size
        # No name of a group means anything in another run.
        self._first_group = next(_runs) * _NAMES_A_RUN
        self._threads = [
            threading.Thread(target=self._be_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]

    def refuse_tracing(self, what: str) -> None:
        """Refuse to trace or compile on a rank: torch's tracers keep state for the process."""
        if threading.get_ident() in self._team.threads.values():
            raise NotOnThreads(
                f"{what} inside run_threads: ranks on threads run eager code only; "
                "trace in the test itself and replay with train_graph"
            )

    def run(self, timeout: float) -> list[Any]:
        """Run all ranks to their end; return their results, or raise the first error."""
        team = self._team
        try:
            self._start()
            while not team.all_ended.wait(team.last_turn + timeout - time.monotonic()):
                # Meanwhile the turn may have gone to another rank, which has its own time.
                if time.monotonic() > team.last_turn + timeout:
                    what = f"a rank ran for {timeout:g} seconds without coming to a collective"
                    team.fail(None, TimeLimit(f"{what}: {team.situation()}"))
                    break
        except BaseException as error:  # an interrupt of the thread that waits
            team.fail(None, error)

        stuck = self._end()
        failure = team.take_error()
        if failure is None:
            unmatched = self._groups.unmatched()
            if unmatched:
                raise CollectiveMismatch(unmatched)
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
                # A thread that has not started takes no turn.
                if thread.ident is None:
                    self._team.abandon(rank)
        self._team.hand_on()

    def _be_rank(self, rank: int) -> None:
        """Run the function as ``rank``; the target of a thread."""
        team = self._team
        try:
            team.join(rank)
            torch_threads.become_rank(self._first_group)
            # A backward stays on the thread that calls it: a worker of autograd is no rank.
            with torch.autograd.set_multithreading_enabled(False):
                group = ThreadGroup(self._groups, rank, str(self._first_group), range(team.size))
                torch_threads.register_default_group(group, NoStore())
                try:
                    with self._under(), ExitStack() as stack:
                        for device, options in self._autocasts.items():
                            stack.enter_context(torch.autocast(device, **options))
                        self._results[rank] = self._function(rank, *self._args)
                finally:
                    # An abandoned rank may come here after the run, when the registry is no longer
                    # that of its thread but that of the process.
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
        """End every thread; return the ranks that are stuck in a call of C.

        A rank that keeps the turn is interrupted after a quarter of the grace period.
        """
        team, stuck = self._team, []
        while (rank := team.running) is not None:
            begin = time.monotonic()
            interrupted = False
            while team.running == rank and time.monotonic() < begin + _GRACE:
                time.sleep(0.005)
                if not interrupted and time.monotonic() > begin + _GRACE / 4:
                    interrupted = team.interrupt(rank)
            if team.running == rank:
                stuck.append(rank)
                team.abandon(rank)

        for rank, thread in enumerate(self._threads):
            if rank not in team.abandoned:
                thread.join(_GRACE)
        return stuck
