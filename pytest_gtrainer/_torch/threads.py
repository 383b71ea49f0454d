"""Ranks on threads: torch.distributed once a thread.

``distributed_c10d._world`` holds the process groups of a process and may be replaced (torch calls
it an "experimental extension point"); ``ThreadLocalWorld`` is torch's own replacement with one set
of groups for each thread. A Python subclass of ``ProcessGroup`` serves ``torch.distributed`` and
functional collectives. If it has a method ``new_group``, it makes the subgroups; torch 2.14 also
passes it ``backend``. Since torch 2.14 ``batch_isend_irecv`` asks a subclass, too, for
``_get_backend(device).supports_coalescing``.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
        _set_thread_isolation_mode,
        _unregister_all_process_groups,
    )
    from torch._guards import active_fake_mode as active_fake_mode
    from torch.distributed import distributed_c10d as c10d
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld
    from torch.utils._python_dispatch import _disable_current_modes

ATTRIBUTES = {
    "torch.distributed.distributed_c10d": (
        "_world",
        "_process_group_name",
        "_register_pg_in_world",
    ),
    "torch.distributed": ("_Work",),
    "torch._C": ("_len_torch_dispatch_stack",),
    "torch._dynamo.eval_frame": ("_callback_from_stance",),
    "torch.testing._internal.distributed.multi_threaded_pg:ThreadLocalWorld": (
        "_get_world",
        "default_pg",
        "group_count",
    ),
}

# For a backend of this name DTensor's caches keep the meshes of threads apart.
BACKEND = "threaded"
Work = dist._Work


class _Worlds(ThreadLocalWorld):
    """Process groups by thread: a rank's thread has its own, older threads those of the process."""

    def __init__(self, outside: Any, refuse: Callable[[str], NoReturn]) -> None:
        self._outside, self._refuse = outside, refuse
        self._outsiders = {thread.ident for thread in threading.enumerate()}
        self._ranks = threading.local()

    def _get_world(self) -> Any:
        if getattr(self._ranks, "is_rank", False):
            return super()._get_world()
        if threading.get_ident() not in self._outsiders:
            self._refuse(
                "a thread that a rank started uses torch.distributed: let the rank itself call it"
            )
        return self._outside

    def enter(self) -> None:
        """Make the calling thread a rank, without groups."""
        self._ranks.is_rank = True


@contextmanager
def isolated_threads(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Give threads that call ``become_rank`` their own groups.

    ``refuse`` is called, and raises, on a thread that such a thread starts.
    """
    with mock.patch.object(c10d, "_world", _Worlds(c10d._world, refuse)):
        # C++ then keeps its registries of groups and of pending collectives by thread.
        _set_thread_isolation_mode(True)
        try:
            yield
        finally:
            _set_thread_isolation_mode(False)


def become_rank(first_group: int) -> None:
    """Give the calling thread its own groups, named by number from ``first_group`` on."""
    c10d._world.enter()
    c10d._world.group_count = first_group


def register_default_group(group: dist.ProcessGroup, store: dist.Store) -> None:
    """Make ``group`` the default group of the calling thread."""
    name = c10d._process_group_name([], use_hashed_name=False)
    ranks = {rank: rank for rank in range(group.size())}
    c10d._register_pg_in_world(group, BACKEND, store, name, f"cpu:{BACKEND}", ranks)
    c10d._world.default_pg = group


def note_group_of_others(ranks: Sequence[int]) -> None:
    """Note the ranks of a group that this thread's rank is not in, as ``new_group`` of torch does.

    So ``get_process_group_ranks`` answers for what such a rank has: ``NON_GROUP_MEMBER``.
    """
    others = {rank: place for place, rank in enumerate(ranks)}
    c10d._world.pg_group_ranks[dist.GroupMember.NON_GROUP_MEMBER] = others


def drop_groups() -> None:
    """Empty the calling thread's registry in C++, which outlives the thread."""
    _unregister_all_process_groups()


def reduction_of(op: Any) -> tuple[str, float | None]:
    """Return the name of a ``ReduceOp``, and the factor of a premultiplied sum.

    >>> reduction_of(dist.ReduceOp(dist.ReduceOp.AVG)), reduction_of(dist.ReduceOp.PREMUL_SUM(0.5))
    (('avg', None), ('premul_sum', 0.5))
    """
    kind, supplement = op.__getstate__()
    return str(kind).rpartition(".")[2].lower(), supplement


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Hide what happens inside from dispatch modes of a rank, such as CommDebugMode."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        yield


@contextmanager
def tracing_hooks(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call ``refuse(what)`` whenever a thread traces (``make_fx``, export, AOT) or compiles."""
    from torch._dynamo import eval_frame

    enter, compile_ = ProxyTorchDispatchMode.__enter__, torch.compile
    callback_of = eval_frame._callback_from_stance

    def traced(mode: Any) -> Any:
        refuse("make_fx")
        return enter(mode)

    def called(callback: Any) -> Any:
        if callback not in (None, False):
            refuse("torch.compile")
        return callback_of(callback)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        refuse("torch.compile")
        return compile_(*args, **kwargs)

    # Code that was compiled before asks for its callback when it is called.
    with (
        mock.patch.object(ProxyTorchDispatchMode, "__enter__", traced),
        mock.patch.object(eval_frame, "_callback_from_stance", called),
        mock.patch.object(torch, "compile", compiled),
    ):
        yield
