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

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from pytest_gtrainer._torch.graph_text import POLICIES
from pytest_gtrainer.graph import chunks as chunks
from pytest_gtrainer.graph.nodes import direction, node_fqn
from pytest_gtrainer.graphtext.paths import is_word

UNOWNED = "unowned"
AT = "at"
MISMARKED = "mismarked"
CHUNK = "chunk"
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


def apply_tag(meta: dict[str, Any], name: str, values: dict[str, Any]) -> bool:
    """Write what a tag says back into ``meta``; False if there is no such tag."""
    if name == "custom":
        meta["custom"] = {**meta.get("custom", {}), **values}
    elif name in POLICIES and not values:
        meta["recompute"] = POLICIES[name]
    else:
        return False
    return True
