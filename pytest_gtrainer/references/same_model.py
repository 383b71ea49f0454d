"""Does a parallel model compute the unsharded one?

Both run in the field, where every order of additions gives the same: so there is no tolerance and
no control. Both get the same numbers: torch's own code loads the unsharded state into the parallel
model, by FQN and placement.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer import facts
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.field import Field, FieldWithExponents
from pytest_gtrainer.arithmetic.hashing import scramble
from pytest_gtrainer.arithmetic.mode import ArithmeticMode, CountReads
from pytest_gtrainer.arithmetic.numbers import Numbers, numbers_of
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.assumptions import (
    describe_empty,
    describe_known,
    describe_unlike,
    taken_on_trust,
    unlike_operators,
)
from pytest_gtrainer.proofs.contexts import has_real_ranks
from pytest_gtrainer.proofs.further_runs import add_branches, further_runs, unlike_rivals
from pytest_gtrainer.proofs.in_numbers import (
    Difference,
    agreement,
    contradiction,
    describe_unchecked,
    difference,
    largest,
    lost_digits,
)
from pytest_gtrainer.proofs.inputs import refuse_no_numbers
from pytest_gtrainer.proofs.on_ranks import exchange_on_ranks
from pytest_gtrainer.proofs.proof import AnotherFunction, FirstDifference, Kind, Proof
from pytest_gtrainer.proofs.prove import common_factor, emit_assumptions
from pytest_gtrainer.references.first_module import first_module
from pytest_gtrainer.references.same_model_arguments import check_arguments, check_local_is_used
from pytest_gtrainer.references.sides import (
    Batch,
    Combine,
    Models,
    SideResults,
    Step,
    data_coordinate,
    groups_along,
)
from pytest_gtrainer.references.simulated import mesh_of
from pytest_gtrainer.references.weights import spell_weights
from pytest_gtrainer.worlds.gathering import gather_objects, on_first_rank
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.simulated.threads.run import run_threads

__tracebackhide__ = facts.hides_frames

_CASTS: Mapping[Kind, str] = {"reordered": "opaque", "rounds elsewhere": "identity"}
_LAST: Kind = "rounds elsewhere"


@facts.check
def assert_same_model(
    parallel: Callable[..., Any],
    reference: Callable[[], nn.Module],
    step: Step,
    batch: Batch,
    *,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] = ("dp",),
    combine: Combine = "mean",
    loss_dims: Sequence[str] = (),
    local: Mapping[str, tuple[str, int]] | None = None,
    ignore_buffers: Sequence[str] = (),
) -> Proof:
    """Fail unless a parallel model computes the same loss and gradients as the unsharded one.

    Buffers that the step changes are compared, too: those of each rank with what the reference
    makes of the same buffers and this rank's batch.

    Both run in exact arithmetic, with the same abstract parameters and inputs: so there is no
    tolerance, and a difference is no rounding. The reference takes the mean of the steps of all
    data coordinates, as data parallelism does. Casts, and so mixed precision, are set aside if the
    two are not equal with them.

        assert_same_model(parallel, reference, step, batch, mesh=gt_mesh, combine="sum")

    ``torch.autocast`` and ``loss_parallel`` around the call are those of forward and backward of
    both sides, on every rank. Another context goes into the step.

    Args:
        parallel: builds this rank's model, of the mesh if it takes an argument; by torch's own
            code, such as ``fully_shard`` and ``parallelize_module``.
        reference: builds the unsharded model, with the same FQNs.
        step: ``step(model, *batch(coordinate))`` is the loss, one number, a mean over this rank's
            batch.
        batch: the inputs by data coordinate, in a tuple. Ranks that share one give the same.
        mesh: of a ranks or simulated world; in a ranks world every rank calls this. None for a
            model without process groups, in one process.
        data_dims: dimensions of the mesh along which ranks have other batches; () if all ranks have
            one.
        combine: the loss of the reference, of the losses of all data coordinates: "mean", "sum", or
            a function of them, such as a mean weighted by tokens. For a function, ranks may return
            shares whose mean, or sum, is the whole loss.
        loss_dims: dimensions of the mesh along which each rank returns a part of the loss, such as
            that of its part of the sequence. The parts are combined, too.
        local: of parameters that each rank has sliced by hand, so that no DTensor says where they
            belong: the dimension of the mesh, and of the tensor, by a pattern of FQNs,
            ``{"experts.*": ("ep", 0)}``. Slices are those of ``torch.chunk``.
        ignore_buffers: patterns of FQNs of buffers that are not compared, such as those that count
            calls, or that ranks share. The proof names them.

    Returns:
        A proof of kind "reordered" (the same function, rounded at the same places), or "rounds
        elsewhere".

    Raises:
        AnotherFunction: the first gradient or loss that differs, the rank, the factor if it is a
            small fraction, and what would repair it.
        TypeError: an argument of another type, or a step that returns something that is no loss.
        VacuousCheck: a mesh of one rank, or one on which no rank communicates or has a part of a
            parameter; or ranks communicate for a log alone, so other numbers in what they get
            change no result. Dimensions along which that is so are named under ``assumes`` of the
            proof.
        ValueError: a mesh without names, or without one of ``data_dims``; a dimension in both of
            ``data_dims`` and ``loss_dims``; equal batches; a reference without gradients, or one
            that ``parallel`` has changed; other FQNs or shapes; a pattern that matches nothing, or
            by which no rank has a part; a loss of several numbers; an empty batch.
    """
    __tracebackhide__ = True
    refuse_no_numbers()
    given_parts = {} if local is None else local
    models = Models(
        parallel, reference, step, batch, data_dims, combine, given_parts, ignore_buffers
    )
    check_arguments(models, mesh, loss_dims)
    if mesh is not None and mesh.size() == 1:
        raise VacuousCheck(
            "a mesh of one rank: nothing is parallel on it, so equal results prove nothing. Take "
            "two ranks or more, or no mesh= for a model without process groups"
        )
    proof, idle, models = _strongest(models, mesh, loss_dims)
    outcome: str = proof.kind
    if idle:
        outcome += f" (nothing parallel along {', '.join(idle)})"
    facts.emit("verdict", outcome=outcome, tensors=proof.compared, what="model")
    emit_assumptions(proof)
    if not proof.is_at_least("rounds elsewhere"):
        says = "the parallel model is not the unsharded one"
        if callable(combine) and proof.kind == "another function":
            says += _said_of_combine(models, mesh)
        if proof.kind == "another function":
            says += _said_of_draws(models, mesh)
        if proof.first is not None and proof.first.result.startswith("buffer "):
            says += (
                "\na step changes a buffer otherwise. If ranks may have other numbers in it, name "
                "it in ignore_buffers="
            )
        if proof.kind == "unknown":
            says = "nobody knows whether the parallel model is the unsharded one"
        raise AnotherFunction(f"{says}\n{proof}", proof)
    return proof


def _strongest(
    models: Models, mesh: DeviceMesh | None, loss_dims: Sequence[str]
) -> tuple[Proof, Sequence[str], Models]:
    """Return a proof of the strongest kind that holds, and where the stronger one begins to fail.

    The dimensions of the mesh along which nothing is parallel come second; then the models, with
    what is known of them.
    """
    before: Mapping[str, Tensor] = {}
    differs: _Answer | None = None
    for kind in _CASTS:
        try:
            if not before:
                reference_side = _reference_now(models, mesh)
                before = reference_side.all_results()
                models = replace(models, is_shared=_is_alike_on_ranks(reference_side))
            answer = _proof_of(kind, models, mesh, loss_dims, before)
        except NoMeaning as error:
            return Proof("unknown", reason=str(error)), (), models
        proof = answer.proof
        if proof.kind in (kind, "unknown"):
            break
        if proof.first is not None and proof.first.result.startswith("parameter "):
            break  # which no rounding explains
        if kind != _LAST:
            differs = answer
    if proof.kind == _LAST and differs is not None:
        proof = replace(proof, first=differs.proof.first, origin=differs.begins())
    return proof, answer.idle, models


def _said_of_combine(models: Models, mesh: DeviceMesh | None) -> str:
    """Return how the losses of ranks are combined instead; "" if nobody knows."""
    ways: tuple[Literal["mean", "sum"], ...] = ("mean", "sum")
    for combine in ways:
        others = replace(models, combine=combine)
        arithmetic = Field(casts=_CASTS[_LAST])
        found, expected = _run_sides(others, mesh, arithmetic)
        if _compare(_LAST, found, expected, mesh).kind == _LAST:
            return f': it takes the {combine} of the losses of ranks, as combine="{combine}" does'
    return ""


def _said_of_draws(models: Models, mesh: DeviceMesh | None) -> str:
    """Return that the step draws random numbers, which need not be the mistake; "" if not."""
    drawn = _reference_now(models, mesh).drawn
    if not drawn:
        return ""
    names = spell_some(sorted(drawn))
    return (
        f"\nthe step draws random numbers ({names}), and ranks draw others than the unsharded "
        "model: call model.eval(), and look again"
    )


def _reference_now(models: Models, mesh: DeviceMesh | None) -> SideResults:
    """Return what the unsharded model makes in the field."""
    _, coordinates = data_coordinate(mesh, models.data_dims)
    mode = ArithmeticMode(Field(casts="opaque"))
    with torch.compiler.set_stance("force_eager"):
        return models.run_reference(mode, coordinates, True)


def _is_alike_on_ranks(side: SideResults) -> bool:
    """Return whether the reference may run on the first of real ranks, for all.

    A reference that communicates has to run on all of them.
    """
    if not has_real_ranks():
        return False
    digests = [int(scramble(own.flatten()).sum()) for own in side.all_results().values()]
    of_ranks = gather_objects((side.has_communicated, digests))
    return all(each == (False, digests) for each in of_ranks)


def _check_reference_stays(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse a reference that is another function since the parallel model has been built.

    Libraries of kernels replace methods of a class, or functions of a module. Then the reference
    has the mistakes of the parallel model, and both are equal.
    """
    for name, own in before.items():
        if name not in after or not torch.equal(own, after[name]):
            raise ValueError(
                f"the {name} of the reference is another one since the parallel model was built: "
                "that changes a class, a function or an object which the reference uses, too. Or "
                "the reference, the step or the batch give other numbers at each call"
            )


