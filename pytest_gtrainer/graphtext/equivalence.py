"""When two schedules compute the same: digests without regard to order, and effects, for which order counts.

The *digest* of a value says its operator, type, literals and the digests of its operands, never its name, place, module
or tags. That of a graph is made of all of them without order: equal ones mean the same computation.

*Effects* are what order decides beyond that: random numbers have to be drawn in the same order, and each reader of a
value that is changed in place has to stand on the same side of the change. The *storage* of a value is that of its
first operand, for a view or a change in place, else its own.
"""

import ast
import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import Any, NamedTuple

from pytest_gtrainer.graphtext.dataflow import HOLE, SYMBOL, Dataflow, Operand, Value, dataflow

_PRIME = 2**61 - 1
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}


def canonical(text: str, meanings: Sequence[str]) -> str:
    """``text`` with meanings for symbols, in any order of terms alike: evaluated modulo a prime (Schwartz, Zippel)."""
    tree = _parsed(text)
    return "\n".join([text, *meanings]) if tree is None else str(_number(tree, meanings))


def _parsed(text: str) -> ast.expr | None:
    """The syntax tree, symbols numbered in the order in which they stand."""
    places = itertools.count()
    numbered = re.sub(SYMBOL, lambda _: f"_symbol{next(places)}", text.replace(HOLE, "_hole"))
    try:
        return ast.parse(f"_({numbered})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _number(node: ast.AST, meanings: Sequence[str]) -> int:
    """The value of a size; of anything else its hash."""
    if isinstance(node, ast.Name) and node.id.startswith("_symbol"):
        return hash(meanings[int(node.id.removeprefix("_symbol"))])
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    inner = [_number(child, meanings) for child in ast.iter_child_nodes(node)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -inner[1] % _PRIME
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](inner[0], inner[2]) % _PRIME
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Max", "Min")
    ):
        inner[1:] = sorted(inner[1:])
    beside = [value for _, value in ast.iter_fields(node) if not isinstance(value, ast.AST | list)]
    return hash((type(node), repr(beside), *inner))


_NUMBER = re.compile(r"_\d+$")


class Numbers(dict[tuple[Any, ...], int]):
    """Hands out numbers in place of digests: equal ones for equal parts, among graphs that share one of these."""

    def of(self, parts: Iterable[Any]) -> int:
        return self.setdefault(tuple(parts), len(self))


class Digests(NamedTuple):
    """Of a graph as a whole, and of its values in their order."""

    whole: int
    values: list[int]


def digests_of(graph: Dataflow, numbers: Numbers) -> Digests:
    """The digests of a graph and of its parts. A definition's says what it stands for, never its number."""
    definitions: list[int] = []
    for name, kind, content in graph.definitions:
        told: list[Any] = [_NUMBER.sub("", name), content] if kind == "group" else [name]
        if kind == "body":
            told = [digests_of(dataflow(graph.bodies[name]), numbers).whole]
        definitions.append(numbers.of([kind, *told]))

    values: list[int] = []
    for scope, _, operator, kind, arguments, operands, *_ in graph.values:
        what = (
            f"{operator}\n{kind}\n{arguments}"
            if operator
            else f"{scope.space}.{scope.owners[0]}\n{kind}"
        )
        values.append(_mixed(what, operands, values, definitions, numbers))
    named = (
        (name, _mixed(what, operands, values, definitions, numbers))
        for name, what, operands, _ in graph.results
    )
    results = [numbers.of(each) for each in named]

    # groups of one mesh dimension and the same ranks have equal digests: who shares one is told by its users
    groups = {
        ~place: definitions[place]
        for place, each in enumerate(graph.definitions)
        if each.kind == "group"
    }
    alike = Counter(groups.values())
    twins: dict[Operand, list[int]] = {
        operand: [] for operand, digest in groups.items() if alike[digest] > 1
    }
    for user in graph.users if twins else ():
        for operand in graph.values[user].operands:
            if operand in twins:
                twins[operand].append(values[user])

    parts = [
        *sorted(
            str(d)
            for d in graph.definitions
            if d.kind in ("convention", "module") and d.name != "owners"
        ),
        # a called module names its body in a definition, so no operand leads to it
        *sorted(
            digest
            for digest, d in zip(definitions, graph.definitions, strict=True)
            if d.kind == "body"
        ),
        *[values[place] for place in graph.inputs],
        *sorted(
            digest for digest, value in zip(values, graph.values, strict=True) if not value.is_input
        ),
        *results,
        *sorted(numbers.of(sorted(users)) for users in twins.values()),
        *map(str, graph.others),
    ]
    return Digests(numbers.of(parts), values)


def _mixed(
    what: str,
    operands: Sequence[Operand],
    digests: Sequence[int],
    definitions: Sequence[int],
    numbers: Numbers,
) -> int:
    """The digest of a statement whose operands have digests."""
    parts: list[Any] = []
    symbols: list[str] = []
    for operand in operands:
        if isinstance(operand, int):
            parts.append(digests[operand] if operand >= 0 else definitions[~operand])
        elif isinstance(operand, str):
            parts.append(operand)
        else:
            source, number = operand
            symbols.append(
                (str(digests[source]) if source < len(digests) else "new") + f".{number}"
            )
    spelled, start = [], 0  # without regard to the numbers of symbols
    for part in what.split("\n"):
        meanings = symbols[start : start + part.count(SYMBOL)]
        spelled.append(
            canonical(part, meanings) if len(meanings) > 1 else "\n".join([part, *meanings])
        )
        start += len(meanings)
    return numbers.of(["\n".join(spelled), *parts])


