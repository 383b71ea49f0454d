"""State of the process that each rank has for itself; a run changes none of it for others."""

import os
import random
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pytest_gtrainer import ChunkConfig, NetModel, eager_chunked, facts
from pytest_gtrainer._torch.values import FakeTensorMode
from pytest_gtrainer.numerics.calls import kept_calls
from pytest_gtrainer.references.replicas import assert_replicas_equal
from pytest_gtrainer.worlds.simulated import NoModel
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.threads import run, run_threads

NET = NetModel(1, 3)


class Totals(torch.nn.Module):
    """Reduces what it sees, as ``dist`` does it: no dispatch mode sees that."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        total = x.mean()
        dist.all_reduce(total)
        self.seen.append(total.item())
        return x * 2


def chunked(rank):
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Totals()])})
    with eager_chunked(model, ChunkConfig("layers.*")):
        model.layers[0](torch.tensor([[1.0], [2.0]]) + rank)
    return model.layers[0].seen, dist.group.WORLD.issued


def test_the_trial_forward_of_eager_chunking_comes_to_no_collective():
    """I1: its fake tensors would meet those of other ranks; a call for each chunk is left."""
    assert run_threads(3, chunked, net=NET) == [([6.0, 9.0], 2)] * 3


def fake(rank):
    with FakeTensorMode():
        dist.all_reduce(torch.ones(2))


def test_a_collective_of_fake_tensors_is_refused():
    with pytest.raises(NoModel, match="all_reduce while fake tensors stand for real ones"):
        run_threads(3, fake, net=NET)


def replicas_of_one(rank):
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError, match="no tensor of Linear is replicated over 'tp': nothing could differ"
    ):
        assert_replicas_equal(torch.nn.Linear(2, 2), mesh, "tp")


def test_a_group_of_one_rank_has_no_replicas_to_compare():
    """A check that compares nothing is no pass."""
    run_threads(3, replicas_of_one, net=NET)


@pytest.mark.parametrize("placement", [Partial(), Replicate()])
def test_a_gradient_that_nobody_has_reduced_is_named_as_not_compared(placement):
    """Its parts are summands, which differ between ranks; the parameter is compared."""

    def compare_replicas(rank):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        model = torch.nn.Linear(2, 2, bias=False)
        model.weight = torch.nn.Parameter(
            DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
        )
        own = torch.full((2, 2), float(rank if placement == Partial() else 1))
        model.weight.grad = DTensor.from_local(own, mesh, [placement], run_check=False)
        assert_replicas_equal(model, mesh, "tp")

    words = (
        "the gradient of weight is (Partial(sum),): ranks hold summands, which were not compared"
    )
    with facts.collecting() as seen:
        run_threads(3, compare_replicas, net=NET)
    expected = [words] * 3 if placement == Partial() else []
    assert [fact["what"] for fact in facts.of_kind(seen, "idle")] == expected


def test_a_gradient_that_is_not_reduced_over_another_dimension_is_named():
    def compare_replicas(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        weight = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()] * 2, run_check=False)
        model = torch.nn.Linear(2, 2, bias=False)
        model.weight = torch.nn.Parameter(weight)
        own = torch.full((2, 2), float(rank % 2))
        model.weight.grad = DTensor.from_local(own, mesh, [Replicate(), Partial()], run_check=False)
        assert_replicas_equal(model, mesh, "dp")

    with facts.collecting() as seen:
        run_threads(4, compare_replicas, net=NetModel(nodes=1, ranks_per_node=4))
    said = [fact["what"] for fact in facts.of_kind(seen, "idle")]
    assert (
        said
        == [
            "the gradient of weight is (Replicate(), Partial(sum)): ranks hold summands, which were "
            "not compared"
        ]
        * 4
    )


@pytest.mark.gt_world("fake", size=4)
def test_fake_groups_have_no_replicas_to_compare(gt_mesh):
    """A gather among fake ranks gives what was there: nothing could differ."""
    with pytest.raises(ValueError, match="the groups of this world are fake"):
        assert_replicas_equal(torch.nn.Linear(2, 2), gt_mesh, gt_mesh.mesh_dim_names[0])


def draw():
    return torch.rand(1).item(), random.random(), numpy.random.randn()


def seed(value):
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def polling(rank):
    """Asks whether others have come before it goes on to draw."""
    seed(rank)
    drawn = [draw()]
    work = dist.all_reduce(torch.ones(2), async_op=True)
    while not work.is_completed():
        pass
    return [*drawn, draw(), draw()]


def test_a_rank_that_asks_again_and_again_draws_on_where_it_was():
    """The turn goes over at each question, and comes back with the rank's own random numbers."""
    for rank, drawn in enumerate(run_threads(3, polling, net=NET)):
        assert drawn == alone(rank), f"rank {rank} draws other numbers than in a process of its own"


