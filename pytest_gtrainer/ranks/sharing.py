"""How the pool shares devices with the other workers of its run, and with other runs.

A lease on CPU slots lasts one test: idle ranks cost nothing but 20 MB each. A lease on GPUs
lasts as long as the ranks that have a context on them; it is given up, and the ranks with
it, as soon as somebody else waits and no test runs here.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from pytest_gtrainer._pytest_private import base_temp
from pytest_gtrainer.devices import BUS_ORDER, Devices
from pytest_gtrainer.ranks.leases import Lease, Slots
from pytest_gtrainer.ranks.progress import Tell

LOOK_EVERY = 0.5


class Sharing(Protocol):
    """When devices are leased and given back."""

    def for_test(self, size: int, holder: str) -> contextlib.AbstractContextManager[None]:
        """Devices for ``size`` ranks, this process's for the time of a test."""

    def environment(self) -> Mapping[str, str]:
        """What confines the ranks to the devices that are leased."""

    def close(self) -> None:
        """Give everything back."""


def of(
    config: pytest.Config, devices: Devices, limit: float, stop_ranks: Callable[[], None], tell: Tell | None = None
) -> Sharing:
    """The way to share these devices.

    Args:
        limit: how long to wait for a lease, in seconds.
        stop_ranks: ends the ranks of this process, before their GPUs are given back.
        tell: gets a line every so often while somebody waits.
    """
    if devices.kind == "cuda":
        folder = Path(tempfile.gettempdir()) / f"gtrainer-leases-{os.getuid()}"
        slots = Slots(folder, [gpu.uuid for gpu in devices.gpus])
        return GpuSharing(slots, {gpu.uuid: gpu.entry for gpu in devices.gpus}, limit, stop_ranks, tell)
    if hasattr(config, "workerinput"):
        # the folder above a worker's own is the run's
        folder = base_temp(config).parent / "gtrainer-leases"
        return CpuSharing(Slots(folder, [f"cpu{slot}" for slot in range(devices.slots)]), limit, tell)
    return Alone()


class Alone:
    """Nobody else wants the CPU slots of this run."""

    def for_test(self, size: int, holder: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def environment(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        pass


class CpuSharing:
    """CPU slots, for one test at a time."""

    def __init__(self, slots: Slots, limit: float, tell: Tell | None = None) -> None:
        self._slots, self._limit, self._tell = slots, limit, tell

    @contextlib.contextmanager
    def for_test(self, size: int, holder: str) -> Iterator[None]:
        lease = self._slots.acquire(size, self._limit, holder, self._tell)
        try:
            yield
        finally:
            lease.release()

    def environment(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        pass


class GpuSharing:
    """GPUs, kept between tests until somebody else waits for them.

    Who waits may wait for a worker that has no more tests for a while, so a thread looks
    for waiters whenever no test holds the lock.
    """

    def __init__(
        self,
        slots: Slots,
        entries: Mapping[str, str],
        limit: float,
        stop_ranks: Callable[[], None],
        tell: Tell | None = None,
    ) -> None:
        self._slots, self._entries, self._limit = slots, entries, limit
        self._stop_ranks, self._tell = stop_ranks, tell
        self._lease: Lease | None = None
        self._in_use = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @contextlib.contextmanager
    def for_test(self, size: int, holder: str) -> Iterator[None]:
        with self._in_use:
            self._hold(size, holder)
            try:
                yield
            finally:
                self._give_up_if_wanted()

    def environment(self) -> Mapping[str, str]:
        held = self._lease.slots if self._lease is not None else ()
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._entries[slot] for slot in held), **BUS_ORDER}

    def close(self) -> None:
        self._closed.set()
        with self._in_use:
            self._give_up()

    def _hold(self, size: int, holder: str) -> None:
        if self._lease is None or len(self._lease.slots) < size:
            self._give_up()  # who holds some while waiting for more can wait for ever
            self._lease = self._slots.acquire(size, self._limit, holder, self._tell)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="gtrainer-leases", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY):
            if self._in_use.acquire(blocking=False):
                try:
                    self._give_up_if_wanted()
                finally:
                    self._in_use.release()

    def _give_up_if_wanted(self) -> None:
        if self._lease is not None and self._slots.wanted():
            self._give_up()

    def _give_up(self) -> None:
        if self._lease is not None:
            self._stop_ranks()
            self._lease.release()
            self._lease = None
