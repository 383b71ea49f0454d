"""Where the hooks of ``hookspecs`` are called. Parts that know nothing of pytest's configuration ask here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer.hookspecs import together

if TYPE_CHECKING:
    from pytest_gtrainer.hookspecs import EnterWorld

GIVEN = {"gt_model": ("models", "model"), "gt_net": ("nets", "net")}
"""Fixtures that run a test once with each of what a hook gives."""

_configs: list[pytest.Config] = []


def remember(config: pytest.Config) -> None:
    """From now on hooks are those of this run; a run inside a run, as of pytester, comes on top."""
    _configs.append(config)
    config.add_cleanup(lambda: _configs.remove(config))


def passes() -> dict[str, Callable[..., Any]]:
    """The passes that the running session's hooks give; none without a session."""
    if not _configs:
        return {}
    config = _configs[-1]
    return together(config.hook.pytest_gtrainer_passes(config=config), "pass")


def worlds(config: pytest.Config, ours: Collection[str]) -> dict[str, EnterWorld]:
    """The kinds of worlds that hooks give; pytest.UsageError for a name that was given twice, or is one of ``ours``."""
    found: dict[str, EnterWorld] = together(
        config.hook.pytest_gtrainer_worlds(config=config), "world"
    )
    for name in ours:
        if name in found:
            raise pytest.UsageError(
                f"pytest_gtrainer_worlds: {name!r} is a world of pytest-gtrainer: rename yours"
            )
    return found


def parametrise(metafunc: pytest.Metafunc) -> None:
    """Run a test once with each model or net that hooks give, if it takes one."""
    for fixture, (hook, what) in GIVEN.items():
        if fixture not in metafunc.fixturenames:
            continue
        config = metafunc.config
        found = together(
            getattr(metafunc.definition.ihook, f"pytest_gtrainer_{hook}")(config=config), what
        )
        if not found:
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid} takes {fixture}, and no hook pytest_gtrainer_{hook} gives a {what}"
            )
        metafunc.parametrize(fixture, list(found.values()), ids=list(found))


def scrubbed(config: pytest.Config, text: str) -> str:
    """A graph's text as the scrubbers leave it."""
    for scrubbers in config.hook.pytest_gtrainer_scrubbers(config=config):
        for scrub in scrubbers:
            text = scrub(text)
    return text


def environment(config: pytest.Config) -> dict[str, str | int]:
    """What hooks add to the environment of numbers; pytest.UsageError for what is neither a text nor a whole number."""
    found = together(
        config.hook.pytest_gtrainer_environment(config=config), "part of the environment"
    )
    for name, value in found.items():
        if type(value) not in (str, int):
            raise pytest.UsageError(
                f"pytest_gtrainer_environment: {name} is a text or a whole number, not {value!r}"
            )
    return found


def rank_starts(config: pytest.Config) -> None:
    """In a rank: its process group is up."""
    worker: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
    config.hook.pytest_gtrainer_rank_setup(
        config=config, rank=worker["gt_rank"], device=worker["gt_device"]
    )


def rank_ends(config: pytest.Config) -> None:
    """In a rank: its last test is over."""
    worker: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
    config.hook.pytest_gtrainer_rank_teardown(
        config=config, rank=worker["gt_rank"], device=worker["gt_device"]
    )
    # what coverage has measured in this rank: not at the process's exit, as then nobody waits for it
    coverage = sys.modules.get("coverage")
    if coverage is not None and (current := coverage.Coverage.current()) is not None:
        current.save()
