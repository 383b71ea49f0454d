"""What a line says of a value beside its type: ``f32[2] | must_save | custom(stage=1)``.

- a policy of activation checkpointing, from ``meta["recompute"]``;
- ``unowned``: no module is said, the heading's follows from the operands;
- ``at(path)``: the module of a node in a bucket, where it has one (a bucket of one member keeps its own);
- ``chunk(path, 0)``: the part that chunk 0 of the chunked module has, or ``chunk(path, split_boundary)``, what
  stands at its boundary; with ``, eager`` where eager code made the chunks;
- ``mismarked``: a node in a bucket of one direction that carries the mark of the other;
- ``custom(...)``: annotations of the user's own, from ``meta["custom"]``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from pytest_gtrainer._torch.graph_text import POLICIES
from pytest_gtrainer.graph import chunks
from pytest_gtrainer.graph.nodes import direction, node_fqn
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.sections import is_word
from pytest_gtrainer.graphtext.syntax import AT, CHUNK, LinePlace, chain, path_at, refuse, shown

UNOWNED = "unowned"
MISMARKED = "mismarked"
TAGS = (UNOWNED, AT, MISMARKED, CHUNK, "custom", *POLICIES)
_PLAIN = (bool, int, float, str, type(None))
OWN_KEY = "module_fqn"


def has_tags(meta: Mapping[str, Any], fqn: str, space: str) -> bool:
    """Whether the metadata of a computed value of ``fqn``, made in ``space``, may say more than these; most do not."""
    custom = meta.get("custom")
    if custom is not None and (len(custom) > 1 or OWN_KEY not in custom):
        return True
    bucket = meta.get("fsdp_bucket") or {}
    return "recompute" in meta or (bool(bucket) and (fqn != "" or space != bucket["direction"]))


def tags_of(node: fx.Node, unowned: bool, spell: Callable[[str], str]) -> list[str]:
    """The tags of a computed node, in a fixed order; ``spell`` spells a module path as seen from the line."""
    meta = node.meta
    tags = [UNOWNED] if unowned else []
    bucket = meta.get("fsdp_bucket")
    if bucket:
        tags += [f"{AT}({spell(fqn)})"] if (fqn := node_fqn(node)) else []
        tags += [MISMARKED] if direction(node) != bucket["direction"] else []
    policy = meta.get("recompute")
    if policy is not None:
        tags.append(getattr(policy, "name", str(policy)).lower())
    custom = meta.get("custom")
    if custom and (len(custom) > 1 or OWN_KEY not in custom):
        region = chunks.told_by(custom)
        if region is not None:
            tags.append(f"{CHUNK}({', '.join([spell(region.fqn), *region.words()])})")
            custom = {key: value for key, value in custom.items() if key not in chunks.KEYS}
        tags += _annotations(custom)
    return tags


def _annotations(custom: dict[Any, Any]) -> list[str]:
    """Annotations that a text can hold; other values are left out."""
    told = {key: custom[key] for key in custom if key != OWN_KEY and type(key) in _PLAIN and _is_literal(custom[key])}
    if not told:
        return []
    words = sorted(key for key in told if isinstance(key, str) and is_word(key))
    spelled = [f"{key}={told[key]!r}" for key in words]
    odd = {key: value for key, value in sorted(told.items(), key=str) if key not in words}
    return [f"custom({', '.join([*spelled, f'**{odd!r}'] if odd else spelled)})"]


def _is_literal(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_literal(item) for item in value)
    return type(value) in _PLAIN


# -- reading


def write_tags(meta: dict[str, Any], tags: Sequence[ast.expr], place: LinePlace, *, owned: bool) -> None:
    """Write what a line's tags and scope say into the metadata of its node.

    Raises:
        TextError: one of them is no tag.
    """
    mismarked, own_fqn = False, ""
    told: dict[str, Any] = {}
    custom: dict[str, Any] = {}
    for node in tags:
        name, arguments = (node.func, node.args) if isinstance(node, ast.Call) else (node, None)
        kind = name.id if isinstance(name, ast.Name) else ""
        if kind == AT and arguments and len(arguments) == 1:
            own_fqn = path_at(chain(arguments[0]))(place.layer)
        elif kind == CHUNK and arguments is not None:
            told = _chunk(node, arguments, place)
        elif not kind or arguments:
            raise refuse(node, f"expected a tag like `must_save` or `custom(stage=1)`, found `{shown(node)}`")
        elif kind == "custom":
            custom |= _annotations_at(node.keywords if isinstance(node, ast.Call) else [])
        elif kind == UNOWNED:
            owned = False
        elif kind == MISMARKED:
            mismarked = True
        elif kind in POLICIES:
            meta["recompute"] = POLICIES[kind]
        else:
            raise refuse(node, f"`{kind}` is no tag{nearest(kind, TAGS)}")
    scope = place.scope
    if (scope.space == "bwd") != mismarked:
        meta["autograd_backward"] = True
    fqn = scope.owners[0] if owned else ""
    if scope.is_bucket:
        meta["fsdp_bucket"] = {"plan_fqns": list(scope.owners), "direction": scope.space}
        fqn = own_fqn
    if fqn or custom or told:
        meta["custom"] = ({OWN_KEY: fqn} if fqn else {}) | told | custom


def _chunk(node: ast.expr, arguments: Sequence[ast.expr], place: LinePlace) -> dict[str, Any]:
    """``chunk(path, 0)``, ``chunk(path, split_boundary, eager)``."""
    words: list[Any] = []
    for word in arguments[1:]:
        words.append(word.id if isinstance(word, ast.Name) else getattr(word, "value", None))
    boundaries = (chunks.SPLIT_BOUNDARY, chunks.MATERIALIZATION)
    known = len(words) in (1, 2) and (type(words[0]) is int or words[0] in boundaries)
    if not known or words[1:] not in ([], [chunks.EAGER]):
        raise refuse(node, f"expected `chunk(path, 0)` or `chunk(path, split_boundary)`, found `{shown(node)}`")
    return chunks.told_in_words(path_at(chain(arguments[0]))(place.layer), *words)


class _Numbers(ast.NodeTransformer):
    """The numbers that Python has no literal for."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(float(node.id)), node) if node.id in ("inf", "nan") else node


def _annotations_at(keywords: Sequence[ast.keyword]) -> dict[str, Any]:
    """``custom(stage=1, **{2: 3})``."""
    values: dict[str, Any] = {}
    for item in keywords:
        try:
            value = ast.literal_eval(_Numbers().visit(item.value))
        except (ValueError, TypeError):
            raise refuse(item.value, f"expected a literal, found `{shown(item.value)}`") from None
        values |= value if item.arg is None and isinstance(value, dict) else {str(item.arg): value}
    return values
