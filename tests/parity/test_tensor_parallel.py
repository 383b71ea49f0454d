"""FSDP2 over tensor parallelism: ``parallelize_module``, then both sides; graph equals eager, bit
for bit.
"""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from fixtures.models import llama3
from fixtures.models.loss import ce_step
from fixtures.models.tensor_parallel import apply_tensor_parallel
from fixtures.training import (
    Parallelism,
    deepseek_v3_training,
    llama3_training,
    published_llama3_training,
    token_batches,
)
from pytest_gtrainer import (
    ActivationCheckpointConfig,
    TrainConfig,
    VacuousCheck,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_parity,
    assert_replicas_equal,
    bind_options,
    canonicalize_graph_pass,
    trace_step,
    train_eager,
    train_graph,
)
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.references.replicas import ReplicasDiffer, ReplicaWarning, texts_of_ranks
from pytest_gtrainer.tracing.model import local

on_four_ranks = pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "tp": 2})
BOTH = [pytest.param(True, id="sequence"), pytest.param(False, id="tensor", marks=pytest.mark.long)]
"""Of what is dear: sequence parallelism has all collectives of tensor parallelism, and more."""


@pytest.mark.second_tier
@on_four_ranks
@pytest.mark.parametrize("precision", ["fp32", "bf16_fp32"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
def test_graph_equals_eager_under_tensor_parallelism(gt_mesh, check_parity, precision, sequence):
    check_parity(
        llama3_training(
            gt_mesh,
            precision,
            "debug_odd_tp",
            parallel=Parallelism({"sequence": sequence}),
            steps=2,
        )
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=8, mesh={"replicate": 2, "dp": 2, "tp": 2})
def test_graph_equals_eager_under_hybrid_sharding_and_tensor_parallelism(gt_mesh, check_parity):
    check_parity(
        llama3_training(gt_mesh, "bf16_fp32", parallel=Parallelism({"sequence": True}), steps=2)
    )


# test_three_mistakes trains it in fp32, and a cell of test_parallelism_matrix in bf16.
@pytest.mark.second_tier
@pytest.mark.long
@pytest.mark.gt_world("ranks", size=8, mesh={"efsdp": 2, "ep": 2, "tp": 2})
def test_graph_equals_eager_under_expert_and_tensor_parallelism(gt_mesh, check_parity):
    check_parity(
        deepseek_v3_training(gt_mesh, "bf16_fp32", "debug_small", parallel=Parallelism({}), steps=2)
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "cp": 2})
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_graph_equals_eager_under_context_parallelism(gt_mesh, check_parity, method):
    """Parameters are sharded over both dimensions, batches over the first, sequences over the
    second.
    """
    check_parity(
        llama3_training(gt_mesh, "bf16_fp32", parallel=Parallelism(context=method), steps=2)
    )


# A cell of test_parallelism_matrix has "gather" beside tensor parallelism, and "ulysses" is above.
@pytest.mark.second_tier
@pytest.mark.long
@pytest.mark.gt_world("ranks", size=8, mesh={"dp": 2, "cp": 2, "tp": 2})
def test_graph_equals_eager_under_context_and_tensor_parallelism(gt_mesh, check_parity):
    check_parity(llama3_training(gt_mesh, "fp32", parallel=Parallelism({}, "ulysses"), steps=2))


@pytest.mark.second_tier
@on_four_ranks
def test_graph_equals_eager_with_a_sharded_loss_and_clipped_gradients(gt_mesh, check_parity):
    """The backward of the sharded cross entropy runs inside ``loss_parallel``, on both sides."""
    parallel = Parallelism({"loss_parallel": True, "sequence": True})
    check_parity(
        llama3_training(
            gt_mesh, "bf16_fp32", parallel=parallel, context=loss_parallel, max_norm=0.5, steps=2
        )
    )


@pytest.mark.second_tier
@on_four_ranks
@pytest.mark.parametrize("sequence", BOTH)
def test_graph_equals_eager_with_recomputed_layers(gt_mesh, check_parity_and_control, sequence):
    """Collectives of tensor parallelism run again in the backward, on both sides."""
    again = ActivationCheckpointConfig()
    parallel = Parallelism({"sequence": sequence})
    config = llama3_training(
        gt_mesh, "fp32", parallel=parallel, activation_checkpoint=again, steps=2
    )
    graph = check_parity_and_control(config).traced.gm.graph
    attentions = [node for node in graph.nodes if "scaled_dot_product" in str(node.target)]
    assert sum("backward" not in str(node.target) for node in attentions) == 4, (
        "two layers, each of them twice"
    )


@pytest.mark.second_tier
@on_four_ranks
@pytest.mark.parametrize("sequence", BOTH)
def test_graph_equals_eager_with_the_head_tied_to_the_embedding(
    gt_mesh, check_parity_and_control, sequence
):
    """Tie them again behind ``parallelize_module``, which gives each module a parameter of
    its own.
    """
    config = llama3_training(gt_mesh, "fp32", parallel=Parallelism({"sequence": sequence}), steps=2)

    def tied():
        model = config.model()
        model.lm_head.weight = model.tok_embeddings.weight
        return model

    plan = [["tok_embeddings", "norm", "lm_head"], "layers.0", "layers.1"]
    graph = check_parity_and_control(replace(config, model=tied, bucket_plan=plan))
    assert "lm_head.weight" not in graph.traced.trainable_fqns, "one parameter, with one gradient"


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=8, mesh={"efsdp": 2, "ep": 2, "tp": 2})
@pytest.mark.parametrize("sequence", BOTH)
def test_graph_equals_eager_with_experts_over_expert_and_tensor_parallelism(
    gt_mesh, check_parity_and_control, sequence
):
    """Each rank has a part of some experts, and half of that again by ``fully_shard``."""
    parallel = Parallelism({"experts": True, "sequence": sequence})
    graph = check_parity_and_control(
        deepseek_v3_training(gt_mesh, "fp32", "debug_small", parallel=parallel, steps=2)
    )
    w1 = dict(graph.model.named_parameters())["layers.1.moe.routed_experts.w1"]
    assert (w1.device_mesh.mesh_dim_names, w1.placements) == (("efsdp", "tp"), (Shard(0), Shard(1)))
    assert w1.to_local().shape == (2, 24, 64), "of 8 experts, 48 wide"


