"""The interpreter with gloo's net against real gloo ranks, bit for bit (S8)."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    NetModel,
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    trace_step,
)
from pytest_gtrainer.references.config import adamw
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.tracing.model import ModelState, local
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from tests.worlds.simulated.gloo import GlooNet
from tests.worlds.simulated.graphs import data_movement, different, interpreter_of

pytestmark = pytest.mark.second_tier


def of_all_ranks(value):
    """Gather every rank's value on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Simulated:
    """The training run of all ranks in this process, from the graph that this rank traced."""

    def __init__(self, traced, model, net, mesh):
        state = ModelState.of(model)
        self.graph, self.net = RankGraph.of(traced.gm, mesh), net
        own = [local(tensor.detach()).clone() for tensor in state.tensors]
        self.tensors = [PerRank(tensors) for tensors in zip(*of_all_ranks(own), strict=True)]
        self.trained = [fqn in state.trainable for fqn in state.fqns]

    def steps(self, batches):
        """Every rank's loss, gradients and weights, step by step."""
        interpreter = Interpreter(self.graph, self.net)
        optimizers = [
            adamw([nn.Parameter(own) for own in self.parameters(rank)])
            for rank in range(self.net.size)
        ]
        for given in batches:
            output = interpreter.run(
                [*self.tensors, *(PerRank(values) for values in zip(*given, strict=True))]
            )
            yield [
                self._updated(optimizer, *of_rank(output, rank))
                for rank, optimizer in enumerate(optimizers)
            ]

    def parameters(self, rank):
        return [
            value[rank]
            for value, trained in zip(self.tensors, self.trained, strict=True)
            if trained
        ]

    def _updated(self, optimizer, loss, *gradients):
        (group,) = optimizer.param_groups
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        return {
            "loss": [loss],
            "gradient": gradients,
            "weight": [own.detach().clone() for own in group["params"]],
        }


def recorded(record, step):
    """This rank's tensors of one step by phase, in order."""
    return {
        phase: [tensor for key, tensor in record.items() if (key.step, key.phase) == (step, phase)]
        for phase in ("loss", "gradient", "weight")
    }


def bits(tensors):
    return {str(index): tensor.clone() for index, tensor in enumerate(tensors)}


def check_training(config, rank, *, other_net=None):
    """Real ranks train; simulated ones have their losses, gradients and weights, bit for bit.

    Those of a rank's neighbour are others, and by ``other_net`` its own too. The first rank
    compares for all.
    """
    size = dist.get_world_size()
    run = GraphRun(config)
    simulated = Simulated(run.traced, run.model, GlooNet(size), config.mesh)
    record = run.run()
    real = of_all_ranks([recorded(record, step) for step in range(config.steps)])
    if rank:
        return
    batches = [[config.batch(step, rank) for rank in range(size)] for step in range(config.steps)]
    if other_net:
        again = copy.deepcopy(simulated.tensors)
        simulated.net = other_net
        other = next(simulated.steps(batches))
        assert_bitwise_different(bits(other[0]["gradient"]), bits(real[0][0]["gradient"]))
        simulated.tensors, simulated.net = again, GlooNet(size)
    for step, ranks in enumerate(simulated.steps(batches)):
        assert_bitwise_different(bits(ranks[1]["gradient"]), bits(real[0][step]["gradient"]))
        for own, wanted in zip(ranks, real, strict=True):
            for phase in own:
                assert_bitwise_equal(bits(own[phase]), bits(wanted[step][phase]))


@pytest.mark.gt_world("ranks", size=2)
def test_a_training_step_of_two_ranks(gt_mesh, gt_world):
    """S8: Llama 3 with bf16 compute and fp32 reduction; AdamW over two steps."""
    check_training(llama3_training(gt_mesh, "bf16_fp32", steps=2), gt_world.rank)


