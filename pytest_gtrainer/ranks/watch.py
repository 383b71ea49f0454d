"""Run one command on a team of ranks within limits, so that no fault of a rank blocks the others.

``run_on`` waits for every rank's answer, up to the limit. If a rank has raised or died, the others
may be blocked in a collective with it. So after a moment the ranks that have answered destroy their
groups, which makes the blocked ones raise. If a rank is still stuck a while later, its stack is
kept for the report, and the whole team is killed. If all ranks that have not answered wait in
collectives, and in the same ones a moment later, their calls are compared: see ``answers``.

The result is a ``RanksOutcome``. A fault that is no failure of a phase of the test is an
``Incident``.
"""

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from pytest_gtrainer import options
from pytest_gtrainer._pytest_private import uncaptured
from pytest_gtrainer.facts import counted
from pytest_gtrainer.ranks import answers, wire
from pytest_gtrainer.ranks.team import LocalRanks, Team
from pytest_gtrainer.worlds import by_value

# All in seconds. Ranks that fail alike do so within moments of each other: leave them the time.
UNBLOCK_AFTER = 0.25
# A blocked rank raises within milliseconds once its peers are gone.
STUCK_AFTER = 1.0
# A rank that computes, or formats a traceback through torch, may take longer.
BUSY_LIMIT = 8.0
# Look whether the ranks that have not ended wait: every so often, soon after one has ended, less
# often in long tests.
LOOK_EVERY = 1.0
LOOK_SOON = 0.5
LOOK_RARELY = 5.0
# torch records no call for some waits, such as a receive. Such a wait never ends if all other ranks
# have ended or waited for so long.
IDLE_LIMIT = 8.0
# A test that takes long writes a line that says where its ranks are.
LINE_EVERY = 60.0


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """Stop the clock of a time limit by SIGALRM inside, as pytest-timeout sets it."""
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def write_line(config: pytest.Config, text: str) -> None:
    """Write a line to the terminal of this process, if it has one: a worker of xdist has not."""
    reporter: pytest.TerminalReporter | None = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        # A test that calls functions on ranks is captured meanwhile.
        with uncaptured(config):
            reporter.ensure_newline()
            reporter.write_line(f"gtrainer: {text}")


class Console:
    """The terminal while one test, the ``holder``, is on ranks.

    With ``post_mortem`` (pytest's --pdb) ranks that fail ask for it.
    """

    def __init__(self, config: pytest.Config, holder: str) -> None:
        self.config = config
        self.holder = holder
        self.post_mortem = config.getoption("usepdb")
        self._has_lent = False  # to a rank that failed

    def write(self, text: str) -> None:
        write_line(self.config, f"{self.holder} {text}")

    def lend(self, rank: int, prompt: wire.AtPrompt, is_here: bool) -> wire.Terminal:
        """Return the terminal for a rank, which is on this node if it ``is_here``.

        An empty one if another rank is to be debugged, or one has failed before.
        """
        chosen = options.get(self.config, "pdb-rank")
        if chosen is not None and chosen != rank:
            return wire.Terminal()
        has_failed = prompt.failure is not None
        if has_failed and self._has_lent:
            return wire.Terminal()
        self._has_lent |= has_failed
        try:
            with uncaptured(self.config):
                path = os.ttyname(1) if is_here else ""  # stdin stays captured
        except OSError:
            path = ""

        if path:
            self.write(f"is held, with its clock: rank {rank} has the terminal")
            with open(path, "w") as terminal:
                terminal.write(f"{prompt.failure or ''}\n")
            return wire.Terminal(path)

        if has_failed:
            where = "here" if is_here else "on its node"
            self.write(f"has failed on rank {rank}: --pdb has no terminal {where}")
            return wire.Terminal()
        if not is_here:
            return wire.Terminal(
                refusal=f"rank {rank} is at a breakpoint on another node, which the terminal does "
                f"not reach; stop a rank of the first node, or run: pytest {self.holder}"
            )

        way = "run it from a terminal"
        if hasattr(self.config, "workerinput"):  # a worker of xdist has no terminal
            way = "run it with -n0"
        return wire.Terminal(
            refusal=f"rank {rank} is at a breakpoint, and its pytest has no terminal; "
            f"{way}: pytest {self.holder}"
        )


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault outside of a test's phases: a death, a time limit, a disagreement of ranks."""

    time: float  # on the host's monotonic clock
    rank: int | None  # None if it concerns all of them
    text: str
    details: tuple[tuple[str, str], ...] = ()  # titled texts for the report: stacks, last output
    is_consequence: bool = False  # another rank had failed before


