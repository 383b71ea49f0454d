"""Equivalence of schedules: digests that ignore order, and effects, for which order counts.

The *digest* of a value covers its operator, type, literals and the digests of its operands, never
its name, place, module or tags. The digest of a graph covers all of these without their order:
equal digests mean the same computation.

*Effects* are what order decides beyond that: random numbers have to be drawn in the same order, and
each reader of a value that is changed in place has to stand on the same side of the change. The
*storage* of a view, or of a change in place, is that of its first operand. Every other value has a
storage of its own.

*Twins* are values of equal digest that are not interchangeable: two draws of random numbers, and
two buffers one of which is changed in place. ``digests_of`` holds them apart if it is given the
effects.
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

from pytest_gtrainer.graphtext.dataflow import (
    HOLE,
    STRING,
    SYMBOL,
    Dataflow,
    Operand,
    Value,
    dataflow,
)

# Not 2**61 - 1, modulo which Python hashes integers: 3 and 2**63 - 1 would be one.
_PRIME = 2**127 - 1
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}


def canonical(text: str, meanings: Sequence[str]) -> str:
    """Return a form of ``text`` that is equal for equal polynomials of its symbols.

    ``text`` has a ``SYMBOL`` for each of ``meanings``. ``s0*s1 + s1`` and ``s1 + s1*s0`` have the
    same form, although sympy prints terms in the order of the names. The symbols get random
    numbers of 61 bits (Python's hashes), and the polynomial is evaluated modulo a prime (Schwartz,
    Zippel): two different ones agree with a probability of their degree divided by 2**61.
    """
    places = itertools.count()
    numbered = re.sub(SYMBOL, lambda _: f"_symbol{next(places)}", text.replace(HOLE, "_hole"))
    try:
        tree = ast.parse(f"_({numbered})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "\n".join([text, *meanings])
    return str(_evaluate(tree, meanings))


def _evaluate(node: ast.AST, meanings: Sequence[str]) -> int:
    """Return the value of an arithmetic expression modulo the prime; the hash of any other."""
    if isinstance(node, ast.Name) and node.id.startswith("_symbol"):
        return hash(meanings[int(node.id.removeprefix("_symbol"))])
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    inner = [_evaluate(child, meanings) for child in ast.iter_child_nodes(node)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -inner[1] % _PRIME
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](inner[0], inner[2]) % _PRIME
    # sympy prints the arguments of Max and Min in the order of their names, too.
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Max", "Min"):
        inner[1:] = sorted(inner[1:])
    fields = [value for _, value in ast.iter_fields(node) if not isinstance(value, ast.AST | list)]
    return hash(repr((type(node), fields, inner)))


_NUMBER = re.compile(r"_\d+$")


class Numbers(dict[tuple[Any, ...], int]):
    """Numbers in place of digests: equal parts have equal ones, also across graphs."""

    def of(self, parts: Iterable[Any]) -> int:
        """Return the number of these parts; the next free one if they are new."""
        return self.setdefault(tuple(parts), len(self))


class Digests(NamedTuple):
    """The digest of a graph as a whole, and those of its values in their order."""

    whole: int
    values: list[int]


def digests_of(
    graph: Dataflow, numbers: Numbers, coarse: "tuple[Effects, Digests] | None" = None
) -> Digests:
    """Return the digests of a graph and of its values.

    A value's digest is made from those of its operands, which come earlier, so one walk is enough.
    Its cost is linear in the number of operands.

    Args:
        coarse: the effects of the graph and its digests without this argument. Twins get digests
            of their own: a draw by its place among equal draws, a buffer by its changes.
    """
    instances = None if coarse is None else _Instances(numbers, *coarse)
    definitions: list[int] = []
    bodies: list[int] = []
    head: list[str] = []
    for definition in graph.definitions:
        name, kind, content = definition
        parts: list[Any] = [name]
        if kind == "group":
            # The number after ``dp_1`` depends on the order of the definitions.
            parts = [_NUMBER.sub("", name), content]
        elif kind == "body":
            body = dataflow(graph.bodies[name])
            digests = digests_of(body, numbers)
            if instances is not None:
                digests = digests_of(body, numbers, (effects(body), digests))
            parts = [digests.whole]
        digest = numbers.of([kind, *parts])
        definitions.append(digest)
        if kind == "body":
            bodies.append(digest)
        elif kind in ("convention", "module") and name != "owners":
            head.append(str(definition))

    values: list[int] = []
    # What a statement reads: the digest of a value, or of a twin with the changes up to here.
    current: Sequence[int] = values if instances is None else instances.current
    inputs: list[int] = []
    computed: list[int] = []
    for value in graph.values:
        text = f"{value.operator}\n{value.type}\n{value.arguments}"
        if value.is_input:
            text = f"{value.scope.space}.{value.scope.owners[0]}\n{value.type}"
        digest = _digest_statement(text, value.operands, current, definitions, numbers)
        if instances is not None:
            digest = instances.add(digest)
        values.append(digest)
        (inputs if value.is_input else computed).append(digest)

    results: list[int] = []
    for name, arguments, operands, _ in graph.results:
        digest = _digest_statement(arguments, operands, current, definitions, numbers)
        results.append(numbers.of((name, digest)))

    parts = [
        *sorted(head),
        # A called module names its body in a definition, so no operand leads to it.
        *sorted(bodies),
        *inputs,
        *sorted(computed),
        *results,
        *_digest_twin_groups(graph, values, definitions, numbers),
        *map(str, graph.others),
    ]
    return Digests(numbers.of(parts), values)


class _Instances:
    """Tells twins apart during one walk over a graph."""

    def __init__(self, numbers: Numbers, effects: "Effects", coarse: Digests) -> None:
        self.current: list[int] = []
        self._numbers = numbers
        self._draws = set(effects.draws)
        self._drawn: Counter[int] = Counter()
        self._aliases: dict[int, list[int]] = {}
        self._changed: dict[int, list[int]] = defaultdict(list)  # by the place of the change
        self._storages = effects.storages
        counts = Counter(coarse.values)
        for storage, history in effects.histories.items():
            if counts[coarse.values[storage]] == 1:
                continue
            self._aliases[storage] = []
            for change, _ in history:
                if change is not None:
                    self._changed[change].append(storage)

    def add(self, digest: int) -> int:
        """Return the digest of the next value, given that without its instance."""
        place = len(self.current)
        if place in self._draws:
            self._drawn[digest] += 1
            digest = self._numbers.of(("draw", digest, self._drawn[digest]))
        self.current.append(digest)
        for storage in self._changed.get(place, ()):
            for alias in self._aliases[storage]:
                self.current[alias] = self._numbers.of(("changed", self.current[alias], digest))
        storage = self._storages[place]
        if storage in self._aliases:
            self._aliases[storage].append(place)
        return digest


def _digest_twin_groups(
    graph: Dataflow, values: Sequence[int], definitions: Sequence[int], numbers: Numbers
) -> list[int]:
    """Return a digest of the users of each process group that has a twin.

    Groups of one mesh dimension and the same ranks have equal digests. Which values share one of
    them is visible only in their users.
    """
    groups: dict[Operand, int] = {}
    for place, definition in enumerate(graph.definitions):
        if definition.kind == "group":
            groups[~place] = definitions[place]
    counts = Counter(groups.values())
    users: dict[Operand, list[int]] = {}
    for operand, digest in groups.items():
        if counts[digest] > 1:
            users[operand] = []
    if not users:
        return []
    for place in graph.users:
        for operand in graph.values[place].operands:
            if operand in users:
                users[operand].append(values[place])

    return sorted(numbers.of(sorted(digests)) for digests in users.values())


def _digest_statement(
    text: str,
    operands: Sequence[Operand],
    values: Sequence[int],
    definitions: Sequence[int],
    numbers: Numbers,
) -> int:
    """Return the digest of a statement, given those of the earlier ``values``.

    ``text`` is its operator, type and arguments, one in a line, with holes for ``operands``.
    """
    parts: list[Any] = []
    symbols: list[str] = []
    for operand in operands:
        if isinstance(operand, str):
            parts.append(operand)
        elif isinstance(operand, int):
            parts.append(values[operand] if operand >= 0 else definitions[~operand])
        else:
            # A symbol is known by the value that brings it in; that may be this statement.
            source = str(values[operand.value]) if operand.value < len(values) else "new"
            symbols.append(f"{source}.{operand.number}")

    lines = []
    start = 0
    for line in text.split("\n"):
        meanings = symbols[start : start + line.count(SYMBOL)]
        start += len(meanings)
        if len(meanings) > 1:
            lines.append(canonical(line, meanings))
        else:
            lines.append("\n".join([line, *meanings]))

    return numbers.of(["\n".join(lines), *parts])


_PART_OF_ARGUMENTS = re.compile(rf"{STRING}|, |.", re.DOTALL)


def bare_name(operator: str) -> str:
    """Return an operator without its namespace and overload."""
    _, dot, name = operator.partition(".")
    if not dot:
        return operator
    return name.partition(".")[0]


class Argument(NamedTuple):
    """One argument of a statement: its keyword, or "", its text, and the operands in it."""

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
            if not equals or not keyword.isidentifier():
                keyword, rest = "", text
            found.append(Argument(keyword, rest, operands))
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


def find_argument(value: Value, parameter: tuple[int, str]) -> Argument | None:
    """Return the argument of a statement for a parameter, given by its place and its name."""
    place, name = parameter
    arguments = arguments_of(value)
    for argument in arguments:
        if argument.keyword == name:
            return argument
    if place < len(arguments) and not arguments[place].keyword:
        return arguments[place]
    return None


@dataclass(frozen=True, slots=True)
class OperatorEffects:
    """The effects of the operator that a text names, as torch's schemas and tags have them."""

    is_view: bool
    draws: bool
    writes: frozenset[tuple[int, str]]  # place and name of each parameter that is written to
    dropout: tuple[int, str] | None  # the parameter that is zero where attention draws nothing