@pytest.mark.second_tier("tensor")
@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
def test_a_replay_without_data_parallelism_leaves_gradients_as_autograd_places_them(
    gt_mesh, sequence
):
    """N3: those of norms are partial sums under sequence parallelism; a second step adds to what is
    there.
    """
    config = llama3.FLAVORS["debug"]
    inputs = token_batches(config.vocab_size, "cpu")(0, 0)
    eager = llama3.Llama3(config)
    eager.init_weights(seed=0)
    apply_tensor_parallel(eager, gt_mesh, sequence=sequence)
    graph = copy.deepcopy(eager)
    traced = trace_step(graph, ce_step, inputs)
    for _ in range(2):
        ce_step(eager, *inputs).backward()
        traced.replay(graph, *inputs)
        for (name, expected), parameter in zip(
            eager.named_parameters(), graph.parameters(), strict=True
        ):
            assert getattr(parameter.grad, "placements", None) == getattr(
                expected.grad, "placements", None
            ), name
        assert_bitwise_equal(gradients(graph), gradients(eager))
    first = next(iter(gradients(eager)))
    assert_bitwise_different(
        gradients(graph), {**gradients(eager), first: gradients(eager)[first] + 1}
    )


@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
def test_a_replay_adds_to_a_gradient_that_lies_otherwise(gt_mesh):
    """The present gradient is whole on every rank, the new one is a partial sum: autograd, too,
    adds the sum.
    """
    weight = distribute_tensor(torch.ones(2), gt_mesh, [Replicate()], src_data_rank=None)
    models = [nn.Module(), nn.Module()]
    for model in models:
        model.weight = nn.Parameter(weight.clone())
        model.weight.grad = torch.zeros_like(model.weight)

    def step(model, x):
        partial = DTensor.from_local(x, gt_mesh, [Partial()], run_check=False)
        return (model.weight * partial).to_local().sum()

    x = torch.full((2,), 1.0 + gt_mesh.get_local_rank())
    step(models[0], x).backward()
    trace_step(models[1], step, (x,)).replay(models[1], x)
    assert (
        models[1].weight.grad.full_tensor().tolist() == models[0].weight.grad.full_tensor().tolist()
    )


def gradients(model):
    return {name: local(parameter.grad) for name, parameter in model.named_parameters()}


# --- what a cluster would run, as text


