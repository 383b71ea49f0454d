"""Compare two sets of tensors bit by bit and say where a difference comes from.

Three outcomes: *equal*, *different*, and *unverified* where nothing was looked at, which never
passes as equal. NaN and infinite values have the same bits whatever computes them: a verdict names
where they are, and a run whose loss, or all of a gradient or weight, is not finite is unverified.
So is a comparison of empty tensors alone. Differences are in order of origin: step, rank, phase,
the order in which ``expected`` registered its tensors, element. Between records dtype, shape and
bytes must agree, between tensors also strides that place elements, between DTensors placements.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_gtrainer import facts
from pytest_gtrainer._torch.values import strides_that_count
from pytest_gtrainer.facts import counted, spell_some
from pytest_gtrainer.graph.nodes import spell_dtype
from pytest_gtrainer.numerics import bits
from pytest_gtrainer.numerics.record import (
    OUTSIDE_A_RUN,
    START,
    Record,
    Tensors,
    entries,
    vacant,
)
from pytest_gtrainer.numerics.verdict import PHASES, Difference, Key, Kind, Outcome, Verdict, where

_MOST_NUMBERS = 4
_OF_A_RUN = ("loss", "gradient", "clipped", "weight", "optimizer")


def compare(actual: Tensors, expected: Tensors) -> Verdict:
    """Compare ``actual`` with ``expected`` bit by bit: records, tensors, modules, mappings or
    sequences of tensors.

    Of a module its parameters and buffers count, not their gradients: give these by name. A name
    that only one side has is a difference. The order of names does not count. A tensor that
    is the same memory on both sides makes the verdict unverified: whatever one side wrote there,
    the other has as well.

    Raises:
        TypeError: a record against something else, or something that is not a tensor.
    """
    if isinstance(actual, Record) != isinstance(expected, Record):
        raise TypeError(f"cannot compare {type(actual).__name__} with {type(expected).__name__}")
    doubts: list[str] = []
    faults: list[str] = []
    if isinstance(actual, Record) and isinstance(expected, Record):
        for side, record in (("actual", actual), ("expected", expected)):
            if record.missing:
                doubts.append(f"{side} has nothing of {_places(record.missing)}: {record!r}")
            lacking = _without_gradients(record)
            if lacking:
                doubts.append(
                    f"{side} has no gradient of {_places(lacking)}, where other ranks have "
                    "gradients: if these train nothing, compare record.select(phase=...) or "
                    "record.select(rank=...)"
                )
        # Equal local parts are of other tensors, if their placements or global shapes differ.
        for key in sorted(actual.placements.keys() & expected.placements.keys()):
            ours, theirs = actual.placements[key], expected.placements[key]
            if ours != theirs:
                faults.append(f"{where(key)} is {ours} in actual, {theirs} in expected")
        if (actual.world_size, actual.rank) != (expected.world_size, expected.rank):
            faults.append(f"not the same ranks: actual {actual!r}, expected {expected!r}")

    sides = entries(actual), entries(expected)
    if all(sides):
        faults += _only_vacant("actual", vacant(actual) - vacant(expected), sides[1])
        faults += _only_vacant("expected", vacant(expected) - vacant(actual), sides[0])
    verdict = compare_entries(*sides, doubts, faults)
    if verdict.outcome == "equal":
        doubtful = (_shared(*sides), _nothing_but_empty(sides[1]), _not_a_proof(sides[1]))
        proves_nothing = [words for words in doubtful if words]
        if proves_nothing:
            reasons = (*verdict.reasons, *proves_nothing)
            return replace(verdict, outcome="unverified", reasons=reasons)

    return verdict


def _only_vacant(side: str, names: set[str], others: Mapping[Key, Tensor]) -> list[str]:
    """Return a line on the places that hold nothing on one side, and do not exist on the other.

    Args:
        names: the places that are vacant on ``side`` alone.
        others: the tensors of the other side. Those at these places are differences by themselves.
    """
    missing = []
    for name in sorted(names):
        within = (f"{name}.", f"{name}[")
        if not any(key.name == name or key.name.startswith(within) for key in others):
            missing.append(name)
    if not missing:
        return []
    places = spell_some(missing)
    return [f"not the same structure: only {side} has a place for a tensor at {places}"]


def _without_gradients(record: Record) -> list[tuple[int, int]]:
    """Return each step and rank with something and no gradient, if another rank has one there."""
    places, with_gradient = set(), set()
    for key in record:
        places.add((key.step, key.rank))
        if key.phase == "gradient":
            with_gradient.add((key.step, key.rank))
    # In a step without any gradient, as of a run that only evaluates, none is lacking.
    steps = {step for step, _ in with_gradient}
    return sorted((step, rank) for step, rank in places - with_gradient if step in steps)


def _shared(actual: Mapping[Key, Tensor], expected: Mapping[Key, Tensor]) -> str:
    """Return which tensors are the same memory on both sides, and what to do about it; an empty
    string if none is.
    """
    shared = [key for key, tensor in expected.items() if bits.share_memory(actual[key], tensor)]
    if shared:
        which = spell_some(list(map(where, shared)), 1)
        return (
            f"{which}: actual and expected are the same memory, so nothing was compared: clone one "
            "of them before it changes, give each side inputs of its own, or leave it out on both "
            "sides"
        )

    # Two optimisers, say, may name the same parameters in another order: then the way from ours to
    # theirs, and on from there, comes back. Views of other shapes may begin at one address.
    ways: TopologicalSorter[object] = TopologicalSorter()
    for key, tensor in expected.items():
        ours, theirs = _place_in_memory(actual[key]), _place_in_memory(tensor)
        if ours is not None and theirs is not None:
            ways.add(ours[:2], theirs[:2])  # device and address
    try:
        ways.prepare()
    except CycleError:
        return (
            "actual and expected are the same memory under other names, so what changes one side "
            "changes the other: clone one of them before it changes"
        )

    return ""


def _nothing_but_empty(tensors: Mapping[Key, Tensor]) -> str:
    """Return that all gradients, all weights, or all tensors outside a run are empty; an empty
    string if they are not.

    Of a DTensor the global size counts: a rank may well hold an empty shard.
    """
    if tensors and not any(tensor.numel() for tensor in tensors.values()):
        return "every tensor is empty, so there is no element to compare"
    # Losses alone have elements in any run, and say nothing of gradients and weights.
    elements: Counter[str] = Counter()
    for key, tensor in tensors.items():
        elements[key.phase] += tensor.numel()
    for phase, what in ((OUTSIDE_A_RUN, "tensor"), ("gradient", "gradient"), ("weight", "weight")):
        if elements.get(phase) == 0:
            return f"every {what} is empty, so there is no element to compare"
    return ""


def _not_a_proof(run: Mapping[Key, Tensor]) -> str:
    """Return why the bits of a run prove nothing: a loss is not finite, or no element of a gradient
    is. An empty string if they do prove something.

    Outside a run NaN and inf may be meant, as in a mask; inside one, some infinite elements do not
    spoil the others.
    """
    for key, tensor in run.items():
        if key.phase not in _OF_A_RUN:
            continue
        bad = bits.count_not_finite(tensor)
        if bad and (key.phase == "loss" or bad == tensor.numel()):
            return (
                f"the run is not finite: {where(key)} is NaN or infinite, and from there on bits "
                "are equal whatever computes them. Train on other inputs, or with a smaller "
                "learning rate, so that all losses are finite; compare a step that a gradient "
                "scaler skips by its weights: record.select(phase='weight')"
            )
    return ""


def _places(places: Sequence[tuple[int, int]]) -> str:
    """Spell pairs of step and rank.

    >>> _places([(0, 1), (0, 2)])
    'ranks 1, 2 at step 0'
    """
    steps = sorted({step for step, _ in places})
    ranks = sorted({rank for _, rank in places})
    return f"{_some('rank', ranks)} at {_some('step', steps)}"


def _some(noun: str, numbers: Sequence[int]) -> str:
    """Spell numbers after their noun, the first few of many.

    >>> _some("rank", [2]), _some("rank", [2, 3, 4, 5]), _some("step", list(range(3, 20)))
    ('rank 2', 'ranks 2, 3, 4, 5', 'steps 3, 4, 5, 6 and 13 more')
    """
    if len(numbers) != 1:
        noun += "s"
    return f"{noun} {spell_some(numbers, _MOST_NUMBERS)}"


def compare_entries(
    actual: Mapping[Key, Tensor],
    expected: Mapping[Key, Tensor],
    doubts: Sequence[str] = (),
    faults: Sequence[str] = (),
) -> Verdict:
    """Compare tensors by key.

    A bit, a name that one side lacks, or one of ``faults`` makes the sides different. One of
    ``doubts``, or a tensor without bytes, makes them at most unverified.
    """
    # In the order of ``expected``: the first difference of a step is nearest to its origin.
    common = {key: (actual[key], tensor) for key, tensor in expected.items() if key in actual}
    only_actual = tuple(key for key in actual if key not in expected)
    only_expected = tuple(key for key in expected if key not in actual)
    found: list[Difference] = []
    equal: dict[Key, Tensor] = {}
    unread: list[str] = []
    for key, pair in common.items():
        try:
            difference = difference_of(key, *pair)
        except bits.NoBytes as doubt:
            unread.append(f"{key.name or 'the tensor'}: {doubt}")
            continue
        if difference is not None:
            found.append(difference)
        else:
            equal[key] = pair[1]

    unverified = [*doubts, *unread]
    if not common:
        for side, only in (("actual", only_actual), ("expected", only_expected)):
            if not only:
                unverified.append(f"{side}: nothing was captured")

    outcome: Outcome = "equal"
    if found or faults:
        outcome = "different"
    elif unverified:
        outcome = "unverified"
    elif only_actual or only_expected:
        outcome = "different"

    phases = (OUTSIDE_A_RUN, *PHASES)
    found.sort(key=lambda one: (*one.key[:2], phases.index(one.key.phase)))
    return Verdict(
        outcome,
        len(common) - len(unread),
        tuple(found),
        only_actual,
        only_expected,
        (*faults, *unverified),
        tuple(_not_finite(equal)),
        tuple(_tied(common)),
    )


def _not_finite(tensors: Mapping[Key, Tensor]) -> Iterator[str]:
    """Yield the tensors that are not finite, with how many elements."""
    for key, tensor in tensors.items():
        bad = bits.count_not_finite(tensor)
        if bad:
            yield f"{where(key)}: {bad} of {counted(tensor.numel(), 'element')}"


def _tied(pairs: Mapping[Key, tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Yield the names that are another name's tensor on both sides: tied weights, or one tensor
    kept several times.
    """
    seen: dict[object, Key] = {}
    for key, pair in pairs.items():
        places = tuple(map(_place_in_memory, pair))
        if None in places:
            continue
        first = seen.setdefault(places, key)
        if first is not key:
            yield f"{where(key)} is {where(first)}"


