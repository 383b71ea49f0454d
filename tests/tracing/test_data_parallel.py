"""Parameters that gather on access: which collectives a trace sees, and how often."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from pytest_gtrainer import (
    MixedPrecisionPolicy,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_graph,
    data_parallel,
    trace_step,
)
from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.graph.nodes import is_view
from pytest_gtrainer.tracing.sharding import sets_grad_dtype

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def count(traced):
    targets = [node.target for node in traced.gm.graph.nodes]
    return {
        name: targets.count(op)
        for name, op in (
            ("all_gather", ALL_GATHER),
            ("reduce_scatter", REDUCE_SCATTER),
            ("all_reduce", ALL_REDUCE),
        )
    }


def launches(traced, target):
    return traced.gm.graph.find_nodes(op="call_function", target=target)


class TwoReads(nn.Module):
    """A tied weight, and one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.mix(self.embed(tokens))))


def token_step(model, tokens):
    return model(tokens).float().square().mean()


def test_one_gather_in_param_dtype_and_one_reduction_in_reduce_dtype_per_parameter(
    gt_mesh, net, inputs, train_step
):
    """A12."""
    data_parallel(net, gt_mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    traced = trace_step(net, train_step, inputs)
    frozen = 1
    total = len(list(net.parameters()))
    assert count(traced) == {"all_gather": total, "reduce_scatter": total - frozen, "all_reduce": 0}
    assert {node.meta["val"].dtype for node in launches(traced, ALL_GATHER)} == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in launches(traced, REDUCE_SCATTER)} == {torch.float32}
    assert {node.args[1] for node in launches(traced, REDUCE_SCATTER)} == {"avg"}


def test_replicate_reduces_by_all_reduce(gt_mesh, net, inputs, train_step):
    """A12: one per parameter that requires a gradient (D10)."""
    data_parallel(net, gt_mesh, mode="replicate")
    trained = len(list(net.parameters())) - 1
    assert count(trace_step(net, train_step, inputs)) == {
        "all_gather": 0,
        "reduce_scatter": 0,
        "all_reduce": trained,
    }


class Weight(nn.Module):
    """One parameter, whose gradient on each rank is the input of that rank."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 3))

    def forward(self, given):
        return (self.weight * given).sum()


@pytest.mark.gt_world("ranks", size=4, mesh={"replicate": 2, "fsdp": 2})
@pytest.mark.parametrize("mode", ["fully_shard", "hybrid_shard"])
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 9])
def test_a_rank_gets_the_rows_that_torch_would_give_it(gt_mesh, gt_world, mode, rows):
    """Rows that do not divide are padded; a rank may have none."""
    mesh = gt_mesh if mode == "hybrid_shard" else init_device_mesh("cpu", (4,))
    model = data_parallel(Weight(rows), mesh, mode=mode)
    given = torch.arange(3.0 * rows).view(rows, 3) * (gt_world.rank + 1)
    model(given).backward()
    [parameter] = model.parameters()
    expected = DTensor.from_local(given, mesh, [Partial("avg")] * mesh.ndim).redistribute(
        placements=parameter.placements
    )
    assert parameter.grad.placements == parameter.placements
    assert parameter.grad.shape == parameter.shape
    assert parameter.grad.to_local().shape == parameter.to_local().shape
    assert_bitwise_equal({"gradient": parameter.grad}, {"gradient": expected})
    assert_bitwise_different({"gradient": parameter.grad.full_tensor()}, {"gradient": given})


@pytest.mark.gt_world("fake", size=512, mesh={"fsdp": 512})
def test_rows_that_do_not_divide_are_padded_at_once(gt_mesh):
    """torch makes a part for each rank: a model of 126 layers had no end on 4,096 ranks."""
    model = data_parallel(nn.Linear(8, 700, bias=False), gt_mesh)
    traced = trace_step(model, lambda model, x: model(x).sum(), (torch.ones(2, 8),))
    assert_graph(traced.gm, "never cat")
    assert len(traced.gm.graph.nodes) < 40


@pytest.mark.gt_world("fake", size=4, mesh={"replicate": 2, "shard": 2})
def test_hybrid_gathers_in_the_shard_dimension_only(gt_mesh, net, inputs, train_step):
    data_parallel(net, gt_mesh, mode="hybrid_shard")
    traced = trace_step(net, train_step, inputs)
    assert {node.args[1] for node in launches(traced, ALL_GATHER)} == {2}
    assert (
        count(traced)["reduce_scatter"]
        == count(traced)["all_reduce"]
        == len(list(net.parameters())) - 1
    )


def test_a_tied_or_reused_parameter_is_gathered_and_reduced_once(gt_mesh):
    """A10: and never counted twice among the gradients."""
    model = data_parallel(TwoReads(), gt_mesh)
    traced = trace_step(model, token_step, (torch.zeros(2, 3, dtype=torch.int64),))
    assert count(traced) == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 0}
    assert traced.trainable_fqns == ("embed.weight", "mix.weight")


def test_without_reuse_every_read_gathers(gt_mesh):
    """The twin of A10: what other tracers do."""
    model = data_parallel(TwoReads(), gt_mesh)
    traced = trace_step(
        model, token_step, (torch.zeros(2, 3, dtype=torch.int64),), reuse_gathers=False
    )
    assert count(traced) == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 0}


def test_state_dict_and_parameters_see_shards_and_gather_nothing(gt_mesh, net):
    """A12."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    data_parallel(net, gt_mesh)
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as comms:
        state = net.state_dict()
    assert comms.get_total_counts() == 0
    assert {name: state[name].shape for name in shapes} == shapes
    assert state["layers.0.w.weight"].to_local().shape == (2, 8)


