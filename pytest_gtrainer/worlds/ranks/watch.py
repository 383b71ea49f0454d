"""Runs one command on a team within limits, so that no fault of a rank makes the others wait.

The idea: while nothing is wrong, wait for every rank's answer, up to the limit. When a rank
has raised or died, the others may be blocked in a collective with it. So after a moment the
ranks that are through destroy their groups, which makes the blocked ones raise; whoever is
still stuck a while later gives its stack and the whole team is killed.
"""

from __future__ import annotations

import time

from pytest_gtrainer.worlds.ranks import progress, wire
from pytest_gtrainer.worlds.ranks.outcome import Incident, Outcome, by_value
from pytest_gtrainer.worlds.ranks.progress import Tell
from pytest_gtrainer.worlds.ranks.stacks import readable, waiting_in, whereabouts
from pytest_gtrainer.worlds.ranks.team import Team

# Ranks that fail alike do so within moments of each other: leave them the time.
UNBLOCK_AFTER = 0.25
# A blocked rank raises within milliseconds once its peers are gone.
STUCK_AFTER = 1.0
# A rank that computes, or formats a traceback through torch, may take longer.
BUSY_LIMIT = 8.0
# A rank that skipped: see every so often whether the others wait for it.
LOOK_EVERY = 1.0


def run_on(
    team: Team,
    command: wire.RunItem | wire.CallFunction,
    limit: float,
    holder: str = "",
    tell: Tell | None = None,
) -> Outcome:
    """Send the command to every rank and gather what they say; returns within the limits.

    ``holder`` is the test, for the lines that ``tell`` gets every so often while it runs.
    """
    watch = _Watch(team, limit, holder, tell)
    team.busy = True
    team.send(command)
    while watch.pending:
        watch.hear(team.receive(watch.pending, watch.patience()))
        watch.act()
    watch.finish()
    team.busy = False
    team.heal(watch.outcome)
    return watch.outcome


