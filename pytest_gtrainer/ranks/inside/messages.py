"""Sends and receives of a rank, counted by the group they are issued on.

gloo counts them among the collectives, in which all ranks must agree; in messages ranks may differ.
It also counts those inside ``monitored_barrier``, where rank 0 receives from every other rank and
answers it. gloo may wait inside the counting function. ``answers`` knows this file, so it reports
that the rank waits in the call of torch that the test made.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pytest_gtrainer._torch.process_groups import issued_on, skip_by_dynamo

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

    def as_one_collective(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            before = issued_on(group)
            try:
                return method(group, *args, **kwargs)
            finally:
                more = issued_on(group) - before - 1
                issued[group] = issued.get(group, 0) + more

        return counted

    group = dist.ProcessGroup
    dist.ProcessGroup.send = counting(group.send, step=1)
    dist.ProcessGroup.recv = counting(group.recv, step=-1)
    dist.ProcessGroup.recv_anysource = counting(group.recv_anysource, step=-1)
    dist.ProcessGroup.monitored_barrier = as_one_collective(group.monitored_barrier)
    for wrapper in (group.send, group.recv, group.recv_anysource, group.monitored_barrier):
        # Otherwise a user's counts of graphs and recompilations would include the wrapper.
        skip_by_dynamo(wrapper)
