"""What graphs and modules hold: operators, tensors, memory, containers.

- ``OpOverload._schema`` is the dispatcher's schema: ``name``, ``arguments`` (each with ``name``,
  ``is_write``, ``alias_info``, ``default_value``), ``returns``, ``is_mutable``.
- ``FakeTensor(mode, meta_tensor, device)`` makes a fake tensor without dispatching an operator.
- ``torch.utils._pytree`` flattens containers; torch's own tracing flattens with it, so leaves come
  in its order.
- A *traceable wrapper subclass* holds other tensors and has no bytes of its own.
- ``DTensor._local_tensor`` is this rank's part; ``to_local`` would be recorded in a trace.
- ``torch._C._dispatch_has_kernel_for_dispatch_key`` tells operators that the dispatcher takes
  apart.
- ``torch._C._should_allow_numbers_as_tensors`` tells ``aten.add(x, 2)`` from ``aten.mm(x, 2)``, by
  the name.
- ``UntypedStorage._cdata`` is the address of the storage object: equal for a tensor and its views.
- A class may hide a parameter behind a property, so ``getattr`` does not give what a module holds
  in ``_parameters``; writing to that table does not run ``__setattr__``.
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
    "torch:UntypedStorage": ("_cdata",),
    "torch.distributed.tensor:DTensor": ("_local_tensor",),
    "torch.nn:Module": ("_parameters", "_buffers", "_modules"),
}

SYMBOLIC = (
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)  # numbers of which a trace may not know more than a symbol

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
    """A meta tensor as a fake one, of the mode and device of another."""
    if isinstance(meta, FakeTensor):  # made while a fake mode is on, as in a pass of Inductor
        with unset_fake_temporarily():
            meta = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="meta")
    return FakeTensor(like.fake_mode, meta, like.device)


def value_like(
    like: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any] | None = None
) -> torch.Tensor:
    """A value of other extents for ``meta["val"]``, contiguous unless strides are given; made
    without dispatch.
    """
    if not isinstance(like, FakeTensor):
        return like.new_empty(shape) if stride is None else like.new_empty_strided(shape, stride)
    kind: dict[str, Any] = {"dtype": like.dtype, "device": "meta"}
    return faked(
        torch.empty(shape, **kind)
        if stride is None
        else torch.empty_strided(shape, stride, **kind),
        like,
    )


def is_composite(operator: OpOverload) -> bool:
    """Return whether torch takes it apart into other operators: its schema then says where it may
    show an operand's memory.
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    )


def takes_numbers(operator: OpOverload) -> bool:
    """Return whether a node may give the operator a number where its schema says a tensor."""
    space, _, name = operator._schema.name.partition("::")
    is_listed = space == "aten" and torch._C._should_allow_numbers_as_tensors(name)
    return space == "prims" or bool(is_listed)


def storage_id(tensor: torch.Tensor) -> int:
    """Return what tells memory from other memory: equal for a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have memory: of a wrapper subclass those that it holds, else itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor] if isinstance(tensor, torch.Tensor) else []  # a DTensor names its mesh, too
    return [
        part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))
    ]


def local_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and no view."""
    return tensor._local_tensor


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name: its table, not a copy."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name: its table, not a copy."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own children by name: its table, not a copy."""
    return module._modules
