"""Remarks on values that are still there, operators, inputs, outputs, the head, and the schedule.

Compute that keeps its order is the ruler of moves: a launch or a wait has moved if another number
of its operators stands before it. Operators that only serve a collective (casts of parameters,
packing) move with it and get no remark.
"""

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from pytest_gtrainer.facts import counted, spell_some
from pytest_gtrainer.graphtext.dataflow import HOLE, SYMBOL, Dataflow, Operand, Result, Value
from pytest_gtrainer.graphtext.differences import remarks
from pytest_gtrainer.graphtext.differences.comparison import Comparison, own
from pytest_gtrainer.graphtext.differences.remarks import (
    Remark,
    Weight,
    about,
    communicates,
    reference_to,
    what,
)
from pytest_gtrainer.graphtext.equivalence import bare_name
from pytest_gtrainer.graphtext.folding import rising, rising_pairs
from pytest_gtrainer.graphtext.sections import Scope

_LONGEST = 60
_ITEMS = re.compile(rf"{HOLE}(?:\[-?\d+\])+")
_DTYPE = re.compile(r"\b[a-z]+\d\w*(?=\[)")


def type_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield types that changed although those of the operands did not; then how many follow."""
    changed: dict[int, tuple[Value, Value]] = {}
    for new, was, now in comparison.changed():
        if was.type != now.type:
            changed[new] = (was, now)

    following = 0
    for was, now in changed.values():
        if not changed.keys().isdisjoint(now.sources):
            following += 1
            continue
        before, after = was.type.replace(SYMBOL, "?"), now.type.replace(SYMBOL, "?")
        olds, news = _DTYPE.findall(before), _DTYPE.findall(after)
        # If the shape is another one, too, the whole type is shown.
        if len(olds) == len(news) and _DTYPE.sub("_", before) == _DTYPE.sub("_", after):
            change = next(f"{a} became {b}" for a, b in zip(olds, news, strict=True) if a != b)
            yield Remark(Weight.DTYPE, f"dtype of {what(now)}: {change}", about(now), change)
        else:
            gist = "type of inputs" if now.is_input else "type"
            yield Remark(
                Weight.ARGUMENT, f"type of {what(now)}: {_became(before, after)}", about(now), gist
            )

    if following:
        text = f"types of {following} values that follow from these changed, too"
        yield Remark(Weight.DTYPE, text)


def _became(old: str, new: str) -> str:
    """Return ``OLD became NEW``; long texts begin shortly before they differ."""
    start = 0
    if max(len(old), len(new)) > _LONGEST:
        start = max(remarks.same_start(old, new) - _LONGEST // 3, 0)
    prefix = "…" if start else ""
    before = remarks.cut(prefix + old[start:], _LONGEST)
    after = remarks.cut(prefix + new[start:], _LONGEST)
    return f"{before} became {after}"


def argument_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield literals that changed, and operands that are another value than before."""
    for _, was, now in comparison.changed():
        same_text = was.arguments == now.arguments
        same_operands = comparison.same_operands(was.operands, now.operands)
        if (same_text and same_operands) or now.is_input:
            continue
        if was.type != now.type and _operand_types_are_equal(comparison, now):
            continue  # ``type_remarks`` reports it
        literals = [operand for operand in was.operands if isinstance(operand, str)]
        same_literals = literals == [one for one in now.operands if isinstance(one, str)]
        same_count = len(was.operands) == len(now.operands)
        if same_text and same_literals:
            if same_count:
                yield from _operand_remarks(comparison, was, now)
            continue
        # Another number of operands, or other outputs of one, may follow from a lost operator.
        same_holes = _ITEMS.sub(HOLE, was.arguments) == _ITEMS.sub(HOLE, now.arguments)
        if not same_count or (same_holes and same_literals):
            if any(comparison.is_explained(operand, "") for operand in was.operands):
                continue
            if any(comparison.is_explained("", operand) for operand in now.operands):
                continue

        before, after = _spell_arguments(was), _spell_arguments(now)
        moved = sorted(before.split(", ")) == sorted(after.split(", "))
        order = " are in another order" if moved else ""
        text = f"arguments of {what(now)}{order}: {_became(before, after)}"
        yield Remark(Weight.ARGUMENT, text, about(now), f"arguments of {now.operator}")


def _operand_types_are_equal(comparison: Comparison, now: Value) -> bool:
    """Return whether no operand of a new value has another type than its partner."""
    for source in now.sources:
        old = comparison.to_old[source]
        if old is None:
            continue
        if comparison.old.values[old].type != comparison.new.values[source].type:
            return False
    return True


