"""What a run may do with the files under ``golden/``: nothing, unless a flag says so."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.golden.naming import FOLDER

UPDATE, CREATE, PRUNE = "update-goldens", "create-goldens", "prune-goldens"


@dataclass(frozen=True, slots=True)
class Modes:
    """Which goldens a run writes or removes.

    ``unused`` is what happens to those that no test checks: "warn", "fail", "ignore" or "prune".
    """

    creates: bool
    updates: bool
    unused: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that let this run write."""
        asked = {UPDATE: self.updates, CREATE: self.creates and not self.updates, PRUNE: self.unused == "prune"}
        return tuple(f"--gt-{name}" for name, given in asked.items() if given)


def modes_of(config: pytest.Config) -> Modes:
    """The modes of a run; a flag on the command line wins over what the ini file says.

    Raises:
        pytest.UsageError: two that exclude each other.
    """
    update, create = _one_of(config, UPDATE, CREATE, "updating writes missing goldens too")
    unused: str = options.get(config, "unused-goldens")
    if options.get(config, PRUNE):
        if given(config, PRUNE) and given(config, "unused-goldens") and unused == "ignore":
            raise pytest.UsageError("--gt-prune-goldens and --gt-unused-goldens=ignore exclude each other: give one")
        unused = "prune"
    return Modes(creates=create or update, updates=update, unused=unused)


def refuse_in_ci(config: pytest.Config, modes: Modes) -> None:
    """Where CI is set nobody would review what is written.

    Raises:
        pytest.UsageError: a flag lets the run write, and ``--gt-goldens-in-ci`` is not given.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and modes.flags and not options.get(config, "goldens-in-ci"):
        flags = " and ".join(modes.flags)
        raise pytest.UsageError(
            f"{flags} {'is' if len(modes.flags) == 1 else 'are'} refused where CI is set, as nobody would review "
            f"{FOLDER}/: run it on your machine, or give --gt-goldens-in-ci too"
        )


def _one_of(config: pytest.Config, one: str, other: str, why: str) -> tuple[bool, bool]:
    """Which of two options holds."""
    flags = given(config, one), given(config, other)
    chosen = flags if any(flags) else (bool(options.get(config, one)), bool(options.get(config, other)))
    if all(chosen):
        raise pytest.UsageError(f"--gt-{one} and --gt-{other} exclude each other, as {why}: give one")
    return chosen


def given(config: pytest.Config, name: str) -> bool:
    """Whether the command line itself has an option."""
    return config.getoption(f"--gt-{name}") is not None
