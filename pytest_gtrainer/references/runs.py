"""Check that two runs of any trainer are equal, in layouts and bits, and that the check could fail.

``assert_runs_equal`` takes functions, not a configuration. ``assert_parity`` judges its own two
runs by the same functions: ``check_equal`` and ``require_difference``.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.facts import check_switches, spell_some
from pytest_gtrainer.graph.foreign import AnyGraph, Names
from pytest_gtrainer.graph.layout import (
    BucketLayout,
    LayoutDifference,
    assert_same_layout,
    bucket_layout,
)
from pytest_gtrainer.numerics import bits
from pytest_gtrainer.numerics.compare import (
    BitwiseDifference,
    compare_control,
    judged,
    starts_differ,
)
from pytest_gtrainer.numerics.record import Record, Tensors, entries
from pytest_gtrainer.numerics.run_to_run import Kept, kept, memory_of
from pytest_gtrainer.numerics.verdict import Verdict, where
from pytest_gtrainer.proofs.contexts import has_real_ranks
from pytest_gtrainer.proofs.programs import Observed, Program, make_abstract
from pytest_gtrainer.proofs.proof import AnotherFunction, Proof, kind_in_words, offer_proof
from pytest_gtrainer.proofs.prove import emit_proof, prove_programs
from pytest_gtrainer.references.config import start_of, trained_state
from pytest_gtrainer.references.proven import ResultRecorder, net_for, shard_of
from pytest_gtrainer.references.replicas import on_any_rank, texts_of_ranks
from pytest_gtrainer.tracing.model import local
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.net import row_of
from pytest_gtrainer.worlds.simulated.threads.run import run_threads
from pytest_gtrainer.worlds.spec import World

Side = Callable[..., Any]
_PROOF = "assert_runs_equal(..., proof=True)"


def check_equal(
    actual: Tensors,
    expected: Tensors,
    what: str,
    *,
    check_layout: Callable[[], tuple[str, ...]],
    where: str,
    row: dict[str, Any],
    explain: Callable[[Verdict], Iterable[str]],
    doubts: Sequence[str] = (),
) -> tuple[str, ...]:
    """Check that layouts and bits of two runs are equal; return what ``check_layout`` does.

    Args:
        check_layout: raises LayoutDifference if the layouts differ. It may do so where no bit does.
        where: the ranks that are compared, for the message.
        row: the row of a net in the summary's table, which gets its result.
        explain: returns lines about a difference of bits.
        doubts: why equal bits would prove nothing.
    """
    __tracebackhide__ = True
    verdict, explanations = judged(actual, expected, what, doubts)
    bits_differ = ""
    if verdict.outcome != "equal":
        row["result"] = "UNVERIFIED"
        if verdict.first:
            at = verdict.first.key
            row["result"] = f"DIFFERENT at step {at.step}, {at.phase} of {at.name}"
        lines = [starts_differ(actual, expected), str(verdict), *explain(verdict), *explanations]
        bits_differ = "\n".join(filter(None, lines))

    try:
        from_layouts = check_layout()
    except LayoutDifference as difference:
        # It is the context of what is raised: a failed check without an heir counts as hidden.
        if bits_differ:
            words = f"{difference}\nand therefore bits are {bits_differ}"
            raise LayoutDifference(words) from None
        row["result"] = "layouts differ, bits do not"
        raise LayoutDifference(
            f"{difference}\nall bits are equal {where}: only the layout shows it"
        ) from None
    if bits_differ:
        raise BitwiseDifference(bits_differ, verdict)
    return from_layouts


def require_difference(control: Verdict, mistake: str, why_equal: Callable[[bool], str]) -> None:
    """Raise, unless the control has other bits on some rank. Every rank must call it.

    Args:
        mistake: what the control does otherwise, in front of the reasons of an unverified one.
        why_equal: returns the message for an equal control, given whether its numbers are finite.
    """
    __tracebackhide__ = True
    # One rank that sees the other order is enough.
    if on_any_rank(control.outcome == "different"):
        return
    own = "\n".join(control.reasons)
    for reasons in texts_of_ranks(own) if has_real_ranks() else [own]:
        if reasons:
            raise VacuousCheck(f"{mistake}{reasons}")
    raise VacuousCheck(why_equal(on_any_rank(bool(control.not_finite))))


def require_identical(proof: Proof, what: str, row: dict[str, Any]) -> Proof:
    """Raise unless a proof shows that both sides have the same bits for any numbers."""
    __tracebackhide__ = True
    row["result"] = f"equal, and proven {proof.kind}"
    emit_proof(proof)
    if proof.kind != "identical":
        raise AnotherFunction(
            f"{what}: bits are equal for these numbers, and not for any:\n{proof}", proof
        )
    return proof


class RunRecorder:
    """Records one run of a trainer, on this rank; a side that takes an argument gets one.

        def eager(run):
            model = run.start(Model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                loss = model(run.input(f"batch {step}", batch(step))).mean()
                loss.backward()
                run.gradients(model)
                optimizer.step()
                run.step(loss, model, optimizer)

    Attributes:
        record: what has been recorded.
        layout: where this side puts each parameter, if it said so.
    """

    def __init__(self, record: Record, rank: int, mode: ArithmeticMode | None = None) -> None:
        self.record = record
        self.layout: BucketLayout | None = None
        self._mode, self._rank, self._step = mode, rank, 0
        # Of a proof: how many tensors stand for any numbers, and which buffers keep theirs.
        self.abstract = 0
        self.known: set[str] = set()

    def call(self, side: Side) -> Tensors:
        """Call a side, and return what it made: its tensors, or this record."""
        name = getattr(side, "__qualname__", repr(side))
        parameters = inspect.signature(side).parameters.values()
        takes_recorder = any(each.default is each.empty for each in parameters)
        returned = side(self) if takes_recorder else side()
        if not len(self.record):
            if returned is None:
                way = "recorded nothing" if takes_recorder else "takes no recorder"
                raise ValueError(
                    f"{name} returned nothing and {way}: return tensors (a mapping, a "
                    "list, a module, a record), or take an argument, def train(run), and record "
                    "with run.step(loss, model)"
                )
            made: Tensors = returned
            return made
        if returned is not None:
            raise ValueError(
                f"{name} records and returns a {type(returned).__name__}: do one of them"
            )
        return self.record

    def start(self, model: nn.Module) -> nn.Module:
        """Note the weights with which training starts, and return the model.

        In a proof the parameters of ``model`` stand for any numbers, by their FQNs.
        """
        facts.check_type(model, nn.Module, "the model of run.start()", "an nn.Module")
        self.record.meta |= start_of(self._rank, model.named_parameters())
        if self._mode is not None:
            for fqn, parameter in model.named_parameters():
                make_abstract(self._mode, local(parameter), (fqn, *shard_of(parameter)))
                self.abstract += 1
            for fqn, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    self.known.add(f"buffer {fqn}")
        return model

    def input(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor that both sides read under this name; in a proof it is any numbers.

        Ranks that read other numbers give other names.
        """
        facts.check_type(tensor, Tensor, f"input {name!r} of run.input()", "a tensor")
        if self._mode is None or not tensor.is_floating_point():
            return tensor
        tensor = tensor.detach().clone()
        make_abstract(self._mode, tensor, ("input", name))
        self.abstract += 1
        return tensor

    def gradients(self, model: nn.Module, phase: str = "gradient") -> None:
        """Record the gradients of this step; ``phase="clipped"`` for those after clipping."""
        facts.check_type(model, nn.Module, "the model of run.gradients()", "an nn.Module")
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.add(phase, name, parameter.grad)

    def step(
        self,
        loss: Tensor | None = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
    ) -> None:
        """Record the loss, weights, buffers and the optimiser's state, and end this step."""
        if loss is not None:
            self.add("loss", "loss", loss)
        if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
            raise TypeError(
                f"the optimiser of run.step() is a {type(optimizer).__name__} without a state: "
                "give one torch.optim.Optimizer; what others keep goes into run.add()"
            )
        if model is not None:
            facts.check_type(model, nn.Module, "the model of run.step()", "an nn.Module")
            named = model.named_parameters(), optimizer, model.named_buffers()
            for phase, name, tensor in trained_state(*named):
                self.add(phase, name, tensor)
        self._step += 1

    def add(self, phase: str, name: str, tensor: Tensor) -> None:
        """Record a tensor of this step; ``phase`` is one of those of ``Record``."""
        self.record.add(self._step, self._rank, phase, name, tensor)

    def layout_of(self, subject: BucketLayout | AnyGraph, *, names: Names | None = None) -> None:
        """Note where this side puts each parameter: a layout, or a graph, with ``names``.

        Raises:
            ValueError: this side has noted one before.
        """
        if self.layout is not None:
            raise ValueError(
                "run.layout_of() was called twice: a side has one layout, so merge them, or "
                "compare the others by assert_same_layout"
            )
        if not isinstance(subject, BucketLayout):
            subject = bucket_layout(subject, names=names)
        self.layout = subject


@dataclass(frozen=True, slots=True)
class EqualRuns:
    """Both sides of an ``assert_runs_equal`` that has passed.

    Attributes:
        actual, expected: what each side returned or recorded; on real ranks, on this rank.
        control: the control against the actual side; None with ``proof=True``, and where the check
            has failed on another rank.
        layout: where both sides put each parameter, if both said so.
        proof: with ``proof=True``, that both sides are identical.
    """

    actual: Kept
    expected: Kept
    control: Verdict | None
    layout: BucketLayout | None = None
    proof: Proof | None = None


@facts.check
def assert_runs_equal(
    actual: Side,
    expected: Side,
    *,
    control: Side | None,
    world: World | None = None,
    proof: bool = False,
    what: str = "",
) -> EqualRuns:
    """Run two trainers; every bit of what they return or record must be equal.

    A control then runs, with a mistake on purpose or another order of sums, and some rank must get
    other bits. All start from the same random states. On real ranks every rank calls this function
    and compares its own tensors.

    Args:
        actual, expected: functions that build a model and train it. One without an argument returns
            tensors: a record, a mapping, a list or a module. One with an argument gets a
            ``RunRecorder``, and records.
        control: as these. It may return fewer tensors, of one step for example. None with
            ``proof``.
        world: a simulated world, on whose ranks each function runs. None in one process, and on
            real ranks.
        proof: instead of a control, prove that both sides give the same bits for any weights and
            inputs, as those of ``RunRecorder.start`` and ``RunRecorder.input``. In one process, or
            a simulated world.
        what: what is compared, for the message.

    Raises:
        BitwiseDifference: different, or nothing shows that they are equal: the first tensor and
            element, and other names or shapes.
        LayoutDifference: both sides noted a layout, and these differ.
        VacuousCheck: on every rank, if the control has the same bits on all ranks, or others of
            which nothing follows.
        AnotherFunction: with ``proof``, bits are equal for these numbers and not for any.
        ValueError: no control and no proof, or both; a fake world of several ranks, which moves no
            data; a side that both records and returns.
    """
    __tracebackhide__ = True
    check_switches(proof=proof)
    _check_arguments(control, proof, world)
    row: dict[str, Any] = {}
    if world is not None and world.kind == "simulated":
        row = {**row_of(net_of(world)), "result": ""}
    try:
        return _judge(
            actual, expected, control, world, proof, what or "actual against expected", row
        )
    except Exception as error:
        row["result"] = row.get("result") or f"stopped by {type(error).__name__}"
        raise
    finally:
        if "ranks" in row:
            facts.emit("net", **row)


def _check_arguments(control: Side | None, proof: bool, world: World | None) -> None:
    if (control is None) != proof:
        raise ValueError(
            "assert_runs_equal needs a run that has other bits, control=, or a proof instead of "
            "it: control=None, proof=True"
        )
    if has_real_ranks():
        if proof:
            raise ValueError(
                "proof=True on real ranks: a proof runs all ranks in one process, take "
                'gt_world("simulated", nodes=2) and world=gt_world'
            )
        return
    is_simulated = world is not None and world.kind == "simulated"
    if not is_simulated and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"this world of {dist.get_world_size()} ranks moves no data, so equal bits mean "
            "nothing: take real ranks, or a simulated world and world=gt_world"
        )


