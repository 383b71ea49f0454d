"""Ranks and groups that a command has left, and failures that are one: by table."""

from types import SimpleNamespace

import pytest

from pytest_gtrainer.ranks import pool, wire
from pytest_gtrainer.ranks.answers import collective_of, depth_of_collective
from pytest_gtrainer.ranks.watch import UNBLOCK_AFTER, RanksOutcome

FIT = wire.GroupState(True, 1)


def outcome(*states, **more):
    answers = {rank: wire.ItemDone((), (), None, state) for rank, state in enumerate(states)}
    return RanksOutcome(len(states), answers, **more)


@pytest.mark.parametrize(
    ("states", "more", "condition"),
    [
        ([FIT, FIT], {}, "fit"),
        ([FIT, FIT._replace(subgroups=1)], {}, "with subgroups"),
        ([FIT._replace(shared=True), FIT._replace(shared=True, subgroups=2)], {}, "fit"),
        ([FIT, FIT._replace(groups_made=2)], {}, "disagreeing"),
        ([FIT._replace(issued={"dp": 3}), FIT._replace(issued={"dp": 2})], {}, "disagreeing"),
        ([FIT._replace(messages={"dp": 1}), FIT], {}, "disagreeing"),
        ([FIT, FIT._replace(kinds={"dp": {3: 1}})], {}, "fit"),
        (
            [FIT._replace(kinds={"dp": {3: 1, 4: 7}}), FIT._replace(kinds={"dp": {4: 8}})],
            {},
            "disagreeing",
        ),
        ([FIT, FIT._replace(intact=False)], {}, "left"),
        ([FIT._replace(shared=True), FIT._replace(intact=False)], {}, "killed"),
        ([FIT, FIT], {"unblocked_at": 1.0}, "left"),
        ([FIT, FIT], {"killed": True}, "killed"),
        ([FIT, FIT._replace(broken=True)], {}, "killed"),
        ([FIT, FIT._replace(broken=True)], {"dead": {0}}, "dead"),
    ],
)
def test_the_worst_rank_is_what_a_team_is_worth(states, more, condition):
    """Whichever rank it is."""
    assert outcome(*states, **more).condition() == condition
    assert outcome(*states[::-1], **more).condition() == condition


@pytest.mark.parametrize(
    ("apart", "is_one"), [(0.0, True), (UNBLOCK_AFTER / 2, True), (4 * UNBLOCK_AFTER, False)]
)
@pytest.mark.parametrize("sign", [1, -1], ids=["later", "earlier"])
def test_failures_alike_within_moments_are_one(apart, is_one, sign):
    """And those of long ago are others, as those of long after."""
    times = 10.0, 10.0 + sign * apart
    raised = {
        rank: wire.Raised(time, "Error: x", False, None, None, (("t.py", 3),))
        for rank, time in enumerate(times)
    }
    found = RanksOutcome(2, raised=raised)
    assert [found.failed_at(rank) for rank in (0, 1)] == ([min(times)] * 2 if is_one else [*times])


@pytest.mark.parametrize(
    ("waiting_in", "said", "is_like"),
    [
        (None, "Error: 8", True),  # values differ from rank to rank
        (None, "Other: 7", False),
        ("barrier", "Error: 7", True),
        ("barrier", "Error: 8", False),  # the words of a collective may not
    ],
)
def test_which_failures_are_alike(waiting_in, said, is_like):
    one = wire.Raised(1.0, "Error: 7", False, waiting_in, None, (("t.py", 3),))
    assert one.is_like(one._replace(summary=said, time=9.0)) == is_like
    assert not one.is_like(one._replace(place=(("t.py", 4),)))
    assert not one.is_like(one._replace(waiting_in="all_reduce"))


def test_the_teams_that_were_used_longest_ago_are_stopped(monkeypatch):
    """Teams end until there is room, and those that are gone do not count."""
    monkeypatch.setattr(pool.devices, "resolve", lambda config: SimpleNamespace(slots=4))
    stopped = []
    teams = {key: SimpleNamespace(size=key, alive=key != 3) for key in (2, 3, 4, 1)}
    ranks = SimpleNamespace(_teams=teams, _config=None, _stop=stopped.append)
    most = pool.IDLE_FACTOR * 4
    pool.Pool._make_room(ranks, most - 7)
    assert (stopped, list(ranks._teams)) == ([], [2, 4, 1])
    pool.Pool._make_room(ranks, most - 6)
    assert ([team.size for team in stopped], list(ranks._teams)) == ([2], [4, 1])
    pool.Pool._make_room(ranks, 4)
    assert ([team.size for team in stopped], list(ranks._teams)) == ([2, 4], [1])


IN_TEST = ("/u/test_it.py", "test_it")
IN_C10D = ("/x/torch/distributed/distributed_c10d.py", "all_reduce")
IN_WRAPPER = ("/x/torch/distributed/c10d_logger.py", "wrapper")
IN_OPERATOR = ("/x/torch/_ops.py", "__call__")
IN_FUNCTIONAL = ("/x/torch/distributed/_functional_collectives.py", "wait_tensor")
IN_FSDP = ("/x/torch/distributed/fsdp/_state.py", "wait")


@pytest.mark.parametrize(
    ("frames", "name", "depth"),
    [
        ([], None, 0),
        ([IN_TEST], None, 0),
        ([IN_OPERATOR, IN_TEST], None, 1),
        ([IN_C10D, IN_WRAPPER, IN_TEST], "all_reduce", 2),
        ([(IN_C10D[0], "_store_based"), IN_C10D, IN_WRAPPER, IN_TEST], "all_reduce", 3),
        ([IN_OPERATOR, IN_FUNCTIONAL, IN_TEST], "wait_tensor", 2),
        ([IN_FSDP, IN_TEST], "wait", 0),
        # A thread of torch's own has no frame of anybody else.
        ([IN_C10D, IN_WRAPPER], "all_reduce", 2),
    ],
    ids=str,
)
def test_the_collective_of_a_stack(frames, name, depth):
    """That which the user called; its own frames are the innermost."""
    assert collective_of(frames) == name
    assert depth_of_collective(frames) == depth
