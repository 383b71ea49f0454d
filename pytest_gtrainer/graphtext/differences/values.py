"""What has changed but its place: values that are still there, operators lost and gained, inputs, outputs, the head.

Of a value: type, literals, operands, process group, module, tags. Of operators: how many, by module, and of
collectives in all. Of the boundary: inputs, outputs, process groups, symbols, conventions.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter

from pytest_gtrainer.graphtext.dataflow import HOLE, SYMBOL, Dataflow, Definition, Operand, Result, Value
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.remarks import (
    NAMESPACE,
    Remark,
    Weight,
    about,
    dtypes,
    is_collective,
    kind_of,
    listed,
    module_of,
    reference_to,
    what,
    where,
    without_dtypes,
)
from pytest_gtrainer.graphtext.equivalence import short_name
from pytest_gtrainer.graphtext.sections import Scope

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
    olds, news = dtypes(before), dtypes(after)
    if len(olds) == len(news) and without_dtypes(before) == without_dtypes(after):
        old, new = next((a, b) for a, b in zip(olds, news, strict=True) if a != b)
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
    for old, new in comparison.pairs.places:
        was, now = comparison.old.values[old], comparison.new.values[new]
        if was.tags != now.tags:
            change = f"{was.tags or 'none'} became {now.tags or 'none'}"
            yield Remark(Weight.MODULE, f"tags of {what(now)}: {change}", about(now), change)


def operator_remarks(comparison: Comparison) -> Iterator[Remark]:
    """What values were lost and gained, by module; collectives of changed buckets are told there."""
    old, new, pairs = comparison.old, comparison.new, comparison.pairs
    by_scope: dict[Scope, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for verb, graph, places in (("lost", old, pairs.lost(old)), ("gained", new, pairs.gained(new))):
        for place in places:
            value = graph.values[place]
            if value.scope in comparison.explained and (value.scope.is_bucket or is_collective(value)):
                continue
            by_scope[value.scope][verb][value.operator] += 1
    for scope, changes in by_scope.items():
        told = ", ".join(f"{verb} {_counted(counts)}" for verb, counts in changes.items())
        yield Remark(Weight.OPERATOR, f"{where(scope)}: {told}", scope.owners[0], told)


def _counted(counts: Counter[str]) -> str:
    return listed([f"{count} {operator}" if count > 1 else operator for operator, count in counts.items()], 4)


def collective_remarks(comparison: Comparison) -> Iterator[Remark]:
    """How many of each collective there are, where that has changed."""
    old, new = _collectives(comparison.old), _collectives(comparison.new)
    for name in dict.fromkeys([*old, *new]):
        if old[name] != new[name]:
            yield Remark(Weight.COLLECTIVE, f"{name}: {old[name]} became {new[name]}")


def _collectives(graph: Dataflow) -> Counter[str]:
    counts: Counter[str] = Counter()
    for operator, count in Counter(map(attrgetter("operator"), graph.values)).items():
        if operator.startswith(NAMESPACE):
            counts[short_name(operator)] += count
    return counts


def boundary_remarks(comparison: Comparison) -> Iterator[Remark]:
    """What a graph takes, returns, and says at its head."""
    yield from _definitions(comparison)
    yield from _inputs(comparison)
    yield from _outputs(comparison)


_KINDS = {"group": "process group", "size": "symbol"}


def _definitions(comparison: Comparison) -> Iterator[Remark]:
    old, new = comparison.old.definitions, comparison.new.definitions
    for place, was in enumerate(old):
        kind = _KINDS.get(was.kind, was.kind)
        if place not in comparison.definitions:
            yield Remark(Weight.GROUP, f"lost {kind} {_shown_definition(was)}")
        elif was.content != (now := new[comparison.definitions[place]]).content:
            yield Remark(Weight.GROUP, f"{kind} {now.name}: {was.content} became {now.content}")
    kept = set(comparison.definitions.values())
    for place, now in enumerate(new):
        if place not in kept:
            yield Remark(Weight.GROUP, f"gained {_KINDS.get(now.kind, now.kind)} {_shown_definition(now)}")


def _shown_definition(definition: Definition) -> str:
    return f"{definition.name} = {definition.content}" if definition.content else definition.name


def _inputs(comparison: Comparison) -> Iterator[Remark]:
    sides = zip(("lost", "gained"), (comparison.old, comparison.new), comparison.pairs.left, strict=True)
    for verb, graph, left in sides:
        for value in map(graph.values.__getitem__, left):
            if value.is_input:
                yield Remark(Weight.BOUNDARY, f"{verb} {what(value)}", about(value), f"{verb} {value.scope.space}")
    to_new = comparison.pairs.to_new
    places = [new for old in comparison.old.inputs if (new := to_new[old]) is not None]
    if places != sorted(places):
        yield Remark(Weight.BOUNDARY, "inputs stand in another order")


def _outputs(comparison: Comparison) -> Iterator[Remark]:
    old, new = _named(comparison.old), _named(comparison.new)
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            verb = "gained" if was is None else "lost"
            yield Remark(Weight.BOUNDARY, f"{verb} output {name}", name, f"{verb} output")
            continue
        is_same = was.arguments == now.arguments and comparison.same_operands(was.operands, now.operands)
        pairs = list(zip(was.operands, now.operands, strict=False))
        if not is_same and (len(was.operands) != len(now.operands) or not all(comparison.is_said(*p) for p in pairs)):
            after, before = _shown_result(comparison.new, now), _shown_result(comparison.old, was)
            text = f"output {name} is {after} instead of {before}"
            yield Remark(Weight.BOUNDARY, text, name, "output")
    common = [name for name in old if name in new]
    if common != [name for name in new if name in old]:
        yield Remark(Weight.BOUNDARY, "outputs stand in another order")


def _named(graph: Dataflow) -> dict[str, Result]:
    """The results by their names or positions."""
    named: dict[str, Result] = {}
    for position, result in enumerate(graph.results):
        name = result.name or str(position)
        named[name if name not in named else f"{name}#{position}"] = result
    return named


def _shown_result(graph: Dataflow, result: Result) -> str:
    """What is returned, as an operand is called."""
    text = result.arguments
    for operand in result.operands:
        if isinstance(operand, int) and operand >= 0:
            spelled = reference_to(graph.values[operand])
        else:
            spelled = str(operand)
        text = text.replace("\0", spelled, 1)
    return text
