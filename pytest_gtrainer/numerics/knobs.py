"""Every global switch of torch that decides whether a run repeats, or which bits it gives: one
table, ``knobs.csv``.

Of it are made what ``deterministic`` sets and reports, the guard against tests that leak a flag,
and the table in ``docs/determinism.md``. Reading a knob imports nothing: of a module that is not
loaded there is no value.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from operator import attrgetter
from typing import Any

NOT_LOADED = "not loaded"


@dataclass(frozen=True)
class Knob:
    """One switch, ``module:attribute``, ``()`` behind it if it is called, or an environment
    variable ``$NAME``.

    ``setting`` is what ``deterministic`` makes of it, empty if nothing. No test may leave a
    ``guarded`` one changed. ``documented`` says where torch's, or a vendor's, documentation tells
    of it.
    """

    path: str
    devices: str
    setting: str
    effect: str
    documented: str
    guarded: bool = True

    @cached_property
    def name(self) -> str:
        """As a person writes it: ``torch.backends.cudnn.enabled``, ``NCCL_ALGO``."""
        return self.path.removeprefix("$").replace(":", ".")

    @property
    def is_variable(self) -> bool:
        """Return whether it is an environment variable."""
        return self.path.startswith("$")

    @cached_property
    def _place(self) -> tuple[str, Callable[[Any], Any], bool]:
        home, _, attribute = self.path.partition(":")
        return home, attrgetter(attribute.removesuffix("()")), attribute.endswith("()")

    def read(self) -> Any:
        """The value in effect; ``NOT_LOADED`` while its module is not imported, None for an unset
        variable.
        """
        home, get, is_called = self._place
        if home[0] == "$":
            return os.environ.get(self.name)
        if (module := sys.modules.get(home)) is None:
            return NOT_LOADED
        try:
            return get(module)() if is_called else get(module)
        except RuntimeError as error:  # two ways to set a precision that were mixed cannot be read
            return f"cannot be read: {str(error).splitlines()[0]}"


_ROWS = csv.DictReader(
    resources.files(__package__).joinpath("knobs.csv").read_text(encoding="utf-8").splitlines()
)
KNOBS = tuple(Knob(guarded=row.pop("guarded") != "no", **row) for row in _ROWS)
"""The table, in the order in which it is reported."""


def values(knobs: Iterable[Knob] = KNOBS) -> dict[str, Any]:
    """Return what is in effect, by name."""
    return {knob.name: knob.read() for knob in knobs}


def flags(home: str) -> dict[str, bool]:
    """The attributes of a module that ``deterministic`` sets to True or False."""
    own = (
        knob
        for knob in KNOBS
        if knob.path.startswith(f"{home}:") and knob.setting in ("True", "False")
    )
    return {knob.path.partition(":")[2]: knob.setting == "True" for knob in own}