def _spell_arguments(value: Value) -> str:
    """Return the arguments with ``·`` for values and with literals in their places."""
    pieces = value.arguments.replace(SYMBOL, HOLE).split(HOLE)
    holes = len(pieces) - 1
    shown = pieces[0]
    for operand, piece in zip(
        value.operands[len(value.operands) - holes :], pieces[1:], strict=True
    ):
        shown += (operand if isinstance(operand, str) else "·") + piece
    return shown


def _operand_remarks(comparison: Comparison, was: Value, now: Value) -> Iterator[Remark]:
    """Yield one remark for the operands of a value that are another value than before."""
    other: list[tuple[int, Operand, Operand]] = []
    # What was read in these places, by its partner in the new graph, and what is read now.
    moved: Counter[Operand | None] = Counter()
    arrived: Counter[Operand | None] = Counter()
    for number, (old, new) in enumerate(zip(was.operands, now.operands, strict=True), start=1):
        is_reported = comparison.same_operand(old, new) or comparison.is_explained(old, new)
        if not is_reported and not _is_definition(old):  # ``group_remarks`` reports definitions
            other.append((number, old, new))
            moved[comparison.to_new[old] if isinstance(old, int) else old] += 1
            arrived[new] += 1

    if not other:
        return
    number, old, new = other[0]
    shown, before = _spell_operand(comparison.new, new), _spell_operand(comparison.old, old)
    text = f"{what(now)} reads {shown} instead of {before} as operand {number}"
    if len(other) > 1:
        text += f" (and {counted(len(other) - 1, 'more operand')})"
        if moved == arrived:
            text = f"operands of {what(now)} are in another order: {shown} where {before} was"

    yield Remark(Weight.OPERAND, text, about(now), "operands")


def _is_definition(operand: Operand) -> bool:
    return isinstance(operand, int) and operand < 0


def _spell_operand(graph: Dataflow, operand: Operand) -> str:
    """Return an operand as a reader of a sentence needs it."""
    if isinstance(operand, str):
        return operand
    if not isinstance(operand, int):
        return f"size {operand.number} of {_spell_operand(graph, operand.value)}"
    if operand < 0:
        return graph.definitions[~operand].name
    return reference_to(graph.values[operand])


def group_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield collectives that go over another process group, and uses of other definitions."""
    for place in comparison.old.users:
        other = comparison.to_new[place]
        if other is None:
            continue
        was, now = comparison.old.values[place], comparison.new.values[other]
        for old, new in zip(was.operands, now.operands, strict=False):
            if not isinstance(new, int) or not (_is_definition(old) and _is_definition(new)):
                continue
            if not comparison.same_operand(old, new):
                kind = remarks.kind_of(now) or now.operator
                before = _spell_operand(comparison.old, old)
                change = f"{before} became {_spell_operand(comparison.new, new)}"
                defines = comparison.new.definitions[~new].kind
                if defines == "group":
                    where = f"{kind} {remarks.module_of(now.scope)}/{now.scope.space}"
                else:
                    where = what(now)
                text = f"{_KINDS.get(defines, defines)} of {where}: {change}"
                yield Remark(Weight.GROUP, text, about(now), f"{kind} {change}")


def annotation_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield values in another module, bucket or direction; then changed tags."""
    for old, new in comparison.elsewhere:
        was, now = comparison.old.values[old], comparison.new.values[new]
        if was.scope != now.scope and not {was.scope, now.scope} & comparison.explained:
            text = (
                f"{now.operator} of {remarks.where(was.scope)} belongs to "
                f"{remarks.where(now.scope)} now"
            )
            yield Remark(Weight.MODULE, text, about(was), "modules")

    for old, new in comparison.places:
        was, now = comparison.old.values[old], comparison.new.values[new]
        if was.tags != now.tags:
            change = f"{was.tags or 'none'} became {now.tags or 'none'}"
            yield Remark(Weight.MODULE, f"tags of {what(now)}: {change}", about(now), change)


def operator_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield lost and gained operators by module, but not collectives of changed buckets."""
    by_scope: dict[Scope, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for verb, value in comparison.lost_and_gained():
        # A remark on the bucket says it already.
        is_explained = value.scope in comparison.explained
        if is_explained and (value.scope.is_bucket or communicates(value)):
            continue
        if not value.is_input:
            by_scope[value.scope][verb][value.operator] += 1

    for scope, changes in by_scope.items():
        parts = []
        for verb, counts in changes.items():
            names = [f"{count} {name}" if count > 1 else name for name, count in counts.items()]
            parts.append(f"{verb} {spell_some(names, 4)}")
        gist = ", ".join(parts)
        yield Remark(Weight.OPERATOR, f"{remarks.where(scope)}: {gist}", scope.owners[0], gist)


def collective_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield changed numbers of a kind of collective."""
    counts = []
    for graph in (comparison.old, comparison.new):
        collectives = filter(communicates, graph.values)
        counts.append(Counter(bare_name(value.operator) for value in collectives))
    old, new = counts
    for name in dict.fromkeys([*old, *new]):
        if old[name] != new[name]:
            yield Remark(Weight.COLLECTIVE, f"{name}: {old[name]} became {new[name]}")


