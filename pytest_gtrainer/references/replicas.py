"""Check what ranks that share one model must hold alike: batches, and parameters that its plan does
not shard.

Under a wrong tensor-parallel plan, a graph still equals eager code: both compute the same wrong
thing. But a parameter that every rank of the group holds as a whole then differs between them,
because each rank added a gradient of its own.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from pytest_gtrainer import facts
from pytest_gtrainer.graph.same_on_ranks import Difference, Line, first_difference
from pytest_gtrainer.numerics.bits import count_not_finite
from pytest_gtrainer.numerics.digest import digest
from pytest_gtrainer.tracing.model import local
from pytest_gtrainer.worlds import ranks_by
from pytest_gtrainer.worlds.gathering import gather_objects
from pytest_gtrainer.worlds.simulated import VacuousCheck


class ReplicasDiffer(facts.FailedCheck):
    """Ranks that hold the same tensor, or train on the same batch, have other bits."""


class RanksDisagree(facts.FailedCheck):
    """Ranks have other graphs, or issue other collectives; the message names the first."""


class ReplicaWarning(UserWarning):
    """Tensors that ranks of a simulated world hold alike have drifted apart."""


def texts_of_ranks(text: str) -> list[str]:
    """Gather the text of every rank, in rank order. Every rank must call it."""
    return gather_objects(text)


def first_differing_line(
    texts: Mapping[int, str] | Sequence[str], ranks: Iterable[int]
) -> Difference | None:
    """Compare the texts of ``ranks`` with that of the first, line by line; None if equal."""
    lines = {}
    for rank in ranks:
        lines[rank] = [Line(line, "") for line in texts[rank].splitlines()]
    return first_difference(lines)


def broadcast_bytes(content: bytes, sender: int) -> bytes:
    """Return the bytes of rank ``sender``, at least one, on every rank. Every rank must call it."""
    # As dist.broadcast_object_list does, which needs NumPy. The others have to know how much memory
    # the bytes need.
    length = torch.tensor([len(content)], device=_device())
    dist.broadcast(length, sender)
    if dist.get_rank() != sender:
        content = bytes(int(length))
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_device())
    dist.broadcast(data, sender)
    return bytes(data.tolist())


def on_any_rank(answer: bool) -> bool:
    """Return whether ``answer`` is true on one of the ranks. Every rank must call it."""
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return answer
    votes = torch.tensor(int(answer), device=_device())
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@facts.check
def assert_replicas_equal(model: nn.Module, mesh: DeviceMesh, over: str) -> None:
    """Check that ranks along the dimension ``over`` of ``mesh`` hold the same bits of what is not
    sharded.

    Judged are parameters, their gradients and buffers: plain tensors, and DTensors that have no
    such dimension or are replicated over it. Every rank of the world calls it, after a step. The
    summary names what is partial, of which each rank holds one summand.

    Raises:
        ReplicasDiffer: on every rank, with the first tensor, two ranks, and how many tensors
            differ.
        VacuousCheck: on every rank, if all of a parameter or gradient is NaN or infinite: so it is
            on any rank.
        ValueError: a fake process group; the mesh has no such dimension, or nothing in the model is
            replicated over it.
    """
    if dist.get_backend() == "fake":
        raise ValueError(
            "the groups of this world are fake: there is one rank, and nothing to compare it with. "
            'Take gt_world("ranks")'
        )

    names = mesh.mesh_dim_names or ()
    if over not in names:
        raise ValueError(
            f"the mesh has no dimension {over!r}, it has {', '.join(names) or 'no names'}: {mesh}"
        )

    # Every rank of the world takes part in the exchange, also those outside of the mesh.
    own = [dist.get_rank()]
    if mesh.get_coordinate() is not None:
        own = dist.get_process_group_ranks(mesh.get_group(over))
    compared = assert_alike(state_of(model), peers_by(tuple(own)), f"replicated over {over!r}")
    if not compared:
        raise ValueError(
            f"no tensor of {type(model).__name__} is replicated over {over!r}: nothing could differ"
        )

    _refuse_not_finite(model, compared)
    for name, tensor in state_of(model):
        if isinstance(tensor, DTensor) and any(
            placement.is_partial() for placement in tensor.placements
        ):
            what = f"{name} is {tensor.placements}: ranks hold summands, which were not compared"
            facts.emit("idle", what=what)


def _refuse_not_finite(model: nn.Module, compared: int) -> None:
    """Raise on every rank if all elements of a parameter or gradient are NaN or infinite; report it
    if some are. Every rank must call it.
    """
    buffers = dict(model.named_buffers())
    not_finite, wholly = [], ""
    for name, tensor in state_of(model):
        # A buffer may be an attention mask, whose elements are infinite on purpose.
        if name in buffers:
            continue
        count = count_not_finite(tensor)
        if count:
            not_finite.append(name)
            if count == local(tensor).numel():
                wholly = wholly or name

    # Raised on all ranks: one that went on would wait for the others in its next collective.
    for rank, name in enumerate(texts_of_ranks(wholly)):
        if name:
            raise VacuousCheck(
                f"{name} is NaN or infinite on rank {rank}, in every element, so these ranks are "
                "equal whatever they compute: take inputs, or a learning rate, for which the loss "
                "is finite"
            )

    if not_finite:
        what = f"replicas, where {not_finite[0]} and {len(not_finite) - 1} more are not finite"
        facts.emit("verdict", outcome="equal (not finite)", tensors=compared, what=what)


def peers_by(key: Hashable) -> list[tuple[int, ...]]:
    """Group the ranks that gave the same key. Every rank must call it."""
    return list(map(tuple, ranks_by(enumerate(gather_objects(key))).values()))


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, their gradients and buffers, by name."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name, tensor
        if tensor.grad is not None:
            yield f"the gradient of {name}", tensor.grad


def assert_alike(
    named: Iterable[tuple[str, torch.Tensor]], groups: Sequence[tuple[int, ...]], why: str
) -> int:
    """Check that tensors of one name are equal in each group of ranks, except for shards.

    Returns how many this rank compared. Every rank of the world must call it.
    """
    compared, difference = find_difference(named, groups, why)
    if difference:
        raise ReplicasDiffer(difference)
    return compared


def find_difference(
    named: Iterable[tuple[str, torch.Tensor]], groups: Sequence[tuple[int, ...]], why: str
) -> tuple[int, str]:
    """Return how many tensors this rank compared, and how ranks of a group differ, "" if not.

    Every rank of the world must call it.
    """
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    digests = {}
    for name, tensor in named:
        if _is_whole(tensor, own):
            digests[name] = digest(local(tensor.detach()))

    # Digests travel, as the tensors of a model would take its memory once for each rank.
    of_ranks = gather_objects(digests)
    for ranks in groups:
        first = of_ranks[ranks[0]]
        for rank in ranks[1:]:
            other = of_ranks[rank]
            differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if differing:
                return 0, (
                    f"{differing[0]} differs between ranks {ranks[0]} and {rank}, and is {why}; "
                    f"so do {len(differing) - 1} more of {len(first)} such tensors"
                )

    if len(own) == 1:
        return 0, ""
    return len(digests), ""


def _is_whole(tensor: torch.Tensor, ranks: tuple[int, ...]) -> bool:
    """Return whether no dimension along which the tensor is split has two of these ranks."""
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            sharers = dist.get_process_group_ranks(tensor.device_mesh.get_group(dim))
            if placement != Replicate() and len(set(sharers) & set(ranks)) > 1:
                return False
    return True
