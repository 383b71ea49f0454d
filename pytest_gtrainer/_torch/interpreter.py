"""Collectives of a graph, as simulated ranks replay them.

- functional collectives are the operators of ``_c10d_functional`` (and ``_c10d_functional_autograd``, of
  the same names), their group an argument by name; ``_dtensor.shard_dim_alltoall`` is DTensor's own;
- ``DeviceMesh._get_root_mesh`` is the mesh that a submesh was cut out of, its ``mesh`` holds all ranks;
- ``bucketing._pre_bucket_all_gather`` (registered by ``torch._inductor.fx_passes.bucketing``) takes the rank as
  its argument ``rank``, and lays the rank's part at this place of a buffer for the whole group;
- ``torch.ops.higher_order.inductor_compiled_code`` calls what Inductor compiled.
"""

from __future__ import annotations

import torch

# registers torch.ops._c10d_functional and its meta kernels
import torch.distributed._functional_collectives
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch import private_names

with private_names():
    from torch.distributed.distributed_c10d import _resolve_process_group

ATTRIBUTES = {"torch.distributed.device_mesh:DeviceMesh": ("_get_root_mesh",)}

__all__ = [
    "ALL_GATHER_OUT",
    "COMPILED_CODE",
    "COMPILED_MODULES",
    "PRE_BUCKET_ALL_GATHER",
    "group_of",
    "root_ranks",
]

ALL_GATHER_OUT = torch.ops._c10d_functional.all_gather_into_tensor_out.default
PRE_BUCKET_ALL_GATHER = "bucketing::_pre_bucket_all_gather"
COMPILED_CODE = "inductor_compiled_code"
COMPILED_MODULES = "torch._inductor"


def group_of(name: str) -> tuple[int, ...]:
    """Ranks of the world in the process group called ``name``, by their rank in it.

    Raises:
        LookupError: there is no such group in this process.
    """
    try:
        return tuple(torch.distributed.get_process_group_ranks(_resolve_process_group(name)))
    except (RuntimeError, ValueError, KeyError) as error:
        raise LookupError(f"process group {name!r} of the graph does not exist in this process: {error}") from None


def root_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """All ranks of the mesh that ``mesh`` was cut out of, in its shape."""
    return mesh._get_root_mesh().mesh
