"""Match operators and the arguments of calls.

An operator is ``mm``, ``aten.add.Tensor``, ``_c10d_functional.*`` or ``output``. Arguments are
``(g, _, ..., [a, b], 2.0, "avg", fsdp, dtype=bf16, t(layers.0.w))``. A bare word is a captured
value, a graph input, a word of graph text (``bf16``) or the symbol of a process group, as the place
asks for.

Before a pattern is matched, it is checked against the schemas of torch: a pattern that no call of
the operator can match would make every ``never`` hold.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

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
from pytest_gtrainer.checks.subject import CheckError, Predicate, Subject, Unknown, worst_of
from pytest_gtrainer.graph.collectives import communicates_unseen
from pytest_gtrainer.graph.nodes import COMMUNICATING, leaves_of, tensors_in, value_of
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, spell_literal
from pytest_gtrainer.graphtext.operators import FUNCTIONS, Group, function_of, operator_of, word
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
        path = found.text.split(".")
        if node.op == "call_module":
            # Graph text writes `module.layers[0].up`, and `[` begins a class of characters in a
            # pattern. So a leaf is asked for as torch writes its path.
            path = ["module", *str(node.target).split(".")]
        return _fits(self.text, path, found.short)

    def names_leaf(self, subject: Subject) -> bool:
        """Return whether this is the path of a leaf, ``module.up``: it names no operator inside."""
        return "." in self.text and any(map(self.matches, subject.leaves))

    def may_run_in(self, node: fx.Node, subject: Subject) -> bool:
        """Return whether a graph, leaf or operator that ``node`` calls may be such an operator."""
        if isinstance(self.difference(node, subject), Unknown):
            return True
        if any(map(self.matches, subject.inside(node))):
            return True
        # What a leaf module computes is in no graph. Only its own name is known.
        return subject.leaf_in(node) is not None and not self.names_leaf(subject)

    def check(self, subject: Subject) -> None:
        """Raise ``CheckError`` if neither the graph nor torch has such an operator."""
        if self.text == OUTPUT or any(map(self.matches, subject.schedule)):
            return

        if not any(_fits(self.text, path, name) for path, name in _known_operators(self.text)):
            last = self.text.removesuffix(".default").rpartition(".")[2]
            words = {name.partition("::")[2].partition(".")[0] for name in operator_names()}
            raise CheckError(f"no operator is called {self.text!r}{nearest(last, words)}")

        # FX takes an output of a tuple with a node of its own, and the schedule leaves these out.
        if self.text in ("getitem", "operator.getitem") and subject.has_items:
            raise CheckError(
                "the graph takes outputs by getitem, and these are no nodes of the schedule: "
                "name an output as `split[0]`"
            )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        if self.matches(node):
            return None
        if node.op == OUTPUT:
            return f"its operator is {node.op}, expected {self.text}"

        found = operator_of(node)
        words = f"its operator is {found.text}, expected {self.text}"
        if isinstance(node.target, HigherOrderOperator):
            # ``out_dtype(aten.mm.default, ...)`` runs the operator that it is given.
            for given in leaves_of([node.args, node.kwargs]):
                if not isinstance(given, OpOverload):
                    continue
                called = function_of(given)
                if _fits(self.text, called.text.split("."), called.short):
                    return Unknown(f"{words}, and it is given {called.text} to call")

        if communicates_unseen(node) and self._asks_for_communication():
            return Unknown(f"{words}, and it communicates and is no operator: trace the graph")
        if self._may_become(node):
            return Unknown(f"{words}, which it may call: write `{found.short}` to ask for both")
        return words

    def _asks_for_communication(self) -> bool:
        for path, name in _known_operators(self.text):
            if path[0] in COMMUNICATING and _fits(self.text, path, name):
                return True
        return False

    def _may_become(self, node: fx.Node) -> bool:
        """Return whether a method or function of torch is named as the ATen operator asked for.

        Graphs of Dynamo and ``symbolic_trace`` have ``torch.relu`` and ``x.relu()``.
        """
        name = self.text.removeprefix("aten.").partition(".")[0]
        is_asked = self.text.startswith("aten.") and name.strip("*")
        if not is_asked or node.op not in ("call_function", "call_method"):
            return False
        if isinstance(node.target, OpOverload | HigherOrderOperator):
            return False

        # ``operator.add`` of two sizes calls no ATen operator. A node without a value
        # may be of both kinds.
        value = value_of(node)
        if value is not None and not tensors_in(value):
            return False
        return fnmatchcase(operator_of(node).short, name)


def _fits(pattern: str, path: Sequence[str], name: str) -> bool:
    """Return whether a pattern names an operator: by its name, or by the beginning of its path."""
    parts = pattern.split(".")
    if len(parts) == 1:
        return fnmatchcase(name, pattern)
    # Graph text leaves out the overload "default". A wildcard names it as well: ``aten.mm.*``.
    if len(parts) > len(path) and path[0] != "module" and fnmatchcase("default", parts[-1]):
        parts.pop()
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def _known_operators(text: str) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the path and the name of each operator, function and method that a node may call.

    The functions in ``torch`` are too many to walk over, so only the one that ``text`` names is
    yielded.
    """
    for registered in _registered_names(text):
        path = registered.replace("::", ".").split(".")
        yield path, path[1]

    for name in higher_order_operators():
        yield ("hop", word(name)), name
    for spelled in FUNCTIONS:
        yield spelled.split("."), spelled.rpartition(".")[2]

    for home, owner in (("operator", operator), ("method", torch.Tensor)):
        for name in dir(owner):
            # A node does not call ``shape`` or ``__class__``.
            if not name.startswith("__") and inspect.isroutine(getattr(owner, name)):
                yield (home, name), name

    if text.startswith("torch."):
        with contextlib.suppress(AttributeError):
            found = operator.attrgetter(text.partition(".")[2])(torch)
            if inspect.isroutine(found):
                # A graph may have another name for it: ``torch._C._nn.gelu``.
                called = function_of(found)
                yield called.text.split("."), called.short


