"""A module, or a class, shares a world, and what it has built on its mesh, between tests on one
team.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.gt_world("ranks", size=4, mesh={"outer": 2, "inner": 2})
BUILT: list[int] = []  # in each rank, by the fixture
GROUPS: list[str] = []


@pytest.fixture(scope="module")
def weight(gt_module_mesh):
    BUILT.append(len(BUILT))
    return distribute_tensor(torch.arange(8.0).view(4, 2), gt_module_mesh, [Shard(0), Shard(1)])


@pytest.mark.parametrize("turn", range(3))
def test_what_a_module_has_built_stays(weight, gt_module_mesh, gt_world, turn):
    """T: groups that are not the default one, and DTensors on them, are those of the first test."""
    whole = (weight * 2).redistribute(placements=[Replicate(), Replicate()])
    assert isinstance(whole, DTensor)
    assert whole.to_local().tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]
    GROUPS.append(gt_module_mesh.get_group("inner").group_name)
    assert len(GROUPS) == turn + 1
    assert len(set(GROUPS)) == 1
    assert BUILT == [0]
    assert gt_world.size == 4


def test_a_group_of_the_test_is_beside_them(weight):
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(pair)
        dist.destroy_process_group(pair)
    assert weight.full_tensor().sum() == 28


class TestOfOneClass:
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, gt_class_mesh):
        return gt_class_mesh, distribute_tensor(torch.ones(4), gt_class_mesh["outer"], [Shard(0)])

    @pytest.mark.parametrize("turn", range(2))
    def test_it_shares_another(self, model, gt_class_world, turn):
        mesh, ones = model
        assert ones.full_tensor().tolist() == [1] * 4
        assert gt_class_world.mesh == {"outer": 2, "inner": 2}
        assert mesh.get_group("inner").group_name not in GROUPS
