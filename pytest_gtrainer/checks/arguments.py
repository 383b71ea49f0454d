"""Patterns of operators and of a call's arguments.

An operator is named ``mm``, ``aten.mm``, ``aten.add.Tensor``, ``_c10d_functional.*``, ``output``. Arguments are
``(g, _, ..., [a, b], 2.0, "avg", fsdp, dtype=bf16, t(layers.0.w))``. A bare word stands for a value that a check
has captured, a graph input, a word of graph text (``bf16``, ``contiguous_format``) or a process group's symbol,
depending on what stands there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import higher_order_operators, operator_names
from pytest_gtrainer.checks.subject import CheckError, Subject
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, spell_dtype
from pytest_gtrainer.graphtext.operators import operator_of
from pytest_gtrainer.graphtext.scopes import is_item

OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class OperatorPattern:
    """The name of an operator: its last word alone, or its path, with or without the overload."""

    text: str

    def matches(self, node: fx.Node) -> bool:
        if node.op == "output" or self.text == OUTPUT:
            return node.op == self.text
        found = operator_of(node)
        return _fits(self.text, found.text.split("."), found.short)

    def check(self, used: Sequence[fx.Node]) -> None:
        """Raises ``CheckError`` if neither the graph nor torch has such an operator."""
        if self.text == OUTPUT or any(self.matches(node) for node in used):
            return
        if not _is_known(self.text):
            last = self.text.removesuffix(".default").rpartition(".")[2]
            hint = nearest(last, {name for _, name, _ in _registered()})
            raise CheckError(f"no operator is called {self.text!r}{hint}")


def _fits(pattern: str, path: Sequence[str], name: str) -> bool:
    """Whether a pattern names an operator: one word is its name, more are the beginning of its path.

    >>> path = ["aten", "add", "Tensor"]
    >>> [_fits(text, path, "add") for text in ("add", "aten.add", "aten.add.Tensor", "aten.*", "Tensor", "aten.a")]
    [True, True, True, True, False, False]
    >>> _fits("aten.mm.default", ["aten", "mm"], "mm"), _fits("aten.add.default", path, "add")
    (True, False)
    """
    parts = pattern.split(".")
    if len(parts) == 1:
        return fnmatchcase(name, pattern)
    if len(parts) > len(path) and parts[-1] == "default":
        parts.pop()
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def _is_known(pattern: str) -> bool:
    home, _, name = pattern.rpartition(".")
    if any(_fits(pattern, path, path[1]) for path in _registered()):
        return True
    if home in ("", "operator") and hasattr(operator, name):
        return True
    if home in ("", "method") and hasattr(torch.Tensor, name):
        return True
    if home.startswith("torch"):
        return _attribute_exists(pattern)
    return any(_fits(pattern, ("hop", known), known) for known in higher_order_operators())


def _attribute_exists(path: str) -> bool:
    found: object = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part, None)
    return found is not None


def _registered() -> list[tuple[str, str, str]]:
    """Namespace, name and overload of every operator of the dispatcher."""
    found = []
    for spelled in operator_names():
        namespace, _, rest = spelled.partition("::")
        name, _, overload = rest.partition(".")
        found.append((namespace, name, overload or "default"))
    return found


@dataclass(frozen=True, slots=True)
class Any_:
    """``_``: whatever stands there."""

    def __str__(self) -> str:
        return "_"


@dataclass(frozen=True, slots=True)
class Rest:
    """``...``: any number of arguments; at the end of a call, keywords too."""

    def __str__(self) -> str:
        return "..."


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, a string, None, True or False."""

    value: object

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Device:
    """``device("cuda")``: the type only, as in graph text."""

    kind: str

    def __str__(self) -> str:
        return f'device("{self.kind}")'


@dataclass(frozen=True, slots=True)
class Name:
    """A word; ``item`` is the output that is taken of the value: ``split[1]``."""

    text: str
    item: int | None = None

    def __str__(self) -> str:
        return self.text if self.item is None else f"{self.text}[{self.item}]"


@dataclass(frozen=True, slots=True)
class List:
    """A list or a tuple."""

    items: tuple[Argument, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.items))}]"


@dataclass(frozen=True, slots=True)
class CallPattern:
    """A call: of a checked node, or of an operand that no check has captured."""

    operator: OperatorPattern
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()

    def __str__(self) -> str:
        told = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.keywords)]
        return f"{self.operator.text}({', '.join(told)})"


Argument = Any_ | Rest | Literal | Device | Name | List | CallPattern


def check_argument(pattern: Argument, subject: Subject) -> None:
    """Raises ``CheckError`` for a pattern that stands for nothing in this graph."""
    if isinstance(pattern, Name):
        symbols = {group.symbol for group in subject.groups.values()}
        whole = _input_by_index(pattern, subject)
        if pattern.text not in CONSTANTS and pattern.text not in symbols and whole is None:
            subject.check_name(pattern.text)
    elif isinstance(pattern, List):
        for item in pattern.items:
            check_argument(item, subject)
    elif isinstance(pattern, CallPattern):
        pattern.operator.check(subject.schedule)
        for item in (*pattern.arguments, *(value for _, value in pattern.keywords)):
            check_argument(item, subject)


