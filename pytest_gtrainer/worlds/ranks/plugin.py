"""Dispatch of tests to real ranks."""

from __future__ import annotations

import pytest


def is_rank(config: pytest.Config) -> bool:
    """Whether this pytest session is itself one rank of a world."""
    return "gt_rank" in getattr(config, "workerinput", {})


class RanksPlugin:
    """Runs tests marked ``gt_world("ranks")`` on the pool."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
