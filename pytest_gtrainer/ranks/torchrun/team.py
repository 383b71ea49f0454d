"""Rank 0's handle of the first ranks of the run, as ``ranks.watch`` wants a team to be."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.launcher import RanksError
from pytest_gtrainer.ranks.outcome import Outcome, disagreement
from pytest_gtrainer.ranks.torchrun import messages
from pytest_gtrainer.ranks.torchrun.line import Lines
from pytest_gtrainer.ranks.torchrun.mailbox import Mailbox, Reader
from pytest_gtrainer.ranks.torchrun.member import DRIVER, mailbox_of
from pytest_gtrainer.ranks.torchrun.neighbour import in_words

START_LIMIT = 300.0
SETTLE_LIMIT = 20.0
INTERRUPT_EVERY = 1.0
STACKS_SECONDS = 2.0
STATUS_SECONDS = 0.5


class Office:
    """The driver's end of all mailboxes: sends to ranks, keeps what they say until somebody asks."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self.size = size
        self.gone: dict[int, int | None] = {}
        self._boxes = [Mailbox(store, mailbox_of(rank)) for rank in range(size)]
        self._reader = Reader(store, DRIVER, lambda message: False, self._lost)
        self._heard: list[messages.From] = []
        box = Mailbox(store, DRIVER)
        Lines(store, lambda rank: box.put(messages.From(rank, messages.Gone(rank, None))))

    def _lost(self) -> None:
        """Without the store nobody can be reached."""
        for rank in range(self.size):
            self._reader.messages.put(messages.From(rank, messages.Gone(rank, None)))

    def send(self, message: object, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._boxes[rank].put(message)

    def hear(self, ranks: set[int], seconds: float) -> tuple[int, object] | None:
        """The next message of one of these ranks; ``Gone`` for one that has ended; None if time is over."""
        end = time.monotonic() + seconds
        while True:
            for rank in ranks & self.gone.keys():
                return rank, messages.Gone(rank, self.gone[rank])
            for number, heard in enumerate(self._heard):
                if heard.rank in ranks:
                    del self._heard[number]
                    return heard.rank, heard.message
            if not self._take(max(0.0, end - time.monotonic())):
                return None

    def _take(self, seconds: float) -> bool:
        try:
            heard = self._reader.messages.get(timeout=seconds)
        except queue.Empty:
            return False
        assert isinstance(heard, messages.From)
        if isinstance(heard.message, messages.Gone):
            known = self.gone.get(heard.rank)
            self.gone[heard.rank] = heard.message.status if known is None else known
        else:
            self._heard.append(heard)
        return True

    def status_of(self, rank: int, seconds: float) -> int | None:
        """How a process that is gone has ended; who sees that it has may know before who sees how."""
        end = time.monotonic() + seconds
        while self.gone.get(rank) is None and time.monotonic() < end:
            self._take(0.05)
        return self.gone.get(rank)

    def put_back(self, heard: list[messages.From]) -> None:
        """Keep messages for who asks next."""
        self._heard = heard + self._heard

    def await_all(self, kind: type, ranks: Iterable[int], seconds: float) -> set[int]:
        """Wait until every rank has said a message of that kind, passing over others: those who have not."""
        missing, end = set(ranks), time.monotonic() + seconds
        while missing:
            heard = self.hear(missing, end - time.monotonic())
            if heard is None or isinstance(heard[1], messages.Gone):
                break
            rank, message = heard
            if isinstance(message, messages.Began) and message.error is not None:
                raise RanksError(f"rank {rank} could not start:\n{message.error}")
            if isinstance(message, kind):
                missing.discard(rank)
        return missing

    def close(self) -> None:
        self._reader.close()


class TorchrunTeam:
    """The ranks below ``size``, on a default group of their own.

    Nothing can replace a rank here. So a test that hangs is interrupted, and the ranks go on; if one
    cannot be interrupted, or has died, the run is over, as torchrun will end all ranks in any case.

    Attributes:
        grouped: whether the ranks have a default group.
        stuck: ranks that could not be interrupted.
    """

    def __init__(self, office: Office, size: int) -> None:
        self.size = size
        self.alive, self.busy, self.grouped = True, False, False
        self.ranks = range(size)
        self.stuck: set[int] = set()
        self._office = office
        self._numbers = itertools.count()

    # --- what the watch asks for ------------------------------------------------------------

    def send(self, command: object, ranks: Iterable[int] | None = None) -> None:
        self._office.send(command, self.ranks if ranks is None else ranks)

    def receive(self, ranks: Iterable[int], seconds: float) -> dict[int, object]:
        heard = self._office.hear(set(ranks), max(0.0, seconds))
        if heard is None:
            return {}
        rank, message = heard
        return {rank: None if isinstance(message, messages.Gone) else message}

    def how_it_ended(self, rank: int) -> str:
        """The end of a process in words."""
        return in_words(self._office.status_of(rank, STATUS_SECONDS))

    def last_words(self, rank: int) -> str:
        return ""  # in files that only the process itself could open

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python stacks of ranks, "" for one that does not answer."""
        found, number = dict.fromkeys(ranks, ""), next(self._numbers)
        self.send(messages.TellStacks(number), found)
        end, missing, passed = time.monotonic() + STACKS_SECONDS, set(found), []
        while missing and (heard := self._office.hear(missing, end - time.monotonic())) is not None:
            rank, message = heard
            if isinstance(message, messages.Stacks) and message.number == number:
                found[rank] = message.text
            elif not isinstance(message, messages.Stacks | messages.Gone):
                passed.append(messages.From(rank, message))
                continue
            missing.discard(rank)
        self._office.put_back(passed)
        return found

    def kill(self) -> None:
        """End the test on the ranks that have not answered."""
        missing, end = set(self.ranks), time.monotonic() + SETTLE_LIMIT
        self.send(messages.Interrupt())
        self.send(wire.LeaveGroup())
        self.grouped = False
        while missing and self.alive and time.monotonic() < end:
            missing = self._office.await_all(wire.LeftGroup, missing, INTERRUPT_EVERY)
            self.alive = not missing & self._office.gone.keys()
            self.send(messages.Interrupt(), missing)
        self.alive, self.stuck = self.alive and not missing, missing - self._office.gone.keys()

    def heal(self, outcome: Outcome) -> None:
        """See to it that the group is fit for the next test, or that a new one is made."""
        states = {rank: answer.state for rank, answer in outcome.answers.items()}
        if outcome.dead or self._office.gone.keys() & set(self.ranks):
            self.alive = False
        elif outcome.killed or outcome.unblocked_at is not None or _is_unfit(states):
            self.leave()
        elif any(state.subgroups for state in states.values()):
            self.send(wire.DropSubgroups())
            self._settled(wire.DroppedSubgroups)

    # --- groups -----------------------------------------------------------------------------

    def join(self, place: str) -> None:
        """Make the default group.

        Raises:
            RanksError: not all ranks came.
        """
        self.send(wire.JoinGroup(place, self.size))
        if not self._settled(wire.JoinedGroup, START_LIMIT):
            raise RanksError(f"the {self.size} ranks could not make a process group within {START_LIMIT:g} s")
        self.grouped = True

    def leave(self) -> None:
        """Destroy the groups of all ranks."""
        self.grouped = False
        self.send(wire.LeaveGroup())
        self._settled(wire.LeftGroup)

    def _settled(self, kind: type, limit: float = SETTLE_LIMIT) -> bool:
        if self._office.await_all(kind, self.ranks, limit):
            self.alive = False
        return self.alive


def _is_unfit(states: Mapping[int, wire.GroupState]) -> bool:
    """Whether the default group is no good after a test."""
    return not all(state.intact for state in states.values()) or disagreement(states) is not None
