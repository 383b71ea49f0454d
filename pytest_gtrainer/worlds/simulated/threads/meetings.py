"""Where ranks come together: meetings for a collective, a post office for send and recv.

The n-th call that a rank makes on a group belongs to the n-th *meeting* of that group. The last member to
arrive finds the calls of all, checks that they agree (S5), and carries the collective out for all of them
at once. A sender never waits: its tensor is copied. Messages with the same tag arrive in the order in which
they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pytest_gtrainer.worlds.simulated import CollectiveMismatch
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution, texts
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.team import Awaited, ranks_text


@dataclass(frozen=True, slots=True)
class Issued:
    """One rank's call of a collective, and where its results go.

    ``text`` begins with the collective's name and holds everything in which the members must agree.
    """

    text: str
    collective: Collective
    given: Contribution
    outputs: Sequence[Tensor]


class Meeting(Awaited):
    """One collective of a group, from its first call to its end."""

    __slots__ = ("calls", "number", "place")

    def __init__(self, place: MeetingPlace, number: int) -> None:
        super().__init__()
        self.place, self.number = place, number
        self.calls: dict[int, Issued] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.calls) == len(self.place.ranks)

    @property
    def missing(self) -> list[int]:
        """The global ranks that have not arrived yet."""
        return [rank for index, rank in enumerate(self.place.ranks) if index not in self.calls]

    def __str__(self) -> str:
        call = next(iter(self.calls.values()))
        missing = [rank for index, rank in enumerate(self.place.ranks) if index not in self.calls]
        return f"waiting in {call.text} ({self.where}) for {ranks_text(missing)}"

    @property
    def where(self) -> str:
        return f"collective {self.number} of {self.place.text}"

    def hold(self) -> None:
        """Carry the collective out; every member's call is here.

        Raises:
            CollectiveMismatch: the calls do not agree.
        """
        calls = [self.calls[index] for index in range(len(self.place.ranks))]
        by_text: dict[str, list[int]] = {}
        for rank, call in zip(self.place.ranks, calls, strict=True):
            by_text.setdefault(call.text, []).append(rank)
        if len(by_text) > 1:
            said = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items())
            raise CollectiveMismatch(f"the ranks disagree in {self.where}; {said}")
        for call in calls:
            exact = call.given.sends  # else shapes do not matter, sizes do
            call.given.inputs = [t.detach() if exact else t.detach().reshape(-1) for t in call.given.inputs]
        try:
            results = calls[0].collective(self.place.net, [call.given for call in calls])
        except CollectiveMismatch as error:
            name = calls[0].text.partition(" ")[0]
            raise CollectiveMismatch(f"the ranks disagree in {self.where}, {name}: {error}") from None
        for call, values in zip(calls, results, strict=True):
            for output, value in zip(call.outputs, values, strict=True):
                fill(output, value)
        self.calls.clear()  # a work may outlive the tensors


def fill(output: Tensor, values: Tensor) -> None:
    """Write ``values``, of as many elements and the same dtype, to ``output``."""
    if texts([output]) != texts([values]):
        raise ValueError(f"a collective gives {texts([values])}, but its output is {texts([output])}: make them equal")
    # .data: autograd does not see that a collective writes, as it does not with other backends
    output.data.copy_(values.detach().reshape(output.shape))


class MeetingPlace:
    """Where the members of one group meet, in every collective again; ``text`` tells it from other groups."""

    def __init__(self, ranks: tuple[int, ...], net: Net, text: str) -> None:
        self.ranks, self.net, self.text = ranks, net, text
        self.post = PostOffice()
        self._counts = [0] * len(ranks)
        self._open: dict[int, Meeting] = {}

    def arrive(self, index: int, call: Issued) -> Meeting:
        """The member with this rank in the group comes to its next collective."""
        number = self._counts[index]
        self._counts[index] += 1
        meeting = self._open.get(number)
        if meeting is None:
            meeting = self._open[number] = Meeting(self, number)
        meeting.calls[index] = call
        if meeting.is_complete:
            del self._open[number]
        return meeting


@dataclass(frozen=True, slots=True)
class Route:
    """From which rank to which, of the world, under which tag."""

    source: int
    destination: int
    tag: int


class Message(Awaited):
    """What one rank sends, or waits for; it happens when it is received."""

    __slots__ = ("route", "tensor")

    def __init__(self, route: Route, tensor: Tensor) -> None:
        super().__init__()
        self.route, self.tensor = route, tensor

    def __str__(self) -> str:
        return f"waiting in recv of {texts([self.tensor])} from rank {self.route.source}"


@dataclass(slots=True)
class PostOffice:
    """Messages of one group on their way: sent and not received, or waited for and not sent."""

    _sent: dict[Route, deque[Tensor]] = field(default_factory=dict)
    _wanted: dict[Route, deque[Message]] = field(default_factory=dict)

    def send(self, route: Route, tensor: Tensor) -> Message | None:
        """The receiver's message, now filled, if it waits already."""
        if waiting := self._wanted.get(route):
            return _delivered(tensor, waiting.popleft())
        self._sent.setdefault(route, deque()).append(tensor.detach().clone())
        return None

    def receive(self, route: Route, tensor: Tensor) -> tuple[Message, bool]:
        """The message that will fill ``tensor``, and whether it has."""
        wanted = Message(route, tensor)
        if sent := self._sent.get(route):
            return _delivered(sent.popleft(), wanted), True
        self._wanted.setdefault(route, deque()).append(wanted)
        return wanted, False


def _delivered(sent: Tensor, wanted: Message) -> Message:
    if texts([sent]) != texts([wanted.tensor]):
        raise CollectiveMismatch(
            f"rank {wanted.route.source} sends {texts([sent])} to rank {wanted.route.destination}, "
            f"which receives {texts([wanted.tensor])}"
        )
    fill(wanted.tensor, sent)
    return wanted
