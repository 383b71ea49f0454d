"""Patterns of operators (``mm``, ``aten.add.Tensor``, ``_c10d_functional.*``, ``output``) and of a
call's arguments.

Arguments are ``(g, _, ..., [a, b], 2.0, "avg", fsdp, dtype=bf16, t(layers.0.w))``. A bare word is a
captured value, a graph input, a word of graph text (``bf16``) or a process group's symbol, as the
place asks for.
"""

from __future__ import annotations

import ast
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
from pytest_gtrainer._torch.values import (
    SYMBOLIC,
    HigherOrderOperator,
    OpOverload,
    schema,
    takes_numbers,
)
from pytest_gtrainer.checks.subject import CheckError, Predicate, Subject, Unknown
from pytest_gtrainer.graph.nodes import leaves_of
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, spell_literal
from pytest_gtrainer.graphtext.operators import FUNCTIONS, function_of, operator_of, word
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
        """Raise ``CheckError`` if neither the graph nor torch has such an operator."""
        if self.text == OUTPUT or any(map(self.matches, subject.schedule)):
            return
        if not any(_fits(self.text, path, name) for path, name in _known_operators(self.text)):
            last = self.text.removesuffix(".default").rpartition(".")[2]
            words = {name.partition("::")[2].partition(".")[0] for name in operator_names()}
            raise CheckError(f"no operator is called {self.text!r}{nearest(last, words)}")
        if self.text in ("getitem", "operator.getitem") and subject.has_items:
            wrong = "the graph takes outputs by getitem, and these are no nodes of the schedule"
            raise CheckError(f"{wrong}: name an output as `split[0]`")

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        if self.matches(node):
            return None
        found = node.op if node.op == OUTPUT else operator_of(node).text
        words = f"its operator is {found}, expected {self.text}"
        if isinstance(node.target, HigherOrderOperator):
            for given in leaves_of([node.args, node.kwargs]):
                if isinstance(given, OpOverload):
                    called = function_of(given)
                    if _fits(self.text, called.text.split("."), called.short):
                        return Unknown(f"{words}, and it is given {called.text} to call")
        return words