_KINDS = {"group": "process group", "size": "symbol", "module": "called"}


def definition_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield changes of definitions in the head."""
    old, new = comparison.old.definitions, comparison.new.definitions
    kept = comparison.definitions
    for place, other in sorted(kept.items()):
        was, now = old[place], new[other]
        if was.content != now.content:
            kind = _KINDS.get(was.kind, was.kind)
            yield Remark(Weight.GROUP, f"{kind} {now.name}: {was.content} became {now.content}")
    for verb, definitions, known in (("lost", old, kept), ("gained", new, set(kept.values()))):
        for place, (name, kind, content) in enumerate(definitions):
            if place not in known:
                text = " = ".join(filter(None, (name, content)))
                yield Remark(Weight.GROUP, f"{verb} {_KINDS.get(kind, kind)} {text}")


def input_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield changes of the inputs."""
    for verb, value in comparison.lost_and_gained():
        if value.is_input:
            gist = f"{verb} {value.scope.space}"
            yield Remark(Weight.BOUNDARY, f"{verb} {what(value)}", about(value), gist)
    places = []
    for old in comparison.old.inputs:
        new = comparison.to_new[old]
        if new is not None:
            places.append(new)
    if places != sorted(places):
        yield Remark(Weight.BOUNDARY, "inputs are in another order")


