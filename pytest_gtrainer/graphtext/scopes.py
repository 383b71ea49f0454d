"""What the metadata of a node says in a text, both ways: its module or bucket, its space, its name
there, and its tags.

Where no module is said (a gradient that autograd accumulates has none), it follows from the
operands: such nodes are *unowned*. *Tags* stand beside the type, ``f32[2] | must_save |
custom(stage=1)``:

- a policy of activation checkpointing, from ``meta["recompute"]``;
- ``unowned``: no module is said, the heading's follows from the operands;
- ``at(path)``: the module of a node in a bucket, where it has one (a bucket of one member keeps its
  own);
- ``chunk(path, 0)``: the part that chunk 0 of the chunked module has, or ``chunk(path,
  split_boundary)``, what stands at its boundary; with ``, eager`` where eager code made the chunks;
- ``held_as("Shard(dim=0) over dp=2 of [0, 1]")``: placements of a DTensor, or the layout of a
  sparse tensor;
- ``mismarked``: a node in a bucket of one direction that carries the mark of the other;
- ``custom(...)``: annotations of the user's own, from ``meta["custom"]``.
"""

import ast
import keyword
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pytest_gtrainer._torch.graph_text import POLICIES
from pytest_gtrainer.graph import nodes as marks
from pytest_gtrainer.graph import parts_of
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import held_as
from pytest_gtrainer.graphtext.operators import operator_of
from pytest_gtrainer.graphtext.sections import (
    NOWHERE,
    RESERVED,
    Scope,
    common_parent,
    is_word,
    split_layer,
)
from pytest_gtrainer.graphtext.syntax import (
    AT,
    CHUNK,
    InputKey,
    LinePlace,
    chain,
    path_at,
    refuse,
    shown,
)

UNOWNED, MISMARKED, HELD_AS = "unowned", "mismarked", "held_as"
TAGS = (UNOWNED, AT, MISMARKED, CHUNK, "custom", HELD_AS, *POLICIES)
OWN_KEY = "module_fqn"
_PLAIN = (bool, int, float, str, type(None))
_SPACE_OF_KIND = {"parameter": "P", "buffer": "B", "input": "I"}
_CALLS = ("call_function", "call_module", "call_method")


@dataclass(slots=True)
class Scopes:
    """Where the nodes of a graph belong."""

    of: dict[fx.Node, Scope] = field(default_factory=dict)  # of all nodes that have a value
    computed: list[fx.Node] = field(
        default_factory=list
    )  # with a line of their own in the schedule, in order
    inputs: dict[fx.Node, InputKey] = field(default_factory=dict)  # their names
    unowned: set[fx.Node] = field(default_factory=set)  # computed nodes without a module


def is_item(node: fx.Node) -> bool:
    """Return whether a node only takes one output of its operand; it is spelled ``operand[0]``.

    A node with marks of its own has a line of its own.
    """
    if node.target is not operator.getitem or node.op != "call_function" or len(node.args) != 2:
        return False
    source, place = node.args
    return (
        type(place) is int
        and isinstance(source, fx.Node)
        and source.op not in ("placeholder", "get_attr")
        and not _is_marked_otherwise(node, source)
    )


def _is_marked_otherwise(item: fx.Node, source: fx.Node) -> bool:
    """Return whether an item has a mark that its source lacks. A mark that it lacks itself is the
    source's.
    """
    policy, custom = item.meta.get("recompute"), _own_annotations(item)
    return (
        (policy is not None and policy != source.meta.get("recompute"))
        or (bool(custom) and custom != _own_annotations(source))
        or marks.direction(item) != marks.direction(source)
    )


def _own_annotations(node: fx.Node) -> dict[Any, Any]:
    """Return the annotations of a node, without its module."""
    custom = node.meta.get("custom") or {}
    return {key: value for key, value in custom.items() if key != OWN_KEY}


