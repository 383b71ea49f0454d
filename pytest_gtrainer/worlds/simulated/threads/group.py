"""The process group of a rank on a thread: hands every collective to its group's meeting.

A collective returns a work at once; waiting for the work gives the turn to other ranks until the last
member has arrived. So collectives may be issued ahead and on several groups in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gtrainer._torch.threads import BACKEND, Work, reduction_of, unseen_by_modes
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel
from pytest_gtrainer.worlds.simulated.threads.faults import ranks_text, stacks
from pytest_gtrainer.worlds.simulated.threads.meetings import Meeting, Place
from pytest_gtrainer.worlds.simulated.threads.messages import Route
from pytest_gtrainer.worlds.simulated.threads.operations import (
    AllGather,
    AllGatherList,
    AllReduce,
    AllToAll,
    AllToAllList,
    Barrier,
    Broadcast,
    Call,
    Gather,
    ReduceScatter,
    Reduction,
    Scatter,
)
from pytest_gtrainer.worlds.simulated.threads.team import Event, Team

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.net import Net

_UNMODELLED = (
    "_start_coalescing",
    "allgather_coalesced",
    "merge_remote_group",
    "monitored_barrier",
    "recv_anysource",
    "split_group",
)


class World:
    """What the groups of all ranks share: the team, the net, and a place for every group."""

    def __init__(self, team: Team, net: Net) -> None:
        self.team = team
        self._net = net
        self._places: dict[tuple[str, tuple[int, ...]], Place] = {}

    def place(self, name: str, ranks: tuple[int, ...]) -> Place:
        """Where the group of this name and these global ranks meets."""
        key = name, ranks
        if key not in self._places:
            same = sum(members == ranks for _, members in self._places)
            text = f"the group of {ranks_text(ranks)}" + (f" (group {same + 1} of these)" if same else "")
            whole = ranks == tuple(range(self.team.size))
            self._places[key] = Place(ranks, self._net if whole else self._net.for_group(ranks), text)
        return self._places[key]


class _Work(Work):
    """A collective or a message under way, as one rank sees it."""

    def __init__(self, team: Team, rank: int, event: Event, outputs: list[Tensor]) -> None:
        super().__init__()
        self._team, self._rank, self._event, self._outputs = team, rank, event, outputs

    def wait(self, timeout: Any = None) -> bool:
        self._team.wait(self._rank, self._event)
        return True

    def is_completed(self) -> bool:
        if not self._event.happened:
            self._team.give_way(self._rank)  # who asks again and again must not keep the turn
        return self._event.happened

    def is_success(self) -> bool:
        return self._event.happened

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        # C++ would wait for the future with the turn in hand, so it is handed out completed
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class ThreadGroup(dist.ProcessGroup):
    """A group as one rank of it sees it."""

    def __init__(self, world: World, rank: int, name: str, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._world, self._global_rank, self._name = world, rank, name
        self._members = tuple(ranks)
        self._place = world.place(name, self._members)

    def _issue(self, call: Call, outputs: list[Tensor]) -> _Work:
        self._world.team.check(self._global_rank)
        _check_devices(call.name, outputs)
        call.check(len(self._members))
        meeting = self._place.arrive(self.rank(), call)
        if meeting.is_complete:
            self._hold(meeting)
        return _Work(self._world.team, self._global_rank, meeting, outputs)

    def _hold(self, meeting: Meeting) -> None:
        with self._failing_all(), torch.no_grad(), unseen_by_modes():
            meeting.hold()
        self._world.team.announce(meeting)

    @contextmanager
    def _failing_all(self) -> Iterator[None]:
        """An error is the team's, even if the rank's own code catches it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, CollectiveMismatch):
                error.add_note(stacks(self._world.team))
            self._world.team.fail(self._global_rank, error)
            raise

    # --- collectives, as torch.distributed and functional collectives call them ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._issue(AllReduce(tensors=tensors, reduction=_reduction(opts)), tensors)

    allreduce_coalesced = allreduce

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._issue(ReduceScatter(outputs=outputs, inputs=inputs, reduction=_reduction(opts)), outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        whole = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, whole, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._issue(AllGather(outputs=outputs, inputs=inputs), outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._issue(AllGatherList(outputs=outputs[0], given=inputs[0]), outputs[0])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._issue(Broadcast(tensors=tensors, root=opts.rootRank), tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        received = outputs[0] if outputs else []
        return self._issue(Gather(outputs=received, given=inputs[0], root=opts.rootRank), received)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        sent = inputs[0] if inputs else []
        return self._issue(Scatter(output=outputs[0], inputs=sent, root=opts.rootRank), outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> _Work:
        sends, receives = self._splits(given, input_splits), self._splits(output, output_splits)
        return self._issue(AllToAll(output=output, given=given, sends=sends, receives=receives), [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._issue(AllToAllList(outputs=outputs, inputs=inputs), outputs)

    def barrier(self, opts: Any = None) -> _Work:
        return self._issue(Barrier(), [])

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> _Work:
        team = self._world.team
        team.check(self._global_rank)
        _check_devices("send", tensors)
        route = Route(self._global_rank, self._members[destination], tag)
        with self._failing_all(), torch.no_grad():
            received = self._place.post.send(route, tensors[0])
        if received is not None:
            team.announce(received)
        return _Work(team, self._global_rank, _done(), tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        team = self._world.team
        team.check(self._global_rank)
        route = Route(self._members[source], self._global_rank, tag)
        with self._failing_all(), torch.no_grad():
            message, has_come = self._place.post.receive(route, tensors[0])
        message.happened = has_come
        return _Work(team, self._global_rank, message, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> NoReturn:
        raise NoModel("the order of additions in reduce has no model in a simulated world: use all_reduce")

    def _splits(self, tensor: Tensor, splits: list[int]) -> list[int]:
        members = len(self._members)
        return list(splits) or [tensor.shape[0] // members] * members

    # --- what torch asks a group for ---

    def new_group(
        self,
        ranks: list[int],
        timeout: Any = None,
        backend: Any = None,  # torch 2.14 passes it, too
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str = "",
    ) -> ThreadGroup | None:
        """The subgroup of these global ranks; None for a rank that is not in it."""
        return ThreadGroup(self._world, self._global_rank, group_name, ranks) if self._global_rank in ranks else None

    def _get_backend(self, device: torch.device) -> ThreadGroup:
        """What moves tensors of a device: the group itself, which coalesces nothing. Asked since torch 2.14."""
        return self

    def size(self) -> int:
        return len(self._members)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "ranks on threads"

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        """Nothing is held that could be shut down."""

    def __repr__(self) -> str:
        return f"ThreadGroup(rank {self._global_rank} of {list(self._members)})"


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    elsewhere = {tensor.device.type for tensor in tensors} - {"cpu"}
    if elsewhere:
        raise NoModel(f"{name} of tensors on {', '.join(sorted(elsewhere))}: a simulated world computes on the CPU")


def _done() -> Event:
    event = Event()
    event.happened = True
    return event


def _reduction(opts: Any) -> Reduction:
    return Reduction("sum") if opts is None else Reduction(*reduction_of(opts.reduceOp))


def _unmodelled(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ThreadGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoModel(f"{name.lstrip('_')} has no model in a simulated world; its groups do the usual collectives")

    return refuse


for _name in _UNMODELLED:
    setattr(ThreadGroup, _name, _unmodelled(_name))
