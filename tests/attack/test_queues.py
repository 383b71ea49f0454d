"""Queues of communicators: who waits for whom, in sentences, and schedules that cannot stop."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from pytest_gtrainer.attack.deadlock import find_waits
from pytest_gtrainer.attack.queues import (
    RECEIVE,
    SEND,
    Launch,
    Mismatch,
    Operation,
    Queues,
    Wait,
    orders_by_luck,
    rings_of_luck,
)


def collective(queue, ranks, where="", kind="all_reduce", payload="", **splits):
    return Launch((Operation(kind, tuple(ranks), payload, **splits),), queue, where)


def send(source, to, where="", payload="", queue="p"):
    return Launch((Operation(SEND, (source, to), payload),), queue, where)


def receive(source, to, where="", payload="", queue="p"):
    return Launch((Operation(RECEIVE, (source, to), payload),), queue, where)


def blocking(*launches):
    """A schedule that waits for each launch at once."""
    steps = []
    for launch in launches:
        steps += [launch, Wait(len(steps))]
    return steps


def started(*launches):
    """A schedule that starts all, and then waits for each in order."""
    return [*launches, *(Wait(place) for place in range(len(launches)))]


def run(*schedules):
    return Queues(dict(enumerate(schedules))).run().splitlines()


def a(where=""):
    return collective("a", (0, 1), where)


def b(where=""):
    return collective("b", (0, 1), where, "all_gather")


def test_two_ranks_that_wait_for_each_other():
    stuck = run(blocking(a("x of m"), b("y")), blocking(b(), a()))
    assert stuck == [
        "rank 0 waits in all_reduce of [0, 1] (x of m), which rank 1 has not reached",
        "rank 1 waits in all_gather of [0, 1], which rank 0 has not reached",
    ]
    assert run(started(a(), b()), started(b(), a())) == []
    assert run(blocking(a(), b()), started(b(), a())) == []


def test_what_leads_into_a_cycle_is_no_part_of_it():
    pair = [collective("d", (1, 2), "d"), collective("e", (1, 2), "e", "broadcast")]
    lone = collective("c", (0, 1), "c")
    stuck = run(blocking(lone), blocking(*pair, lone), blocking(*reversed(pair)))
    assert stuck == [
        "rank 1 waits in all_reduce of [1, 2] (d), which rank 2 has not reached",
        "rank 2 waits in broadcast of [1, 2] (e), which rank 1 has not reached",
    ]


def test_a_rank_that_has_ended_is_waited_for():
    assert run(blocking(a("x"), a("y")), blocking(a())) == [
        "rank 0 waits in all_reduce of [0, 1] (y), which rank 1 has not reached",
        "rank 1 has ended",
    ]
    # Also if nobody waits for it: the device does.
    assert run([a("x")], []) == [
        "rank 0 waits in all_reduce of [0, 1] (x), which rank 1 has not reached",
        "rank 1 has ended",
    ]


def test_a_launch_waits_behind_the_first_of_its_queue():
    first, second = send(0, 1, "s"), receive(1, 0, "r")
    assert run([first, second, Wait(1)], [receive(0, 1), Wait(0)]) == [
        "rank 0 waits in recv from 1 (r), which rank 1 has not reached",
        "rank 1 has ended",
    ]
    stuck = run([first, second, Wait(1)], blocking(send(1, 0, "t")))
    assert stuck == [
        "rank 0 waits in recv from 1 (r), behind send to 1 (s), which rank 1 has not reached",
        "rank 1 waits in send to 0 (t), which rank 0 has not reached",
    ]


def test_the_first_rank_that_is_not_there_is_named():
    everyone = collective("c", (0, 1, 2, 3), "c")
    assert run(blocking(everyone), blocking(everyone), [], []) == [
        "rank 0 waits in all_reduce of [0, 1, 2, 3] (c), which rank 2 has not reached",
        "rank 2 has ended",
    ]


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        (
            ([collective("a", (0, 1), "x")], [collective("a", (0, 1), "y", "broadcast")]),
            "rank 0 calls all_reduce of [0, 1] (x), where rank 1 calls broadcast of [0, 1] (y)",
        ),
        (
            ([collective("a", (0, 1), payload="f32[2]")], [collective("a", (0, 1), payload="i64")]),
            "rank 0 calls all_reduce of [0, 1] with f32[2], where rank 1 calls all_reduce of "
            "[0, 1] with i64",
        ),
        (
            ([send(0, 1, "s", "tag 0 f32[2]")], [receive(0, 1, "r", "tag 1 f32[2]")]),
            "rank 0 calls send to 1 with tag 0 f32[2] (s), where rank 1 calls recv from 0 with "
            "tag 1 f32[2] (r)",
        ),
        (
            ([collective("a", (0, 2))], []),
            "rank 0 calls all_reduce of [0, 2], and rank 2 has no graph",
        ),
        (([receive(7, 0)], []), "rank 0 calls recv from 7, and rank 7 has no graph"),
    ],
)
def test_ranks_that_call_what_does_not_fit(schedules, words):
    with pytest.raises(Mismatch) as caught:
        run(*schedules)
    assert str(caught.value) == words


@pytest.mark.parametrize("payloads", [("", "x"), ("x", ""), ("x", "x"), ("", "")])
def test_a_message_whose_payload_no_graph_shows_fits_any(payloads):
    assert run([send(0, 1, "", payloads[0])], [receive(0, 1, "", payloads[1])]) == []


def to_all(sent, received, where, ranks=(0, 1)):
    return collective("a", ranks, where, "all_to_all", sent=sent, received=received)


@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_each_rank_of_an_all_to_all_sends_what_the_other_expects(source, target):
    sizes = [[10 * one + other for other in range(3)] for one in range(3)]
    expected = [[sizes[one][own] for one in range(3)] for own in range(3)]

    def schedules():
        return [
            [to_all(tuple(sizes[rank]), tuple(expected[rank]), f"n{rank}", (0, 1, 2))]
            for rank in range(3)
        ]

    assert run(*schedules()) == []
    expected[target][source] += 100
    with pytest.raises(Mismatch) as caught:
        run(*schedules())
    assert str(caught.value) == (
        f"rank {source} sends {sizes[source][target]} elements to rank {target} in all_to_all of "
        f"[0, 1, 2] (n{source}), where rank {target} expects {sizes[source][target] + 100} "
        f"(n{target})"
    )
    for unknown in (sizes[source], expected[target]):
        kept = list(unknown)
        unknown[target if unknown is sizes[source] else source] = None
        assert run(*schedules()) == []
        unknown[:] = kept


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=60)
def test_what_all_ranks_do_in_one_order_never_stops(data):
    """And then only luck can keep launches in order that run together."""
    ranks = range(data.draw(st.integers(2, 4)))
    schedules = {rank: [] for rank in ranks}
    waiting = {rank: [] for rank in ranks}
    for _ in range(data.draw(st.integers(1, 8))):
        of = sorted(data.draw(st.sets(st.sampled_from(ranks), min_size=2)))
        if data.draw(st.booleans()):
            ends = send(of[0], of[-1], queue=str(of)), receive(of[0], of[-1], queue=str(of))
            launches = dict(zip((of[0], of[-1]), ends, strict=True))
        else:
            launches = dict.fromkeys(of, collective(f"group {of}", of))
        for rank, launch in launches.items():
            waiting[rank].append(len(schedules[rank]))
            schedules[rank].append(launch)
            if data.draw(st.booleans()):
                schedules[rank] += map(Wait, waiting[rank])
                waiting[rank].clear()
    assert Queues(schedules).run() == ""
    assert list(orders_by_luck(schedules)) == list(rings_of_luck(schedules)) == []
    # A rank that leaves one out is waited for, or calls another one in its place.
    rank = data.draw(st.sampled_from([each for each in ranks if schedules[each]]))
    places = [place for place, step in enumerate(schedules[rank]) if isinstance(step, Launch)]
    missing = data.draw(st.sampled_from(places))
    launches = [schedules[rank][place] for place in places if place != missing]
    assert find_waits({**schedules, rank: launches})


def test_an_order_that_only_luck_keeps_is_said_once_for_two_ranks():
    together, apart = started(a("x"), b("y")), started(b(), a())
    words = (
        "rank 0 starts all_reduce of [0, 1] (x) before all_gather of [0, 1] (y), rank 1 after it, "
        "and nobody waits between them"
    )
    assert list(orders_by_luck({0: together, 1: apart})) == [words]
    assert list(orders_by_luck({0: blocking(a(), b()), 1: blocking(b(), a())})) == []
    assert list(orders_by_luck({0: together, 1: together})) == []
    assert list(orders_by_luck({0: together, 1: []})) == []
    # The second of two calls in each queue, and a third rank with which nothing is said.
    twice = started(a(), b(), a("x"), b("y")), started(a(), b(), b(), a())
    assert list(orders_by_luck({0: twice[0], 1: twice[1], 2: []})) == [words]
    one_queue = collective("a", (0, 1), "", "all_gather")
    assert list(orders_by_luck({0: started(a(), one_queue), 1: started(a(), one_queue)})) == []


@pytest.mark.parametrize("together", [0, 1])
def test_several_orders_of_two_ranks_are_said_once_whoever_does_not_wait(together):
    launches = [collective(name, (0, 1), name) for name in "abc"]
    schedules = {together: started(*launches), 1 - together: blocking(*reversed(launches))}
    assert len(list(orders_by_luck(schedules))) == 1


def test_a_wait_for_one_launch_leaves_the_others_running():
    c = collective("c", (0, 1), "z", "broadcast")
    mixed = [a("x"), b("y"), Wait(1), c, Wait(0), Wait(3)]
    other = [c, a(), b(), Wait(0), Wait(1), Wait(2)]
    assert list(orders_by_luck({0: mixed, 1: other})) == [
        "rank 0 starts all_reduce of [0, 1] (x) before broadcast of [0, 1] (z), rank 1 after it, "
        "and nobody waits between them"
    ]


def pair(one, two, kind="all_reduce"):
    return collective(f"{one}{two}", (one, two), f"{one}{two}", kind)


def ring(size, waits=()):
    """Each rank starts what it shares with the one before, then with the one behind."""
    schedules = {}
    for rank in range(size):
        ends = sorted((rank, (rank - 1) % size)), sorted((rank, (rank + 1) % size))
        launches = [pair(*end) for end in ends]
        schedules[rank] = blocking(*launches) if rank in waits else started(*launches)
    return schedules


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_ring_of_launches_names_what_luck_keeps(size):
    [words] = rings_of_luck(ring(size))
    assert words.endswith(": a ring, and nobody waits between them")
    parts = words.removesuffix(": a ring, and nobody waits between them").split(", rank ")
    named = {"rank " + part.removeprefix("rank ") for part in parts}
    expected = set()
    for rank in range(size):
        ends = []
        for other in ((rank - 1) % size, (rank + 1) % size):
            one, two = sorted((rank, other))
            ends.append(f"all_reduce of [{one}, {two}] ({one}{two})")
        expected.add(f"rank {rank} starts {ends[0]} before {ends[1]}")
    assert named == expected
    assert list(orders_by_luck(ring(size))) == []
    # All that wait are a deadlock, which is found by running; one that does not is luck.
    assert Queues(ring(size)).run() == ""
    assert Queues(ring(size, range(size))).run() != ""
    [words] = rings_of_luck(ring(size, range(1, size)))
    assert words.startswith("rank 0 starts ")
    assert words.count(" starts ") == 1


def test_a_chain_and_one_queue_are_no_ring():
    chain = ring(4)
    del chain[3]
    chain[0] = [pair(0, 1), Wait(0)]
    assert list(rings_of_luck(chain)) == []
    same = [collective("a", (0, 1), name, name) for name in ("x", "y")]
    assert list(rings_of_luck({0: started(*same), 1: started(*same)})) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_messages_that_are_started_together_run_in_any_order(order):
    ends = [(Operation(SEND, (0, 1)), Operation(RECEIVE, (0, 1)))]
    ends += [(Operation(RECEIVE, (1, 0)), Operation(SEND, (1, 0)))]
    ends += [(Operation(SEND, (0, 2)), None)]
    first = Launch(tuple(ends[place][0] for place in order), "g", "batch")
    second = Launch((ends[1][1], ends[0][1]), "g", "other")
    third = Launch((Operation(RECEIVE, (0, 2)),), "g")
    assert run(blocking(first), blocking(second), blocking(third)) == []
    assert run(blocking(first), blocking(second), []) == [
        "rank 0 waits in send to 2 (batch), which rank 2 has not reached",
        "rank 2 has ended",
    ]


def test_operations_in_words():
    assert str(Operation(SEND, (3, 5))) == "send to 5"
    assert str(Operation(RECEIVE, (3, 5))) == "recv from 3"
    assert str(Operation("broadcast", (3, 5))) == "broadcast of [3, 5]"
    own = Operation("all_to_all", (0, 1), sent=(1, 2), received=(3, 4))
    assert own == Operation("all_to_all", (0, 1))