def _proof_of(
    kind: Kind,
    models: Models,
    mesh: DeviceMesh | None,
    dims: Sequence[str],
    before: Mapping[str, Tensor],
) -> "_Answer":
    """Return whether the two are equal in a kind, in each arithmetic that may find it.

    Where elements decide something, or have few square roots, they run again with others.

    Args:
        before: what the reference has made before the parallel model was built.
    """
    subject = _Subject(models, mesh, dims)
    after: Mapping[str, Tensor] = {}
    for field in (Field, FieldWithExponents):
        make_arithmetic = partial(field, casts=_CASTS[kind])
        both = subject.in_field(kind, make_arithmetic())
        if field is Field and kind != _LAST and both.expected.is_scaled:
            after = both.expected.all_results()  # the same run as the one before
        if both.proof.kind == kind:
            both = _in_further_runs(kind, subject, make_arithmetic, both)
        has_functions = any(side.has_functions for side in (*both.found, both.expected))
        if both.proof.kind == kind or not has_functions:
            break
    unused: Sequence[str] = ()
    unread: Sequence[str] = ()
    if both.proof.kind == kind:
        unused, unread = _idle_dims(both, subject, make_arithmetic)
    proof = _against_numbers(kind, both, subject)
    if proof.kind == kind:
        proof = replace(proof, assumes=(*proof.assumes, *_said_of_idle(unused, unread)))
    if proof.kind == kind:
        of_one_batch = _said_of_one_batch(subject, both.found)
        proof = replace(proof, assumes=(*proof.assumes, *of_one_batch))
        _check_reference_stays(before, after or _reference_now(models, mesh).all_results())

    def begins() -> str:
        if proof.first is None:
            return ""
        alike = make_arithmetic()
        alike.order_as(both.arithmetic)
        return _first_module(proof.first, both, subject, alike)

    if proof.kind == "another function" and kind == _LAST:
        proof = replace(proof, origin=begins())
    return _Answer(proof, [*unused, *unread], begins)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer whether both sides are equal in a kind.

    Attributes:
        idle: the dimensions of the mesh along which nothing is parallel, if they are.
        begins: runs both sides again, and says at which module they begin to differ. On real ranks
            every rank must call this.
    """

    proof: Proof
    idle: Sequence[str]
    begins: Callable[[], str]


def _idle_dims(
    both: "_Both", subject: "_Subject", make_arithmetic: Callable[[], Field]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the dimensions along which nothing is parallel: no rank has a part of a parameter.

    Along the first ones no rank communicates. Along the second ones ranks do, as for a log, and
    other numbers in what they get change no result.

    Refuses a mesh of such dimensions alone: each rank has computed the reference by itself, as
    with a plan that matches no module.
    """
    mesh = subject.mesh
    if mesh is None:
        return (), ()
    divided = set().union(*(side.divided_dims for side in both.found))
    used = set().union(*(side.used_dims for side in both.found))
    unused, unread = [], []
    for name in mesh.mesh_dim_names or ():
        if name in divided:
            continue
        if name not in used:
            unused.append(name)
            continue
        alike = make_arithmetic()
        alike.order_as(both.arithmetic)
        if not _depends_on(name, both.found, subject, alike):
            unread.append(name)
    if len(unused) + len(unread) == mesh.ndim:
        says = "no rank came to a collective in its step"
        if unread:
            says = (
                "the floating-point numbers that ranks get of each other in a step, as for a log, "
                "change no loss, gradient or buffer"
            )
        raise VacuousCheck(
            f"on a mesh of {mesh.size()} ranks {says}, and none has a part of a parameter: each "
            "has computed the unsharded model by itself, so equal results prove nothing. Does the "
            "plan match a module, and is the mesh used?"
        )
    return unused, unread


