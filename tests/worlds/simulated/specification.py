"""The nets, element by element in plain Python: slow, and as near to their definition as possible.

The models in ``worlds.simulated`` are compared with this. Nothing here is shared with them.
"""

import math

import torch

COMBINE = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "max": max,
    "min": min,
}


def rounded(value, dtype):
    """A Python number as the dtype holds it."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def ring_of(net, channel):
    """Ranks in the order in which they send to each other, of the net's group, from its first
    member on.
    """
    if net.rings is not None:
        whole = net.rings[channel]
    else:
        whole = []
        for node in range(net.nodes):
            for hop in range(net.ranks_per_node):
                whole.append(node * net.ranks_per_node + (channel - hop) % net.ranks_per_node)
    members = members_of(net)
    ring = [rank for rank in whole if rank in members]
    first = ring.index(members[0])
    return ring[first:] + ring[:first]


def members_of(net):
    return list(range(net.nodes * net.ranks_per_node)) if net.members is None else list(net.members)


def words(elements, itemsize):
    """Elements, rounded up to words of 16 bytes."""
    word = 16 // itemsize
    return math.ceil(elements / word) * word


def channels_of(net):
    return len(net.rings) if net.rings is not None else (net.channels or 4)


def path_of(net, collective, offset, count, dtype, destination):
    """The ranks of the world that add the element at ``offset`` of a payload of ``count``, in
    order.
    """
    if net.accumulate == "fp32":
        return ring_of(net, 0)
    channels, size = channels_of(net), len(members_of(net))
    chunk = (
        net.chunk_bytes or (2 << 20 if net.partition == "contiguous" else 512)
    ) // dtype.itemsize
    if net.partition == "contiguous":
        part = words(math.ceil(count / channels), dtype.itemsize)
        channel = offset // part
        length = min(part, count - channel * part)
        loop = size * chunk
        rest = length - offset % part // loop * loop
        last = words(math.ceil(rest / size), dtype.itemsize)
        place = offset % part % loop // (chunk if rest >= loop else last)
    elif collective == "reduce_scatter":
        channel, place = offset // chunk % channels, None
    else:
        channel, place = offset // (chunk * size) % channels, offset // chunk % size
    ring = ring_of(net, channel)
    if collective == "reduce_scatter":
        place = ring.index(members_of(net)[destination])
    return [ring[(place + 1 + hop) % size] for hop in range(size)]


def reduced(net, values, op, dtype):
    """One element: the values of the ranks on its path, one hop after the other."""
    accumulator = dtype
    if net.accumulate == "fp32" and dtype != torch.float64:
        accumulator = torch.float32
    if op == "avg" and net.average == "premultiply":
        factor = rounded(1 / len(values), dtype)
        values = [rounded(value * factor, dtype) for value in values]
    total = values[0]
    for value in values[1:]:
        total = rounded(COMBINE[op](total, value), accumulator)
    if op == "avg" and net.average == "divide":
        total = rounded(total / len(values), accumulator)
    return rounded(total, dtype)


def reduce_scatter(net, inputs, op):
    members, dtype = members_of(net), inputs.dtype
    values, size = inputs.tolist(), len(members)
    count = inputs.shape[1] // size
    result = []
    for destination in range(size):
        for offset in range(count):
            path = path_of(net, "reduce_scatter", offset, count, dtype, destination)
            element = [values[members.index(rank)][destination * count + offset] for rank in path]
            result.append(reduced(net, element, op, dtype))
    return torch.tensor(result, dtype=dtype).reshape(size, count)


def all_reduce(net, inputs, op):
    members, dtype = members_of(net), inputs.dtype
    values, count = inputs.tolist(), inputs.shape[1]
    result = []
    for offset in range(count):
        path = path_of(net, "all_reduce", offset, count, dtype, 0)
        result.append(
            reduced(net, [values[members.index(rank)][offset] for rank in path], op, dtype)
        )
    return torch.tensor(result, dtype=dtype)
