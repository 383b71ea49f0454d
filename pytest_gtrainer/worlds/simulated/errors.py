"""What a simulated world refuses; each message is one sentence for the author of the test."""

from __future__ import annotations


class NoModel(NotImplementedError):
    """A collective, a reduction or another operator that a simulated world does not model (S5)."""


class CollectiveMismatch(AssertionError):
    """Ranks come to the same collective with different operations, sizes, dtypes or splits (S5)."""


class DependsOnRank(ValueError):
    """A graph, or an input of it, is valid for one rank only (S4)."""
