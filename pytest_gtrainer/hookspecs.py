"""What a repository may tell pytest-gtrainer, as pytest hooks of its ``conftest.py`` or plugin.

Each hook may be implemented in several places; what they give is put together, and a name given twice is a usage
error. docs/hooks.md has a project that uses all of them, which is run as a test.
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


@pytest.hookspec
def pytest_gtrainer_passes(config: pytest.Config) -> Mapping[str, Callable[..., fx.GraphModule]]:  # type: ignore[empty-body]
    """Passes by name, ``(gm, example_inputs, **options) -> gm``, for the ``# passes:`` line of pass files.

    Asked each time that a pass file is run.
    """


@pytest.hookspec
def pytest_gtrainer_models(config: pytest.Config) -> Mapping[str, Callable[[], nn.Module]]:  # type: ignore[empty-body]
    """Models by name, as functions that build them: a test that takes ``gt_model`` runs once with each of them.

    Asked when tests are collected, on each rank, too: import torch inside the functions.
    """


@pytest.hookspec
def pytest_gtrainer_worlds(config: pytest.Config) -> Mapping[str, EnterWorld]:  # type: ignore[empty-body]
    """Kinds of worlds by name: ``gt_world("name", size=8)`` enters one, in the process of the test.

    Each is a function of the marker's ``WorldSpec`` that gives a context manager (``contextlib.contextmanager``):
    inside its block torch's default process group is up, and its value is the ``World`` that the test gets.
    Asked when a test of such a kind is run; the names of our own kinds cannot be given to others.
    """


@pytest.hookspec
def pytest_gtrainer_nets(config: pytest.Config) -> Mapping[str, Net]:  # type: ignore[empty-body]
    """Net models by name: a test in the simulated world that takes ``gt_net`` runs once with each, as its world's.

    Asked when tests are collected, and only if one takes ``gt_net``.
    """


@pytest.hookspec
def pytest_gtrainer_scrubbers(config: pytest.Config) -> Iterable[Callable[[str], str]]:  # type: ignore[empty-body]
    """Functions that every graph text of ``gt_golden`` goes through, one after the other, before it is compared.

    For what drifts and is nobody's to review: a counter in an operator's name, a path in an argument. What comes out
    must still be graph text. Asked at each check; a change shows as a difference of the goldens until they are updated.
    """


@pytest.hookspec
def pytest_gtrainer_environment(config: pytest.Config) -> Mapping[str, str | int]:  # type: ignore[empty-body]
    """More of what numbers depend on: a driver, a library, a compiler flag.

    Goldens of numbers are compared only with those of an equal environment; it also stands at the head of a report.
    """


@pytest.hookspec
def pytest_gtrainer_rank_setup(config: pytest.Config, rank: int, device: str) -> None:
    """Called once in every rank process, when its process group is up and before its first test.

    What it raises fails the tests that wanted the ranks. ``device`` is "cpu" or "cuda".
    """


@pytest.hookspec
def pytest_gtrainer_rank_teardown(config: pytest.Config, rank: int, device: str) -> None:
    """Called once in every rank process that ends in order, after its last test; one that is killed does not."""


def together(results: Iterable[Mapping[str, Any] | None], what: str) -> dict[str, Any]:
    """What several implementations of a hook gave, as one mapping.

    >>> together([{"a": 1}, None, {"b": 2}], "model")
    {'a': 1, 'b': 2}

    Raises:
        pytest.UsageError: a name was given twice.
    """
    found: dict[str, Any] = {}
    for result in results:
        for name, value in (result or {}).items():
            if name in found:
                raise pytest.UsageError(f"two hooks give a {what} called {name!r}: rename one of them")
            found[name] = value
    return found