def is_computed(node: fx.Node) -> bool:
    """Return whether a node has a line of its own in the schedule."""
    return node.op in _CALLS and not is_item(node)


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a value goes into, looking through the picking of outputs."""
    for user in node.users:
        yield from users_of(user) if is_item(user) else [user]


def scopes_of(nodes: Iterable[fx.Node]) -> Scopes:
    """Return where every node that has a value belongs, in one walk."""
    found = Scopes()
    seen: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if is_item(node):
            found.of[node] = found.of.get(node.args[0], NOWHERE)
        elif node.op in _CALLS:
            found.computed.append(node)
            if bucket := node.meta.get("fsdp_bucket"):
                found.of[node] = Scope(
                    tuple(bucket["plan_fqns"]), bucket["direction"], is_bucket=True
                )
                continue
            if not (fqn := marks.node_fqn(node)) and (fqn := _inferred(node, found.of)):
                found.unowned.add(node)
            found.of[node] = Scope((fqn,), marks.direction(node))
        elif node.op == "placeholder":
            told = node.meta.get("gt_input")  # without it an argument by its use, or by position
            key: tuple[str, str] = ("A", node.meta.get("gt_argument") or str(len(found.inputs)))
            if told is not None:
                key = (_SPACE_OF_KIND[told["kind"]], told["fqn"])
            found.inputs[node] = InputKey(*key, seen[key])
            seen[key] += 1
            found.of[node] = Scope((".".join(parts_of(key[1])[:-1]),), key[0])
    return found


def _inferred(node: fx.Node, scopes: dict[fx.Node, Scope]) -> str:
    """The module that all operands share; where they lie in several layers, the latest one's layer."""
    operands = [scopes[operand] for operand in node.all_input_nodes if operand in scopes]
    known = [s for s in operands if not s.is_nowhere and s.space in ("fwd", "bwd")]
    known = known or [s for s in operands if not s.is_nowhere]
    if not (fqns := [fqn for scope in known for fqn in scope.owners]):
        return ""
    common = common_parent(fqns)
    if split_layer(common)[0] is not None:
        return common
    layers = [
        f"{scope.layer.container}.{scope.layer.number}"
        for scope in known
        if scope.layer is not None
    ]
    return layers[-1] if layers else common


WORDS = RESERVED | {"i", "inf", "nan", "const", "device"} | frozenset(keyword.kwlist)
"""Names that mean something else where a value could stand."""


def names_of(scopes: Scopes, taken: Iterable[str]) -> dict[fx.Node, tuple[Scope, str]]:
    """The scope of every computed value and its name there: ``mul``, ``add``, ``mul_1``; ``is_`` as
    ``is`` is taken.
    """
    words = WORDS | frozenset(taken)
    uses: defaultdict[Scope, dict[str, int]] = defaultdict(dict)
    names: dict[fx.Node, tuple[Scope, str]] = {}
    for node in scopes.computed:
        scope, short = scopes.of[node], operator_of(node).short
        here = uses[scope]
        name = base = f"{short}_" if short in words else short
        while name in here:  # also where an operator is itself called `view_1`
            here[base] += 1
            name = f"{base}_{here[base] - 1}"
        here[name] = 1
        names[node] = scope, name
    return names


def tags_of(node: fx.Node, unowned: bool, spell: Callable[[str], str]) -> list[str]:
    """The tags of a computed node, in a fixed order; ``spell`` spells a module path as seen from
    the line.
    """
    meta = node.meta
    tags = [UNOWNED] if unowned else []
    if bucket := meta.get("fsdp_bucket"):
        tags += [f"{AT}({spell(fqn)})"] if (fqn := marks.node_fqn(node)) else []
        tags += [MISMARKED] if marks.direction(node) != bucket["direction"] else []
    if (policy := meta.get("recompute")) is not None:
        tags.append(getattr(policy, "name", str(policy)).lower())
    if held := meta.get("gt_held_as") or held_as(meta.get("val")):
        tags.append(f"{HELD_AS}({held!r})")
    custom = meta.get("custom")
    if custom and (len(custom) > 1 or OWN_KEY not in custom):
        if (region := marks.told_by(custom)) is not None:
            tags.append(f"{CHUNK}({', '.join([spell(region.fqn), *region.words()])})")
            custom = {key: value for key, value in custom.items() if key not in marks.KEYS}
        tags += _annotations(custom)
    return tags