def _registered_names(text: str) -> list[str]:
    """Return the operators of torch's dispatcher that contain all literal parts of a pattern.

    To compare all 3,600 names part by part takes 10 ms.
    """
    found = operator_names()
    for literal in re.split(r"\[[^\]]*\]|[.*?]", text):
        # Registered names leave out the overload "default", and a pattern may name a part of it:
        # ``mm.def*``.
        is_of_default = literal in "default"
        if not is_of_default:
            found = [name for name in found if literal in name]
    return found


ANY = "_"
"""Any one argument."""
REST = "..."
"""Any number of arguments, and at the end of a call also of keywords."""


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
        arguments = list(map(str, self.arguments))
        for name, value in self.keywords:
            arguments.append(f"{name}={value}")
        return f"{self.operator.text}({', '.join(arguments)})"

    def check(self, subject: Subject) -> None:
        """Raise ``CheckError`` for a name without a value, or a call that no schema allows."""
        words_of_text = {*CONSTANTS, *(group.symbol for group in subject.groups.values())}
        # Names first: which constants an argument may be depends on what the names are.
        for pattern in _nested(self):
            if isinstance(pattern, Name) and pattern.text not in words_of_text:
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
            return None  # the pattern of the operator reports it
        return _at("its arguments", call_mismatch(self, node, subject))

    def names(self) -> Iterable[str]:
        for pattern in _nested(self):
            if isinstance(pattern, Name):
                yield pattern.text


Argument = str | Name | List | CallPattern
"""A string is a constant as graph text spells it, ``2.0``, ``'avg'``, ``None``,
``device("cuda")``, or ``ANY`` or ``REST``.
"""


def _nested(pattern: Argument) -> Iterator[Argument]:
    """Yield a pattern, then those inside it."""
    yield pattern
    inner: list[Argument] = []
    if isinstance(pattern, List):
        inner = list(pattern.items)
    elif isinstance(pattern, CallPattern):
        inner = [*pattern.arguments, *dict(pattern.keywords).values()]
    for item in inner:
        yield from _nested(item)


def _check_item(name: Name, subject: Subject) -> None:
    """Raise ``CheckError`` for an output that a value does not have: ``m[0]`` of an ``mm``."""
    node = subject.captures.get(name.text)
    if node is None:
        raise CheckError(f"{name}: {name.text} is a graph input, and these have no outputs")

    value = value_of(node)
    if isinstance(value, tuple | list):
        count = len(value)
    elif isinstance(node.target, OpOverload):
        results = schema(node.target).returns
        if any("List" in str(result.type) for result in results):
            return  # ``split`` returns a list, of a length that the schema does not say
        # An operator with one result returns the tensor itself.
        count = len(results) if len(results) > 1 else 0
    else:
        return  # a function of Python may return anything

    if int(name.item or 0) < count:
        return
    has = f"{count} outputs, counted from 0" if count else "one output, and it is no tuple"
    raise CheckError(f"{name}: {operator_of(node).text} has {has}")


