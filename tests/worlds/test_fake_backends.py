"""A fake world serves trainers that name a backend and a device; fake tensors for a whole test."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pytest_gtrainer._torch.fake_tensors import NoDeviceGuard

FOUR = pytest.mark.gt_world("fake", size=4, rank=2)


@FOUR
@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_groups_of_every_backend_are_fake(gt_world, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = dist.new_group([1, 2], backend=backend)
    assert (dist.get_backend(group), dist.get_process_group_ranks(group)) == ("fake", [1, 2])
    assert dist.new_group([0, 1], backend=backend) == dist.GroupMember.NON_GROUP_MEMBER


@FOUR
def test_a_mesh_of_gpus(gt_world):
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    assert (mesh.device_type, tuple(mesh.get_coordinate())) == ("cuda", (1, 0))
    assert dist.get_backend(mesh.get_group("tp")) == "fake"


@FOUR
def test_a_trainer_takes_the_group_of_the_world_once(gt_world):
    dist.init_process_group("nccl", rank=2, world_size=4)
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 2, 4)
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("nccl")
    dist.destroy_process_group()
    dist.distributed_c10d.init_process_group("cuda:nccl,cpu:gloo", device_id=torch.device("cuda:2"))
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 2, 4)


@FOUR
@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 8}])
def test_a_trainer_that_wants_to_be_another_rank(gt_world, given):
    name, value = next(iter(given.items()))
    with pytest.raises(ValueError, match=rf"init_process_group\({name}={value}\) in a fake world"):
        dist.init_process_group("nccl", **given)


def test_after_the_world_torch_is_as_before():
    from pytest_gtrainer.worlds.fake import fake_world
    from pytest_gtrainer.worlds.spec import make_spec

    c10d = dist.distributed_c10d

    def replaced():
        names = "init_process_group", "_new_process_group_helper", "_get_default_timeout"
        return [dist.init_process_group, *(getattr(c10d, name) for name in names)]

    before = replaced()
    with fake_world(make_spec("fake", size=2)):
        assert not {*before} & {*replaced()}
    assert before == replaced()


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_the_groups_of_a_simulated_world(gt_world):
    assert dist.get_backend(dist.new_group([0, 1], backend="nccl")) == "fake"


@FOUR
def test_fake_tensors_on_a_mesh(gt_fake_tensors, gt_mesh):
    """The mesh is made before the mode, whatever the order of the arguments."""
    sharded = distribute_tensor(torch.randn(8, 3), gt_mesh, [Shard(0)])
    assert type(sharded.to_local()).__name__ == "FakeTensor"
    assert sharded.to_local().shape == (2, 3)


@FOUR
class TestFakeTensorsOnAWiderMesh:
    @pytest.mark.parametrize("mesh", ["gt_class_mesh", "gt_mesh"])
    def test_the_mesh_is_made_before_the_mode(self, gt_fake_tensors, gt_class_mesh, gt_mesh, mesh):
        mesh = {"gt_class_mesh": gt_class_mesh, "gt_mesh": gt_mesh}[mesh]
        sharded = distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
        assert type(sharded.to_local()).__name__ == "FakeTensor"


def test_fake_tensors_of_any_device(gt_fake_tensors):
    x = torch.randn(1 << 30, 1 << 20, device="cuda")
    assert (x.device.type, x.to("cpu").device.type) == ("cuda", "cpu")
    nn.Linear(2, 3)(torch.randn(4, 2)).sum().backward()
    assert x.fake_mode is gt_fake_tensors


def test_the_mode_ends_with_a_test_that_fails(pytester):
    pytester.makepyfile(
        """
        import torch

        def test_fails(gt_fake_tensors):
            raise RuntimeError(type(torch.ones(2)).__name__)

        def test_next():
            assert torch.ones(2).tolist() == [1.0, 1.0]
        """
    )
    run = pytester.runpytest("-p", "no:randomly")
    run.assert_outcomes(failed=1, passed=1)
    run.stdout.fnmatch_lines(["*RuntimeError: FakeTensor*"])


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has a device guard for CUDA")
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * 2,
        lambda x: x.T,
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
        lambda x: torch.zeros(2, 2, device="cuda").add_(x),
    ],
)
def test_autograd_that_would_end_the_process_is_refused(gt_fake_tensors, use):
    x = torch.randn(2, 2, device="cuda", requires_grad=True)
    assert x.shape == (2, 2)
    with pytest.raises(NoDeviceGuard, match="is built for CPU, where autograd has no such device"):
        use(x)
    with torch.no_grad():
        use(x)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built for CPU")
def test_autograd_of_fake_cuda_tensors(gt_fake_tensors):
    loss = nn.Linear(2, 3, device="cuda")(torch.randn(4, 2, device="cuda")).sum()
    assert (loss.device.type, loss.requires_grad) == ("cuda", True)
