"""NCCL 2.30.7, restated step by step: ranks that send, receive and add, each with its own buffer.

The nets of ``worlds.simulated`` are compared with this; nothing here is shared with them. A kernel
is a generator for each rank, which yields while it waits for a peer. Each function names the lines
that it restates.
"""

from collections import defaultdict, deque

import torch

OPS = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
MIN_TRAFFIC = 32 << 10  # enqueue.cc:582
CHUNK_BYTES = {
    "Simple": (1 << 22) // 8 * 4,
    "LL": 8 * 512 * 8 * 16 // 8 // 2,
    "LL128": 120 * 640 * 8 // 16 * 15,
}


def up(value, step):
    return -(-value // step) * step


def cells(count, itemsize, ranks, channels, collective, protocol):
    """``(offset, length)`` of each channel's part; enqueue.cc:573-709 for one collective in
    a plan.
    """
    traffic_per_byte = 2 if collective == "all_reduce" else ranks  # :91
    if protocol == "LL":
        traffic_per_byte *= 4  # :461 and :658
    traffic = max(MIN_TRAFFIC, count * itemsize * traffic_per_byte)
    per_channel = up(traffic // channels, 16)
    cell = up(-(-MIN_TRAFFIC // traffic_per_byte), 16)
    n_cells = -(-count * itemsize // cell)
    each = min(n_cells, -(-per_channel // (cell * traffic_per_byte)))
    low = n_cells if channels == 1 else min(n_cells, -(-per_channel // (cell * traffic_per_byte)))
    mids, high = divmod(n_cells - low, each)
    if channels < 1 + mids + (high != 0):
        mids = channels - 2
        each, rest = divmod(n_cells - low, mids + 1)
        high = each + rest
    if high == 0 and mids:
        high, mids = each, mids - 1
    sizes = [size * (cell // itemsize) for size in [low] + [each] * mids + ([high] if high else [])]
    sizes[-1] -= n_cells * (cell // itemsize) - count
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def words(count, itemsize, ranks, channels, collective, protocol):
    """The same in 2.20.3 to 2.22.3: a cell is 16 bytes."""
    size = up(-(-count // channels), 16 // itemsize)
    return [(begin, min(size, count - begin)) for begin in range(0, count, size)]


PARTS = {"contiguous": words, "cells": cells}


class Wires:
    """The messages, by sender, receiver and connection; and the kernels of all ranks, run to the
    end.
    """

    def __init__(self):
        self.queues = defaultdict(deque)

    def send(self, tensor, *key):
        self.queues[key].append(tensor.clone())

    def recv(self, *key):
        while not self.queues[key]:
            yield
        return self.queues[key].popleft()

    def run(self, kernels):
        waiting, rounds = list(kernels), 0
        while waiting:
            waiting, rounds = (
                [kernel for kernel in waiting if next(kernel, "ended") is None],
                rounds + 1,
            )
            assert rounds < 10_000, "ranks wait for each other"
        assert not any(self.queues.values()), "sent, and never received"


def index_and_users(ring, rank):
    """init.cc:791-807: places count from rank 0; the ranks of the ring from one's own on."""
    zero, own = ring.index(0), ring.index(rank)
    return (own - zero) % len(ring), ring[own:] + ring[:own]


def ring_reduce_scatter(wires, ring, rank, own, out, count, part, op):
    """reduce_scatter.h:13-58; the chunks of a part are added alike, so that one loop will do."""
    begin, length = part
    _, users = index_and_users(ring, rank)
    for step in range(1, len(ring) + 1):
        to = users[-step]
        mine = own[to * count + begin :][:length]
        if step > 1:
            mine = OPS[op]((yield from wires.recv(users[-1], rank)), mine)
        if step < len(ring):
            wires.send(mine, rank, users[1])
        else:
            out[begin : begin + length] = mine


def ring_all_reduce(wires, ring, rank, own, out, chunk_elements, part, op):
    """all_reduce.h:14-81."""
    (grid, length), ranks = part, len(ring)
    index, users = index_and_users(ring, rank)
    for offset in range(0, length, ranks * chunk_elements):
        rest, chunk = length - offset, chunk_elements
        if rest < ranks * chunk:
            chunk = up(-(-rest // ranks), 16 // own.itemsize)
        places = [
            (place * chunk, max(0, min(chunk, rest - place * chunk))) for place in range(ranks)
        ]
        where = [
            slice(grid + offset + begin, grid + offset + begin + size) for begin, size in places
        ]
        for step in range(1, ranks + 1):
            mine = own[where[(index + ranks - step) % ranks]]
            if step > 1:
                mine = OPS[op]((yield from wires.recv(users[-1], rank)), mine)
            wires.send(mine, rank, users[1])
        out[where[index]] = mine
        for step in range(1, ranks):
            arrived = yield from wires.recv(users[-1], rank)
            out[where[(index + ranks - step) % ranks]] = arrived
            if step < ranks - 1:
                wires.send(arrived, rank, users[1])


def btree(ranks, rank):
    """Parent, children, and which child of its parent it is; trees.cc:33-70."""
    bit = 1
    while bit < ranks and not bit & rank:
        bit <<= 1
    if rank == 0:
        return -1, -1, bit >> 1 if ranks > 1 else -1, 0
    parent = (rank ^ bit) | (bit << 1)
    if parent >= ranks:
        parent = rank ^ bit
    low = bit >> 1
    first, second = (rank - low, rank + low) if low else (-1, -1)
    while second >= ranks:
        second = -1 if low == 0 else rank + low
        low >>= 1
    return parent, first, second, 0 if rank < parent else 1


def dtree(nodes, node, second):
    """trees.cc:92-116."""
    if not second:
        return btree(nodes, node)
    if nodes % 2:
        *peers, kind = btree(nodes, (node - 1) % nodes)
        return *(-1 if peer == -1 else (peer + 1) % nodes for peer in peers), kind
    *peers, kind = btree(nodes, nodes - 1 - node)
    return *(-1 if peer == -1 else nodes - 1 - peer for peer in peers), kind


def tree_of_rank(chains, node, rank, second):
    """Return the ranks above and below a rank.

    See connect.cc:54-63 and :131-164, with the pattern of search.cc (balanced).
    """
    chain = chains[node]
    place = chain.index(rank)
    above = chain[place - 1] if place else -1
    below = [chain[place + 1]] if place + 1 < len(chain) else []
    parent, first, second_child, kind = dtree(len(chains), node, second)
    spread = [
        own[min(1, len(own) - 1)] for own in chains
    ]  # treeToChild0: index 1, or 0 of one rank
    heads = [own[0] for own in chains]  # treeToParent and treeToChild1
    if rank == heads[node] and parent != -1:
        above = (spread if kind == 0 else heads)[parent]
    if rank == spread[node] and first != -1:
        below.append(heads[first])
    if rank == heads[node] and second_child != -1:
        below.append(heads[second_child])
    return above, below


def tree_all_reduce(wires, above, below, rank, own, out, part, op):
    """all_reduce.h:85-146: a rank adds what comes from below to its own, in the order of
    ``tree.down``.
    """
    where = slice(part[0], part[0] + part[1])
    mine = own[where].clone()
    for peer in below:
        mine = OPS[op](mine, (yield from wires.recv(peer, rank, "up")))
    if above != -1:
        wires.send(mine, rank, above, "up")
        mine = yield from wires.recv(above, rank, "down")
    out[where] = mine
    for peer in below:
        wires.send(mine, rank, peer, "down")


class Pat:
    """The steps of ``PatRSAlgorithm`` (collectives.h) for one chunk: who receives and sends along
    which dimension.
    """

    def __init__(self, chunk_bytes, part_bytes, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.pow2 = self.agg_delta = 1 << (ranks - 1).bit_length()
        self.agg = 1
        while chunk_bytes // (part_bytes * self.agg) >= 2 and self.agg < ranks // 2:
            self.agg, self.agg_delta = self.agg * 2, self.agg_delta // 2
        depth = 8  # NCCL_STEPS
        while depth > 1 and self.agg < ranks // 2:
            depth, self.agg, self.agg_delta = depth // 2, self.agg * 2, self.agg_delta // 2

    def mirror(self, value, top):
        result, mask, inverse = 0, 1, top // 2
        while mask < top:
            result += inverse if not value & mask else 0
            mask, inverse = mask << 1, inverse >> 1
        return result

    def first_bit(self, value):
        return (value & -value).bit_length() - 1 if value else self.pow2

    def steps(self):
        """``(distance of the destination, receives along, whether there is a sender)``.

        Along None: nothing comes.
        """
        phase, scale, position = 0, 1, self.agg_delta - 1
        while phase < 5:
            last = 1 if phase == 4 else self.agg // (2 * scale) if phase >= 2 else self.agg
            for mirrored in (self.mirror(a, last) for a in range(last)):
                if phase == 0:
                    source, along = mirrored * self.agg_delta + position, None
                elif phase == 1:
                    source = mirrored * self.agg_delta + position
                    along = self.first_bit(source)
                elif phase == 2:
                    source, along = (2 * mirrored + 1) * scale * self.agg_delta + 1, 0
                elif phase == 3:
                    source = (2 * mirrored + 1) * scale * self.agg_delta
                    along = self.first_bit(source)
                else:
                    source, along = 1, 0
                distance = source if along is None else source - (1 << along)
                if distance < self.ranks:
                    yield distance, along, source < self.ranks
            if phase == 0:
                phase = (2 if self.agg > 1 else 4) if position == 1 else 1
            elif phase == 1:
                position -= 1
                phase = 0 if position % 2 else 1
            elif phase == 2:
                phase = 3
            elif phase == 3:
                scale *= 2
                phase = 2 if scale < self.agg else 4
            else:
                phase = 5


def pat_reduce_scatter(wires, pat, own, out, count, part, op):
    """prims_simple.h:960-1060: what arrives first is added to one's own, what arrives then to that
    sum.

    A sum leaves when dimension 0 has come; those of odd distances have nothing to wait for.
    """
    rank, ranks, (begin, length), held = pat.rank, pat.ranks, part, {}
    for distance, along, is_sent in pat.steps():
        mine = held.get(distance)
        if mine is None:
            mine = own[(rank + distance) % ranks * count + begin :][:length]
        if along is not None and is_sent:
            peer = (rank - (1 << along)) % ranks  # :681
            mine = OPS[op]((yield from wires.recv(peer, rank, distance + (1 << along))), mine)
        held[distance] = mine
        if distance and along in (None, 0):
            wires.send(
                mine, rank, (rank + (1 << pat.first_bit(distance))) % ranks, distance
            )  # :691
    out[begin : begin + length] = held[0]


def reduced(
    collective, algorithm, inputs, op, *, net, rings, chains, protocol="Simple", chunk_bytes=None
):
    """Return the results of every rank, ``[ranks, elements]``.

    ``rings`` are by channel, ``chains`` by channel and node.
    """
    ranks, size = inputs.shape
    count, itemsize = (size // ranks if collective == "reduce_scatter" else size), inputs.itemsize
    parts = PARTS[net.partition](count, itemsize, ranks, len(rings), collective, protocol)
    own = (
        inputs * torch.tensor(1 / ranks, dtype=torch.float64).to(inputs.dtype)
        if op == "avg"
        else inputs
    )
    out = inputs.new_empty(ranks, count)
    for channel, part in enumerate(parts):
        wires, kernels = Wires(), []
        for rank in range(ranks):
            given = (wires, rings[channel], rank, own[rank], out[rank])
            if algorithm == "tree":
                second = channel >= -(
                    -len(rings) // 2
                )  # connect.cc:337-341: channels are doubled, each half has a tree
                chain = chains[channel % -(-len(rings) // 2)]
                node = next(node for node, members in enumerate(chain) if rank in members)
                above, below = tree_of_rank(chain, node, rank, second)
                kernels.append(
                    tree_all_reduce(wires, above, below, rank, own[rank], out[rank], part, op)
                )
            elif algorithm == "pat":
                chunk = pat_chunk_bytes(part[1] * ranks * itemsize)
                pat = Pat(chunk, part[1] * itemsize, rank, ranks)
                kernels.append(
                    pat_reduce_scatter(wires, pat, own[rank], out[rank], count, part, op)
                )
            elif collective == "reduce_scatter":
                kernels.append(ring_reduce_scatter(*given, count, part, op))
            else:
                chunk = (chunk_bytes or CHUNK_BYTES[protocol]) // itemsize
                kernels.append(ring_all_reduce(*given, chunk, part, op))
        wires.run(kernels)
    return out


def pat_chunk_bytes(part_bytes):
    """enqueue.cc:2222-2225 and :2297-2299, for one channel."""
    chunk = (1 << 22) // 8
    while chunk * 16 > part_bytes and chunk > 65536:
        chunk //= 2
    return chunk
