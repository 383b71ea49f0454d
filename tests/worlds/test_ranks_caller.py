"""``gt_ranks.run``: the test stays in the parent, a function runs on the ranks."""

from __future__ import annotations

import re

import pytest

SUITE = '''
import fcntl, os, signal, sys, termios, threading, time
import pytest
from late import dist, torch
from pytest_gtrainer import facts
from pytest_gtrainer.worlds.ranks import progress
from pytest_gtrainer.worlds.ranks.caller import RankError

progress.EVERY_SECONDS = 0.5

def summed(number):
    value = torch.full((3,), number * (1.0 + dist.get_rank()))
    dist.all_reduce(value)
    print("summed", number)
    facts.emit("verdict", outcome="equal")
    return value, dist.get_rank(), dist.get_world_size(), os.getpid()

def raises_on(rank):
    if dist.get_rank() == rank:
        raise LookupError("nothing there")
    dist.barrier()

def exits_on(rank):
    if dist.get_rank() == rank:
        os._exit(4)
    dist.barrier()

def hangs_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()

def gives_a_lambda():
    return lambda: None

def test_results_in_the_order_of_ranks(gt_ranks):
    assert not dist.is_initialized()
    results = gt_ranks.run(summed, 2.0, size=3)
    assert [rank for _, rank, _, _ in results] == [0, 1, 2]
    assert all(value.equal(torch.full((3,), 12.0)) for value, *_ in results)
    assert [pid for *_, pid in gt_ranks.run(summed, 1.0, size=3)] == [pid for *_, pid in results]

@pytest.mark.gt_world("ranks", size=2)
def test_size_of_the_marker(gt_world, gt_ranks):
    assert gt_world.rank is None and gt_world.size == 2
    assert [size for _, _, size, _ in gt_ranks.run(summed, 1.0)] == [2, 2]

def test_size_of_the_run(gt_ranks):
    assert len(gt_ranks.run(summed, 1.0)) == 4

def test_exception(gt_ranks):
    with pytest.raises(RankError, match="rank 1 raised LookupError: nothing there") as caught:
        gt_ranks.run(raises_on, 1)
    assert caught.value.rank == 1
    assert "in raises_on" in caught.value.remote_traceback
    assert "commands.py" not in caught.value.remote_traceback
    gt_ranks.run(summed, 1.0)

def test_death(gt_ranks):
    with pytest.raises(RankError, match="rank 2 exited with status 4") as caught:
        gt_ranks.run(exits_on, 2)
    assert caught.value.rank == 2
    gt_ranks.run(summed, 1.0)

def dies_later(rank):
    if dist.get_rank() == rank: threading.Timer(0.2, os._exit, [3]).start()
    return os.getpid()

def test_death_between_calls(gt_ranks):
    pid = gt_ranks.run(dies_later, 1)[1]
    while os.path.exists(f"/proc/{pid}"): time.sleep(0.05)
    time.sleep(0.2)
    assert pid not in gt_ranks.run(os.getpid)

@pytest.mark.gt_world("ranks", size=2, timeout=1.5)
def test_limit(gt_ranks):
    with pytest.raises(RankError, match=r"rank 0 did not end within 1.5 s, at test_it.py:\\d+ in hangs_on"):
        gt_ranks.run(hangs_on, 0)
    gt_ranks.run(summed, 1.0)

LARGE = 100 * 2**20

def once_part_of_the_answer_is_sent(do, *arguments):
    main = threading.main_thread().ident
    def has_sent():
        there = sys._current_frames()[main].f_locals
        if len(there.get("rest", "")) <= LARGE: return False
        return any(fcntl.ioctl(there["self"]._outgoing, termios.FIONREAD, bytes(4)))
    def watch():
        while not has_sent(): time.sleep(0.0001)
        do(*arguments)
    threading.Thread(target=watch, daemon=True).start()
    return bytes(LARGE)

def stops_while_it_answers():
    if dist.get_rank() == 1:
        return once_part_of_the_answer_is_sent(os.kill, os.getpid(), signal.SIGSTOP)

@pytest.mark.gt_world("ranks", size=2, timeout=4)
def test_stopped_while_it_answers(gt_ranks):
    with pytest.raises(RankError, match="rank 1 did not end within 4 s"):
        gt_ranks.run(stops_while_it_answers)
    gt_ranks.run(summed, 1.0)

def dies_while_it_answers():
    if dist.get_rank() == 1:
        if os.fork() == 0:
            os.setsid()
            end = time.monotonic() + 60
            while not os.path.exists("told") and time.monotonic() < end: time.sleep(0.05)
            os._exit(0)
        return once_part_of_the_answer_is_sent(os._exit, 4)

def test_dies_while_it_answers_and_leaves_a_child(gt_ranks):
    with pytest.raises(RankError, match="rank 1 exited with status 4"):
        gt_ranks.run(dies_while_it_answers, size=2)
    with open("told", "w"): gt_ranks.run(summed, 1.0, size=2)

def test_numbers_of_dead_ranks_that_new_ones_get(gt_ranks):
    gt_ranks.run(os.getpid, size=1)
    free = [pid for pid in range(os.getpid(), os.getpid() + 20_000) if not os.path.exists(f"/proc/{pid}")]
    gt_ranks._pool._running_server().exit_status.update(dict.fromkeys(free, 0))
    assert len(gt_ranks.run(os.getpid, size=3)) == 3

class Struck(Exception): pass

def sleeps(seconds, said):
    time.sleep(seconds)
    return said

def test_struck_by_a_limit_of_another_kind(gt_ranks):
    def strike(*_): raise Struck
    gt_ranks.run(sleeps, 0, "warm", size=2)
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(Struck):
        gt_ranks.run(sleeps, 1.5, "old", size=2)
    assert gt_ranks.run(sleeps, 0, "new", size=2) == ["new", "new"]

def children_of(pid):
    try:
        return open(f"/proc/{pid}/task/{pid}/children").read().split()
    except OSError:
        return []

def test_struck_while_ranks_start(gt_ranks, monkeypatch):
    def strike(*_): raise Struck
    forkserver = gt_ranks.run(os.getppid, size=1)[0]
    before = children_of(forkserver)
    monkeypatch.setenv("SLOW_START", "5")
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    with pytest.raises(Struck):
        gt_ranks.run(os.getpid, size=3)
    assert set(children_of(forkserver)) <= set(before)
    monkeypatch.delenv("SLOW_START")
    assert len(gt_ranks.run(os.getpid, size=3)) == 3

def test_lambda(gt_ranks):
    with pytest.raises(TypeError, match="define it with def at the top level of the test file"):
        gt_ranks.run(lambda: 1)

def test_argument_that_cannot_be_sent(gt_ranks):
    with pytest.raises(TypeError, match="summed or its arguments cannot be sent"):
        gt_ranks.run(summed, lambda: 1)

def test_result_that_cannot_be_sent(gt_ranks):
    with pytest.raises(RankError, match="the result, of type function, cannot be pickled"):
        gt_ranks.run(gives_a_lambda)

@pytest.mark.parametrize("size", [0, -1, 1.0, True])
def test_bad_size(gt_ranks, size):
    with pytest.raises(ValueError, match="size is a whole number, 1 or more"):
        gt_ranks.run(summed, 1.0, size=size)

def environment():
    return os.environ.get("GT_EXAMPLE"), os.getpid()

def test_environment(gt_ranks, monkeypatch):
    before = gt_ranks.run(environment, size=2)
    monkeypatch.setenv("GT_EXAMPLE", "1")
    assert [value for value, _ in gt_ranks.run(environment, size=2)] == ["1", "1"]
    monkeypatch.delenv("GT_EXAMPLE")
    assert gt_ranks.run(environment, size=2) == before == [(None, pid) for _, pid in before]

def test_size_too_large(gt_ranks):
    gt_ranks.run(summed, 1.0, size=5)

def test_fails(gt_ranks):
    gt_ranks.run(raises_on, 0, size=1)

@pytest.mark.parametrize("turn, size", enumerate([1, 2, 3, 1, 2, 3, 4, 1]))
def test_many_sizes(gt_ranks, turn, size):
    print("pids", *gt_ranks.run(os.getpid, size=size))
    forkserver = gt_ranks.run(os.getppid, size=1)[0]
    with open(f"/proc/{forkserver}/task/{forkserver}/children") as children:
        assert len(children.read().split()) <= 8
'''


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    return module_suite.run("--gt-gpus=4", "-rs")


