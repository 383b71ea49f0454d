"""The pool: teams of ranks by what they are, kept warm up to a modest number of processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

import pytest

from pytest_gtrainer import options
from pytest_gtrainer._pytest_private import base_temp
from pytest_gtrainer.devices import Devices, resolve
from pytest_gtrainer.environment import lasting_environment, raw_lasting_environment
from pytest_gtrainer.worlds.ranks import sharing, wire
from pytest_gtrainer.worlds.ranks.launcher import ForkServer
from pytest_gtrainer.worlds.ranks.outcome import Outcome
from pytest_gtrainer.worlds.ranks.progress import teller
from pytest_gtrainer.worlds.ranks.team import Team, TeamPlan
from pytest_gtrainer.worlds.ranks.watch import run_on

# Idle ranks cost 20 MB each; twice the slots let worlds of two sizes alternate warm.
IDLE_FACTOR = 2

PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.proxy_tensor",
    # tracing and every optimiser import it at their first use: once here, or once in each rank
    "torch._dynamo",
    "pytest_gtrainer.plugin",
    "pytest_gtrainer.worlds.ranks.world",
    "pytest_gtrainer.worlds.ranks.inside.process",
    "pytest_gtrainer.worlds.ranks.inside.commands",
)


_Items = frozenset[tuple[str, str]]
# Number of ranks, device, environment.
TeamKey = tuple[int, str, _Items]
# What the environment of ranks was made from, and what came of it.
_Seen = tuple[tuple[dict[bytes, bytes] | None, Mapping[str, str]], tuple[dict[str, str], _Items]]


class Launcher(Protocol):
    """Who has ranks: the pool of this process, or torchrun.

    Attributes:
        broken: why no more tests can run on ranks; None as long as they can.
    """

    broken: str | None

    def run(self, size: int, command: wire.RunItem | wire.CallFunction, limit: float, holder: str) -> Outcome:
        """Run a command on ``size`` ranks."""

    def leave(self) -> None:
        """Make this process fit for a test without ranks."""

    def close(self, status: int = 0) -> None:
        """End the ranks; ``status`` is the one that the run exits with."""


class Pool:
    """Hands out teams; one forkserver per pytest process, started when first needed."""

    broken: str | None = None

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._server: ForkServer | None = None
        self._teams: dict[TeamKey, Team] = {}  # the least recently used first
        self._devices_shared: sharing.Sharing | None = None
        self._seen: _Seen | None = None
        self._is_fresh: bool = options.get(config, "fresh-ranks")

    @property
    def devices(self) -> Devices:
        return resolve(self._config)

    def warm_up(self) -> None:
        """Begin importing in the background."""
        self._running_server()

    def run(self, size: int, command: wire.RunItem | wire.CallFunction, limit: float, holder: str) -> Outcome:
        """Run a command on ``size`` ranks, once their devices are this process's to use.

        Args:
            limit: for the command, in seconds; waiting for devices has its own.
            holder: the test, told to those who wait in vain for the devices.

        Raises:
            RanksError: the ranks could not be started.
            LeaseError: others held the devices for too long.
        """
        with self._lend(size, holder) as team:
            return run_on(team, command, limit, holder, teller(self._config))

    def leave(self) -> None:
        """Nothing: a test without ranks runs in this process, which is none of them."""

    @contextlib.contextmanager
    def _lend(self, size: int, holder: str) -> Iterator[Team]:
        """A team of ``size`` ranks for one test, that ends with it if an exception of this process broke it off."""
        with self._sharing().for_test(size, holder):
            team = self.team(size)
            try:
                yield team
            except BaseException:  # a time limit, Ctrl-C: its ranks are still at work, and would answer the next test
                team.kill()
                raise
            self.release(team)

    def _sharing(self) -> sharing.Sharing:
        if self._devices_shared is None:
            limit = options.get(self._config, "lease-timeout")
            self._devices_shared = sharing.of(self._config, self.devices, limit, self._stop_teams, teller(self._config))
        return self._devices_shared

    def team(self, size: int) -> Team:
        """A team of ``size`` ranks in the present environment, started if there is none.

        Raises:
            RanksError: it could not be started.
        """
        environ, items = self._environment()
        key = (size, self.devices.kind, items)
        team = self._teams.pop(key, None)
        if team is not None and team.alive and not team.has_lost_ranks():
            self._teams[key] = team
            return team
        if team is not None:
            team.kill()
        self._make_room(size)
        team = Team(self._running_server(), self._plan(size, environ))
        self._teams[key] = team
        return team

    def _environment(self) -> tuple[dict[str, str], _Items]:
        """What ranks start with now; to decode and hash it for every test took a tenth of this process's time."""
        raw = raw_lasting_environment()
        if raw is not None:
            raw.pop(b"PYTEST_CURRENT_TEST", None)
        seen = (raw, self._sharing().environment())
        if raw is None or self._seen is None or self._seen[0] != seen:
            environ = {**rank_environment(self.devices.kind), **self._sharing().environment()}
            self._seen = seen, (environ, frozenset(environ.items()))
        return self._seen[1]

    def release(self, team: Team) -> None:
        """Give a team back after a test."""
        if self._is_fresh:
            team.stop()

    def close(self, status: int = 0) -> None:
        """End all teams and the forkserver, and give all devices back; ``status`` is for other launchers."""
        if self._devices_shared is not None:
            self._devices_shared.close()
            self._devices_shared = None
        self._stop_teams()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _stop_teams(self) -> None:
        while self._teams:
            self._teams.popitem()[1].stop()

    def _make_room(self, size: int) -> None:
        self._teams = {key: team for key, team in self._teams.items() if team.alive}
        limit = IDLE_FACTOR * max(self.devices.slots, size)
        while self._teams and sum(team.size for team in self._teams.values()) + size > limit:
            oldest = next(iter(self._teams))
            self._teams.pop(oldest).stop()

    def _running_server(self) -> ForkServer:
        if self._server is not None and not self._server.alive:
            self._server.close()
            self._server = None
        if self._server is None:
            live = self._config.getoption("capture", "fd") == "no"
            self._server = ForkServer(modules_to_preload(self._config), live_output=live)
        return self._server

    def _plan(self, size: int, environ: Mapping[str, str]) -> TeamPlan:
        config, devices = self._config, self.devices
        return TeamPlan(
            size=size,
            device=devices.kind,
            backend=devices.backend,
            cwd=str(config.invocation_params.dir),
            args=tuple(str(arg) for arg in config.invocation_params.args),
            worker=_worker_input(config, size),
            basetemp=str(base_temp(config)),
            environ=environ,
            sys_path=tuple(sys.path),
            live_output=config.getoption("capture", "fd") == "no",
        )


