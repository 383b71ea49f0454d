"""To which module or bucket, and to which space, each value of a graph belongs, and its name there.

The tracer says it in the metadata that ``conventions`` names, in ``meta["fsdp_bucket"]`` and,
for placeholders, ``meta["gt_input"]``. Where the module is not said (a gradient that autograd
accumulates belongs to no module), it follows from the operands; such nodes are *unowned*.
"""

from __future__ import annotations

import keyword
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction, node_fqn
from pytest_gtrainer.graphtext.operators import Operator, function_of, operator_of
from pytest_gtrainer.graphtext.sections import NOWHERE, RESERVED, Scope, common_parent, scope_of, split_layer
from pytest_gtrainer.graphtext.tags import OWN_KEY, has_tags

_SPACE_OF_KIND = {"parameter": "P", "buffer": "B", "input": "I"}
_CALLS = ("call_function", "call_module", "call_method")


_OF_MODULE: dict[str, dict[str, Scope]] = {FORWARD: {}, BACKWARD: {}}
"""Of single modules: what most values belong to is found by one look-up of a text."""


class Input(NamedTuple):
    """A graph input: its space, its full name, and how many before it have both."""

    space: str
    fqn: str
    repeat: int = 0


@dataclass(slots=True)
class Scopes:
    """Where the nodes of a graph belong.

    Attributes:
        of: scopes of all nodes that have a value.
        computed: the nodes with a line of their own in the schedule, in order.
        operators, owners, values: of the computed nodes, place by place, the operators, the scopes and
            ``meta["val"]``. Found in one walk, as to come back to a node of a large graph is to wait for memory.
        collectives: the computed nodes that name a process group.
        items: the nodes that only take one output of another, in order.
        inputs: the names of the inputs.
        unowned: computed nodes without a module.
        tagged: computed nodes of which a line may say more than the type.
    """

    of: dict[fx.Node, Scope] = field(default_factory=dict)
    computed: list[fx.Node] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    owners: list[Scope] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    collectives: list[fx.Node] = field(default_factory=list)
    items: list[fx.Node] = field(default_factory=list)
    inputs: dict[fx.Node, Input] = field(default_factory=dict)
    unowned: set[fx.Node] = field(default_factory=set)
    tagged: set[fx.Node] = field(default_factory=set)


def is_item(node: fx.Node) -> bool:
    """Whether a node only takes one output of its operand; it is spelled ``operand[0]``."""
    if node.target is not operator.getitem or node.op != "call_function":
        return False
    source, place = node.args
    return type(place) is int and isinstance(source, fx.Node) and source.op not in ("placeholder", "get_attr")


def is_computed(node: fx.Node) -> bool:
    """Whether a node has a line of its own in the schedule."""
    return node.op in _CALLS and not is_item(node)


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a value goes into, looking through the picking of outputs."""
    for user in node.users:
        yield from users_of(user) if is_item(user) else [user]


def scopes_of(nodes: Iterable[fx.Node]) -> Scopes:
    """Where every node that has a value belongs, in one walk."""
    found = Scopes()
    of, computed, operators, owners, values = found.of, found.computed, found.operators, found.owners, found.values
    seen: dict[tuple[str, str], int] = {}
    for node in nodes:
        op = node.op
        if op in _CALLS:
            if node.target is operator.getitem and is_item(node):
                of[node] = of.get(node.args[0], NOWHERE)
                found.items.append(node)
                continue
            meta = node.meta
            of[node] = scope = _scope_told(meta) or _scope(node, found)
            known = function_of(node.target) if op == "call_function" else operator_of(node)
            if known.group_arguments:
                found.collectives.append(node)
            owners.append(scope)
            computed.append(node)
            operators.append(known)
            values.append(meta.get("val"))
        elif op == "placeholder":
            told = node.meta.get("gt_input")  # without it an argument by position
            key: tuple[str, str] = (
                ("A", str(len(found.inputs))) if told is None else (_SPACE_OF_KIND[told["kind"]], told["fqn"])
            )
            found.inputs[node] = Input(*key, seen.get(key, 0))
            seen[key] = seen.get(key, 0) + 1
            of[node] = scope_of((key[1].rpartition(".")[0],), key[0])
    return found


def _scope_told(meta: Mapping[str, Any]) -> Scope | None:
    """The scope of a computed value whose metadata says its module, met before, and nothing else: of most values."""
    custom = meta.get("custom")
    if custom is None or len(custom) != 1 or "fsdp_bucket" in meta or "recompute" in meta:
        return None
    fqn = custom.get(OWN_KEY)
    return _OF_MODULE[BACKWARD if meta.get("autograd_backward") else FORWARD].get(fqn) if fqn else None


def _scope(node: fx.Node, found: Scopes) -> Scope:
    meta, fqn, space = node.meta, node_fqn(node), direction(node)
    if has_tags(meta, fqn, space):
        found.tagged.add(node)
    bucket = meta.get("fsdp_bucket")
    if bucket:
        return scope_of(tuple(bucket["plan_fqns"]), bucket["direction"], is_bucket=True)
    if not fqn and (fqn := _inferred(node, found.of)):
        found.unowned.add(node)
        found.tagged.add(node)
    return _OF_MODULE[space].get(fqn) or _OF_MODULE[space].setdefault(fqn, scope_of((fqn,), space))


def _inferred(node: fx.Node, scopes: dict[fx.Node, Scope]) -> str:
    """The module that all operands share; where they lie in several layers, the latest one's layer."""
    operands = [scopes[operand] for operand in node.all_input_nodes if operand in scopes]
    known = [s for s in operands if not s.is_nowhere and s.space in ("fwd", "bwd")]
    known = known or [s for s in operands if not s.is_nowhere]
    fqns = [fqn for scope in known for fqn in scope.owners]
    if not fqns:
        return ""
    common = common_parent(fqns)
    if split_layer(common)[0] is not None:
        return common
    for scope in reversed(known):
        if scope.layer is not None:
            return f"{scope.layer.container}.{scope.layer.number}"
    return common


WORDS = RESERVED | {"i", "inf", "nan", "const", "device"} | frozenset(keyword.kwlist)
"""Names that mean something else where a value could stand."""


class Namer:
    """Hands out names, each once in its scope.

    >>> from pytest_gtrainer.graphtext.scopes import scope_of
    >>> namer, scope = Namer(), scope_of(("norm",), "fwd")
    >>> [namer.name(scope, short) for short in ("mul", "add", "mul", "is")]
    ['mul', 'add', 'mul_1', 'is_']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._words = WORDS | frozenset(taken)
        self._uses: defaultdict[Scope, dict[str, int]] = defaultdict(dict)

    def name(self, scope: Scope, short: str) -> str:
        uses = self._uses[scope]
        name = base = f"{short}_" if short in self._words else short
        while name in uses:  # also where an operator is itself called `view_1`
            uses[base] += 1
            name = f"{base}_{uses[base] - 1}"
        uses[name] = 1
        return name


def names_of(scopes: Scopes, taken: Iterable[str]) -> dict[fx.Node, tuple[Scope, str]]:
    """The scope and the name in it of every computed value, in the order of the schedule; then ``topk[1]`` of items."""
    name = Namer(taken).name
    named = zip(scopes.computed, scopes.owners, scopes.operators, strict=True)
    names = {node: (scope, name(scope, operator.short)) for node, scope, operator in named}
    for item in scopes.items:
        source, place = item.args
        if (known := names.get(source)) is not None:
            names[item] = (known[0], f"{known[1]}[{place}]")
    return names
