"""Gradient accumulation takes the mean of means, so tokens of short microbatches count more.

mlx-lm#1413 (2026): each microbatch's loss was a mean over its own tokens, and gradients were
divided by the number of microbatches. With examples of other lengths that is not the gradient of
the mean over all tokens, and it depends on how examples are cut into microbatches. Trainers have
this again and again: huggingface/blog#2414 (2024) tells it of the one of transformers.
"""

import torch
from museum import exhibit, usual
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_function

LENGTHS = [2, 6]


def loss_of(model, tokens):
    return model(tokens).square().sum(-1).mean()


def whole(model, tokens):
    loss_of(model, tokens).backward()
    return model.weight.grad.clone()


def accumulated(bug, model, tokens):
    for part in tokens.split(LENGTHS):
        weight = 1 / len(LENGTHS) if bug else len(part) / len(tokens)
        (loss_of(model, part) * weight).backward()
    return model.weight.grad.clone()


def inputs():
    return nn.Linear(4, 4, bias=False), torch.randn(sum(LENGTHS), 4)


@exhibit(
    "mlx-lm#1413",
    2026,
    kind="scale",
    found_by="proof",
    raises=AnotherFunction,
    says="first output 0",
    usual=usual.of_functions(accumulated, whole, inputs),
)
def test_accumulation_is_the_whole_batch(bug):
    assert_same_function(
        lambda *given: accumulated(bug, *given),
        whole,
        inputs=inputs(),
        at_least="rounds elsewhere",
    )
