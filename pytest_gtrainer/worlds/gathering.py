"""Gather the bytes of all ranks of a process group."""

import torch
import torch.distributed as dist

from pytest_gtrainer.numerics.bits import memory


def bytes_of_ranks(content: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gather the bytes of every rank of a group, in rank order. Every rank of it must call this."""
    # dist.all_gather_object does the same, but needs NumPy, which is no dependency of ours.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    lengths = _all_gather(torch.tensor([len(content)], device=device), group)
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    rows = zip(_all_gather(padded, group), lengths, strict=True)
    return [bytes(memory(row[: int(length)].cpu())) for row, length in rows]


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor, group=group)
    return rows
