"""The process group of a rank on a thread, and the meetings where its collectives are carried out.

The n-th call that a rank makes on a group belongs to the n-th *meeting* of that group. The last member to
arrive checks that the calls of all agree (S5), and carries the collective out for all of them at once. A collective
returns a work at once; waiting for the work gives the turn to other ranks until the last member has arrived.

A sender never waits: its tensor is copied. Messages with the same tag arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gtrainer._torch.threads import (
    BACKEND,
    Work,
    active_fake_mode,
    reduction_of,
    unseen_by_modes,
)
from pytest_gtrainer.facts import counted
from pytest_gtrainer.worlds import ranks_by, ranks_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel, collectives
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution, dtype_text, texts
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.team import Awaited, ThreadTeam

_UNMODELLED = (
    "_start_coalescing",
    "allgather_coalesced",
    "merge_remote_group",
    "monitored_barrier",
    "recv_anysource",
    "split_group",
)


@dataclass(frozen=True, slots=True)
class Issued:
    """One rank's call; ``text`` begins with the collective's name and holds all in which the members must agree."""

    text: str
    collective: Collective
    given: Contribution
    outputs: Sequence[Tensor]


class Meeting(Awaited):
    """One collective of a group, from its first call to its end."""

    def __init__(self, place: MeetingPlace, number: int) -> None:
        super().__init__()
        self.place, self.where = place, f"collective {number} of {place.text}"
        self.calls: dict[int, Issued] = {}  # by rank in the world

    @property
    def is_complete(self) -> bool:
        return len(self.calls) == len(self.place.ranks)

    def __str__(self) -> str:
        call = next(iter(self.calls.values()))
        missing = [rank for rank in self.place.ranks if rank not in self.calls]
        return f"waiting in {call.text} ({self.where}) for {ranks_text(missing)}"

    def hold(self) -> None:
        """Carry the collective out, of which every member's call is here; CollectiveMismatch if they do not agree."""
        said = ranks_by((rank, self.calls[rank].text) for rank in sorted(self.calls))
        if len(said) > 1:
            whose = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in said.items())
            raise CollectiveMismatch(f"the ranks disagree in {self.where}; {whose}")
        calls = [self.calls[rank] for rank in self.place.ranks]
        for call in calls:
            exact = call.given.sends  # else shapes do not matter, sizes do
            call.given.inputs = [
                t.detach() if exact else t.detach().reshape(-1) for t in call.given.inputs
            ]
        try:
            results = calls[0].collective(self.place.net, [call.given for call in calls])
        except CollectiveMismatch as error:
            name = calls[0].text.partition(" ")[0]
            raise CollectiveMismatch(
                f"the ranks disagree in {self.where}, {name}: {error}"
            ) from None
        for call, values in zip(calls, results, strict=True):
            for output, value in zip(call.outputs, values, strict=True):
                _fill(output, value)
        self.calls.clear()  # a work may outlive the tensors


def _fill(output: Tensor, values: Tensor) -> None:
    """Write ``values``, of as many elements and the same dtype, to ``output``."""
    if texts([output]) != texts([values]):
        raise ValueError(
            f"a collective gives {texts([values])}, but its output is {texts([output])}: make them equal"
        )
    # .data: autograd does not see that a collective writes, as it does not with other backends
    output.data.copy_(values.detach().reshape(output.shape))


Route = tuple[int, int, int]  # from which rank to which, of the world, under which tag


class Message(Awaited):
    """A tensor that a rank waits for; it happens when it is received."""

    def __init__(self, route: Route, tensor: Tensor) -> None:
        super().__init__()
        self.route, self.tensor = route, tensor

    def __str__(self) -> str:
        return f"waiting in recv of {texts([self.tensor])} from rank {self.route[0]}"

    def receive(self, sent: Tensor) -> None:
        source, destination, _ = self.route
        if texts([sent]) != texts([self.tensor]):
            raise CollectiveMismatch(
                f"rank {source} sends {texts([sent])} to rank {destination}, which receives {texts([self.tensor])}"
            )
        _fill(self.tensor, sent)


class MeetingPlace:
    """Where the members of one group meet, and where messages wait; ``text`` tells it from other groups."""

    def __init__(self, ranks: tuple[int, ...], net: Net, text: str) -> None:
        self.ranks, self.net, self.text = ranks, net, text
        self.sent: defaultdict[Route, deque[Tensor]] = defaultdict(deque)
        self.wanted: defaultdict[Route, deque[Message]] = defaultdict(deque)
        self.arrivals = dict.fromkeys(ranks, 0)
        self._open: dict[int, Meeting] = {}

    def arrive(self, rank: int, call: Issued) -> Meeting:
        number = self.arrivals[rank]
        self.arrivals[rank] += 1
        meeting = self._open.setdefault(number, Meeting(self, number))
        meeting.calls[rank] = call
        if meeting.is_complete:
            del self._open[number]
        return meeting