def _depends_on(
    dim: str, before: Sequence[SideResults], subject: "_Subject", arithmetic: Field
) -> bool:
    """Return whether results depend on what ranks along a dimension of the mesh get.

    This is the control of a mesh: the parallel model runs again, and what its step gets of other
    ranks along ``dim`` is changed. On real ranks every rank must call this.
    """
    try:
        with torch.compiler.set_stance("force_eager"):
            found = _run_parallel(subject.models, subject.mesh, arithmetic, disturbed=dim)
    except Exception:
        return True  # such as a decision that nobody can follow with other numbers
    # Joined losses are no longer those of a rank.
    are_joined = bool(subject.dims) or callable(subject.models.combine)
    for earlier, later in zip(before, found, strict=True):
        pairs = [
            (earlier.gradients, later.gradients),
            (_changed_buffers(earlier), _changed_buffers(later)),
        ]
        if not are_joined:
            pairs.append((earlier.losses, later.losses))
        for old, new in pairs:
            if old.keys() != new.keys():
                return True
            if any(not torch.equal(own, new[key]) for key, own in old.items()):
                return True
    return False


def _changed_buffers(side: SideResults) -> dict[Any, Tensor]:
    """Return the buffers that a step has changed, as it leaves them."""
    found = {}
    for coordinate, changed in side.buffers.items():
        for fqn, each in changed.items():
            found[coordinate, fqn] = each.after
    return found


def _said_of_idle(unused: Sequence[str], unread: Sequence[str]) -> tuple[str, ...]:
    """Return lines on dimensions along which nothing is parallel, if there are any."""
    lines = []
    if unused:
        along = " or ".join(map(repr, unused))
        lines.append(
            f"nothing is parallel along {along}, so this says nothing of parallelism there"
        )
    if unread:
        along = " or ".join(map(repr, unread))
        lines.append(
            f"nothing is parallel along {along}: the floating-point numbers that ranks get of "
            "each other there, as for a log, change no loss, gradient or buffer, so this says "
            "nothing of parallelism there"
        )
    return tuple(lines)


def _said_of_one_batch(subject: "_Subject", found: Sequence[SideResults]) -> tuple[str, ...]:
    """Return a line on dimensions of which all ranks have one batch, and reduce gradients."""
    reduced = set().union(*(side.reduced_dims for side in found))
    names = sorted(reduced - {*subject.models.data_dims, *subject.dims})
    if not names:
        return ()
    along = " and ".join(map(repr, names))
    return (
        f"all ranks along {along} have one batch, as data_dims= says, so a gradient that nobody "
        "reduces there would not show",
    )


def _unlike_rivals(found: Sequence[SideResults], expected: SideResults) -> Tensor:
    """Return the elements that one side alone compares with others, or sorts."""
    of_ranks = [side.arithmetic.rivals for side in found if side.arithmetic is not None]
    if not of_ranks or expected.arithmetic is None:
        return torch.empty(0, dtype=torch.int64)
    return unlike_rivals(torch.cat(of_ranks).unique(), expected.arithmetic.rivals)


@dataclass(frozen=True, slots=True)
class _Both:
    """Both sides in the field.

    Attributes:
        found: what each rank has made.
        expected: what the unsharded model has made.
        proof: of the kind that was asked for, if they are equal.
    """

    arithmetic: Arithmetic
    found: Sequence[SideResults]
    expected: SideResults
    proof: Proof


