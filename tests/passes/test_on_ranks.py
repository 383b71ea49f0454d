"""Every pass alone, on real ranks: what the graph computes stays, bit for bit.

Extra process groups and hybrid sharding have such tests of their own (``test_process_groups``, the
parity suite).
"""

import copy

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    bind_options,
    canonicalize_graph_pass,
    deduplicate_fsdp_unshard_chains_pass,
    joint_transformer_block_bucketing_reordering_pass,
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
)
from pytest_gtrainer.passes.canonicalize import RULES, eliminate_dead_code_pass

PLAN = ["tok_embeddings", "layers.0", "layers.1", ["norm", "lm_head"]]
RESHARD = [bind_options(tag_with_memory_policy_pass), bind_options(selective_activation_remat_pass)]
CLEAN_UP = [
    bind_options(eliminate_dead_code_pass),
    bind_options(canonicalize_graph_pass, rules=RULES),
    bind_options(deduplicate_fsdp_unshard_chains_pass),
]
BUCKET = [bind_options(joint_transformer_block_bucketing_reordering_pass, bucket_plan=PLAN)]


def twice_step(model, tokens):
    """Reads every parameter twice."""
    return (
        model(tokens).float().logsumexp(-1).mean() + model(tokens.flip(0)).float().square().mean()
    )


@pytest.mark.second_tier("gathered once")
@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize(
    ("reuse_gathers", "steps"),
    [(False, [*CLEAN_UP, *RESHARD]), (True, [*RESHARD, *BUCKET])],
    ids=["gathered at every read", "gathered once"],
)
def test_no_pass_changes_a_bit(make_joint, reuse_gathers, steps):
    """D9, E7, M1: each on what those before it left, and again on its own output.

    Two values have one sum, so the order of a payload shows in no bit here; what a pass loses,
    swaps or overwrites does. Orders are the parity suite's.
    """
    traced = make_joint(n_layers=2, dim=10, step=twice_step, reuse_gathers=reuse_gathers)
    inputs = inputs_of(traced)
    expected = run(traced.gm, inputs)
    for step in steps:
        gm = step.function(traced.gm, traced.example_inputs, **step.options)
        gm.graph.lint()
        assert_bitwise_equal(run(gm, inputs), expected, what=step.name)
        code = gm.code
        assert step.function(gm, traced.example_inputs, **step.options).code == code
    other = [t if t.dtype == torch.int64 else 2 * t for t in inputs]
    assert_bitwise_different(run(gm, other), expected, what="twice the parameters")


def run(gm, inputs):
    return gm(*copy.deepcopy(inputs))


def inputs_of(traced):
    """Other values on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        torch.randint(0, 16, t.shape, generator=generator)
        if t.dtype == torch.int64
        else torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for t in traced.example_inputs
    ]