def _judge(
    actual: Side,
    expected: Side,
    control: Side | None,
    world: World | None,
    proof: bool,
    what: str,
    row: dict[str, Any],
) -> EqualRuns:
    __tracebackhide__ = True
    own, theirs = _run(actual, "actual", world), _run(expected, "expected", world)
    prove_it = partial(_prove, actual, expected, world)
    failure = None
    try:
        check_equal(
            own.tensors,
            theirs.tensors,
            what,
            check_layout=partial(_check_layouts, own.layouts, theirs.layouts),
            where="here",
            row=row,
            explain=lambda verdict: [
                kind_in_words(prove_it, nodes=0, call="") if proof else offer_proof(_PROOF)
            ],
            doubts=_doubts(own, theirs),
        )
    except Exception as error:  # raised below, since the other ranks wait for this one
        failure = error
    failed = on_any_rank(failure is not None)
    if failure is not None:
        raise failure
    if failed:  # no rank may start a control that another does not join
        return EqualRuns(own.tensors, theirs.tensors, None, own.layouts[0])
    if control is None:
        proven = require_identical(prove_it(), what, row)
        return EqualRuns(own.tensors, theirs.tensors, None, own.layouts[0], proven)

    other = _run(control, "control", world)
    verdict = _compare_with_control(other.tensors, own.tensors)
    row["result"] = "equal"
    if verdict.outcome != "different":
        row["result"] = "equal, but proves nothing: so is the control"
    require_difference(verdict, "", _why_equal)
    return EqualRuns(own.tensors, theirs.tensors, verdict, own.layouts[0])