class SharedGroups:
    """What the groups of all ranks share: the team, the net, and a place for every group."""

    def __init__(self, team: ThreadTeam, net: Net) -> None:
        self.team, self._net = team, net
        self._places: dict[tuple[str, tuple[int, ...]], MeetingPlace] = {}

    def place(self, name: str, ranks: tuple[int, ...]) -> MeetingPlace:
        """Where the group of this name and these global ranks meets."""
        key = name, ranks
        if key not in self._places:
            same = sum(members == ranks for _, members in self._places)
            text = f"the group of {ranks_text(ranks)}" + (
                f" (group {same + 1} of these)" if same else ""
            )
            whole = ranks == tuple(range(self.team.size))
            self._places[key] = MeetingPlace(
                ranks, self._net if whole else self._net.for_group(ranks), text
            )
        return self._places[key]


class _Work(Work):
    """A collective or a message under way, as one rank sees it."""

    def __init__(self, team: ThreadTeam, rank: int, event: Awaited, outputs: list[Tensor]) -> None:
        super().__init__()
        self._team, self._rank, self._event, self._outputs = team, rank, event, outputs

    def wait(self, timeout: Any = None) -> bool:
        self._team.wait(self._rank, self._event)
        return True

    def is_completed(self) -> bool:
        if not self._event.happened:
            self._team.give_way(
                self._rank
            )  # a rank that asks again and again must not keep the turn
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

    def __init__(self, shared: SharedGroups, rank: int, name: str, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._shared, self._team, self._global_rank, self._name = shared, shared.team, rank, name
        self._members = tuple(ranks)
        self._place = shared.place(name, self._members)

    @property
    def issued(self) -> int:
        """Collectives that this rank has come to in the group; messages are none."""
        return self._place.arrivals[self._global_rank]

    def _issue(
        self,
        collective: Collective,
        text: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        **details: Any,
    ) -> _Work:
        """Come to a collective; ``text`` as in ``Issued``, ``details`` as in ``Contribution``."""
        self._check(text, outputs)
        given = Contribution(rank=self._global_rank, inputs=list(inputs), **details)
        meeting = self._place.arrive(self._global_rank, Issued(text, collective, given, outputs))
        if meeting.is_complete:
            with self._failing_all(), unseen_by_modes():
                meeting.hold()
            self._team.announce(meeting)
        return _Work(self._team, self._global_rank, meeting, outputs)

    def _check(self, text: str, tensors: list[Tensor]) -> None:
        """What has to hold for every call, whose name ``text`` begins with."""
        self._team.check(self._global_rank)
        name = text.partition(" ")[0]
        # others would meet tensors without data, and run with torch's switches moved
        if active_fake_mode() is not None:
            raise NoModel(
                f"{name} while fake tensors stand for real ones: call it where the ranks have data"
            )
        if elsewhere := {tensor.device.type for tensor in tensors} - {"cpu"}:
            raise NoModel(
                f"{name} of tensors on {', '.join(sorted(elsewhere))}: a simulated world computes on the CPU"
            )

    @contextmanager
    def _failing_all(self) -> Iterator[None]:
        """Inside, without autograd, an error is the team's, even if the rank's own code catches it."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            if isinstance(error, CollectiveMismatch):
                error.add_note(self._team.stacks())
            self._team.fail(self._global_rank, error)
            raise

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        how, details = _reduction(opts)
        text = f"all_reduce ({how}) of {texts(tensors)}"
        return self._issue(collectives.all_reduce, text, tensors, tensors, **details)

    allreduce_coalesced = allreduce

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        how, details = _reduction(opts)
        self._check_parts("reduce_scatter", inputs, outputs)
        text = f"reduce_scatter ({how}) of {texts(inputs)}"
        return self._issue(collectives.reduce_scatter, text, inputs, outputs, **details)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> _Work:
        whole = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, whole, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        self._check_parts("all_gather", outputs, inputs)
        return self._issue(
            collectives.all_gather, f"all_gather of {texts(inputs)}", inputs, outputs
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        given = [inputs[0]] * len(self._members)
        return self._exchange(
            f"all_gather into a list of {dtype_text(inputs[0])}", outputs[0], given
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._exchange(f"all_to_all of a list of {dtype_text(inputs[0])}", outputs, inputs)

    def _exchange(self, text: str, outputs: list[Tensor], inputs: list[Tensor]) -> _Work:
        """A tensor to every member, and one from each."""
        for tensors in (outputs, inputs):
            self._check_count(text, tensors)
        sends, receives = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self._issue(
            collectives.exchange_lists, text, inputs, outputs, sends=sends, receives=receives
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        root = opts.rootRank
        text = f"broadcast from member {root} of {texts(tensors)}"
        return self._issue(collectives.broadcast, text, tensors, tensors, root=root)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        root, received = opts.rootRank, outputs[0] if outputs else []
        self._check_count("gather", received, only=root)
        text = f"gather to member {root} of {texts(inputs[:1])}"
        return self._issue(collectives.gather, text, inputs[:1], received, root=root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        root, sent = opts.rootRank, inputs[0] if inputs else []
        self._check_count("scatter", sent, only=root)
        text = f"scatter from member {root} of {texts(outputs[:1])}"
        return self._issue(collectives.scatter, text, sent, outputs[:1], root=root)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> _Work:
        members, splits = len(self._members), []
        for what, tensor, asked in (
            ("input", given, input_splits),
            ("output", output, output_splits),
        ):
            rows = tensor.shape[0] if tensor.dim() else 0
            own = list(asked) or [rows // members] * members
            if len(own) != members or sum(own) != rows:
                raise ValueError(
                    f"all_to_all: the {what} has {rows} rows, but its splits {own} have {len(own)} entries "
                    f"for {members} ranks that sum to {sum(own)}"
                )
            splits.append(own)
        text = f"all_to_all of rows of {dtype_text(given)}[{prod(given.shape[1:])}]"
        return self._issue(
            collectives.all_to_all, text, [given], [output], sends=splits[0], receives=splits[1]
        )

    def barrier(self, opts: Any = None) -> _Work:
        return self._issue(collectives.barrier, "barrier", [], [])

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> _Work:
        self._check("send", tensors)
        route = self._global_rank, self._members[destination], tag
        if waiting := self._place.wanted[route]:
            message = waiting.popleft()
            with self._failing_all():
                message.receive(tensors[0])
            self._team.announce(message)
        else:
            self._place.sent[route].append(tensors[0].detach().clone())
        done = Awaited()
        done.happened = True
        return _Work(self._team, self._global_rank, done, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        self._check("recv", tensors)
        route = self._members[source], self._global_rank, tag
        message = Message(route, tensors[0])
        if sent := self._place.sent[route]:
            with self._failing_all():
                message.receive(sent.popleft())
            message.happened = True
        else:
            self._place.wanted[route].append(message)
        return _Work(self._team, self._global_rank, message, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> NoReturn:
        raise NoModel(
            "the order of additions in reduce has no model in a simulated world: use all_reduce"
        )

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoModel(
            f"{name} has no model in a simulated world; its groups do the usual collectives"
        )

    def _check_parts(self, name: str, wholes: list[Tensor], parts: list[Tensor]) -> None:
        """The tensors that are gathered, or to be scattered, hold a part for each member."""
        members, names = (
            len(self._members),
            ("output", "input") if name == "all_gather" else ("input", "output"),
        )
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != part.numel() * members or whole.dtype != part.dtype:
                told = f"the {names[0]} {texts([whole])} must be {members} times the {names[1]} {texts([part])}"
                raise ValueError(f"{name}: {told}")

    def _check_count(self, text: str, tensors: Sequence[Tensor], only: int | None = None) -> None:
        if only in (None, self.rank()) and len(tensors) != len(self._members):
            name = text.partition(" ")[0]
            raise ValueError(
                f"{name}: a list of {counted(len(tensors), 'tensor')} for {len(self._members)} ranks"
            )

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
        return (
            ThreadGroup(self._shared, self._global_rank, group_name, ranks)
            if self._global_rank in ranks
            else None
        )

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


def _reduction(opts: Any) -> tuple[str, dict[str, Any]]:
    """A reduce op in words, and as a ``Contribution`` has it."""
    op, factor = ("sum", None) if opts is None else reduction_of(opts.reduceOp)
    return op if factor is None else f"{op} {factor:g}", {"op": op, "factor": factor}


for _name in _UNMODELLED:
    setattr(ThreadGroup, _name, partialmethod(ThreadGroup._refuse, _name.lstrip("_")))
