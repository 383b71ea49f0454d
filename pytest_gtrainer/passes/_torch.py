"""Torch's private parts that passes rely on; a new torch breaks this file first.

Read against torch 2.13: functional collectives are the operators of
``torch.ops._c10d_functional``; a group is an argument by name, resolved by
``torch.distributed.distributed_c10d._resolve_process_group``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# registers torch.ops._c10d_functional's meta kernels
import torch.distributed._functional_collectives

try:
    from torch.distributed.distributed_c10d import _resolve_process_group
except ImportError as error:  # pragma: no cover - needs another torch
    raise ImportError(
        f"pytest-gtrainer {__name__} reads torch 2.13's process groups and found torch {torch.__version__}: {error}"
    ) from error

_ops = torch.ops._c10d_functional
ALL_GATHER = _ops.all_gather_into_tensor.default
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
ALL_REDUCE = _ops.all_reduce.default
ALL_TO_ALL = _ops.all_to_all_single.default
WAIT = _ops.wait_tensor.default


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group called ``name``, in group order.

    Raises:
        ValueError: there is no such group in this process.
    """
    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"process group {name!r} of the graph does not exist in this process: {error}") from None