@dataclass(frozen=True, slots=True)
class _Ran:
    """A finished run of one side; ``memory`` and ``made`` say where its own tensors lie.

    ``layouts`` has one for each rank that ran here, None where a rank noted none.
    """

    tensors: Kept
    layouts: tuple[BucketLayout | None, ...]
    memory: list[Any]
    made: Any


def _run(side: Side, name: str, world: World | None) -> _Ran:
    """Run a side: on this rank, or on all ranks of a simulated world."""
    try:
        if world is None or world.kind != "simulated":
            return _run_here(side)
        net = net_of(world)
        ranks: list[_Ran] = run_threads(net.size, lambda rank: _run_here(side), net=net)
    except Exception as error:
        error.add_note(f"raised by the {name} side of assert_runs_equal")
        raise
    memory = [place for ran in ranks for place in ran.memory]
    layouts = tuple(layout for ran in ranks for layout in ran.layouts)
    return _Ran(_of_all_ranks(ranks), layouts, memory, [ran.made for ran in ranks])


def _run_here(side: Side) -> _Ran:
    rank, size = 0, 1
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    recorder = RunRecorder(Record(size, rank if size > 1 else None), rank)
    with random_states_kept():
        made = recorder.call(side)
        return _Ran(kept(made), (recorder.layout,), memory_of(made), made)