@pytest.mark.gt_world("fake", size=512, mesh={"dp": 64, "tp": 8})
def test_the_schedule_of_a_published_size_names_the_dimensions(gt_mesh, gt_world, gt_golden):
    """The schedule separates collectives of the data from those of the model: the first two layers
    of Llama 3 8B on 512 ranks.

    Pads of nothing go, of which torch 2.15 traces one for each rank of an uneven shard. It also
    adds the partial gradients of norms in the dtype that FSDP2 then reduces in, so its golden is
    another.
    """
    parallel = Parallelism({"sequence": True})
    traced = GraphRun(
        published_llama3_training(gt_mesh, "bf16_fp32", n_layers=2, parallel=parallel)
    ).traced
    gm = apply_graph_passes(
        traced.gm, traced.example_inputs, [bind_options(canonicalize_graph_pass)]
    )
    gt_golden.check(gm, "schedule", view="schedule", per="torch")


# --- on two nodes, where the order of a sum shows


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=8, nodes=2, mesh={"dp": 4, "tp": 2})
@pytest.mark.parametrize("sequence", BOTH)
def test_graph_equals_eager_on_two_nodes(gt_world, sequence):
    """N9: the first row of the vocabulary on a rank is a number of its own in the graph, and an
    input of the replay. Two groups of data ranks may add in different orders here, so the replicas
    of a norm drift apart; that is reported.
    """
    message = r"norm.weight differs between ranks \d and \d, .*on ranks it is an error"
    with pytest.warns(ReplicaWarning, match=message):
        parity = assert_parity(
            lambda mesh: llama3_training(
                mesh, "fp32", parallel=Parallelism({"sequence": sequence}), steps=2
            ),
            gt_world,
        )
    assert parity.control.outcome == "different"


@pytest.mark.gt_world("simulated", size=4, nodes=1, mesh={"dp": 2, "tp": 2})
def test_ranks_that_share_a_model_have_one_batch(gt_world):
    """N9: it is asked for by data coordinate, which is no rank. The model is whole on both."""
    asked = []

    def batch(step, coordinate):
        asked.append(coordinate)
        return (torch.ones(2, 4) * (coordinate + 1),)

    def config(mesh):
        return TrainConfig(
            model=lambda: nn.Linear(4, 4),
            step=lambda model, x: model(x).square().mean(),
            batch=batch,
            mesh=mesh["dp"],
            bucket_plan=[""],
            steps=1,
        )

    train_graph(config, world=gt_world)
    assert set(asked) == {0, 1}


# --- what parity cannot see: both sides compute the same wrong thing


@pytest.mark.second_tier("train_graph")
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(
            train_eager, marks=pytest.mark.gt_world("ranks", size=2, mesh={"dp": 1, "tp": 2})
        ),
        pytest.param(train_graph, marks=on_four_ranks),
    ],
)
def test_a_plan_whose_partial_sums_nobody_adds_is_told(gt_mesh, train):
    """Columns of ``w1`` and ``w3`` without a sum behind ``w2``: every rank goes on with its own
    part of it.
    """
    config = llama3_training(gt_mesh["dp"], "fp32", steps=1)

    def wrong():
        model = config.model()
        for layer in model.layers:
            columns = ColwiseParallel(output_layouts=None)
            parallelize_module(layer.feed_forward, gt_mesh["tp"], {"w1": columns, "w3": columns})
            layer.feed_forward.w2.forward = _own_columns(layer.feed_forward.w2, gt_mesh["tp"])
        return model

    message = (
        r"differs between ranks 0 and 1, and is whole on every rank that shares the model: a "
        r"shard is a"
    )
    with pytest.raises(ReplicasDiffer, match=message):
        train(replace(config, model=wrong))


def _own_columns(linear, mesh):
    """Rows of the product that belong to this rank alone: a plan that forgot to add them over the
    ranks.
    """

    def forward(x):
        start = mesh.get_local_rank() * x.shape[-1]
        return torch.nn.functional.linear(x, linear.weight[:, start : start + x.shape[-1]])

    return forward


@on_four_ranks
def test_batches_that_differ_between_ranks_of_one_model_are_told(gt_mesh, gt_world):
    """N4: both sides compare them."""
    config = llama3_training(gt_mesh, "fp32", parallel=Parallelism({}), steps=1)
    by_rank = replace(config, batch=lambda step, coordinate: config.batch(step, gt_world.rank))
    with pytest.raises(
        ReplicasDiffer,
        match=r"input 0 differs between ranks 0 and 1, .*TrainConfig.batch\(0, coord",
    ):
        train_eager(by_rank)


