"""A router that is run again for the backward chooses other experts.

torchtitan#3146 (2026): on some devices ``topk`` picks among equal scores as it comes, so under
selective activation checkpointing the recomputed router could choose other experts than the
forward had, and gradients were wrong without an error. Here a kernel that alternates plays that
``topk``; the fix breaks ties by the index.
"""

import torch
from museum import exhibit, usual
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class MoE(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug, self.calls = bug, 0
        self.gate = nn.Linear(4, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 4, 4))
        with torch.no_grad():  # experts 0 and 1 are scored alike, and so are 2 and 3
            self.gate.weight[1::2] = self.gate.weight[::2]

    def choose(self, scores):
        self.calls += 1
        if self.bug and self.calls % 2 == 0:
            return 3 - scores.flip(-1).argmax(-1)
        return scores.argmax(-1)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = self.choose(scores)
        weight = scores.gather(-1, chosen.unsqueeze(-1))
        return torch.einsum("ti,tij->tj", x, self.experts[chosen]) * weight


def gradients(recompute, bug):
    torch.manual_seed(0)
    model, x = MoE(bug), torch.randn(8, 4)
    output = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
    output.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@exhibit(
    "torchtitan#3146",
    2026,
    kind="nondeterminism",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at experts",
    usual=usual.of_results(lambda bug: gradients(True, bug), lambda: gradients(False, False)),
)
def test_recomputation_changes_no_gradient(bug):
    assert_bitwise_equal(
        gradients(True, bug), gradients(False, bug), what="recomputed against kept"
    )