def _place_in_memory(tensor: Tensor) -> tuple[object, ...] | None:
    """Return device, address, shape and strides of a tensor's values; None if it has none."""
    try:
        local = bits.held(tensor)
    except bits.NoBytes:
        return None
    if not local.numel():
        return None
    return local.device, local.data_ptr(), local.shape, local.stride()


def difference_of(key: Key, actual: Tensor, expected: Tensor) -> Difference | None:
    """Return how two tensors differ, or None.

    Raises:
        NoBytes: one of them holds no values, or terms of a sum against whole values.
    """
    if bits.is_dtensor(actual) != bits.is_dtensor(expected):
        sharded: Any = actual if bits.is_dtensor(actual) else expected
        if any(placement.is_partial() for placement in sharded.placements):
            raise bits.NoBytes(
                f"a DTensor of {sharded.placements} holds terms of a sum: call redistribute() first"
            )

    a, b = bits.held(actual), bits.held(expected)
    layout, numel = f"{spell_dtype(b.dtype)}{list(b.shape)}", b.numel()
    layouts: list[tuple[Kind, object, object]] = [
        ("dtype", a.dtype, b.dtype),
        ("shape", list(a.shape), list(b.shape)),
        # Copies in a record are contiguous, so strides differ between tensors alone.
        ("stride", strides_that_count(a), strides_that_count(b)),
    ]
    if bits.is_dtensor(actual) and bits.is_dtensor(expected):
        # Equal shards are of other tensors, if the placements or the global shapes differ.
        ours = f"{actual.placements} of {list(actual.shape)}"
        theirs = f"{expected.placements} of {list(expected.shape)}"
        layouts.append(("placements", ours, theirs))
        mine, other = actual.device_mesh.mesh, expected.device_mesh.mesh
        layouts.append(("placements", f"on ranks {mine.tolist()}", f"on ranks {other.tolist()}"))

    for kind, mine, other in layouts:
        if mine != other:
            return Difference(key, kind, str(mine), str(other), layout, numel)
    # A record is in host memory, and may be compared with tensors of a device.
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if bits.same_bytes(bits.byte_view(a), bits.byte_view(b)):
        return None
    elements, flat = bits.count_differing(a, b)
    x, y = bits.element_at(a, flat), bits.element_at(b, flat)
    place = tuple(map(int, torch.unravel_index(torch.tensor(flat), a.shape)))
    return Difference(
        key,
        "bits",
        actual=bits.value(x),
        expected=bits.value(y),
        layout=layout,
        numel=numel,
        element=place,
        actual_bits=bits.pattern(x),
        expected_bits=bits.pattern(y),
        ulp=bits.ulp_distance(x, y),
        elements=elements,
    )