@dataclass(slots=True)
class RanksOutcome:
    """The answers of the ranks to one command, and their deaths.

    Attributes:
        raised: the first exception of each rank, a skip included.
        dead: ranks whose process ended.
        killed: the team was ended from here.
        spent: seconds from the command to the last answer, or to the end of the team.
        unblocked_at: when ranks that were blocked in a collective were made to raise.
        on_used_ranks: an earlier command had run on them.
    """

    size: int
    answers: dict[int, wire.ItemDone | wire.CallDone] = field(default_factory=dict)
    raised: dict[int, wire.Raised] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    killed: bool = False
    spent: float = 0.0
    unblocked_at: float | None = None
    on_used_ranks: bool = False

    @property
    def done(self) -> dict[int, wire.ItemDone]:
        """The answers of ranks that have run a test, in the order of ranks."""
        ordered = sorted(self.answers.items())
        return {rank: each for rank, each in ordered if isinstance(each, wire.ItemDone)}

    @property
    def called(self) -> dict[int, wire.CallDone]:
        """The answers of ranks that have called a function, in the order of ranks."""
        ordered = sorted(self.answers.items())
        return {rank: each for rank, each in ordered if isinstance(each, wire.CallDone)}

    def disagreement(self) -> str | None:
        """Return how ranks whose groups are intact differ in what they issued, if they do."""
        issued: dict[str, dict[int, int]] = {}
        groups_made: dict[int, int] = {}
        messages: Counter[str] = Counter()
        for rank, answer in sorted(self.answers.items()):
            if not answer.state.intact:
                continue
            for label, count in answer.state.issued.items():
                issued.setdefault(label, {})[rank] = count
            groups_made[rank] = answer.state.groups_made
            messages.update(answer.state.messages)

        for label, counts in issued.items():
            if len(set(counts.values())) > 1:
                return (
                    f"the ranks issued different numbers of collectives on {label}: "
                    f"{by_value(counts)}"
                )

        differing = self._differing_group()
        if differing is not None:
            return f"the ranks called different collectives on {differing}"

        # Torch counts groups to name them. Ranks whose counts differ would never meet in the next.
        if len(set(groups_made.values())) > 1:
            return f"the ranks made different numbers of process groups: {by_value(groups_made)}"
        if len(groups_made) < self.size:
            return None  # the rank that is missing may have received the messages
        for label, number in messages.items():
            if number:
                more = "more" if number > 0 else "fewer"
                return (
                    f"the ranks sent {counted(abs(number), 'message')} {more} on {label} than "
                    "they received: give every send its recv"
                )

        return None

    def _differing_group(self) -> str | None:
        """Return a group on which intact ranks called other collectives, or with other dtypes.

        gloo may end such calls without a word, with numbers that mean nothing.
        """
        kinds: dict[str, list[Mapping[int, int]]] = {}
        for _, answer in sorted(self.answers.items()):
            for label, own in answer.state.kinds.items():
                kinds.setdefault(label, []).append(own)
        for label, of_ranks in kinds.items():
            for number in set.intersection(*(set(own) for own in of_ranks)):
                if len({own[number] for own in of_ranks}) > 1:
                    return label
        return None

    def has_failed(self) -> bool:
        """Return whether a rank has raised, or something has happened to one."""
        return bool(self.incidents) or any(not each.is_skip for each in self.raised.values())

    def causes(self) -> list[Incident]:
        """Return the incidents that are no mere consequences, the earliest first."""
        causes = [each for each in self.incidents if not each.is_consequence]
        return sorted(causes, key=lambda each: each.time)

    def is_consequence(self, rank: int) -> bool:
        """Return whether a rank failed only because another one ended their collective."""
        return self.lost_its_collective(self.raised.get(rank))

    def lost_its_collective(self, raised: wire.Raised | None) -> bool:
        """Return whether an exception only says that another rank has left the collective."""
        if raised is None or raised.waiting_in is None or raised.origin is not None:
            return False
        if self.unblocked_at is None:
            return bool(self.dead)
        if raised.time >= self.unblocked_at:
            return True
        # A rank that died after the others were let go did not make an earlier one raise.
        deaths = [each.time for each in self.incidents if each.rank in self.dead]
        return any(death < self.unblocked_at for death in deaths)

    def failed_at(self, rank: int) -> float:
        """Return when the first rank raised that failed like this one within moments.

        Which of them was first is luck, so they count as failing together.
        """
        own = self.raised[rank]
        first = own.time
        for other in self.raised.values():
            if other.is_like(own) and abs(other.time - own.time) < UNBLOCK_AFTER:
                first = min(first, other.time)
        return first

    def condition(self) -> wire.GroupCondition:
        """Return what the command has left of the process group."""
        states = [answer.state for answer in self.answers.values()]
        shared = any(state.shared for state in states)
        # In the order of severity: a team is as good as its worst rank.
        if self.dead:
            return "dead"
        if self.killed or any(state.broken for state in states):
            return "killed"
        if self.unblocked_at is not None or not all(state.intact for state in states):
            # What a module shares is set up anew on other ranks.
            return "killed" if shared else "left"
        if self.disagreement() is not None:
            return "disagreeing"
        if not shared and any(state.subgroups for state in states):
            return "with subgroups"
        return "fit"


