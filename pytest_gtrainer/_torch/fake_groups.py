"""The fake backend, and a fake default group beside the groups of a process.

``distributed_c10d._world`` holds the process groups of a process, and may be replaced. torch's own
``ThreadLocalWorld`` has tables of its own; ``_World`` only reads tables of the module. Importing
``FakeStore`` registers the backend "fake".
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.process_groups import forget_meshes

with private_names():
    from torch._C._distributed_c10d import _unregister_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

ATTRIBUTES = {
    "torch.distributed.distributed_c10d": ("_world",),
    "torch.distributed.distributed_c10d:_World": ("pg_map", "group_count"),
    "torch.testing._internal.distributed.multi_threaded_pg:ThreadLocalWorld": ("_world",),
}

# Names of groups are numbers. These are beyond those of any other world, so that a name that is
# remembered finds nothing there.
_NAMES = itertools.count(1_000_000_000, 1_000_000)


def new_group_names() -> int:
    """Return a number for ``fake_group_beside``, from which no other world names its groups."""
    return next(_NAMES)


@contextmanager
def fake_group_beside(rank: int, size: int, names: int | None = None) -> Iterator[None]:
    """Give this process a fake default group of another rank; its own groups are hidden meanwhile.

    Make meshes anew inside. Groups are named from the number ``names``, by default a new one: two
    worlds with one number have groups with equal names.
    """
    outside = c10d._world
    # Equal meshes share caches, and with them names of groups.
    forget_meshes()
    c10d._world = ThreadLocalWorld()
    c10d._world.group_count = new_group_names() if names is None else names
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        # C++ has a registry of its own, by name.
        for group in list(c10d._world.pg_map):
            _unregister_process_group(group.group_name)
        # Its tables belong to the thread: the next ``ThreadLocalWorld`` would have them again.
        del ThreadLocalWorld._world.world
        c10d._world = outside
        forget_meshes()
