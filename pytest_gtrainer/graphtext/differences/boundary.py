"""What is not computed: inputs, outputs, process groups, symbols, conventions."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gtrainer.graphtext.dataflow import Dataflow, Definition, Result
from pytest_gtrainer.graphtext.differences.comparison import Comparison
from pytest_gtrainer.graphtext.differences.describing import about, reference_to, what
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight


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
        elif not _is_same(comparison, was, now) and not _is_said(comparison, was, now):
            text = f"output {name} is {_shown(comparison.new, now)} instead of {_shown(comparison.old, was)}"
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


def _is_same(comparison: Comparison, was: Result, now: Result) -> bool:
    return was.arguments == now.arguments and comparison.same_operands(was.operands, now.operands)


def _is_said(comparison: Comparison, was: Result, now: Result) -> bool:
    if len(was.operands) != len(now.operands):
        return False
    return all(comparison.is_said(old, new) for old, new in zip(was.operands, now.operands, strict=True))


def _shown(graph: Dataflow, result: Result) -> str:
    """What is returned, as an operand is called."""
    text = result.arguments
    for operand in result.operands:
        if isinstance(operand, int) and operand >= 0:
            spelled = reference_to(graph.values[operand])
        else:
            spelled = str(operand)
        text = text.replace("\0", spelled, 1)
    return text
