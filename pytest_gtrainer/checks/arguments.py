"""Patterns of operators (``mm``, ``aten.add.Tensor``, ``_c10d_functional.*``, ``output``) and of a call's arguments.

Arguments are ``(g, _, ..., [a, b], 2.0, "avg", fsdp, dtype=bf16, t(layers.0.w))``. A bare word is a captured value, a
graph input, a word of graph text (``bf16``) or a process group's symbol, as the place asks for.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import (
    higher_order_operators,
    operator_names,
    operator_overload,
)
from pytest_gtrainer._torch.values import OpOverload, schema
from pytest_gtrainer.checks.subject import CheckError, Predicate, Subject
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, spell_literal
from pytest_gtrainer.graphtext.operators import operator_of
from pytest_gtrainer.graphtext.scopes import is_item

OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class OperatorPattern(Predicate):
    """The name of an operator: its last word alone, or its path, with or without the overload."""

    text: str

    def matches(self, node: fx.Node) -> bool:
        if node.op == "output" or self.text == OUTPUT:
            return node.op == self.text
        found = operator_of(node)
        return _fits(self.text, found.text.split("."), found.short)

    def check(self, subject: Subject) -> None:
        """Raises ``CheckError`` if neither the graph nor torch has such an operator."""
        if self.text == OUTPUT or any(map(self.matches, subject.schedule)):
            return
        registered = [name.replace("::", ".").split(".") for name in operator_names()]
        if _is_known(self.text, registered):
            return
        last = self.text.removesuffix(".default").rpartition(".")[2]
        raise CheckError(
            f"no operator is called {self.text!r}{nearest(last, {path[1] for path in registered})}"
        )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        if self.matches(node):
            return None
        found = node.op if node.op == OUTPUT else operator_of(node).text
        return f"its operator is {found}, expected {self.text}"


def _fits(pattern: str, path: Sequence[str], name: str) -> bool:
    """Whether a pattern names an operator: one word is its name, more are the beginning of its path."""
    parts = pattern.split(".")
    if len(parts) == 1:
        return fnmatchcase(name, pattern)
    if len(parts) > len(path) and parts[-1] == "default":
        parts.pop()
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def _is_known(pattern: str, registered: Iterable[Sequence[str]]) -> bool:
    """Whether there is such an operator: of the dispatcher, of Python, a method, a function, or of higher order."""
    home, _, name = pattern.rpartition(".")
    owners = {"": (operator, torch.Tensor), "operator": (operator,), "method": (torch.Tensor,)}
    if any(_fits(pattern, path, path[1]) for path in registered):
        return True
    if any(hasattr(owner, name) for owner in owners.get(home, ())):
        return True
    if home.startswith("torch"):
        with contextlib.suppress(AttributeError):
            return operator.attrgetter(pattern.partition(".")[2])(torch) is not None
        return False
    return any(_fits(pattern, ("hop", known), known) for known in higher_order_operators())


ANY, REST = (
    "_",
    "...",
)  # whatever stands there; any number of arguments, and at the end of a call keywords, too


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
class CallPattern(Predicate):
    """A call: of a checked node, or of an operand that no check has captured."""

    operator: OperatorPattern
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()

    def __str__(self) -> str:
        told = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.keywords)]
        return f"{self.operator.text}({', '.join(told)})"

    def check(self, subject: Subject) -> None:
        symbols = {group.symbol for group in subject.groups.values()}
        for pattern in _nested(self):
            if isinstance(pattern, CallPattern):
                pattern.operator.check(subject)
                _check_call(pattern, subject)
            elif isinstance(pattern, Name) and pattern.text not in (*CONSTANTS, *symbols):
                subject.check_name(_input_by_index(pattern, subject) or pattern.text)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        if not self.operator.matches(node):
            return None  # told by the operator's own pattern
        found = call_mismatch(self, node, subject)
        return f"its arguments: {found}" if found else None

    def names(self) -> Iterable[str]:
        return [pattern.text for pattern in _nested(self) if isinstance(pattern, Name)]


Argument = str | Name | List | CallPattern
"""A string is a constant as graph text spells it: ``2.0``, ``'avg'``, ``None``, ``device("cuda")``; or ``ANY``."""


def _nested(pattern: Argument) -> Iterator[Argument]:
    """A pattern, then those inside it."""
    yield pattern
    inner: Sequence[Argument] = pattern.items if isinstance(pattern, List) else ()
    if isinstance(pattern, CallPattern):
        inner = [*pattern.arguments, *(value for _, value in pattern.keywords)]
    for item in inner:
        yield from _nested(item)


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that an operator takes."""

    text: str
    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]

    @classmethod
    def of(cls, overload: OpOverload) -> Signature:
        """Read it from the schema of an operator of the dispatcher."""
        arguments = schema(overload).arguments
        positional = tuple(each.name for each in arguments if not each.kwarg_only)
        keyword_only = tuple(each.name for each in arguments if each.kwarg_only)
        required = frozenset(each.name for each in arguments if not each.has_default_value())
        shown = [*positional, *(f"{name}=" for name in keyword_only)]
        return cls(f"{overload}({', '.join(shown)})", positional, keyword_only, required)

    @property
    def names(self) -> tuple[str, ...]:
        """Arguments that may be given by name."""
        return (*self.positional, *self.keyword_only)

    def takes(self, pattern: CallPattern) -> bool:
        """Whether a call with as many arguments, and these keywords, is possible."""
        keywords = {name for name, _ in pattern.keywords}
        free = [name for name in self.positional if name not in keywords]
        given = len(pattern.arguments) - (REST in pattern.arguments)
        if not keywords <= set(self.names) or given > len(free):
            return False
        return REST in pattern.arguments or self.required <= {*free[:given], *keywords}