def _check_device(literal: str) -> None:
    """Raise ``CheckError`` for a device that torch does not know, or one with a number."""
    try:
        device = _constant_of(literal)
    except RuntimeError:
        name = literal.removeprefix('device("').removesuffix('")')
        raise CheckError(f"torch has no device {name!r}") from None
    if device.index is not None:
        raise CheckError(f'{literal}: a device is compared by its type: device("{device.type}")')


def _allows(overload: OpOverload, pattern: CallPattern, subject: Subject) -> bool:
    """Return whether an operator can have as many arguments of such types, and these keywords."""
    arguments = {argument.name: argument for argument in schema(overload).arguments}
    asked = dict(pattern.keywords)
    in_order, required = [], set()
    for name, argument in arguments.items():
        if not argument.kwarg_only and name not in asked:
            in_order.append(name)
        if not argument.has_default_value():
            required.add(name)

    given = [argument for argument in pattern.arguments if argument != REST]
    if not asked.keys() <= arguments.keys() or len(given) > len(in_order):
        return False
    if REST in pattern.arguments:
        # An argument after the ``...`` has no known place, so its type is not known.
        given = given[: pattern.arguments.index(REST)]
        required.clear()

    asked.update(zip(in_order, given, strict=False))
    if not required <= asked.keys():
        return False
    return all(_may_be(overload, arguments[name], value, subject) for name, value in asked.items())


def _may_be(overload: OpOverload, argument: Any, pattern: Argument, subject: Subject) -> bool:
    """Return whether an argument of a schema can be what a pattern describes."""
    if pattern in (ANY, REST):
        return True
    # ``int[]?`` is an optional list of integers: three types, one in the other. The ``real_type``
    # keeps apart what ``type`` calls int: symbols, dtypes, layouts.
    type_ = argument.real_type
    kinds = [type_.kind()]
    while hasattr(type_, "getElementType"):
        type_ = type_.getElementType()
        kinds.append(type_.kind())

    kind = kinds[-1]
    is_group = argument.name in _GROUP_NAMES
    may_be_node = kind not in _CONSTANT_KINDS and not is_group

    if isinstance(pattern, CallPattern):
        return may_be_node
    if isinstance(pattern, List):
        if is_group:  # a list of ranks
            return True
        fits = all(_may_be(overload, argument, item, subject) for item in pattern.items)
        return fits and ("ListType" in kinds or kind not in _TYPES)

    if isinstance(pattern, Name):
        if pattern.text in subject.captures or subject.inputs_called(pattern.text):
            return may_be_node
        if pattern.text not in CONSTANTS:  # a group, or an input by its index
            return is_group or pattern.item is not None

    if is_group:  # it is written by its symbol or its ranks
        return False

    value = _constant_of(str(pattern))
    if value is None:
        return kind not in _TYPES or "OptionalType" in kinds
    if kind == "TensorType" and takes_numbers(overload):
        return isinstance(value, bool | int | float | complex)
    return kind not in _TYPES or type(value) in _TYPES[kind]


_GROUP_NAMES = ("group_name", "process_group")
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
"""Types of the constants that a type of a schema takes; a type that is not here takes any."""
_CONSTANT_KINDS = frozenset(
    {"StringType", "ScalarTypeType", "LayoutType", "MemoryFormatType", "DeviceObjType"}
)
"""Types of which no node has a value."""


def _constant_of(literal: str) -> Any:
    """Return the constant that graph text spells so."""
    if literal in CONSTANTS:
        return CONSTANTS[literal]
    if literal.startswith("device("):
        return torch.device(literal.removeprefix('device("').removesuffix('")'))
    try:
        return ast.literal_eval(literal)
    except ValueError:
        return float(literal)  # -inf


