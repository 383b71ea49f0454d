"""The pool: teams of ranks by what they are, kept warm up to a modest number of processes, on
devices that others want.

A lease on CPU slots lasts one test. A lease on GPUs lasts as long as the ranks that have a context
on them; it is given up, and the ranks with it, as soon as another process waits and no test runs
here.
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
from pytest_gtrainer.ranks.team import LEAST_START_LIMIT, START_LIMIT, ForkServer, LocalRanks, Team
from pytest_gtrainer.ranks.watch import Console, RanksOutcome, run_on, stopped_clock, write_line

if TYPE_CHECKING:
    from pytest_gtrainer.ranks.torchrun.nodes import Nodes

IDLE_FACTOR = (
    2  # idle ranks cost 20 MB each; twice the slots let worlds of two sizes alternate warm
)
LOOK_EVERY = 0.5

PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.proxy_tensor",
    # tracing and every optimiser import it at their first use: once here, or once in each rank
    "torch._dynamo",
    # where it is installed: its settings must be in place before a test file imports it
    "hypothesis",
    "pytest_gtrainer.plugin",
    "pytest_gtrainer.ranks.inside.rank",
)

TeamKey = tuple[int, str, frozenset[tuple[str, str]]]  # number of ranks, device, environment


class Pool:
    """Hands out teams; one forkserver per pytest process, started when first needed; under torchrun
    with ``nodes``.
    """

    def __init__(self, config: pytest.Config, nodes: Nodes | None = None) -> None:
        self._config, self._nodes = config, nodes
        self._server: ForkServer | None = None
        self._teams: dict[TeamKey, Team] = {}  # the least recently used first
        self._sharing: Sharing | None = None
        self.problems: list[
            tuple[str, str]
        ] = []  # as ranks ended: the last test that they ran, what went wrong
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
        """Run a command within ``limit`` seconds of its lease; RanksError or LeaseError if it
        cannot start.

        ``fresh`` ends the warm ranks of that size before, so that nothing of an earlier test is
        left in them.
        """
        if self._sharing is None:
            self._sharing = sharing_of(self._config, self._stop_teams)
        with self._sharing.for_test(size, holder):
            with stopped_clock():
                if fresh:
                    for key in [key for key in self._teams if key[0] == size]:
                        self._stop(self._teams.pop(key))
                environ = {**rank_environment(self._config), **self._sharing.environment()}
                team = self._team(size, environ, min(START_LIMIT, max(LEAST_START_LIMIT, limit)))
            team.last_test = holder
            try:
                outcome = run_on(team, command, limit, Console(self._config, holder))
            except (
                BaseException
            ):  # a time limit, Ctrl-C: its ranks are still at work, and would answer the next test
                team.kill()
                raise
            if options.get(self._config, "fresh-ranks") is True:
                self._stop(team)
            return outcome

    def close(self) -> None:
        """End all teams and the forkserver, and give all devices back."""
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None
        self._stop_teams()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _team(self, size: int, environ: Mapping[str, str], start_limit: float) -> Team:
        """A team of ``size`` ranks in that environment, started within so many seconds if there is
        none.
        """
        found = devices.resolve(self._config)
        key = (size, found.kind, frozenset(environ.items()))
        team = self._teams.pop(key, None)
        if team is not None and team.alive and not team.has_lost_ranks():
            self._teams[key] = team
            return team
        if team is not None:
            self._stop(team)
        self._teams = {key: team for key, team in self._teams.items() if team.alive}
        most = IDLE_FACTOR * max(found.slots, size)
        while self._teams and sum(team.size for team in self._teams.values()) + size > most:
            self._stop(self._teams.pop(next(iter(self._teams))))
        plan, stores = self.plan(size, environ, worker_input(self._config, size)), None
        if self._nodes is not None:
            plan, stores = self._nodes.place(plan)
        here = LocalRanks(self.forkserver(), plan)
        others = self._nodes.start(plan) if self._nodes is not None else []
        team = Team(size, [here, *others], stores or here.stores)
        team.wait_until_up(start_limit)
        self._teams[key] = team
        return team

    def plan(
        self, size: int, environ: Mapping[str, str], worker: Mapping[str, Any]
    ) -> wire.RankSetup:
        """Return what ranks of this machine start from."""
        config, found, launch = (
            self._config,
            devices.resolve(self._config),
            devices.launch_of(self._config),
        )
        called, has_temporary = config.invocation_params, launch is None or launch.leads
        return wire.RankSetup(
            size=size,
            ranks=range(size),
            device=found.kind,
            backend=found.backend,
            environ=environ,
            sys_path=tuple(sys.path),
            cwd=str(called.dir),
            args=tuple(map(str, called.args)),
            basetemp=str(base_temp(config))
            if has_temporary
            else None,  # ranks of a torchrun follower make their own
            worker=worker,
            live_output=self._live_output,
        )

    def forkserver(self) -> ForkServer:
        """The forkserver, started if there is none."""
        if self._server is not None and not self._server.alive:
            self._server.close()
            self._server = None
        if self._server is None:
            installed = (plugin for plugin, _ in self._config.pluginmanager.list_plugin_distinfo())
            plugins = [plugin.__name__ for plugin in installed if isinstance(plugin, ModuleType)]
            # what tests have imported here of torch and of ours, test files will import again in
            # every rank
            seen = [
                name
                for name in sys.modules
                if name.split(".")[0] in ("torch", "numpy", "pytest_gtrainer")
            ]
            modules = list(dict.fromkeys([*PRELOAD, *plugins, *seen]))
            preload = options.get(self._config, "preload")
            self._server = ForkServer(modules, preload, live_output=self._live_output)
        return self._server

    def _stop_teams(self) -> None:
        while self._teams:
            self._stop(self._teams.popitem()[1])

    def _stop(self, team: Team) -> None:
        self.problems += [(team.last_test, problem) for problem in team.stop()]


def rank_environment(config: pytest.Config) -> dict[str, str]:
    """The environment that ranks start with: the caller's, but for what pytest says of its present
    test.
    """
    environ = lasting_environment()
    environ.pop("PYTEST_CURRENT_TEST", None)
    if devices.resolve(config).kind == "cuda":
        # deterministic cuBLAS needs it before CUDA starts, long before a test could ask for it
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return environ


def worker_input(config: pytest.Config, size: int) -> dict[str, Any]:
    """``config.workerinput`` of ranks but for their rank: the keys of xdist, the seed of
    pytest-randomly, ours.
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
        # of plugins, too, that ranks do without: xdist's, one of time limits
        "gt_markers": config.getini("markers"),
        # ranks write no JUnit file: what it says of digests they have to be asked for
        "gt_digests": bool(getattr(config.option, "xmlpath", None)),
    }
    seed = getattr(config.option, "randomly_seed", None)
    return content if seed is None else {**content, "randomly_seed": seed}


