"""Process groups: which live, how many were made, an end that does not wait.

- ``pg_map``, ``pg_names`` and ``group_count`` of ``distributed_c10d._world`` have no public reader.
- ``_get_sequence_number_for_group`` counts what was issued on a group.
- ``_abort_process_group`` does not wait for collectives that never end, as ``destroy_process_group`` does.
- ``c10d_logger`` logs every failed collective with all its arguments, on each rank that waited.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

ATTRIBUTES = {
    "torch.distributed.distributed_c10d:_World": ("pg_map", "pg_names", "group_count"),
    "torch.distributed:ProcessGroup": ("_get_sequence_number_for_group",),
}


def live_groups() -> list[dist.ProcessGroup]:
    """All groups of this process, in the order in which they were made."""
    return list(c10d._world.pg_map)


def names_of_live_groups() -> dict[dist.ProcessGroup, str]:
    """Those groups with their names."""
    return dict(c10d._world.pg_names)


def groups_made() -> int:
    """How many groups were made since the default one was, those that have ended included."""
    return int(c10d._world.group_count)


def issued_on(group: dist.ProcessGroup) -> int:
    """Collectives, sends and receives that were issued on a group.

    Raises:
        RuntimeError: its backend does not count.
    """
    return int(group._get_sequence_number_for_group())


def abort_all_groups() -> None:
    """End all groups without waiting for collectives under way."""
    c10d._abort_process_group()


def silence_collective_log() -> None:
    """Disable the logger of failed collectives: pytest captures what merely does not propagate."""
    c10d_logger._c10d_logger.disabled = True
