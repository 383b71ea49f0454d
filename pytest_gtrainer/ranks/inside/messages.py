"""Sends, receives and collectives of a rank that Python issues, by the group they are issued on.

gloo counts sends and receives among the collectives, in which all ranks must agree; in messages
ranks may differ. It also counts those of ``monitored_barrier``, in which the first rank hears and
answers each other. The kind of each collective is noted because torch's flight recorder, which
knows the collectives that C++ issues, too, takes milliseconds to read.
The counting functions stand in a file of their own because gloo may wait inside of them:
``answers`` knows the file, so that the rank is seen to wait in the call of torch that the test
made.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pytest_gtrainer._torch.process_groups import issued_on, recorded_dtype, skip_by_dynamo
from pytest_gtrainer.ranks.answers import Call

# By group, not by its ``id``: a test may destroy a group, and a later one gets the same address.
Counts = WeakKeyDictionary[dist.ProcessGroup, int]
Checksums = WeakKeyDictionary[dist.ProcessGroup, list[int]]

# Methods that issue one collective: its name in torch's recorder, and the argument with the tensor
# that the recorder shows.
_COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "barrier": ("barrier", None),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "reduce_scatter_single": ("all_reduce", 1),  # gloo reduces all, then takes a part
    "_reduce_scatter_base": ("all_reduce", 1),
}


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

    wrappers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "send": functools.partial(counting, step=1),
        "recv": functools.partial(counting, step=-1),
        "recv_anysource": functools.partial(counting, step=-1),
        "monitored_barrier": as_one_collective,
    }
    for name, wrapper in wrappers.items():
        _replace(name, wrapper)


def note_collectives(called: Checksums) -> None:
    """Append to ``called`` the checksum of each collective that Python issues, by its group.

    A collective whose tensor is not found among the arguments is left out.
    """

    def noting(method: Callable[..., Any], op: str, position: int | None) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            result = method(group, *args, **kwargs)
            if position is None:
                called.setdefault(group, []).append(Call(op, "", (), 0, "", False).checksum())
                return result
            given = args[position] if position < len(args) else None
            if isinstance(given, list) and len(given) == 1:
                given = given[0]
            if isinstance(given, torch.Tensor) and given.layout is torch.strided:
                call = Call(op, recorded_dtype(given), given.shape, given.numel(), "", False)
                called.setdefault(group, []).append(call.checksum())
            return result

        return noted

    for name, (op, position) in _COLLECTIVES.items():
        if hasattr(dist.ProcessGroup, name):  # some are new in torch 2.13
            _replace(name, functools.partial(noting, op=op, position=position))


def _replace(name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of process groups by a wrapper that Dynamo does not compile."""
    counted = wrapper(getattr(dist.ProcessGroup, name))
    skip_by_dynamo(counted)
    setattr(dist.ProcessGroup, name, counted)
