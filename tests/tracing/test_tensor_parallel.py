"""``data_parallel`` over parameters that ``parallelize_module`` has sharded: placed as
``fully_shard`` places them.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from pytest_gtrainer import data_parallel, trace_step


def parallel_net(mesh):
    """Columns (dim 0 cut twice), rows, replicated norm, a plain bias; 10 and 6 rows over 4 shards
    pad.
    """
    net = nn.Sequential(
        nn.Linear(8, 10, bias=False), nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    )
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel()}
    return parallelize_module(net, mesh, plan)


def placed(model):
    return {
        name: (
            str(p.placements),
            p.placements,
            p.device_mesh.mesh_dim_names,
            p.shape,
            p.stride(),
            p.to_local().shape,
        )
        for name, p in model.named_parameters()
    }


@pytest.mark.gt_world("fake", size=16, mesh={"replicate": 2, "dp": 4, "tp": 2}, rank=7)
@pytest.mark.parametrize("mode", ["fully_shard", "hybrid_shard"])
def test_parameters_lie_as_fully_shard_places_them(gt_mesh, mode):
    """N1: placements, dimensions of the mesh, global and local shapes; of last shards, padded or
    empty.
    """
    mesh = gt_mesh["dp"] if mode == "fully_shard" else gt_mesh["replicate", "dp"]
    ours = placed(data_parallel(parallel_net(gt_mesh["tp"]), mesh, mode=mode))
    assert ours == placed(fully_shard(parallel_net(gt_mesh["tp"]), mesh=mesh))
    outer = (Replicate(),) if mode == "hybrid_shard" else ()
    assert [str(p) for p in ours["0.weight"][1][len(outer) :]] == ["_S(0, 2)", "S(0)"]
    assert ours["1.weight"][1] == (*outer, Shard(0), Shard(1))
    assert ours["2.weight"][1] == (*outer, Shard(0), Replicate())
    assert ours["3.weight"][1] == (*outer, Shard(0))


@pytest.mark.gt_world("fake", size=8, mesh={"dp": 4, "tp": 2})
def test_a_replicated_model_keeps_the_shards_of_its_own(gt_mesh):
    model = data_parallel(parallel_net(gt_mesh["tp"]), gt_mesh["dp"], mode="replicate")
    assert placed(model)["0.weight"][1] == (Replicate(), Shard(0))
    assert placed(model)["0.weight"][-1] == (5, 8)


@pytest.mark.gt_world("fake", size=8, mesh={"dp": 4, "tp": 2})
def test_the_attribute_is_the_models_dtensor_and_its_gradient_a_shard_of_both(gt_mesh):
    net = parallel_net(gt_mesh["tp"])
    del net[2]  # a sequence that nothing here gathers
    model = data_parallel(net, gt_mesh["dp"])
    weight = model[0].weight
    assert (weight.placements, weight.device_mesh, weight.shape) == (
        (Shard(0),),
        gt_mesh["tp"],
        (10, 8),
    )
    traced = trace_step(model, lambda net, x: net(x).sum(), (torch.ones(2, 8),))
    gradients = traced.gm.graph.output_node().args[0][1:]
    local = {name: parameter.to_local().shape for name, parameter in model.named_parameters()}
    assert {
        name: node.meta["val"].shape for name, node in zip(local, gradients, strict=True)
    } == local


@pytest.mark.gt_world("fake", size=8, mesh={"dp": 4, "tp": 2})
def test_what_cannot_be_sharded_further_is_refused_by_name(gt_mesh):
    """And nothing is sharded then, also what stands in front of it."""
    replicated = [Replicate()]
    foreign = init_device_mesh("cpu", (8,), mesh_dim_names=("other",))
    partial = DTensor.from_local(torch.ones(4, 4), gt_mesh["tp"], [Partial()], run_check=False)
    for value, words in {
        distribute_tensor(
            torch.ones(4, 4), gt_mesh["dp"], [Shard(0)], src_data_rank=None
        ): "shares ranks .0, 2, 4, 6.",
        distribute_tensor(
            torch.ones(4, 4), foreign, replicated, src_data_rank=None
        ): "shares ranks .0, 2, 4, 6.",
        partial: r"P\w*\(sum\) cannot be sharded further, give Shard or Replicate",
    }.items():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(value)
        with pytest.raises(ValueError, match=rf"^1\.weight is a DTensor already, .*{words}"):
            data_parallel(model, gt_mesh["dp"])
        assert not isinstance(model[0].weight, DTensor)


@pytest.mark.gt_world("fake", size=16, mesh={"dp": 2, "a": 2, "b": 2, "c": 2})
def test_a_model_mesh_of_three_dimensions_and_one_of_another_root_are_refused(gt_mesh):
    def over(mesh, placements):
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].weight = nn.Parameter(
            distribute_tensor(torch.ones(4, 4), mesh, placements, src_data_rank=None)
        )
        return model

    with pytest.raises(ValueError, match="a model's mesh has one dimension, or two"):
        data_parallel(over(gt_mesh["a", "b", "c"], [Replicate()] * 3), gt_mesh["dp"])
    for placements in ([Shard(0), Partial()], [Partial(), Shard(0)]):
        refused = over(gt_mesh["b", "c"], [Shard(0), Replicate()])
        given = DTensor.from_local(torch.ones(2, 4), gt_mesh["b", "c"], placements, run_check=False)
        refused[0].weight = nn.Parameter(given)
        with pytest.raises(ValueError, match=r"P\w*\(sum\) cannot be sharded further"):
            data_parallel(refused, gt_mesh["dp"])
    twin = data_parallel(over(gt_mesh["b", "c"], [Shard(0), Replicate()]), gt_mesh["dp"])
    assert [str(p) for p in twin[0].weight.placements] == ["S(0)", "R"]
    # A shard of each of the four shards that the model made, over two dimensions.
    model = nn.Sequential(nn.Linear(4, 8))
    model[0].weight = nn.Parameter(
        distribute_tensor(
            torch.ones(8, 4), gt_mesh["b", "c"], [Shard(0), Shard(0)], src_data_rank=None
        )
    )
    of_shards, *own = data_parallel(model, gt_mesh["dp"]).state_dict()["0.weight"].placements
    assert (of_shards.split_factor, own) == (4, [Shard(0), Shard(0)])
    other_root = DeviceMesh("cpu", [0, 1], mesh_dim_names=("own",))
    with pytest.raises(ValueError, match="is of another device mesh"):
        data_parallel(over(other_root, [Shard(0)]), gt_mesh["dp"])


@pytest.mark.gt_world("fake", size=4, mesh={"dp": 2, "tp": 2})
def test_parallelize_module_unties_and_what_is_tied_again_is_one_parameter(gt_mesh):
    """docs/parallelism.md says so."""
    net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    net[1].weight = net[0].weight
    parallelize_module(net, gt_mesh["tp"], {"0": RowwiseParallel(), "1": ColwiseParallel()})
    assert net[0].weight is not net[1].weight
    net[1].weight = net[0].weight
    assert list(placed(data_parallel(net, gt_mesh["dp"]))) == ["0.weight"]


@pytest.mark.gt_world("fake", size=4, mesh={"dp": 2, "tp": 2})
def test_a_plain_parameter_that_meets_a_dtensor_is_refused_by_module(gt_mesh):
    """FSDP2 refuses it, too: under ``implicit_replication`` its gradient is a DTensor over the
    model's mesh.
    """

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            with implicit_replication():
                return (
                    self.inner(DTensor.from_local(x, gt_mesh["tp"], [Replicate()])).sum().to_local()
                )

    model = data_parallel(Net(), gt_mesh["dp"])
    with pytest.raises(
        TypeError, match=r"the gradient of a plain parameter of inner is a DTensor over .*tp"
    ):
        trace_step(model, lambda net, x: net(x), (torch.ones(2, 4),))