def sharing_of(config: pytest.Config, stop_ranks: Callable[[], None]) -> Sharing:
    """The way to share the devices of this process; ``stop_ranks`` ends its ranks before their GPUs
    are given back.
    """
    found, limit = devices.resolve(config), options.get(config, "lease-timeout")
    say = functools.partial(write_line, config)
    if devices.launch_of(config) is not None:
        return Sharing()  # whoever has started torchrun shares them out
    if found.kind == "cuda":
        folder = Path(tempfile.gettempdir()) / f"gtrainer-leases-{os.getuid()}"
        slots = Slots(folder, [gpu.uuid for gpu in found.gpus])
        return GpuSharing(
            slots, {gpu.uuid: gpu.entry for gpu in found.gpus}, limit, stop_ranks, say
        )
    if hasattr(config, "workerinput"):
        # the folder above a worker's own is the run's
        folder = base_temp(config).parent / "gtrainer-leases"
        slots = Slots(folder, [f"cpu{slot}" for slot in range(found.slots)])
        return Sharing(lambda size, holder: slots.acquire(size, limit, holder, say))
    return Sharing()


class Sharing:
    """Devices leased for a test by ``acquire``, for so many ranks; by default there is nothing to
    lease.
    """

    def __init__(
        self, acquire: Callable[[int, str], Lease] = lambda size, holder: Lease((), lambda: None)
    ) -> None:
        self._acquire = acquire

    @contextlib.contextmanager
    def for_test(self, size: int, holder: str) -> Iterator[None]:
        """Devices for ``size`` ranks, this process's for the time of a test."""
        lease = self._acquire(size, holder)
        try:
            yield
        finally:
            lease.release()

    def environment(self) -> Mapping[str, str]:
        """Return what confines the ranks to the devices that are leased."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class GpuSharing(Sharing):
    """GPUs, kept between tests until another process waits for them, which a thread looks for while
    no test runs.
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
                # a process that holds some while it waits for more can wait for ever
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
                finally:
                    self._in_use.release()

    def _give_up(self, *, only_if_wanted: bool = False) -> None:
        if self._lease is not None and (not only_if_wanted or self._slots.wanted()):
            self._stop_ranks()
            self._lease.release()
            self._lease = None