class _Watch:
    def __init__(self, team: Team, limit: float, holder: str, tell: Tell | None) -> None:
        self.team, self.limit = team, limit
        self.holder, self.tell = holder, tell
        self.outcome = Outcome(team.size)
        self.pending = set(range(team.size))
        self.started = time.monotonic()
        self.next_line = self.started + (progress.EVERY_SECONDS if tell is not None else float("inf"))
        self.first_trouble: float | None = None
        self.next_look: float | None = None
        self.freed_at: float | None = None  # when a rank last closed its connections to the others
        self.left: set[int] = set()  # told to leave their group, and it is not confirmed

    # --- hearing ------------------------------------------------------------------------

    def hear(self, messages: dict[int, object]) -> None:
        for rank, message in messages.items():
            if message is None:
                self._died(rank)
            elif isinstance(message, wire.Raised):
                self._raised(rank, message)
            elif isinstance(message, wire.ItemDone | wire.CallDone):
                self._done(rank, message)

    def _raised(self, rank: int, message: wire.Raised) -> None:
        self.outcome.raised.setdefault(rank, message)
        if message.is_skip:
            self.next_look = self.next_look or time.monotonic() + LOOK_EVERY
        else:
            self._trouble()

    def _done(self, rank: int, message: wire.ItemDone | wire.CallDone) -> None:
        self.pending.discard(rank)
        self.outcome.answers[rank] = message
        trouble = message.trouble if isinstance(message, wire.ItemDone) else message.error
        if trouble is not None:
            self._trouble()
        if isinstance(message, wire.ItemDone) and trouble is not None:
            self.outcome.incidents.append(Incident(time.monotonic(), rank, f"rank {rank} {trouble}"))
        if self.outcome.unblocked_at is not None and self.pending:
            self._leave(rank)

    def _died(self, rank: int) -> None:
        self.pending.discard(rank)
        self.outcome.dead.add(rank)
        self.freed_at = time.monotonic()
        self._trouble()
        process = self.team.ranks[rank]
        how = self.team.how_it_ended(process)
        words = self.team.last_words(process)
        details = (("last output", words),) if words else ()
        self.outcome.incidents.append(Incident(time.monotonic(), rank, f"rank {rank} {how}", details))

    def _trouble(self) -> None:
        self.first_trouble = self.first_trouble or time.monotonic()

    # --- acting ---------------------------------------------------------------------------

    def patience(self) -> float:
        """Seconds until something is due."""
        due = [self.started + self.limit, self.next_line]
        if self.first_trouble is not None and self.outcome.unblocked_at is None:
            due.append(self.first_trouble + UNBLOCK_AFTER)
        if self.next_look is not None:
            due.append(self.next_look)
        return max(0.0, min(due) - time.monotonic())

    def act(self) -> None:
        now = time.monotonic()
        if not self.pending:
            return
        if now >= self.started + self.limit:
            self._give_up(f"did not end within {self.limit:g} s")
        elif self.outcome.unblocked_at is None and self._is_due(now):
            self._unblock()
        elif self.next_look is not None and now >= self.next_look:
            self._look()
        elif now >= self.next_line:
            self._tell(now)

    def _tell(self, now: float) -> None:
        """Say where the ranks are that have not ended."""
        self.next_line = now + progress.EVERY_SECONDS
        stacks = self.team.stacks(self.pending)
        where = by_value({rank: whereabouts(stack).removeprefix(", ") or "busy" for rank, stack in stacks.items()})
        if self.tell is not None:
            self.tell(f"{self.holder} has run for {now - self.started:.0f} s of {self.limit:g}: {where}")

    def _is_due(self, now: float) -> bool:
        return self.first_trouble is not None and now >= self.first_trouble + UNBLOCK_AFTER

    def _unblock(self) -> None:
        """Let the ranks that are through leave their groups."""
        self.outcome.unblocked_at = time.monotonic()
        self.next_look = self.outcome.unblocked_at + STUCK_AFTER
        for rank in self.outcome.answers:
            self._leave(rank)

    def _leave(self, rank: int) -> None:
        if rank not in self.left:
            self.left.add(rank)
            self.freed_at = time.monotonic()
            self.team.send(wire.LeaveGroup(), [rank])

    def _look(self) -> None:
        """See what the pending ranks do, and whether that is a reason to end it."""
        stacks = self.team.stacks(self.pending)
        waiting = {rank for rank, stack in stacks.items() if waiting_in(stack)}
        now = time.monotonic()
        self.next_look = now + LOOK_EVERY
        unblocked_at = self.outcome.unblocked_at
        if unblocked_at is None:
            if waiting == self.pending:  # for the ranks that skipped
                self._unblock()
            return
        if self._are_stuck(waiting, now) or now > unblocked_at + BUSY_LIMIT:
            self._give_up("did not end after another rank had failed", stacks)

    def _are_stuck(self, waiting: set[int], now: float) -> bool:
        """Whether nothing will free the pending ranks: all wait, or those who left did not free them."""
        if waiting == self.pending:
            return self.freed_at is None or now >= self.freed_at + STUCK_AFTER
        was_freed = self.freed_at is not None and now >= self.freed_at + STUCK_AFTER
        return was_freed and bool(waiting) and self.pending - set(self.outcome.raised) <= waiting

    def _give_up(self, why: str, stacks: dict[int, str] | None = None) -> None:
        """Blame the pending ranks, with their stacks, and kill the team."""
        stacks = stacks if stacks is not None else self.team.stacks(self.pending)
        now = time.monotonic()
        for rank in sorted(self.pending, key=lambda rank: (waiting_in(stacks[rank]) is not None, rank)):
            text = f"rank {rank} {why}{whereabouts(stacks[rank])}"
            details = (("Python stacks", readable(stacks[rank])),)
            is_consequence = self.first_trouble is not None
            self.outcome.incidents.append(Incident(now, rank, text, details, is_consequence))
        self.pending.clear()
        self.outcome.killed = True
        self.team.kill()

    def finish(self) -> None:
        """Take the confirmations of the ranks that left, so that they do not meet the next command."""
        end = time.monotonic() + STUCK_AFTER
        while self.left and self.team.alive and time.monotonic() < end:
            for rank, message in self.team.receive(self.left, end - time.monotonic()).items():
                if message is None:
                    self.outcome.dead.add(rank)
                self.left.discard(rank)
        if self.left:
            self.outcome.killed = True