def rank_environment(device: str) -> dict[str, str]:
    """The environment that ranks start with: the caller's, but for what pytest says of its present test.

    On GPUs also the workspace setting that deterministic cuBLAS needs before CUDA starts, which
    is when the group is made, long before a test could ask for it.
    """
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if device == "cuda" else {}
    environ = {**wanted, **lasting_environment()}
    environ.pop("PYTEST_CURRENT_TEST", None)
    return environ


def modules_to_preload(config: pytest.Config) -> list[str]:
    """Torch, the installed plugins, and whatever of torch and of ours the tests have imported here.

    The last is exactly what the test files will import again in every rank.
    """
    installed = (plugin for plugin, _ in config.pluginmanager.list_plugin_distinfo())
    plugins = [plugin.__name__ for plugin in installed if isinstance(plugin, ModuleType)]
    seen = [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "pytest_gtrainer")]
    return list(dict.fromkeys([*PRELOAD, *plugins, *seen]))


def _worker_input(config: pytest.Config, size: int) -> dict[str, Any]:
    """What plugins expect in a worker: the keys of xdist, and the seed of pytest-randomly."""
    outer = getattr(config, "workerinput", {})
    content = {
        "workerid": outer.get("workerid", "ranks"),
        "workercount": size,
        "testrunuid": outer.get("testrunuid", f"gtrainer{os.getpid()}"),
        "mainargv": outer.get("mainargv", sys.argv),
        # of plugins, too, that ranks do without: xdist's, one of time limits
        "gt_markers": config.getini("markers"),
        # ranks write no JUnit file: what it says of digests they have to be asked for
        "gt_digests": bool(getattr(config.option, "xmlpath", None)),
    }
    seed = getattr(config.option, "randomly_seed", None)
    return content if seed is None else {**content, "randomly_seed": seed}
