"""Sends and receives of a rank, counted by the group they are issued on.

gloo counts them among the collectives, in which all ranks must agree; in messages ranks may differ.
The counting function stands in a file of its own because gloo may wait inside of it: ``answers``
knows the file, so that the rank is seen to wait in the call of torch that the test made.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

# By group, not by its ``id``: a test may destroy a group, and a later one gets the same address.
Counts = WeakKeyDictionary[dist.ProcessGroup, int]


def count_messages(issued: Counts, balance: Counts) -> None:
    """Count messages of this process from now on, by their group.

    ``issued`` is the number of sends and receives, ``balance`` that of sends less receives.
    """

    def counting(method: Callable[..., Any], step: int) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            issued[group] = issued.get(group, 0) + 1
            balance[group] = balance.get(group, 0) + step
            # With TORCH_GLOO_LAZY_INIT the first message on a group connects two ranks. One of them
            # listens, and waits here until the other one uses the group, even in ``isend``.
            return method(group, *args, **kwargs)

        return counted

    for name, step in (("send", 1), ("recv", -1), ("recv_anysource", -1)):
        setattr(dist.ProcessGroup, name, counting(getattr(dist.ProcessGroup, name), step))
