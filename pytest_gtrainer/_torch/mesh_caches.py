"""DTensor's caches, which outlive the process groups of their meshes.

Two DeviceMeshes over the same ranks with the same names are equal, whatever their groups. So
a cache keyed by mesh hands a later test the mesh of an earlier one, whose groups are gone
("Could not resolve the process group registered under the name 1"), or, worse, whose group
names now belong to others. A world that ends therefore empties them.
"""

from __future__ import annotations

import sys


def forget_meshes() -> None:
    """Empty DTensor's caches of sharding propagation, of redistribution plans and of what these cost.

    Private, read against torch 2.13: what ``torch.distributed.tensor.debug._clear_sharding_prop_cache``
    does (that module is not imported, because it needs NumPy), the ``functools.cache`` around
    ``_redistribute._gen_transform_infos`` and around ``_collective_utils.MeshTopoInfo.build_from_mesh``,
    and the planners of ``_redistribute``. Does nothing where DTensor was never imported.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