def _check_call(pattern: CallPattern, subject: Subject) -> None:
    """Raise a CheckError if no operator of this name takes these arguments: then no node can match."""
    keywords = [name for name, _ in pattern.keywords]
    for name in keywords:
        if keywords.count(name) > 1:
            raise CheckError(f"{pattern}: {name}= is given {keywords.count(name)} times")
    if pattern.operator.text == OUTPUT:
        if keywords:
            raise CheckError(
                f"{pattern}: the output has results in their order, and no argument {keywords[0]}="
            )
        return
    signatures = list(_signatures(pattern.operator.text))
    known = {name for each in signatures for name in each.names}
    is_open = not signatures  # of a higher-order operator, say, which has no signature
    # Graphs of Dynamo call functions and methods of Python, which take their arguments in other ways as well.
    others = [
        node
        for node in subject.schedule
        if pattern.operator.matches(node) and not _is_overload(node)
    ]
    for node in others:
        known |= node.kwargs.keys()
        with contextlib.suppress(TypeError, ValueError):  # a method's name, a builtin function
            parameters = inspect.signature(node.target).parameters.values()
            known |= {each.name for each in parameters}
            is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    unknown = [name for name in keywords if name not in known]
    if unknown and not is_open:
        hint = nearest(unknown[0], known) or f": it has {', '.join(sorted(known))}"
        raise CheckError(f"{pattern}: {pattern.operator.text} has no argument {unknown[0]}={hint}")
    if signatures and not others and not any(each.takes(pattern) for each in signatures):
        shown = " or ".join(each.text for each in signatures[:_MOST_SIGNATURES])
        more = (
            f" or {len(signatures) - _MOST_SIGNATURES} more"
            if len(signatures) > _MOST_SIGNATURES
            else ""
        )
        raise CheckError(
            f"{pattern}: no node can have these arguments, because the operator is {shown}{more}; "
            "write `_` for an argument, or `...` at the end for all that follow"
        )


_MOST_SIGNATURES = 3


def _signatures(text: str) -> Iterator[Signature]:
    """Yield the signatures of the operators of the dispatcher that a pattern names."""
    # Only a part of 3,600 names is worth a closer look.
    literal = max(re.split(r"[.*?\[\]]", text.removesuffix(".default")), key=len)
    for registered in sorted(operator_names()):
        if literal not in registered:
            continue
        space, _, name = registered.partition("::")
        word, _, overload = name.partition(".")
        path = [space, word, overload] if overload else [space, word]
        if (
            _fits(text, path, word)
            and (found := operator_overload(space, word, overload)) is not None
        ):
            yield Signature.of(found)


def _is_overload(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload)


