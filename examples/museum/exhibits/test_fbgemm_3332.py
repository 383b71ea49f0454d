"""The learning rate is a Python number, so each step of its warm-up compiles again.

FBGEMM#3332 (2024): a guard holds the number, and a warm-up of ten thousand steps would compile ten
thousand times, minutes each. torch stops at a limit and runs eager code from there. The rate became
a tensor.
"""

import torch
from museum import exhibit

from pytest_gtrainer import gt_compile


def update(weight, gradient, rate):
    return weight - rate * gradient


@exhibit(
    "FBGEMM#3332",
    2024,
    kind="compile",
    found_by="record",
    raises=AssertionError,
    says="rate == 0.1",
    usual="nobody: all values are equal",
)
def test_a_warm_up_compiles_once(bug):
    step = torch.compile(update, dynamic=False)
    with gt_compile() as record, torch.no_grad():
        for count in (1, 2, 3):
            rate = 0.1 * count
            step(torch.ones(4), torch.ones(4), rate if bug else torch.tensor(rate))
    record.assert_compiles(1)
