"""A pass with its options: what a pipeline is a list of."""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import inspect
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from pytest_gtrainer.passes.graph_pass import Pass, options_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclasses.dataclass(frozen=True, slots=True)
class BoundPass:
    """A pass and the options it will be called with; made by ``bind_options``.

    Two are equal, and have the same hash, if name and options are: ``spelled`` are the options in a
    form that is the same in every process.
    """

    name: str
    spelled: tuple[tuple[str, str], ...]
    function: Pass = dataclasses.field(compare=False, repr=False)
    options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of name and options: the same in every process and on every machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.spelled)})"


def bind_options(a_pass: Pass, **options: Any) -> BoundPass:
    """The pass with its options, which are checked and copied now (M3).

    Raises:
        TypeError: the pass has no such option, lacks one, or an option has no stable spelling.
    """
    name = getattr(a_pass, "__name__", type(a_pass).__name__)
    known = options_of(a_pass)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{name} has no option {', '.join(unknown)}; its options are {', '.join(known) or 'none'}")
    lacking = [option for option, default in known.items() if default is inspect.Parameter.empty]
    lacking = [option for option in lacking if option not in options]
    if lacking:
        raise TypeError(f"{name} needs the option {', '.join(lacking)}")
    spelled = tuple((option, _spell(options[option], f"{name}({option}=...)")) for option in sorted(options))
    return BoundPass(name, spelled, a_pass, copy.deepcopy(options))


def _spell(value: Any, where: str) -> str:
    """A text that tells equal options from others, in every process: no addresses, no order of a set.

    >>> _spell(["layers.0", {"b", "a"}, torch.bfloat16], "")
    "['layers.0', {'a', 'b'}, torch.bfloat16]"
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare)
        return f"{type(value).__name__}({', '.join(f'{name}={_spell(v, where)}' for name, v in fields)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_spell(k, where)}: {_spell(value[k], where)}' for k in sorted(value, key=repr))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(_spell(item, where) for item in value))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_spell(item, where) for item in value)}]"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(
        f"{where} is a {type(value).__name__}, which has no fingerprint: options are plain values, containers and "
        "dataclasses of these, and functions of modules"
    )
