"""Process groups of all ranks: the group that each rank names for one collective, without torch.

The groups of one collective are a *partition* of the ranks: each rank's group holds the rank, and
its members name the same group with the same ranks in the same order. Only real ranks show all
groups; a fake or simulated world has those of one rank.
"""

from collections.abc import Mapping

Ranks = tuple[int, ...]


def partition_fault(groups: Mapping[int, Ranks]) -> str:
    """Return why the groups that ranks name for one collective are no partition; "" if they are
    one.

    >>> partition_fault({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)})
    ''
    >>> partition_fault({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (1, 3)})
    'rank 2 has [2, 3], and its member rank 3 has [1, 3]'
    >>> partition_fault({0: (0, 1), 1: (1, 0)})
    'rank 0 has [0, 1], and its member rank 1 has [1, 0]'
    >>> partition_fault({0: (0, 1), 1: (0, 1), 2: (0, 1)})
    'rank 2 has [0, 1], which does not hold rank 2'
    """
    for rank, own in sorted(groups.items()):
        if rank not in own:
            return f"rank {rank} has {list(own)}, which does not hold rank {rank}"
        if len(set(own)) != len(own):
            return f"rank {rank} has {list(own)}, which holds a rank twice"
        for member in own:
            if member not in groups:
                return f"rank {rank} has {list(own)}, and its member rank {member} names no group"
            if groups[member] != own:
                other = list(groups[member])
                return f"rank {rank} has {list(own)}, and its member rank {member} has {other}"
    return ""


def is_implied(groups: Mapping[int, Ranks]) -> bool:
    """Return whether the first rank's group implies the others, as a dimension of a mesh does.

    >>> is_implied({0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)})
    True
    >>> is_implied({0: (0, 1), 1: (0, 1), 2: (2, 4), 3: (3, 5), 4: (2, 4), 5: (3, 5)})
    False
    """
    first = groups[min(groups)]
    extent = len(first)
    stride = first[1] - first[0] if extent > 1 else 1
    for rank, own in groups.items():
        place = rank // stride % extent if stride > 0 else 0
        start = rank - place * stride
        if own != tuple(start + place * stride for place in range(extent)):
            return False
    return True


def spell_partition(groups: Mapping[int, Ranks]) -> str:
    """Return the text of a partition: each group once, by its lowest rank.

    >>> spell_partition({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)})
    '[0, 1] [2, 3]'
    """
    once = dict.fromkeys(groups[rank] for rank in sorted(groups))
    return " ".join(str(list(own)) for own in once)
