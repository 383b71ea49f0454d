"""Stages of a pipeline: graphs in the order of torch's own schedules equal eager stages of
``fully_shard``.
"""

from dataclasses import replace

import pytest
import torch

from fixtures.models import llama3
from fixtures.models.stages import DecoderStage
from fixtures.pipeline import train_pipeline_eager, train_pipeline_graph
from fixtures.training import PRECISIONS, Parallelism, staged_training
from pytest_gtrainer import (
    NetModel,
    Record,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    bind_options,
    canonicalize_graph_pass,
    data_parallel,
    joint_transformer_block_bucketing_reordering_pass,
    split_stage_graph,
    trace_stage,
)
from pytest_gtrainer.references.simulated import mesh_of
from pytest_gtrainer.worlds.simulated.threads.run import run_threads


@pytest.mark.gt_world("fake", mesh={"pp": 8, "dp": 64, "tp": 8}, rank=3 * 512)
def test_the_schedule_of_a_stage_of_a_published_size_names_the_dimensions(gt_mesh, gt_golden):
    """On 4,096 ranks: a layer of Llama 3 8B in the fourth of eight stages, its five parts one
    behind the other.
    """
    whole = replace(llama3.FLAVORS["8B"], n_layers=8)
    with torch.device("meta"):
        model = llama3.Llama3(whole)
    Parallelism({}).apply(model, gt_mesh)
    stage = data_parallel(
        DecoderStage(model, 3, 8), gt_mesh["dp"], mp_policy=PRECISIONS["bf16_fp32"]
    )
    x = torch.empty(
        1, whole.max_seq_len, whole.dim, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    traced = trace_stage(stage, (x,))
    bucketed = bind_options(
        joint_transformer_block_bucketing_reordering_pass, bucket_plan=["layers.3"]
    )
    gm = apply_graph_passes(
        traced.gm, traced.example_inputs, [bind_options(canonicalize_graph_pass), bucketed]
    )
    for name, part in split_stage_graph(gm).parts.items():
        gt_golden.check(part.gm, name, view="schedule")


on_four_ranks = pytest.mark.gt_world("ranks", size=4, mesh={"pp": 2, "dp": 2})


@pytest.mark.second_tier
@on_four_ranks
@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        ("1F1B", "bf16_fp32"),
        ("1F1B", "fp32"),
        ("GPipe", "bf16_fp32"),
        ("Interleaved1F1B", "bf16_fp32"),
    ],
)
def test_graphs_of_stages_equal_eager_ones(gt_mesh, schedule, precision):
    """Losses, gradients, weights and optimiser state of a step; the twin adds what is reduced a
    microbatch.
    """
    config = staged_training(
        gt_mesh, precision, schedule, stages=4 if schedule == "Interleaved1F1B" else 2
    )
    expected = train_pipeline_eager(config)
    assert_bitwise_equal(train_pipeline_graph(config), expected)
    if precision == "fp32":
        assert_bitwise_different(train_pipeline_graph(config, reduce_each=True), expected)


@pytest.mark.second_tier
@on_four_ranks
def test_a_zero_bubble_in_graphs_equals_eager_stages_without(gt_mesh):
    """dI and dW apart. Torch's own loses gradients beside ``fully_shard`` (2.13, on CPU): 1F1B is
    the measure.
    """
    zero_bubble = staged_training(gt_mesh, "bf16_fp32", "InterleavedZeroBubble", stages=4)
    expected = train_pipeline_eager(replace(zero_bubble, schedule="Interleaved1F1B"))
    assert_bitwise_equal(train_pipeline_graph(zero_bubble), expected)


@pytest.mark.second_tier("Inter", "ZBVZeroBubble")
@pytest.mark.gt_world("ranks", size=2, mesh={"pp": 2, "dp": 1})
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_zero_bubble_in_graphs_equals_torchs_own(gt_mesh, schedule):
    """Without data parallelism."""
    config = staged_training(gt_mesh, "fp32", schedule, stages=4)
    assert_bitwise_equal(train_pipeline_graph(config), train_pipeline_eager(config))


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=8, mesh={"pp": 2, "dp": 2, "tp": 2})
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
def test_graphs_of_stages_equal_eager_ones_beside_tensor_parallelism(gt_mesh, sequence):
    """Partial gradients of norms are added over microbatches before they are added over the model's
    ranks.
    """
    config = staged_training(gt_mesh, "bf16_fp32", tensor={"sequence": sequence})
    assert_bitwise_equal(train_pipeline_graph(config), train_pipeline_eager(config))


@pytest.mark.second_tier
def test_torchs_schedules_run_on_simulated_nodes():
    """Eager stages on threads: two schedules add alike; with ranks on four nodes in the place of
    two sums differ.
    """

    def train(schedule, nodes):
        def on_rank(rank):
            return train_pipeline_eager(
                staged_training(mesh_of({"pp": 2, "dp": 4}), "fp32", schedule)
            )

        return Record.merged(run_threads(8, on_rank, net=NetModel.of_world(8, nodes)))

    expected = train("1F1B", 2)
    assert_bitwise_equal(train("GPipe", 2), expected)
    assert_bitwise_different(train("GPipe", 4), expected)


@pytest.mark.gt_world("fake", size=4, mesh={"pp": 2, "dp": 2})
def test_a_pipeline_that_cannot_be_filled_is_refused(gt_mesh):
    config = staged_training(gt_mesh, "fp32")
    with pytest.raises(
        ValueError, match=r"^microbatches=1 is less than num_stages=2: some stage would always wait"
    ):
        replace(config, microbatches=1)
    with pytest.raises(
        ValueError, match=r"^num_stages=3: give two or more, as many on each of 2 ranks"
    ):
        replace(config, num_stages=3)
    with pytest.raises(
        ValueError, match=r"^input 0 has 4 rows, which do not divide into 3 microbatches"
    ):
        train_pipeline_eager(replace(config, microbatches=3))
