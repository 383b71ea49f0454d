"""Hooks that the ``conftest.py`` or plugin of a repository may implement.

Several places may implement one hook: their results are joined, and a name that is given twice is a
usage error. docs/options.md has a project that uses all of them; a test runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import fx, nn

    from pytest_gtrainer.worlds.simulated.net import Net
    from pytest_gtrainer.worlds.spec import World, WorldSpec

    EnterWorld = Callable[[WorldSpec], AbstractContextManager[World]]
    Worlds = Mapping[str, EnterWorld]
    Passes = Mapping[str, Callable[..., fx.GraphModule]]
    Models = Mapping[str, Callable[[], nn.Module]]
    Scrubbers = Iterable[Callable[[str], str]]
    Environment = Mapping[str, str | int]


@pytest.hookspec
def pytest_gtrainer_passes(config: pytest.Config) -> Passes:  # type: ignore[empty-body]
    """Return passes by name, ``(gm, example_inputs, **options) -> gm``, for the ``# passes:`` line
    of pass files.

    Called each time that a pass file runs.
    """


@pytest.hookspec
def pytest_gtrainer_models(config: pytest.Config) -> Models:  # type: ignore[empty-body]
    """Return functions that build models, by name: a test that takes ``gt_model`` runs once with
    each of them.

    Called when tests are collected, also on each rank: import torch inside the functions.
    """


@pytest.hookspec
def pytest_gtrainer_worlds(config: pytest.Config) -> Worlds:  # type: ignore[empty-body]
    """Return kinds of worlds by name: ``gt_world("name", size=8)`` enters one, in the process of
    the test.

    Each is a function of the marker's ``WorldSpec`` that returns a context manager
    (``contextlib.contextmanager``). In its block torch's default process group exists; its value is
    the ``World`` of the test. Called when a test of such a kind runs. "fake", "simulated" and
    "ranks" are taken.
    """


@pytest.hookspec
def pytest_gtrainer_nets(config: pytest.Config) -> Mapping[str, Net]:  # type: ignore[empty-body]
    """Return net models by name: a test in a simulated world that takes ``gt_net`` runs once with
    each of them.

    Called when tests are collected, if one of them takes ``gt_net``.
    """


@pytest.hookspec
def pytest_gtrainer_scrubbers(config: pytest.Config) -> Scrubbers:  # type: ignore[empty-body]
    """Return functions from text to text, which change every graph text of ``gt_golden`` before it
    is compared.

    Use them for text that changes without a reason to review it, for example a counter in an
    operator's name. Their result must be graph text. Called at each check; after a change of a
    function, goldens differ until updated.
    """


@pytest.hookspec
def pytest_gtrainer_environment(config: pytest.Config) -> Environment:  # type: ignore[empty-body]
    """Return further properties on which numbers depend: a driver, a library, a compiler flag.

    Goldens of numbers are compared only within an equal environment. The head of a report shows it.
    """


@pytest.hookspec
def pytest_gtrainer_rank_setup(config: pytest.Config, rank: int, device: str) -> None:
    """Set up a rank process: called once, after its process group exists and before its first test.

    If it raises, the tests on these ranks fail. ``device`` is "cpu" or "cuda".
    """


@pytest.hookspec
def pytest_gtrainer_rank_teardown(config: pytest.Config, rank: int, device: str) -> None:
    """Tear down a rank process that ends normally: called once, after its last test.

    It is not called in a process that is killed.
    """


def together(results: Iterable[Mapping[str, Any] | None], what: str) -> dict[str, Any]:
    """Join the mappings that several implementations of a hook gave.

    Raises:
        pytest.UsageError: two of them give one name.

    >>> together([{"a": 1}, None, {"b": 2}], "model")
    {'a': 1, 'b': 2}
    """
    found: dict[str, Any] = {}
    for result in results:
        for name, value in (result or {}).items():
            if name in found:
                raise pytest.UsageError(
                    f"two hooks give a {what} called {name!r}: rename one of them"
                )
            found[name] = value
    return found
