"""Runs one command on a team within limits, so that no fault of a rank makes the others wait; and
what came of it.

While nothing is wrong, wait for every rank's answer, up to the limit. When a rank has raised or
died, the others may be blocked in a collective with it. So after a moment the ranks that are
through destroy their groups, which makes the blocked ones raise; a rank that is still stuck a while
later gives its stack, and the whole team is killed. When all that have not ended wait in
collectives, twice in a row in the same, their calls are compared: see ``answers``.
"""

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pytest_gtrainer import options
from pytest_gtrainer._pytest_private import uncaptured
from pytest_gtrainer.facts import counted
from pytest_gtrainer.ranks import answers, wire
from pytest_gtrainer.ranks.team import LocalRanks, Team
from pytest_gtrainer.worlds import by_value

UNBLOCK_AFTER = (
    0.25  # ranks that fail alike do so within moments of each other: leave them the time
)
STUCK_AFTER = 1.0  # a blocked rank raises within milliseconds once its peers are gone
BUSY_LIMIT = 8.0  # a rank that computes, or formats a traceback through torch, may take longer
# See whether the ranks that have not ended wait: every so often, soon after one has ended, less
# often in long tests.
LOOK_EVERY = 1.0
LOOK_SOON = 0.5
LOOK_RARELY = 5.0
# A wait that is no recorded collective, in a receive for one, is for nobody if all the others have
# been idle so long.
IDLE_LIMIT = 8.0
TELL_EVERY = 60.0  # a test that takes long says where its ranks are


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """Stop the clock of a time limit by SIGALRM meanwhile: pytest-timeout's, where a thread does
    not keep it.
    """
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def tell(config: pytest.Config, text: str) -> None:
    """Write a line to the terminal of this process, if it has one: a worker of xdist has not."""
    reporter: pytest.TerminalReporter | None = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        with uncaptured(config):  # a test that calls functions on ranks is being captured meanwhile
            reporter.ensure_newline()
            reporter.write_line(f"gtrainer: {text}")


class Console:
    """The terminal while one test, the ``holder``, is on ranks; with ``post_mortem`` failing ranks
    ask for it.
    """

    def __init__(self, config: pytest.Config, holder: str) -> None:
        self.config, self.holder, self.post_mortem = config, holder, config.getoption("usepdb")
        self._has_lent = False

    def tell(self, text: str) -> None:
        tell(self.config, f"{self.holder} {text}")

    def lend(self, rank: int, prompt: wire.AtPrompt, is_here: bool) -> wire.Terminal:
        """The terminal for a rank of this node; nothing if another rank is to be debugged, or has
        failed before.
        """
        chosen = options.get(self.config, "pdb-rank")
        if (chosen is not None and chosen != rank) or (
            prompt.failure is not None and self._has_lent
        ):
            return wire.Terminal()
        self._has_lent |= prompt.failure is not None
        try:
            with uncaptured(self.config):
                path = os.ttyname(1) if is_here else ""  # stdin stays captured
        except OSError:
            path = ""
        if not path:
            if prompt.failure is not None:
                self.tell(
                    f"has failed on rank {rank}: --pdb has no terminal {'here' if is_here else 'on its node'}"
                )
                return wire.Terminal()
            if not is_here:
                told = f"rank {rank} is at a breakpoint on another node, which the terminal does not reach"
                return wire.Terminal(
                    refusal=f"{told}; stop a rank of the first node, or run: pytest {self.holder}"
                )
            way = (
                "run it with -n0"
                if hasattr(self.config, "workerinput")
                else "run it from a terminal"
            )
            advice = f"{way}: pytest {self.holder}"
            return wire.Terminal(
                refusal=f"rank {rank} is at a breakpoint, and its pytest has no terminal; {advice}"
            )
        self.tell(f"is held, with its clock: rank {rank} has the terminal")
        with open(path, "w") as terminal:
            terminal.write(f"{prompt.failure or ''}\n")
        return wire.Terminal(path)


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that befell a rank from outside its test's phases: a death, a limit, disagreement."""

    time: float  # on the host's monotonic clock
    rank: int | None  # None if it concerns all of them
    text: str
    details: tuple[tuple[str, str], ...] = ()  # titled texts for the report: stacks, last output
    is_consequence: bool = False  # another rank had failed before


