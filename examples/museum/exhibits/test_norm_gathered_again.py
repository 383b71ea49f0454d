"""The backward gathers the last norm again, though its bucket stays gathered after the forward.

Found by this project (2026) in torchtitan's graphs: the last bucket, norm and head, is not
resharded, as the backward begins with it; its memory policy knew the head alone. One more
all-gather a step, and a bucket that differs from eager's; every value is right. Rebuilt with a
policy of that kind.
"""

import pytest
import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import (
    CheckFailure,
    apply_graph_passes,
    assert_graph,
    bind_options,
    data_parallel,
    eliminate_dead_code_pass,
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
    trace_step,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.norm, self.lm_head = nn.RMSNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(self.layer(self.first(x)).sin()))


@exhibit(
    "torchtitan, norm",
    2026,
    kind="memory",
    found_by="golden",
    raises=CheckFailure,
    says="count 0 all_gather_into_tensor in bwd norm",
    usual="nobody: all values are equal",
)
@pytest.mark.gt_world("fake", size=4)
def test_the_last_bucket_stays_gathered(gt_mesh, bug):
    model = data_parallel(Model(), gt_mesh)
    traced = trace_step(model, lambda model, x: model(x).square().mean(), (torch.ones(2, 8),))
    kept = ["lm_head"] if bug else ["norm", "lm_head"]
    passes = [
        bind_options(tag_with_memory_policy_pass, keep_unsharded=kept),
        selective_activation_remat_pass,
        eliminate_dead_code_pass,
    ]
    gm = apply_graph_passes(traced.gm, traced.example_inputs, passes)
    assert_graph(
        gm,
        """
        count 1 all_gather_into_tensor in bwd layer
        count 0 all_gather_into_tensor in bwd norm
        count 0 all_gather_into_tensor in bwd lm_head
        """,
    )
