"""Add in the orders of sums that fork: NCCL's double binary tree, and PAT.

An *order* is written from left to right: ``(3, 2, 1, 0, (5, 4))`` adds 3 and 2, then 1, then 0, and
then the sum of 5 and 4, which another rank has made. a + b and b + a have the same bits, so what
arrives first is written in front of a rank's own value.

A rank adds to its own value what arrives from below, in the order of ``tree.down``: first the next
rank of its node, then children on other nodes (common_kernel.h:91-140, prims_ll.h). Line numbers
are those of NCCL 2.30.7.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.rings import HOPS, Ring

Order = tuple["int | Order", ...]
# By rank, the ranks whose sums arrive, in the order in which they are added.
Tree = tuple[tuple[int, ...], ...]

STEPS = 8  # NCCL_STEPS
_PAT_CHUNK_BYTES = 512 << 10
_PAT_LEAST_BYTES = 64 << 10


def join_arrivals(own: int, arrivals: Iterable[Order]) -> Order:
    """Return the order of a rank that adds ``arrivals``, one after the other, to its own value.

    >>> join_arrivals(0, [(3, 2, 1), (5, 4), (6,)])
    (3, 2, 1, 0, (5, 4), 6)
    """
    first, *others = [*arrivals] or [()]
    order = [*first, own]
    for other in others:
        order.append(other[0] if len(other) == 1 else other)
    return tuple(order)


def rename_ranks(order: Order, names: Sequence[int]) -> Order:
    """Replace each rank of an order by its name: a rank of a group by one of the world.

    >>> rename_ranks((1, (0, 2)), [10, 11, 12])
    (11, (10, 12))
    """
    return tuple(rename_ranks(t, names) if isinstance(t, tuple) else names[t] for t in order)


def order_text(order: Order) -> str:
    """Write an order for a message.

    >>> order_text((3, 2, (5, (7, 6))))
    '3 2 (5 (7 6))'
    """
    return " ".join(f"({order_text(t)})" if isinstance(t, tuple) else str(t) for t in order)


def binary_children(nodes: int, second: bool) -> tuple[int, dict[int, dict[int, int]]]:
    """Return the root and each node's children in a tree of ``ncclGetDtree`` (trees.cc:32-116).

    A child's key is the place in its parent's chain of ranks where its sum arrives: 1 for the first
    child, 0 for the second. In the first tree even nodes have children. The second tree is its
    mirror image, or the first one shifted by a node if their number is odd; so the leaves of one
    tree add in the other.

    >>> binary_children(4, second=False)
    (0, {0: {0: 2}, 1: {}, 2: {1: 1, 0: 3}, 3: {}})
    """
    # The root of the first tree has one child, the largest power of two below the number of nodes.
    children: dict[int, dict[int, int]] = {node: {} for node in range(nodes)}
    if nodes > 1:
        children[0][0] = 1 << (nodes - 1).bit_length() >> 1
    for node in range(1, nodes):
        step = (node & -node) // 2
        if step:
            children[node][1] = node - step
        # The second child may be missing, and then stands closer.
        while step and node + step >= nodes:
            step //= 2
        if step:
            children[node][0] = node + step
    if not second:
        return 0, children

    # The mirror image of an odd number of nodes would have its leaves in the same places.
    if nodes % 2:
        twin = [*range(1, nodes), 0]
    else:
        twin = list(reversed(range(nodes)))
    mirrored = {}
    for node, own in children.items():
        mirrored[twin[node]] = {place: twin[child] for place, child in own.items()}
    return twin[0], mirrored


def tree_over_chains(chains: Sequence[Sequence[int]], second: bool) -> Order:
    """Return the order of a tree over nodes, each a chain of ranks.

    A chain is listed from the rank on that sends to other nodes. In NCCL's balanced tree the sum of
    the second child arrives at the head of the chain, that of the first child at the rank behind it
    (connect.cc:54-56, :149-166).

    >>> tree_over_chains([(0, 1, 2), (3, 4, 5)], second=False)
    (2, 1, 0, (5, 4, 3))
    """
    root, children = binary_children(len(chains), second)

    def order_of_node(node: int) -> Order:
        chain = chains[node]
        arrivals: list[list[Order]] = [[] for _ in chain]
        for place, child in children[node].items():
            arrivals[min(place, len(chain) - 1)].append(order_of_node(child))
        below: list[Order] = []
        for rank, from_nodes in zip(reversed(chain), reversed(arrivals), strict=True):
            below = [join_arrivals(rank, below + from_nodes)]
        return below[0]

    return order_of_node(root)


def order_of_tree(tree: Tree) -> Order:
    """Return the order of a tree that is given by its children.

    Raises:
        ValueError: it is no tree.
    """
    below = [rank for children in tree for rank in children]
    roots = [rank for rank in range(len(tree)) if rank not in below]
    if unknown := set(below) - set(range(len(tree))):
        raise ValueError(f"rank {min(unknown)} is not one of its ranks, 0..{len(tree) - 1}")
    if repeated := [rank for rank in below if below.count(rank) > 1]:
        raise ValueError(f"rank {repeated[0]} has two parents")
    if len(roots) != 1:
        listed = " ".join(map(str, roots))
        raise ValueError(f"a tree has one root, this one has {len(roots)}: ranks {listed}")
    reached: list[int] = []

    def order_of_rank(rank: int) -> Order:
        reached.append(rank)
        return join_arrivals(rank, map(order_of_rank, tree[rank]))

    order = order_of_rank(roots[0])
    # Every rank but the root has one parent, so ranks that the root does not reach form a circle.
    if lost := set(range(len(tree))) - set(reached):
        raise ValueError(f"rank {min(lost)} is not below the root, rank {roots[0]}")
    return order


def check_trees(trees: Sequence[Tree], size: int, channels: int) -> None:
    """Check that every channel has a tree of all ranks of the world.

    Raises:
        ValueError: one has not; the message names the channel and the rank.
    """
    if len(trees) != channels:
        raise ValueError(f"there are {len(trees)} trees for {channels} channels: give one for each")
    for channel, tree in enumerate(trees):
        try:
            if len(tree) != size:
                raise ValueError(f"it has {len(tree)} of {size} ranks")
            order_of_tree(tree)
        except ValueError as error:
            raise ValueError(f"the tree of channel {channel}: {error}") from None


def node_chains(ring: Ring, node_of: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, in the order in which the ring visits them.

    Nodes are in the order of their lowest rank: NCCL builds its trees over these numbers.

    >>> node_chains((0, 3, 2, 5, 4, 7, 6, 1), [0, 0, 0, 0, 1, 1, 1, 1])
    [[1, 0, 3, 2], [5, 4, 7, 6]]
    """
    entries = (at for at in range(len(ring)) if node_of[ring[at]] != node_of[ring[at - 1]])
    start = next(entries, 0)
    chains: dict[int, list[int]] = {}
    for rank in ring[start:] + ring[:start]:
        chains.setdefault(node_of[rank], []).append(rank)
    return sorted(chains.values(), key=min)