@dataclass(slots=True)
class RanksOutcome:
    """Everything that the ranks said in answer to one command, and what befell them."""

    size: int
    answers: dict[int, wire.ItemDone | wire.CallDone] = field(default_factory=dict)
    raised: dict[int, wire.Raised] = field(
        default_factory=dict
    )  # the first exception of each, a skip included
    incidents: list[Incident] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)  # ranks whose process ended
    killed: bool = False  # it was we who ended them all
    spent: float = 0.0  # seconds from the command to the last answer, or to the end that we made
    unblocked_at: float | None = None  # when ranks blocked in a collective were made to raise
    on_used_ranks: bool = False  # an earlier command had run on them

    @property
    def done(self) -> dict[int, wire.ItemDone]:
        """The answers of ranks that are through with a test."""
        return {
            rank: answer
            for rank, answer in self.answers.items()
            if isinstance(answer, wire.ItemDone)
        }

    @property
    def called(self) -> dict[int, wire.CallDone]:
        """The answers of ranks that are through with a function, in the order of ranks."""
        return {
            rank: answer
            for rank, answer in sorted(self.answers.items())
            if isinstance(answer, wire.CallDone)
        }

    def disagreement(self) -> str | None:
        """How ranks whose groups are intact differ in the collectives they issued; None if they do
        not.
        """
        states = {
            rank: answer.state for rank, answer in self.answers.items() if answer.state.intact
        }
        for label in dict.fromkeys(label for state in states.values() for label in state.issued):
            counts = {
                rank: state.issued[label] for rank, state in states.items() if label in state.issued
            }
            if len(set(counts.values())) > 1:
                return f"the ranks issued different numbers of collectives on {label}: {by_value(counts)}"
        made = {rank: state.groups_made for rank, state in states.items()}
        if len(set(made.values())) > 1:
            return f"the ranks made different numbers of process groups: {by_value(made)}"
        if len(states) == self.size:
            messages: Counter[str] = Counter()
            for state in states.values():
                messages.update(state.messages)
            for label, number in messages.items():
                if number:
                    more = f"{counted(abs(number), 'message')} {'more' if number > 0 else 'fewer'}"
                    return (
                        f"the ranks sent {more} on {label} than they received: "
                        "give every send its recv"
                    )
        return None

    def has_failed(self) -> bool:
        """Return whether a rank has raised, or something has happened to one."""
        return bool(self.incidents) or any(not told.is_skip for told in self.raised.values())

    def causes(self) -> list[Incident]:
        """The incidents that are no mere consequences, the earliest first."""
        return sorted(
            (each for each in self.incidents if not each.is_consequence), key=lambda each: each.time
        )

    def is_consequence(self, rank: int) -> bool:
        """Return whether the rank only failed because another one had ended the collective they
        shared.
        """
        return self.is_lost(self.raised.get(rank))

    def is_lost(self, raised: wire.Raised | None) -> bool:
        """Return whether an exception only says that another rank has ended the collective."""
        if raised is None or raised.waiting_in is None or raised.origin is not None:
            return False
        return bool(self.dead) or (
            self.unblocked_at is not None and raised.time >= self.unblocked_at
        )

    def failed_at(self, rank: int) -> float:
        """When the first rank raised that failed like this one within moments: which of them was
        first is luck.
        """
        own = self.raised[rank]
        alike = (told.time for told in self.raised.values() if told.is_like(own))
        return min(
            (time for time in alike if abs(time - own.time) < UNBLOCK_AFTER), default=own.time
        )

    def condition(self) -> wire.GroupCondition:
        """Return what the command has left of the process group."""
        states = [answer.state for answer in self.answers.values()]
        shared = any(state.shared for state in states)
        if self.dead or self.killed or any(state.broken for state in states):
            return "dead" if self.dead else "killed"
        if self.unblocked_at is not None or not all(state.intact for state in states):
            return (
                "killed" if shared else "left"
            )  # what a module shares is set up anew on other ranks
        if self.disagreement() is not None:
            return "disagreeing"
        return (
            "with subgroups" if not shared and any(state.subgroups for state in states) else "fit"
        )


