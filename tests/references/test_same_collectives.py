"""Before anything runs: do all ranks issue the same collectives? And values only where they mean something."""

import pytest
import torch

from fixtures.training import llama3_training
from pytest_gtrainer import train_eager
from pytest_gtrainer._torch.passes import REDUCE_SCATTER
from pytest_gtrainer.references.graph import GraphRun, RanksDisagree, assert_same_collectives


@pytest.mark.gt_world("ranks", size=4)
def test_ranks_that_pad_differently_agree_and_a_swapped_launch_is_named(gt_mesh):
    """D14: uneven shards agree; then rank 2 sums where the others average, and every rank says so."""
    graph = GraphRun(llama3_training(gt_mesh, "fp32", "debug_odd"))
    assert_same_collectives(graph.traced.gm)
    if gt_mesh.get_rank() == 2:
        graph.traced.gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)[1].meta["val"] = torch.empty(7)
    with pytest.raises(RanksDisagree, match=r"rank 0 issues _c10d_functional.reduce_scatter.*rank 2 issues .*\[7\]"):
        graph.run()


@pytest.mark.gt_world("fake", size=4)
def test_training_under_a_fake_world_is_refused(gt_mesh):
    """W1: its collectives move no data."""
    with pytest.raises(ValueError, match="a fake world moves no data"):
        train_eager(llama3_training(gt_mesh, "fp32"))


@pytest.mark.gt_world("ranks", size=2)
def test_a_factory_that_hands_out_one_model_twice_is_refused(gt_mesh):
    config = llama3_training(gt_mesh, "fp32", steps=1)
    model = config.model()
    shared = llama3_training(gt_mesh, "fp32", steps=1, model=lambda: model)
    GraphRun(shared)
    with pytest.raises(ValueError, match="must build a new, unsharded model at every call"):
        GraphRun(shared)