def _of_all_ranks(ranks: Sequence[_Ran]) -> Kept:
    """Return the tensors of all ranks together, by rank and name."""
    parts = [ran.tensors for ran in ranks]
    records = [part for part in parts if isinstance(part, Record)]
    if len(records) == len(parts):
        return Record.merged(records)
    if records:
        raise ValueError("some ranks record what they do, and others return tensors")
    return kept({f"rank {rank}": dict(part.items()) for rank, part in enumerate(parts)})


def _doubts(actual: _Ran, expected: _Ran) -> list[str]:
    """Return why equal bits would prove nothing."""
    found = []
    if actual.memory and actual.memory == expected.memory:
        found.append(
            "both sides return the same memory, and no write to it was counted between them: "
            "compute it anew on each side"
        )
    if isinstance(actual.tensors, Record) and isinstance(expected.tensors, Record):
        sides = actual.tensors.placements, expected.tensors.placements
        for key in sorted(sides[0].keys() ^ sides[1].keys()):
            placements = sides[0].get(key) or sides[1][key]
            if "Partial" in placements:
                found.append(
                    f"{where(key)} is {placements} on one side, and no DTensor on the other: a "
                    "rank has one summand of it, so redistribute it, or record its to_local()"
                )
                break
    for key, tensor in entries(expected.tensors).items():
        # Records have a phase, and are judged by it: a mask may be infinite, a loss may not.
        if not key.phase and tensor.numel() and bits.count_not_finite(tensor) == tensor.numel():
            found.append(
                f"{where(key)} is NaN or infinite in every element, so bits are equal whatever "
                "computes them: take inputs for which it is finite"
            )
            break
    return found


