"""Sentences about a difference: names of values, and one sentence for all layers where it holds.

A *remark* is *about* a module, here ``layers.4``: ``wait of AG layers.4 moved behind the compute of
layers.3``. Remarks that say the same of their layers become one: ``wait of AG layers[1..31] moved
behind the compute of layers[i-1]``. The name of a value of the backward ends in ``/bwd``. A
collective is named by its kind and its bucket or module.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from pytest_gtrainer.graphtext.dataflow import Dataflow, Value
from pytest_gtrainer.graphtext.equivalence import bare_name
from pytest_gtrainer.graphtext.sections import NEAR, Scope, split_layer

WIDTH = 160
_MOST_RANGES = 6
# If more remarks than this have one gist, the one on most layers stands for all.
_ALIKE = 3

Weight = IntEnum(
    "Weight",
    "VERDICT WHOLE EFFECT BUCKET GROUP COLLECTIVE OPERATOR DTYPE BOUNDARY ARGUMENT OPERAND MODULE "
    "MOVE REST",
    start=0,
)
"""The order of sentences: the weightiest comes first."""


class Remark(NamedTuple):
    """A sentence."""

    weight: Weight
    text: str
    about: str = ""  # the module whose layer the sentence is relative to
    gist: str = ""  # equal for remarks of which one is enough


def sentences(remarks: Iterable[Remark], limit: int = 12) -> list[str]:
    """Return at most ``limit`` sentences, the weightiest first.

    Of many remarks with one gist, the remark on most layers stands for all.
    """
    # Remarks that say the same of their layers, with the numbers of these; -1 for no layer.
    numbers: dict[Remark, list[int]] = defaultdict(list)
    for remark in remarks:
        layer, _ = split_layer(remark.about)
        if layer is None:
            numbers[remark].append(-1)
        else:
            text = _relative(remark.text, layer.container, layer.number)
            numbers[remark._replace(text=text, about=layer.container)].append(layer.number)

    groups: dict[tuple[Weight, str], list[tuple[Remark, int]]] = defaultdict(list)
    for place, (remark, layers) in enumerate(numbers.items()):
        groups[remark.weight, remark.gist or f"\0{place}"].append(
            (_spelled(remark, layers), len(layers))
        )

    said: list[tuple[Remark, int]] = []
    for members in groups.values():
        if len(members) <= _ALIKE:
            said += members
            continue
        first = max(members, key=lambda pair: pair[1])[0]
        more = f" (and {len(members) - 1} more like this)"
        text = cut(first.text, WIDTH - len(more)) + more
        said.append((first._replace(text=text), sum(count for _, count in members)))

    # Of one weight, a remark on more layers comes first.
    said.sort(key=lambda pair: (pair[0].weight, -pair[1]))
    texts = [cut(remark.text) for remark, _ in said]
    if (left := len(texts) - limit) > 0:
        texts[limit - 1 :] = [f"… and {left + 1} more such differences"]
    return texts


def cut(line: str, width: int = WIDTH) -> str:
    """Cut a line to a width that fits a terminal."""
    if len(line) <= width:
        return line
    return line[: width - 1] + "…"


def same_start(old: Sequence[str], new: Sequence[str]) -> int:
    """Return the length of the common prefix of two sequences of strings, or of two strings."""
    for place, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            return place
    return min(len(old), len(new))


def _relative(text: str, container: str, number: int) -> str:
    """Replace layers near ``number`` by their distance, ``layers.<+1>``."""

    def distance(found: re.Match[str]) -> str:
        away = int(found[1]) - number
        if abs(away) > NEAR:
            return found[0]
        return f"{container}.<{away:+d}>"

    return re.sub(rf"(?<![\w.]){re.escape(container)}\.(\d+)(?!\w)", distance, text)


def _spelled(remark: Remark, numbers: Sequence[int]) -> Remark:
    """Return a remark with its layers: one by its name, several as ranges."""
    several = sorted(set(numbers))
    spans = ranges(several)
    if len(spans) > _MOST_RANGES:
        spans = [*spans[: _MOST_RANGES - 1], f"… {spans[-1]}"]

    def spell(found: re.Match[str]) -> str:
        away = int(found[1])
        if len(several) == 1:
            return f".{several[0] + away}"
        if away == 0:
            return f"[{', '.join(spans)}]"
        return f"[i{away:+d}]"

    return remark._replace(text=re.sub(r"\.<([+-]\d+)>", spell, remark.text))


def ranges(numbers: Sequence[int]) -> list[str]:
    """Spell rising numbers, runs of three and more as ``1..31``."""
    spelled: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [str(number) for _, number in run]
        if len(members) > 2:
            members = [f"{members[0]}..{members[-1]}"]
        spelled += members
    return spelled


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

_NAMESPACE = "_c10d_functional"  # what operators of collectives begin with
_INPUTS = {"P": "parameter", "B": "buffer", "I": "input", "A": "argument"}


def module_of(scope: Scope) -> str:
    """Return the module of a scope; of a bucket its modules in short."""
    modules = scope.owners
    if len(modules) > 2:
        return f"{modules[0]}+{len(modules) - 1} more"
    return "+".join(modules)


def where(scope: Scope) -> str:
    """Return the module with its direction: ``fwd layers.3.wo``."""
    return f"{scope.space} {'bucket ' if scope.is_bucket else ''}{module_of(scope) or '_'}"


def what(value: Value) -> str:
    """Return ``aten.mm in fwd layers.3.wo`` or ``parameter layers.3.wo.weight``."""
    if value.is_input:
        return f"{_INPUTS[value.scope.space]} {value.scope.owners[0]}"
    return f"{value.operator} in {where(value.scope)}"


def reference_to(value: Value) -> str:
    """Return a value as an operand: ``layers.3.wo.mm``, ``bucket norm.view/bwd``."""
    if value.is_input:
        return value.scope.owners[0]
    path = ".".join(filter(None, (module_of(value.scope), value.name)))
    bucket = "bucket " if value.scope.is_bucket else ""
    return f"{bucket}{path}{_direction(value.scope)}"


def _direction(scope: Scope) -> str:
    """Return ``/bwd`` in the backward, else nothing."""
    return "/bwd" if scope.space == "bwd" else ""


def about(value: Value) -> str:
    """Return the module whose layer a remark on the value is relative to."""
    return value.scope.owners[0]


def unit(path: str) -> str:
    """Return the layer of a path, or its first module outside of layers."""
    layer, rest = split_layer(path)
    if layer:
        return f"{layer.container}.{layer.number}"
    return rest.partition(".")[0]


def unit_of(scope: Scope) -> str:
    """Return the unit of a scope with its direction."""
    return unit(scope.owners[0]) + _direction(scope)


def communicates(value: Value) -> bool:
    """Return whether a value launches a collective or waits for one."""
    return value.operator.startswith(_NAMESPACE)


def kind_of(value: Value) -> str | None:
    """Return the abbreviation of the collective that a value launches; None if it launches none."""
    name = bare_name(value.operator)
    if not communicates(value) or name.startswith("wait_tensor"):
        return None
    for prefix, short in KINDS.items():
        # Operators have suffixes, ``all_gather_into_tensor_coalesced``.
        if name.startswith(prefix):
            return short
    return name


class CollectiveEvent(NamedTuple):
    """The launch of a collective, or the wait for it."""

    step: str
    collective: str

    def __str__(self) -> str:
        return f"{self.step} of {self.collective}"


def events_of(graph: Dataflow) -> Mapping[int, CollectiveEvent]:
    """Return launches and waits by the places of values; equal names get numbers, ``AG norm#2``."""
    names: dict[int, str] = {}
    events: dict[int, CollectiveEvent] = {}
    seen: Counter[str] = Counter()
    for place, value in enumerate(graph.values):
        if (kind := kind_of(value)) is not None:
            label = f"{kind} {module_of(value.scope)}".rstrip() + _direction(value.scope)
            seen[label] += 1
            if seen[label] > 1:
                label += f"#{seen[label]}"
            names[place] = label
            events[place] = CollectiveEvent("launch", label)
        elif communicates(value):
            # A wait whose launch is not directly above has a name of its own.
            launched = [names[source] for source in value.sources if source in names]
            events[place] = CollectiveEvent("wait", [*launched, reference_to(value)][0])

    return events