class VerdictError(facts.FailedCheck):
    """A comparison did not have the required result; ``gt_origin`` is (step, rank) of the first
    difference, or None.
    """

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.message = message
        self.verdict = verdict
        self.gt_origin = verdict.origin

    # A rank sends its failure by pickle, which would call the class with the message alone.
    def __reduce__(self) -> "tuple[type[VerdictError], tuple[str, Verdict]]":
        return type(self), (self.message, self.verdict)


class BitwiseDifference(VerdictError):
    """Two sides are not equal bit for bit, or nothing shows that they are."""

    __module__ = "pytest_gtrainer"


class ControlFailed(VerdictError):
    """A control run that had to differ in bits did not, or was no fair comparison."""

    __module__ = "pytest_gtrainer"


@facts.check
def assert_bitwise_equal(actual: Tensors, expected: Tensors, *, what: str = "") -> Verdict:
    """Fail unless every tensor of both sides is equal bit for bit.

    Args:
        actual, expected: records, tensors, mappings, lists or modules; see ``compare``.
        what: what is compared, for the message: ``"graph against eager"``.

    Raises:
        BitwiseDifference: different, or unverified.
    """
    __tracebackhide__ = True
    verdict, explanations = judged(actual, expected, what)
    if verdict.outcome != "equal":
        lines = [what, starts_differ(actual, expected), str(verdict), *explanations]
        if not (verdict.compared or verdict.only_actual or verdict.only_expected):
            lines.append(
                "give what holds tensors: a record of a run, a module, a tensor, or a mapping or "
                "list of some"
            )
        raise BitwiseDifference("\n".join(filter(None, lines)), verdict)
    return verdict


