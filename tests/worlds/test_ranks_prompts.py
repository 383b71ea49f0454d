"""The time that a person spends at the prompt of one rank counts for none of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gtrainer.ranks import watch, wire
from pytest_gtrainer.ranks.watch import BUSY_LIMIT, LOOK_EVERY, STUCK_AFTER, UNBLOCK_AFTER

AT_PROMPT = 3600.0
DONE = wire.ItemDone((), (), None, wire.GroupState(True, 1))


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Ranks:
    """A team of ranks of which one is at a prompt for an hour, and sends ``answer`` behind it."""

    size = 3
    alive = True

    def __init__(self, clock: Clock, answer: object, stack: str) -> None:
        self.clock, self.answer, self.stack = clock, answer, stack

    def part_of(self, rank: int) -> "Ranks":
        return self

    def send(self, command: object, ranks: object = None) -> None: ...

    def receive(self, ranks: list[int], seconds: float) -> dict[int, object]:
        self.clock.now += AT_PROMPT
        return dict.fromkeys(ranks, self.answer)

    def stacks(self, ranks: set[int], *, kind: str = "stack") -> dict[int, str]:
        return dict.fromkeys(ranks, self.stack)

    def ended(self, rank: int) -> wire.Ended:
        return wire.Ended("was killed by SIGKILL", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    return made


def run_of(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, answer: object, *, waiting: bool = False
) -> tuple[Any, list[str]]:
    """Return a command that runs on ranks, and the list of why it was given up."""
    monkeypatch.setattr(watch.answers, "waiting_in", lambda stack: "barrier" if waiting else None)
    terminal = wire.Terminal("/dev/null")
    console: Any = SimpleNamespace(
        lend=lambda rank, prompt, is_here: terminal, post_mortem=False, write=print
    )
    team: Any = Ranks(clock, answer, "")
    run: Any = watch._CommandRun(team, 60.0, console)
    ended: list[str] = []
    monkeypatch.setattr(run, "give_up", lambda why, stacks=None: ended.append(why))
    return run, ended


def act_until(run: Any, clock: Clock, end: float) -> None:
    while clock.now < end:
        run.act()
        clock.now += 0.25


@pytest.mark.parametrize("before", ["at once", "after the others were let go"])
def test_a_rank_that_goes_on_has_the_time_that_it_had(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, before: str
) -> None:
    """Rank 0 has failed, ranks 1 and 2 compute; rank 1 is at a prompt for longer than they may."""
    run, ended = run_of(monkeypatch, clock, wire.PromptOver())
    run.take({0: wire.Raised(clock.now, "E", False, None, None)})
    run.take({0: DONE})
    if before != "at once":
        act_until(run, clock, clock.now + 1.0)
        assert run.outcome.unblocked_at is not None
    run.take({1: wire.AtPrompt()})
    run.act()
    act_until(run, clock, clock.now + BUSY_LIMIT / 2)
    assert ended == []
    act_until(run, clock, clock.now + BUSY_LIMIT)
    assert ended[:1] == ["did not end after another rank had failed"]


def test_a_rank_that_goes_on_into_a_collective_has_a_moment_to_raise(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Its peers have left the group, long before it comes there."""
    run, ended = run_of(monkeypatch, clock, wire.PromptOver(), waiting=True)
    run.take({0: wire.Raised(clock.now, "E", False, None, None)})
    run.take({0: DONE})
    clock.now += UNBLOCK_AFTER
    run.act()
    assert run.freed_at == clock.now
    run.take({1: wire.AtPrompt()})
    run.next_look = clock.now
    run.act()
    assert ended == []
    act_until(run, clock, clock.now + STUCK_AFTER + LOOK_EVERY)
    assert ended != []


def test_a_rank_that_dies_at_its_prompt_is_in_trouble_now(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Its peers wait in a collective. They are let go as soon as after any other death."""
    run, _ = run_of(monkeypatch, clock, None)
    run.take({1: wire.AtPrompt()})
    run.act()
    assert run.outcome.dead == {1}
    assert run.first_trouble == clock.now
    act_until(run, clock, clock.now + 2 * UNBLOCK_AFTER)
    assert run.outcome.unblocked_at is not None
