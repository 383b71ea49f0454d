"""Worlds: process groups for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gtrainer import extensions
from pytest_gtrainer.worlds.spec import KINDS

if TYPE_CHECKING:
    import pytest

    from pytest_gtrainer.worlds.spec import WorldSpec
    from pytest_gtrainer.worlds.world import World


@contextmanager
def enter(spec: WorldSpec, config: pytest.Config) -> Iterator[World]:
    """Enter the world that ``spec`` asks for, and leave it without a trace."""
    from pytest_gtrainer.worlds.trace_log import keep_trace_log_quiet

    keep_trace_log_quiet()
    if spec.kind == "fake":
        from pytest_gtrainer.worlds.fake import fake_world

        with fake_world(spec) as world:
            yield world
    elif spec.kind == "simulated":
        from pytest_gtrainer.worlds.simulated.world import simulated_world

        with simulated_world(spec) as world:
            yield world
    elif spec.kind == "ranks":
        from pytest_gtrainer.worlds.ranks.world import ranks_world

        with ranks_world(spec, config) as world:
            yield world
    else:
        with extensions.worlds(config, KINDS)[spec.kind](spec) as world:
            yield world