def call_mismatch(pattern: CallPattern, node: fx.Node, subject: Subject) -> str | None:
    """Where a node's arguments differ from a call's, in words; None if they do not."""
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], list | tuple) else node.args
        return _items_mismatch(pattern.arguments, results, subject)
    groups = operator_of(node).group_arguments
    wanted = dict(pattern.keywords)
    by_name, in_order = dict(node.kwargs), list(range(len(node.args)))
    named_groups = {name for name in groups if isinstance(name, str)}
    if isinstance(node.target, OpOverload):  # an argument in its place may be asked for by its name
        for place, argument in enumerate(schema(node.target).arguments[: len(node.args)]):
            if argument.name in wanted:
                by_name[argument.name] = node.args[place]
                in_order.remove(place)
                if place in groups:
                    named_groups.add(argument.name)
    values = [node.args[place] for place in in_order]
    group_places = frozenset(new for new, place in enumerate(in_order) if place in groups)
    if found := _items_mismatch(pattern.arguments, values, subject, group_places):
        return found
    for name, value in wanted.items():
        if name not in by_name:
            return f"it has no argument {name}=, expected {name}={value}"
        if found := _mismatch(value, by_name[name], subject, is_group=name in named_groups):
            return f"{name}: {found}"
    extra = [name for name in node.kwargs if name not in wanted]
    if extra and pattern.arguments[-1:] != (REST,):
        return f"it has {extra[0]}= too (`...` at the end would leave it open)"
    return None


def _items_mismatch(
    patterns: Sequence[Argument],
    values: Sequence[Any],
    subject: Subject,
    groups: frozenset[int | str] = frozenset(),
) -> str | None:
    """How a list differs; ``groups`` are the places in it that name a process group."""
    expected = len(patterns) - (REST in patterns)
    if len(values) < expected or (len(values) > expected and REST not in patterns):
        more = " or more" if REST in patterns else ""
        return (
            f"there are {len(values)}, expected {expected}{more}: ({', '.join(map(str, patterns))})"
        )
    gap = patterns.index(REST) if REST in patterns else len(patterns)
    spread = [*patterns[:gap], *[ANY] * (len(values) - expected), *patterns[gap + 1 :]]
    for place, (pattern, value) in enumerate(zip(spread, values, strict=True)):
        if found := _mismatch(pattern, value, subject, is_group=place in groups):
            return f"number {place + 1}: {found}"
    return None


def _mismatch(
    pattern: Argument, value: Any, subject: Subject, *, is_group: bool = False
) -> str | None:
    """How an argument differs from its pattern, in words; None if it does not."""
    if pattern == ANY:
        return None
    if is_group and isinstance(value, str) and (group := subject.groups.get(value)):
        if not isinstance(pattern, List):
            return (
                None
                if str(pattern) == group.symbol
                else f"it is the group {group}, expected {pattern}"
            )
        ranks = list(group.ranks or ())
        return (
            None if str(pattern) == str(ranks) else f"it is {group}, expected the ranks {pattern}"
        )
    if isinstance(pattern, List):
        if not isinstance(value, list | tuple):
            return f"it is {_shown(value, subject)}, expected the list {pattern}"
        return _items_mismatch(pattern.items, value, subject)
    if not isinstance(value, fx.Node):
        fits = str(pattern) == spell_literal(
            value
        )  # by spelling: True is not 1, and -0.0 is not 0.0
    elif isinstance(pattern, CallPattern):
        fits = value in subject.place and pattern.operator.matches(value)
        if fits and (found := call_mismatch(pattern, value, subject)):
            return f"in {pattern.operator.text}: {found}"
    else:
        fits = isinstance(pattern, Name) and _is_named(pattern, value, subject)
    return None if fits else f"it is {_shown(value, subject)}, expected {pattern}"


def _is_named(pattern: Name, value: fx.Node, subject: Subject) -> bool:
    if (whole := _input_by_index(pattern, subject)) is not None:
        return subject.is_named(value, whole)
    if pattern.item is None:
        return subject.is_named(value, pattern.text)
    return (
        is_item(value)
        and value.args[1] == pattern.item
        and subject.is_named(value.args[0], pattern.text)
    )


def _input_by_index(pattern: Name, subject: Subject) -> str | None:
    """``A[0]`` is the graph input without a name at position 0, unless A is a capture."""
    name = f"{pattern.text}.{pattern.item}"
    is_input = (
        pattern.item is not None
        and pattern.text not in subject.captures
        and subject.inputs_called(name)
    )
    return name if is_input else None


def _shown(value: Any, subject: Subject) -> str:
    if isinstance(value, fx.Node):
        return subject.name_of(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item, subject) for item in value)}]"
    return spell_literal(value) or repr(value)
