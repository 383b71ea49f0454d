"""Compare two records of training: the first step, phase, tensor and ranks that differ.

Each rank is compared with its own where both records have the same layout. Otherwise the parts of a
tensor are added up, replicas once, and whole tensors are compared; what each rank has of its own,
as a random state, is then not compared, and said.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pytest_gtrainer.facts import counted, one_line, spell_some
from pytest_gtrainer.numerics.compare import difference_of
from pytest_gtrainer.numerics.record import normalised
from pytest_gtrainer.numerics.verdict import Key
from pytest_gtrainer.over_time.files import Entry, RecordError, Run, Values, values_of
from pytest_gtrainer.over_time.fingerprints import MODULUS

PHASES = ("load", "random", "data", "forward", "loss", "gradient", "clip", "optimiser")
"""The phases of a step, in the order in which one is the cause of the next."""

_FIELDS = ("torch", "python", "device", "threads", "world_size", "model", "every", "compiled")
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor or number that differs, or is on one side only.

    Attributes:
        ranks: the ranks of A that differ; empty if only the whole was compared.
        words: how, as "f32[4] in A, bf16[4] in B".
    """

    step: int
    phase: str
    name: str
    ranks: tuple[int, ...]
    words: str = ""
    sides: tuple[Entry, Entry] | None = None

    def __str__(self) -> str:
        text = f"step {self.step}, {self.phase}: {one_line(self.name)}"
        if self.ranks:
            text += f", rank{'s' * (len(self.ranks) > 1)} {spell_some(self.ranks, 8)}"
        if self.words:
            text += f": {one_line(self.words)}"
        return text


