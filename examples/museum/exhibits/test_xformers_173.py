"""A kernel takes the address of its seed for the seed.

xformers#173 (2022): the Triton kernels of dropout got a tensor with seeds and used the pointer
itself as a number. Two tensors with one seed gave two masks, so runs with equal seeds differed.
Here a Python function plays the kernel.
"""

from functools import partial

import torch
from museum import exhibit

from pytest_gtrainer import BitwiseDifference, assert_run_to_run


def dropout(x, seeds, bug):
    number = seeds.data_ptr() if bug else int(seeds[0])
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(number)) > 0.5
    return x * keep * 2


KEPT = []
"""Seeds of earlier runs: a trainer keeps them, so a later run gets another address."""


def run(bug):
    KEPT.append(torch.full((256,), 7))
    return {"output": dropout(torch.ones(64), KEPT[-1], bug)}


@exhibit(
    "xformers#173",
    2022,
    kind="nondeterminism",
    found_by="bits",
    raises=BitwiseDifference,
    says="dropout does not repeat itself under this pressure",
    usual="in one process a second run often gets the same address, and the loss is as good",
)
def test_a_seed_gives_one_mask(bug):
    assert_run_to_run(partial(run, bug), what="dropout")
