"""The pool: warm teams of ranks, by size, device and environment, on leased devices.

The pool keeps a bounded number of processes. A lease on CPU slots lasts one test. A lease on GPUs
lasts as long as the ranks that have a context on them. When another process waits for the GPUs and
no test runs here, the lease is given up, and the ranks with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer import devices, options
from pytest_gtrainer._pytest_private import base_temp
from pytest_gtrainer.environment import lasting_environment
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.leases import Lease, Slots, WriteLine
from pytest_gtrainer.ranks.team import (
    LEAST_START_LIMIT,
    START_LIMIT,
    ForkServer,
    LocalRanks,
    Part,
    Team,
)
from pytest_gtrainer.ranks.watch import Console, RanksOutcome, run_on, stopped_clock, write_line

if TYPE_CHECKING:
    from pytest_gtrainer.ranks.torchrun.nodes import Nodes

# Idle ranks cost 20 MB each; twice the slots let worlds of two sizes alternate warm.
IDLE_FACTOR = 2
LOOK_EVERY = 0.5

PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.proxy_tensor",
    # Tracing and every optimiser import it at their first use: once here, or once in each rank.
    "torch._dynamo",
    # Where it is installed: its settings must be in place before a test file imports it.
    "hypothesis",
    "pytest_gtrainer.plugin",
    "pytest_gtrainer.ranks.inside.rank",
)

TeamKey = tuple[int, str, frozenset[tuple[str, str]]]  # number of ranks, device, environment


class Pool:
    """The teams of this pytest process, and its forkserver, which starts when first needed.

    ``nodes`` are the other nodes under torchrun. ``problems`` collects what went wrong as ranks
    ended, each with the last test that they ran.
    """

    def __init__(self, config: pytest.Config, nodes: Nodes | None = None) -> None:
        self._config = config
        self._nodes = nodes
        self._server: ForkServer | None = None
        self._teams: dict[TeamKey, Team] = {}  # the least recently used first
        self._sharing: Sharing | None = None
        self.problems: list[tuple[str, str]] = []
        self._live_output = config.getoption("capture", "fd") == "no"

    def run(
        self,
        size: int,
        command: wire.RunItem | wire.CallFunction,
        limit: float,
        holder: str,
        *,
        fresh: bool = False,
    ) -> RanksOutcome:
        """Run a command on ``size`` ranks.

        Args:
            size: the number of ranks.
            command: what each of them runs.
            limit: seconds, from the time when the devices are leased.
            holder: the test, for messages.
            fresh: end the warm ranks of that size before, and with them all that earlier tests
                have left there.

        Raises:
            RanksError: the ranks could not start.
            LeaseError: others held the devices for too long.
        """
        if self._sharing is None:
            self._sharing = sharing_of(self._config, self._stop_teams)
        with self._sharing.for_test(size, holder):
            with stopped_clock():
                if fresh:
                    for key in list(self._teams):
                        if key[0] == size:
                            self._stop(self._teams.pop(key))
                environ = {**rank_environment(self._config), **self._sharing.environment()}
                team = self._team(size, environ, min(START_LIMIT, max(LEAST_START_LIMIT, limit)))
            team.last_test = holder
            try:
                outcome = run_on(team, command, limit, Console(self._config, holder))
            except BaseException:
                # A time limit or Ctrl-C: the ranks still run this test, and would answer the next.
                team.kill()
                raise
            if options.get(self._config, "fresh-ranks") is True:
                self._stop(team)
            return outcome

    def close(self) -> None:
        """End all teams and the forkserver, and give all devices back; each in any case."""
        with contextlib.ExitStack() as stack:  # the last one first
            if self._server is not None:
                stack.callback(self._server.close)
            stack.callback(self._stop_teams)
            if self._sharing is not None:
                stack.callback(self._sharing.close)
            self._server = self._sharing = None

    def _team(self, size: int, environ: Mapping[str, str], start_limit: float) -> Team:
        """Return a team of ``size`` ranks in that environment; start one if there is none."""
        found = devices.resolve(self._config)
        key = (size, found.kind, frozenset(environ.items()))
        team = self._teams.pop(key, None)
        if team is not None and team.alive and not team.has_lost_ranks():
            self._teams[key] = team
            return team
        if team is not None:
            self._stop(team)
        self._make_room(size)
        plan, stores = self.plan(size, environ, worker_input(self._config, size)), None
        if self._nodes is not None:
            plan, stores = self._nodes.place(plan)
        here = LocalRanks(self.forkserver(), plan)
        parts: list[Part] = [here]
        team = Team(size, parts, stores or here.stores)
        try:
            if self._nodes is not None:
                for part in self._nodes.start(plan):
                    parts.append(part)
        except BaseException:
            team.kill()
            raise
        team.wait_until_up(start_limit)
        self._teams[key] = team
        return team

    def _make_room(self, size: int) -> None:
        """Stop the least recently used teams until ``size`` more ranks are not too many."""
        self._teams = {key: team for key, team in self._teams.items() if team.alive}
        most = IDLE_FACTOR * max(devices.resolve(self._config).slots, size)
        while self._teams and sum(team.size for team in self._teams.values()) + size > most:
            least_recent = next(iter(self._teams))
            self._stop(self._teams.pop(least_recent))

    def plan(
        self, size: int, environ: Mapping[str, str], worker: Mapping[str, Any]
    ) -> wire.RankSetup:
        """Return the setup that the ranks of a team share."""
        config = self._config
        found, launch = devices.resolve(config), devices.launch_of(config)
        basetemp = None
        if launch is None or launch.leads:  # ranks of a torchrun follower make their own
            basetemp = str(base_temp(config))
        return wire.RankSetup(
            size=size,
            ranks=range(size),
            device=found.kind,
            backend=found.backend,
            environ=environ,
            sys_path=tuple(sys.path),
            cwd=str(config.invocation_params.dir),
            args=tuple(map(str, config.invocation_params.args)),
            basetemp=basetemp,
            worker=worker,
            live_output=self._live_output,
        )

    def forkserver(self) -> ForkServer:
        """Return the forkserver; start it if there is none."""
        if self._server is not None and not self._server.alive:
            self._server.close()
            self._server = None
        if self._server is None:
            modules = [*PRELOAD]
            for plugin, _ in self._config.pluginmanager.list_plugin_distinfo():
                if isinstance(plugin, ModuleType):
                    modules.append(plugin.__name__)
            # What tests have imported here of torch and of this package, test files will import
            # again in every rank.
            for name in sys.modules:
                if name.split(".")[0] in ("torch", "numpy", "pytest_gtrainer"):
                    modules.append(name)
            self._server = ForkServer(
                list(dict.fromkeys(modules)),
                options.get(self._config, "preload"),
                live_output=self._live_output,
            )
        return self._server

    def _stop_teams(self) -> None:
        with contextlib.ExitStack() as stack:  # the most recently used first, each in any case
            for team in self._teams.values():
                stack.callback(self._stop, team)
            self._teams = {}

    def _stop(self, team: Team) -> None:
        self.problems += [(team.last_test, problem) for problem in team.stop()]


def rank_environment(config: pytest.Config) -> dict[str, str]:
    """Return the environment of new ranks: the caller's, without pytest's present test."""
    environ = lasting_environment()
    environ.pop("PYTEST_CURRENT_TEST", None)
    if devices.resolve(config).kind == "cuda":
        # Deterministic cuBLAS needs it before CUDA starts, long before a test could ask for it.
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return environ


def worker_input(config: pytest.Config, size: int) -> dict[str, Any]:
    """Return the ``config.workerinput`` of ranks, without their rank.

    It has the keys of xdist, the seed of pytest-randomly, and our own keys.
    """
    outer, found = getattr(config, "workerinput", {}), devices.resolve(config)
    content = {
        "workerid": outer.get("workerid", "ranks"),
        "workercount": size,
        "testrunuid": outer.get("testrunuid", f"gtrainer{os.getpid()}"),
        "mainargv": outer.get("mainargv", sys.argv),
        "gt_size": size,
        "gt_pdb": config.getoption("usepdb"),
        "gt_device": found.kind,
        "gt_backend": found.backend,
        # Also those of plugins that ranks do without: xdist, plugins of time limits.
        "gt_markers": config.getini("markers"),
        # Ranks write no JUnit file, so they are asked for the digests that it shows.
        "gt_digests": bool(getattr(config.option, "xmlpath", None)),
    }
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None:
        content["randomly_seed"] = seed
    return content


def sharing_of(config: pytest.Config, stop_ranks: Callable[[], None]) -> Sharing:
    """Return how this process shares its devices with others.

    ``stop_ranks`` ends the ranks of this process before their GPUs are given back.
    """
    found, limit = devices.resolve(config), options.get(config, "lease-timeout")
    write = functools.partial(write_line, config)
    if devices.launch_of(config) is not None:
        return Sharing()  # whoever starts torchrun has chosen its devices
    if found.kind == "cuda":
        # One folder for every run of this user on this machine.
        folder = Path(tempfile.gettempdir()) / f"gtrainer-leases-{os.getuid()}"
        entries = {gpu.uuid: gpu.entry for gpu in found.gpus}
        return GpuSharing(Slots(folder, list(entries)), entries, limit, stop_ranks, write)
    if hasattr(config, "workerinput"):
        # The folder above a worker's own is the run's.
        folder = base_temp(config).parent / "gtrainer-leases"
        slots = Slots(folder, [f"cpu{slot}" for slot in range(found.slots)])
        return Sharing(lambda size, holder: slots.acquire(size, limit, holder, write))
    return Sharing()


class Sharing:
    """Devices for tests, leased by ``acquire(size, holder)``; by default nothing is leased."""

    def __init__(
        self, acquire: Callable[[int, str], Lease] = lambda size, holder: Lease((), lambda: None)
    ) -> None:
        self._acquire = acquire

    @contextlib.contextmanager
    def for_test(self, size: int, holder: str) -> Iterator[None]:
        """Hold devices for ``size`` ranks inside."""
        lease = self._acquire(size, holder)
        try:
            yield
        finally:
            lease.release()

    def environment(self) -> Mapping[str, str]:
        """Return the variables that confine ranks to the devices that are leased."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class GpuSharing(Sharing):
    """GPUs, kept between tests until another process waits for them.

    A thread looks for such processes while no test runs.
    """

    def __init__(
        self,
        slots: Slots,
        entries: Mapping[str, str],
        limit: float,
        stop_ranks: Callable[[], None],
        write: WriteLine,
    ) -> None:
        super().__init__(lambda size, holder: slots.acquire(size, limit, holder, write))
        self._slots, self._entries, self._stop_ranks = slots, entries, stop_ranks
        self._lease: Lease | None = None
        self._in_use = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @contextlib.contextmanager
    def for_test(self, size: int, holder: str) -> Iterator[None]:
        with self._in_use:
            if self._lease is None or len(self._lease.slots) < size:
                # Give them up first: two processes that hold some and wait for more never end.
                self._give_up()
                self._lease = self._acquire(size, holder)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="gtrainer-leases", daemon=True
                )
                self._watcher.start()
            try:
                yield
            finally:
                self._give_up(only_if_wanted=True)

    def environment(self) -> Mapping[str, str]:
        held = self._lease.slots if self._lease is not None else ()
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self._entries[slot] for slot in held),
            **devices.BUS_ORDER,
        }

    def close(self) -> None:
        self._closed.set()
        with self._in_use:
            self._give_up()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY):
            if self._in_use.acquire(blocking=False):
                try:
                    self._give_up(only_if_wanted=True)
                except BaseException:
                    self._watcher = None  # the next test starts another one
                    raise
                finally:
                    self._in_use.release()

    def _give_up(self, *, only_if_wanted: bool = False) -> None:
        if self._lease is not None and (not only_if_wanted or self._slots.wanted()):
            lease, self._lease = self._lease, None
            try:
                self._stop_ranks()
            finally:
                lease.release()
