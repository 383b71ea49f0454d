"""A test, or a whole run, does not disturb the next one; a merge without any report."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from pytest_gtrainer._torch.passes import extra_group
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.caller import RankError
from pytest_gtrainer.ranks.inside import session
from pytest_gtrainer.ranks.merge import reports_of
from pytest_gtrainer.ranks.watch import Incident, RanksOutcome

pytestmark = pytest.mark.second_tier


@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("turn", range(3))
def test_an_extra_group_is_made_again_under_its_name(gt_world, turn):
    """Its members must not find the addresses of the one that the test before has left in the
    store.
    """
    name = extra_group(dist.group.WORLD.group_name)
    assert name.startswith(dist.group.WORLD.group_name)
    assert all_reduce(torch.ones(3), "sum", name).tolist() == [3.0] * 3


def test_two_pytest_runs_in_one_process(pytester):
    """Tests of plugins do this: the second run forgets the modules that the first imported."""
    pytester.makepyfile(
        test_outer="""
        INNER = "import pytest\\n@pytest.mark.gt_world('ranks', size=2)\\n"
        INNER += "def test_it(gt_world): pass"

        def test_twice(pytester):
            pytester.makepyfile(INNER)
            for _ in range(2):
                pytester.runpytest_inprocess().assert_outcomes(passed=1)
        """
    )
    # in a process of its own: here the modules may have been imported before
    pytester.runpytest_subprocess("-p", "pytester").assert_outcomes(passed=1)


def test_a_failure_of_which_no_rank_gave_a_report_names_what_was_told_first(request):
    """Each rank was waiting for another one and had to be killed."""
    exceptions = {
        rank: wire.Raised(when, f"Error: {rank}", False, "all_reduce", None)
        for rank, when in ((0, 2.0), (1, 1.0))
    }
    incidents = [
        Incident(5.0, rank, f"rank {rank} did not end", is_consequence=True) for rank in (0, 1)
    ]
    outcome = RanksOutcome(
        2, raised=exceptions, incidents=incidents, dead={0, 1}, killed=True, unblocked_at=0.5
    )
    failed = next(report for report in reports_of(request.node, outcome) if report.failed)
    assert str(failed.longrepr).startswith("rank 1 raised Error: 1")
    assert "did not end" in str(failed.longrepr)


def failed(time, *, line=3, said="Error: x", waiting_in=None):
    return wire.Raised(time, said, False, waiting_in, None, (("test_it.py", line),))


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ([failed(1.2), failed(1.1), failed(1.0)], 0),
        (
            [failed(1.1, said="Error: 7"), failed(1.0, said="Error: 8")],
            0,
        ),  # values differ from rank to rank
        ([failed(1.1, said="Other: x"), failed(1.0)], 1),
        ([failed(1.1, line=4), failed(1.0)], 1),
        ([failed(1.5), failed(1.0)], 1),
        (
            [
                failed(1.1, said="Error: closed", waiting_in="barrier"),
                failed(1.0, waiting_in="barrier"),
            ],
            1,
        ),
        ([failed(1.1, waiting_in="barrier"), failed(1.0, waiting_in="barrier")], 0),
    ],
)
def test_of_ranks_that_fail_alike_at_once_the_lowest_is_shown(request, raised, shown):
    """T1: at one moment, which was earlier is luck; else others may follow from the earliest."""
    config, node = request.config, request.node
    sent = [
        pytest.TestReport(node.nodeid, node.location, {}, "failed", f"rank {rank}'s", "call")
        for rank in (0, 1, 2)
    ]
    reports = [
        config.hook.pytest_report_to_serializable(config=config, report=each)
        for each in sent[: len(raised)]
    ]
    done = {
        rank: wire.ItemDone((report,), (), None, wire.GroupState(True, 1))
        for rank, report in enumerate(reports)
    }
    outcome = RanksOutcome(len(raised), done, dict(enumerate(raised)))
    merged = next(report for report in reports_of(request.node, outcome) if report.failed)
    assert str(merged.longrepr).startswith(f"rank {shown}'s")


def all_fail():
    time.sleep(0.05 * (2 - dist.get_rank()))
    raise ValueError(f"of rank {dist.get_rank()}")


def test_of_functions_that_fail_alike_the_lowest_rank_is_told(gt_ranks):
    with pytest.raises(RankError, match="rank 0 raised ValueError: of rank 0") as raised_here:
        gt_ranks.run(all_fail, size=3)
    assert raised_here.value.rank == 0


@pytest.mark.parametrize(("broken", "condition"), [(False, "fit"), (True, "killed")])
def test_ranks_are_ended_behind_an_error_on_a_gpu(broken, condition):
    """The process of that rank can launch nothing more, and the next test would be blamed."""
    states = wire.GroupState(True, 1), wire.GroupState(not broken, 1, broken=broken)
    done = {rank: wire.ItemDone((), (), None, state) for rank, state in enumerate(states)}
    assert RanksOutcome(2, done).condition() == condition


class Event:
    """One of CUDA's: done, under way for ever, or behind a kernel that has failed."""

    def __init__(self, answer):
        self.record, self.answer = lambda: None, answer

    def query(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_kernel_that_fails_behind_the_last_line_fails_the_test(monkeypatch):
    """A GPU is played: tests/gpu/test_devices.py has a real one."""
    answers = [True, False, RuntimeError("CUDA error: device-side assert triggered\nmore words")]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(answers.pop(0)))
    monkeypatch.setattr(session, "GPU_LIMIT", 0.01)
    session.wait_for_gpu()
    session.wait_for_gpu()  # that never ends is not waited for without end
    message = "a kernel that the test left running: CUDA error: device-side assert triggered"
    with pytest.raises(pytest.fail.Exception) as caught:
        session.wait_for_gpu()
    assert str(caught.value) == f"{message}; CUDA_LAUNCH_BLOCKING=1 shows which"


