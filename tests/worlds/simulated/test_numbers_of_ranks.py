"""Numbers that a rank has of its own in an otherwise equal graph: which are distinguished, and
which are refused.
"""

from dataclasses import replace

import pytest
import torch.distributed as dist

from fixtures.models.loss import ce_step
from fixtures.training import Parallelism, llama3_training
from pytest_gtrainer.conformance.recipes import Recipe
from pytest_gtrainer.references.simulated import SimulatedGraphRun
from pytest_gtrainer.worlds.simulated import DependsOnRank

SQUARE = pytest.mark.gt_world("simulated", size=4, nodes=2, mesh={"dp": 2, "tp": 2})
LINE = pytest.mark.gt_world("simulated", size=4, nodes=2, mesh={"fsdp": 4})


def graph_of(world, number):
    """The replay of a step whose loss is a number of each rank's own."""

    def config(mesh):
        small = Recipe(layers=1, reduced=None).config(mesh["dp"])

        def step(model, tokens):
            return small.step(model, tokens) * 0.0 + number(dist.get_rank())

        return replace(small, step=step, steps=1)

    return SimulatedGraphRun(config, world)


@pytest.mark.second_tier("1]")
@pytest.mark.gt_world("simulated", size=8, nodes=2, mesh={"dp": 4, "tp": 2})
@pytest.mark.parametrize("dim", [0, 1])
def test_a_number_along_one_dimension_is_each_ranks_own(gt_world, dim):
    """Those between the first and the last, too."""

    def number(rank):
        return 2.0 + (rank // 2, rank % 2)[dim]

    record = graph_of(gt_world, number).run()
    losses = {key.rank: tensor.item() for key, tensor in record.items() if key.phase == "loss"}
    assert losses == {rank: number(rank) for rank in range(8)}


@pytest.mark.second_tier
@SQUARE
def test_a_number_along_two_dimensions_is_refused(gt_world):
    """Rank 1, rank 2 and the last rank agree, which no value along one dimension distinguishes from
    rank 0's.
    """
    with pytest.raises(DependsOnRank, match="the graph depends on the rank"):
        graph_of(gt_world, lambda rank: 1.0 if rank == 0 else 2.0)


@pytest.mark.second_tier
@LINE
def test_a_rank_in_the_middle_that_computes_otherwise_is_refused(gt_world):
    """It subtracts its number where the others add theirs.

    The first and the last rank differ in numbers alone.
    """

    def step(model, tokens, labels):
        loss, number = ce_step(model, tokens, labels), 10.0 * dist.get_rank()
        return loss - 7.0 if dist.get_rank() == 1 else loss + number

    with pytest.raises(DependsOnRank, match=r"rank 1 has call_function aten.sub"):
        SimulatedGraphRun(lambda mesh: llama3_training(mesh, "fp32", step=step, steps=1), gt_world)


@SQUARE
def test_clipping_beside_tensor_parallelism_is_refused_in_one_sentence(gt_world):
    with pytest.raises(
        ValueError, match="max_norm beside tensor parallelism is not replayed in a simulated world"
    ):
        SimulatedGraphRun(
            lambda mesh: llama3_training(mesh, "fp32", parallel=Parallelism({}), max_norm=1.0),
            gt_world,
        )
