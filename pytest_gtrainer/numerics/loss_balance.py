"""The mean loss over all tokens of all ranks, where ranks have different numbers of tokens.

A mean per rank, averaged over ranks, weighs a token of a short batch more than one of a long batch. Here every rank
divides the sum over its own tokens by the number of all tokens, so that the ranks' losses add up to the global mean,
and their gradients to its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gtrainer._torch.passes import functional_collectives


def balanced_loss(
    loss_sum: Tensor,
    tokens: Tensor | int,
    group: dist.ProcessGroup | None = None,
    *,
    gradients: Literal["avg", "sum"] = "avg",
) -> Tensor:
    """This rank's share of the mean over the tokens of all ranks; every rank of the group must call it.

    With ``gradients="sum"`` the shares add up to the global mean; with "avg", for gradients that are averaged over
    ranks as FSDP and DDP do, their average is. Tokens are counted in int64, exactly, by one all-reduce, also in a
    trace. Over ``R`` ranks the result is at most ``(R + 2) * eps`` times the sum of absolute shares away from the
    mean computed on one rank from the same sums, ``eps`` that of the dtype. Bit for bit it is the mean of the rank's
    own tokens where every rank has as many and ``R`` is a power of two, or one.

    Args:
        loss_sum: the sum over this rank's tokens, a scalar; zero on a rank without tokens.
        tokens: how many those are, without padding.
        group: the ranks that share the batch; by default all.
        gradients: how gradients are reduced afterwards.

    Raises:
        ValueError: ``loss_sum`` is not a scalar, or ``gradients`` is neither.
    """
    if loss_sum.numel() != 1:
        raise ValueError(f"loss_sum is the sum over this rank's tokens, a scalar; not {list(loss_sum.shape)}")
    if gradients not in ("avg", "sum"):
        raise ValueError(f"gradients are reduced by 'avg' or 'sum'; not {gradients!r}")
    group = group if group is not None else dist.group.WORLD
    count = torch.as_tensor(tokens, dtype=torch.int64, device=loss_sum.device).detach()
    total = functional_collectives.all_reduce(count.reshape(()), "sum", group)
    scaled = loss_sum * dist.get_world_size(group) if gradients == "avg" else loss_sum
    return scaled / total
