"""Process groups: which live, how many were made, an end that does not wait; torch's caches that outlive a test.

- ``distributed_c10d._resolve_process_group(name)`` gives the group that a functional collective names.
- ``pg_map``, ``pg_names`` and ``group_count`` of ``distributed_c10d._world`` have no public reader.
- ``_get_sequence_number_for_group`` counts what was issued on a group.
- ``_abort_process_group`` does not wait for collectives that never end, as ``destroy_process_group`` does.
- ``c10d_logger`` logs every failed collective with all its arguments, on each rank that waited.
- Two DeviceMeshes over the same ranks with the same names are equal, whatever their groups. So DTensor's caches hand
  a later test the mesh of an earlier one, whose groups are gone ("Could not resolve the process group registered
  under the name 1"), or, worse, whose group names now belong to others. A world that ends therefore empties them.
- ``torch._dynamo.convert_frame.FRAME_COUNTER`` counts what was compiled; no other count costs nothing to read.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

ATTRIBUTES = {
    "torch.distributed.distributed_c10d:_World": ("pg_map", "pg_names", "group_count"),
    "torch.distributed:ProcessGroup": ("_get_sequence_number_for_group",),
    "torch._dynamo.convert_frame": ("FRAME_COUNTER",),
}


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a graph calls ``name``.

    Raises:
        ValueError: there is no such group in this process.
    """
    try:
        return c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"process group {name!r} of the graph does not exist in this process: {error}") from None


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group called ``name``, in group order; raises as ``group_named``."""
    return tuple(dist.get_process_group_ranks(group_named(name)))


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


def forget_meshes() -> None:
    """Empty DTensor's caches of sharding propagation, of redistribution plans and of what these cost.

    What ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` does (that module needs NumPy), and the caches
    around redistribution. Does nothing where DTensor was never imported.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def forget_compiled() -> None:
    """Empty dynamo's caches, if something was compiled: a later test might hit them, or their limit.

    Not without asking: where there is a GPU, that of torch 2.13 imports Inductor, a second in each rank.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.FRAME_COUNTER > 0:
        torch.compiler.reset()
