"""Sums that fork: NCCL's double binary tree and PAT, who adds when in them, and the sum itself.

An *order* is written from left to right: ``(3, 2, 1, 0, (5, 4))`` adds 3 and 2, then 1, then 0, and then what 5 and 4
gave elsewhere, which arrives as one. As a + b and b + a have the same bits, what arrives first is written in front of a
rank's own value.

A rank adds to its own value what arrives from below, in the order of ``tree.down``: the next rank of its node, then
children on other nodes (common_kernel.h:91-140, prims_ll.h). Line numbers are those of NCCL 2.30.7.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.rings import HOPS, Ring

Order = tuple["int | Order", ...]
Tree = tuple[
    tuple[int, ...], ...
]  # by rank: the ranks whose sums arrive, in the order in which they are added


def joined(own: int, arrivals: Iterable[Order]) -> Order:
    """One's own value and what arrives, in this order.

    >>> joined(0, [(3, 2, 1), (5, 4), (6,)])
    (3, 2, 1, 0, (5, 4), 6)
    """
    first, *others = [*arrivals] or [()]
    return (*first, own, *(other[0] if len(other) == 1 else other for other in others))


def mapped(order: Order, names: Sequence[int]) -> Order:
    """The order with other names of its ranks, or a path's ranks of the world for those of a group.

    >>> mapped((1, (0, 2)), [10, 11, 12])
    (11, (10, 12))
    """
    return tuple(mapped(term, names) if isinstance(term, tuple) else names[term] for term in order)


def told(order: Order) -> str:
    """The order in a message.

    >>> told((3, 2, (5, (7, 6))))
    '3 2 (5 (7 6))'
    """
    return " ".join(f"({told(term)})" if isinstance(term, tuple) else str(term) for term in order)


def binary_children(nodes: int, second: bool) -> tuple[int, dict[int, dict[int, int]]]:
    """The root and each node's children, in one of the two trees of ``ncclGetDtree`` (trees.cc:32-116).

    A child stands under the place in its parent's chain of ranks where its sum arrives: 1 for the first child, 0 for
    the second. The first tree has the even nodes inside. The second is its mirror image, or the same shifted by one if
    the number of nodes is odd, so that the leaves of one tree are inside the other.

    >>> binary_children(4, second=False)
    (0, {0: {0: 2}, 1: {}, 2: {1: 1, 0: 3}, 3: {}})
    """
    found: dict[int, dict[int, int]] = {
        0: {0: 1 << (nodes - 1).bit_length() >> 1} if nodes > 1 else {}
    }
    for node in range(1, nodes):
        half = step = (node & -node) // 2
        while step and node + step >= nodes:
            step //= 2
        found[node] = ({1: node - half} if half else {}) | ({0: node + step} if step else {})
    if not second:
        return 0, found
    other = [(node + 1) % nodes if nodes % 2 else nodes - 1 - node for node in range(nodes)]
    return other[0], {
        other[node]: {at: other[child] for at, child in own.items()} for node, own in found.items()
    }


def tree_over(chains: Sequence[Sequence[int]], second: bool) -> Order:
    """The sum over nodes, whose ranks are chains that end with the rank that sends to other nodes, listed from it on.

    NCCL's balanced tree (connect.cc:54-56, :149-166): the sum of the second child arrives at the head of the chain,
    that of the first child at the rank behind it.

    >>> tree_over([(0, 1, 2), (3, 4, 5)], second=False)
    (2, 1, 0, (5, 4, 3))
    """
    root, children = binary_children(len(chains), second)

    def sum_of(node: int) -> Order:
        chain, total = chains[node], []
        for place in range(len(chain) - 1, -1, -1):
            total += [
                sum_of(child)
                for at, child in children[node].items()
                if place == min(at, len(chain) - 1)
            ]
            total = [joined(chain[place], total)]
        return total[0]

    return sum_of(root)


def tree_from(tree: Tree) -> Order:
    """The sum over a tree that is given by its children; a ValueError says why it is none."""
    below = [rank for children in tree for rank in children]
    roots = [rank for rank in range(len(tree)) if rank not in below]
    if unknown := sorted(set(below) - set(range(len(tree)))):
        raise ValueError(f"rank {unknown[0]} is not one of its ranks, 0..{len(tree) - 1}")
    if twice := [rank for rank in below if below.count(rank) > 1]:
        raise ValueError(f"rank {twice[0]} has two parents")
    if len(roots) != 1:
        raise ValueError(
            f"a tree has one root, this one has {len(roots)}: ranks {' '.join(map(str, roots))}"
        )
    reached: list[int] = []

    def sum_of(rank: int) -> Order:
        reached.append(rank)
        return joined(rank, [sum_of(child) for child in tree[rank]])

    order = sum_of(roots[0])
    if lost := sorted(set(range(len(tree))) - set(reached)):
        raise ValueError(f"rank {lost[0]} is not below the root, rank {roots[0]}")
    return order


def check_trees(trees: Sequence[Tree], size: int, channels: int) -> None:
    """Each channel needs a tree of all ranks of the world; a ValueError names the channel and the rank."""
    if len(trees) != channels:
        raise ValueError(f"there are {len(trees)} trees for {channels} channels: give one for each")
    for channel, tree in enumerate(trees):
        try:
            if len(tree) != size:
                raise ValueError(f"it has {len(tree)} of {size} ranks")
            tree_from(tree)
        except ValueError as error:
            raise ValueError(f"the tree of channel {channel}: {error}") from None


def chains_of(ring: Ring, node_of: Sequence[int]) -> list[list[int]]:
    """The ranks of each node, nodes by their lowest rank, in the order in which the ring visits them.

    >>> chains_of((0, 3, 2, 5, 4, 7, 6, 1), [0, 0, 0, 0, 1, 1, 1, 1])
    [[1, 0, 3, 2], [5, 4, 7, 6]]
    """
    enters = next((at for at in range(len(ring)) if node_of[ring[at]] != node_of[ring[at - 1]]), 0)
    visited: dict[int, list[int]] = {}
    for rank in ring[enters:] + ring[:enters]:
        visited.setdefault(node_of[rank], []).append(rank)
    return sorted(visited.values(), key=min)


STEPS = 8  # NCCL_STEPS, of PAT: parallel aggregated trees, one for each destination
_PAT_CHUNK_BYTES, _PAT_LEAST_BYTES = 512 << 10, 64 << 10


def pat_delta(part_bytes: int, ranks: int) -> int:
    """The distance from which on sums are aggregated, for a channel's part of a shard (collectives.h:542-562).

    >>> pat_delta(1 << 20, ranks=32), pat_delta(16, ranks=32), pat_delta(16, ranks=5)
    (4, 2, 4)
    """
    chunk = _PAT_CHUNK_BYTES
    while chunk * 16 > part_bytes * ranks and chunk > _PAT_LEAST_BYTES:  # enqueue.cc:2297
        chunk //= 2
    wanted = STEPS
    while wanted // STEPS * 2 * part_bytes <= chunk and wanted < ranks:
        wanted *= 2
    aggregated = 1
    while aggregated < min(wanted, ranks // 2):
        aggregated *= 2
    return (1 << (ranks - 1).bit_length()) // aggregated


@lru_cache(maxsize=64)
def pat_order(ranks: int, delta: int, distance: int = 0) -> Order:
    """Who adds when for the destination at ``distance``, as distances behind it: rank ``destination - distance`` adds.

    A binomial tree: from 2 ** k behind arrives along dimension k what is summed there. Dimensions below that of
    ``delta`` arrive from the highest down, those above from the lowest up, dimension 0 last (collectives.h:564-713).

    >>> pat_order(8, delta=8), pat_order(8, delta=2)
    ((7, 6, 4, 5, 0, (3, 2), 1), (3, 2, 0, (7, 6, 4, 5), 1))
    """
    low = delta.bit_length() - 1
    top = (distance & -distance).bit_length() - 1 if distance else (ranks - 1).bit_length()
    dimensions = [*range(min(low, top) - 1, 0, -1), *range(low, top), *([0] if top else [])]
    arrivals = [
        pat_order(ranks, delta, distance + (1 << k))
        for k in dimensions
        if distance + (1 << k) < ranks
    ]
    return joined(distance, arrivals)


def tree_sum(
    order: Order, own: Callable[[int], Tensor], op: str, average: str, ranks: int
) -> Tensor:
    """Add what ``own`` gives for each rank of the order, rounding to its dtype after every addition."""

    def term_of(term: int | Order) -> Tensor:
        if isinstance(term, tuple):
            total: Tensor = reduce(HOPS[op], map(term_of, term))
            return total
        value = own(term)
        if op == "avg" and average == "premultiply":
            return value * torch.tensor(1.0 / ranks, dtype=value.dtype)
        return value

    total = term_of(order)
    return total / ranks if op == "avg" and average == "divide" else total
