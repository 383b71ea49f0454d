"""Messages from one rank to another: send and recv.

A sender never waits: its tensor is copied. Messages with the same tag arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from pytest_gtrainer.worlds.simulated import CollectiveMismatch
from pytest_gtrainer.worlds.simulated.threads.operations import fill, texts
from pytest_gtrainer.worlds.simulated.threads.team import Event


@dataclass(frozen=True, slots=True)
class Route:
    """From which rank to which, of the world, under which tag."""

    source: int
    destination: int
    tag: int


class Message(Event):
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

    _sent: dict[Route, deque[Message]] = field(default_factory=dict)
    _wanted: dict[Route, deque[Message]] = field(default_factory=dict)

    def send(self, route: Route, tensor: Tensor) -> Message | None:
        """The receiver's message, now filled, if it waits already."""
        waiting = self._wanted.get(route)
        if waiting:
            return _deliver(tensor, waiting.popleft())
        self._sent.setdefault(route, deque()).append(Message(route, tensor.detach().clone()))
        return None

    def receive(self, route: Route, tensor: Tensor) -> tuple[Message, bool]:
        """The message that will fill ``tensor``, and whether it has."""
        wanted = Message(route, tensor)
        sent = self._sent.get(route)
        if sent:
            return _deliver(sent.popleft().tensor, wanted), True
        self._wanted.setdefault(route, deque()).append(wanted)
        return wanted, False


def _deliver(sent: Tensor, wanted: Message) -> Message:
    if texts([sent]) != texts([wanted.tensor]):
        raise CollectiveMismatch(
            f"rank {wanted.route.source} sends {texts([sent])} to rank {wanted.route.destination}, "
            f"which receives {texts([wanted.tensor])}"
        )
    fill(wanted.tensor, sent)
    return wanted