@pytest.mark.long
@pytest.mark.gt_world("ranks", size=8)
@pytest.mark.parametrize("precision", ["fp32", "bf16_fp32"])
def test_training_of_eight_ranks(gt_mesh, gt_world, precision):
    """S8: the long form.

    Sums of few bf16 numbers in fp32 are exact, so their order seldom shows.
    """
    other_net = NetModel(2, 4) if precision == "fp32" else None
    check_training(llama3_training(gt_mesh, precision), gt_world.rank, other_net=other_net)


@pytest.mark.gt_world("ranks", size=4, mesh={"efsdp": 2, "ep": 2})
def test_expert_parallelism_of_four_ranks(gt_mesh, gt_world):
    """S8: two meshes, rows that travel by sizes which depend on data, a buffer that every rank
    writes to.
    """
    check_training(deepseek_v3_training(gt_mesh, "fp32", "debug_small", steps=2), gt_world.rank)


@pytest.mark.gt_world("ranks", size=6, mesh={"dp": 3, "ep": 2})
@pytest.mark.parametrize("dimension", ["dp", "ep"])
def test_data_moves_as_on_real_ranks(gt_mesh, gt_world, dimension):
    """S8: in groups of neighbours and of ranks that are apart, from a root that is not the
    first.
    """
    group = gt_mesh[dimension].get_group()
    x = different(6, 2, 3)
    gm = make_fx(data_movement(group.group_name, group.size(), root=1))(x[gt_world.rank])
    simulated = interpreter_of(gm, gt_mesh).run([x])
    for value, real in zip(simulated, gm(x[gt_world.rank]), strict=True):
        assert torch.equal(value[gt_world.rank], real)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.second(self.first(x).sin())


@pytest.mark.gt_world("ranks", size=6, mesh={"replicate": 2, "shard": 3})
@pytest.mark.parametrize("mode", ["hybrid_shard", "replicate"])
def test_replicas_on_six_ranks(gt_mesh, gt_world, mode):
    """S8: gradients that are reduced in two groups, or as a whole."""
    torch.manual_seed(0)
    mesh = (
        gt_mesh
        if mode == "hybrid_shard"
        else dist.init_device_mesh("cpu", (6,), mesh_dim_names=("all",))
    )
    model = data_parallel(Small(), mesh, mode=mode)
    batches = [
        (torch.randn(6, 24, generator=torch.Generator().manual_seed(rank)),) for rank in range(6)
    ]
    traced = trace_step(model, lambda model, x: model(x).square().mean(), batches[0])
    simulated = Simulated(traced, model, GlooNet(6), mesh)
    other = Simulated(traced, model, NetModel(2, 3), mesh)
    loss = traced.replay(model, *batches[gt_world.rank])
    gradients = [local(parameter.grad) for parameter in model.parameters()]
    actual, different = (next(run.steps([batches]))[gt_world.rank] for run in (simulated, other))
    assert_bitwise_equal(bits([*actual["loss"], *actual["gradient"]]), bits([loss, *gradients]))
    assert_bitwise_different(bits(different["gradient"]), bits(gradients))


@pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "tp": 2})
def test_tensor_parallelism_on_four_ranks(gt_mesh, gt_world):
    """S8: columns and rows of the weights over one dimension of the mesh.

    Its all-reduces are those of DTensor.
    """
    torch.manual_seed(0)
    model = parallelize_module(
        Small(), gt_mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    batches = [
        (torch.randn(6, 24, generator=torch.Generator().manual_seed(rank // 2)),)
        for rank in range(4)
    ]
    traced = trace_step(model, lambda model, x: model(x).square().mean(), batches[0])
    simulated = Simulated(traced, model, GlooNet(4), gt_mesh)
    loss = traced.replay(model, *batches[gt_world.rank])
    gradients = [local(parameter.grad) for parameter in model.parameters()]
    ranks = next(simulated.steps([batches]))
    actual, other = ranks[gt_world.rank], ranks[gt_world.rank ^ 2]
    assert_bitwise_equal(bits([*actual["loss"], *actual["gradient"]]), bits([loss, *gradients]))
    assert_bitwise_different(bits(other["gradient"]), bits(gradients))
