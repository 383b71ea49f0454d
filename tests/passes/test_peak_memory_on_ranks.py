"""Peak memory by liveness against storages counted on two gloo ranks, byte by byte along the whole
graph.
"""

import pytest
import torch

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import peak_memory
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config
from pytest_gtrainer.tracing.model import ModelState, local
from tests.passes.alive import differing, run, sizes_of

TRAINING = {"llama3": llama3_training, "deepseek_v3": deepseek_v3_training}


@pytest.mark.second_tier
@pytest.mark.parametrize("model", TRAINING)
@pytest.mark.gt_world("ranks", size=2)
def test_the_curve_is_that_of_the_storages(gt_world, gt_mesh, model):
    """The graph is taken traced, bucketed, and with parameters gathered again in the backward."""
    config = TRAINING[model](gt_mesh, "bf16_fp32", steps=1)
    sharded = shard_traceably(new_model(config), config)
    traced = trace_config(config, sharded)
    stages = {
        "traced": traced,
        "bucketed": rewrite(traced, config),
        "gathered again": rewrite(traced, config, reshard_after_forward=True),
    }
    inputs = [local(t).detach() for t in ModelState.of(sharded).tensors]
    inputs += torch.utils._pytree.tree_leaves(config.inputs(0, gt_world.rank))
    peaks = {}
    for stage, step in stages.items():
        found = run(step.gm, inputs)
        sizes = sizes_of(step.gm, found)
        peaks[stage] = peak_memory(step.gm, sizes=sizes).peak
        assert differing(step.gm, found, sizes) == {}, stage
        assert max(nbytes for nbytes, _ in found.values()) == peaks[stage]
    assert len(set(peaks.values())) == 3, peaks  # what is compared depends on the passes
