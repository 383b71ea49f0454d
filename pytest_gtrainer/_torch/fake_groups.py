"""The fake backend, and a fake default group beside the groups of a process.

- ``FakeStore`` has no other home; importing it registers the backend "fake".
- ``distributed_c10d._world`` holds the process groups of a process and may be replaced. ``_World``
  itself only looks at tables of the module; torch's ``ThreadLocalWorld`` has tables of its own, in
  ``_world``. ``group_count`` numbers the groups, and with them their names.
- Groups are registered by name in C++ too: ``_unregister_process_group(name)`` takes one out.
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

_NAMES = itertools.count(1_000_000_000, 1_000_000)  # no name of a group means anything elsewhere


def new_group_names() -> int:
    """A number from which ``fake_group_beside`` names its groups, and no other world of this
    process does.
    """
    return next(_NAMES)


@contextmanager
def fake_group_beside(rank: int, size: int, names: int | None = None) -> Iterator[None]:
    """A fake default group, as another rank's; this process's own are out of sight. Make meshes
    anew inside.

    Groups are named from the number ``names``, by default a new one: two worlds of one number have
    equal names.
    """
    outside = c10d._world
    forget_meshes()  # equal meshes share caches, and with them names of groups
    c10d._world = ThreadLocalWorld()
    c10d._world.group_count = new_group_names() if names is None else names
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        for group in list(c10d._world.pg_map):
            _unregister_process_group(group.group_name)
        del (
            ThreadLocalWorld._world.world
        )  # its tables belong to the thread, and would be there again
        c10d._world = outside
        forget_meshes()