GOES_ON = """
import os, time, pathlib, pytest, torch
import torch.distributed as dist

def ranks(size):
    return pytest.mark.gt_world("ranks", size=size)

@ranks(2)
def test_of_two(gt_world):
    pathlib.Path(f"pid{gt_world.rank}").write_text(str(os.getpid()))

@ranks(3)
def test_of_three(gt_world):
    pass

@ranks(3)
def test_fails(gt_world):
    assert gt_world.size == 2

@ranks(2)
def test_of_two_again(gt_world):
    assert pathlib.Path(f"pid{gt_world.rank}").read_text() == str(os.getpid())

@ranks(2)
def test_goes_on_behind_a_subtest(gt_world, subtests):
    with subtests.test("of one rank"):
        assert gt_world.rank == 1
    if gt_world.rank == 1:
        time.sleep(11)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 3, "the end of the test"

@ranks(2)
def test_waits_for_a_rank_that_left_in_a_subtest(gt_world, subtests):
    with subtests.test("of all"):
        assert gt_world.rank == 1, "left"
        dist.barrier()
"""


def test_a_failure_ends_no_ranks_that_have_nothing_to_do_with_it(suite):
    """Neither ranks of another size for a second run on fresh ones, nor those that go on behind a
    subtest (T1).
    """
    suite.write("test_it.py", GOES_ON)
    run = suite.run("--gt-fresh-ranks=on-failure", "--gt-gpus=8")
    assert run.outcome("test_of_two_again") == "passed", run.output
    assert "fails on fresh ranks, too" in run.text("test_fails")
    assert run.outcome("test_goes_on_behind_a_subtest") == "failed"
    assert "the end of the test" in run.output, "both ranks came there"
    assert "did not end" not in run.text("test_goes_on_behind_a_subtest")
    text = run.text("test_waits_for_a_rank_that_left_in_a_subtest")
    assert "left" in text
    assert "barrier" in text
