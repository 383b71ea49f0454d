"""Metadata of nodes in graph text: module or bucket, space, name, and tags, written and read.

A node is *unowned* if its metadata names no module, as where autograd accumulates a gradient. Its
module follows from the operands. *Tags* stand beside the type, ``f32[2] | must_save |
custom(stage=1)``:

- a policy of activation checkpointing, from ``meta["recompute"]``;
- ``unowned``: the metadata names no module; that of the heading follows from the operands;
- ``at(path)``: the module of a node in a bucket, if it has one (a bucket of one member keeps its
  own);
- ``chunk(path, 0)``: a node of chunk 0 of the chunked module, or ``chunk(path, split_boundary)``,
  one at its boundary; with ``, eager`` if eager code made the chunks;
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
from pytest_gtrainer.graph import split_path
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import held_as, tensor_content
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
    unexpected,
)

UNOWNED, MISMARKED, HELD_AS = "unowned", "mismarked", "held_as"
TAGS = (UNOWNED, AT, MISMARKED, CHUNK, "custom", HELD_AS, *POLICIES)
OWN_KEY = "module_fqn"
_PLAIN = (bool, int, float, str, type(None))
_SPACE_OF_KIND = {"parameter": "P", "buffer": "B", "input": "I"}
_CALLS = ("call_function", "call_module", "call_method")


@dataclass(slots=True)
class Scopes:
    """The scopes and inputs of a graph."""

    # the scopes of all nodes that have a value
    of: dict[fx.Node, Scope] = field(default_factory=dict)
    # nodes with a line of their own in the schedule, in its order
    computed: list[fx.Node] = field(default_factory=list)
    inputs: dict[fx.Node, InputKey] = field(default_factory=dict)
    unowned: set[fx.Node] = field(default_factory=set)


def is_item(node: fx.Node) -> bool:
    """Return whether a node only takes one output of its operand; it is spelled ``operand[0]``.

    An item with marks that its source lacks has a line of its own. A mark that the item lacks is
    that of its source.
    """
    if node.target is not operator.getitem or node.op != "call_function" or len(node.args) != 2:
        return False
    source, place = node.args
    if type(place) is not int or not isinstance(source, fx.Node):
        return False
    policy, custom = node.meta.get("recompute"), _own_annotations(node)
    return (
        source.op not in ("placeholder", "get_attr")
        and policy in (None, source.meta.get("recompute"))
        and custom in ({}, _own_annotations(source))
        and marks.direction(node) == marks.direction(source)
    )


def _own_annotations(node: fx.Node) -> dict[Any, Any]:
    """Return the annotations of a node, without its module."""
    custom = node.meta.get("custom") or {}
    return {key: value for key, value in custom.items() if key != OWN_KEY}


def is_computed(node: fx.Node) -> bool:
    """Return whether a node has a line of its own in the schedule."""
    return node.op in _CALLS and not is_item(node)


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that a value goes into; items are looked through."""
    for user in node.users:
        if is_item(user):
            yield from users_of(user)
        else:
            yield user


def scopes_of(nodes: Iterable[fx.Node]) -> Scopes:
    """Return where every node that has a value belongs, in one walk."""
    found = Scopes()
    seen: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if is_item(node):
            # It has no line of its own, so it belongs where its source does.
            found.of[node] = found.of.get(node.args[0], NOWHERE)
        elif node.op in _CALLS:
            found.computed.append(node)
            bucket = node.meta.get("fsdp_bucket")
            fqn = marks.node_fqn(node)
            # A bucket has no module of its own: its members are those of several.
            if bucket:
                owners, space = tuple(bucket["plan_fqns"]), bucket["direction"]
                found.of[node] = Scope(owners, space, is_bucket=True)
                continue
            if not fqn and (fqn := _infer_module(node, found.of)):
                found.unowned.add(node)
            found.of[node] = Scope((fqn,), marks.direction(node))
        elif node.op == "placeholder":
            key: tuple[str, str] = ("A", node.meta.get("gt_argument") or str(len(found.inputs)))
            if (source := node.meta.get("gt_input")) is not None:
                key = (_SPACE_OF_KIND[source["kind"]], source["fqn"])
            # Several inputs may have one name; all but the first are numbered.
            found.inputs[node] = InputKey(*key, seen[key])
            seen[key] += 1
            found.of[node] = Scope((".".join(split_path(key[1])[:-1]),), key[0])

    return found


def _infer_module(node: fx.Node, scopes: dict[fx.Node, Scope]) -> str:
    """Return the module that all operands share, or the layer of the last one; "" if none is known.

    Inputs count only where no operand is computed.
    """
    computed: list[Scope] = []
    inputs: list[Scope] = []
    for operand in node.all_input_nodes:
        scope = scopes.get(operand, NOWHERE)
        if scope.is_nowhere:
            continue
        if scope.space in ("fwd", "bwd"):
            computed.append(scope)
        else:
            inputs.append(scope)
    known = computed or inputs
    if not known:
        return ""
    fqns: list[str] = []
    for scope in known:
        fqns += scope.owners
    common = common_parent(fqns)
    if split_layer(common)[0] is not None:
        return common
    for scope in reversed(known):
        if scope.layer is not None:
            return f"{scope.layer.container}.{scope.layer.number}"
    return common


WORDS = RESERVED | {"i", "inf", "nan", "const", "device"} | frozenset(keyword.kwlist)
"""Names that mean something else where a value could stand."""