def _check_call(pattern: CallPattern, subject: Subject) -> None:
    """Raise ``CheckError`` if no operator of this name takes these arguments."""
    name = pattern.operator.text
    keywords = [keyword for keyword, _ in pattern.keywords]
    for keyword in keywords:
        if keywords.count(keyword) > 1:
            raise CheckError(f"{pattern}: {keyword}= is given {keywords.count(keyword)} times")

    if name == OUTPUT:
        if keywords:
            raise CheckError(
                f"{pattern}: the output has results in their order, and no argument {keywords[0]}="
            )
        return

    overloads = list(_overloads(name))
    known: set[str] = set()
    for overload in overloads:
        known.update(argument.name for argument in schema(overload).arguments)

    # Graphs of Dynamo call functions and methods of Python, which may have other arguments than the
    # operator of the same name.
    has_functions = False
    take_any: list[bool] = []  # by function: it takes keywords of any name
    for node in subject.schedule:
        if isinstance(node.target, OpOverload) or not pattern.operator.matches(node):
            continue
        has_functions = True
        known |= node.kwargs.keys()
        # A method is a name, and a builtin function may have no signature.
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(node.target).parameters.values()
            known.update(each.name for each in parameters)
            take_any.append(any(each.kind is each.VAR_KEYWORD for each in parameters))

    # A higher-order operator, say, has neither a schema nor a signature.
    takes_any = any(take_any) if take_any else not overloads
    for keyword in keywords:
        if keyword not in known and not takes_any:
            hint = nearest(keyword, known) or f": it has {', '.join(sorted(known))}"
            raise CheckError(f"{pattern}: {name} has no argument {keyword}={hint}")

    if not overloads or has_functions or any(_allows(o, pattern, subject) for o in overloads):
        return
    shown = list(map(str, map(schema, overloads)))
    if len(shown) > _MOST_SCHEMAS:  # ``add`` has dozens of overloads
        shown[_MOST_SCHEMAS:] = [f"{len(shown) - _MOST_SCHEMAS} more"]
    raise CheckError(
        f"{pattern}: no node can have these arguments, because the operator is "
        f"{' or '.join(shown)}; "
        "write `_` for an argument, or `...` at the end for all that follow"
    )


_MOST_SCHEMAS = 3


def _overloads(text: str) -> Iterator[OpOverload]:
    """Yield the operators of torch's dispatcher that a pattern names."""
    for registered in sorted(_registered_names(text)):
        space, _, rest = registered.partition("::")
        name, _, overload = rest.partition(".")
        path = [space, name, overload] if overload else [space, name]
        if _fits(text, path, name):
            found = operator_overload(space, name, overload)
            if found is not None:
                yield found


class Slot(NamedTuple):
    """One argument of a node, and what decides how its pattern is compared."""

    value: Any
    name: str = ""  # by the schema, or as a keyword; "" if neither says one
    rank: int | None = None  # extents of the operand, which a negative dimension counts back from
    default: Any = inspect.Parameter.empty
    is_given: bool = True  # else the value is the default


_ADDS_DIMENSION = ("unsqueeze", "stack", "diag_embed")
"""Operators whose dimension counts those of the result, one more than those of the operand."""


def _slots_of(node: fx.Node) -> tuple[list[Slot], dict[str, Slot]]:
    """Return a node's arguments that have a place, in order, and all that have a name.

    Those of an operator with a schema include the ones that are not given, with their defaults.
    """
    rank = None
    if node.all_input_nodes:
        value = value_of(node.all_input_nodes[0])
        if isinstance(value, torch.Tensor):
            rank = max(value.ndim, 1)  # a scalar takes the dimensions 0 and -1, as a vector does
            if operator_of(node).short.startswith(_ADDS_DIMENSION):
                rank += 1

    in_order: list[Slot] = []
    by_name: dict[str, Slot] = {}
    if not isinstance(node.target, OpOverload):
        # A function of Python may have any signature, so nothing is known of what is not given.
        in_order += map(Slot, node.args)
        for name, value in node.kwargs.items():
            by_name[name] = Slot(value, name, rank)
        return in_order, by_name

    for place, argument in enumerate(schema(node.target).arguments):
        name, default = argument.name, inspect.Parameter.empty
        if argument.has_default_value():
            default = argument.default_value
        if place < len(node.args):
            slot = Slot(node.args[place], name, rank, default)
        elif name in node.kwargs:
            slot = Slot(node.kwargs[name], name, rank, default)
        else:
            slot = Slot(default, name, rank, default, is_given=False)
        by_name[name] = slot
        if not argument.kwarg_only:
            in_order.append(slot)

    return in_order, by_name


def call_mismatch(pattern: CallPattern, node: fx.Node, subject: Subject) -> str | None:
    """Return where a node's arguments differ from a call's, in words; None if they do not."""
    if node.op == "output":
        return _results_mismatch(pattern.arguments, node.args[0], subject)
    return worst_of(_call_mismatches(pattern, node, subject))


