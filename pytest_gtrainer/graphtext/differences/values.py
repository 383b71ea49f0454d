"""What has changed of values that are still there: type, literals, operands, process group, module, tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_gtrainer.graphtext.dataflow import Dataflow, Operand, Value
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.describing import (
    about,
    dtypes,
    kind_of,
    module_of,
    reference_to,
    what,
    where,
    without_dtypes,
)
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight
from pytest_gtrainer.graphtext.statements import HOLE, SYMBOL

_LONGEST = 60
_ITEMS = re.compile(rf"{HOLE}(?:\[-?\d+\])+")


def type_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Types that changed where those of the operands did not; how many follow from these."""
    changed = {new: (was, now) for _, new, was, now in comparison.changed() if was.type != now.type}
    own = [pair for pair in changed.values() if changed.keys().isdisjoint(pair[1].sources)]
    for was, now in own:
        yield _type_remark(was, now)
    if len(changed) > len(own):
        yield Remark(Weight.DTYPE, f"types of {len(changed) - len(own)} values that follow from these changed, too")


def _type_remark(was: Value, now: Value) -> Remark:
    before, after = _shown_type(was), _shown_type(now)
    if without_dtypes(before) == without_dtypes(after):
        old, new = next((a, b) for a, b in zip(dtypes(before), dtypes(after), strict=True) if a != b)
        return Remark(Weight.DTYPE, f"dtype of {what(now)}: {old} became {new}", about(now), f"{old} became {new}")
    gist = "type of inputs" if now.is_input else "type"
    return Remark(Weight.ARGUMENT, f"type of {what(now)}: {_became(before, after)}", about(now), gist)


def _shown_type(value: Value) -> str:
    return value.type.replace(SYMBOL, "?")