def starts_differ(actual: Tensors, expected: Tensors) -> str:
    """Return that two recorded runs started from other weights; an empty string if they did not.

    What such runs compute says nothing.
    """
    if not isinstance(actual, Record) or not isinstance(expected, Record):
        return ""
    ranks = []
    for key in actual.meta.keys() & expected.meta.keys():
        if key.startswith(START) and actual.meta[key] != expected.meta[key]:
            ranks.append(int(key.removeprefix(START)))
    if not ranks:
        return ""
    which = _some("rank", sorted(ranks))
    return f"the two runs start from different weights, on {which}: seed both sides alike"


def judged(
    actual: Tensors, expected: Tensors, what: str, doubts: Sequence[str] = ()
) -> tuple[Verdict, list[str]]:
    """Compare what must be equal, and notify those who count or watch.

    One of ``doubts``, why equal bits would prove nothing, makes an equal verdict unverified.

    Returns:
        The verdict, and what watchers know about it: with ``--gt-bisect``, which pass it was.
    """
    verdict, explanations = compare(actual, expected), list[str]()
    if doubts and verdict.outcome == "equal":
        verdict = replace(verdict, outcome="unverified", reasons=(*verdict.reasons, *doubts))
    facts.emit("verdict", outcome=verdict.label, tensors=verdict.compared, what=what)
    facts.notify(
        "comparison",
        actual=actual,
        expected=expected,
        verdict=verdict,
        what=what,
        must_differ=False,
    )
    facts.notify("judged", verdict=verdict, expected=expected, explanations=explanations)
    return verdict, explanations