def _annotations(custom: dict[Any, Any]) -> list[str]:
    """Annotations that a text can hold; other values are left out."""
    told = {
        key: custom[key]
        for key in custom
        if key != OWN_KEY and type(key) in _PLAIN and _is_literal(custom[key])
    }
    words = sorted(key for key in told if isinstance(key, str) and is_word(key))
    odd = {key: value for key, value in sorted(told.items(), key=str) if key not in words}
    spelled = [f"{key}={told[key]!r}" for key in words] + ([f"**{odd!r}"] if odd else [])
    return [f"custom({', '.join(spelled)})"] if spelled else []


def _is_literal(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_literal, (*value, *value.values())))
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_literal, value)))


def write_tags(
    meta: dict[str, Any], tags: Sequence[ast.expr], place: LinePlace, *, owned: bool
) -> None:
    """Write what a line's tags and scope say into the metadata of its node; what is no tag is a
    TextError.
    """
    flags: set[str] = set()
    own_fqn = ""
    told: dict[str, Any] = {}
    custom: dict[str, Any] = {}
    for node in tags:
        match node:
            case ast.Call(ast.Name("at"), [path]):
                own_fqn = path_at(chain(path), place.layer)
            case ast.Call(ast.Name("chunk"), [path, *more]):
                told = _chunk(node, path, more, place)
            case ast.Call(ast.Name("held_as"), [ast.Constant(str(held))], []):
                meta["gt_held_as"] = held
            case ast.Call(ast.Name("custom"), [], keywords):
                custom |= _annotations_at(keywords)
            case ast.Name(("unowned" | "mismarked") as flag):
                flags.add(flag)
            case ast.Name(kind) if kind in POLICIES:
                meta["recompute"] = POLICIES[kind]
            case ast.Name(kind) if kind != "custom":
                raise refuse(node, f"`{kind}` is no tag{nearest(kind, TAGS)}")
            case _:
                raise refuse(
                    node,
                    f"expected a tag like `must_save` or `custom(stage=1)`, found `{shown(node)}`",
                )
    scope = place.scope
    if (scope.space == "bwd") != (MISMARKED in flags):
        meta["autograd_backward"] = True
    fqn = scope.owners[0] if owned and UNOWNED not in flags else ""
    if scope.is_bucket:
        meta["fsdp_bucket"] = {"plan_fqns": list(scope.owners), "direction": scope.space}
        fqn = own_fqn
    if fqn or custom or told:
        meta["custom"] = ({OWN_KEY: fqn} if fqn else {}) | told | custom


def _chunk(
    node: ast.expr, path: ast.expr, more: Sequence[ast.expr], place: LinePlace
) -> dict[str, Any]:
    """``chunk(path, 0)``, ``chunk(path, split_boundary, eager)``."""
    words: list[Any] = [
        w.id if isinstance(w, ast.Name) else getattr(w, "value", None) for w in more
    ]
    boundaries = (marks.SPLIT_BOUNDARY, marks.MATERIALIZATION)
    known = words and (type(words[0]) is int or words[0] in boundaries)
    if not known or words[1:] not in ([], [marks.EAGER]):
        raise refuse(
            node,
            f"expected `chunk(path, 0)` or `chunk(path, split_boundary)`, found `{shown(node)}`",
        )
    at, producer = words[0], marks.EAGER if words[1:] else marks.GRAPH
    role, chunk = (marks.BODY, at) if isinstance(at, int) else (at, None)
    return marks.annotation(path_at(chain(path), place.layer), role, producer, chunk)


class _Numbers(ast.NodeTransformer):
    """The numbers that Python has no literal for."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return (
            ast.copy_location(ast.Constant(float(node.id)), node)
            if node.id in ("inf", "nan")
            else node
        )


def _annotations_at(keywords: Sequence[ast.keyword]) -> dict[str, Any]:
    """``custom(stage=1, **{2: 3})``."""
    values: dict[str, Any] = {}
    for item in keywords:
        try:
            value = ast.literal_eval(_Numbers().visit(item.value))
        except (ValueError, TypeError):
            raise refuse(item.value, f"expected a literal, found `{shown(item.value)}`") from None
        if item.arg is None and not isinstance(value, dict):
            raise refuse(
                item.value, f"expected a table like `**{{2: 3}}`, found `{shown(item.value)}`"
            )
        values |= value if item.arg is None else {item.arg: value}
    return values
