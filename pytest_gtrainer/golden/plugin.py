"""Goldens in a pytest run."""

from __future__ import annotations

import pytest


class GoldenPlugin:
    """Judges and writes goldens."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
