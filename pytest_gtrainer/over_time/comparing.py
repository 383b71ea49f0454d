"""Compare two records of training: the first step, phase, tensor and ranks that differ.

Each rank is compared with its own where both records have the same layout. Otherwise the parts of a
tensor are added up, replicas once, and whole tensors are compared; what each rank has of its own,
as a random state, is then not compared, and said.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, isfinite, prod
from typing import Any

from torch import Tensor

from pytest_gtrainer.facts import counted, one_line, spell_some
from pytest_gtrainer.numerics.compare import difference_of
from pytest_gtrainer.numerics.record import normalised
from pytest_gtrainer.numerics.verdict import Key
from pytest_gtrainer.over_time.files import (
    UNRECORDED,
    Entry,
    RecordedRun,
    RecordError,
    Steps,
    Values,
    values_of,
)
from pytest_gtrainer.over_time.fingerprints import MODULUS

PHASES = ("load", "random", "data", "forward", "loss", "gradient", "clip", "optimiser", "end")
"""The phases of a step, in the order in which one is the cause of the next."""

_FIELDS = (
    *("torch", "python", "device", "threads", "world_size", "model", "optimizers", "every"),
    "compiled",
)
# Phases that begin where the trainer calls "backward" and "step".
_PHASES_WITH_PLACES = ("loss", "gradient", "clip", "optimiser")
# Options that say how a step is computed and not what: their names are no cause of a difference.
_IMPLEMENTATIONS = ("fused", "foreach", "capturable")
_MOST_SHOWN = 8
_JUMP = 100.0
"""Losses part at a step if they are so many times as far apart as at any step before."""
# A change is by one factor if so little of it is left without the factor.
_ONE_FACTOR = 0.01


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
        sizes: lines that say how far apart losses are, and at which step they part; and if values
            were kept, how far each tensor has moved, the furthest first.
        exact: a line on the first of data, random states and options that differs, which rounding
            seldom moves, if the first difference of all may be one.
        places: lines that say where the trainers call what the first phase that differs lies
            between.
        notes: what was not compared, and what is missing on either side.
        is_complete: whether both runs ended in order.
        shorter: which run ends before the other one, in words; "" if both end together, as far as
            the steps that were recorded and what the trainers left show.
        compared: how many entries were compared.
        parameters: names of the phase that differs which have moments, as ``w`` has ``w.exp_avg``.
        dropped: by piece of state that a resumed run did without, the first difference; see
            ``assert_resumes``.
    """

    runs: tuple[RecordedRun, RecordedRun]
    surroundings: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    element: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    exact: str = ""
    places: list[str] = field(default_factory=list)
    is_complete: bool = True
    shorter: str = ""
    compared: int = 0
    parameters: frozenset[str] = frozenset()
    dropped: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Return 0 if all that both runs have is equal, 1 if it differs or a run was cut."""
        return int(bool(self.differences) or not self.is_complete)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def heads(self) -> Iterator[str]:
        """Yield the first lines: both runs, their surroundings, what was not compared."""
        for letter, run in zip("AB", self.runs, strict=True):
            steps = "no step"
            if run.steps:
                steps = f"steps {_span(run.steps)}"
            ranks = counted(len(run.headers), "rank")
            yield f"{letter}: {one_line(str(run.folder))}, {ranks}, {steps}"
        for line in self.surroundings + self.notes:
            yield one_line(line)

    def lines(
        self, *, markdown: bool = False, has_all: bool = False, option: str = ""
    ) -> Iterator[str]:
        """Yield the lines of the text, or of the page in Markdown.

        Args:
            markdown: whether it is a page in Markdown.
            has_all: whether all differences of the phase are listed, and not only the first ones.
            option: of the command that prints the lines, to list all of them.
        """
        dash, indent, bold = "", "  ", ""
        if markdown:
            dash, indent, bold = "- ", "- ", "**"

        for line in self.heads():
            yield f"{dash}{line}"
        if markdown:
            yield ""

        if not self.differences:
            values, steps = counted(self.compared, "value"), counted(len(self.steps), "step")
            alone = 0
            for run in self.runs:
                alone += len(set(run.steps)) - len(self.steps)
            left = f"; {counted(alone, 'step')} compared with nothing" if alone else ""
            yield f"equal: {values} in {steps}{left}"
            if self.shorter and self.is_complete:
                yield f"{dash}not equal to the end: {self.shorter}"
            return

        first, *others = self.differences
        yield f"{bold}first difference: {first}{bold}"
        yield from self.element
        for line in self.places:
            yield f"{indent}{one_line(line)}"
        groups = _by_parameter(others, self.parameters)
        shown = groups
        if not has_all:
            shown = groups[: _MOST_SHOWN - 1]
        for group in shown:
            yield f"{indent}{_join(group, self.parameters)}"
        left_out = sum(map(len, groups[len(shown) :]))
        if left_out:
            hint = f": {option}" if option else ""
            yield f"{indent}and {counted(left_out, 'more difference')} in this phase{hint}"
        for line in (*self.sizes, *filter(None, [self.exact])):
            yield f"{indent}{one_line(line)}"
        yield from self._table(first.step, markdown=markdown)

    def _table(self, step: int, *, markdown: bool) -> Iterator[str]:
        """Yield how many entries differ in each phase of the step."""
        if markdown:
            yield from ("", f"| phase of step {step} | differ | of |", "|---|---|---|")
        cells = []
        for phase in PHASES:
            if phase not in self.counts:
                continue
            differing, number = self.counts[phase]
            cells.append(f"{phase} {differing} of {number}")
            if markdown:
                yield f"| {phase} | {differing} | {number} |"
        if not markdown:
            yield f"step {step} in all, entries that differ: {', '.join(cells)}"


def _parameter_of(name: str, parameters: Collection[str]) -> str:
    """Return the parameter of a moment, or else the name itself.

    >>> [_parameter_of(name, {"0.w"}) for name in ("0.w.exp_avg", "0.w", "0.b")]
    ['0.w', '0.w', '0.b']
    """
    parts = name.split(".")
    for end in range(1, len(parts)):
        if ".".join(parts[:end]) in parameters:
            return ".".join(parts[:end])
    return name


def _by_parameter(
    differences: Sequence[Difference], parameters: Collection[str]
) -> list[list[Difference]]:
    """Put a parameter and its moments together where they differ alike."""
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for each in differences:
        name = _parameter_of(each.name, parameters)
        groups.setdefault((name, each.ranks, each.words), []).append(each)
    return list(groups.values())


def _join(group: Sequence[Difference], parameters: Collection[str]) -> Difference:
    """Return differences of one parameter as one, with the names of all."""
    if len(group) == 1:
        return group[0]
    parameter = _parameter_of(group[0].name, parameters)
    moments = [each.name.removeprefix(f"{parameter}.") for each in group if each.name != parameter]
    name = f"{', '.join(moments)} of {parameter}"
    if len(moments) < len(group):
        name = f"{parameter} and its {', '.join(moments)}"
    return replace(group[0], name=name)


def compare_runs(
    a: RecordedRun, b: RecordedRun, *, at: int | None = None, rounds: bool = False
) -> Comparison:
    """Compare two records.

    Args:
        at: the step of A that the first step of B is; by default steps count as recorded.
        rounds: B adds in another order, so compare only what no sum has rounded: what is loaded,
            inputs, random states, and options of optimisers.

    Raises:
        RecordError: the records have no step, or no name, in common, or are one record.
    """
    # Whoever mistypes a name would read "equal".
    if os.path.samefile(a.folder, b.folder):
        raise RecordError(f"A and B are one folder, {a.folder}: a record is equal to itself")
    result = Comparison((a, b), _surroundings(a, b))
    shift = 0 if at is None or not b.steps else at - min(b.steps)
    a_steps = _matched(a.steps, "A", result)
    b_steps = _matched(_shifted(b.steps, shift), "B", result)
    a_left, b_left = _renamed(a.left), _renamed(_shifted(b.left, shift))
    result.steps = sorted(a_steps.keys() & b_steps.keys())
    if not result.steps:
        spans = f"{_span(a_steps)} in A, {_span(b_steps)} in B"
        raise RecordError(f"no step is in both records: {spans}")
    _check_same_model(a_steps, b_steps)
    _note_ends(result, a_steps, b_steps)
    _note_what_was_left(result, a_left, b_left)

    comparing = _Comparing(result, a_steps, b_steps, rounds)
    comparing.run(a_left, b_left)
    if not result.differences and not result.compared:
        raise RecordError("no value of one record is compared with one of the other")
    return result


def _span(steps: Steps) -> str:
    if not steps:
        return "none"
    return f"{min(steps)} to {max(steps)}"


def _shifted(steps: Steps, shift: int) -> Steps:
    """Return the steps with other numbers."""
    return {step + shift: phases for step, phases in steps.items()}


def _surroundings(a: RecordedRun, b: RecordedRun) -> list[str]:
    """Return a line for each setting, version and argument in which two runs differ."""
    lines = []

    def say_if_other(what: str, left: str, right: str) -> None:
        if left != right:
            lines.append(f"other {what}: {left} in A, {right} in B")

    for name in _FIELDS:
        say_if_other(name, _spelled(a.header.get(name)), _spelled(b.header.get(name)))

    # A record of an older torch does not know each setting.
    a_settings = a.header.get("settings") or {}
    b_settings = b.header.get("settings") or {}
    for name in sorted(a_settings.keys() | b_settings.keys()):
        left, right = a_settings.get(name, "unknown"), b_settings.get(name, "unknown")
        say_if_other(f"setting {name}", left, right)

    # Arguments are quoted, because none at all must be seen, too.
    left = " ".join(map(str, a.header.get("arguments", ())))
    right = " ".join(map(str, b.header.get("arguments", ())))
    say_if_other("arguments", repr(left), repr(right))
    return lines


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return spell_some(value) or "nothing"
    return str(value)


def _matched(steps: Steps, letter: str, result: Comparison) -> Steps:
    """Take prefixes of wrappers away from names, unless two names become one."""
    known: set[str] = set()
    for phases in steps.values():
        for named in phases.values():
            # A module may be wrapped after some steps: then both names are never there together.
            if len(set(map(normalised, named))) < len(named):
                return steps
            known.update(named)
    changed = sorted(name for name in known if normalised(name) != name)
    if not changed:
        return steps

    result.notes.append(f"names of {letter} without the prefixes of wrappers, as of {changed[0]}")
    return _renamed(steps)


def _renamed(steps: Steps) -> Steps:
    renamed: Steps = {}
    for step, phases in steps.items():
        renamed[step] = {}
        for phase, named in phases.items():
            renamed[step][phase] = {normalised(name): values for name, values in named.items()}
    return renamed


def _check_same_model(a_steps: Steps, b_steps: Steps) -> None:
    names = []
    for steps in (a_steps, b_steps):
        # Of all steps, as optimisers may step in turn. Options have the same names in every run.
        found: dict[str, None] = {}
        for phases in steps.values():
            found.update(dict.fromkeys(phases.get("optimiser", {})))
        names.append([name for name in found if not _is_option(name)])
    if all(names) and set(names[0]).isdisjoint(names[1]):
        raise RecordError(
            "the records are of different models: no name of a tensor is in both, "
            f"{one_line(names[0][0])} in A and {one_line(names[1][0])} in B"
        )


def _is_option(name: str) -> bool:
    return "param_groups." in name


def _note_ends(result: Comparison, a_steps: Steps, b_steps: Steps) -> None:
    for letter, run in zip("AB", result.runs, strict=True):
        for note in run.notes:
            result.notes.append(f"{letter}: {note}")
            result.is_complete = False
    for letter, own in (("A", a_steps.keys() - b_steps), ("B", b_steps.keys() - a_steps)):
        if own:
            result.notes.append(f"only in {letter}: {counted(len(own), 'step')}, {_runs_of(own)}")
    ends = {"A": max(a_steps), "B": max(b_steps)}
    for (letter, own_end), other, run in zip(ends.items(), "BA", result.runs, strict=True):
        every = run.header.get("every", 1)
        if ends[other] >= own_end + (every if type(every) is int else 1):
            result.shorter = f"{letter} ends after step {own_end}, and {other} after {ends[other]}"


def _note_what_was_left(result: Comparison, a_left: Steps, b_left: Steps) -> None:
    """Note which run alone says what its trainer has left, and which ends earlier by that."""
    if not result.is_complete or result.shorter:
        return
    for letter, own, other in (("A", a_left, b_left), ("B", b_left, a_left)):
        if own and not other:
            result.notes.append(f"not compared: end, which only {letter} has")
    if a_left and b_left and max(a_left) != max(b_left):
        lasts = {"A": max(a_left), "B": max(b_left)}
        first, second = sorted(lasts, key=lambda letter: lasts[letter])
        result.shorter = (
            f"{first} ends after step {lasts[first]}, and {second} after {lasts[second]}"
        )


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
    texts = []
    for first, last in spans:
        if first == last:
            texts.append(str(first))
        else:
            texts.append(f"{first} to {last}")
    return spell_some(texts, 8)


class _NotComparable(Exception):
    """Both sides have the name, and still nothing can be said; the message is a reason."""


class _Comparing:
    """The walk through the steps of two records, up to the first one that differs.

    Attributes:
        rounds: whether B rounds otherwise.
        skipped: by reason, what was not compared.
        unseeded: generators that the trainer does not seed.
        implementations: options of an implementation that differ.
        without_number: steps whose loss is not finite.
    """

    def __init__(
        self, result: Comparison, a_steps: Steps, b_steps: Steps, rounds: bool = False
    ) -> None:
        self.result, self.a_steps, self.b_steps = result, a_steps, b_steps
        self.rounds = rounds
        self.own_steps = [min(run.steps) for run in result.runs]
        self.skipped: dict[str, set[str]] = {}
        self.unseeded: set[str] = set()
        self.implementations: set[str] = set()
        self.without_number: list[int] = []

    def run(self, a_left: Steps, b_left: Steps) -> None:
        """Fill in the result.

        Args:
            a_left, b_left: what the trainers left after their last steps.
        """
        phases = self._shared_phases()
        for step in self.result.steps:
            # Later phases of the step are counted, later steps only follow from it.
            for phase in phases:
                self._compare_phase(step, phase)
            if self.result.differences:
                break
            self.result.counts.clear()

        for step in a_left.keys() & b_left.keys():
            if not self.result.differences:
                # Copies: these are the records themselves.
                self.a_steps = {**self.a_steps, step: self.a_steps.get(step, {}) | a_left[step]}
                self.b_steps = {**self.b_steps, step: self.b_steps.get(step, {}) | b_left[step]}
                self._compare_phase(step, "end")

        if self.result.differences:
            self.result.element = _element(self.result.runs, self.result.differences[0])
            sizes = _sizes(self.result.runs, self.result.differences)
            self.result.sizes = self._describe_losses() + sizes
            self.result.places = self._places(self.result.differences[0])
            self.result.exact = self._describe_exact(self.result.differences[0])
        if self.unseeded:
            names = spell_some(sorted(self.unseeded))
            self.result.notes.append(
                "random states that differ from the start, as they do unless both seed them: "
                f"{names}"
            )
        if self.implementations:
            names = spell_some(sorted(self.implementations))
            self.result.notes.append(f"options of an implementation that differ: {names}")
        if self.without_number:
            self.result.notes.append(
                f"the loss of step {self.without_number[0]} is not finite: NaN equals NaN, "
                "whatever made it, so equal values prove little from there on"
            )
        for reason, skipped in self.skipped.items():
            names = spell_some(sorted(skipped))
            self.result.notes.append(f"not compared, {reason}: {names}")

    def _places(self, difference: Difference) -> list[str]:
        """Return lines that say where the trainers call what the phase lies between."""
        if difference.phase not in _PHASES_WITH_PLACES:
            return []
        texts = []
        for run, steps, own in zip(
            self.result.runs, (self.a_steps, self.b_steps), self.own_steps, strict=True
        ):
            step = own + difference.step - min(steps)
            places = run.places.get(step, {})
            calls = [f"{call} at {places[call]}" for call in ("backward", "step") if call in places]
            texts.append(", ".join(calls))
        a, b = texts
        if a == b:
            return [a] * bool(a)
        return [f"{letter}: {text}" for letter, text in zip("AB", texts, strict=True) if text]

    def _describe_losses(self) -> list[str]:
        """Return a line on how far apart losses are.

        A bug may begin long after the first rounding.
        """
        apart: list[tuple[int, float]] = []
        for step in self.result.steps:
            a, b = _loss_of(self.a_steps[step]), _loss_of(self.b_steps[step])
            if a is None or b is None:
                continue
            largest = max(abs(a), abs(b))
            apart.append((step, abs(a - b) / largest if largest else 0.0))

        for place in range(1, len(apart)):
            before = max(distance for _, distance in apart[:place])
            step, distance = apart[place]
            if 0 < before * _JUMP < distance:
                return [
                    f"losses are at most {before:.1g} apart up to step {apart[place - 1][0]}, "
                    f"and {distance:.1g} at step {step}"
                ]
        if len(apart) < 2:
            return []
        furthest = max(distance for _, distance in apart)
        return [f"losses are at most {furthest:.1g} apart in {len(apart)} steps"]

    def _describe_exact(self, first: Difference) -> str:
        """Say where what rounding seldom moves differs, if the first difference may be a rounding.

        Else the rounding of the first step, as of compiled code, would hide a wrong schedule, or
        data in another order, of a later one.
        """
        if self.rounds or not self._is_rounded(first.step, first.phase, first.name):
            return ""
        result = Comparison(self.result.runs, steps=self.result.steps)
        _Comparing(result, self.a_steps, self.b_steps, rounds=True).run({}, {})
        if not result.differences:
            return ""
        return f"what rounding seldom moves differs, too: {result.differences[0]}"

    def _shared_phases(self) -> list[str]:
        """Return the phases that both records have, and note the others."""
        in_a: set[str] = set().union(*self.a_steps.values())
        in_b: set[str] = set().union(*self.b_steps.values())
        shared = []
        for phase in PHASES:
            if phase in in_a and phase in in_b:
                shared.append(phase)
            elif phase in in_a:
                self.result.notes.append(f"not compared: {phase}, which only A has")
            elif phase in in_b:
                self.result.notes.append(f"not compared: {phase}, which only B has")
        return shared

    def _compare_phase(self, step: int, phase: str) -> None:
        """Compare all values of a phase; keep its differences if they are the first ones."""
        a, b = self._entries(step, phase)
        found, number = [], 0
        for name in {**a, **b}:
            if self.rounds and self._is_rounded(step, phase, name):
                difference = _disagreement(step, phase, name, a.get(name, {}), b.get(name, {}))
                if difference is not None:
                    found.append(difference)
                reason = "because it is rounded otherwise on other ranks"
                self.skipped.setdefault(reason, set()).add(phase)
                continue

            try:
                difference = self._compare_name(step, phase, name, a.get(name), b.get(name))
            except _NotComparable as reason:
                self.skipped.setdefault(str(reason), set()).add(f"{phase}: {name}")
                continue

            number += 1
            if phase == "loss" and name in a and not _is_finite(a[name]):
                self.without_number.append(step)
            if difference is not None and not self._is_of_surroundings(difference):
                found.append(difference)

        self.result.compared += number
        self.result.counts[phase] = len(found), number
        if not self.result.differences:
            self.result.differences = found
            names = {**a, **b}
            above = {name.rpartition(".")[0] for name in names}
            self.result.parameters = frozenset(above & names.keys())

    def _is_rounded(self, step: int, phase: str, name: str) -> bool:
        """Return whether a value comes from a sum of a step that both sides have taken."""
        if phase == "load":
            return step != self.result.steps[0]
        if phase == "optimiser":
            return not _is_option(name)
        return phase not in ("random", "data")

    def _is_of_surroundings(self, difference: Difference) -> bool:
        """Return whether a difference is only said, and the search goes on."""
        name = difference.name
        if _is_option(name) and name.rpartition(".")[2] in _IMPLEMENTATIONS:
            self.implementations.add(name)
            return True
        if difference.phase != "random" or name.startswith("torch"):
            return False
        # Generators that the trainer does not seed begin anywhere.
        if difference.step == self.result.steps[0]:
            self.unseeded.add(name)
        return name in self.unseeded

    def _entries(self, step: int, phase: str) -> tuple[dict[str, Values], dict[str, Values]]:
        """Return what both sides have of a phase by name.

        If one side begins or loads at this step, the other one goes on from what its step before
        has left.
        """
        a, b = self.a_steps[step].get(phase, {}), self.b_steps[step].get(phase, {})
        if phase == "load" and self._who_loads(step) == "A":
            b = {**_left_over(self.b_steps, step), **b}
        elif phase == "load" and self._who_loads(step) == "B":
            a = {**_left_over(self.a_steps, step), **a}
        return a, b

    def _who_loads(self, step: int) -> str:
        letters = ""
        for letter, steps in (("A", self.a_steps), ("B", self.b_steps)):
            names = steps[step].get("load", {})
            # Modules beside the model are recorded at each step.
            if not all(name.startswith("beside ") for name in names):
                letters += letter
        return letters

    def _compare_name(
        self, step: int, phase: str, name: str, a: Values | None, b: Values | None
    ) -> Difference | None:
        """Return how the values of one name differ; one that a side lacks is a difference."""
        if a is None or b is None:
            letter = "A"
            if a is None:
                letter = "B"
            if phase == "forward":  # nothing is seen inside of a module that was compiled in place
                raise _NotComparable(f"because only {letter} shows it")
            return Difference(step, phase, name, (), f"only in {letter}")

        for letter, own, other, steps in (
            ("A", a, b, self.b_steps),
            ("B", b, a, self.a_steps),
        ):
            # Replicas on the other ranks have the same values, so the whole would seem equal.
            lone = self._trained_ranks(steps[step], name, own.keys() - other.keys())
            if lone:
                return Difference(step, phase, name, lone, f"only in {letter}")
        return _compare_values(step, phase, name, a, b)

    def _trained_ranks(
        self, phases: dict[str, dict[str, Values]], name: str, ranks: set[int]
    ) -> tuple[int, ...]:
        """Return those of ``ranks`` that train the weight of that name, or of the moment's.

        In another layout, as stages of a pipeline, other ranks hold it. They are no fault.
        """
        a, b = self.result.runs
        if a.headers.keys() != b.headers.keys():
            return ()
        weights = phases.get("optimiser", {})
        owners = weights.get(name) or weights.get(name.rpartition(".")[0]) or {}
        return tuple(sorted(ranks & owners.keys()))


def _left_over(steps: Steps, step: int) -> dict[str, Values]:
    """Return what the step before has left of weights, buffers and moments."""
    entries = steps.get(step - 1, {}).get("optimiser", {})
    return {name: values for name, values in entries.items() if not _is_option(name)}


def _compare_values(step: int, phase: str, name: str, a: Values, b: Values) -> Difference | None:
    """Compare one name on all ranks.

    Raises:
        _NotComparable: nothing was recorded, or each rank has its own and the ranks are others.
    """
    if _kinds(a) != _kinds(b):
        # On the same ranks, those that differ say how.
        ranks = [rank for rank in a if rank not in b or _kinds(a, rank) != _kinds(b, rank)]
        a_kinds: set[str] = set().union(*(_kinds(a, rank) for rank in ranks))
        b_kinds = _kinds(b)
        if a.keys() == b.keys():
            b_kinds = set().union(*(_kinds(b, rank) for rank in ranks))
        if "[]" in a_kinds | b_kinds:
            # A number of Python on one side, as a learning rate that the other has as a tensor.
            a_kinds, b_kinds = set(map(str, _all_entries(a))), set(map(str, _all_entries(b)))
        words = f"{spell_some(sorted(a_kinds))} in A, {spell_some(sorted(b_kinds))} in B"
        return Difference(step, phase, name, tuple(ranks), words)
    if all(entry.part == UNRECORDED for entry in _all_entries(a)):
        raise _NotComparable("because it was not recorded")

    if _layout(a) == _layout(b):
        ranks = [rank for rank in a if a[rank] != b[rank]]
        if not ranks:
            return None
        # Of several calls within the step, the first that differs.
        for left_entry, right_entry in zip(a[ranks[0]], b[ranks[0]], strict=True):
            if left_entry != right_entry:
                break
        words = _numbers(left_entry, right_entry)
        return Difference(step, phase, name, tuple(ranks), words, (left_entry, right_entry))

    a_whole, b_whole = whole_of(a), whole_of(b)
    if a_whole is None or b_whole is None:
        difference = _disagreement(step, phase, name, a, b)
        if difference is not None:
            return difference
        raise _NotComparable("because each rank has its own and the ranks are others")
    if a_whole == b_whole:
        return None
    return Difference(step, phase, name, (), "in all, on ranks or calls that are others")


def _loss_of(phases: Mapping[str, Mapping[str, Values]]) -> float | None:
    """Return the loss of a step on its first rank, of several calls the sum; None without one."""
    values = phases.get("loss", {}).get("root")
    if not values:
        return None
    numbers = [entry.numbers[0] for entry in values[min(values)] if entry.kind.endswith("[]")]
    if not numbers:
        return None
    total = sum(map(float, numbers))
    return total if isfinite(total) else None


def _disagreement(step: int, phase: str, name: str, a: Values, b: Values) -> Difference | None:
    """Return that replicas of one side have other values, where those of the other side agree.

    Before the optimiser takes them, ranks may have gradients of their own.
    """
    if phase not in ("load", "clip", "optimiser", "end"):
        return None
    in_a, in_b = _ranks_that_disagree(a), _ranks_that_disagree(b)
    if bool(in_a) == bool(in_b):
        return None
    letter, ranks = ("A", in_a) if in_a else ("B", in_b)
    return Difference(step, phase, name, ranks, f"other values than on other ranks of {letter}")


def _ranks_that_disagree(values: Values) -> tuple[int, ...]:
    """Return the ranks that hold a part which a rank before them holds with other values."""
    parts: dict[Any, list[str]] = {}
    ranks = []
    for rank, entries in sorted(values.items()):
        kinds = [str(entry.part) for entry in entries]
        if any(kind in ("partial", "rows", UNRECORDED) for kind in kinds):
            return ()
        numbers = [str(entry.numbers) for entry in entries]
        if parts.setdefault(tuple(kinds), numbers) != numbers:
            ranks.append(rank)
    return tuple(ranks)


def _is_finite(values: Values) -> bool:
    return not any(
        number in ("nan", "inf", "-inf")
        for entry in _all_entries(values)
        for number in entry.numbers
    )


def _all_entries(values: Values) -> Iterator[Entry]:
    for calls in values.values():
        yield from calls


def _kinds(values: Values, rank: int | None = None) -> set[str]:
    """Return dtypes and shapes on all ranks, or on one."""
    if rank is not None:
        values = {rank: values[rank]}
    return {entry.kind for entry in _all_entries(values)}


def _layout(values: Values) -> Any:
    layout = {}
    for rank, calls in values.items():
        layout[rank] = [(entry.part, entry.shape) for entry in calls]
    return layout


def _numbers(left: Entry, right: Entry) -> str:
    """Return two entries in words, if they are numbers."""
    if left.shape or len(left.numbers) != 1:
        return ""
    return f"{left.numbers[0]} in A, {right.numbers[0]} in B"


def _element(runs: tuple[RecordedRun, RecordedRun], difference: Difference) -> list[str]:
    """Return lines that name the first element that differs, if both sides have kept values."""
    kept = _kept_values(runs, difference)
    if kept is None or difference.sides is None:
        return []
    left, right = kept
    rank = difference.ranks[0]
    found = difference_of(Key(0, 0, "", difference.name), left, right)
    if found is None or found.element is None:
        return []

    # The element is named in the whole tensor, of which this rank holds a part.
    place = list(found.element)
    part = difference.sides[0].part
    if isinstance(part, tuple):
        for dim, offset in enumerate(part[0]):
            place[dim] += offset
    amount = f"{found.amount} elements of rank {rank} differ"
    return [f"  element {place}: {found.actual} in A, {found.expected} in B; {amount}"]


def _kept_values(
    runs: tuple[RecordedRun, RecordedRun], difference: Difference
) -> tuple[Tensor, Tensor] | None:
    """Return what the first rank that differs has on both sides; None if it was not kept."""
    if difference.sides is None or difference.sides[0].part == "rows":
        return None
    rank = difference.ranks[0]
    left = values_of(runs[0].folder, rank, difference.sides[0])
    right = values_of(runs[1].folder, rank, difference.sides[1])
    if left is None or right is None:
        return None
    return left, right


def _sizes(runs: tuple[RecordedRun, RecordedRun], differences: list[Difference]) -> list[str]:
    """Return lines that say how far each tensor has moved, the furthest first.

    A change by one factor, as of clipping, is the same for many tensors. Others are said by the
    size of the change, in A's norm.
    """
    by_factor: dict[str, list[str]] = {}
    changes: list[tuple[float, str]] = []
    for difference in differences:
        kept = _kept_values(runs, difference)
        if kept is None or not kept[0].is_floating_point():
            continue
        a, b = (tensor.double().flatten() for tensor in kept)
        norm = float(a.norm())
        change = float((b - a).norm())
        if not isfinite(change) or not norm:
            continue
        factor = float(a @ b) / norm**2
        if float((b - factor * a).norm()) < _ONE_FACTOR * change:
            by_factor.setdefault(_spelled_factor(factor), []).append(difference.name)
        else:
            changes.append((change / norm, difference.name))

    lines = []
    for text in sorted(by_factor, key=lambda each: abs(float(each) - 1), reverse=True):
        names = by_factor[text]
        lines.append(f"B is {text} times A: {counted(len(names), 'tensor')}, {spell_some(names)}")
    if changes:
        largest = sorted(changes, reverse=True)[:_MOST_SHOWN]
        sizes = ", ".join(f"{name} {size:.2g}" for size, name in largest)
        lines.append(f"changes in norms of A, the largest: {sizes}")
    return lines


def _spelled_factor(factor: float) -> str:
    """Spell a factor; of one near 1, as of weight decay, two digits of how far it is from 1.

    >>> _spelled_factor(0.12345), _spelled_factor(1.2), _spelled_factor(1 - 1.04e-5)
    ('0.1235', '1.2', '0.99999')
    """
    text = f"{factor:.4g}"
    if text == "1":
        distance = float(f"{factor - 1:.2g}")
        text = f"{1 + distance:.12g}"
    return text


def whole_of(values: Values) -> Any:
    """Return what does not depend on how ranks share a tensor; None if ranks have their own."""
    calls = list(values.values())
    entries = list(_all_entries(values))
    if all(entry.part == "rows" for entry in entries):
        return _rows_of(entries)
    if any(entry.part == "partial" for entry in entries):
        return None

    is_sharded = any(isinstance(entry.part, tuple) for entry in entries)
    if not is_sharded and all(each == calls[0] for each in calls):
        return [(entry.numbers, entry.shape) for entry in calls[0]]
    if len({len(each) for each in calls}) > 1:
        return None
    totals = []
    for of_call in zip(*calls, strict=True):
        total = _total_of(of_call)
        if total is None:
            return None
        totals.append(((total,), of_call[0].shape))
    return totals


def _rows_of(entries: Iterable[Entry]) -> frozenset[tuple[str, int]]:
    """Return each row, and how often it comes for each time of the whole batch.

    Ranks of tensor parallelism have the same batch, all of them as often.
    """
    counts = Counter(row for entry in entries for row in entry.numbers)
    times = gcd(*counts.values())
    return frozenset((row, count // times) for row, count in counts.items())


def _total_of(entries: Iterable[Entry]) -> str | None:
    """Return the fingerprint of the tensor whose parts these are; None if they are not all."""
    parts: dict[Any, Entry] = {}
    shape: tuple[int, ...] = ()
    for entry in entries:
        shape = entry.shape
        # Ranks that hold the same part must agree about it.
        if not isinstance(entry.part, tuple) or parts.setdefault(entry.part, entry) != entry:
            return None
    covered = total = 0
    for (_, sizes), entry in parts.items():
        covered += prod(sizes)
        total += int(entry.numbers[0], 16)
    if covered != prod(shape):
        return None
    return f"{total % MODULUS:016x}"
