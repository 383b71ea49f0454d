"""Orders: the ranks that add, hop after hop, from every place of a ring on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.rings import Ring


def after_rank(ring: Ring) -> Tensor:
    """``[hop, rank]``: the sum for a rank starts behind it and ends with it.

    >>> after_rank((0, 2, 1)).tolist()
    [[2, 0, 1], [1, 2, 0], [0, 1, 2]]
    """
    places = sorted(range(len(ring)), key=ring.__getitem__)
    return after_place(ring)[:, places]


def after_place(ring: Ring) -> Tensor:
    """``[hop, place]``: a sum starts behind the place of the ring and ends with it.

    >>> after_place((0, 2, 1)).tolist()
    [[2, 1, 0], [1, 0, 2], [0, 2, 1]]
    """
    size = len(ring)
    places = torch.arange(size)
    return torch.tensor(ring)[(places + 1 + places[:, None]) % size]


def as_listed(ring: Ring) -> Tensor:
    """``[hop, place]``: every sum starts with the first rank of the ring.

    >>> as_listed((0, 2, 1)).tolist()
    [[0, 0, 0], [2, 2, 2], [1, 1, 1]]
    """
    return torch.tensor(ring)[:, None].expand(-1, len(ring))


def told(order: Tensor, place: int, members: Sequence[int] | None) -> tuple[int, ...]:
    """The order from one place, in ranks of the world."""
    ranks: list[int] = order[:, place].tolist()
    return tuple(ranks if members is None else (members[rank] for rank in ranks))