def alone(rank):
    """Return the numbers that a rank draws in a process of its own."""
    seed(rank)
    return [draw() for _ in range(3)]


def together(rank):
    seed(rank)
    drawn = []
    for _ in range(3):
        drawn.append(draw())
        dist.barrier()
    return drawn


def test_seeds_are_a_ranks_own():
    """Ranks take turns between draws, of normal numbers too, which numpy draws in pairs."""
    expected = [alone(rank) for rank in range(3)]
    assert run_threads(3, together, net=NET) == expected
    assert len({str(drawn) for drawn in expected}) == 3


def test_ranks_start_with_the_callers_random_numbers_and_leave_them():
    seed(11)
    expected = draw()
    seed(11)
    assert run_threads(3, lambda rank: draw(), net=NET) == [expected] * 3
    assert draw() == expected


def test_default_dtype_and_environment_are_a_ranks_own():
    def of_rank(rank):
        torch.set_default_dtype((torch.float32, torch.float64, torch.bfloat16)[rank])
        dist.barrier()
        return torch.ones(1).dtype, [
            os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        ]

    assert run_threads(3, of_rank, net=NET) == [
        (torch.float32, ["0", "0", "3"]),
        (torch.float64, ["1", "1", "3"]),
        (torch.bfloat16, ["2", "2", "3"]),
    ]


def test_a_run_changes_nothing_outside(monkeypatch):
    """T8, on threads: what a rank sets is not what the next test finds."""
    monkeypatch.setenv("RANK", "before")
    threads = torch.get_num_threads()

    def changes(rank):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        os.environ["MADE_BY_A_RANK"] = "1"
        seed(rank)
        with warnings.catch_warnings(action="error"):
            dist.barrier()  # the ranks leave the context in the order in which they entered it

    filters = list(warnings.filters)
    run_threads(3, changes, net=NET)
    assert warnings.filters == filters
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert os.environ["RANK"] == "before"
    assert "MADE_BY_A_RANK" not in os.environ


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_ranks_compute_on_one_thread_each(two_threads):
    """256 ranks with a pool of threads each would be more than a machine has."""
    assert run_threads(3, lambda rank: torch.get_num_threads(), net=NET) == [1] * 3
    assert torch.get_num_threads() == 2


def test_the_interpreter_computes_on_one_thread(two_threads):
    gm = torch.fx.symbolic_trace(lambda x: x)
    seen = []

    def noted(x):
        seen.append(torch.get_num_threads())
        if len(seen) > 3:
            raise KeyError("no more")
        return x + 1

    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(noted, output.args),)
    interpreter = Interpreter(RankGraph(gm, 0, 3, {}), NET)
    given = PerRank(torch.ones(2) * rank for rank in range(3))
    interpreter.run([given])
    assert seen == [1, 1, 1], "as ranks compute: some kernels' bits depend on the number of threads"
    with pytest.raises(KeyError, match="no more"):
        interpreter.run([given])
    assert torch.get_num_threads() == 2, (
        "an operator that fails leaves the caller with as many threads as before"
    )