def names_of(scopes: Scopes, taken: Iterable[str]) -> dict[fx.Node, tuple[Scope, str]]:
    """Return the scope of every computed value and its name there: ``mul``, ``add``, ``mul_1``.

    A name that is a ``WORD`` or ``taken`` gets an underscore, ``is_``.
    """
    words = WORDS | frozenset(taken)
    # By scope the names that are taken, each with how many values have it as their base.
    uses: defaultdict[Scope, dict[str, int]] = defaultdict(dict)
    names: dict[fx.Node, tuple[Scope, str]] = {}
    for node in scopes.computed:
        scope, short = scopes.of[node], operator_of(node).short
        here = uses[scope]
        name = base = f"{short}_" if short in words else short
        # Counting is not enough: an operator may itself be called ``view_1``.
        while name in here:
            here[base] += 1
            name = f"{base}_{here[base] - 1}"
        here[name] = 1
        names[node] = scope, name

    return names


def tags_of(node: fx.Node, unowned: bool, spell: Callable[[str], str]) -> list[str]:
    """Return the tags of a node in a fixed order; ``spell`` spells a path as seen from the line."""
    meta = node.meta
    tags = [UNOWNED] if unowned else []
    if bucket := meta.get("fsdp_bucket"):
        if fqn := marks.node_fqn(node):
            tags.append(f"{AT}({spell(fqn)})")
        if marks.direction(node) != bucket["direction"]:
            tags.append(MISMARKED)

    if (policy := meta.get("recompute")) is not None:
        tags.append(getattr(policy, "name", str(policy)).lower())
    if held := meta.get("gt_held_as") or held_as(meta.get("val")):
        tags.append(f"{HELD_AS}({held!r})")
    custom = meta.get("custom")
    if (constant := meta.get("gt_constant")) is not None:  # of an exported program
        custom = {**(custom or {}), "constant": tensor_content(constant).strip("'")}
    if custom and (len(custom) > 1 or OWN_KEY not in custom):
        if (region := marks.chunk_annotation(custom)) is not None:
            tags.append(f"{CHUNK}({', '.join([spell(region.fqn), *region.words()])})")
            custom = {key: value for key, value in custom.items() if key not in marks.KEYS}
        tags += _annotations(custom)

    return tags


def _annotations(custom: dict[Any, Any]) -> list[str]:
    """Return ``custom(stage=1, **{2: 3})``, the annotations that are literals."""
    spelled: list[str] = []
    odd: dict[Any, Any] = {}
    for key, value in sorted(custom.items(), key=str):
        if key == OWN_KEY or type(key) not in _PLAIN or not _is_literal(value):
            continue
        if isinstance(key, str) and is_word(key):
            spelled.append(f"{key}={value!r}")
        else:
            odd[key] = value

    if odd:
        spelled.append(f"**{odd!r}")
    if not spelled:
        return []
    return [f"custom({', '.join(spelled)})"]


def _is_literal(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_literal, (*value, *value.values())))
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_literal, value)))


def write_tags(
    meta: dict[str, Any], tags: Sequence[ast.expr], place: LinePlace, *, owned: bool
) -> None:
    """Write the tags and the scope of a line into the metadata of its node.

    Raises:
        TextError: this is no tag.
    """
    flags: set[str] = set()
    own_fqn = ""
    region: dict[str, Any] = {}
    custom: dict[str, Any] = {}
    for node in tags:
        match node:
            case ast.Call(ast.Name("at"), [path]):
                own_fqn = path_at(chain(path), place.layer)
            case ast.Call(ast.Name("chunk"), [path, *more]):
                region = _chunk(node, path, more, place)
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
                raise unexpected(node, "a tag like `must_save` or `custom(stage=1)`")

    scope = place.scope
    if (scope.space == "bwd") != (MISMARKED in flags):
        meta["autograd_backward"] = True
    fqn = scope.owners[0] if owned and UNOWNED not in flags else ""
    if scope.is_bucket:
        meta["fsdp_bucket"] = {"plan_fqns": list(scope.owners), "direction": scope.space}
        fqn = own_fqn
    if fqn or custom or region:
        meta["custom"] = ({OWN_KEY: fqn} if fqn else {}) | region | custom


def _chunk(
    node: ast.expr, path: ast.expr, more: Sequence[ast.expr], place: LinePlace
) -> dict[str, Any]:
    """Return the annotation of ``chunk(path, 0)`` or ``chunk(path, split_boundary, eager)``."""
    words: list[Any] = []
    for word in more:
        words.append(word.id if isinstance(word, ast.Name) else getattr(word, "value", None))
    boundaries = (marks.SPLIT_BOUNDARY, marks.MATERIALIZATION)
    is_known = words and (type(words[0]) is int or words[0] in boundaries)
    if not is_known or words[1:] not in ([], [marks.EAGER]):
        raise unexpected(node, "`chunk(path, 0)` or `chunk(path, split_boundary)`")
    producer = marks.EAGER if words[1:] else marks.GRAPH
    fqn = path_at(chain(path), place.layer)
    if type(words[0]) is int:
        return marks.annotation(fqn, marks.BODY, producer, words[0])
    return marks.annotation(fqn, words[0], producer, None)


class _Numbers(ast.NodeTransformer):
    """Replaces the numbers that Python has no literal for, as ``literal_eval`` refuses names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in ("inf", "nan"):
            return node
        return ast.copy_location(ast.Constant(float(node.id)), node)


def _annotations_at(keywords: Sequence[ast.keyword]) -> dict[str, Any]:
    """Return the values of ``custom(stage=1, **{2: 3})``."""
    values: dict[str, Any] = {}
    for item in keywords:
        try:
            value = ast.literal_eval(_Numbers().visit(item.value))
        except (ValueError, TypeError):
            raise unexpected(item.value, "a literal") from None
        if item.arg is not None:
            values[item.arg] = value
        elif isinstance(value, dict):
            values |= value
        else:
            raise unexpected(item.value, "a table like `**{2: 3}`")

    return values