@dataclass(slots=True)
class Comparison:
    """The comparison of two records A and B.

    Attributes:
        surroundings: what differs around the runs, and is said first.
        steps: the steps that both have.
        differences: all differences of the first phase that differs; empty if nothing does.
        counts: of the step that differs, by phase, how many entries differ, and of how many.
        element: lines that name the first element of the first difference, if values were kept.
        notes: what was not compared, and what is missing on either side.
        is_complete: whether both runs ended in order.
    """

    runs: tuple[Run, Run]
    surroundings: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    element: list[str] = field(default_factory=list)
    is_complete: bool = True
    compared: int = 0

    @property
    def status(self) -> int:
        """Return the exit status: 0 for equal, 1 for different or cut."""
        return int(bool(self.differences) or not self.is_complete)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, *, markdown: bool = False) -> Iterator[str]:
        """Yield the lines of the text, or of the page in Markdown."""
        dash = "- " if markdown else ""
        for letter, run in zip("AB", self.runs, strict=True):
            ranks = counted(len(run.headers), "rank")
            steps = f"steps {min(run.steps)} to {max(run.steps)}" if run.steps else "no step"
            yield f"{dash}{letter}: {one_line(str(run.folder))}, {ranks}, {steps}"
        yield from (f"{dash}{one_line(line)}" for line in self.surroundings + self.notes)
        if markdown:
            yield ""
        if not self.differences:
            values, steps = counted(self.compared, "value"), counted(len(self.steps), "step")
            yield f"equal: {values} in {steps}"
            return
        first = self.differences[0]
        bold = "**" if markdown else ""
        yield f"{bold}first difference: {first}{bold}"
        yield from self.element
        for other in self.differences[1:_MOST_SHOWN]:
            yield f"{dash or '  '}{other}"
        if len(self.differences) > _MOST_SHOWN:
            more = counted(len(self.differences) - _MOST_SHOWN, "more difference")
            yield f"{dash or '  '}and {more} in this phase"
        if markdown:
            yield from ("", f"| phase of step {first.step} | differ | of |", "|---|---|---|")
            yield from (f"| {name} | {some} | {all_} |" for name, (some, all_) in self.table())
        else:
            cells = [f"{name} {some} of {all_}" for name, (some, all_) in self.table()]
            yield f"step {first.step} in all, entries that differ: {', '.join(cells)}"

    def table(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the phases of the step that differs, with ``counts``, in order."""
        for phase in PHASES:
            if phase in self.counts:
                yield phase, self.counts[phase]


def compare_runs(a: Run, b: Run, *, at: int | None = None) -> Comparison:
    """Compare two records.

    Args:
        at: the step of A that the first step of B is; by default steps count as recorded.

    Raises:
        RecordError: the records have no step, or no name, in common.
    """
    result = Comparison((a, b), _surroundings(a, b))
    shift = 0
    if at is not None and b.steps:
        shift = at - min(b.steps)
    b_steps = {step + shift: phases for step, phases in b.steps.items()}
    b_steps = _matched(b_steps, "B", result)
    a_steps = _matched(a.steps, "A", result)
    result.steps = sorted(a_steps.keys() & b_steps.keys())
    if not result.steps:
        raise RecordError(f"no step is in both records: {_span(a)} in A, {_span(b)} in B")
    _check_same_model(a_steps, b_steps)
    _note_ends(result, a_steps, b_steps)

    in_a, in_b = _phases_of(a_steps), _phases_of(b_steps)
    for phase in PHASES:
        if (phase in in_a) != (phase in in_b):
            result.notes.append(f"not compared: {phase}, which only {'AB'[phase in in_b]} has")
    skipped: dict[str, set[str]] = {}
    unseeded: set[str] = set()
    for step in result.steps:
        for phase in PHASES:
            if phase not in in_a or phase not in in_b:
                continue
            begins = step in (min(a_steps), min(b_steps))
            left, right = (_entries(steps, step, phase, begins) for steps in (a_steps, b_steps))
            one_sided = _one_sided(phase, step, a_steps, b_steps)
            found = list(_differences(step, phase, left, right, one_sided, skipped))
            if phase == "random" and step == result.steps[0]:
                # Generators that the trainer does not seed begin anywhere.
                unseeded = {each.name for each in found if not each.name.startswith("torch")}
            found = [each for each in found if phase != "random" or each.name not in unseeded]
            number = len(left.keys() | right.keys())
            result.compared += number
            result.counts[phase] = len(found), number
            result.differences = result.differences or found
        if result.differences:
            result.element = _element(a, b, result.differences[0])
            break
        result.counts.clear()
    if unseeded:
        result.notes.append(
            f"random states that differ from the start: {spell_some(sorted(unseeded))}"
        )
    for reason, names in skipped.items():
        result.notes.append(f"not compared, {reason}: {spell_some(sorted(names))}")
    return result


def _span(run: Run) -> str:
    if not run.steps:
        return "none"
    return f"{min(run.steps)} to {max(run.steps)}"


def _surroundings(a: Run, b: Run) -> list[str]:
    lines = []
    sides = a.header, b.header
    for name in _FIELDS:
        left, right = (_spelled(side.get(name)) for side in sides)
        if left != right:
            lines.append(f"other {name}: {left} in A, {right} in B")
    settings = [side.get("settings") or {} for side in sides]
    for name in sorted(settings[0].keys() | settings[1].keys()):
        left, right = (side.get(name, "unknown") for side in settings)
        if left != right:
            lines.append(f"other setting {name}: {left} in A, {right} in B")
    if a.header.get("arguments") != b.header.get("arguments"):
        left, right = (" ".join(map(str, side.get("arguments", ()))) for side in sides)
        lines.append(f"other arguments: {left!r} in A, {right!r} in B")
    return lines


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return spell_some(value) or "nothing"
    return str(value)


def _matched(
    steps: dict[int, dict[str, dict[str, Values]]], letter: str, result: Comparison
) -> dict[int, dict[str, dict[str, Values]]]:
    """Take prefixes of wrappers away from names, unless two names become one."""
    known: set[str] = set()
    for phases in steps.values():
        for named in phases.values():
            # A module may be wrapped after some steps: then both names are never there together.
            if len({normalised(name) for name in named}) < len(named):
                return steps
            known.update(named)
    short = {name: normalised(name) for name in known}
    changed = sorted(name for name in known if short[name] != name)
    if not changed:
        return steps
    result.notes.append(f"names of {letter} without the prefixes of wrappers, as of {changed[0]}")
    renamed: dict[int, dict[str, dict[str, Values]]] = {}
    for step, phases in steps.items():
        renamed[step] = {}
        for phase, named in phases.items():
            renamed[step][phase] = {short[name]: values for name, values in named.items()}
    return renamed


def _check_same_model(a_steps: Any, b_steps: Any) -> None:
    names = []
    for steps in (a_steps, b_steps):
        left = _entries(steps, max(steps), "optimiser", False)
        names.append([name for name in left if "param_groups." not in name])
    if all(names) and set(names[0]).isdisjoint(names[1]):
        raise RecordError(
            "the records are of different models: no name of a tensor is in both, "
            f"{one_line(names[0][0])} in A and {one_line(names[1][0])} in B"
        )


def _note_ends(result: Comparison, a_steps: Any, b_steps: Any) -> None:
    for letter, run in zip("AB", result.runs, strict=True):
        result.notes += [f"{letter}: {note}" for note in run.notes]
        result.is_complete &= not run.notes
    for letter, own in (("A", a_steps.keys() - b_steps.keys()), ("B", b_steps.keys() - a_steps)):
        if own:
            result.notes.append(f"only in {letter}: {counted(len(own), 'step')}, {_runs_of(own)}")


def _runs_of(numbers: set[int]) -> str:
    """
    >>> _runs_of({1, 2, 3, 7})
    '1 to 3, 7'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spell_some([str(a) if a == b else f"{a} to {b}" for a, b in spans], 8)


def _phases_of(steps: dict[int, Any]) -> set[str]:
    return {phase for phases in steps.values() for phase in phases}


def _entries(steps: Any, step: int, phase: str, begins: bool) -> dict[str, Values]:
    """Return what a side has of a phase by name.

    If the other side ``begins`` at this step, this one has loaded what its step before has left.
    """
    own = steps[step].get(phase, {})
    if phase != "load" or step == min(steps) or not begins:
        return own
    left = steps.get(step - 1, {}).get("optimiser", {})
    return {**{n: v for n, v in left.items() if "param_groups." not in n}, **own}


def _one_sided(phase: str, step: int, a_steps: Any, b_steps: Any) -> str:
    """Return the letters of the sides of which a name may be missing on the other side."""
    if phase == "forward":
        return "AB"  # nothing is seen inside of a module that was compiled in place
    begins = "A" * (step == min(a_steps)) + "B" * (step == min(b_steps))
    # The step before has left what its optimiser holds, and no frozen weights.
    return begins if phase == "load" and len(begins) == 1 else ""


def _differences(
    step: int,
    phase: str,
    a: dict[str, Values],
    b: dict[str, Values],
    one_sided: str,
    skipped: dict[str, set[str]],
) -> Iterator[Difference]:
    for name in {**a, **b}:
        if name in a and name in b:
            try:
                yield from _compare_values(step, phase, name, a[name], b[name])
            except _OfOwnRanks as error:
                skipped.setdefault(str(error), set()).add(f"{phase}: {name}")
            continue

        letter = "AB"[name in b]
        if letter in one_sided:
            reason = f"because only {letter} shows it"
            skipped.setdefault(reason, set()).add(f"{phase}: {name}")
        else:
            yield Difference(step, phase, name, (), f"only in {letter}")


class _OfOwnRanks(Exception):
    """Each rank has its own value, and the ranks are others."""


def _compare_values(step: int, phase: str, name: str, a: Values, b: Values) -> Iterator[Difference]:
    kinds = _kinds(a), _kinds(b)
    if kinds[0] != kinds[1]:
        left, right = (spell_some(sorted(kind)) for kind in kinds)
        yield Difference(step, phase, name, tuple(a), f"{left} in A, {right} in B")
        return

    if _layout(a) == _layout(b):
        ranks = tuple(rank for rank in a if a[rank] != b[rank])
        if ranks:
            # Of several calls within the step, the first that differs.
            for sides in zip(a[ranks[0]], b[ranks[0]], strict=True):
                if sides[0] != sides[1]:
                    break
            yield Difference(step, phase, name, ranks, _numbers(*sides), sides)
        return

    wholes = whole_of(a), whole_of(b)
    if wholes[0] is None or wholes[1] is None:
        raise _OfOwnRanks("because each rank has its own and the ranks are others")
    if wholes[0] != wholes[1]:
        yield Difference(step, phase, name, (), "in all, on ranks or calls that are others")


def _kinds(values: Values) -> set[str]:
    return {entry.kind for calls in values.values() for entry in calls}


def _layout(values: Values) -> Any:
    return {rank: [(entry.part, entry.shape) for entry in calls] for rank, calls in values.items()}


def _numbers(left: Entry, right: Entry) -> str:
    """Return two entries in words, if they are numbers."""
    if left.shape or len(left.numbers) != 1:
        return ""
    return f"{left.numbers[0]} in A, {right.numbers[0]} in B"


def _element(a: Run, b: Run, difference: Difference) -> list[str]:
    """Return lines that name the first element that differs, if both sides have kept values."""
    if difference.sides is None or difference.sides[0].part == "rows":
        return []
    rank = difference.ranks[0]
    pair = zip((a, b), difference.sides, strict=True)
    tensors = [values_of(run.folder, rank, entry) for run, entry in pair]
    if tensors[0] is None or tensors[1] is None:
        return []
    found = difference_of(Key(0, 0, "", difference.name), tensors[0], tensors[1])
    if found is None or found.element is None:
        return []
    part = difference.sides[0].part
    offsets = part[0] if isinstance(part, tuple) else [0] * len(found.element)
    place = [offset + index for offset, index in zip(offsets, found.element, strict=True)]
    amount = f"{found.amount} elements of rank {rank} differ"
    return [f"  element {place}: {found.actual} in A, {found.expected} in B; {amount}"]


def whole_of(values: Values) -> Any:
    """Return what does not depend on how ranks share a tensor; None if ranks have their own."""
    calls = list(values.values())
    entries = [entry for each in calls for entry in each]
    if all(entry.part == "rows" for entry in entries):
        return frozenset(row for entry in entries for row in entry.numbers)
    if any(entry.part == "partial" for entry in entries):
        return None
    if all(each == calls[0] for each in calls) and not any(
        isinstance(entry.part, tuple) for entry in entries
    ):
        return [(entry.numbers, entry.shape) for entry in calls[0]]
    totals = []
    for ranks in zip(*calls, strict=False):
        parts: dict[Any, Entry] = {}
        for entry in ranks:
            if not isinstance(entry.part, tuple) or parts.setdefault(entry.part, entry) != entry:
                return None
        covered = sum(prod(sizes) for _, sizes in parts)
        if covered != prod(ranks[0].shape):
            return None
        total = sum(int(entry.numbers[0], 16) for entry in parts.values()) % MODULUS
        totals.append(((f"{total:016x}",), ranks[0].shape))
    return totals
