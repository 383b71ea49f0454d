"""What goes wrong: a check that is no check, and a check that fails."""

from __future__ import annotations


class CheckError(ValueError):
    """A check that cannot be read, cannot match or cannot fail; says where it stands and the way out."""


class CheckFailure(AssertionError):
    """A graph is not as a check says; the message names the check, where the search stood, and what came nearest."""
