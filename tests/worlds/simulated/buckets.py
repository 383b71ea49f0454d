"""A bucket of two parameters, packed both ways round."""

import torch

LENGTHS = (
    112,
    224,
)  # not two halves: channels that repeat the rings of others after half the shard would hide it


def sees_the_order_of_a_bucket(net):
    """Return whether two parameters get other bits when they are packed the other way round."""
    first, second = parameters = [
        numbers(net.size, length, seed) for seed, length in enumerate(LENGTHS)
    ]
    straight = reduced(net, parameters).split(LENGTHS, 1)
    swapped = reduced(net, [second, first]).split(LENGTHS[::-1], 1)
    return not all(map(torch.equal, straight, reversed(swapped)))


def numbers(ranks, length, seed):
    """A gradient on every rank: ``[ranks, shards, length of a shard]``."""
    return torch.randn(
        ranks, ranks, length, generator=torch.Generator().manual_seed(seed)
    ).bfloat16()


def reduced(net, parameters):
    """The shards of a bucket: ``[ranks, length of a shard]``."""
    return net.reduce_scatter(torch.cat(parameters, 2).reshape(net.size, -1), "avg")
