"""What ranks that share one model hold alike: their batches, and whatever the model's plan does not
shard.

A graph equals eager code under a wrong plan, too: both compute the same wrong thing. What tells is
that parameters which every rank of a tensor-parallel group holds as a whole differ between them,
because each added its own gradient.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.bits import count_not_finite
from pytest_gtrainer.numerics.digest import digest
from pytest_gtrainer.tracing.model import local
from pytest_gtrainer.worlds import ranks_by
from pytest_gtrainer.worlds.simulated import VacuousCheck


class ReplicasDiffer(facts.FailedCheck):
    """Ranks that hold the same tensor, or train on the same batch, have other bits."""


class RanksDisagree(facts.FailedCheck):
    """Ranks have other graphs, or issue other collectives; the message names the first."""


class ReplicaWarning(UserWarning):
    """In a simulated world, what ranks hold alike has drifted apart."""


def texts_of_ranks(text: str) -> list[str]:
    """Each rank's text, by rank; every rank must call it. ``dist.all_gather_object`` does this too,
    but needs NumPy.
    """
    content = text.encode()
    lengths = _all_gather(torch.tensor([len(content)], device=_device()))
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(_device())
    rows = zip(_all_gather(padded), lengths, strict=True)
    return [bytes(row[: int(length)].tolist()).decode() for row, length in rows]


def sent_from(sender: int, content: bytes) -> bytes:
    """The bytes of one rank, at least one, on every rank; every rank must call it."""
    length = torch.tensor([len(content)], device=_device())
    dist.broadcast(length, sender)
    data = torch.frombuffer(
        bytearray(content.ljust(int(length))[: int(length)]), dtype=torch.uint8
    ).to(_device())
    dist.broadcast(data, sender)
    return bytes(data.tolist())


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return rows


@facts.check
def assert_replicas_equal(model: nn.Module, mesh: DeviceMesh, over: str) -> None:
    """What the ranks along the dimension ``over`` of ``mesh`` hold as a whole must have the same
    bits on all of them.

    Judged are parameters, their gradients and buffers: plain tensors, and DTensors that have no
    such dimension or are replicated over it. Every rank of the world calls it, after a step.

    Raises:
        ReplicasDiffer: on every rank, with the first tensor, two ranks, and how many tensors
            differ.
        VacuousCheck: on every rank, if all of a parameter or gradient is NaN or infinite: so it is
            on any rank.
        ValueError: the mesh has no such dimension, or nothing in the model is replicated over it.
    """
    names = mesh.mesh_dim_names or ()
    if over not in names:
        raise ValueError(
            f"the mesh has no dimension {over!r}, it has {', '.join(names) or 'no names'}: {mesh}"
        )
    is_in = mesh.get_coordinate() is not None
    own = dist.get_process_group_ranks(mesh.get_group(over)) if is_in else [dist.get_rank()]
    compared = assert_alike(state_of(model), peers_by(tuple(own)), f"replicated over {over!r}")
    if not compared:
        raise ValueError(
            f"no tensor of {type(model).__name__} is replicated over {over!r}: nothing could differ"
        )
    _refuse_what_is_not_finite(model, compared)


def _refuse_what_is_not_finite(model: nn.Module, compared: int) -> None:
    """Raise on every rank if all elements of a parameter or gradient are NaN or infinite; say so if
    some are.
    """
    buffers = {name for name, _ in model.named_buffers()}  # which may hold a mask
    bad, worst = [], ""
    for name, tensor in state_of(model):
        if name in buffers:
            continue
        count = count_not_finite(tensor)
        if count:
            bad.append(name)
        if count and count == local(tensor).numel():
            worst = worst or name
    found = [(rank, name) for rank, name in enumerate(texts_of_ranks(worst)) if name]
    if found:
        rank, name = found[0]
        raise VacuousCheck(
            f"{name} is NaN or infinite on rank {rank}, in every element, so these ranks are equal whatever they "
            "compute: take inputs, or a learning rate, for which the loss is finite"
        )
    if bad:
        what = f"replicas, where {bad[0]} and {len(bad) - 1} more are not finite"
        facts.emit("verdict", outcome="equal (not finite)", tensors=compared, what=what)


def peers_by(key: Hashable) -> list[tuple[int, ...]]:
    """The ranks that gave the same key, a group each; every rank must call it."""
    return [tuple(ranks) for ranks in ranks_by(enumerate(texts_of_ranks(repr(key)))).values()]


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, their gradients, buffers, by name."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name, tensor
        if tensor.grad is not None:
            yield f"the gradient of {name}", tensor.grad


def assert_alike(
    named: Iterable[tuple[str, torch.Tensor]], groups: Sequence[tuple[int, ...]], why: str
) -> int:
    """Fail unless tensors of one name are equal in each group of ranks, but for shards.

    Returns how many this rank compared.
    """
    compared, difference = find_difference(named, groups, why)
    if difference:
        raise ReplicasDiffer(difference)
    return compared


def find_difference(
    named: Iterable[tuple[str, torch.Tensor]], groups: Sequence[tuple[int, ...]], why: str
) -> tuple[int, str]:
    """Return how many tensors this rank compared, and how ranks of a group differ, "" if not."""
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    mine = {
        name: digest(local(tensor.detach())) for name, tensor in named if _is_whole(tensor, own)
    }
    told = texts_of_ranks("\n".join(f"{name} {value}" for name, value in mine.items()))
    lines = [dict(line.rsplit(" ", 1) for line in text.splitlines()) for text in told]
    for ranks in groups:
        first = lines[ranks[0]]
        for rank in ranks[1:]:
            differ = [
                name
                for name in {**first, **lines[rank]}
                if first.get(name) != lines[rank].get(name)
            ]
            if differ:
                wrong = f"{differ[0]} differs between ranks {ranks[0]} and {rank}, and is {why}"
                return 0, f"{wrong}; so do {len(differ) - 1} more of {len(first)} such tensors"
    return (len(mine) if len(own) > 1 else 0), ""


def _is_whole(tensor: torch.Tensor, ranks: tuple[int, ...]) -> bool:
    """Return whether no dimension along which the tensor is split has two of these ranks."""
    if not isinstance(tensor, DTensor):
        return True
    split = (dim for dim, placement in enumerate(tensor.placements) if placement != Replicate())
    along = (dist.get_process_group_ranks(tensor.device_mesh.get_group(dim)) for dim in split)
    return all(len(set(shared) & set(ranks)) < 2 for shared in along)