@on_four_ranks
def test_replicas_are_compared_over_a_dimension_by_name(gt_mesh, gt_world):
    """On every rank, also on those whose own tensors are equal."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert_replicas_equal(model, gt_mesh, over="tp")
    if gt_world.rank == 3:
        nn.init.zeros_(model[1].bias)
    with pytest.raises(
        ReplicasDiffer,
        match=r"1.bias differs between ranks 2 and 3, and is replicated over 'tp'; so",
    ):
        assert_replicas_equal(model, gt_mesh, over="tp")
    with pytest.raises(ReplicasDiffer, match=r"1.bias differs between ranks 2 and 3"):
        assert_replicas_equal(model, gt_mesh["tp"], over="tp")
    with pytest.raises(ReplicasDiffer, match=r"1.bias differs between ranks 1 and 3"):
        assert_replicas_equal(model, gt_mesh, over="dp")
    assert len(set(texts_of_ranks("alive"))) == 1


@on_four_ranks
@pytest.mark.parametrize("what", ["a parameter", "a gradient"])
def test_replicas_that_are_not_finite_prove_nothing(gt_mesh, gt_world, what):
    """V6: on every rank, with the first rank that has it. A mask in a buffer may be infinite."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), float("-inf")))
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    assert_replicas_equal(model, gt_mesh, over="tp")
    bad = torch.full((2,), float("nan"))
    if gt_world.rank in (2, 3):
        model.bias.grad = bad if what == "a gradient" else torch.ones(2)
        model.bias.data.copy_(bad if what == "a parameter" else torch.ones(2))
    name = "bias" if what == "a parameter" else "the gradient of bias"
    with pytest.raises(
        VacuousCheck, match=f"^{name} is NaN or infinite on rank 2, in every element"
    ):
        assert_replicas_equal(model, gt_mesh, over="tp")


class Held(nn.Module):
    """Parameters on a mesh of dp and tp: ``what`` differs on rank 3, and shards differ on each
    rank.
    """

    def __init__(self, mesh, rank, what) -> None:
        super().__init__()

        def held(name):
            return torch.full((2,), float(name == what and rank == 3))

        def sharded(name, *placements):
            local = held(name) + {"both": rank, "partial": rank // 2}.get(name, 0)
            return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))

        self.parameter, self.dp = (
            nn.Parameter(held("parameter")),
            sharded("dp", Shard(0), Replicate()),
        )
        self.tp, self.both = (
            sharded("tp", Replicate(), Shard(0)),
            sharded("both", Shard(0), Shard(0)),
        )
        self.partial = sharded(
            "partial", Partial(), Replicate()
        )  # each rank of dp holds a term of its own
        self.register_buffer("buffer", held("buffer"))
        self.parameter.grad = held("the gradient of parameter")


@on_four_ranks
@pytest.mark.parametrize(
    ("what", "over"),
    [
        ("parameter", {"dp", "tp"}),
        ("the gradient of parameter", {"dp", "tp"}),
        ("buffer", {"dp", "tp"}),
        ("dp", {"tp"}),
        ("tp", {"dp"}),
        ("both", set()),
        ("partial", {"tp"}),
    ],
)
def test_what_ranks_hold_alike_and_what_they_share_out(gt_mesh, gt_world, what, over):
    """N5: parameters, gradients and buffers; of a DTensor what is not split between the ranks that
    are compared.
    """
    model, reported = Held(gt_mesh, gt_world.rank, what), {}
    for name in ("dp", "tp"):
        differ = pytest.raises(ReplicasDiffer)
        with differ if name in over else contextlib.nullcontext() as found:
            assert_replicas_equal(model, gt_mesh, over=name)
        if found is not None:
            reported[name] = str(found.value).partition(", and")[0]
    words = {
        "dp": f"{what} differs between ranks 1 and 3",
        "tp": f"{what} differs between ranks 2 and 3",
    }
    assert reported == {name: words[name] for name in sorted(over)}, (
        f"{what} is held alike over {over}"
    )


@on_four_ranks
def test_a_dimension_over_which_nothing_can_be_compared_is_refused(gt_mesh):
    with pytest.raises(ValueError, match="the mesh has no dimension 'cp', it has dp, tp"):
        assert_replicas_equal(nn.Linear(2, 2), gt_mesh, over="cp")
    model = parallelize_module(
        nn.Sequential(nn.Linear(2, 2)), gt_mesh["tp"], {"0": ColwiseParallel()}
    )
    with pytest.raises(
        ValueError, match="no tensor of Sequential is replicated over 'tp': nothing could differ"
    ):
        assert_replicas_equal(model, gt_mesh, over="tp")