def _fits(pattern: str, path: Sequence[str], name: str) -> bool:
    """Return whether a pattern names an operator: by its name, or by the beginning of its path."""
    parts = pattern.split(".")
    if len(parts) == 1:
        return fnmatchcase(name, pattern)
    if len(parts) > len(path) and parts[-1] == "default":
        parts.pop()
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def _known_operators(text: str) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the path and the name of each operator, function and method that a node may call.

    Of the functions below ``torch`` only the one that ``text`` names.
    """
    for registered in operator_names():
        path = registered.replace("::", ".").split(".")
        yield path, path[1]
    for name in higher_order_operators():
        yield ("hop", word(name)), name
    for spelled in FUNCTIONS:
        yield spelled.split("."), spelled.rpartition(".")[2]
    for home, owner in (("operator", operator), ("method", torch.Tensor)):
        for name in dir(owner):  # `shape` and `__class__` are nothing that a node calls
            if not name.startswith("__") and inspect.isroutine(getattr(owner, name)):
                yield (home, name), name
    if text.startswith("torch."):
        with contextlib.suppress(AttributeError):
            found = operator.attrgetter(text.partition(".")[2])(torch)
            if inspect.isroutine(found):
                called = function_of(found)  # by the name that it has in a graph
                yield called.text.split("."), called.short


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
            if isinstance(pattern, Name) and pattern.text not in (*CONSTANTS, *symbols):
                by_index = _input_by_index(pattern, subject)
                subject.check_name(by_index or pattern.text)
                if pattern.item is not None and by_index is None:
                    _check_item(pattern, subject)
            elif isinstance(pattern, str) and pattern.startswith("device("):
                _check_device(pattern)
        for pattern in _nested(self):
            if isinstance(pattern, CallPattern):
                if pattern.operator.text == OUTPUT and pattern is not self:
                    raise CheckError(f"{pattern}: nothing can use the output")
                pattern.operator.check(subject)
                _check_call(pattern, subject)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        if not self.operator.matches(node):
            return None  # told by the operator's own pattern
        found = call_mismatch(self, node, subject)
        return _at("its arguments", found) if found else None

    def names(self) -> Iterable[str]:
        return [pattern.text for pattern in _nested(self) if isinstance(pattern, Name)]


Argument = str | Name | List | CallPattern
"""A string is a constant as graph text spells it: ``2.0``, ``'avg'``, ``None``, ``device("cuda")``;
or ``ANY``.
"""


def _nested(pattern: Argument) -> Iterator[Argument]:
    """A pattern, then those inside it."""
    yield pattern
    inner: Sequence[Argument] = pattern.items if isinstance(pattern, List) else ()
    if isinstance(pattern, CallPattern):
        inner = [*pattern.arguments, *(value for _, value in pattern.keywords)]
    for item in inner:
        yield from _nested(item)


def _check_item(name: Name, subject: Subject) -> None:
    """Raise ``CheckError`` for an output that a value does not have: ``m[0]`` of an ``mm``."""
    node = subject.captures.get(name.text)
    if node is None:
        raise CheckError(f"{name}: {name.text} is a graph input, and these have no outputs")
    value = node.meta.get("val", node.meta.get("example_value"))
    results = schema(node.target).returns if isinstance(node.target, OpOverload) else None
    if isinstance(value, tuple | list):
        number = len(value)
    elif results is None or any(
        "[]" in str(each.type) or "List" in str(each.type) for each in results
    ):
        return  # a tensor that a function of Python indexes, or a list of unknown length
    else:
        number = len(results) if len(results) > 1 else 0
    if int(name.item or 0) >= number:
        has = f"{number} outputs, counted from 0" if number else "one output, and it is no tuple"
        raise CheckError(f"{name}: {operator_of(node).text} has {has}")


def _check_device(literal: str) -> None:
    """Raise ``CheckError`` for a device that torch does not know, or with a number, which no text
    has.
    """
    name = literal.removeprefix('device("').removesuffix('")')
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CheckError(f"torch has no device {name!r}") from None
    if device.index is not None:
        raise CheckError(f'{literal}: a device is compared by its type: device("{device.type}")')


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that an operator takes."""

    overload: OpOverload

    def __str__(self) -> str:
        return str(schema(self.overload))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of its schema by name."""
        return {each.name: each for each in schema(self.overload).arguments}

    def takes(self, pattern: CallPattern, subject: Subject) -> bool:
        """Return whether a call with as many arguments of such types, and these keywords, is
        possible.
        """
        known, keywords = self.arguments, dict(pattern.keywords)
        free = [
            name for name, each in known.items() if not each.kwarg_only and name not in keywords
        ]
        given = [argument for argument in pattern.arguments if argument != REST]
        if not keywords.keys() <= known.keys() or len(given) > len(free):
            return False
        if REST in pattern.arguments:  # what stands behind it has no known place
            given = given[: pattern.arguments.index(REST)]
        else:
            required = {name for name, each in known.items() if not each.has_default_value()}
            if not required <= {*free[: len(given)], *keywords}:
                return False
        asked = [*zip(free, given, strict=False), *keywords.items()]
        return all(self._may_be(known[name], value, subject) for name, value in asked)

    def _may_be(self, argument: Any, pattern: Argument, subject: Subject) -> bool:
        """Return whether an argument of this type can be such a value."""
        if pattern in (ANY, REST):
            return True
        kinds = [argument.real_type]  # `int[]?` is an optional list of integers
        while hasattr(kinds[-1], "getElementType"):
            kinds.append(kinds[-1].getElementType())
        kind = kinds[-1].kind()
        is_group = argument.name in ("group_name", "process_group")
        if isinstance(pattern, List):
            is_list = any(each.kind() == "ListType" for each in kinds)
            items = () if is_group else pattern.items
            inside = all(self._may_be(argument, item, subject) for item in items)
            return inside and (is_list or is_group or kind not in _TYPES)
        if isinstance(pattern, CallPattern):
            return kind not in _CONSTANT_KINDS and not is_group
        if isinstance(pattern, Name):
            if pattern.text in subject.captures or subject.inputs_called(pattern.text):
                return kind not in _CONSTANT_KINDS and not is_group
            if pattern.text not in CONSTANTS:  # a group, or an input by its index
                return is_group or pattern.item is not None
        if is_group:  # written by its symbol or its ranks
            return False
        value = _value_of(str(pattern))
        if value is None:
            return kind not in _TYPES or any(each.kind() == "OptionalType" for each in kinds)
        if kind == "TensorType" and takes_numbers(self.overload):
            return isinstance(value, bool | int | float | complex)
        return kind not in _TYPES or type(value) in _TYPES[kind]


_TYPES: dict[str, tuple[type, ...]] = {
    "TensorType": (),
    "IntType": (int,),
    "SymIntType": (int,),
    "FloatType": (float, int),
    "NumberType": (bool, int, float, complex),
    "BoolType": (bool,),
    "StringType": (str,),
    "ScalarTypeType": (torch.dtype,),
    "LayoutType": (torch.layout,),
    "MemoryFormatType": (torch.memory_format,),
    "DeviceObjType": (torch.device,),
}
"""What constants a schema's type takes; types that are not here take any."""
_CONSTANT_KINDS = frozenset(
    {"StringType", "ScalarTypeType", "LayoutType", "MemoryFormatType", "DeviceObjType"}
)
"""Types of which no node has a value."""


