"""The fixtures that have no folder of their own."""

import pytest
import torch


def test_gt_deterministic_is_on_during_the_test(gt_deterministic):
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.initial_seed() == gt_deterministic.seed


def test_and_off_without_it():
    """The twin; runs after the other, so it also sees that everything was put back."""
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gt_world("fake", size=8, mesh={"outer": 2, "inner": 4}, rank=5)
def test_a_fake_world_plays_the_rank_of_its_marker(gt_world, gt_mesh):
    assert (gt_world.kind, gt_world.size, gt_world.rank, gt_world.backend) == ("fake", 8, 5, "fake")
    assert gt_mesh.mesh_dim_names == ("outer", "inner")
    assert list(gt_mesh.get_coordinate()) == [1, 1]


def test_no_process_group_outlives_a_fake_world():
    assert not torch.distributed.is_initialized()