def call_mismatch(pattern: CallPattern, node: fx.Node, subject: Subject) -> str | None:
    """Where a node's arguments differ from a call's, in words; None if they do not."""
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], list | tuple) else node.args
        return _items_mismatch(pattern.arguments, results, [False] * len(results), subject)
    groups = operator_of(node).group_arguments
    is_group = [place in groups for place in range(len(node.args))]
    found = _items_mismatch(pattern.arguments, node.args, is_group, subject)
    if found:
        return found
    wanted = dict(pattern.keywords)
    for name, value in wanted.items():
        if name not in node.kwargs:
            return f"it has no argument {name}=, expected {name}={value}"
        if found := mismatch(value, node.kwargs[name], subject, is_group=name in groups):
            return f"{name}: {found}"
    is_open = pattern.arguments and isinstance(pattern.arguments[-1], Rest)
    extra = [name for name in node.kwargs if name not in wanted]
    return f"it has {extra[0]}= too (`...` at the end would leave it open)" if extra and not is_open else None


def mismatch(pattern: Argument, value: Any, subject: Subject, *, is_group: bool = False) -> str | None:
    """How an argument differs from its pattern, in words; None if it does not."""
    if isinstance(pattern, Any_):
        return None
    if is_group and isinstance(value, str) and value in subject.groups:
        return _group_mismatch(pattern, value, subject)
    if isinstance(pattern, List):
        if not isinstance(value, list | tuple):
            return f"it is {_shown(value, subject)}, expected the list {pattern}"
        return _items_mismatch(pattern.items, value, [False] * len(value), subject)
    if isinstance(pattern, CallPattern):
        return _nested_mismatch(pattern, value, subject)
    return None if _is(pattern, value, subject) else f"it is {_shown(value, subject)}, expected {pattern}"


def _nested_mismatch(pattern: CallPattern, value: Any, subject: Subject) -> str | None:
    if not isinstance(value, fx.Node) or value not in subject.place or not pattern.operator.matches(value):
        return f"it is {_shown(value, subject)}, expected {pattern}"
    found = call_mismatch(pattern, value, subject)
    return f"in {pattern.operator.text}: {found}" if found else None


def _items_mismatch(
    patterns: Sequence[Argument], values: Sequence[Any], is_group: Sequence[bool], subject: Subject
) -> str | None:
    gaps = [place for place, pattern in enumerate(patterns) if isinstance(pattern, Rest)]
    given = len(patterns) - len(gaps)
    if len(values) < given or (len(values) > given and not gaps):
        more = " or more" if gaps else ""
        return f"there are {len(values)}, expected {given}{more}: ({', '.join(map(str, patterns))})"
    head = gaps[0] if gaps else len(patterns)
    tail = len(patterns) - head - 1 if gaps else 0
    pairs = [(place, place) for place in range(head)]
    pairs += [(len(patterns) - place, len(values) - place) for place in range(tail, 0, -1)]
    for wanted, place in pairs:
        if found := mismatch(patterns[wanted], values[place], subject, is_group=is_group[place]):
            return f"number {place + 1}: {found}"
    return None


def _group_mismatch(pattern: Argument, name: str, subject: Subject) -> str | None:
    group = subject.groups[name]
    if isinstance(pattern, List):
        ranks = [item.value if isinstance(item, Literal) else None for item in pattern.items]
        return None if ranks == list(group.ranks or ()) else f"it is {group}, expected the ranks {pattern}"
    return None if str(pattern) == group.symbol else f"it is the group {group}, expected {pattern}"


def _is(pattern: Argument, value: Any, subject: Subject) -> bool:
    if isinstance(pattern, Name):
        return _is_named(pattern, value, subject)
    if isinstance(pattern, Device):
        return isinstance(value, torch.device) and value.type == pattern.kind
    # by spelling: True is not 1, and -0.0 is not 0.0
    return isinstance(pattern, Literal) and not isinstance(value, fx.Node) and repr(value) == repr(pattern.value)


def _is_named(pattern: Name, value: Any, subject: Subject) -> bool:
    if not isinstance(value, fx.Node):
        return pattern.item is None and pattern.text in CONSTANTS and repr(value) == repr(CONSTANTS[pattern.text])
    if (whole := _input_by_index(pattern, subject)) is not None:
        return subject.is_named(value, whole)
    if pattern.item is None:
        return subject.is_named(value, pattern.text)
    return is_item(value) and value.args[1] == pattern.item and subject.is_named(value.args[0], pattern.text)


def _input_by_index(pattern: Name, subject: Subject) -> str | None:
    """``A[0]`` is the graph input without a name at position 0, unless A is a capture."""
    if pattern.item is None or pattern.text in subject.captures:
        return None
    name = f"{pattern.text}.{pattern.item}"
    return name if subject.inputs_called(name) else None


def _shown(value: Any, subject: Subject) -> str:
    if isinstance(value, fx.Node):
        return subject.name_of(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item, subject) for item in value)}]"
    return spell_dtype(value) if isinstance(value, torch.dtype) else repr(value)


def names_in(patterns: Iterable[Argument]) -> Iterable[str]:
    """The words of patterns, also of nested ones."""
    for pattern in patterns:
        if isinstance(pattern, Name):
            yield pattern.text
        elif isinstance(pattern, List):
            yield from names_in(pattern.items)
        elif isinstance(pattern, CallPattern):
            yield from names_in((*pattern.arguments, *(value for _, value in pattern.keywords)))
