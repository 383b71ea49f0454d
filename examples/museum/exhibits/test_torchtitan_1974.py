"""Tokens come back from experts in the order in which threads of a GPU get to add them.

torchtitan#1974 (2025): ``scatter_add`` adds by atomics on a GPU, so a forward of experts had other
bits in each run; a product of matrices took its place. A CPU adds one after the other, so here both
versions repeat themselves, and no check on a CPU can find it.
"""

from functools import partial

import torch
from museum import exhibit

from pytest_gtrainer import assert_run_to_run

TOKENS, EXPERTS = 64, 4


def combine(bug):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS * EXPERTS, 8, generator=generator)
    token = torch.arange(TOKENS).repeat(EXPERTS)
    if bug:
        index = token.unsqueeze(-1).expand_as(rows)
        return {"output": torch.zeros(TOKENS, 8).scatter_add(0, index, rows)}
    ordered = rows.view(EXPERTS, TOKENS, 8).transpose(0, 1)
    return {"output": torch.bmm(torch.ones(TOKENS, 1, EXPERTS), ordered).squeeze(1)}


@exhibit(
    "torchtitan#1974",
    2025,
    kind="nondeterminism",
    found_by="not found",
    raises=None,
    says="atomics of a GPU: on a CPU the operator repeats itself",
    usual="nobody without a GPU, and there the difference lies within tolerances",
)
def test_experts_come_back_in_one_order(bug):
    assert_run_to_run(partial(combine, bug), what="combine")
