"""Recomputed layers count their tokens twice.

torchtitan#1593 (2025): a router counts the tokens of each expert in its forward, and the counts
move a bias that balances the load. Under activation checkpointing the forward runs once more in
the backward, so a recomputed layer reported twice its tokens.
"""

from contextlib import contextmanager, nullcontext

import torch
from museum import exhibit, usual
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.register_buffer("tokens_per_expert", torch.zeros(3))
        self.counts = True

    @contextmanager
    def recomputing(self):
        self.counts = False
        yield
        self.counts = True

    def forward(self, x):
        logits = self.gate(x)
        if self.counts:
            chosen = logits.argmax(-1)
            self.tokens_per_expert += torch.bincount(chosen, minlength=3)
        return logits.sigmoid()


def train(bug, recompute, router, x):
    def contexts():
        return nullcontext(), nullcontext() if bug else router.recomputing()

    if recompute:
        scores = checkpoint(router, x, use_reentrant=False, context_fn=contexts)
    else:
        scores = router(x)
    scores.square().sum().backward()
    return {"tokens_per_expert": router.tokens_per_expert, "gate": router.gate.weight.grad}


def inputs():
    return Router(), torch.randn(8, 4)


@exhibit(
    "torchtitan#1593",
    2025,
    kind="scale",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at tokens_per_expert",
    usual=usual.of_functions(
        lambda bug, *given: train(bug, True, *given),
        lambda *given: train(False, False, *given),
        inputs,
    ),
)
def test_recomputation_leaves_what_the_forward_leaves(bug):
    results = {}
    for recompute in (True, False):
        torch.manual_seed(0)
        results[recompute] = train(bug, recompute, *inputs())
    assert_bitwise_equal(results[True], results[False], what="recomputed against kept")
