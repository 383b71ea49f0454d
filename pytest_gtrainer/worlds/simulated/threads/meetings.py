"""Meetings: where the calls of one collective come together.

The n-th call that a rank makes on a group belongs to the n-th *meeting* of that group. The last member to
arrive finds the calls of all, checks that they agree (S5), and carries the collective out for all of them
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_gtrainer.worlds.simulated import CollectiveMismatch
from pytest_gtrainer.worlds.simulated.threads.faults import ranks_text
from pytest_gtrainer.worlds.simulated.threads.messages import PostOffice
from pytest_gtrainer.worlds.simulated.threads.operations import Call
from pytest_gtrainer.worlds.simulated.threads.team import Event

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.net import Net


class Meeting(Event):
    """One collective of a group, from its first call to its end."""

    __slots__ = ("calls", "number", "place")

    def __init__(self, place: Place, number: int) -> None:
        super().__init__()
        self.place, self.number = place, number
        self.calls: dict[int, Call] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.calls) == len(self.place.ranks)

    @property
    def missing(self) -> list[int]:
        """The global ranks that have not arrived yet."""
        return [rank for index, rank in enumerate(self.place.ranks) if index not in self.calls]

    def __str__(self) -> str:
        call = next(iter(self.calls.values()))
        return f"waiting in {call.text()} ({self.where}) for {ranks_text(self.missing)}"

    @property
    def where(self) -> str:
        return f"collective {self.number} of {self.place.text}"

    def hold(self) -> None:
        """Carry the collective out; every member's call is here.

        Raises:
            CollectiveMismatch: the calls do not agree.
        """
        calls = [self.calls[index] for index in range(len(self.place.ranks))]
        self._check_same([call.text() for call in calls])
        misfit = calls[0].misfit(calls, self.place.ranks)
        if misfit:
            raise CollectiveMismatch(f"the ranks disagree in {self.where}, {calls[0].name}: {misfit}")
        calls[0].run(calls, self.place.net)
        self.calls.clear()  # a work may outlive the tensors

    def _check_same(self, texts: Sequence[str]) -> None:
        if len(set(texts)) == 1:
            return
        ranks = self.place.ranks
        said = [f"{ranks_text([r for r, t in zip(ranks, texts, strict=True) if t == text])}: {text}"
                for text in dict.fromkeys(texts)]  # fmt: skip
        raise CollectiveMismatch(f"the ranks disagree in {self.where}; {'; '.join(said)}")


class Place:
    """Where the members of one group meet, in every collective again; ``text`` tells it from other groups."""

    def __init__(self, ranks: tuple[int, ...], net: Net, text: str) -> None:
        self.ranks, self.net, self.text = ranks, net, text
        self.post = PostOffice()
        self._counts = [0] * len(ranks)
        self._open: dict[int, Meeting] = {}

    def arrive(self, index: int, call: Call) -> Meeting:
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
