"""The fake backend, and another default group, fake or real, beside the groups of a process.

``distributed_c10d._world`` holds the process groups of a process, and may be replaced. torch's own
``ThreadLocalWorld`` has tables of its own, for each thread; ``_World`` only reads tables of the
module. Importing ``FakeStore`` registers the backend "fake". ``_new_process_group_helper`` makes
every group.
"""

import functools
import inspect
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.process_groups import forget_meshes

with private_names():
    from torch._C._distributed_c10d import (
        _register_process_group,
        _resolve_process_group,
        _unregister_process_group,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld, WorldData

ATTRIBUTES = {
    "torch.distributed.distributed_c10d": (
        "_world",
        "_new_process_group_helper",
        "_get_default_timeout",
    ),
    "torch.distributed.distributed_c10d:_World": ("pg_map", "group_count"),
}

# Names of groups are numbers. These are beyond those of any other world, so that a name that is
# remembered finds nothing there.
_NAMES = itertools.count(1_000_000_000, 1_000_000)

# Inside ``every_group_is_fake`` the function of that name holds a trainer to the rank of its world.
_init_process_group = dist.init_process_group


def new_group_names() -> int:
    """Return a number for ``fake_group_beside``, from which no other world names its groups."""
    return next(_NAMES)


@contextmanager
def every_group_is_fake(rank: int, size: int) -> Iterator[None]:
    """Let groups of every backend be fake ones, in a process whose default group is fake.

    A trainer names its backend: ``new_group(backend="nccl")``. Its ``init_process_group("nccl")``
    takes the group that is up, once, if rank and size are those of the world.

    Raises:
        ValueError: inside, if a program wants to be another rank, or in a world of another size.
    """
    make_group, init = c10d._new_process_group_helper, dist.init_process_group
    group_parameters, init_parameters = inspect.signature(make_group), inspect.signature(init)
    is_taken = False

    @functools.wraps(make_group)
    def make_fake_group(*args: Any, **kwargs: Any) -> Any:
        given = group_parameters.bind(*args, **kwargs).arguments
        # Options and devices are those of the backend that was asked for.
        given |= {"backend": dist.Backend("fake"), "backend_options": None, "device_id": None}
        return make_group(**given)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        nonlocal is_taken
        given = init_parameters.bind(*args, **kwargs).arguments
        for name, own in (("rank", rank), ("world_size", size)):
            if given.get(name, -1) not in (-1, own):
                raise ValueError(
                    f"init_process_group({name}={given[name]}) in a fake world of {name}={own}: "
                    f'make both the same, gt_world("fake", size=, rank=)'
                )
        if dist.is_initialized() and not is_taken:
            is_taken = True
            return
        # Its own store would wait for other processes.
        init("fake", store=FakeStore(), rank=rank, world_size=size)

    # In a build without NCCL torch warns of its timeout.
    timeout = c10d._get_default_timeout(dist.Backend("fake"))
    patched = mock.patch.object(c10d, "_get_default_timeout", return_value=timeout)
    with ExitStack() as stack:
        stack.enter_context(patched)
        stack.enter_context(mock.patch.object(c10d, "_new_process_group_helper", make_fake_group))
        stack.enter_context(mock.patch.object(c10d, "init_process_group", init_process_group))
        stack.enter_context(mock.patch.object(dist, "init_process_group", init_process_group))
        yield


@contextmanager
def fake_group_beside(rank: int, size: int, names: int | None = None) -> Iterator[None]:
    """Give this process a fake default group of another rank; its own groups are hidden meanwhile.

    Make meshes anew inside. Groups are named from the number ``names``, by default a new one: two
    worlds with one number have groups with equal names.
    """
    with _world_beside(new_group_names() if names is None else names):
        try:
            _init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            yield
        finally:
            # C++ has a registry of its own, by name.
            for group in list(c10d._world.pg_map):
                _unregister_process_group(group.group_name)


@contextmanager
def real_group_beside(
    backend: str, store: dist.Store, rank: int, size: int, names: int
) -> Iterator[None]:
    """Give this process a real default group of its own; its other groups are hidden meanwhile.

    Every rank of the group enters it, with one number ``names``. A rank that leaves it by an
    exception closes its connections, so that others do not wait for it.
    """
    with _world_beside(names):
        sockets = _sockets()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            yield
            dist.barrier()  # nobody closes a connection that another rank still reads
        except BaseException:
            if backend == "gloo":
                _shut_down(_sockets() - sockets)
            else:
                dist.group.WORLD.abort()
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _sockets() -> set[tuple[str, str]]:
    """Return the sockets of this process, by number and inode; none where there is no /proc."""
    found = set()
    with suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                target = os.readlink(f"/proc/self/fd/{number}")
                if target.startswith("socket:"):
                    found.add((number, target))
    return found


def _shut_down(sockets: set[tuple[str, str]]) -> None:
    """Shut TCP connections down, which ends what other ranks wait for.

    Gloo closes its connections with the last reference to its group. Modules of FSDP hold some, and
    so does the traceback of the failure. Its ``abort`` does not close them.
    """
    for number, _ in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises for one that listens, which gloo still needs
                connection.shutdown(socket.SHUT_RDWR)


class _SharedWorld(ThreadLocalWorld):
    """Tables that all threads of the process see: a checkpoint may be written by another thread."""

    def __init__(self) -> None:
        self._data = WorldData(None, {}, {}, {}, {}, 0, {}, {}, {}, [])

    def _get_world(self) -> WorldData:
        return self._data


@contextmanager
def _world_beside(names: int) -> Iterator[None]:
    outside = c10d._world
    # Equal meshes share caches, and with them names of groups.
    forget_meshes()
    c10d._world = _SharedWorld()
    c10d._world.group_count = names
    try:
        yield
    finally:
        c10d._world = outside
        forget_meshes()
        # Whoever destroys a default group takes the names of all groups out of C++'s registry.
        for group in outside.pg_map:
            try:
                _resolve_process_group(group.group_name)
            except RuntimeError:
                _register_process_group(group.group_name, group)
