"""Values of a graph: fake tensors, wrapped tensors, memory, containers.

- ``torch.utils._pytree`` flattens containers; torch's own tracing flattens with it, so leaves come in its order.
- A *traceable wrapper subclass* holds other tensors and has no bytes of its own.
- ``DTensor._local_tensor`` is this rank's part; ``to_local`` would be recorded in a trace.
- ``UntypedStorage._cdata`` is the address of the storage object: equal for a tensor and its views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["FakeTensor", "FakeTensorMode", "is_traceable_wrapper_subclass", "local_part", "pytree", "storage_of"]

ATTRIBUTES = {
    "torch:UntypedStorage": ("_cdata",),
    "torch.distributed.tensor:DTensor": ("_local_tensor",),
}


def storage_of(tensor: torch.Tensor) -> int:
    """What tells memory from other memory: equal for a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)


def local_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and no view."""
    return tensor._local_tensor