def _call_mismatches(pattern: CallPattern, node: fx.Node, subject: Subject) -> Iterator[str | None]:
    """Yield where arguments of a node differ: those in order, then keywords, then too many."""
    wanted = dict(pattern.keywords)
    in_order, by_name = _slots_of(node)
    asked_in_order = [slot for slot in in_order if slot.name not in wanted]
    slots = _slots_for(pattern.arguments, asked_in_order, subject)
    yield _items_mismatch(pattern.arguments, slots, subject)

    for name, value in wanted.items():
        # ``_`` asks for an argument that the graph gives.
        if name not in by_name or (value == ANY and not by_name[name].is_given):
            yield f"it has no argument {name}=, expected {name}={value}"
        else:
            yield _at(name, _mismatch(value, by_name[name], subject))

    if pattern.arguments[-1:] != (REST,):
        known = {*wanted, *(slot.name for slot in in_order)}
        for name in node.kwargs:
            if name not in known and not _is_default(by_name[name], subject):
                yield f"it has {name}= too (`...` at the end would leave it open)"


def _slots_for(
    patterns: Sequence[Argument], slots: Sequence[Slot], subject: Subject
) -> Sequence[Slot]:
    """Return the given arguments, with or without the defaults after them, as a pattern asks.

    ``sum(_, [0], False)`` is ``sum(x, [0])``, and the other way round.
    """
    end = 0
    for place, slot in enumerate(slots):
        if slot.is_given:
            end = place + 1

    # Tracers differ: make_fx drops an argument that has its default, Dynamo keeps what was written.
    if REST not in patterns:
        while end > len(patterns) and _is_default(slots[end - 1], subject):
            end -= 1
    if REST not in patterns[:-1]:
        for asked in patterns[end:]:
            if asked in (ANY, REST) or end == len(slots):
                break
            end += 1
    return slots[:end]


def _is_default(slot: Slot, subject: Subject) -> bool:
    """Return whether an argument has its default, whether the graph gives it or not."""
    if not slot.is_given or _is_same_number(slot.value, slot.default):
        return True
    return _spell_argument(slot.value, subject) == _spell_argument(slot.default, subject)


def _results_mismatch(patterns: Sequence[Argument], results: Any, subject: Subject) -> str | None:
    """Return where results differ: ``(a, b)``, or as one list, ``([a, b])``, as Python has them.

    A pattern without lists stands for all results in order, as graph text shows them.
    """
    values: Sequence[Any] = leaves_of(results)
    if any(isinstance(pattern, List) for pattern in patterns):
        if isinstance(results, Mapping):
            values = list(results.values())
        elif isinstance(results, list | tuple):
            values = results
        else:
            values = [results]

    found = _items_mismatch(patterns, list(map(Slot, values)), subject)
    if found and len(patterns) == 1 and isinstance(patterns[0], List):
        return _results_mismatch(patterns[0].items, results, subject)
    return found


def _items_mismatch(
    patterns: Sequence[Argument], slots: Sequence[Slot], subject: Subject
) -> str | None:
    """Return where the items of a list differ, in words; None if they do not."""
    shown = ", ".join(map(str, patterns))
    if REST in patterns:
        expected = len(patterns) - 1
        if len(slots) < expected:
            return f"there are {len(slots)}, expected {expected} or more: ({shown})"
        gap = patterns.index(REST)
        skipped = [ANY] * (len(slots) - expected)
        patterns = [*patterns[:gap], *skipped, *patterns[gap + 1 :]]
    elif len(slots) != len(patterns):
        return f"there are {len(slots)}, expected {len(patterns)}: ({shown})"

    # All of them: an item that certainly differs decides, even after one that may differ.
    differences: list[str | None] = []
    for pattern, slot in zip(patterns, slots, strict=True):
        number = len(differences) + 1
        differences.append(_at(f"number {number}", _mismatch(pattern, slot, subject)))
    return worst_of(differences)


def _at(where: str, difference: str | None) -> str | None:
    """Return a difference with its place before it; one that nobody can decide stays such a one."""
    if not difference:
        return None
    return type(difference)(f"{where}: {difference}")