def output_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield changes of the outputs."""
    old, new = _results_by_name(comparison.old), _results_by_name(comparison.new)
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            verb = "gained" if was is None else "lost"
            yield Remark(Weight.BOUNDARY, f"{verb} output {name}", name, f"{verb} output")
            continue
        same_operands = comparison.same_operands(was.operands, now.operands)
        if was.arguments == now.arguments and same_operands:
            continue
        # Operands that were lost or replaced have remarks of their own.
        pairs = zip(was.operands, now.operands, strict=False)
        is_explained = all(comparison.is_explained(*pair) for pair in pairs)
        if len(was.operands) != len(now.operands) or not is_explained:
            after, before = _spell_result(comparison.new, now), _spell_result(comparison.old, was)
            text = f"output {name} is {after} instead of {before}"
            yield Remark(Weight.BOUNDARY, text, name, "output")

    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield Remark(Weight.BOUNDARY, "outputs are in another order")


def _results_by_name(graph: Dataflow) -> dict[str, Result]:
    """Return the outputs by name, else by position; of two with one name the second is numbered."""
    named: dict[str, Result] = {}
    for position, result in enumerate(graph.results):
        name = result.name or str(position)
        if name in named:
            name = f"{name}#{position}"
        named[name] = result
    return named


def _spell_result(graph: Dataflow, result: Result) -> str:
    text = result.arguments
    for operand in result.operands:
        text = text.replace(HOLE, _spell_operand(graph, operand), 1)
    return text


_Places = Sequence[tuple[int, int]]
_MOST_OF_LAYER = 2 / 3  # the part of a layer's compute that is called most of it


def move_remarks(comparison: Comparison) -> Iterator[Remark]:
    """Yield moves of collectives, then of compute; if there are none, of anything else."""
    values = comparison.old.values
    pairs = [pair for pair in comparison.places if values[pair[0]].operator]
    kept = set(rising([new for _, new in pairs]))
    if len(kept) == len(pairs):
        return
    serving = _serving(comparison.old)
    compute = [pair for pair in pairs if not serving[pair[0]]]
    ruler = _Ruler(comparison.old, compute)
    moves = list(_event_moves(comparison, ruler))
    for place, now in compute:  # what is the same but for what it reads
        if ruler.has_passed(place, now) and own(values[place]) == own(comparison.new.values[now]):
            text = ruler.way(place, now, what(values[place]))
            moves.append(Remark(Weight.REST, text, about(values[place]), "compute"))

    yield from moves
    if not moves:  # casts, packing and unpacking that moved on their own
        moved = [values[old] for place, (old, _) in enumerate(pairs) if place not in kept]
        text = f"{what(moved[0])} is in another place"
        if len(moved) > 1:
            text += f" (and {counted(len(moved) - 1, 'more operator')})"
        yield Remark(Weight.REST, text, about(moved[0]))


def _serving(graph: Dataflow) -> list[bool]:
    """Return for each value whether it is a collective, in a bucket, or made of parameters only."""
    prepared: list[bool] = []
    serving: list[bool] = []
    for value in graph.values:
        is_communicated = communicates(value) or value.scope.is_bucket
        if value.is_input:
            is_prepared = value.scope.space == "P"
        else:
            is_prepared = bool(value.sources) and all(prepared[source] for source in value.sources)
        # What a collective gives is no longer a preparation of one.
        prepared.append(is_prepared and not is_communicated)
        serving.append(is_communicated or is_prepared)
    return serving


class _Ruler:
    """Compute in one order on both sides: its places, layers, and the bounds of each layer."""

    def __init__(self, graph: Dataflow, compute: _Places) -> None:
        self.graph = graph
        self.old: list[int] = []
        self.new: list[int] = []
        for place, now in rising_pairs(compute):
            self.old.append(place)
            self.new.append(now)
        self.units = [remarks.unit_of(graph.values[place].scope) for place in self.old]
        self.stretches: list[tuple[int, int]] = []
        for _, members in itertools.groupby(self.units):
            first, length = len(self.stretches), len(list(members))
            self.stretches += [(first, first + length)] * length

    def has_passed(self, place: int, now: int) -> bool:
        return bisect.bisect(self.old, place) != bisect.bisect(self.new, now)

    def way(self, place: int, now: int, subject: str) -> str:
        """Return that ``subject`` moved past the neighbouring layer of which it passed more."""
        was, stands = bisect.bisect(self.old, place), bisect.bisect(self.new, now)
        start, end = sorted((was, stands))
        side, mark = ("behind", end - 1) if stands > was else ("before", start)

        def passed(bounds: tuple[int, int]) -> int:
            return min(bounds[1], end) - max(bounds[0], start)

        most = self.stretches[mark]
        other = most[0] - 1 if side == "behind" else most[1]
        if start <= other < end:
            most = max(most, self.stretches[other], key=passed)
        unit, part = self.units[most[0]], passed(most) / (most[1] - most[0])
        value, last = self.graph.values[place], self.graph.values[self.old[mark]]
        # An operator of this layer cannot move past its layer; it moved past a neighbour in it.
        is_of_unit = not communicates(value) and remarks.unit_of(value.scope) == unit
        if part > _MOST_OF_LAYER and unit and not is_of_unit:
            return f"{subject} moved {side} {'' if part == 1 else 'most of '}the compute of {unit}"
        if subject == what(last):
            return f"{reference_to(value)} moved {side} {reference_to(last)}"
        return f"{subject} moved {side} {what(last)}"


def _event_moves(comparison: Comparison, ruler: _Ruler) -> Iterator[Remark]:
    """Yield launches and waits that passed compute, then those that only passed one another."""
    values, events = comparison.old.values, remarks.events_of(comparison.old)
    still: dict[str, list[tuple[int, int]]] = {"launch": [], "wait": []}
    for place, event in events.items():
        now = comparison.to_new[place]
        if now is None:
            continue
        if not ruler.has_passed(place, now):
            still[event.step].append((place, now))
            continue
        text = ruler.way(place, now, str(event))
        side = "behind" if " moved behind " in text else "before"
        gist = f"{event.step} {event.collective.split()[0]} {side}"
        yield Remark(Weight.MOVE, text, about(values[place]), gist)

    launches, waits = still["launch"], still["wait"]
    # Launches and waits that kept their order are the rulers for one another.
    held = rising_pairs(waits)
    passed = list(_passed(launches, held))
    if not passed:
        passed = [*_passed(waits, held), *_passed(launches, rising_pairs(launches))]
    for place, side, other in passed:
        step, collective = event = events[place]
        text = f"{event} moved {side} the {events[other]}"
        gist = f"{step} {collective.split()[0]} {side} event"
        yield Remark(Weight.MOVE, text, about(values[place]), gist)


def _passed(events: _Places, held: _Places) -> Iterator[tuple[int, str, int]]:
    """Yield each event that passed ``held`` ones, the side, and the last one that it passed."""
    old, new = [place for place, _ in held], [now for _, now in held]
    for place, now in events:
        was, stands = bisect.bisect(old, place), bisect.bisect(new, now)
        if stands > was:
            yield place, "behind", old[stands - 1]
        elif stands < was:
            yield place, "before", old[stands]


FINDERS = (
    definition_remarks,
    input_remarks,
    output_remarks,
    group_remarks,
    collective_remarks,
    operator_remarks,
    type_remarks,
    argument_remarks,
    annotation_remarks,
    move_remarks,
)
"""The finders of this module, in the order of their remarks."""