def pat_delta(part_bytes: int, ranks: int) -> int:
    """Return the distance from which on PAT aggregates sums (collectives.h:542-562).

    PAT has parallel aggregated trees, one for each destination. ``part_bytes`` are a channel's part
    of a shard.

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
    """Return PAT's order for the destination, in distances: rank ``destination - distance`` adds.

    A binomial tree: along dimension k arrives the sum that was made 2 ** k ranks behind. Dimensions
    below that of ``delta`` arrive from the highest down, those above from the lowest up, and
    dimension 0 last (collectives.h:564-713).

    >>> pat_order(8, delta=8), pat_order(8, delta=2)
    ((7, 6, 4, 5, 0, (3, 2), 1), (3, 2, 0, (7, 6, 4, 5), 1))
    """
    low = delta.bit_length() - 1
    top = (distance & -distance).bit_length() - 1 if distance else (ranks - 1).bit_length()
    dimensions = [*range(min(low, top) - 1, 0, -1), *range(low, top)]
    if top:
        dimensions.append(0)
    behind = [distance + (1 << dimension) for dimension in dimensions]
    return join_arrivals(distance, [pat_order(ranks, delta, at) for at in behind if at < ranks])


def tree_sum(
    order: Order, own: Callable[[int], Tensor], op: str, average: str, ranks: int
) -> Tensor:
    """Add the tensors ``own(rank)`` in an order, and round to their dtype after every addition.

    ``average`` is that of ``ring_sum``; ``ranks`` is the divisor of an "avg".
    """

    def sum_of(term: int | Order) -> Tensor:
        if isinstance(term, tuple):
            total: Tensor = reduce(HOPS[op], map(sum_of, term))
            return total
        value = own(term)
        if op == "avg" and average == "premultiply":
            # The factor has the dtype of the wire, as NCCL hands it to its kernels.
            return value * torch.tensor(1.0 / ranks, dtype=value.dtype)
        return value

    total = sum_of(order)
    return total / ranks if op == "avg" and average == "divide" else total
