"""Rank 0 waits for the nodes of a world, in whatever order they come, and takes their answers."""

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gtrainer.devices import Launch
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.team import RanksError
from pytest_gtrainer.ranks.torchrun import follower, nodes
from pytest_gtrainer.ranks.torchrun.nodes import Nodes, RemoteRanks


def plan_of(size: int) -> wire.RankSetup:
    return wire.RankSetup(size, range(size), "cpu", "gloo", {}, (), "", (), None, {}, False)


def waiting_for(monkeypatch: pytest.MonkeyPatch, came: list[range]) -> Nodes:
    """Return rank 0's nodes in a run of 3 nodes of 2 ranks, to which ``came`` connect in turn."""
    monkeypatch.setenv("GT_TORCHRUN_KEY", "secret")
    monkeypatch.setattr(nodes, "connect", lambda: SimpleNamespace(set=lambda name, value: None))
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)
    made = Nodes(Launch(0, 6, 0, 2), print)
    made._server.close()

    def accept(seconds: float) -> bool:
        for ranks in came[len(made._nodes) :]:
            node: Any = SimpleNamespace(ranks=ranks, alive=True)
            made._nodes.append(node)
            return True
        return False

    monkeypatch.setattr(made, "_accept", accept)
    return made


@pytest.mark.parametrize(
    "came",
    [
        [range(2, 4), range(4, 6)],
        [range(4, 6), range(2, 4)],
        [range(3, 3), range(4, 6), range(5, 5), range(2, 4)],
    ],
    ids=["in order", "the last one first", "with processes that have no ranks"],
)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_a_world_waits_for_its_own_nodes(
    monkeypatch: pytest.MonkeyPatch, came: list[range], size: int
) -> None:
    """A node whose ranks are not of the world is no substitute for one whose ranks are."""
    made = waiting_for(monkeypatch, came)
    plan, _ = made.place(plan_of(size))
    covered = [*plan.ranks]
    for node in made._nodes_of(plan):
        covered += node.ranks
    assert set(range(size)) <= set(covered)


@pytest.mark.parametrize(
    ("came", "size", "missing"),
    [([range(4, 6)], 4, "ranks 2, 3"), ([range(4, 6)], 3, "rank 2"), ([], 6, "ranks 2-5")],
)
def test_the_ranks_whose_nodes_do_not_come_are_named(
    monkeypatch: pytest.MonkeyPatch, came: list[range], size: int, missing: str
) -> None:
    made = waiting_for(monkeypatch, came)
    for _ in range(2):  # the second time without waiting
        with pytest.raises(RanksError, match=f"the nodes of {missing} did not come within 300 s"):
            made.place(plan_of(size))


def test_a_node_that_came_late_is_there_for_the_next_world(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[range] = []
    made = waiting_for(monkeypatch, came)
    with pytest.raises(RanksError):
        made.place(plan_of(4))
    came.append(range(2, 4))
    assert made.place(plan_of(4))[0].ranks == range(2)


class SlowNode:
    """A node that answers each question one question late."""

    ranks = range(2, 4)
    alive = True

    def __init__(self) -> None:
        self.teams: dict[str, RemoteRanks] = {}
        self.asked: list[str] = []
        self.answered = 0

    def send(self, message: object) -> None:
        if isinstance(message, wire.ToTeam) and message.method == "stacks":
            self.asked.append(message.arguments[1])

    def pump(self, seconds: float = 0.0) -> None:
        """Answer the first question only when there is a second one."""
        while len(self.asked) > 1 and self.answered < len(self.asked):
            kind = self.asked[self.answered]
            self.answered += 1
            self.teams["team"].receive(wire.FromRank("team", None, {2: kind, 3: kind}))
            return


def test_a_late_answer_is_not_taken_for_one_to_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "STACKS_SECONDS", 0.05)
    node: Any = SlowNode()
    ranks = RemoteRanks(node, replace(plan_of(4), store="team"))
    assert ranks.stacks([2, 3], "calls") == {2: "", 3: ""}
    assert ranks.stacks([2, 3], "stack") == {2: "stack", 3: "stack"}
    assert ranks.stacks([2, 3], "dump") == {2: "dump", 3: "dump"}


@pytest.mark.parametrize(("size", "ranks"), [(3, [2]), (4, [2, 3]), (5, [2, 3]), (6, [2, 3])])
def test_a_node_starts_its_ranks_of_a_world_and_no_others(
    monkeypatch: pytest.MonkeyPatch, size: int, ranks: list[int]
) -> None:
    """The last rank of a world may be in the middle of a node."""
    monkeypatch.setattr(follower, "rank_environment", lambda config: {})
    monkeypatch.setattr(follower, "LocalRanks", lambda forkserver, plan: plan)
    pool = SimpleNamespace(plan=lambda size, *_: plan_of(size), forkserver=lambda: None)
    node: Any = SimpleNamespace(ranks=range(2, 4), pool=pool, config=None, teams={}, running={})
    follower._Follower._start(node, wire.StartTeam("team", size, {}))
    assert [*node.teams["team"].ranks] == ranks
    assert node.running == {"team": ranks}
    assert (node.teams["team"].size, node.teams["team"].store) == (size, "team")