def _check_layouts(
    actual: Sequence[BucketLayout | None], expected: Sequence[BucketLayout | None]
) -> tuple[str, ...]:
    """Compare the layouts of all ranks that ran here."""
    if not any([*actual, *expected]):
        return ()
    found: dict[str, None] = {}
    for rank, (own, theirs) in enumerate(zip(actual, expected, strict=True)):
        of_rank = f" on rank {rank}" if len(actual) > 1 else ""
        if own is None or theirs is None:
            lacking = "actual" if own is None else "expected"
            both = "neither side did" if own is theirs else "the other did"
            raise ValueError(
                f"the {lacking} side noted no layout{of_rank}, and {both}: run.layout_of()"
            )
        try:
            found |= dict.fromkeys(assert_same_layout(own, theirs, actual_is="actual"))
        except LayoutDifference as difference:
            if not of_rank:
                raise
            raise LayoutDifference(f"on rank {rank}: {difference}") from None
    return tuple(found)


def _compare_with_control(control: Kept, actual: Kept) -> Verdict:
    """Compare a control with the tensors of the same names; it may have fewer."""
    found, all_of_actual = entries(control), entries(actual)
    own = {key: all_of_actual[key] for key in found if key in all_of_actual}
    verdict = compare_control(found, own)
    other = [where(key) for key in verdict.only_actual]
    other += [where(one.key) for one in verdict.differences if one.kind != "bits"]
    if other:
        reason = (
            f"the control run has other names, shapes or dtypes ({spell_some(other, 1)}), so it "
            "says nothing about bits"
        )
        return replace(verdict, outcome="unverified", reasons=(reason,))
    return verdict


def _why_equal(is_not_finite: bool) -> str:
    if is_not_finite:
        return (
            "the control run is equal, because NaN and inf hide what differs: take inputs for "
            "which all results are finite"
        )
    return (
        "the control run is equal: this check cannot fail. Give a control with a mistake that "
        "changes what is compared. Two ranks add a + b, whichever is first, and gloo adds whole "
        "shards in one order: another order of sums may not show here. Or prove it for any "
        f"numbers: {_PROOF}"
    )


class _RunOfTrainer(Program):
    """One side in an arithmetic, on one rank or on all of a simulated world."""

    def __init__(self, side: Side, world: World | None) -> None:
        self._side, self._world = side, world
        self._known: set[str] = set()

    def known(self) -> list[str]:
        return sorted(self._known)

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        def run_rank(rank: int, size: int) -> int:
            recorder = RunRecorder(ResultRecorder(size, observed), rank, mode)
            made = recorder.call(self._side)
            self._known |= recorder.known
            if made is not recorder.record:
                for key, tensor in entries(made).items():
                    name = where(key) if key.phase else key.name
                    observed.outputs[name, rank] = local(tensor).detach().clone()
            return recorder.abstract

        if self._world is None or self._world.kind != "simulated":
            with mode:
                abstract = [run_rank(0, 1)]
        else:
            net = net_for(mode, net_of(self._world))
            abstract = run_threads(
                net.size, run_rank, net.size, net=net, under=mode.on_another_thread
            )
        if not all(abstract):
            raise ValueError(
                "proof=True, and a side made nothing abstract, so it would hold for its own "
                "numbers alone: take an argument, and call run.start(model)"
            )


def _prove(actual: Side, expected: Side, world: World | None) -> Proof:
    return prove_programs((_RunOfTrainer(actual, world), _RunOfTrainer(expected, world)))
