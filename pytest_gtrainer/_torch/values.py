"""Operators, tensors, memory and containers that graphs and modules hold.

Containers are flattened by ``torch.utils._pytree``, as torch's own tracing does, so leaves come in
its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ATTRIBUTES = {
    "torch._C": ("_dispatch_has_kernel_for_dispatch_key", "_should_allow_numbers_as_tensors"),
    "torch._ops:OpOverload": ("_schema",),
    "torch:Tensor": ("_version",),
    "torch:UntypedStorage": ("_cdata",),
    "torch.distributed.tensor:DTensor": ("_local_tensor",),
    "torch.nn:Module": ("_parameters", "_buffers", "_modules"),
}

# Numbers that a trace may know as a symbol only.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "is_traceable_wrapper_subclass",
    "pytree",
]


def schema(operator: OpOverload) -> Any:
    """The dispatcher's schema of an operator."""
    return operator._schema


def faked(meta: torch.Tensor, like: FakeTensor) -> FakeTensor:
    """Return a meta tensor as a fake one, of the mode and device of ``like``.

    ``FakeTensor(...)`` dispatches no operator, which a trace would record.
    """
    # A fake mode was on when it was made, as in a pass of Inductor.
    if isinstance(meta, FakeTensor):
        with unset_fake_temporarily():
            meta = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="meta")
    return FakeTensor(like.fake_mode, meta, like.device)


def value_like(
    like: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any] | None = None
) -> torch.Tensor:
    """Return a value of another shape for ``meta["val"]``, contiguous unless strides are given."""
    if not isinstance(like, FakeTensor):
        return like.new_empty(shape) if stride is None else like.new_empty_strided(shape, stride)
    if stride is None:
        meta = torch.empty(shape, dtype=like.dtype, device="meta")
    else:
        meta = torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")
    return faked(meta, like)


def is_composite(operator: OpOverload) -> bool:
    """Return whether torch decomposes an operator into others.

    The schema of such an operator says only where it may alias an operand, not that it does.
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    )


def takes_numbers(operator: OpOverload) -> bool:
    """Return whether a node may give the operator a number where its schema says a tensor."""
    # ``aten.add(x, 2)`` is legal, ``aten.mm(x, 2)`` is not: torch has a list of names.
    space, _, name = operator._schema.name.partition("::")
    is_listed = space == "aten" and torch._C._should_allow_numbers_as_tensors(name)
    return space == "prims" or bool(is_listed)


def strides_that_count(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, with 1 for those that place no element.

    These are the strides of dimensions of one element, and all of an empty tensor. Kernels leave
    any number there.
    """
    if not tensor.numel():
        return (1,) * tensor.dim()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple([stride if extent > 1 else 1 for extent, stride in pairs])


def storage_id(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage object: equal for a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)


def writes_to(tensor: torch.Tensor) -> int:
    """Return how many writes to a tensor and its views autograd has counted."""
    return int(tensor._version)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory: those inside a wrapper subclass, else the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        # A DTensor names its mesh, too, among its parts.
        return [tensor] if isinstance(tensor, torch.Tensor) else []
    found = []
    for name in tensor.__tensor_flatten__()[0]:
        found += parts_of(getattr(tensor, name))
    return found


def local_part(tensor: DTensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, itself and no view."""
    # A trace would record ``to_local``.
    return tensor._local_tensor


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters by name: its table, not a copy."""
    # A class may hide a parameter behind a property, and a write to the table does not run
    # ``__setattr__``.
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers by name: its table, not a copy."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own children by name: its table, not a copy."""
    return module._modules
