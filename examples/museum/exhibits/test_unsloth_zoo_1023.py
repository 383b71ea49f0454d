"""A loss that is divided by all tokens is divided by the accumulation steps as well.

unsloth-zoo#1023 (2026): whether the loss was given the number of tokens of all microbatches, and
whether the step divided by their number, was decided by two conditions. Where both held, losses and
gradients were too small by the number of accumulation steps.
"""

import torch
from museum import exhibit, usual
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_function

STEPS = 4


def loss_of(model, tokens, items=None):
    each = model(tokens).square().sum(-1)
    return each.mean() if items is None else each.sum() / items


def whole(model, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    return model.weight.grad.clone()


def accumulated(bug, model, tokens):
    for part in tokens.chunk(STEPS):
        loss = loss_of(model, part, items=len(tokens))
        if bug:  # right for a loss that is a mean of its own tokens
            loss = loss / STEPS
        loss.backward()
    return model.weight.grad.clone()


def inputs():
    return nn.Linear(4, 4, bias=False), torch.randn(8, 4)


@exhibit(
    "unsloth-zoo#1023",
    2026,
    kind="scale",
    found_by="proof",
    raises=AnotherFunction,
    says="1/4 times what is expected",
    usual=usual.of_functions(accumulated, whole, inputs),
)
def test_the_loss_is_divided_once(bug):
    assert_same_function(
        lambda *given: accumulated(bug, *given),
        whole,
        inputs=inputs(),
        at_least="rounds elsewhere",
    )
