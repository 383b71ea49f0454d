"""What a test, or a whole run, leaves behind does not disturb the next one; and a merge without any report."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from pytest_gtrainer._torch.passes import extra_group
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.merge import reports_of
from pytest_gtrainer.ranks.watch import Incident, RanksOutcome


@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("time", range(3))
def test_an_extra_group_is_made_again_under_its_name(gt_world, time):
    """Its members must not find the addresses of the one that the test before has left in the store."""
    name = extra_group(dist.group.WORLD.group_name)
    assert name.startswith(dist.group.WORLD.group_name)
    assert all_reduce(torch.ones(3), "sum", name).tolist() == [3.0] * 3


def test_two_pytest_runs_in_one_process(pytester):
    """As tests of plugins make them: the second forgets what the first has imported."""
    pytester.makepyfile(
        test_outer="""
        INNER = "import pytest\\n@pytest.mark.gt_world('ranks', size=2)\\ndef test_it(gt_world): pass"

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
    told = {rank: wire.Raised(time, f"Error: {rank}", False, "all_reduce", None)
            for rank, time in ((0, 2.0), (1, 1.0))}  # fmt: skip
    incidents = [Incident(5.0, rank, f"rank {rank} did not end", is_consequence=True) for rank in (0, 1)]
    outcome = RanksOutcome(2, raised=told, incidents=incidents, dead={0, 1}, killed=True, unblocked_at=0.5)
    failed = next(report for report in reports_of(request.node, outcome) if report.failed)
    assert str(failed.longrepr).startswith("rank 1 raised Error: 1")
    assert "did not end" in str(failed.longrepr)
