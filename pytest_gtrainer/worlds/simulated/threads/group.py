"""The process group of a rank on a thread, and the meetings in which its collectives happen.

The n-th call that a rank makes on a group belongs to the n-th *meeting* of that group. The last
member to arrive checks that all calls agree, and carries the collective out for all members at
once. A collective returns a work immediately; waiting for the work gives the turn to other ranks
until the last member has arrived.

A sender never waits: its tensor is copied. Messages with the same tag arrive in the order in which
they were sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partialmethod
from math import prod
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gtrainer._torch.threads import (
    BACKEND,
    Work,
    active_fake_mode,
    note_group_of_others,
    reduction_of,
    unseen_by_modes,
)
from pytest_gtrainer.facts import counted, notify
from pytest_gtrainer.worlds import ranks_by, ranks_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel, collectives
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution, dtype_text, texts
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.team import Awaited, ThreadTeam

# A function that makes a context, such as a dispatch mode, for what runs inside.
MakeContext: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Issued:
    """One rank's call of a collective.

    ``text`` begins with the collective's name, and has all in which the members must agree.
    """

    text: str
    collective: Collective
    given: Contribution
    outputs: Sequence[Tensor]


class Meeting(Awaited):
    """One collective of a group, from its first call to its end."""

    def __init__(self, meeting_place: MeetingPlace, number: int) -> None:
        super().__init__()
        self.meeting_place = meeting_place
        self.where = f"collective {number} of {meeting_place.text}"
        self.calls: dict[int, Issued] = {}  # by rank in the world

    @property
    def is_complete(self) -> bool:
        return len(self.calls) == len(self.meeting_place.ranks)

    @property
    def text(self) -> str:
        """The collective, as the first rank called it."""
        return f"{next(iter(self.calls.values())).text} ({self.where})"

    @property
    def missing(self) -> str:
        return ranks_text(rank for rank in self.meeting_place.ranks if rank not in self.calls)

    def __str__(self) -> str:
        return f"waiting in {self.text} for {self.missing}"

    def carry_out(self) -> None:
        """Carry the collective out, once every member has called it.

        Raises:
            CollectiveMismatch: the calls do not agree.
        """
        issued = ranks_by((rank, self.calls[rank].text) for rank in sorted(self.calls))
        if len(issued) > 1:
            whose = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in issued.items())
            raise CollectiveMismatch(f"the ranks disagree in {self.where}; {whose}")

        calls = [self.calls[rank] for rank in self.meeting_place.ranks]
        for call in calls:
            tensors = list(map(Tensor.detach, call.given.inputs))
            # Where nothing is exchanged shapes do not matter, sizes do.
            if not call.given.sends:
                tensors = [tensor.reshape(-1) for tensor in tensors]
            call.given.inputs = tensors

        try:
            results = calls[0].collective(self.meeting_place.net, [call.given for call in calls])
        except CollectiveMismatch as error:
            name = calls[0].text.partition(" ")[0]
            message = f"the ranks disagree in {self.where}, {name}: {error}"
            raise CollectiveMismatch(message) from None

        for call, values in zip(calls, results, strict=True):
            for output, value in zip(call.outputs, values, strict=True):
                _fill(output, value, self.meeting_place.ranks)

        self.calls.clear()  # a work may outlive the tensors


def _fill(output: Tensor, values: Tensor, ranks: tuple[int, ...]) -> None:
    """Write ``values`` to ``output``, which must have as many elements and the same dtype.

    Args:
        ranks: those that exchange something.
    """
    if texts([output]) != texts([values]):
        raise ValueError(
            f"a collective gives {texts([values])}, but its output is {texts([output])}: "
            "make them equal"
        )
    # .data: autograd does not see that a collective writes, as it does not with other backends.
    output.data.copy_(values.detach().reshape(output.shape))
    notify("exchanged", output=output.data, ranks=ranks)


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
                f"rank {source} sends {texts([sent])} to rank {destination}, "
                f"which receives {texts([self.tensor])}"
            )
        _fill(self.tensor, sent, (source, destination))


class MeetingPlace:
    """The state that the members of one group share: open meetings and messages on their way.

    ``text`` names the group in messages.
    """

    def __init__(self, ranks: tuple[int, ...], net: Net, text: str) -> None:
        self.ranks, self.net, self.text = ranks, net, text
        self.sent: defaultdict[Route, deque[Tensor]] = defaultdict(deque)
        self.wanted: defaultdict[Route, deque[Message]] = defaultdict(deque)
        self.arrivals = dict.fromkeys(ranks, 0)
        self.open: dict[int, Meeting] = {}  # by their numbers
        # The ranks that gave or wanted a tensor; a barrier exchanges none.
        self.exchanging: set[int] = set()
        self.left: set[int] = set()  # the ranks that have destroyed their group

    def arrive(self, rank: int, call: Issued) -> Meeting:
        """Add the call of a rank to its next meeting."""
        number = self.arrivals[rank]
        self.arrivals[rank] += 1
        if call.outputs or call.given.inputs:
            self.exchanging.add(rank)
        meeting = self.open.setdefault(number, Meeting(self, number))
        meeting.calls[rank] = call
        if meeting.is_complete:
            del self.open[number]
        return meeting


class SharedGroups:
    """The state that the groups of all ranks share: team, net, and a meeting place for each group.

    Attributes:
        under: makes a context for what a collective or a message computes.
    """

    def __init__(self, team: ThreadTeam, net: Net, under: MakeContext) -> None:
        self.team, self._net, self.under = team, net, under
        self._meeting_places: dict[tuple[str, tuple[int, ...]], MeetingPlace] = {}
        self._made = dict.fromkeys(range(team.size), 0)

    def note_group(self, rank: int, name: str) -> None:
        """Note that a rank makes a group, which it may not be in."""
        # A group that its members alone make has a digest in its name, others have a number.
        if name.isdigit():
            self._made[rank] += 1

    def meeting_place(self, name: str, ranks: tuple[int, ...]) -> MeetingPlace:
        """Return the meeting place of the group of this name and these global ranks."""
        if (name, ranks) not in self._meeting_places:
            text = f"the group of {ranks_text(ranks)}"
            if same := sum(members == ranks for _, members in self._meeting_places):
                text += f" (group {same + 1} of these)"
            is_world = ranks == tuple(range(self.team.size))
            net = self._net if is_world else self._net.for_group(ranks)
            self._meeting_places[name, ranks] = MeetingPlace(ranks, net, text)
        return self._meeting_places[name, ranks]

    def issued_by(self, rank: int) -> int:
        """Return how many collectives a rank has issued, in destroyed groups, too."""
        return sum(
            meeting_place.arrivals.get(rank, 0) for meeting_place in self._meeting_places.values()
        )

    def partners_of(self, rank: int) -> set[int]:
        """Return the ranks with which a rank has exchanged tensors, in destroyed groups, too."""
        found: set[int] = set()
        for meeting_place in self._meeting_places.values():
            if rank in meeting_place.exchanging:
                found.update(meeting_place.ranks)
            for source, destination, _ in (*meeting_place.sent, *meeting_place.wanted):
                if rank in (source, destination):
                    found |= {source, destination}
        return found - {rank}

    def unmatched(self) -> str:
        """Return what a rank began and no other rank took part in, at the end of a run; or ""."""
        made = ranks_by((rank, str(count)) for rank, count in self._made.items())
        if len(made) > 1:
            counts = "; ".join(f"{ranks_text(ranks)}: {count}" for count, ranks in made.items())
            return (
                "every rank has to call new_group, or to make a mesh, for groups that it is not "
                f"in, too, and real ranks wait for it; groups made by {counts}"
            )
        for meeting_place in self._meeting_places.values():
            staying = set(meeting_place.ranks) - meeting_place.left
            if meeting_place.left and staying:
                return (
                    f"{ranks_text(meeting_place.left)} destroyed {meeting_place.text}, and "
                    f"{ranks_text(staying)} did not: NCCL may wait until every member has"
                )
            for meeting in meeting_place.open.values():
                called = f"{ranks_text(meeting.calls)} called {meeting.text}"
                return f"{called}, and ended before {meeting.missing} did"
            for (source, destination, _), tensors in meeting_place.sent.items():
                if tensors:
                    what = f"rank {source} sent {texts([tensors[0]])} to rank {destination}"
                    return f"{what}, which never received it"
            for (source, destination, _), messages in meeting_place.wanted.items():
                if messages:
                    what = f"rank {destination} began to receive {texts([messages[0].tensor])}"
                    return f"{what} from rank {source}, which never sent it"

        return ""


class _Work(Work):
    """A collective or a message under way, as one rank sees it."""

    def __init__(
        self,
        team: ThreadTeam,
        rank: int,
        event: Awaited,
        outputs: list[Tensor],
        text: str,
    ) -> None:
        super().__init__()
        self._team, self._rank, self._event, self._outputs = team, rank, event, outputs
        self._text = text

    def wait(self, timeout: Any = None) -> bool:
        self._team.wait(self._rank, self._event)
        notify("received", what=self._text, outputs=self._outputs)
        return True

    def is_completed(self) -> bool:
        # A rank that asks again and again must not keep the turn.
        if not self._event.happened:
            self._team.give_way(self._rank)
        return self._event.happened

    def is_success(self) -> bool:
        return self._event.happened

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        # C++ would wait for the future while this rank has the turn, so the future is completed.
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class ThreadGroup(dist.ProcessGroup):
    """A group as one rank of it sees it."""

    def __init__(self, shared: SharedGroups, rank: int, name: str, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._shared, self._team = shared, shared.team
        self._global_rank, self._name, self._members = rank, name, tuple(ranks)
        self._meeting_place = shared.meeting_place(name, self._members)
        # A group that its members alone make may have the name of an earlier one.
        self._meeting_place.left.discard(rank)

    @property
    def issued(self) -> int:
        """Number of collectives that this rank has issued in all groups; messages do not count."""
        return self._shared.issued_by(self._global_rank)

    @property
    def partners(self) -> set[int]:
        """The other ranks with which this one has exchanged tensors, in any group."""
        return self._shared.partners_of(self._global_rank)

    def _issue(
        self,
        collective: Collective,
        text: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        **details: Any,
    ) -> _Work:
        """Arrive at a meeting; ``text`` as in ``Issued``, ``details`` as in ``Contribution``."""
        self._check(text, outputs)
        _refuse_strides(text, [*inputs, *outputs])
        given = Contribution(rank=self._global_rank, inputs=list(inputs), **details)
        meeting = self._meeting_place.arrive(
            self._global_rank, Issued(text, collective, given, outputs)
        )
        if meeting.is_complete:
            with self._failing_all(), unseen_by_modes(), self._shared.under():
                meeting.carry_out()
            self._team.announce(meeting)
        return _Work(self._team, self._global_rank, meeting, outputs, text)

    def _check(self, text: str, tensors: list[Tensor]) -> None:
        """Check what every call needs; ``text`` begins with its name."""
        self._team.check(self._global_rank)
        if tensors:
            notify("communicates", ranks=self._members)
        name = text.partition(" ")[0]
        if self._global_rank in self._meeting_place.left:
            raise ValueError(
                f"{name} in {self._meeting_place.text}, which rank {self._global_rank} has "
                "destroyed"
            )
        # Other ranks would get tensors without data, and run while torch's switches are moved.
        if active_fake_mode() is not None:
            raise NoModel(
                f"{name} while fake tensors stand for real ones: call it where the ranks have data"
            )
        if elsewhere := sorted({tensor.device.type for tensor in tensors} - {"cpu"}):
            raise NoModel(
                f"{name} of tensors on {', '.join(elsewhere)}: "
                "a simulated world computes on the CPU"
            )

    @contextmanager
    def _failing_all(self) -> Iterator[None]:
        """Make an error inside the team's, even if the rank's own code catches it."""
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
        self._check_parts("reduce_scatter", ("input", inputs), ("output", outputs))
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
        self._check_parts("all_gather", ("output", outputs), ("input", inputs))
        text = f"all_gather of {texts(inputs)}"
        return self._issue(collectives.all_gather, text, inputs, outputs)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        # As an exchange of lists: here the members may have tensors of different sizes.
        text = f"all_gather into a list of {dtype_text(inputs[0])}"
        return self._exchange(text, outputs[0], [inputs[0]] * len(self._members))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._exchange(f"all_to_all of a list of {dtype_text(inputs[0])}", outputs, inputs)

    def _exchange(self, text: str, outputs: list[Tensor], inputs: list[Tensor]) -> _Work:
        """Send a tensor to every member, and receive one from each."""
        self._check_count(text, outputs)
        self._check_count(text, inputs)
        sizes = {
            "sends": list(map(Tensor.numel, inputs)),
            "receives": list(map(Tensor.numel, outputs)),
        }
        return self._issue(collectives.exchange_lists, text, inputs, outputs, **sizes)

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
        splits = {
            "sends": self._splits("input", given, input_splits),
            "receives": self._splits("output", output, output_splits),
        }
        text = f"all_to_all of rows of {dtype_text(given)}[{prod(given.shape[1:])}]"
        return self._issue(collectives.all_to_all, text, [given], [output], **splits)

    def _splits(self, what: str, tensor: Tensor, given: list[int]) -> list[int]:
        """Return the rows for each member; by default as many for each."""
        members = len(self._members)
        rows = tensor.shape[0] if tensor.dim() else 0
        splits = list(given) or [rows // members] * members
        if len(splits) != members or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: the {what} has {rows} rows, but its splits {splits} have "
                f"{len(splits)} entries for {members} ranks that sum to {sum(splits)}"
            )
        return splits

    def barrier(self, opts: Any = None) -> _Work:
        return self._issue(collectives.barrier, "barrier", [], [])

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> _Work:
        self._check("send", tensors)
        _refuse_strides("send", tensors)
        route = self._global_rank, self._members[destination], tag
        if waiting := self._meeting_place.wanted[route]:
            message = waiting.popleft()
            with self._failing_all(), unseen_by_modes(), self._shared.under():
                message.receive(tensors[0])
            self._team.announce(message)
        else:
            # A copy: the sender may go on to write to its tensor.
            with unseen_by_modes(), self._shared.under():
                self._meeting_place.sent[route].append(tensors[0].detach().clone())

        done = Awaited()
        done.happened = True
        return _Work(self._team, self._global_rank, done, tensors, "send")

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        self._check("recv", tensors)
        _refuse_strides("recv", tensors)
        route = self._members[source], self._global_rank, tag
        message = Message(route, tensors[0])
        if sent := self._meeting_place.sent[route]:
            with self._failing_all(), unseen_by_modes(), self._shared.under():
                message.receive(sent.popleft())
            message.happened = True
        else:
            self._meeting_place.wanted[route].append(message)
        return _Work(self._team, self._global_rank, message, tensors, "recv")

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> NoReturn:
        raise NoModel(
            "the order of additions in reduce has no model in a simulated world: use all_reduce"
        )

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoModel(
            f"{name} has no model in a simulated world; its groups do the usual collectives"
        )

    def _check_parts(
        self, name: str, wholes: tuple[str, list[Tensor]], parts: tuple[str, list[Tensor]]
    ) -> None:
        """Check that each whole tensor has a part for each member; both come with their names."""
        members = len(self._members)
        for whole, part in zip(wholes[1], parts[1], strict=True):
            if whole.numel() != part.numel() * members or whole.dtype != part.dtype:
                raise ValueError(
                    f"{name}: the {wholes[0]} {texts([whole])} must be {members} times "
                    f"the {parts[0]} {texts([part])}"
                )

    def _check_count(self, text: str, tensors: Sequence[Tensor], only: int | None = None) -> None:
        """Check that a list, ``only`` that of one member, has a tensor for each member."""
        if only in (None, self.rank()) and len(tensors) != len(self._members):
            raise ValueError(
                f"{text.partition(' ')[0]}: a list of {counted(len(tensors), 'tensor')} "
                f"for {len(self._members)} ranks"
            )

    def new_group(
        self,
        ranks: list[int],
        timeout: Any = None,
        backend: Any = None,  # passed since torch 2.14
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str = "",
    ) -> ThreadGroup | None:
        """Return the subgroup of these global ranks; None for a rank that is not in it."""
        self._shared.note_group(self._global_rank, group_name)
        if self._global_rank not in ranks:
            note_group_of_others(ranks)
            return None
        return ThreadGroup(self._shared, self._global_rank, group_name, ranks)

    def _get_backend(self, device: torch.device) -> ThreadGroup:
        """Return the backend of a device: the group itself. Since torch 2.14 this is called."""
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
        """Note that this rank destroys the group: ``destroy_process_group`` calls this."""
        self._meeting_place.left.add(self._global_rank)


def _refuse_strides(text: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not contiguous, which backends treat differently.

    Images may have their channels last. Source: ``check_gpu_single_tensor`` of ProcessGroupNCCL.
    """
    name = text.partition(" ")[0]
    backends = "NCCL refuses it, and gloo may reduce the memory between its elements"
    if name in ("send", "recv"):
        backends = "gloo refuses it, and NCCL moves its elements as they lie in memory"
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for tensor in tensors:
        last = formats.get(tensor.dim(), torch.contiguous_format)
        if not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=last)):
            raise ValueError(
                f"{name} of a tensor of shape {list(tensor.shape)} with strides "
                f"{tensor.stride()}: {backends}: give its contiguous(), and copy the result back"
            )


def _reduction(opts: Any) -> tuple[str, dict[str, Any]]:
    """Return a reduce op in words, and as fields of a ``Contribution``."""
    op, factor = ("sum", None) if opts is None else reduction_of(opts.reduceOp)
    words = op if factor is None else f"{op} {factor:g}"
    return words, {"op": op, "factor": factor}


# Without these methods a call would reach the ones of the base class, in C++.
for _name in (
    "_start_coalescing",
    "allgather_coalesced",
    "merge_remote_group",
    "monitored_barrier",
    "recv_anysource",
    "split_group",
):
    setattr(ThreadGroup, _name, partialmethod(ThreadGroup._refuse, _name.lstrip("_")))