@functools.lru_cache(maxsize=1 << 12)
def effects_of_operator(operator: str) -> OperatorEffects:
    """Look up an operator by its name in a text.

    For an operator that this process does not know (of a library that it has not imported, or a
    method of a class), torch's convention decides: ``name_`` writes to its first operand.
    """
    # Texts are compared without torch until their dataflow is equal, so that order counts.
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
    """Return whether a statement draws random numbers, as attention does with dropout."""
    found = effects_of_operator(value.operator)
    if not found.draws or found.dropout is None:
        return found.draws
    dropout = find_argument(value, found.dropout)
    return dropout is not None and dropout.text not in ("0", "0.0")


def written(value: Value) -> list[int]:
    """Return the values that a statement changes in place."""
    found = effects_of_operator(value.operator)
    targets: list[int] = []
    for parameter in sorted(found.writes):
        argument = find_argument(value, parameter)
        for operand in argument.operands if argument else ():
            if isinstance(operand, int) and operand >= 0:
                targets.append(operand)
    return targets


@dataclass(frozen=True, slots=True)
class Effects:
    """Places of values, in the order of the schedule.

    ``draws`` are those that draw random numbers. ``histories`` has an entry for each changed
    storage, under its first value: each change with the readers before it, then None with the rest.
    """

    draws: list[int]
    histories: dict[int, list[tuple[int | None, list[int]]]]
    storages: list[int]  # for each value the first one of its storage