def _mismatch(pattern: Argument, slot: Slot, subject: Subject) -> str | None:
    """Return how an argument differs from its pattern, in words; None if it does not."""
    value = slot.value
    if pattern == ANY:
        return None
    if slot.name in _GROUP_NAMES and isinstance(value, str) and value in subject.groups:
        return _group_mismatch(pattern, subject.groups[value])

    is_number = isinstance(pattern, str) and pattern[-1:].isdecimal()
    # A list of one number may be given as that number.
    if is_number and isinstance(value, list | tuple) and len(value) == 1:
        return _mismatch(pattern, slot._replace(value=value[0]), subject)
    if isinstance(pattern, List):
        return _list_mismatch(pattern, slot, subject)

    words = f"it is {_spell_argument(value, subject)}, expected {pattern}"
    if isinstance(value, fx.Node):
        if isinstance(pattern, CallPattern):
            return _operand_mismatch(pattern, _whole(value), words, subject)
        if isinstance(pattern, Name) and _is_named(pattern, value, subject):
            return None
        value = value.meta.get("val")
    else:
        fits = _is_constant(pattern, slot)
        if fits:
            return None
        if fits is None:
            return Unknown(f"{words}, and nobody knows how many dimensions it counts")

    # Whether a symbol is this number is decided at run time.
    if is_number and isinstance(value, SYMBOLIC):
        return Unknown(words)
    return words


def _list_mismatch(pattern: List, slot: Slot, subject: Subject) -> str | None:
    """Return how an argument differs from a list. A number is a list of one: ``sum(x, 0)``."""
    value = slot.value
    if type(value) is int:
        value = [value]
    if not isinstance(value, list | tuple):
        return f"it is {_spell_argument(value, subject)}, expected the list {pattern}"
    items = [slot._replace(value=item) for item in value]
    return _items_mismatch(pattern.items, items, subject)


def _operand_mismatch(
    pattern: CallPattern, node: fx.Node, words: str, subject: Subject
) -> str | None:
    """Return how the node that computes an operand differs from a call; ``words`` name both."""
    if node not in subject.place:
        return words
    if pattern.operator.matches(node):
        return _at(f"in {pattern.operator.text}", call_mismatch(pattern, node, subject))
    if pattern.operator.may_run_in(node, subject):
        return Unknown(words)
    return words


def _group_mismatch(pattern: Argument, group: Group) -> str | None:
    """Return how a process group differs from a symbol or a list of ranks, in words."""
    if not isinstance(pattern, List):
        if str(pattern) == group.symbol:
            return None
        return f"it is the group {group}, expected {pattern}"
    if str(pattern) == str(list(group.ranks or ())):
        return None
    words = f"it is {group}, expected the ranks {pattern}"
    # A graph that was read from a file may not say the ranks.
    return Unknown(words) if group.ranks is None else words


def _is_constant(pattern: Argument, slot: Slot) -> bool | None:
    """Return whether an argument is a constant; None if the rank of its operand would decide it."""
    if str(pattern) == spell_literal(slot.value):
        return True
    if not isinstance(pattern, str):
        return False
    wanted, found = _constant_of(pattern), slot.value
    is_dimension = "dim" in slot.name and type(wanted) is int and type(found) is int
    # ``-1`` is the dimension 2 of three.
    if is_dimension and (wanted < 0) != (found < 0):
        return None if slot.rank is None else abs(wanted - found) == slot.rank
    return _is_same_number(wanted, found)


def _is_same_number(one: object, other: object) -> bool:
    """Return whether two numbers are equal, as 2 and 2.0 are.

    True is not 1, and 0.0 not -0.0: an operator gives other results for them.
    """
    if type(one) not in (int, float) or type(other) not in (int, float):
        return False
    return one == other and str(one).startswith("-") == str(other).startswith("-")


def _whole(value: fx.Node) -> fx.Node:
    """Return the node that a value is an output of, as ``split`` stands for any of its outputs."""
    while is_item(value):
        value = value.args[0]
    return value


def _is_named(pattern: Name, value: fx.Node, subject: Subject) -> bool:
    """Return whether a name, or an output of what it names, stands for this node."""
    by_index = _input_by_index(pattern, subject)
    if by_index is not None:
        return subject.is_named(value, by_index)
    if pattern.item is None:
        return subject.is_named(_whole(value), pattern.text)
    is_this_item = is_item(value) and value.args[1] == pattern.item
    return is_this_item and subject.is_named(value.args[0], pattern.text)


def _input_by_index(pattern: Name, subject: Subject) -> str | None:
    """Return the name of ``A[0]``, the graph input without a name at position 0; None for others.

    A capture may be called A, too: then ``A[0]`` is its first output.
    """
    if pattern.item is None or pattern.text in subject.captures:
        return None
    name = f"{pattern.text}.{pattern.item}"
    return name if subject.inputs_called(name) else None


def _spell_argument(value: Any, subject: Subject) -> str:
    """Return an argument as a message shows it."""
    if isinstance(value, fx.Node):
        return subject.name_of(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_spell_argument(item, subject) for item in value)}]"
    return spell_literal(value) or repr(value)
