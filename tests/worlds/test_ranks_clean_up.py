"""A step of a clean-up that fails, or that Ctrl-C ends, does not keep the others from running."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gtrainer.devices import Launch
from pytest_gtrainer.ranks import pool
from pytest_gtrainer.ranks.pool import Pool
from pytest_gtrainer.ranks.team import Team
from pytest_gtrainer.ranks.torchrun.follower import _Follower

STEPS = ("the devices", "team 2", "team 1", "the forkserver")


class Steps:
    """Records the steps of a clean-up; those in ``failing`` raise."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.done: list[str] = []

    def __call__(self, name: str) -> Callable[[], list[str]]:
        def step() -> list[str]:
            self.done.append(name)
            if name in self.failing:
                raise KeyboardInterrupt(name)
            return [f"{name} had a problem"]

        return step


def pool_of(steps: Steps, config: pytest.Config) -> Any:
    """Return a pool with two teams, whose parts only record how they end."""
    made: Any = Pool(config)
    for name in ("team 1", "team 2"):
        made._teams[name] = SimpleNamespace(stop=steps(name), last_test=f"test of {name}")
    made._server = SimpleNamespace(close=steps("the forkserver"))
    made._sharing = SimpleNamespace(close=steps("the devices"))
    return made


@pytest.mark.parametrize("failing", STEPS)
def test_the_pool_ends_everything(pytestconfig: pytest.Config, failing: str) -> None:
    steps = Steps(failing)
    made = pool_of(steps, pytestconfig)
    with pytest.raises(KeyboardInterrupt, match=failing):
        made.close()
    assert tuple(steps.done) == STEPS
    assert (made._teams, made._server, made._sharing) == ({}, None, None)
    made.close()  # everything is over
    assert tuple(steps.done) == STEPS
    teams = [name for name in ("team 2", "team 1") if name != failing]
    assert made.problems == [(f"test of {name}", f"{name} had a problem") for name in teams]


@pytest.mark.parametrize("failing", ["part 0", "part 1", "part 2"])
def test_a_team_kills_each_of_its_parts(failing: str) -> None:
    steps = Steps(failing)
    parts: list[Any] = [SimpleNamespace(kill=steps(f"part {number}")) for number in range(3)]
    team = Team(3, parts, iter(()))
    with pytest.raises(KeyboardInterrupt, match=failing):
        team.kill()
    team.kill()
    assert steps.done == ["part 0", "part 1", "part 2"]


def test_ranks_are_killed_if_those_on_other_nodes_cannot_start(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the other nodes fails: the ranks here and on the first one end."""
    steps = Steps()

    def start(plan: object) -> Any:
        yield SimpleNamespace(kill=steps("there"))
        raise KeyboardInterrupt("the second node")

    here = SimpleNamespace(kill=steps("here"), stores=iter(()))
    monkeypatch.setattr(pool, "LocalRanks", lambda server, plan: here)
    nodes: Any = SimpleNamespace(place=lambda plan: (plan, iter(())), start=start)
    made = Pool(pytestconfig, nodes)
    monkeypatch.setattr(made, "forkserver", lambda: None)
    with pytest.raises(KeyboardInterrupt, match="the second node"):
        made._team(2, {}, 1.0)
    assert steps.done == ["here", "there"]


@pytest.mark.parametrize("failing", ["team 1", "team 2", "the pool"])
def test_a_node_whose_rank_0_is_gone_ends_all_its_ranks(
    pytestconfig: pytest.Config, failing: str
) -> None:
    steps = Steps(failing)

    def send(message: object) -> None:
        raise EOFError

    line: Any = SimpleNamespace(send=send)
    follower: Any = _Follower(Launch(2, 4, 0, 2), pytestconfig, line)
    follower.teams = {name: SimpleNamespace(kill=steps(name)) for name in ("team 1", "team 2")}
    follower.pool = SimpleNamespace(close=steps("the pool"))
    with pytest.raises(KeyboardInterrupt, match=failing):
        follower.serve()
    assert sorted(steps.done) == ["team 1", "team 2", "the pool"]
    assert steps.done[-1] == "the pool"
