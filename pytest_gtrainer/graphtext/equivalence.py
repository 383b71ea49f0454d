"""When two schedules compute the same: digests without regard to order, and effects, for which order counts.

The *digest* of a value says its operator, type, literals and the digests of its operands, never its name or its
place. That of a graph is made of all of them without order, so equal digests mean: the same computation, maybe in
another order. Left out are modules, buckets and tags, and the examples of symbols.

*Effects* are what the order of a schedule decides beyond that. Two graphs of equal dataflow give the same results
only if random numbers are drawn in the same order, and if each reader of a value that is changed in place stands on
the same side of the change. The *storage* of a value is that of its first operand, for a view or a change in place,
else its own. No torch here: operators are known by name. One walk over the values for each.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gtrainer.graphtext.dataflow import HOLE, SYMBOL, Dataflow, Definition, Operand, Value, dataflow

_COMMUTATIVE = {"Max", "Min"}
_OTHER_SIGN = {"+": "-", "-": "+"}


def canonical(text: str, meanings: Sequence[str]) -> str:
    """``text`` with the meanings in place of its symbols, terms and factors sorted.

    >>> canonical("f32[\\1 + \\1, 2]", ["b", "a"]) == canonical("f32[\\1 + \\1, 2]", ["a", "b"])
    True
    >>> canonical("f32[-2*\\1 + \\1]", ["b", "a"]) == canonical("f32[\\1 - 2*\\1]", ["a", "b"])
    True
    >>> canonical("f32[\\1 - \\1]", ["b", "a"]) == canonical("f32[\\1 - \\1]", ["a", "b"])
    False
    """
    tree = _parsed(text)
    if tree is None:
        return "\n".join([text, *meanings])
    return _spell(tree, meanings)


@functools.lru_cache(maxsize=1 << 12)
def _parsed(text: str) -> ast.expr | None:
    """The syntax tree, symbols numbered in the order in which they stand."""
    pieces = text.replace(HOLE, "_hole").split(SYMBOL)
    numbered = "".join(f"{piece}_symbol{place}" for place, piece in enumerate(pieces[:-1])) + pieces[-1]
    try:
        return ast.parse(f"_({numbered})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _spell(node: ast.AST, meanings: Sequence[str]) -> str:
    if isinstance(node, ast.Name) and node.id.startswith("_symbol"):
        return meanings[int(node.id.removeprefix("_symbol"))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return f"sum({', '.join(sorted(_terms(node, '+', meanings)))})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(_factors(node), meanings)
    inner = [_spell(child, meanings) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _COMMUTATIVE:
        inner[1:] = sorted(inner[1:])
    return f"{type(node).__name__}{_plain(node)}({', '.join(inner)})"


def _plain(node: ast.AST) -> str:
    """What a node says beside its children."""
    told = [value for _, value in ast.iter_fields(node) if not isinstance(value, ast.AST | list)]
    return repr(told) if told else ""


def _terms(node: ast.expr, sign: str, meanings: Sequence[str]) -> list[str]:
    """Signed terms; ``-2*u0 + u1`` has those of ``u1 - 2*u0``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        right = sign if isinstance(node.op, ast.Add) else _OTHER_SIGN[sign]
        return [*_terms(node.left, sign, meanings), *_terms(node.right, right, meanings)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _terms(node.operand, _OTHER_SIGN[sign], meanings)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        first, *rest = _factors(node)
        if isinstance(first, ast.UnaryOp) and isinstance(first.op, ast.USub):
            sign, first = _OTHER_SIGN[sign], first.operand
        return [sign + _product([first, *rest], meanings)]
    return [sign + _spell(node, meanings)]


def _factors(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return [node]
    return [*_factors(node.left), *_factors(node.right)]


def _product(factors: Sequence[ast.expr], meanings: Sequence[str]) -> str:
    return f"product({', '.join(sorted(_spell(factor, meanings) for factor in factors))})"


_NUMBER = re.compile(r"_\d+$")


class Numbers:
    """Hands out numbers in place of digests: equal ones for equal parts, among graphs that share one of these."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, parts: Iterable[Any]) -> int:
        return self._known.setdefault(tuple(parts), len(self._known))


@dataclass(frozen=True, slots=True)
class Digests:
    """Of a graph as a whole, and of its values and definitions in their order."""

    whole: int
    values: list[int]
    definitions: list[int]


def digests_of(graph: Dataflow, mixer: Numbers) -> Digests:
    """The digests of a graph and of its parts."""
    definitions = [_of_definition(graph, definition, mixer) for definition in graph.definitions]
    values = _values(graph, definitions, mixer)
    said = [d for d in graph.definitions if d.kind == "convention" and d.name != "owners"]
    parts = [
        *sorted(f"{name} = {content}" for name, _, content in said),
        *[values[place] for place in graph.inputs],
        *sorted(digest for digest, value in zip(values, graph.values, strict=True) if not value.is_input),
        *[
            mixer.of([name, _mixed(what, operands, values, definitions, mixer)])
            for name, what, operands, _ in graph.results
        ],
        *sorted(mixer.of(sorted(values[user] for user in users)) for users in _users_of_twin_groups(graph)),
        *[str(record) for record in graph.others],
    ]
    return Digests(mixer.of(parts), values, definitions)


def _of_definition(graph: Dataflow, definition: Definition, mixer: Numbers) -> int:
    """A definition's digest says what it stands for, never its number: that follows from the schedule."""
    name, kind, content = definition
    if kind == "group":
        return mixer.of([kind, _NUMBER.sub("", name), content])
    if kind == "body":
        return mixer.of([kind, digests_of(dataflow(graph.bodies[name]), mixer).whole])
    return mixer.of([kind, name])


def _users_of_twin_groups(graph: Dataflow) -> Iterable[list[int]]:
    """Groups of one mesh dimension and the same ranks have equal digests: who shares one is told here."""
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (name, kind, content) in enumerate(graph.definitions):
        if kind == "group":
            alike[_NUMBER.sub("", name), content].append(place)
    users: dict[int, list[int]] = {place: [] for places in alike.values() if len(places) > 1 for place in places}
    for user in graph.users if users else ():
        for operand in graph.values[user].operands:
            if isinstance(operand, int) and ~operand in users:
                users[~operand].append(user)
    return users.values()


def _values(graph: Dataflow, definitions: Sequence[int], mixer: Numbers) -> list[int]:
    digests: list[int] = []
    for scope, _, operator, kind, arguments, operands, sources, *_ in graph.values:
        what = f"{operator}\n{kind}\n{arguments}" if operator else f"{scope.space}.{scope.owners[0]}\n{kind}"
        if operands is sources:  # all of them are values, as mostly
            digests.append(mixer.of((what, *[digests[source] for source in sources])))
        else:
            digests.append(_mixed(what, operands, digests, definitions, mixer))
    return digests


def _mixed(
    what: str, operands: Sequence[Operand], digests: Sequence[int], definitions: Sequence[int], mixer: Numbers
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
            symbols.append((str(digests[source]) if source < len(digests) else "new") + f".{number}")
    if len(symbols) > 1:
        what = "\n".join(_in_order(what, symbols))
    else:
        parts += symbols
    return mixer.of([what, *parts])


def _in_order(what: str, symbols: Sequence[str]) -> Iterator[str]:
    """Each part of a statement that names symbols, spelled without regard to their numbers."""
    start = 0
    for part in what.split("\n"):
        meanings = symbols[start : start + part.count(SYMBOL)]
        yield canonical(part, meanings) if len(meanings) > 1 else "\n".join([part, *meanings])
        start += len(meanings)


_RANDOM = frozenset({
    "bernoulli", "bernoulli_", "cauchy_", "dropout", "dropout_", "alpha_dropout", "feature_dropout",
    "exponential", "exponential_", "geometric_", "inductor_random", "inductor_randint", "inductor_seed",
    "inductor_seeds", "log_normal_", "multinomial", "native_dropout", "normal", "normal_", "normal_functional",
    "philox_rand", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
    "random_", "randperm", "rrelu", "rrelu_", "rrelu_with_noise", "run_and_save_rng_state",
    "run_with_rng_state", "uniform", "uniform_"
})  # fmt: skip
_OUT = f"out={HOLE}"
_VIEWS = frozenset({
    "_conj", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "expand",
    "expand_as", "flatten", "lift_fresh", "movedim", "narrow", "permute", "real", "reshape", "select", "set",
    "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "wait_tensor"
})  # fmt: skip
_PYTHON_IN_PLACE = frozenset({
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor", "setitem"
})  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def short_name(operator: str) -> str:
    """The operator without its namespace and overload.

    >>> short_name("aten.add_.Tensor"), short_name("operator.add"), short_name("hop.cond")
    ('add_', 'add', 'cond')
    """
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def is_random(value: Value) -> bool:
    """Whether it draws random numbers; attention does so if its dropout is not zero."""
    name = short_name(value.operator)
    if name.startswith("_scaled_dot_product"):
        return any(_is_probability(argument) for argument in value.arguments.split(", "))
    return name in _RANDOM


def _is_probability(argument: str) -> bool:
    try:
        return "." in argument and 0 < float(argument) <= 1
    except ValueError:
        return False


def written(value: Value) -> list[int]:
    """The values that a statement changes in place."""
    if (place := value.arguments.find(_OUT)) >= 0:
        return [source for source in [value.operand_at(place + len(_OUT) - 1)] if source is not None]
    if not _changes(value.operator):
        return []
    if value.arguments.startswith("[") and not value.operator.startswith("operator."):
        return list(value.sources)  # of several lists we do not know which are written
    return list(value.sources[:1])


@functools.lru_cache(maxsize=1 << 12)
def _changes(operator: str) -> bool:
    """Whether an operator changes something in place, by its name."""
    name = short_name(operator)
    if operator.startswith("operator."):
        return name in _PYTHON_IN_PLACE
    return name.endswith("_") and not name.endswith("__")


@functools.lru_cache(maxsize=1 << 12)
def _is_view(operator: str) -> bool:
    return short_name(operator) in _VIEWS


@dataclass(frozen=True, slots=True)
class Effects:
    """In the order of the schedule: who draws, and what happens to each storage that is changed.

    ``histories`` has for each such storage (by one value of it) its changes, each with the readers
    since the change before.
    """

    draws: list[int] = field(default_factory=list)
    histories: dict[int, list[tuple[int | None, list[int]]]] = field(default_factory=dict)


def effects(graph: Dataflow) -> Effects:
    """The effects of a graph; values are told by their places."""
    found = Effects([place for place, value in enumerate(graph.values) if value.operator and is_random(value)])
    targets = [written(value) for value in graph.values]
    if not any(targets):
        return found
    storages = _storages(graph, targets)
    changed = {storages[target] for of in targets for target in of}
    readers: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(graph.values):
        own = {storages[target] for target in targets[place]}
        for storage in {storages[source] for source in value.sources} & changed:
            if storage in own:
                found.histories.setdefault(storage, []).append((place, readers.pop(storage, [])))
            elif storages[place] != storage:
                readers[storage].append(place)
    for storage, rest in readers.items():
        found.histories.setdefault(storage, []).append((None, rest))
    return found


def _storages(graph: Dataflow, targets: Sequence[Sequence[int]]) -> list[int]:
    """For each value one that stands for its storage, given what each changes in place."""
    storages: list[int] = []
    for place, (value, own) in enumerate(zip(graph.values, targets, strict=True)):
        base = own or (value.sources[:1] if _is_view(value.operator) else ())
        storages.append(storages[base[0]] if base else place)
    return storages


def histories_by_digest(found: Effects, digests: Sequence[int]) -> Iterator[tuple[int, list[object]]]:
    """Each storage with what happens to it, in a form that two graphs may be compared by."""
    for storage, changes in found.histories.items():
        yield (
            storage,
            [
                (None if change is None else digests[change], sorted(digests[reader] for reader in readers))
                for change, readers in changes
            ],
        )