@facts.check
def assert_bitwise_different(
    actual: Tensors,
    expected: Tensors,
    *,
    what: str = "",
    on: Literal["any rank", "every rank"] = "any rank",
) -> Verdict:
    """Fail unless the two sides, of the same names, dtypes and shapes, differ in some bit.

    This is the control of an ``assert_bitwise_equal``: the same comparison on a run with one
    mistake on purpose. It fails if names or shapes do not match, or if all that differs is NaN,
    infinite or a random state, because then it would pass for the wrong reason. In a test on ranks
    one rank that differs is enough.

    Args:
        actual, expected, what: as for ``assert_bitwise_equal``.
        on: "every rank" fails on each rank that is equal.

    Raises:
        ControlFailed: equal, unverified, or not comparable.
    """
    __tracebackhide__ = True
    if on not in ("any rank", "every rank"):
        raise ValueError(f'assert_bitwise_different: on is "any rank" or "every rank", not {on!r}')
    verdict, nothing = compare(actual, expected), ""
    layouts = any(difference.kind != "bits" for difference in verdict.differences)
    complaint = None
    if verdict.outcome == "equal":
        complaint = "the control run is equal: this check cannot fail"
        if verdict.not_finite:
            complaint += (
                ", because NaN and inf hide what differs: take inputs for which all results are "
                "finite"
            )
    elif verdict.outcome == "unverified":
        complaint = "the control run is unverified: it says nothing about this check"
    elif nothing := why_control_shows_nothing(verdict, entries(actual), entries(expected)):
        complaint = nothing
    elif layouts or verdict.only_actual or verdict.only_expected or verdict.reasons:
        complaint = (
            "the control run must differ in bits alone: here the two sides are not comparable"
        )

    outcome = "different as required" if complaint is None else f"{verdict.outcome}, control failed"
    if facts.is_watched("control") and on == "any rank":  # by who judges all ranks together
        caller = facts.caller_of_check()
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        equal = verdict.outcome == "equal" or nothing != ""
        facts.emit("control", equal=equal, what=what or place)
        if equal:
            outcome, complaint = "equal on this rank, judged over all", None

    facts.emit("verdict", outcome=outcome, tensors=verdict.compared, what=what)
    facts.notify(
        "comparison", actual=actual, expected=expected, verdict=verdict, what=what, must_differ=True
    )
    if complaint is not None:
        raise ControlFailed("\n".join(filter(None, [what, complaint, str(verdict)])), verdict)
    return verdict


def _is_random_state(key: Key) -> bool:
    return key.phase == "rng" or key.name.startswith("random state of ")


def compare_control(actual: Tensors, expected: Tensors) -> Verdict:
    """Compare a control, which has to differ, with the run that it controls.

    Returns:
        The verdict, which is unverified, with a reason, if the differing bits prove nothing: see
        ``why_control_shows_nothing``.
    """
    sides = entries(actual), entries(expected)
    verdict = compare_entries(*sides)
    nothing = why_control_shows_nothing(verdict, *sides)
    if nothing:
        return replace(verdict, outcome="unverified", reasons=(*verdict.reasons, nothing))
    return verdict


def why_control_shows_nothing(
    verdict: Verdict, actual: Mapping[Key, Tensor], expected: Mapping[Key, Tensor]
) -> str:
    """Return why the differing bits of a control prove nothing, or an empty string if they do.

    NaN and infinities differ whatever goes wrong, and a random state differs after any other draw.
    """
    if not verdict.differences or any(one.kind != "bits" for one in verdict.differences):
        return ""
    computed = [one.key for one in verdict.differences if not _is_random_state(one.key)]
    if not computed and not all(map(_is_random_state, expected)):
        return (
            "the control run differs in random states alone: it says nothing about this check. "
            "If they are meant, compare record.select(phase='rng') alone"
        )

    if computed and not any(
        bits.differ_where_finite(actual[key], expected[key]) for key in computed
    ):
        return (
            "the control run differs only where one side is NaN or infinite: it says nothing about "
            "this check. Take a mistake, or inputs, that give finite numbers"
        )

    return ""
