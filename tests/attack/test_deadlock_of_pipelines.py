"""The graphs of all stages and ranks, in the order of torch's schedules, do not wait for ever."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from fixtures.pipeline_graphs import graphs_of_steps, steps_of
from fixtures.training import staged_training
from pytest_gtrainer import Deadlock, assert_no_deadlock
from pytest_gtrainer._torch.fake_groups import fake_group_beside, new_group_names
from pytest_gtrainer._torch.process_groups import group_ranks

pytestmark = pytest.mark.second_tier

STAGES = {
    "GPipe": 2,
    "1F1B": 2,
    "Interleaved1F1B": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
}


def all_ranks(schedule, change=lambda rank, steps: steps, *, stages=None, pp=2, dp=2):
    """Return the graphs of each rank, and the ranks of all groups."""
    graphs, groups, names = {}, {}, new_group_names()
    for rank in range(pp * dp):
        with fake_group_beside(rank, pp * dp, names):
            mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
            config = staged_training(mesh, "bf16_fp32", schedule, stages=stages or STAGES[schedule])
            graphs[rank] = graphs_of_steps(config, change(rank, steps_of(config)))
            for name in ("pp", "dp"):
                group = mesh.get_group(name).group_name
                groups[group] = [group_ranks(group)]
    return graphs, {name: ranks for name, ranks in groups.items() if len(ranks[0]) > 1}


@pytest.mark.parametrize("schedule", STAGES)
def test_the_graphs_of_a_schedule_do_not_wait_for_ever(schedule):
    """Q5: unshard, forward, dI, dW and reduce of all stages, over two pipelines with two shards."""
    graphs, groups = all_ranks(schedule)
    assert assert_no_deadlock(graphs, groups=groups) == ()


def in_front(steps, moved, place):
    """Return the steps with one moved in front of another."""
    steps = [step for step in steps if step != moved]
    steps.insert(steps.index(place), moved)
    return steps


def sends_late(rank, steps):
    """The second stage of one pipeline asks for its second input before it sends the gradient."""
    if rank != 2:
        return steps
    found = []
    for step in steps:
        found += step[::-1] if isinstance(step[0], tuple) else (step,)
    return found


def swaps_microbatches(rank, steps):
    if rank != 3:
        return steps
    return in_front(steps, ("RECV_F", 1, 1), ("RECV_F", 1, 0))


def reduces_early(rank, steps):
    """On one shard the first stage's gradients are reduced before the last backward is received."""
    if rank != 1:
        return steps
    last = [step for step in steps if step[0] == "REDUCE_GRAD"]
    return in_front(steps, last[-1], last[0])


def unshards_in_another_order(rank, steps):
    if rank != 2:
        return steps
    first, second = [step for step in steps if step[0] == "UNSHARD"][:2]
    return in_front(steps, second, first)


def forgets_a_gradient(rank, steps):
    return [step for step in steps if (rank, step) != (2, ("SEND_B", 1, 3))]


def receives_first(rank, steps):
    """A stage waits for a gradient before it sends on what the gradient is of."""
    if rank != 0:
        return steps
    return in_front(steps, ("RECV_B", 0, 3), ("SEND_F", 0, 0))


MISTAKES = [
    ("1F1B", sends_late, r"rank 0 waits in .* of stage0\)"),
    ("GPipe", swaps_microbatches, r"with tag \d+ .*\(send_f_0_0 of stage0\), where rank 3"),
    ("GPipe", forgets_a_gradient, r"rank 0 waits in recv from 2 \(recv_b_0_3 of stage0\)"),
    ("GPipe", receives_first, r"rank 0 waits in .* behind recv from 2 \(recv_b_0_3 of"),
    ("Interleaved1F1B", reduces_early, r"rank 0 calls reduce_scatter .*, where rank 1 calls"),
    (
        "InterleavedZeroBubble",
        unshards_in_another_order,
        r"all_gather .*, where rank \d calls all_",
    ),
    ("ZBVZeroBubble", forgets_a_gradient, r"rank 0 waits in recv from 2 \(recv_b_0_3.*\n.* ended"),
]


@pytest.mark.parametrize(("schedule", "mistake", "message"), MISTAKES)
def test_a_wrong_order_is_told_by_its_cycle(schedule, mistake, message):
    """Q5: the twin, one mistake on one rank."""
    graphs, groups = all_ranks(schedule, mistake)
    with pytest.raises(Deadlock, match=message):
        assert_no_deadlock(graphs, groups=groups)