def _add_branches(earlier: _Both, later: _Both) -> None:
    """Add the branches that both sides have taken in earlier runs to those of a later one."""
    sides = (*earlier.found, earlier.expected), (*later.found, later.expected)
    for before, after in zip(*sides, strict=True):
        if before.arithmetic is not None and after.arithmetic is not None:
            add_branches(after.arithmetic, before.arithmetic)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The models that are compared, on a mesh, along which ranks compute parts of a loss."""

    models: Models
    mesh: DeviceMesh | None
    dims: Sequence[str]

    def in_field(self, kind: Kind, arithmetic: Arithmetic) -> _Both:
        """Run both sides in an arithmetic of a kind. On real ranks every rank must call this."""
        found, expected = _run_sides(self.models, self.mesh, arithmetic)
        _join_losses(found, self.mesh, self.dims, self.models.combine, arithmetic)
        _join_shares(found, expected, self.models.combine, arithmetic)
        return _Both(arithmetic, found, expected, _compare(kind, found, expected, self.mesh))

    def in_numbers(
        self, numbers: Numbers, *, carries_casts: bool = False
    ) -> tuple[Difference, str]:
        """Return how far both sides are apart, and what their real losses contradict.

        Args:
            carries_casts: both sides round at the same places, so neither may lose more digits.
        """
        if numbers.shaken:
            return self._roundings(numbers), ""
        found, expected = _run_sides(self.models, self.mesh, numbers)
        if any(side.real.keys() - expected.real.keys() for side in found):
            return Difference(), ""
        # These drop real losses of which each rank has a part.
        _join_losses(found, self.mesh, self.dims, self.models.combine, numbers)
        _join_shares(found, expected, self.models.combine, numbers)
        # With numbers that nobody gave an overflow on one side says nothing: large scores overflow
        # in a softmax that is computed without their maximum.
        says = _apart_in_real_numbers(found, expected, may_overflow=numbers.seed > 0)
        if not says and carries_casts:
            says = _lost_digits(found, expected)
        # The reference has the inputs of all ranks.
        assert isinstance(expected.arithmetic, Numbers)
        largest_input = expected.arithmetic.largest
        numbers.has_digits = numbers.has_digits or expected.arithmetic.has_digits
        differences = [Difference()]
        for rank, side in enumerate(found):
            own, wanted = side.results(), side.part_of(expected)
            for fqn in side.parameters:
                name = f"gradient of {fqn}"
                if name in wanted or name in own:  # no gradient is one of 0
                    own.setdefault(name, torch.zeros_like(wanted.get(name, own.get(name))))
                    wanted.setdefault(name, torch.zeros_like(own[name]))
            sides: list[dict[tuple[str, int], Tensor]] = []
            for results in (own, wanted):
                sides.append({(name, rank): numbers_of(results[name]) for name in own})
            differences.append(difference(sides[0], sides[1], largest_input))
        return largest(differences), says

    def _roundings(self, shaken: Numbers) -> Difference:
        """Return how far each side is from itself with other last digits."""
        plain = _run_sides(self.models, self.mesh, Numbers(shaken.seed))
        other = _run_sides(self.models, self.mesh, shaken)
        differences = []
        for before, after in zip((*plain[0], plain[1]), (*other[0], other[1]), strict=True):
            sides: list[dict[tuple[str, None], Tensor]] = []
            for results in (before.results(), after.results()):
                sides.append({(name, None): numbers_of(each) for name, each in results.items()})
            differences.append(difference(sides[0], sides[1], largest_input=0.0))
        return largest(differences)


def _in_further_runs(
    kind: Kind, subject: _Subject, make_arithmetic: Callable[[], Field], first: _Both
) -> _Both:
    """Run both sides, which are equal in a first run, in the ``further_runs`` that it asks for.

    Return the first run in which they differ, or the last one, with the branches of all runs.
    """
    latest = first
    of_ranks = [side.chances for side in first.found]
    for further in further_runs(of_ranks, [first.expected.chances]):
        earlier, latest = latest, subject.in_field(kind, further.set_up(make_arithmetic()))
        if latest.proof.kind != kind:
            return latest
        _add_branches(earlier, latest)
        favoured = _unlike_rivals(latest.found, latest.expected)
        if further.is_for_limits or not len(favoured):
            continue
        # The same run, in which these elements are larger or smaller than all others.
        again = further.set_up(make_arithmetic(), favoured)
        earlier, latest = latest, subject.in_field(kind, again)
        if latest.proof.kind != kind:
            return latest
        _add_branches(earlier, latest)
    return latest


def _against_numbers(kind: Kind, both: _Both, subject: _Subject) -> Proof:
    """Return a proof with what it assumes; "unknown" if numbers, or unknown operators, say so."""
    proof, found, expected = both.proof, both.found, both.expected
    arithmetics, reads = [], 0
    for side in (*found, expected):
        reads += side.reads
        if side.arithmetic is not None:
            arithmetics.append(side.arithmetic)
    if proof.kind == kind:
        proof = _held_to_numbers(proof, kind, subject, reads=reads > 0)
    elif kind == _LAST and proof.first is not None and proof.first.element is not None:
        unlike = unlike_operators(arithmetics[:-1], arithmetics[-1:])
        if unlike and proof.factor is None:
            reason = describe_unlike(unlike)
        else:
            reason = agreement(
                lambda numbers: subject.in_numbers(numbers)[0],
                decides=any(side.chances.decides for side in (*found, expected)),
            )
        if reason:
            proof = replace(proof, kind="unknown", reason=reason, repairs=())
    assumes = (
        *proof.assumes,
        *_said_of_gradients(expected),
        *_said_of_precision(kind, found),
        *describe_known(expected.known),
        *_said_of_compiled(found),
        *_said_of_buffers(subject.models, found, expected),
        *taken_on_trust(arithmetics, reads),
    )
    if expected.arithmetic is not None:  # ranks may have parts of parameters without elements
        assumes += describe_empty([expected.arithmetic], [], in_world=False)
    return replace(proof, assumes=assumes)


def _held_to_numbers(proof: Proof, kind: Kind, subject: _Subject, *, reads: bool) -> Proof:
    """Return a proof, unless the numbers of both sides contradict it."""
    says = [""]

    def compare(numbers: Numbers) -> Difference:
        found, contradicts = subject.in_numbers(numbers, carries_casts=kind != _LAST)
        # The inputs of the first draw are near the given ones. Of others rounding may leave less.
        if numbers.seed <= 1 and not numbers.shaken:
            says[0] = contradicts
        return found

    try:
        reason = contradiction(kind, compare, reads=reads) or says[0]
    except NoMeaning as error:
        return replace(proof, assumes=(describe_unchecked(error),))
    return Proof("unknown", reason=reason) if reason else proof


def _said_of_gradients(expected: SideResults) -> tuple[str, ...]:
    """Return a line on parameters of which nothing is compared, if there are any."""
    names = []
    for fqn in sorted(expected.parameters):
        gradient = expected.gradients.get(fqn)
        if gradient is None or not bool(gradient.any()):
            names.append(fqn)
    if not names:
        return ()
    shown = spell_some(names)
    return (f"the reference has no gradient but 0 of {shown}: nothing else of it is compared",)


def _said_of_compiled(found: Sequence[SideResults]) -> tuple[str, ...]:
    if not any(side.is_compiled for side in found):
        return ()
    return ("modules that torch.compile has changed run uncompiled: record.prove() judges graphs",)


def _said_of_buffers(
    models: Models, found: Sequence[SideResults], expected: SideResults
) -> tuple[str, ...]:
    """Return lines on buffers that are not compared, if there are any."""
    of_ranks = set().union(*(changed for side in found for changed in side.buffers.values()))
    both_have = expected.held_buffers & _buffers_of(found)
    lines = {
        "ignore_buffers: not compared": set(filter(models.ignores, expected.held_buffers)),
        "parameters that the step changes are not compared after it": expected.changed_parameters,
        "buffers that the reference has not are not compared": of_ranks - expected.held_buffers,
        "buffers that the reference changes in its backward, once for all batches, are not "
        "compared": expected.late_buffers & both_have,
    }
    return tuple(f"{says}: {spell_some(sorted(names))}" for says, names in lines.items() if names)


def _buffers_of(found: Sequence[SideResults]) -> set[str]:
    return set().union(*(side.held_buffers for side in found))


def _said_of_precision(kind: Kind, found: Sequence[SideResults]) -> tuple[str, ...]:
    """Return a line on mixed precision, if there is any."""
    policies = sorted({policy for side in found for policy in side.precisions})
    if not policies:
        return ()
    done = "carried, and both sides round alike"
    if kind == _LAST:
        done = "set aside, so its casts change nothing"
    return (f"mixed precision is {done}: {' and '.join(policies)}",)


def _first_module(first: FirstDifference, both: _Both, subject: _Subject, arithmetic: Field) -> str:
    """Run both sides again, with hooks on all modules, and return where they begin to differ."""
    models, mesh = subject.models, subject.mesh
    try:
        found, expected = _run_sides(models, mesh, arithmetic, follows=True)
    except NoMeaning:
        return ""  # hooks read more tensors than the models do
    calls = [next(iter(side.calls.items())) for side in found]
    wanted = [expected.calls[coordinate] for coordinate in expected.losses]
    # Where losses have weights, each rank's gradients have its own.
    is_exact = expected.is_scaled and not subject.dims and not callable(models.combine)
    gradients: dict[str, bool] = {}
    for side in both.found:
        of_reference = side.part_of(both.expected)
        for fqn, own in side.gradients.items():
            whole = of_reference.get(f"gradient of {fqn}", torch.zeros_like(own))
            if bool(whole.any()):
                gradients[fqn] = gradients.get(fqn, True) and torch.equal(own, whole)
    begins = first_module(
        first.result,
        calls,
        wanted,
        mesh,
        is_exact=is_exact,
        tied=expected.tied,
        gradients=gradients,
    )
    return (
        begins
        + _said_of_batches(first, both, expected.of_batches)
        + _said_of_schedule(first, both.found)
    )


def _said_of_schedule(first: FirstDifference, found: Sequence[SideResults]) -> str:
    """Return why a pipeline changes a buffer otherwise; "" if each rank has a loss."""
    if not first.result.startswith("buffer ") or all(side.losses for side in found):
        return ""
    return (
        ". A schedule runs a stage once for each microbatch, and in its first step once more to "
        "infer shapes unless PipelineStage has input_args= and output_args=: each run changes "
        "buffers"
    )


def _said_of_batches(
    first: FirstDifference, both: _Both, of_batches: Sequence[Mapping[str, Tensor]]
) -> str:
    """Return how much each batch counts in a gradient that differs; "" if nobody knows."""
    fqn, side = first.result.removeprefix("gradient of "), both.found[first.rank or 0]
    own, wanted = side.gradients.get(fqn), side.part_of(both.expected).get(first.result)
    parts = [batch[fqn] for batch in of_batches if fqn in batch]
    if fqn in side.parts:
        parts = [side.parts[fqn].of(part) for part in parts]
    if own is None or wanted is None or len(of_batches) < 2 or len(parts) < len(of_batches):
        return ""
    words = spell_weights(own, wanted, parts)
    return f". {words[0].upper()}{words[1:]}" if words else ""


def _run_sides(
    models: Models, mesh: DeviceMesh | None, arithmetic: Arithmetic, follows: bool = False
) -> tuple[list[SideResults], SideResults]:
    """Return what each rank has made, and the reference; ``follows`` keeps what modules return."""
    # Dynamo refuses to compile under a dispatch mode, as flex_attention does by itself.
    with torch.compiler.set_stance("force_eager"):
        return _run_both_sides(models, mesh, arithmetic, follows)


def _run_parallel(
    models: Models,
    mesh: DeviceMesh | None,
    arithmetic: Arithmetic,
    follows: bool = False,
    disturbed: str = "",
) -> list[SideResults]:
    """Return what each rank has made; see ``Models.run_parallel``."""
    mode = ArithmeticMode(arithmetic)
    if mesh is None or has_real_ranks():
        if mesh is not None:
            mode.exchange = exchange_on_ranks
        side = None
        try:
            with mode, CountReads(mode):
                side = models.run_parallel(mode, mesh, follows, disturbed)
            side.note(mode)
        except Exception:
            if not disturbed:
                raise
        of_ranks = [side] if mesh is None else gather_objects(side)
        # A rank that raises with other numbers must not go on without the others.
        results = [each for each in of_ranks if each is not None]
        if len(results) < len(of_ranks):
            raise NoMeaning("a rank raises with other numbers")
        return results
    extents = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    net = AnyOrder.of(NetModel.of_world(mesh.size()))

    def run_rank(rank: int) -> SideResults:
        with CountReads(mode):
            return models.run_parallel(mode, mesh_of(extents), follows, disturbed)

    found: list[SideResults] = run_threads(
        mesh.size(), run_rank, net=net, under=mode.on_another_thread
    )
    found[0].note(mode)
    return found


def _run_both_sides(
    models: Models, mesh: DeviceMesh | None, arithmetic: Arithmetic, follows: bool
) -> tuple[list[SideResults], SideResults]:
    alike = copy.deepcopy(arithmetic)
    found = _run_parallel(models, mesh, arithmetic, follows)
    check_local_is_used(models, mesh, found)
    # Second, as only the parallel side knows whether a schedule calls backward.
    is_scaled = {side.is_scaled for side in found}
    if len(is_scaled) > 1:
        raise ValueError(
            "the step returns a loss to call backward on on some ranks, and none on others: "
            "where a schedule calls backward, return losses detached"
        )
    _, coordinates = data_coordinate(mesh, models.data_dims)
    mode = ArithmeticMode(alike)

    def run_reference() -> SideResults:
        side = models.run_reference(mode, coordinates, found[0].is_scaled, follows)
        side.note(mode)
        return side

    expected = on_first_rank(run_reference) if models.is_shared else run_reference()
    for side in found:
        side.match_buffers(expected)
    return found, expected


def _join_shares(
    found: Sequence[SideResults], expected: SideResults, combine: Combine, arithmetic: Arithmetic
) -> None:
    """Give ranks the losses of the reference, if theirs are shares that make the whole one.

    A loss weighted by tokens is often the sum of a rank's tokens, over the count of all. Its mean
    over ranks, or its sum, is the whole loss, as gradients are averaged or added.
    """
    if not callable(combine) or expected.whole is None:
        return
    is_in_numbers = isinstance(arithmetic, Numbers)
    shares: dict[int, Tensor] = {}
    for side in found:
        for coordinate, loss in side.losses.items():
            share = shares.setdefault(coordinate, loss)
            if not is_in_numbers and not torch.equal(share, loss):
                return
    if shares.keys() != expected.losses.keys():
        return
    fits = []
    for times in (1, len(shares)):
        if is_in_numbers:
            total = torch.stack(list(map(numbers_of, shares.values()))).sum(0)
            fits.append(torch.allclose(total, times * numbers_of(expected.whole), rtol=1e-9))
        else:
            whole = Prime(P).multiply(expected.whole, torch.tensor(times))
            fits.append(torch.equal(_sum_of(list(shares.values())), whole))
    if not any(fits):
        return
    for side in found:
        for coordinate in side.losses:
            side.losses[coordinate] = expected.losses[coordinate]
        side.real.clear()
        side.exponents.clear()


def _join_losses(
    found: Sequence[SideResults],
    mesh: DeviceMesh | None,
    dims: Sequence[str],
    combine: Combine,
    arithmetic: Arithmetic,
) -> None:
    """Give each rank the loss of which ranks along ``dims`` have computed parts."""
    if mesh is None or not dims:
        return
    for side in found:
        # A part of a loss is nothing to compare with the whole.
        side.real.clear()
        side.exponents.clear()
    for ranks in groups_along(mesh, dims):
        coordinates = set().union(*(found[rank].losses for rank in ranks))
        for coordinate in coordinates:
            without = [rank for rank in ranks if coordinate not in found[rank].losses]
            if without:
                raise ValueError(
                    f"the step returns no loss on rank {spell_some(without)}, and a part of it on "
                    f"others along loss_dims={tuple(dims)}: return a part on each of them"
                )
            parts = [found[rank].losses[coordinate] for rank in ranks]
            if isinstance(arithmetic, Numbers):
                numbers = torch.stack([numbers_of(part) for part in parts])
                total = numbers.mean(0) if combine == "mean" else numbers.sum(0)
                total = arithmetic.lift(total)
            else:
                total = _sum_of(parts)
                if combine == "mean":
                    total = Prime(P).divide(total, torch.tensor(len(ranks)))
            for rank in ranks:
                found[rank].losses[coordinate] = total


def _sum_of(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = Prime(P).add(total, part)
    return total


def _check_losses(found: Sequence[SideResults], expected: SideResults) -> None:
    """Refuse losses that no batch changes, and those that no rank returns."""
    first, *others = expected.losses.values()
    if others and all(torch.equal(first, other) for other in others):
        raise ValueError(
            "the loss of all data coordinates is equal, so a gradient that nobody reduces would "
            "not show: does the step read what differs in the batches?"
        )
    for coordinate in expected.losses:
        if not any(coordinate in side.losses for side in found):
            raise ValueError(
                f"no rank returns the loss of data coordinate {coordinate}: the step of a "
                "pipeline returns that of the last stage, and None on the others"
            )


def _compare(
    kind: Kind, found: Sequence[SideResults], expected: SideResults, mesh: DeviceMesh | None
) -> Proof:
    # Below all numbers that a program writes, relu() is 0 of everything.
    of_reference = expected.arithmetic
    if of_reference is None or not (of_reference.bias or of_reference.gaps):
        if not any(bool(own.any()) for own in expected.gradients.values()):
            raise ValueError(
                "no parameter of the reference has a gradient but 0: is the loss that of the model?"
            )
        _check_losses(found, expected)
    held = set().union(*(side.parameters for side in found))
    missing = sorted(expected.parameters - held)
    if missing:
        says = "no rank has it, and the reference does"
        first = FirstDifference(f"parameter {missing[0]}", says=says)
        return Proof("another function", len(expected.results()), first)
    # A loss that differs says more than the gradients that follow from it.
    for rank, side in enumerate(found):
        for coordinate, loss in side.losses.items():
            name = f"loss of data coordinate {coordinate}"
            different = _difference(name, rank, loss, expected.losses[coordinate])
            exponents = side.exponents.get(coordinate), expected.exponents.get(coordinate)
            if different is not None and not _are_equal_exponents(*exponents):
                return _explain(different, found, expected, mesh)
    different = _difference_in_gradients(found, expected) or _difference_in_state(found, expected)
    if different is not None and different.element is None:
        return Proof("another function", len(expected.results()), different)
    if different is not None:
        return _explain(different, found, expected, mesh)
    reason = (
        _why_nothing_is_compared(found, expected)
        or _apart_in_real_numbers(found, expected)
        or _apart_in_real_gradients(found, expected)
    )
    if reason:
        return Proof("unknown", reason=reason)
    return Proof(kind, compared=sum(len(side.results()) for side in found))


def _why_nothing_is_compared(found: Sequence[SideResults], expected: SideResults) -> str:
    """Return why equal elements would prove nothing; "" if they do.

    All NaN are equal, and infinities too, whatever they are made of.
    """
    for side in (expected, *found):
        for name, own in side.results().items():
            if bool((own >= P).any()):
                return (
                    f"the {name} is NaN or infinite in exact arithmetic: an infinity, as of a "
                    "mask, is multiplied by numbers that nobody knows"
                )
    return ""


def _apart_in_real_numbers(
    found: Sequence[SideResults], expected: SideResults, *, may_overflow: bool = False
) -> str:
    """Return how the real losses contradict equal elements; "" if they do not.

    They would, if something computed where no dispatch mode sees it, such as NumPy. Where elements
    were compared the real numbers followed these, and mean nothing.

    Args:
        may_overflow: whether a loss that is not finite contradicts nothing.
    """
    if any(side.chances.decides for side in (*found, expected)):
        return ""
    for rank, side in enumerate(found):
        for key, own in side.real.items():
            wanted = expected.real.get(key)
            if wanted is None:  # of other inputs
                continue
            if may_overflow and not (math.isfinite(own) and math.isfinite(wanted)):
                continue
            if _are_losses_apart(own, wanted):
                return (
                    f"the real loss on rank {rank} is {own:g}, and {wanted:g} in the reference, "
                    f"though the elements are equal: {_why_apart(own, wanted)}"
                )
    return ""


def _lost_digits(found: Sequence[SideResults], expected: SideResults) -> str:
    """Return which loss, or gradient by its size, loses digits on one side; "" if none does.

    Args:
        found, expected: what ran in ``Numbers``, beside the numbers in the models' own dtypes.
    """
    losses, gradients = _Digits(), _Digits()
    coarsest = 0.0
    have_same_inputs = set().union(*(each.given for each in found)) == expected.given
    for rank, side in enumerate(found):
        if isinstance(side.arithmetic, Numbers):
            coarsest = max(coarsest, side.arithmetic.narrowest)
        for coordinate, total in side.real.keys() & expected.real.keys():
            key = f"the loss of data coordinate {coordinate}", rank
            exact = side.losses[coordinate], expected.losses[coordinate]
            losses.add(key, side.real[coordinate, total], expected.real[coordinate, total], exact)
        if not have_same_inputs:
            continue
        for fqn in sorted(side.sizes.keys() & expected.sizes.keys() - side.parts.keys()):
            exact = side.gradients[fqn], expected.gradients[fqn]
            key = f"the size of the gradient of {fqn}", rank
            gradients.add(key, side.sizes[fqn], expected.sizes[fqn], exact)
    return losses.lost(coarsest) or gradients.lost(coarsest)


class _Digits:
    """Numbers of both sides by name and rank: in their own dtypes, and in float64."""

    def __init__(self) -> None:
        self._own: tuple[dict[Any, Tensor], dict[Any, Tensor]] = ({}, {})
        self._exact: tuple[dict[Any, Tensor], dict[Any, Tensor]] = ({}, {})

    def add(self, key: Any, found: float, wanted: float, exact: Sequence[Tensor]) -> None:
        """Add two numbers, and the elements of the tensors whose sums of sizes they are."""
        for place, number in enumerate((found, wanted)):
            self._own[place][key] = torch.tensor(abs(number))
            self._exact[place][key] = numbers_of(exact[place]).abs().sum()

    def lost(self, coarsest: float) -> str:
        return lost_digits(self._own, self._exact, coarsest=coarsest)


def _why_apart(own: float, wanted: float) -> str:
    rounding = "rounding leaves no digit"
    if math.isfinite(own) != math.isfinite(wanted):
        rounding = "numbers overflow on one side"
    return f"{rounding}, or something computes where no dispatch mode sees it"


def _apart_in_real_gradients(found: Sequence[SideResults], expected: SideResults) -> str:
    """Return which real gradient contradicts equal elements, by its size; "" if none does."""
    if any(side.chances.decides for side in (*found, expected)):
        return ""
    if set().union(*(side.given for side in found)) != expected.given:
        return ""  # other inputs
    coarsest = 0.0
    for each in (*found, expected):
        if each.arithmetic is not None:
            coarsest = max(coarsest, each.arithmetic.coarsest)
    largest = max(filter(math.isfinite, expected.sizes.values()), default=0.0)
    # A gradient that cancels to nothing has the rounding errors of its terms.
    least = max(1e-3, 8 * coarsest) * largest
    for rank, side in enumerate(found):
        for fqn in sorted(side.sizes.keys() & expected.sizes.keys() - side.parts.keys()):
            own, wanted = side.sizes[fqn], expected.sizes[fqn]
            if math.isfinite(own) and math.isfinite(wanted):
                is_apart = abs(own - wanted) > max(0.1, 8 * coarsest) * wanted + least
            else:
                is_apart = math.isfinite(own) != math.isfinite(wanted)
            if is_apart:
                return (
                    f"the real gradient of {fqn} on rank {rank} is {own:g} in size, and {wanted:g} "
                    f"in the reference, though the elements are equal: {_why_apart(own, wanted)}"
                )
    return ""


def _are_losses_apart(own: float, wanted: float) -> bool:
    if not math.isfinite(own) or not math.isfinite(wanted):
        return own != wanted and not (math.isnan(own) and math.isnan(wanted))
    # Half precision leaves few digits, and a loss may be close to 0 by cancellation.
    return abs(own - wanted) > 0.1 * abs(wanted) + 1e-3


def _difference_in_gradients(
    found: Sequence[SideResults], expected: SideResults
) -> FirstDifference | None:
    """Return the first gradient that differs; one side may have none of a parameter, if it is 0."""
    for rank, side in enumerate(found):
        wanted = side.part_of(expected)
        for fqn in sorted(side.parameters):
            name = f"gradient of {fqn}"
            own = side.gradients.get(fqn)
            says = ""
            if own is None and name in wanted and bool(wanted[name].any()):
                says = f"has no gradient on rank {rank}, and the reference has one"
            elif own is not None and name not in wanted and bool(own.any()):
                says = f"has a gradient on rank {rank}, and the reference has none"
            if says:
                return FirstDifference(name, rank, says=says)
        for fqn, own in side.gradients.items():
            name = f"gradient of {fqn}"
            expects = wanted.get(name, torch.zeros_like(own))
            different = _difference(name, rank, own, expects)
            if different is not None:
                return different
    return None


def _difference_in_state(
    found: Sequence[SideResults], expected: SideResults
) -> FirstDifference | None:
    """Return the first tensor that the step of a rank changes otherwise than the reference's."""
    for rank, side in enumerate(found):
        of_reference = expected.changed_parameters & side.parameters
        for fqn in sorted(side.changed_parameters ^ of_reference):
            says = f"the step changes it on rank {rank}, and not in the reference"
            if fqn in of_reference:
                says = f"the step of the reference changes it, and not that of rank {rank}"
            says += ": leave the optimiser out of the step"
            return FirstDifference(f"parameter {fqn}", rank, says=says)
        for name, own in side.found_buffers.items():
            different = _difference(name, rank, own, side.wanted_buffers[name])
            if different is not None:
                return different
    changed = set().union(*expected.buffers.values())
    for fqn in sorted(changed - _buffers_of(found)):
        says = "no rank has it, and a step of the reference changes it"
        return FirstDifference(f"buffer {fqn}", says=says)
    return None


