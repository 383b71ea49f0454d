"""The calls of the hooks in ``hookspecs``, also for parts that have no pytest configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer.hookspecs import together

if TYPE_CHECKING:
    from pytest_gtrainer.hookspecs import EnterWorld

GIVEN = {"gt_model": ("models", "model"), "gt_net": ("nets", "net")}
"""Fixtures that parametrise a test, with their hook and what it gives."""

_configs: list[pytest.Config] = []


def remember(config: pytest.Config) -> None:
    """Make this run's hooks the current ones. A run inside a run, as of pytester, comes on top."""
    _configs.append(config)
    config.add_cleanup(lambda: _configs.remove(config))


def passes() -> dict[str, Callable[..., Any]]:
    """Return the passes that hooks give, by name; none without a pytest session."""
    if not _configs:
        return {}
    config = _configs[-1]
    return together(config.hook.pytest_gtrainer_passes(config=config), "pass")


def models() -> dict[str, Callable[..., Any]]:
    """Return the functions that make models, which hooks give, by name; none without a session."""
    if not _configs:
        return {}
    config = _configs[-1]
    return together(config.hook.pytest_gtrainer_models(config=config), "model")


def worlds(config: pytest.Config, ours: Collection[str]) -> dict[str, EnterWorld]:
    """Return the kinds of worlds that hooks give.

    Raises:
        pytest.UsageError: a name was given twice, or is one of ``ours``.
    """
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
    """Parametrise a test that takes ``gt_model`` or ``gt_net`` with the models or nets of hooks."""
    for fixture, (hook, what) in GIVEN.items():
        if fixture not in metafunc.fixturenames:
            continue
        # ``ihook`` leaves out the hooks of conftests that are not above the test.
        call = getattr(metafunc.definition.ihook, f"pytest_gtrainer_{hook}")
        found = together(call(config=metafunc.config), what)
        if not found:
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid} takes {fixture}, "
                f"and no hook pytest_gtrainer_{hook} gives a {what}"
            )
        metafunc.parametrize(fixture, list(found.values()), ids=list(found))


def scrubbed(config: pytest.Config, text: str) -> str:
    """Apply the scrubbers of hooks to the text of a graph."""
    for scrubbers in config.hook.pytest_gtrainer_scrubbers(config=config):
        for scrub in scrubbers:
            text = scrub(text)
    return text


def environment(config: pytest.Config) -> dict[str, str | int]:
    """Return what hooks add to the environment of numbers.

    Raises:
        pytest.UsageError: a value is neither a text nor a whole number.
    """
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
    """Call the set-up hook of a rank, whose process group is up."""
    worker: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
    config.hook.pytest_gtrainer_rank_setup(
        config=config, rank=worker["gt_rank"], device=worker["gt_device"]
    )


def rank_ends(config: pytest.Config) -> None:
    """Call the tear-down hook of a rank, after its last test."""
    worker: dict[str, Any] = config.workerinput  # type: ignore[attr-defined]
    config.hook.pytest_gtrainer_rank_teardown(
        config=config, rank=worker["gt_rank"], device=worker["gt_device"]
    )
    # Coverage would save at the exit of this process, for which nobody waits.
    coverage = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is not None:
        current.save()
