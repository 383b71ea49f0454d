"""A test's mesh is its own, also where an equal one was there before, on the same warm ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pytest_gtrainer._torch.fake_groups import (
    fake_group_beside,
    new_group_names,
    real_group_beside,
)


@pytest.mark.gt_world("ranks", size=4, mesh={"outer": 2, "inner": 2})
@pytest.mark.parametrize("turn", range(3))
def test_redistribution_does_not_use_the_groups_of_an_earlier_test(gt_mesh, turn):
    """DTensor caches by mesh, and equal meshes of two tests have different groups."""
    inner = gt_mesh["inner"]
    sharded = distribute_tensor(torch.arange(6.0), inner, [Shard(0)])
    scaled = (sharded / 2).to(torch.bfloat16)
    assert scaled.redistribute(placements=[Replicate()]).to_local().tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        2.5,
    ]


@pytest.mark.second_tier
@pytest.mark.parametrize("count", [12, pytest.param(25, marks=pytest.mark.long)])
def test_tests_on_shuffled_meshes(suite, count):
    """A failing test on the same ranks leaves its model in a traceback; the next is undisturbed."""
    suite.take("ranks_meshes")
    order = random.Random(1).sample(range(50), count)
    run = suite.run("--gt-gpus=4", *(f"test_meshes.py::test_mesh[{number}]" for number in order))
    outcomes = {name: run.outcome(name) for name in run.reports}
    wrong = {
        name: run.text(name)[-500:]
        for name in outcomes
        if (outcomes[name] == "failed") != ("meant to fail" in run.text(name))
    }
    assert wrong == {}
    failing = sum(number % 5 == 0 for number in order)
    assert failing
    assert sorted(outcomes.values()) == ["failed"] * failing + ["passed"] * (count - failing)


@pytest.mark.gt_world("fake", size=8)
def test_a_fake_world_holds_nobody_to_its_rank_who_looks_from_another_one(gt_world):
    """A simulated parity traces on the first and on the last rank."""
    with fake_group_beside(7, 8):
        assert dist.get_rank() == 7
    assert dist.get_rank() == 0


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("is_real", [False, True], ids=["fake", "real"])
def test_a_world_beside_leaves_the_groups_of_the_test_their_names(gt_world, is_real):
    """Meshes find their groups by name."""
    pair = dist.new_group([0, 1])
    own = init_device_mesh("cpu", (2,))
    if is_real:
        beside = real_group_beside("gloo", dist.HashStore(), 0, 1, new_group_names())
    else:
        beside = fake_group_beside(3, 4)
    with beside:
        assert dist.get_world_size() == (1 if is_real else 4)
    for mesh in (own, init_device_mesh("cpu", (2,))):
        assert mesh.get_group().size() == 2
        dist.all_reduce(torch.ones(1), group=mesh.get_group())
    dist.all_reduce(torch.ones(1), group=pair)
    torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", pair.group_name)
