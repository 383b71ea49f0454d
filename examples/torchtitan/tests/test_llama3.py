"""Llama 3 of torchtitan by its own parallelize: graph_trainer against eager FSDP2, and the unsharded model."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from debug_models import DebugModel, names_of_inputs, on_cpu

from pytest_gtrainer import assert_runs_equal

FSDP = {"data_parallel_shard_degree": 2}


@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_the_graph_trains_as_eager_fsdp2_does(gt_world, gt_deterministic):
    """Losses, gradients and weights of two steps, in bits."""
    lab = DebugModel("llama3", **FSDP)
    assert_runs_equal(
        lambda: lab.train(is_graph=True)[0],
        lambda: lab.train(is_graph=False)[0],
        control=lambda: lab.train(is_graph=True, scale=1 + 2**-20)[0],
        what="Llama 3, FSDP of 2",
    )


@pytest.mark.gt_world("fake", size=2)
def test_the_graph_of_the_flavour(gt_world, gt_golden):
    """The graph that graph_trainer runs, after its own passes."""
    lab = DebugModel("llama3", **FSDP)
    with on_cpu():
        trainer = lab.trainer(is_graph=True)
        lab.step(trainer, 0)
    traced = trainer._traced_step
    gt_golden.check(traced.gm, names=names_of_inputs(traced))
