"""A fused projection of queries, keys and values is cut anew as if it were one matrix.

ColossalAI#817 (2022): every tensor rank holds its part of q, k and v, one behind the other, so the
shards in the order of ranks are not the fused matrix. Training with one number of ranks is right; a
checkpoint that is read with another number has rows of q where k should be.
"""

import torch
from museum import exhibit, usual
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_function

WIDTH = 4


def attention(x, fused):
    q, k, v = (x @ fused.t()).chunk(3, -1)
    return nn.functional.scaled_dot_product_attention(q, k, v)


def shards(fused, size):
    """Cut q, k and v into one part a rank."""
    q, k, v = (part.chunk(size) for part in fused.chunk(3))
    return [torch.cat(parts) for parts in zip(q, k, v, strict=True)]


def merged(parts, bug):
    if bug:
        return torch.cat(parts)
    q, k, v = zip(*(part.chunk(3) for part in parts), strict=True)
    return torch.cat([*q, *k, *v])


def resharded(bug, x, fused):
    return attention(x, merged(shards(fused, 2), bug))


def inputs():
    return torch.randn(6, WIDTH), torch.randn(3 * WIDTH, WIDTH)


@exhibit(
    "ColossalAI#817",
    2022,
    kind="resume and reshard",
    found_by="proof",
    raises=AnotherFunction,
    says="first output 0",
    usual=usual.of_functions(resharded, attention, inputs),
)
def test_two_ranks_save_what_one_reads(bug):
    assert_same_function(lambda *given: resharded(bug, *given), attention, inputs=inputs())
