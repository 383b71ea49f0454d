"""A fault that graph_trainer 0.3.0 has: the test fails on the day on which it is gone."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torchtitan.experiments.graph_trainer.fsdp_passes import deduplicate_fsdp_unshard_chains_pass


@pytest.mark.gt_world("fake", size=2)
def test_deduplication_drops_a_cast(gt_world):
    """Two reads of a parameter become one, also where only the second is cast.

    ``GroupedExperts`` reads each weight twice: it asks whether it is a DTensor, and then casts it to
    bfloat16. The pass takes the cast for a part of the gather, and keeps the read without it.
    """
    collectives = torch.ops._c10d_functional

    def gathered(weight):
        name = dist.group.WORLD.group_name
        return collectives.wait_tensor(collectives.all_gather_into_tensor(weight, 2, name))

    def step(weight, tokens):
        gathered(weight)
        return tokens.bfloat16() @ gathered(weight).bfloat16()

    inputs = (torch.ones(2, 4), torch.ones(3, 4))
    gm = make_fx(step)(*inputs)
    assert gm(*inputs).dtype == torch.bfloat16
    deduplicate_fsdp_unshard_chains_pass(gm)
    with pytest.raises(RuntimeError, match="same dtype"):
        gm(*inputs)