def test_sharding_sends_nothing(gt_mesh, net):
    """Every rank has the values already."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as comms:
        data_parallel(net, gt_mesh)
    assert comms.get_total_counts() == 0, dict(comms.get_comm_counts())


@pytest.mark.gt_world("fake", size=8, mesh={"efsdp": 4, "ep": 2})
def test_an_inner_module_may_have_a_mesh_of_its_own_and_divide_its_sum(
    gt_mesh, net, inputs, train_step
):
    """Routed experts: gathered over 4, summed over 4 and divided by 8. The rest is averaged over
    all 8.
    """
    data_parallel(net.head, gt_mesh["efsdp"], gradient_divide_factor=8.0)
    data_parallel(net, gt_mesh._flatten("fsdp"))
    traced = trace_step(net, train_step, inputs)
    (head,) = [
        n for n in launches(traced, REDUCE_SCATTER) if n.meta["custom"]["module_fqn"] == "head"
    ]
    assert head.args[1:3] == ("sum", 4)
    (wait,) = head.users
    assert [(user.target, user.args[1]) for user in wait.users] == [
        (torch.ops.aten.div.Tensor, 8.0)
    ], (
        "the sum over 4 ranks is not divided, as FSDP2 divides it: by a product with the inverse "
        "it has other bits"
    )
    others = [n for n in launches(traced, REDUCE_SCATTER) if n is not head]
    assert {n.args[1:3] for n in others} == {("avg", 8)}


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_is_divided_in_the_dtype_that_it_is_reduced_in(gt_mesh, inputs, reduce_dtype):
    """A12: as FSDP2 does; divided behind the cast to the parameter's dtype, a gradient would have
    other bits.
    """
    model = nn.Linear(
        8, 4, bias=False, dtype=torch.bfloat16 if reduce_dtype is torch.float32 else torch.float32
    )
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    data_parallel(model, gt_mesh, mp_policy=policy, gradient_divide_factor=3.0)
    traced = trace_step(model, lambda m, x, y: m(x.bfloat16()).sum(), inputs)
    (division,) = [
        n
        for n in traced.gm.graph.nodes
        if n.target is torch.ops.aten.div.Tensor and n.args[1] == 3.0
    ]
    assert division.meta["val"].dtype == reduce_dtype, (
        "the sum is divided in another dtype than it is reduced in"
    )


def test_replicate_multiplies_by_the_inverse_before_the_sum(gt_mesh, inputs):
    """D10: as DDP does. A division, or one behind the sum, has other bits where the factor is no
    power of two.
    """
    model = data_parallel(
        nn.Linear(8, 4, bias=False), gt_mesh, mode="replicate", gradient_divide_factor=3.0
    )
    traced = trace_step(model, lambda m, x, y: m(x).sum(), inputs)
    (reduce,) = launches(traced, ALL_REDUCE)
    assert reduce.args[1] == "sum"
    (scaled,) = reduce.all_input_nodes
    while is_view(scaled.target):
        (scaled,) = scaled.all_input_nodes
    assert (str(scaled.target), scaled.args[1]) == ("aten.mul.Tensor", 1 / 3.0), (
        "what is done before the sum"
    )
    behind = [user.target for wait in reduce.users for user in wait.users if user.op != "output"]
    assert not [target for target in behind if not is_view(target)], "what is done behind it"


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "reduced"),
    [
        (None, None, torch.float32),
        (torch.bfloat16, None, torch.float32 if sets_grad_dtype() else torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_dtypes_of_gathers_and_of_reductions(gt_mesh, inputs, param_dtype, reduce_dtype, reduced):
    """A12: without a reduce_dtype as FSDP2 of the installed torch; gradients return in the
    parameter's own.
    """
    model = data_parallel(
        nn.Linear(8, 4), gt_mesh, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype)
    )
    traced = trace_step(model, lambda m, x, y: m(x.to(param_dtype)).sum(), inputs)
    gathers, scatters = (
        {n.meta["val"].dtype for n in launches(traced, op)} for op in (ALL_GATHER, REDUCE_SCATTER)
    )
    assert (gathers, scatters) == ({param_dtype or torch.float32}, {reduced})
    results = traced.gm.graph.output_node().args[0]
    assert {node.meta["val"].dtype for node in results[1:]} == {torch.float32}, "gradients"


def test_a_first_read_without_gradient_gathers_once_and_loses_none(
    gt_mesh, net, inputs, train_step
):
    """A10: the parameter is read under no_grad first, by a metric say."""
    data_parallel(net, gt_mesh)

    def measuring(model, x, y):
        with torch.no_grad():
            model.head.weight.sum()
        return train_step(model, x, y)

    assert count(trace_step(net, measuring, inputs)) == count(trace_step(net, train_step, inputs))


def test_a_parameter_that_was_deleted_is_an_attribute_error(gt_mesh, net):
    data_parallel(net, gt_mesh)
    del net.head.weight
    assert not hasattr(net.head, "weight")
    net.head.weight = nn.Parameter(torch.zeros(4, 8))
    assert torch.equal(net.head.weight, torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "zero3"}, "mode='zero3': expected one of fully_shard, replicate, hybrid_shard"),
        ({"mode": "hybrid_shard"}, "needs a 2-D mesh, this one is 1-D"),
        ({"mp_policy": MixedPrecisionPolicy(torch.float16)}, "torch.float16 is not supported"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(gt_mesh, net, arguments, words):
    """And a parameter without dimensions, and inputs that are DTensors."""
    with pytest.raises(ValueError, match=words):
        data_parallel(net, gt_mesh, **arguments)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16"])
def test_dtypes_without_gradients_are_refused(name, dtype):
    """FSDP2 fails on the first parameter, with a message about gradients."""
    with pytest.raises(TypeError, match=f"{name}={dtype!r}: give a floating-point dtype, such as"):
        MixedPrecisionPolicy(**{name: dtype})


def test_what_is_no_mesh_is_told(net):
    with pytest.raises(
        TypeError, match="the mesh is None: give a DeviceMesh, the fixture gt_mesh or init_device"
    ):
        data_parallel(net, None)


def test_a_scalar_parameter_and_a_dtensor_input_are_refused_by_name(
    gt_mesh, net, inputs, train_step
):
    from torch.distributed.tensor import Shard, distribute_tensor

    net.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(
        ValueError, match=r"temperature has no dimension to shard: give it shape \(1,\)"
    ):
        data_parallel(net, gt_mesh)
    sharded = distribute_tensor(torch.ones(8, 8), gt_mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(TypeError, match=r"inputs\[0\] is a DTensor: pass the local tensor"):
        trace_step(net, train_step, (sharded, inputs[1]))


def test_a_scalar_parameter_is_replicated(gt_mesh, net, inputs, train_step):
    """There is nothing to shard: its gradient is averaged with the others."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.temperature = net, nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.net(x) * self.temperature

    model = data_parallel(Scaled(), gt_mesh, mode="replicate")
    traced = trace_step(model, train_step, inputs)
    shapes = [tuple(launch.meta["val"].shape) for launch in launches(traced, ALL_REDUCE)]
    assert shapes.count(()) == 1


def test_applied_twice_it_leaves_its_own_alone(gt_mesh, net, inputs, train_step):
    """The twin: what it has sharded itself is no stranger."""
    once = count(trace_step(data_parallel(net, gt_mesh), train_step, inputs))
    assert count(trace_step(data_parallel(net, gt_mesh), train_step, inputs)) == once


def test_a_model_is_printed_without_a_collective(gt_mesh):
    """LayerNorm looks at its bias; pytest prints a failed test's arguments on the one rank that
    failed.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    model = data_parallel(nn.LayerNorm(8), gt_mesh)
    with CommDebugMode() as seen:
        assert "elementwise_affine=True, bias=True" in repr(model)
    assert seen.get_total_counts() == 0
    with CommDebugMode() as seen:
        model(torch.ones(2, 8))
    assert seen.get_total_counts() == 2