def run_on(
    team: Team, command: wire.RunItem | wire.CallFunction, limit: float, console: Console
) -> RanksOutcome:
    """Send the command to every rank and gather what they say, within the limits."""
    run = _CommandRun(team, limit, console)
    run.outcome.on_used_ranks, team.used = team.used, True
    team.busy = True
    team.send(command)
    try:
        while run.pending:
            run.take(team.receive(run.pending, run.seconds_to_next_action()))
            run.act()
    except pytest.fail.Exception as error:  # a time limit of another plugin
        run.give_up(f"did not end: {error.msg}")

    run.finish()
    team.busy = False
    team.heal(run.outcome.condition())
    return run.outcome


class _CommandRun:
    """One command while it runs on the ranks of a team.

    Attributes:
        pending: ranks that have neither answered nor died.
        prompts: ranks that wait for the terminal.
        first_trouble: when the first rank raised or died; infinite before that.
        busy_until: when ranks that compute are ended too, after another one has failed.
        next_look: when to look next where the pending ranks are.
        next_line: when to write the next line to the terminal.
        seen: where all pending ranks waited at the last look, the same since ``seen_since``.
        freed_at: when a rank last closed its connections to the others.
        leaving: ranks that were asked to leave their group and have not confirmed it.
    """

    def __init__(self, team: Team, limit: float, console: Console) -> None:
        self.team, self.limit, self.console = team, limit, console
        self.outcome = RanksOutcome(team.size)
        self.pending = set(range(team.size))
        self.prompts: list[tuple[int, wire.AtPrompt]] = []
        self.started = time.monotonic()
        self.first_trouble = math.inf
        self.busy_until = math.inf
        self.next_look = self.started + LOOK_EVERY
        self.next_line = self.started + LINE_EVERY
        self.seen: tuple[dict[int, str], answers.Calls] | None = None
        self.seen_since = math.inf
        self.freed_at: float | None = None
        self.leaving: set[int] = set()

    def take(self, messages: dict[int, object]) -> None:
        """Take messages of ranks; None stands for the end of a rank's process."""
        for rank, message in messages.items():
            if message is None:
                self.pending.discard(rank)
                self.outcome.dead.add(rank)
                # The kernel has closed its sockets, so gloo raises on the ranks that wait for it.
                self.freed_at = time.monotonic()
                self._note_trouble()
                how, last_output = self.team.part_of(rank).ended(rank)
                details = []
                if last_output:
                    details.append(("last output", last_output))
                self._add_incident(rank, f"rank {rank} {how}", details)
            elif isinstance(message, wire.Raised):
                self.outcome.raised.setdefault(rank, message)
                # A rank that is debugged is in trouble when that is over.
                if not message.is_skip and not message.in_subtest and not self.console.post_mortem:
                    self._note_trouble()
            elif isinstance(message, wire.ItemDone | wire.CallDone):
                self._done(rank, message)
            elif isinstance(message, wire.AtPrompt):
                self.prompts.append((rank, message))

    def _done(self, rank: int, message: wire.ItemDone | wire.CallDone) -> None:
        self.pending.discard(rank)
        self.outcome.answers[rank] = message
        raised = self.outcome.raised.get(rank)
        if raised is not None and not raised.is_skip and not raised.in_subtest:
            self._note_trouble()
        if isinstance(message, wire.ItemDone) and message.trouble is not None:
            self._note_trouble()
            self._add_incident(rank, f"rank {rank} {message.trouble}")
        elif isinstance(message, wire.CallDone) and message.error is not None:
            self._note_trouble()
        self.next_look = min(self.next_look, time.monotonic() + LOOK_SOON)
        if self.outcome.unblocked_at is not None and self.pending:
            self._leave(rank)

    def _note_trouble(self) -> None:
        self.first_trouble = min(self.first_trouble, time.monotonic())

    def _add_incident(
        self, rank: int | None, text: str, details: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.outcome.incidents.append(Incident(time.monotonic(), rank, text, tuple(details)))

    def seconds_to_next_action(self) -> float:
        due = min(self.started + self.limit, self.next_line, self.next_look, self._unblock_due())
        return max(0.0, due - time.monotonic())

    def _unblock_due(self) -> float:
        if self.outcome.unblocked_at is not None:
            return math.inf
        return self.first_trouble + UNBLOCK_AFTER

    def act(self) -> None:
        """Do what is due."""
        while self.prompts:
            self._debug(*self.prompts.pop(0))
        now = time.monotonic()
        if not self.pending:
            return

        # One thing at a time: each may end ranks, and then the next is no longer due.
        if now >= self.started + self.limit:
            self.give_up(f"did not end within {self.limit:g} s", self.team.stacks(self.pending))
        elif now >= self._unblock_due():
            self._unblock()
        elif now >= self.next_look:
            self._look()
        elif now >= self.next_line:
            self.next_line = now + LINE_EVERY
            where = {}
            for rank, stack in self.team.stacks(self.pending).items():
                where[rank] = answers.whereabouts(stack).removeprefix(", ") or "busy"
            spent = f"{now - self.started:.0f} s of {self.limit:g}"
            self.console.write(f"has run for {spent}: {by_value(where)}")

    def _debug(self, rank: int, prompt: wire.AtPrompt) -> None:
        """Let a rank have the terminal, while the others and the clock are held."""
        began = time.monotonic()
        part = self.team.part_of(rank)
        terminal = self.console.lend(rank, prompt, isinstance(part, LocalRanks))
        self.team.send(terminal, [rank])
        messages: dict[int, object] = {}
        with stopped_clock():
            while terminal.path is not None and rank not in messages:
                try:
                    messages = self.team.receive([rank], 3600.0)
                except KeyboardInterrupt:
                    part.interrupt(rank)

        # A person at a prompt takes minutes, which must count against no limit.
        held = time.monotonic() - began
        self.started += held
        self.next_line += held
        self.next_look += held
        self.first_trouble += held
        self.busy_until += held
        if self.freed_at is not None:
            self.freed_at += held
        self.seen = None

        # Only now: what a message reports did not happen before the prompt.
        self.take(messages)

    def _unblock(self) -> None:
        """Let the ranks that are through leave their groups."""
        self._blame_differing()
        self.outcome.unblocked_at = time.monotonic()
        self.busy_until = self.outcome.unblocked_at + BUSY_LIMIT
        self.next_look = self.outcome.unblocked_at + STUCK_AFTER
        for rank in self.outcome.answers:
            self._leave(rank)

    def _leave(self, rank: int) -> None:
        if rank not in self.leaving:
            self.leaving.add(rank)
            self.freed_at = time.monotonic()
            self.team.send(wire.Do("leave group"), [rank])

    def _look(self) -> None:
        """Look what the pending ranks do, and end the command if nothing will free them."""
        stacks = self.team.stacks(self.pending)
        if self.outcome.unblocked_at is None:
            self._judge_waiting(stacks)
            return

        now = time.monotonic()
        self.next_look = now + LOOK_EVERY
        waiting = {rank for rank, stack in stacks.items() if answers.waiting_in(stack)}
        is_stuck = False
        if self.freed_at is None:
            # No rank has left its group, so nothing frees ranks that all wait in collectives.
            is_stuck = waiting == self.pending
        elif now >= self.freed_at + STUCK_AFTER and waiting:
            # Ranks have left their groups, and after a while that has freed no more of the others.
            is_stuck = self.pending - self.outcome.raised.keys() <= waiting

        if is_stuck or now > self.busy_until:
            self.give_up("did not end after another rank had failed", stacks)

    def _judge_waiting(self, stacks: dict[int, str]) -> None:
        """End waits that nobody will end. No rank has failed so far."""
        now, done = time.monotonic(), self.outcome.answers
        if not all(map(answers.may_wait, stacks.values())):
            self.seen = None
            pause = LOOK_SOON
            if not done:
                # To write a stack takes a rank's time, so a long test is disturbed more rarely.
                pause = min(max(LOOK_EVERY, (now - self.started) / 4), LOOK_RARELY)
            self.next_look = now + pause
            return

        # A rank that goes from one collective to the next waits at each look. Only the same place
        # with the same calls, twice in a row, is a wait that lasts.
        self.next_look = now + LOOK_SOON
        calls = self._calls()
        seen = {rank: answers.main_thread(stack) for rank, stack in stacks.items()}, calls
        if seen != self.seen:
            self.seen, self.seen_since = seen, now
            return

        is_long = now > self.seen_since + IDLE_LIMIT
        if not is_long and not all(map(answers.waiting_in, stacks.values())):
            return

        if any(each.is_skip for each in self.outcome.raised.values()):
            self._unblock()  # for the ranks that skipped
            return

        fault = answers.never_ending(calls, self.pending)
        if fault is None and is_long and len(done) == self.team.size - 1:
            (rank,) = self.pending
            place = answers.whereabouts(stacks[rank])
            fault = f"rank {rank} is alone{place}: all other ranks have ended"
        if fault is not None:
            self.outcome.incidents.append(Incident(now, None, fault))
            self._note_trouble()
            if not done:  # nobody can leave
                self.give_up("was ended", stacks)

    def _calls(self) -> answers.Calls:
        alive = set(range(self.team.size)) - self.outcome.dead
        return answers.read_calls(self.team.stacks(alive, kind="calls"))

    def _blame_differing(self) -> None:
        """Blame the rank whose call differed, if nothing but collectives has raised.

        The first rank to raise may be innocent.
        """
        incidents = self.outcome.incidents
        times = []
        for raised in self.outcome.raised.values():
            if not raised.waiting_in:
                return
            times.append(raised.time)

        for incident in incidents:
            # gloo ends a process in which the sizes of a collective do not fit.
            if not any("gloo::Enforce" in text for _, text in incident.details):
                return
            times.append(incident.time)

        if not times:
            return
        fault = answers.differing_call(self._calls())
        if fault is not None:
            # Just before the first of them, so that reports, which sort by time, take it as cause.
            incidents.append(Incident(min(times) - 1e-6, None, fault))

    def give_up(self, why: str, stacks: dict[int, str] | None = None) -> None:
        """Blame the pending ranks, with their stacks, and kill the team."""
        now = time.monotonic()
        if stacks is None:
            stacks = self.team.stacks(self.pending)
        # A rank that holds the GIL in C++ cannot answer, so its faulthandler may try.
        silent = [rank for rank, stack in stacks.items() if not stack]
        stacks |= self.team.stacks(silent, kind="dump")
        outputs = self.team.stacks(self.pending, kind="output")

        def innocence(rank: int) -> tuple[bool, bool, int]:
            # A rank that computes holds up those that wait for it.
            return answers.waiting_in(stacks[rank]) is not None, rank in silent, rank

        for rank in sorted(self.pending, key=innocence):
            text = f"rank {rank} {why}{answers.whereabouts(stacks[rank])}"
            details = [("Python stacks", answers.without_pytest_frames(stacks[rank]))]
            if outputs.get(rank):  # the report that would hold this never comes
                details.append(("captured output", outputs[rank]))
            is_consequence = self.first_trouble < math.inf
            self.outcome.incidents.append(Incident(now, rank, text, tuple(details), is_consequence))

        self.pending.clear()
        self.outcome.killed = True
        self.team.kill()

    def finish(self) -> None:
        """Compare the ranks, and take the confirmations of those that left their groups.

        Otherwise the next command would take them for its own.
        """
        outcome = self.outcome
        outcome.spent = time.monotonic() - self.started
        if outcome.unblocked_at is None and not outcome.killed and not outcome.incidents:
            self._blame_differing()
        text = outcome.disagreement()
        has_failed = outcome.incidents or outcome.raised or outcome.unblocked_at is not None
        if text is not None and not has_failed:
            # Ranks that issued different collectives fail the test even if all passed.
            calls = self._calls()
            more = answers.called_by_some(calls)
            differing = answers.differing_call(calls)
            if differing and not more:
                more = f": {differing}"
            self._add_incident(None, text + more)

        end = time.monotonic() + STUCK_AFTER
        while self.leaving and self.team.alive and time.monotonic() < end:
            for rank, message in self.team.receive(self.leaving, end - time.monotonic()).items():
                if message is None:
                    outcome.dead.add(rank)
                self.leaving.discard(rank)

        if self.leaving:
            outcome.killed = True
