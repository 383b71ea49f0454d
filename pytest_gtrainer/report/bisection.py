"""``--gt-bisect``: a bitwise comparison that fails is bisected over the passes of the graphs that the test replayed."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from pytest_gtrainer import facts


class BisectPlugin:
    """Watches every test's pipelines and replays; costs a copy of the graph a pass, and one of the inputs."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if "torch" not in sys.modules:  # a test that rewrites graphs has imported it while it was collected
            return (yield)
        from pytest_gtrainer.bisect import PassWitness

        with facts.watching(PassWitness().watchers()):
            return (yield)