def effects(graph: Dataflow) -> Effects:
    """Return the effects of a graph. Values are given by their places.

    A statement that calls a graph inside has that graph's effects. Which operand an inner input
    stands for is not known here, so a change of one counts as a change of all operands.
    """
    writing, drawing = _bodies_with_effects(graph)
    direct = [written(value) for value in graph.values]
    targets = []
    for value, changes in zip(graph.values, direct, strict=True):
        calls_writing = not writing.isdisjoint(value.operands)
        targets.append([*changes, *value.sources] if calls_writing else changes)
    storages: list[int] = []
    changed: set[int] = set()
    for place, value in enumerate(graph.values):
        bases: Sequence[int] = direct[place]
        if not bases and effects_of_operator(value.operator).is_view:
            bases = value.sources
        storages.append(storages[bases[0]] if bases else place)
        changed.update(storages[target] for target in targets[place])

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
    draws = []
    for place, value in enumerate(graph.values):
        if draws_numbers(value) or not drawing.isdisjoint(value.operands):
            draws.append(place)
    return Effects(draws, histories, storages)


def _bodies_with_effects(graph: Dataflow) -> tuple[set[Operand], set[Operand]]:
    """Return the graphs inside that change an input of theirs, and those that draw numbers."""
    writing: set[Operand] = set()
    drawing: set[Operand] = set()
    for place, definition in enumerate(graph.definitions):
        if definition.kind != "body":
            continue
        body = dataflow(graph.bodies[definition.name])
        inner = effects(body)
        if any(body.values[storage].is_input for storage in inner.histories):
            writing.add(~place)
        if inner.draws:
            drawing.add(~place)
    return writing, drawing