_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_PART_OF_ARGUMENTS = re.compile(rf"{_STRING}|, |.", re.DOTALL)


def bare_name(operator: str) -> str:
    """The operator without its namespace and overload."""
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


class Argument(NamedTuple):
    """One argument of a statement: its keyword ("" if it has none), its text, and the operands in it."""

    keyword: str
    text: str
    operands: list[Operand]


def arguments_of(value: Value) -> list[Argument]:
    """Split the arguments of a statement."""
    references = iter(value.operands[value.type.count(SYMBOL) :])
    found: list[Argument] = []
    text = ""
    operands: list[Operand] = []
    depth = 0
    for part in [*_PART_OF_ARGUMENTS.findall(value.arguments), ", "]:
        if part == ", " and depth == 0:
            keyword, equals, rest = text.partition("=")
            is_keyword = bool(equals) and keyword.isidentifier()
            found.append(
                Argument(keyword, rest, operands) if is_keyword else Argument("", text, operands)
            )
            text, operands = "", []
            continue
        text += part
        if part == HOLE:
            operands.append(next(references))
        elif part in ("(", "[", "{"):
            depth += 1
        elif part in (")", "]", "}"):
            depth -= 1
    return found


@dataclass(frozen=True, slots=True)
class OperatorEffects:
    """The effects of the operator that a text names, as torch's schemas and tags have them."""

    is_view: bool
    draws: bool
    writes: frozenset[
        tuple[int, str]
    ]  # the place and the name of each parameter that is written to
    dropout: tuple[int, str] | None  # the parameter that switches the drawing off if it is zero

    def given(self, value: Value, parameter: tuple[int, str]) -> Argument | None:
        """Return the argument of a statement for a parameter: by keyword, else by place."""
        place, name = parameter
        arguments = arguments_of(value)
        for argument in arguments:
            if argument.keyword == name:
                return argument
        if place < len(arguments) and not arguments[place].keyword:
            return arguments[place]
        return None


@functools.lru_cache(maxsize=1 << 12)
def effects_of_operator(operator: str) -> OperatorEffects:
    """Look up an operator by its name in a text.

    An operator that this process does not know, of a library that it has not imported or a method of a class, is taken
    by torch's convention: ``name_`` writes to its first operand.
    """
    # Texts are compared without torch, unless their dataflow is equal and so the order of effects counts.
    from pytest_gtrainer.graph import nodes
    from pytest_gtrainer.graphtext.operators import targets_named

    targets = targets_named(operator)
    writes: set[tuple[int, str]] = set()
    dropout = None
    for target in targets:
        writes.update(nodes.written_parameters(target))
        dropout = dropout or nodes.parameter(target, "dropout_p")
    name = bare_name(operator)
    if not targets and name.endswith("_") and not name.endswith("__"):
        writes.add((0, "self"))
    return OperatorEffects(
        any(nodes.is_view(target) or nodes.waits(target) for target in targets),
        any(nodes.draws(target) for target in targets),
        frozenset(writes),
        dropout,
    )


def draws_numbers(value: Value) -> bool:
    """Return whether a statement draws random numbers; attention does if its dropout is not zero."""
    found = effects_of_operator(value.operator)
    if not found.draws or found.dropout is None:
        return found.draws
    dropout = found.given(value, found.dropout)
    return dropout is not None and dropout.text not in ("0", "0.0")


def written(value: Value) -> list[int]:
    """Return the values that a statement changes in place."""
    found = effects_of_operator(value.operator)
    targets: list[int] = []
    for parameter in sorted(found.writes):
        argument = found.given(value, parameter)
        for operand in argument.operands if argument else ():
            if isinstance(operand, int) and operand >= 0:
                targets.append(operand)
    return targets


@dataclass(frozen=True, slots=True)
class Effects:
    """In the order of the schedule: who draws, and what happens to each storage that is changed."""

    draws: list[int]
    histories: dict[
        int, list[tuple[int | None, list[int]]]
    ]  # by a value of the storage: changes, readers before each


def effects(graph: Dataflow) -> Effects:
    """The effects of a graph; values are told by their places."""
    targets = [written(value) for value in graph.values]
    storages: list[int] = []  # for each value one that stands for its storage
    for place, (value, own) in enumerate(zip(graph.values, targets, strict=True)):
        base = own or (value.sources if effects_of_operator(value.operator).is_view else ())
        storages.append(storages[base[0]] if base else place)

    changed = {storages[target] for of in targets for target in of}
    histories: dict[int, list[tuple[int | None, list[int]]]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(graph.values):
        changed_here = {storages[target] for target in targets[place]}
        for storage in {storages[source] for source in value.sources} & changed:
            if storage in changed_here:
                histories[storage].append((place, readers.pop(storage, [])))
            elif storages[place] != storage:
                readers[storage].append(place)
    for storage, rest in readers.items():
        histories[storage].append((None, rest))
    return Effects(
        [place for place, value in enumerate(graph.values) if draws_numbers(value)], histories
    )
