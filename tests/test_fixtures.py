"""The fixtures that have no folder of their own."""

import unittest

import pytest
import torch

# A run inside this process forgets what it has imported, and libraries of operators cannot be
# registered again.
import torch._dynamo
import torch._inductor.test_operators
import torch.distributed as dist

from pytest_gtrainer import devices


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


@pytest.mark.gt_world("fake", mesh={"pp": 2, "dp": 2, "tp": 2}, rank=5)
def test_dimensions_of_a_mesh_are_named_outermost_first(gt_mesh):
    """Neighbours share the last one; one that there is not is refused with those that there are."""
    ranks = {name: gt_mesh[name].mesh.tolist() for name in gt_mesh.mesh_dim_names}
    assert ranks == {"pp": [1, 5], "dp": [5, 7], "tp": [4, 5]}
    with pytest.raises(KeyError, match=r"'cp'.*Valid mesh_dim_names are \['pp', 'dp', 'tp'\]"):
        gt_mesh["cp"]


def test_no_process_group_outlives_a_fake_world():
    assert not torch.distributed.is_initialized()


@pytest.mark.gt_world("fake", size=6, rank=4)
def test_the_marker_alone_makes_the_world():
    assert (dist.get_world_size(), dist.get_rank()) == (6, 4)


@pytest.mark.gt_world("fake", size=3, rank=2)
class TestTheMarkerAloneInATestCase(unittest.TestCase):
    def setUp(self):
        self.size = dist.get_world_size()

    def test_the_marker_alone_makes_the_world(self):
        assert (self.size, dist.get_rank()) == (3, 2)


@pytest.mark.gt_world("fake", size=6, rank=4)
class TestAWorldOfAClass:
    def test_it_is_shared_by_the_test(self, gt_class_mesh, gt_world):
        assert gt_class_mesh.size() == gt_world.size == dist.get_world_size() == 6


@pytest.mark.gt_world("fake", size=6, rank=4)
class TestTheNextClassOfAnEqualWorld:
    def test_it_does_not_get_the_one_that_has_ended(self, gt_world):
        assert gt_world.size == dist.get_world_size() == 6


def test_an_assert_on_values_of_a_fake_group_says_where_values_are_true(pytester):
    """The twins: an assert on something else, and one on values without such a world, are reported
    like pytest does.
    """
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.gt_world("fake", size=2)
        def test_values():
            x = torch.ones(2)
            torch.distributed.all_reduce(x)
            assert x[0].item() == 2

        @pytest.mark.gt_world("simulated", size=2)
        def test_close():
            torch.testing.assert_close(torch.ones(2), torch.zeros(2))

        @pytest.mark.gt_world("fake", size=2)
        def test_structure(gt_world):
            assert gt_world.size == 3

        def test_plain():
            assert torch.equal(torch.ones(2), torch.zeros(2))
        """
    )
    result = pytester.runpytest_inprocess().stdout.str()
    assert (
        result.count(
            "world move no data, so values after a collective mean nothing here: use gt_world"
        )
        == 2
    )
    assert (
        result.count("process groups of a fake world move")
        == result.count("process groups of a simulated world")
        == 1
    )


def test_values_compared_where_no_data_moves_are_counted(pytester):
    """A test that forgot its sum over ranks was equal there, and no report said so."""
    pytester.makepyfile(
        test_fake="""
        import pytest, torch
        import torch.distributed as dist
        from pytest_gtrainer import assert_bitwise_equal, assert_run_to_run

        def summed():
            x = torch.ones(2)
            dist.all_reduce(x)
            return x

        @pytest.mark.gt_world("fake", size=2)
        def test_values():
            assert_bitwise_equal(summed(), torch.ones(2))

        @pytest.mark.gt_world("fake", size=2)
        def test_run_to_run():
            assert_run_to_run(summed, pressures=[])

        @pytest.mark.gt_world("simulated", size=2)
        def test_body():
            assert_bitwise_equal(summed(), torch.ones(2))

        @pytest.mark.gt_world("fake", size=2)
        def test_structure():
            assert summed().shape == (2,)

        def test_plain():
            assert_bitwise_equal(torch.ones(2), torch.ones(2))
        """,
        test_simulated="""
        import pytest, torch
        import torch.distributed as dist
        from pytest_gtrainer import assert_bitwise_equal, simulate_eager

        pytestmark = pytest.mark.gt_world("simulated", size=2)

        def summed(x):
            dist.all_reduce(x)
            return {"x": x}

        @pytest.fixture(scope="module")
        def result(gt_module_world):
            return simulate_eager(summed, [(torch.ones(2),), (torch.ones(2),)], gt_module_world)

        @pytest.mark.parametrize("again", [0, 1])
        def test_simulation(result, again):
            assert_bitwise_equal(result[0]["x"], torch.full((2,), 2.0))
        """,
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=7)
    (idle,) = [line for line in result.stdout.lines if "values compared" in line]
    assert idle == (
        "idle      2 values compared in a fake world, where collectives move no data, "
        "1 values compared in a simulated world outside of a simulation, where collectives move "
        "no data"
    )


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_devices_are_looked_for_again_when_a_variable_of_cuda_changes(request, monkeypatch, name):
    """Which they are, and in which order; every test asks."""
    monkeypatch.delenv(name, raising=False)
    before = devices.resolve(request.config)
    assert devices.resolve(request.config) is before
    monkeypatch.setenv(name, "")
    assert devices.resolve(request.config) is not before
    monkeypatch.delenv(name)
    assert devices.resolve(request.config) == before