def _are_equal_exponents(found: Tensor | None, wanted: Tensor | None) -> bool:
    return found is not None and wanted is not None and torch.equal(found, wanted)


def _difference(name: str, rank: int, found: Tensor, wanted: Tensor) -> FirstDifference | None:
    if found.shape != wanted.shape:
        return FirstDifference(
            name, rank, says=f"shape {list(found.shape)}, expected {list(wanted.shape)}"
        )
    places = (found != wanted).nonzero()
    if not len(places):
        return None
    return FirstDifference(name, rank, tuple(places[0].tolist()), len(places), found.numel())


def _explain(
    first: FirstDifference,
    found: Sequence[SideResults],
    expected: SideResults,
    mesh: DeviceMesh | None,
) -> Proof:
    """Return the proof that says where the models differ, by which factor, and what repairs it."""
    of_ranks = [side.results().get(first.result) for side in found]
    wanted = [side.part_of(expected).get(first.result) for side in found]
    factor = None
    repairs: tuple[str, ...] = ()
    own, whole = of_ranks[first.rank or 0], wanted[first.rank or 0]
    if first.element is not None and own is not None and whole is not None:
        factor = common_factor(own, whole)
    known = [each for each in of_ranks if each is not None]
    known_wanted = [each for each in wanted if each is not None]
    if mesh is not None and len(known) == len(known_wanted) == len(found):
        repairs = tuple(repairs_of(known, known_wanted, mesh))
    count = len(expected.results())
    return Proof("another function", count, first, factor=factor, repairs=repairs)


def repairs_of(
    of_ranks: Sequence[Tensor], wanted: Sequence[Tensor], mesh: DeviceMesh
) -> Iterator[str]:
    """Yield what makes the results of all ranks the expected ones, along one dimension each."""
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        size = mesh.size(dim)
        if size == 1:
            continue
        sums: dict[int, Tensor] = {}
        are_alike = True
        for group in groups_along(mesh, [name]):
            parts = [of_ranks[rank] for rank in group]
            if len({part.shape for part in parts}) > 1:
                return
            are_alike = are_alike and all(torch.equal(part, parts[0]) for part in parts)
            sums |= dict.fromkeys(group, _sum_of(parts))
        if are_alike:
            continue  # their sum is a factor, and no reduction is missing
        count = torch.tensor(size)
        means = {rank: Prime(P).divide(total, count) for rank, total in sums.items()}
        for words, results in (("a sum", sums), ("a mean", means)):
            if all(torch.equal(results[rank], own) for rank, own in enumerate(wanted)):
                yield f"{words} over {name!r}"