def test_functions_on_ranks(run):
    wrong = {name: run.text(name) for name in run.reports if run.outcome(name) not in ("passed", "skipped")}
    assert wrong.keys() == {"test_fails"}, wrong
    assert len(run.reports) == 30
    assert run.outcome("test_size_too_large") == "skipped"
    assert "needs 5 ranks, --gt-gpus gives 4" in run.output
    call = run.reports["test_results_in_the_order_of_ranks"]["call"]
    assert call["facts"] == [{"kind": "verdict", "outcome": "equal"}] * 2
    assert call["output"] == "".join(f"[rank {rank}] summed {n}\n" for n in (2.0, 1.0) for rank in range(3))
    assert run.left_over() == []


def test_a_failed_call_shows_the_remote_traceback_and_none_of_our_frames(run):
    assert "in raises_on" in run.text("test_fails")
    assert "caller.py" not in run.text("test_fails")


def test_a_long_wait_names_the_ranks_that_are_waited_for(run):
    """A line every so often, where the run has a terminal."""
    where = r"at test_it.py:\d+ in hangs_on \(rank 0\), waiting in barrier \(rank 1\)"
    assert re.search(r"gtrainer: test_it.py::test_limit has run for \d s of 1.5: " + where, run.output), run.output


def test_worlds_of_many_sizes_stay_within_a_limit(run):
    """Idle ranks are kept up to twice the slots; the least recently used go first."""
    sizes = enumerate([1, 2, 3, 1, 2, 3, 4, 1])
    pids = [run.reports[f"test_many_sizes[{turn}-{size}]"]["call"]["output"] for turn, size in sizes]
    assert pids[0] == pids[3] == pids[7]
    assert pids[1:3] == pids[4:6]
