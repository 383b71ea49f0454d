"""Gather objects of all ranks of a process group."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pytest_gtrainer.numerics.bits import memory

T = TypeVar("T")


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather an object of every rank of a group, in rank order. Every rank of it must call this."""
    # dist.all_gather_object does the same, but needs NumPy, which is no dependency of ours.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    content = pickle.dumps(own)
    lengths = _all_gather(torch.tensor([len(content)], device=device), group)
    # All ranks give tensors of one size to an all-gather; pickle stops reading where it is over.
    padded = bytearray(content.ljust(int(max(lengths))))
    found = []
    for row in _all_gather(torch.frombuffer(padded, dtype=torch.uint8).to(device), group):
        on_host = row.cpu()  # has to live while its memory is read
        found.append(pickle.loads(memory(on_host)))
    return found


def on_first_rank(make: Callable[[], T]) -> T:
    """Return what ``make()`` returns on the first rank of the world, on all ranks.

    What it raises there, all ranks raise. Every rank must call this.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    result: Any = None
    error: Exception | None = None
    content = b""
    if dist.get_rank() == 0:
        try:
            result = make()
        except Exception as own:
            error = own
        try:
            content = pickle.dumps((result, error))
        except Exception:
            # The others wait, so they have to hear of it in any case.
            reason = error or f"the result cannot be pickled: {type(result).__name__}"
            error = error or RuntimeError(reason)
            content = pickle.dumps((None, RuntimeError(f"on the first rank: {reason}")))
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, src=0)
    sent = torch.frombuffer(bytearray(content.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(sent, src=0)
    if dist.get_rank() != 0:
        on_host = sent.cpu()  # has to live while its memory is read
        result, error = pickle.loads(memory(on_host))
    if error is not None:
        raise error
    return result


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor, group=group)
    return rows