def gathered(rank):
    """Through DTensor, which caches by mesh."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("shard",))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return (sharded * 2).redistribute(placements=[Replicate()]).to_local().tolist(), len(
        sharded.to_local()
    )


@pytest.mark.parametrize("turn", range(2))
def test_equal_meshes_of_two_runs_have_their_own_groups(turn):
    assert run_threads(3, gathered, net=NET) == [
        ([0, 2, 4, 6], 2),
        ([0, 2, 4, 6], 2),
        ([0, 2, 4, 6], 0),
    ]


@pytest.mark.gt_world("fake", size=3, mesh={"shard": 3})
def test_the_groups_of_the_caller_are_as_before(gt_mesh):
    """A fake world is up around the run; ranks do not see it, and it does not see them."""
    tables, world, name = distributed_c10d._world, dist.group.WORLD, gt_mesh.get_group().group_name
    assert run_threads(3, lambda rank: dist.get_rank(), net=NET) == [0, 1, 2]
    assert distributed_c10d._world is tables
    assert dist.group.WORLD is world
    assert dist.get_rank() == 0
    assert gt_mesh.get_group().group_name == name
    assert init_device_mesh("cpu", (3,)).get_group() is world


@pytest.mark.gt_world("ranks", size=2)
def test_a_run_inside_of_a_real_rank(gt_world):
    """Two worlds at once, each with its own groups."""
    tensor = torch.full((1,), float(gt_world.rank))
    assert run_threads(3, total, net=NET) == [3.0] * 3
    dist.all_reduce(tensor)
    assert tensor.item() == 1


def test_a_rank_may_destroy_its_groups():
    def destroys(rank):
        result = total(rank)
        dist.destroy_process_group()
        return result, dist.is_initialized()

    assert run_threads(3, destroys, net=NET) == [(3.0, False)] * 3


def total(rank):
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor)
    return tensor.item()


HOLES = """
import os, torch
from contextlib import nullcontext
from pytest_gtrainer.worlds.simulated.threads.run import freed_at_once

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def freed_of_holes():
    # MiB that go back to the system when every second of 256 blocks of half a MiB is freed
    blocks = [torch.ones(2**17) for _ in range(256)]
    before = resident()
    del blocks[::2]
    return before - resident()

torch.ones(2**22)  # glibc raises its bound to these 16 MiB when it frees them
with freed_at_once():
    print(freed_of_holes())
print(freed_of_holes())
"""


@pytest.mark.second_tier
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_with_many_ranks_freed_memory_goes_back_to_the_system_at_once():
    """64 MiB of holes go back.

    Outside the block they stay with the process: glibc keeps them once larger blocks were freed.
    """
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    inside, behind = map(float, done.stdout.split())
    assert inside > 48
    assert behind < 16


def test_from_64_ranks_on_memory_is_freed_at_once(monkeypatch):
    entered = []
    monkeypatch.setattr(run, "freed_at_once", lambda: entered.append(True) or nullcontext())
    run_threads(63, lambda rank: None, net=NetModel(1, 63))
    assert not entered
    run_threads(64, lambda rank: None, net=NetModel(1, 64))
    assert entered


def test_a_rank_keeps_the_calls_of_its_own_thread():
    """The others carry out their collectives in the same process meanwhile."""

    def step(rank):
        pair = dist.new_group([1, 2])
        with kept_calls() as calls:
            if rank:
                dist.all_reduce(torch.zeros(1), group=pair)
        kept = [call.what for call in calls.calls if call.is_collective]
        dist.barrier()
        return len(kept), calls.has_communicated

    assert run_threads(3, step, net=NET) == [(0, False), (1, True), (1, True)]


def test_a_rank_that_is_inside_keeps_nothing_of_the_others():
    def step(rank):
        total = torch.full((1,), float(rank))
        with kept_calls() as calls:
            dist.all_reduce(total)
        return [call.outputs[0].item() for call in calls.calls if call.is_collective]

    assert run_threads(3, step, net=NET) == [[3.0]] * 3


def test_autocast_of_the_caller_holds_on_each_rank():
    """It belongs to a thread: a side on threads would else compute in another dtype."""

    def settings(rank):
        at = torch.is_autocast_cache_enabled()
        return torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype, at, torch.get_autocast_dtype("cpu")

    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        found = run_threads(2, settings, net=NetModel.of_world(2))
    assert found == [(torch.float16, False, torch.float16)] * 2
    assert run_threads(2, settings, net=NetModel.of_world(2))[1][0] == torch.float32
    assert not torch.is_autocast_enabled("cpu")
