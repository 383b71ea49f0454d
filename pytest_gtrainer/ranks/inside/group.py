"""The process groups of a rank: the default group kept warm, the test's subgroups cleared away."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pytest_gtrainer._torch.process_groups import (
    abort_all_groups,
    forget_meshes,
    groups_made,
    issued_on,
    live_groups,
    names_of_live_groups,
    silence_collective_log,
)
from pytest_gtrainer.ranks import wire

# The parent's limit for a test ends a blocked collective long before this does.
COLLECTIVE_LIMIT = timedelta(hours=24)

MEMORY_TOLERANCE = 2**20
_MESH_GROUPS = "mesh_"

Meeting = Callable[[str, int], dist.Store]


class RankGroup:
    """The default group of a rank, and what the tests have made beside it."""

    def __init__(
        self, rank: int, device: str, backend: str, *, index: int | None = None, meet: Meeting | None = None
    ) -> None:
        """Nothing is joined yet.

        Args:
            index: of the rank's GPU among those it sees; by default its rank.
            meet: gives the store at a place, for a number of ranks; by default the place is a file.
        """
        self.rank, self.size, self.device, self.backend = rank, 0, device, backend
        self._index = rank if index is None else index
        self._meet = meet or dist.FileStore
        self._default: dist.ProcessGroup | None = None
        self._points: Counter[int] = Counter()  # sends and receives, by group
        self._known: Counter[int] = Counter()  # collectives that were told already, by group
        silence_collective_log()
        if backend == "gloo":
            self._count_points()

    def _count_points(self) -> None:
        """Count sends and receives, which gloo adds to the collectives: ranks may differ in them."""
        for name in ("send", "recv", "recv_anysource"):
            setattr(dist.ProcessGroup, name, self._counting(getattr(dist.ProcessGroup, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._points[id(group)] += 1
            return method(group, *args, **kwargs)

        return counted

    def join(self, place: str, size: int) -> None:
        """Make the default group anew, of ``size`` ranks that meet at ``place``."""
        self.leave()
        self.size = size
        if self.device == "cuda":
            torch.cuda.set_device(self._index)
        store = self._meet(place, size)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=size, timeout=COLLECTIVE_LIMIT
        )
        self._default = dist.group.WORLD
        if self.backend == "gloo":
            _connect_all_pairs(size)
            self._issued()

    def leave(self) -> None:
        """Destroy all groups, which makes ranks that are blocked with this one raise."""
        self._default = None
        self._points.clear()
        self._known.clear()
        if not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError):  # the peers may be gone already
            if self.backend == "nccl":
                abort_all_groups()  # destroying waits for collectives that will never end
            else:
                dist.destroy_process_group()
        _forget_last_error()
        gc.collect()  # gloo closes its connections only with the last reference, a test's model's too

    def state(self) -> wire.GroupState:
        """What the test has issued on the groups that exist, for comparison with the other ranks."""
        if not self._is_intact():
            return wire.GroupState(intact=False, groups_made=0)
        subgroups = len(live_groups()) - 1
        return wire.GroupState(True, groups_made(), subgroups, self._issued())

    def _is_intact(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._default

    def _issued(self) -> dict[str, int]:
        """Sequence numbers by the ranks of a group: its name may differ between ranks."""
        groups = live_groups()
        if len(groups) == 1 and self._default is not None:
            return self._issued_by_all(self._default)
        issued: dict[str, int] = {}
        same_ranks: Counter[str] = Counter()
        for group in groups:
            label = self._label(group)
            same_ranks[label] += 1
            if same_ranks[label] > 1:
                label += f" (group {same_ranks[label]} of these)"
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                issued[label] = self._issued_on(group)
        return issued

    def _issued_by_all(self, group: dist.ProcessGroup) -> dict[str, int]:
        """The same where there is no other group."""
        try:
            return {"all ranks": self._issued_on(group)}
        except RuntimeError:
            return {}

    def _issued_on(self, group: dist.ProcessGroup) -> int:
        """Collectives on a group since this was last asked."""
        total = issued_on(group) - self._points[id(group)]
        before, self._known[id(group)] = self._known[id(group)], total
        return total - before

    def _label(self, group: dist.ProcessGroup) -> str:
        if group is self._default:
            return "all ranks"
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == self.size:
            return "all ranks"
        return "ranks " + ", ".join(map(str, ranks))

    def memory(self) -> int:
        """Bytes that torch has allocated on this rank's GPU."""
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def left_behind(self, memory_before: int) -> tuple[str, ...]:
        """What a test has left: groups of its own making, and GPU memory.

        The groups of a DeviceMesh and of graph passes are not counted, as no test can destroy them, nor is memory
        below 1 MiB.
        """
        left = []
        for group, name in names_of_live_groups().items() if self._is_intact() else ():
            if group is self._default or group.group_desc.startswith(_MESH_GROUPS):
                continue
            from pytest_gtrainer._torch.passes import is_extra_group

            if not is_extra_group(name):
                left.append(f"a process group of {self._label(group)}")
        grown = self.memory() - memory_before
        if grown > MEMORY_TOLERANCE:
            gc.collect()
            grown = self.memory() - memory_before
        if grown > MEMORY_TOLERANCE:
            left.append(f"{grown / 2**20:.0f} MiB of GPU memory")
        return tuple(left)

    def drop_subgroups(self) -> None:
        """Destroy every group but the default one: a group lives no longer than its test.

        Blocks where a collective that another rank never issued is still under way.
        """
        if not self._is_intact():
            return
        made = [group for group in live_groups() if group is not self._default]
        for group in made:
            self._points.pop(id(group), None)
            self._known.pop(id(group), None)
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
        if made:
            del made, group  # gloo closes connections with the last reference: now, while ranks are idle
            forget_meshes()  # the next test may make an equal mesh, whose groups are others
            _forget_last_error()
            gc.collect()


def _connect_all_pairs(size: int) -> None:
    """A rank that waits for one it has no connection with would not notice that one's end."""
    dist.all_to_all_single(torch.empty(size), torch.zeros(size))


def _forget_last_error() -> None:
    """Drop the interpreter's references to the last traceback, whose frames may hold groups."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