def _value_of(literal: str) -> Any:
    """Return the constant that is spelled so."""
    if literal in CONSTANTS:
        return CONSTANTS[literal]
    if literal.startswith("device("):
        return torch.device(literal.removeprefix('device("').removesuffix('")'))
    try:
        return ast.literal_eval(literal)
    except ValueError:
        return float(literal)  # -inf


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
    known = {name for each in signatures for name in each.arguments}
    is_open = not signatures  # of a higher-order operator, say, which has no signature
    # Graphs of Dynamo call functions and methods of Python, which take their arguments in other
    # ways as well.
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
    if signatures and not others and not any(each.takes(pattern, subject) for each in signatures):
        shown = " or ".join(str(each) for each in signatures[:_MOST_SIGNATURES])
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
            yield Signature(found)


def _is_overload(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload)


def call_mismatch(pattern: CallPattern, node: fx.Node, subject: Subject) -> str | None:
    """Return where a node's arguments differ from a call's, in words; None if they do not."""
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
    _add_defaults(pattern, node, values, by_name)
    group_places = frozenset(new for new, place in enumerate(in_order) if place in groups)
    if found := _items_mismatch(pattern.arguments, values, subject, group_places):
        return found
    for name, value in wanted.items():
        if name not in by_name:
            return f"it has no argument {name}=, expected {name}={value}"
        if found := _mismatch(value, by_name[name], subject, is_group=name in named_groups):
            return _at(name, found)
    extra = [name for name in node.kwargs if name not in wanted]
    if extra and pattern.arguments[-1:] != (REST,):
        return f"it has {extra[0]}= too (`...` at the end would leave it open)"
    return None


def _add_defaults(
    pattern: CallPattern, node: fx.Node, values: list[Any], by_name: dict[str, Any]
) -> None:
    """Add the defaults of arguments that a pattern asks for and a node does not give.

    ``sum(_, [0], False)`` is ``sum(x, [0])``; but ``_`` asks for an argument that the graph gives.
    """
    if not isinstance(node.target, OpOverload):
        return
    defaults = {
        each.name: each.default_value
        for each in schema(node.target).arguments[len(node.args) :]
        if each.has_default_value() and each.name not in node.kwargs
    }
    for name, asked in pattern.keywords:
        if name in defaults and asked != ANY:
            by_name[name] = defaults.pop(name)
    further = pattern.arguments[len(values) :] if REST not in pattern.arguments else ()
    for asked, value in zip(further, defaults.values(), strict=False):
        if asked == ANY:
            break
        values.append(value)


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
            return _at(f"number {place + 1}", found)
    return None


def _at(where: str, found: str) -> str:
    """Say where a difference is; one that nobody can decide stays such a one."""
    words = f"{where}: {found}"
    return Unknown(words) if isinstance(found, Unknown) else words


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
        if str(pattern) == str(list(group.ranks or ())):
            return None
        words = f"it is {group}, expected the ranks {pattern}"
        return Unknown(words) if group.ranks is None else words
    if isinstance(pattern, List):
        if not isinstance(value, list | tuple):
            return f"it is {_shown(value, subject)}, expected the list {pattern}"
        return _items_mismatch(pattern.items, value, subject)
    words = f"it is {_shown(value, subject)}, expected {pattern}"
    if not isinstance(value, fx.Node):
        # by spelling: True is not 1, and -0.0 is not 0.0
        fits = str(pattern) == spell_literal(value)
    elif isinstance(pattern, CallPattern):
        source = _whole(value)
        fits = source in subject.place and pattern.operator.matches(source)
        if fits and (found := call_mismatch(pattern, source, subject)):
            return _at(f"in {pattern.operator.text}", found)
    else:
        fits = isinstance(pattern, Name) and _is_named(pattern, value, subject)
    if fits:
        return None
    number = value.meta.get("val") if isinstance(value, fx.Node) else value
    is_number = isinstance(pattern, str) and pattern[-1:].isdecimal()
    return Unknown(words) if is_number and isinstance(number, SYMBOLIC) else words


def _whole(value: fx.Node) -> fx.Node:
    """Return the node of which a value is an output; ``split`` stands for any output of it."""
    while is_item(value):
        value = value.args[0]
    return value


def _is_named(pattern: Name, value: fx.Node, subject: Subject) -> bool:
    if (whole := _input_by_index(pattern, subject)) is not None:
        return subject.is_named(value, whole)
    if pattern.item is None:
        return subject.is_named(_whole(value), pattern.text)
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