def _became(old: str, new: str) -> str:
    """Both from where they differ, if they are long.

    >>> _became("f32[2]", "f32[4]")
    'f32[2] became f32[4]'
    >>> _became("[" + "f32[2], " * 20 + "f32[3]]", "[" + "f32[2], " * 20 + "f32[4]]")
    '…f32[2], f32[2], f32[3]] became …f32[2], f32[2], f32[4]]'
    """
    same = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(same - _LONGEST // 3, 0) if max(len(old), len(new)) > _LONGEST else 0
    return f"{_window(old, start)} became {_window(new, start)}"


def _window(text: str, start: int) -> str:
    shown = ("…" if start else "") + text[start:]
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def argument_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Literals that changed, and operands that are another value than before."""
    for _, _, was, now in comparison.changed():
        is_same = was.arguments == now.arguments and comparison.reads_the_same(was, now)
        if is_same or now.is_input or _own_type_changed(comparison, was, now):
            continue
        if was.arguments != now.arguments or _literals(was) != _literals(now):
            before, after = (_shown_arguments(side) for side in (was, now))
            text = f"arguments of {what(now)}: {_became(before, after)}"
            follows = len(was.operands) != len(now.operands) or _without_items(was) == _without_items(now)
            if not (follows and _is_said(comparison, was, now)):
                yield Remark(Weight.ARGUMENT, text, about(now), f"arguments of {now.operator}")
        elif len(was.operands) == len(now.operands):
            yield from _operand_remarks(comparison, was, now)


def _own_type_changed(comparison: Comparison, was: Value, now: Value) -> bool:
    """Whether the change of type says enough."""
    if was.type == now.type:
        return False
    sources = [(comparison.pairs.to_old[source], source) for source in now.sources]
    return all(
        old is None or comparison.old.values[old].type == comparison.new.values[new].type for old, new in sources
    )


def _without_items(value: Value) -> tuple[str, list[str]]:
    """Arguments as they are whichever output of an operand is read."""
    return _ITEMS.sub(HOLE, value.arguments), _literals(value)


def _literals(value: Value) -> list[str]:
    return [operand for operand in value.operands if isinstance(operand, str)]


def _shown_arguments(value: Value) -> str:
    """The arguments with ``·`` for values and with literals in their places."""
    operands = [operand if isinstance(operand, str) else "·" for operand in value.operands]
    pieces = value.arguments.replace(SYMBOL, HOLE).split(HOLE)
    operands = operands[len(operands) - len(pieces) + 1 :]
    return "".join(f"{piece}{operand}" for piece, operand in zip(pieces, [*operands, ""], strict=True))


def _is_said(comparison: Comparison, was: Value, now: Value) -> bool:
    """Whether a list has other operands because values were lost or gained."""
    return any(comparison.is_said(operand, "") for operand in was.operands) or any(
        comparison.is_said("", operand) for operand in now.operands
    )


def _operand_remarks(comparison: Comparison, was: Value, now: Value) -> Iterator[Remark]:
    pairs = list(zip(was.operands, now.operands, strict=True))
    other = [
        (number, old, new)
        for number, (old, new) in enumerate(pairs, start=1)
        if not comparison.same_operand(old, new) and not comparison.is_said(old, new) and not _is_group(old)
    ]
    if not other:
        return
    number, old, new = other[0]
    shown, before = _shown(comparison.new, new), _shown(comparison.old, old)
    if len(other) > 1 and _is_reordered(comparison, other):
        text = f"operands of {what(now)} are in another order: {shown} where {before} was"
    else:
        more = f" (and {len(other) - 1} more operands)" if len(other) > 1 else ""
        text = f"{what(now)} reads {shown} instead of {before} as operand {number}{more}"
    yield Remark(Weight.OPERAND, text, about(now), "operands")


def _is_reordered(comparison: Comparison, other: Sequence[tuple[int, Operand, Operand]]) -> bool:
    """Whether the same values stand in other places."""
    before = [comparison.pairs.to_new[old] if isinstance(old, int) else old for _, old, _ in other]
    return Counter(before) == Counter(new for _, _, new in other)


def group_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Collectives that go over another process group."""
    for place in comparison.old.users:
        other = comparison.pairs.to_new[place]
        if other is None:
            continue
        was, now = comparison.old.values[place], comparison.new.values[other]
        for old, new in zip(was.operands, now.operands, strict=False):
            if _is_group(old) and _is_group(new) and not comparison.same_operand(old, new):
                before, after = comparison.old.definitions[~old].name, comparison.new.definitions[~new].name  # type: ignore[operator]
                yield _group_remark(now, before, after)


def _is_group(operand: Operand) -> bool:
    return isinstance(operand, int) and operand < 0


def _group_remark(value: Value, old: str, new: str) -> Remark:
    kind = kind_of(value) or value.operator
    name = f"{kind} {module_of(value.scope)}/{value.scope.space}"
    text = f"process group of {name}: {old} became {new}"
    return Remark(Weight.GROUP, text, about(value), f"{kind} {old} became {new}")


def _shown(graph: Dataflow, operand: Operand) -> str:
    if isinstance(operand, int):
        return reference_to(graph.values[operand]) if operand >= 0 else graph.definitions[~operand].name
    return operand if isinstance(operand, str) else "a size"


def module_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Values that belong to another module, bucket or direction."""
    for old, new in comparison.pairs.elsewhere:
        was, now = comparison.old.values[old], comparison.new.values[new]
        if was.scope == now.scope or {was.scope, now.scope} & comparison.explained:
            continue
        text = f"{now.operator} of {where(was.scope)} belongs to {where(now.scope)} now"
        yield Remark(Weight.MODULE, text, about(was), "modules")


def tag_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Recompute policies and other tags."""
    to_new, to_old = comparison.pairs.to_new, comparison.pairs.to_old
    tagged = {old for old in comparison.old.tagged if to_new[old] is not None}
    tagged |= {old for new in comparison.new.tagged if (old := to_old[new]) is not None}
    for old in sorted(tagged):
        was, now = comparison.old.values[old], comparison.new.values[to_new[old]]  # type: ignore[index]
        if was.tags == now.tags:
            continue
        change = f"{was.tags or 'none'} became {now.tags or 'none'}"
        yield Remark(Weight.MODULE, f"tags of {what(now)}: {change}", about(now), change)
