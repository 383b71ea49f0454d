"""How values, modules and collectives are called in a sentence.

Modules go by torch's names, ``layers.3.attention``; what belongs to the backward ends in ``/bwd``. A
collective is called by its kind and its bucket or module: ``AG layers.4``, ``RS norm+lm_head/bwd``.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pytest_gtrainer.graphtext.dataflow import Dataflow, Value
from pytest_gtrainer.graphtext.effects import short_name
from pytest_gtrainer.graphtext.paths import split_layer
from pytest_gtrainer.graphtext.references import Scope, dotted

KINDS = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "all_to_all": "A2A",
    "broadcast": "broadcast",
    "permute_tensor": "permute",
    "isend": "send",
    "irecv": "receive",
}
"""The usual abbreviations, by what operators' names begin with."""

REDUCTIONS = ("RS", "AR")
NAMESPACE = "_c10d_functional"
"""What operators of collectives begin with."""
_INPUTS = {"P": "parameter", "B": "buffer", "I": "input", "A": "argument"}
_DTYPE = re.compile(r"\b[a-z]+\d\w*(?=\[)")


@functools.lru_cache(maxsize=1 << 14)
def module_of(scope: Scope) -> str:
    """The module or bucket in short.

    >>> module_of(Scope("fwd", "layers[3].norm")), module_of(Scope("bwd", "bucket(norm, lm_head)"))
    ('layers.3.norm', 'norm+lm_head')
    >>> module_of(Scope("fwd", "bucket(layers[1].a, layers[1].b, layers[1].c)"))
    'layers.1.a+2 more'
    """
    modules = scope.modules
    if len(modules) > 2:
        return f"{modules[0]}+{len(modules) - 1} more"
    return "+".join(modules)


@functools.lru_cache(maxsize=1 << 14)
def where(scope: Scope) -> str:
    """The module with its direction.

    >>> where(Scope("fwd", "layers[3].norm")), where(Scope("bwd", "bucket(norm)")), where(Scope("fwd", "_"))
    ('fwd layers.3.norm', 'bwd bucket norm', 'fwd _')
    """
    bucket = "bucket " if scope.is_bucket else ""
    return f"{scope.space} {bucket}{module_of(scope) or '_'}"


def what(value: Value) -> str:
    """``aten.mm in fwd layers.3.wo``, ``parameter layers.3.wo.weight``."""
    if value.is_input:
        return f"{_INPUTS[value.scope.space]} {dotted(value.scope.path)}"
    return f"{value.operator} in {where(value.scope)}"


def reference_to(value: Value) -> str:
    """A value as an operand: ``layers.3.wo.mm``, ``bucket norm.view/bwd``."""
    if value.is_input:
        return dotted(value.scope.path)
    module = module_of(value.scope)
    path = f"{module}.{value.name}" if module else value.name
    return ("bucket " if value.scope.is_bucket else "") + path + ("/bwd" if value.scope.space == "bwd" else "")


def about(value: Value) -> str:
    """The module whose layer a remark on the value is relative to."""
    return dotted(value.scope.path) if value.is_input else value.scope.modules[0]


@functools.lru_cache(maxsize=1 << 14)
def unit_of(scope: Scope) -> str:
    """What computes as a whole: a layer, or a module outside of layers.

    >>> unit_of(Scope("bwd", "layers[3].attention.wq")), unit_of(Scope("fwd", "norm"))
    ('layers.3/bwd', 'norm')
    """
    layer, rest = split_layer(scope.modules[0])
    unit = f"{layer.container}.{layer.number}" if layer else rest.partition(".")[0]
    return unit + ("/bwd" if scope.space == "bwd" else "")


def is_collective(value: Value) -> bool:
    """Whether it launches a collective or waits for one."""
    return value.operator.startswith(NAMESPACE)


def kind_of(value: Value) -> str | None:
    """The abbreviation of the collective that a value launches; None if it launches none."""
    return _kind(value.operator)


@functools.lru_cache(maxsize=1 << 10)
def _kind(operator: str) -> str | None:
    name = short_name(operator)
    if not operator.startswith(NAMESPACE) or name.startswith("wait_tensor"):
        return None
    return next((short for begin, short in KINDS.items() if name.startswith(begin)), name)


class Event(NamedTuple):
    """The launch of a collective, or the wait for it."""

    step: str
    collective: str

    def __str__(self) -> str:
        return f"{self.step} of {self.collective}"


def collectives_of(graph: Dataflow) -> Iterator[tuple[int, Value]]:
    """The launches and waits with their places."""
    for place, value in enumerate(graph.values):
        if value.operator.startswith(NAMESPACE):
            yield place, value


def events_of(graph: Dataflow) -> Mapping[int, Event]:
    """All launches and waits, by the places of the values; collectives of one name are counted."""
    names: dict[int, str] = {}
    events: dict[int, Event] = {}
    seen: Counter[str] = Counter()
    for place, value in collectives_of(graph):
        if (kind := kind_of(value)) is not None:
            label = f"{kind} {module_of(value.scope)}".rstrip() + ("/bwd" if value.scope.space == "bwd" else "")
            seen[label] += 1
            names[place] = label if seen[label] == 1 else f"{label}#{seen[label]}"
            events[place] = Event("launch", names[place])
        else:
            source = next((names[source] for source in value.sources if source in names), reference_to(value))
            events[place] = Event("wait", source)
    return events


def dtypes(kind: str) -> Sequence[str]:
    """The dtypes of a type.

    >>> dtypes("(bf16[2, 3][1, 2], float8_e4m3fn[4], int[5])")
    ['bf16', 'float8_e4m3fn']
    """
    return _DTYPE.findall(kind)


def without_dtypes(kind: str) -> str:
    return _DTYPE.sub("_", kind)
