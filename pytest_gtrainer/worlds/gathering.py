"""Gather objects of all ranks of a process group."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from pytest_gtrainer.numerics.bits import memory


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


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor, group=group)
    return rows
