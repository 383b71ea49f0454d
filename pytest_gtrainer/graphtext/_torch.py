"""The private parts of torch that graph text relies on, in one place, read against torch 2.13.

- ``distributed_c10d._resolve_process_group(name)`` gives the group that a functional
  collective names in its ``group_name`` argument, or raises ``RuntimeError``.
- ``ProcessGroup.group_desc`` is ``mesh_<dimension>`` for a group made by ``init_device_mesh``
  and ``default_pg`` for the world, also where a mesh uses the world as its one dimension.
- ``OpOverload._schema`` (``name``, ``overload_name``, ``arguments``), the dispatcher's schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["HigherOrderOperator", "OpOverload", "Overload", "ResolvedGroup", "overload", "resolve_group"]


@dataclass(frozen=True, slots=True)
class ResolvedGroup:
    """The ranks of a process group, in its order, and what its maker called it."""

    ranks: tuple[int, ...]
    description: str


def resolve_group(name: str) -> ResolvedGroup | None:
    """The process group of that name; None if this process has none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        group = dist.distributed_c10d._resolve_process_group(name)
        return ResolvedGroup(tuple(dist.get_process_group_ranks(group)), group.group_desc)
    except (RuntimeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Overload:
    """The schema of an operator: namespace, name, overload, and names of its arguments."""

    namespace: str
    name: str
    overload: str
    arguments: tuple[str, ...]


def overload(target: OpOverload) -> Overload:
    """Read the dispatcher's schema of an operator."""
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    return Overload(namespace, name, schema.overload_name, tuple(arg.name for arg in schema.arguments))


def expression(value: Any) -> Any:
    """The sympy expression of a symbolic number; an ordinary number as it is."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return value
