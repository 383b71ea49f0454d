"""compile=True compiles nothing, as another option has a default that excludes it.

rf-detr#1410 (2026): the trainer compiles the model only without multi-scale training, which is on
by default. A run with compile=True was eager from its first step to its last, and a line in the
log was the only trace.
"""

import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import gt_compile


def trainer(model, *, compiles=False, multi_scale=True, bug=False):
    """Return the forward that is trained."""
    if compiles and not (bug and multi_scale):
        return torch.compile(model)
    return model


@exhibit(
    "rf-detr#1410",
    2026,
    kind="compile",
    found_by="record",
    raises=AssertionError,
    says="expected 1 graph and 0 recompilations, found 0 graphs and 0 recompilations",
    usual="nobody: all values are equal",
)
def test_the_model_is_compiled(bug):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    forward = trainer(model, compiles=True, bug=bug)
    with gt_compile() as record:
        forward(torch.randn(6, 4)).sum().backward()
    record.assert_compiles(1)