def run_on(
    team: Team, command: wire.RunItem | wire.CallFunction, limit: float, console: Console
) -> RanksOutcome:
    """Send the command to every rank and gather what they say, within the limits."""
    watch = _Watch(team, limit, console)
    watch.outcome.on_used_ranks, team.used = team.used, True
    team.busy = True
    team.send(command)
    try:
        while watch.pending:
            watch.hear(team.receive(watch.pending, watch.patience()))
            watch.act()
    except pytest.fail.Exception as error:  # a time limit of another plugin
        watch.give_up(f"did not end: {error.msg}")
    watch.finish()
    team.busy = False
    team.heal(watch.outcome.condition())
    return watch.outcome


class _Watch:
    def __init__(self, team: Team, limit: float, console: Console) -> None:
        self.team, self.limit, self.console = team, limit, console
        self.prompts: list[tuple[int, wire.AtPrompt]] = []  # who waits for the terminal
        self.outcome = RanksOutcome(team.size)
        self.pending = set(range(team.size))
        self.started = time.monotonic()
        self.next_line = self.started + TELL_EVERY
        self.first_trouble, self.next_look = math.inf, self.started + LOOK_EVERY
        self.seen: tuple[dict[int, str], answers.Calls] | None = (
            None  # where all waited at the last look
        )
        self.seen_since = math.inf
        self.freed_at: float | None = None  # when a rank last closed its connections to the others
        self.left: set[int] = set()  # told to leave their group, and it is not confirmed

    def hear(self, messages: dict[int, object]) -> None:
        for rank, message in messages.items():
            if message is None:
                self.pending.discard(rank)
                self.outcome.dead.add(rank)
                self.freed_at = time.monotonic()
                self._trouble()
                how, words = self.team.part_of(rank).ended(rank)
                details = (("last output", words),) if words else ()
                self.outcome.incidents.append(
                    Incident(time.monotonic(), rank, f"rank {rank} {how}", details)
                )
            elif isinstance(message, wire.Raised):
                self.outcome.raised.setdefault(rank, message)
                if not message.is_skip and not message.in_subtest and not self.console.post_mortem:
                    self._trouble()  # else when it has been debugged
            elif isinstance(message, wire.ItemDone | wire.CallDone):
                self._done(rank, message)
            elif isinstance(message, wire.AtPrompt):
                self.prompts.append((rank, message))

    def _done(self, rank: int, message: wire.ItemDone | wire.CallDone) -> None:
        self.pending.discard(rank)
        self.outcome.answers[rank] = message
        raised = self.outcome.raised.get(rank)
        if raised is not None and not raised.is_skip and not raised.in_subtest:
            self._trouble()
        if isinstance(message, wire.ItemDone) and message.trouble is not None:
            self._trouble()
            self.outcome.incidents.append(
                Incident(time.monotonic(), rank, f"rank {rank} {message.trouble}")
            )
        elif isinstance(message, wire.CallDone) and message.error is not None:
            self._trouble()
        self.next_look = min(self.next_look, time.monotonic() + LOOK_SOON)
        if self.outcome.unblocked_at is not None and self.pending:
            self._leave(rank)

    def _trouble(self) -> None:
        self.first_trouble = min(self.first_trouble, time.monotonic())

    def patience(self) -> float:
        """Seconds until something is due."""
        due = min(self.started + self.limit, self.next_line, self.next_look, self._unblock_due())
        return max(0.0, due - time.monotonic())

    def _unblock_due(self) -> float:
        return self.first_trouble + UNBLOCK_AFTER if self.outcome.unblocked_at is None else math.inf

    def act(self) -> None:
        while self.prompts:
            self._debug(*self.prompts.pop(0))
        now = time.monotonic()
        if not self.pending:
            return
        if now >= self.started + self.limit:
            self.give_up(f"did not end within {self.limit:g} s", self.team.stacks(self.pending))
        elif now >= self._unblock_due():
            self._unblock()
        elif now >= self.next_look:
            self._look()
        elif now >= self.next_line:
            self.next_line = now + TELL_EVERY
            stacks = self.team.stacks(self.pending)
            where = {
                rank: answers.whereabouts(stack).removeprefix(", ") or "busy"
                for rank, stack in stacks.items()
            }
            spent = f"{now - self.started:.0f} s of {self.limit:g}"
            self.console.tell(f"has run for {spent}: {by_value(where)}")

    def _debug(self, rank: int, prompt: wire.AtPrompt) -> None:
        """Let a rank have the terminal, while the others and the clock are held."""
        began, heard, is_here = (
            time.monotonic(),
            {},
            isinstance(self.team.part_of(rank), LocalRanks),
        )
        terminal = self.console.lend(rank, prompt, is_here)
        self.team.send(terminal, [rank])
        with stopped_clock():
            while terminal.path is not None and rank not in heard:
                try:
                    heard = self.team.receive([rank], 3600.0)
                except KeyboardInterrupt:
                    self.team.part_of(rank).interrupt(rank)
        self.hear(heard)
        held = time.monotonic() - began
        self.started += held
        self.next_line += held
        self.next_look += held
        self.first_trouble += held

    def _unblock(self) -> None:
        """Let the ranks that are through leave their groups."""
        self._blame_differing()
        self.outcome.unblocked_at = time.monotonic()
        self.next_look = self.outcome.unblocked_at + STUCK_AFTER
        for rank in self.outcome.answers:
            self._leave(rank)

    def _leave(self, rank: int) -> None:
        if rank not in self.left:
            self.left.add(rank)
            self.freed_at = time.monotonic()
            self.team.send(wire.Do("leave group"), [rank])

    def _look(self) -> None:
        """See what the pending ranks do, and whether that is a reason to end it."""
        stacks, unblocked_at = self.team.stacks(self.pending), self.outcome.unblocked_at
        if unblocked_at is None:
            self._judge_waiting(stacks)
            return
        now, waiting = (
            time.monotonic(),
            {rank for rank, stack in stacks.items() if answers.waiting_in(stack)},
        )
        self.next_look = now + LOOK_EVERY
        # nothing will free the pending ranks: all wait, or those who left did not free the ones
        # that have not raised
        is_late = self.freed_at is not None and now >= self.freed_at + STUCK_AFTER
        all_wait = waiting == self.pending and (is_late or self.freed_at is None)
        is_stuck = all_wait or (
            is_late and bool(waiting) and self.pending - set(self.outcome.raised) <= waiting
        )
        if is_stuck or now > unblocked_at + BUSY_LIMIT:
            self.give_up("did not end after another rank had failed", stacks)

    def _judge_waiting(self, stacks: dict[int, str]) -> None:
        """Nobody has failed: see whether nobody ever comes to what the pending ranks wait in."""
        now, done = time.monotonic(), self.outcome.answers
        if not all(answers.may_wait(stack) for stack in stacks.values()):
            self.seen = None
            rest = (
                LOOK_SOON if done else min(max(LOOK_EVERY, (now - self.started) / 4), LOOK_RARELY)
            )
            self.next_look = now + rest
            return
        self.next_look = now + LOOK_SOON
        calls = self._calls()
        seen = {rank: answers.main_thread(stack) for rank, stack in stacks.items()}, calls
        if seen != self.seen:
            self.seen, self.seen_since = seen, now
            return
        is_long = now > self.seen_since + IDLE_LIMIT
        if not is_long and not all(answers.waiting_in(stack) for stack in stacks.values()):
            return
        if any(told.is_skip for told in self.outcome.raised.values()):
            self._unblock()  # for the ranks that skipped
            return
        fault = answers.never_ending(calls, self.pending)
        if fault is None and is_long and len(done) == self.team.size - 1:
            (rank,) = self.pending
            fault = f"rank {rank} is alone{answers.whereabouts(stacks[rank])}: all other ranks have ended"
        if fault is not None:
            self.outcome.incidents.append(Incident(now, None, fault))
            self._trouble()
            if not done:  # nobody can leave
                self.give_up("was ended", stacks)

    def _calls(self) -> answers.Calls:
        return answers.read_calls(
            self.team.stacks(set(range(self.team.size)) - self.outcome.dead, kind="calls")
        )

    def _blame_differing(self) -> None:
        """Where collectives have raised, see whether one differed: the first to raise may be
        innocent.
        """
        raised, incidents = self.outcome.raised.values(), self.outcome.incidents
        died_of_it = [
            any("gloo::Enforce" in text for _, text in incident.details) for incident in incidents
        ]
        if (raised or incidents) and all(told.waiting_in for told in raised) and all(died_of_it):
            fault = answers.differing_call(self._calls())
            if fault is not None:
                times = [told.time for told in raised] + [incident.time for incident in incidents]
                incidents.append(Incident(min(times) - 1e-6, None, fault))

    def give_up(self, why: str, stacks: dict[int, str] | None = None) -> None:
        """Blame the pending ranks, with their stacks, and kill the team."""
        now, stacks = (
            time.monotonic(),
            stacks if stacks is not None else self.team.stacks(self.pending),
        )
        silent = [
            rank for rank, stack in stacks.items() if not stack
        ]  # which says nothing of what they do
        stacks |= self.team.stacks(silent, kind="dump")
        outputs = self.team.stacks(self.pending, kind="output")
        waiting = {rank for rank in self.pending if answers.waiting_in(stacks[rank]) is not None}
        for rank in sorted(self.pending, key=lambda rank: (rank in waiting, rank in silent, rank)):
            text = f"rank {rank} {why}{answers.whereabouts(stacks[rank])}"
            details = [("Python stacks", answers.readable(stacks[rank]))]
            if outputs.get(rank):  # its report, which would hold this, never comes
                details.append(("captured output", outputs[rank]))
            is_consequence = self.first_trouble < math.inf
            self.outcome.incidents.append(Incident(now, rank, text, tuple(details), is_consequence))
        self.pending.clear()
        self.outcome.killed = True
        self.team.kill()

    def finish(self) -> None:
        """Say what only comparing tells; take the confirmations of ranks that left, so that the
        next test does not.
        """
        outcome = self.outcome
        outcome.spent = time.monotonic() - self.started
        if outcome.unblocked_at is None and not outcome.killed and not outcome.incidents:
            self._blame_differing()
        text = outcome.disagreement()
        if text is not None and not (
            outcome.incidents or outcome.raised or outcome.unblocked_at is not None
        ):
            # ranks that issued different collectives fail the test even if all passed
            outcome.incidents.append(
                Incident(time.monotonic(), None, text + answers.called_by_some(self._calls()))
            )
        end = time.monotonic() + STUCK_AFTER
        while self.left and self.team.alive and time.monotonic() < end:
            for rank, message in self.team.receive(self.left, end - time.monotonic()).items():
                if message is None:
                    self.outcome.dead.add(rank)
                self.left.discard(rank)
        if self.left:
            self.outcome.killed = True
