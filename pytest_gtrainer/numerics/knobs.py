"""Read the table ``knobs.csv``: every global switch of torch that decides whether a run repeats, or
which bits it gives.

Three things use it: ``deterministic``, which sets and reports the switches; the guard against tests
that leak a flag; and the table in ``docs/numerics.md``. Reading a switch imports nothing: one of
a module that is not loaded has no value.
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
    """One switch, ``module:attribute``, ``()`` after it if it is called, or an environment
    variable ``$NAME``.

    Attributes:
        setting: the value that ``deterministic`` gives it; empty if it leaves it alone.
        documented: where the documentation of torch, or of a vendor, describes it.
        guarded: whether a test that leaves it changed fails.
    """

    path: str
    devices: str
    setting: str
    effect: str
    documented: str
    guarded: bool = True

    @cached_property
    def name(self) -> str:
        """The name as a person writes it: ``torch.backends.cudnn.enabled``, ``NCCL_ALGO``."""
        return self.path.removeprefix("$").replace(":", ".")

    @cached_property
    def is_variable(self) -> bool:
        """Return whether it is an environment variable."""
        return self.path.startswith("$")

    def write(self, value: Any) -> None:
        """Give the switch a value that was read before; one that is only called stays as it is."""
        if self.is_variable:
            os.environ.pop(self.name, None)
            if value is not None:
                os.environ[self.name] = value
            return
        home, _, path = self.path.partition(":")
        *parents, attribute = path.split(".")
        holder = sys.modules[home]
        for name in parents:
            holder = getattr(holder, name)
        if not attribute.endswith("()"):
            setattr(holder, attribute, value)
        elif attribute in _SETTERS:
            getattr(holder, _SETTERS[attribute])(value)

    @cached_property
    def read(self) -> Callable[[], Any]:
        """The function that returns the value in effect: ``NOT_LOADED`` while its module is not
        imported, None for an unset variable.
        """
        # Made once, since each test reads all switches twice.
        name = self.name
        if self.is_variable:
            return lambda: os.environ.get(name)
        home, _, attribute = self.path.partition(":")
        get, is_called = attrgetter(attribute.removesuffix("()")), attribute.endswith("()")

        def read() -> Any:
            module = sys.modules.get(home)
            if module is None:
                return NOT_LOADED
            try:
                value = get(module)
                return value() if is_called else value
            # torch refuses to read a precision that was set in two ways that disagree.
            except RuntimeError as error:
                return f"cannot be read: {str(error).splitlines()[0]}"

        return read


_SETTERS = {
    "flash_sdp_enabled()": "enable_flash_sdp",
    "mem_efficient_sdp_enabled()": "enable_mem_efficient_sdp",
    "math_sdp_enabled()": "enable_math_sdp",
    "cudnn_sdp_enabled()": "enable_cudnn_sdp",
    "fp16_bf16_reduction_math_sdp_allowed()": "allow_fp16_bf16_reduction_math_sdp",
    "preferred_blas_library()": "preferred_blas_library",
    "preferred_linalg_library()": "preferred_linalg_library",
    "get_fastpath_enabled()": "set_fastpath_enabled",
}
"""Functions of the same module that set what others read."""

_ROWS = csv.DictReader(
    resources.files(__package__).joinpath("knobs.csv").read_text(encoding="utf-8").splitlines()
)
KNOBS = tuple(Knob(guarded=row.pop("guarded") != "no", **row) for row in _ROWS)
GUARDED = [knob for knob in KNOBS if knob.guarded]
"""The table, in the order in which it is reported."""


def values(knobs: Iterable[Knob] = KNOBS) -> dict[str, Any]:
    """Return the values in effect, by name."""
    return {knob.name: knob.read() for knob in knobs}


def flags(home: str) -> dict[str, bool]:
    """Return the attributes of a module that ``deterministic`` sets to True or False."""
    found = {}
    for knob in KNOBS:
        module, _, attribute = knob.path.partition(":")
        if module == home and knob.setting in ("True", "False"):
            found[attribute] = knob.setting == "True"
    return found
