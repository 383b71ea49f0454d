"""Train by the rewritten graph and eagerly, and check that both train alike.

Compared are layouts, then bits. Then a control shows that the comparison could have failed.

The control packs payloads in another order. If that gives the same bits too, the check could not
have failed, so it raises instead of passing. In a simulated world a difference is reported with its
*path*: where the element sits on either side, and in which order each side adds it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import GeneratorStates, random_states_kept
from pytest_gtrainer.facts import check_switches, spell_some
from pytest_gtrainer.graph.bucket_plan import PayloadOrder
from pytest_gtrainer.graph.layout import (
    ALL_REDUCE_NAME,
    REDUCE_SCATTER_NAME,
    BucketLayout,
    LayoutDifference,
    Payload,
    assert_same_layout,
)
from pytest_gtrainer.numerics.compare import compare_control
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.numerics.verdict import Verdict
from pytest_gtrainer.passes.graph_pass import BoundPass, Pass
from pytest_gtrainer.proofs.proof import Proof, kind_in_words, offer_proof
from pytest_gtrainer.references.config import TrainConfig, finished
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.references.proven import prove_training
from pytest_gtrainer.references.replicas import on_any_rank
from pytest_gtrainer.references.runs import check_equal, require_difference, require_identical
from pytest_gtrainer.references.simulated import (
    ConfigOfMesh,
    SimulatedGraphRun,
    config_of_mesh,
    simulated_eager,
)
from pytest_gtrainer.tracing.model import ModelState, local
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated.net import Net, check_choice, row_of
from pytest_gtrainer.worlds.spec import World, check_world

GroupOf = Callable[[int, tuple[int, ...]], tuple[int, ...]]
_AROUND = 2  # how many neighbours of a parameter in its bucket a path shows, on either side
_REDUCTIONS = (REDUCE_SCATTER_NAME, ALL_REDUCE_NAME)
_PROOF = "assert_parity(config, gt_world, proof=True)"
_PROOF_ELSEWHERE = f'{_PROOF} in gt_world("simulated", size=4, nodes=2)'
_WHAT = "graph against eager"
_OTHER_ORDER = "with payloads packed in another order "
_NOT_FINITE = (
    "gradients or losses hold NaN or inf, which are the same in every order",
    "take inputs, or initial weights, for which losses and gradients are finite",
)


class ParityOptions(TypedDict, total=False):
    """The keywords of ``assert_parity``."""

    passes: Sequence[BoundPass | Pass] | None
    payload_order: PayloadOrder
    reduce_scatter_first: bool
    reshard_after_forward: bool
    invisible: str
    proof: bool


def train_eager(config: TrainConfig | ConfigOfMesh, *, world: World | None = None) -> Record:
    """Train eagerly with ``fully_shard``, or DDP, and return the losses, gradients, weights, ... of
    each step.

    The record is of this rank; in a simulated ``world`` it is of all ranks, and ``config`` should
    be a function that builds the configuration from the mesh of a rank.

    Raises:
        ValueError: in a fake world, which moves no data.
    """
    if world is not None and world.kind == "simulated":
        return simulated_eager(config, net_of(world), mesh=world.mesh).record
    return EagerRun(finished(config, world)).run()


def train_graph(
    config: TrainConfig | ConfigOfMesh,
    *,
    world: World | None = None,
    passes: Sequence[BoundPass | Pass] | None = None,
    payload_order: PayloadOrder = "managed",
    reduce_scatter_first: bool = True,
    reshard_after_forward: bool = False,
) -> Record:
    """Train by the rewritten graph; ``config``, ``world`` and the record are as in ``train_eager``.

    ``passes`` replaces the pipeline and the other options. ``reduce_scatter_first`` and
    ``reshard_after_forward`` do as FSDP2 does; ``payload_order`` is that of
    ``joint_transformer_block_bucketing_reordering_pass``. To compare with eager training use
    ``assert_parity``, which refuses a comparison that could not have failed.
    """
    check_switches(
        reduce_scatter_first=reduce_scatter_first,
        reshard_after_forward=reshard_after_forward,
    )
    options: dict[str, Any] = {
        "passes": passes,
        "payload_order": payload_order,
        "reduce_scatter_first": reduce_scatter_first,
        "reshard_after_forward": reshard_after_forward,
    }
    if world is not None and world.kind == "simulated":
        return SimulatedGraphRun(config, world, **options).run()
    return GraphRun(finished(config, world), **options).run()


@dataclass(frozen=True, slots=True)
class Parity:
    """Both sides of a check that has passed.

    Attributes:
        graph, eager: what each side recorded; on real ranks, on this rank.
        control: the control against the graph; on real ranks, what this rank sees of it. None where
            the check has failed on another rank: then there was no control.
        layout: where both sides put each parameter.
        unread: a line for each bucket of which eager FSDP2 gathers parameters in the backward that
            nobody reads, as biases. The graph leaves them out.
        proof: with ``proof=True``, that both sides are identical; there is no control then.
    """

    graph: Record
    eager: Record
    control: Verdict | None
    layout: BucketLayout
    unread: tuple[str, ...] = ()
    proof: Proof | None = None


@facts.check
def assert_parity(
    config: TrainConfig | ConfigOfMesh,
    world: World,
    *,
    passes: Sequence[BoundPass | Pass] | None = None,
    payload_order: PayloadOrder = "managed",
    reduce_scatter_first: bool = True,
    reshard_after_forward: bool = False,
    invisible: str = "refuse",
    proof: bool = False,
) -> Parity:
    """Train by the rewritten graph and eagerly; the layouts and every bit must be equal.

    A control then checks that the comparison could fail: it repeats the graph's first step from the
    same start, with every payload packed backwards, and some rank must get other bits. With
    ``replicate=True`` in the configuration the control is DDP with torch's own buckets. On real
    ranks, every rank calls this function and compares its own tensors. In a simulated world it does
    what ``assert_simulated_parity`` does.

    Args:
        config: a configuration on this rank's mesh, or a function that builds it from a mesh.
        passes: a pipeline of your own; the control still packs by the default one.
        payload_order, reduce_scatter_first, reshard_after_forward: options of the graph, see
            ``train_graph``.
        invisible: if the order of payloads does not show: "refuse", or "report" it in
            ``Parity.control``.
        proof: instead of a control, prove in a simulated world that both sides give the same bits
            for any weights and inputs: every step, with clipping and the optimiser.

    Raises:
        AnotherFunction: with ``proof``, bits are equal for these numbers and not for any.
        LayoutDifference: the graph packs other payloads than ``fully_shard``: bucket, parameter,
            and which bits change.
        BitwiseDifference: a bit differs: step, rank, phase, parameter and element.
        VacuousCheck: on every rank, if the control has the same bits on all ranks; with the reason
            and the way out.
        ValueError: a world of one rank, or a fake one.
    """
    __tracebackhide__ = True
    check_switches(
        reduce_scatter_first=reduce_scatter_first,
        reshard_after_forward=reshard_after_forward,
        proof=proof,
    )
    check_world(world)
    check_choice("invisible", invisible, ("refuse", "report"))
    is_simulated = world.kind == "simulated"
    if world.size == 1:
        larger = (
            "size=16, nodes=2, for example" if is_simulated else 'gt_world("ranks", size=5), say'
        )
        raise ValueError(f"a world of 1 rank adds nothing, so no order can show: take {larger}")
    if proof and not is_simulated:
        raise ValueError(
            f"proof=True in a world of kind {world.kind!r}: a proof runs all ranks in one process, "
            'take gt_world("simulated", nodes=2)'
        )
    options: dict[str, Any] = {"proof": True} if proof else {}
    judge = _simulated_parity if is_simulated else _parity_on_ranks
    return judge(
        config,
        world,
        invisible == "refuse",
        **options,
        passes=passes,
        payload_order=payload_order,
        reduce_scatter_first=reduce_scatter_first,
        reshard_after_forward=reshard_after_forward,
    )


@facts.check
def assert_simulated_parity(
    config: TrainConfig | ConfigOfMesh, world: World, **options: Unpack[ParityOptions]
) -> Parity:
    """Like ``assert_parity``, but only for a simulated world. All ranks add by the net of
    ``world``.

    Args:
        config: a function that builds the configuration from a rank's mesh, or a configuration with
            a single mesh.
        options: those of ``assert_parity``. ``invisible="report"`` is for the table of a sweep over
            nets.

    Raises:
        LayoutDifference, VacuousCheck: as ``assert_parity``; a control without other bits is judged
            under this net.
        BitwiseDifference: step, rank, parameter and element; where it sits, and in which order it
            is summed.
        ValueError: a world of one rank, or one without a net.
    """
    __tracebackhide__ = True
    net_of(world)
    return assert_parity(config, world, **options)


def _parity_on_ranks(
    config: TrainConfig | ConfigOfMesh, world: World, must_show: bool, **options: Any
) -> Parity:
    """Check parity of this rank's tensors, as ``assert_parity`` describes."""
    __tracebackhide__ = True
    config = finished(config, world)
    with random_states_kept():  # both sides draw from the same random states
        eager = EagerRun(config)
        expected = eager.run()
    graph = GraphRun(config, **options)
    # The control starts where the graph does.
    start = [local(tensor).detach().clone() for tensor in ModelState.of(graph.model).tensors]
    states = GeneratorStates.now()
    record = graph.run()
    layouts = {"graph": graph.layout(), "eager": eager.layout()}
    failure = None
    unread: tuple[str, ...] = ()
    try:
        unread = check_equal(
            record,
            expected,
            _WHAT,
            check_layout=partial(_check_layouts, config, layouts, _reshards(options), graph),
            where="on this rank",
            row={},
            explain=lambda verdict: [offer_proof(_PROOF_ELSEWHERE)],
        )
    except AssertionError as error:
        failure = error
    failed = on_any_rank(failure is not None)
    if failure is not None:
        raise failure
    _note_idle_clipping(config, record)
    if failed:  # no rank may start a control that another does not join
        return Parity(record, expected, None, layouts["eager"])

    with random_states_kept():
        other = _control_on_ranks(graph, start, states)
        control = compare_control(other.select(step=0), record.select(step=0))
    if must_show:
        why = partial(_why_equal_on_ranks, layouts["eager"], config)
        require_difference(control, _OTHER_ORDER, why)
    return Parity(record, expected, control, layouts["eager"], unread)


def _note_idle_clipping(config: TrainConfig, record: Record) -> None:
    """Say in the summary if clipping has changed no gradient of a run, so that nothing tested it.

    An infinite ``max_norm`` asks for the norm alone. A rank without gradients knows nothing.
    """
    if config.max_norm is None or config.max_norm == float("inf"):
        return
    clipped = record.select(phase="clipped")
    before = [record[key._replace(phase="gradient")] for key in clipped]
    if any(map(torch.count_nonzero, before)) and all(map(torch.equal, clipped.values(), before)):
        facts.emit(
            "idle",
            what=f"max_norm={config.max_norm:g} has changed no gradient: a smaller one tests it",
        )


def _control_on_ranks(
    graph: GraphRun, start: Sequence[torch.Tensor], states: GeneratorStates
) -> Record:
    """Run the first step again, from the same weights and random states, with every payload packed
    in another order.
    """
    control: EagerRun | GraphRun
    config = replace(graph.config, steps=1)
    if config.replicate:
        control = EagerRun(replace(config, ddp_bucket_mb=None))
    else:
        control = graph.rewritten(passes=None, payload_order=_backwards(graph.layout()))
        control.config = config
    for tensor, value in zip(ModelState.of(control.model).tensors, start, strict=True):
        local(tensor).detach().copy_(value)
    states.put_back()
    return control.run()


def _backwards(layout: BucketLayout) -> list[str]:
    """Return the parameters of each reduced payload from the last to the first."""
    names = []
    for payload in layout.of(REDUCE_SCATTER_NAME):
        names += [slot.parameter for slot in reversed(payload.slots)]
    return names


def _why_invisible(layout: BucketLayout, config: TrainConfig) -> tuple[str, str]:
    """Return why no order of payloads shows on these ranks, and what to do about it."""
    elsewhere = 'gt_world("simulated", nodes=2)'
    reduced = [payload for each in _REDUCTIONS for payload in layout.of(each)]
    # The control of DDP packs several gradients together, so a payload of one is reordered, too.
    ordered = [payload for payload in reduced if config.replicate or len(payload.slots) > 1]
    if not config.replicate and not ordered:
        return (
            "no bucket holds two parameters with gradients",
            "give a bucket_plan that packs more than one",
        )
    groups = [len(payload.ranks) for payload in reduced]
    if config.replicate:
        groups.append(config.mesh.size())
    if max(groups) < 3:
        return "two ranks add a + b, whichever is first", "take 3 ranks or more"
    labels: dict[int, list[str]] = {}
    for payload in ordered:
        labels.setdefault(_numel(payload), []).append(payload.label)
    if labels and dist.get_backend() == "gloo" and all(numel % 2 == 0 for numel in labels):
        found = []
        for numel, buckets in labels.items():
            found.append(f"{numel} in {spell_some(buckets, 1)}")
        return (
            "gloo adds whole shards where a rank's payload has an even number of elements "
            f"({', '.join(found)})",
            f"take sizes that make it odd, or {elsewhere}",
        )
    return (
        "every element is added in one order, or its sums are exact, as those of a few bf16 "
        "numbers in fp32 are",
        f"take other sizes or dtypes, or {elsewhere}",
    )


def _numel(payload: Payload) -> int:
    return sum(slot.nbytes for slot in payload.slots) // payload.dtype.itemsize


def _simulated_parity(
    config: TrainConfig | ConfigOfMesh,
    world: World,
    must_show: bool,
    proof: bool = False,
    **options: Any,
) -> Parity:
    """Check parity of all ranks under the net of ``world``, as ``assert_parity`` describes."""
    __tracebackhide__ = True
    net = net_of(world)

    def explain(verdict: Verdict) -> Iterator[str]:
        yield from paths_of_first(net, layouts, subject.group_of, verdict, record)
        if proof:
            yield kind_in_words(lambda: prove_training(subject, config, world), nodes=0, call="")
        else:
            yield offer_proof(_PROOF)

    row = {**row_of(net), "result": ""}  # a row of the summary's table, whatever comes out
    try:
        subject = SimulatedGraphRun(config, world, **options)
        eager = simulated_eager(config, net, mesh=world.mesh)
        layouts, record = {"graph": subject.layout(), "eager": eager.layout}, subject.run()
        unread = check_equal(
            record,
            eager.record,
            _WHAT,
            check_layout=partial(
                _check_layouts, subject.config, layouts, _reshards(options), subject
            ),
            where="under this net",
            row=row,
            explain=explain,
        )
        _note_idle_clipping(subject.config, record)
        if proof:
            proven = require_identical(prove_training(subject, config, world), _WHAT, row)
            return Parity(record, eager.record, None, eager.layout, unread, proven)
        if subject.config.replicate:
            build, extents = config_of_mesh(config, world.size, world.mesh)
            other_buckets = partial(replace, steps=1, ddp_bucket_mb=None)
            other = simulated_eager(lambda own: other_buckets(build(own)), net, mesh=extents).record
        else:
            control_run = subject.rewritten(passes=None, payload_order=_backwards(subject.layout()))
            other = control_run.run(steps=1)
        control = compare_control(other.select(step=0), record.select(step=0))
        row["result"] = "equal"
        if control.outcome == "equal":
            row["result"] = "equal, but proves nothing: so is the control"
        elif control.outcome == "unverified":
            row["result"] = "equal, but the control proves nothing"
        if must_show:
            require_difference(control, _OTHER_ORDER, _why_equal_under_net)
    except Exception as error:
        row["result"] = row["result"] or f"stopped by {type(error).__name__}"
        raise
    finally:
        facts.emit("net", **row)
    return Parity(record, eager.record, control, eager.layout, unread)


def _why_equal_on_ranks(layout: BucketLayout, config: TrainConfig, is_not_finite: bool) -> str:
    cause, advice = _why_invisible(layout, config)
    if is_not_finite:
        cause, advice = _NOT_FINITE
    return (
        "payloads packed in another order give the same bits on these ranks, because "
        f"{cause}; so this check cannot fail: {advice}, or accept the layouts and the other "
        f'bits as proof (invisible="report"), or prove it for any numbers: {_PROOF_ELSEWHERE}'
    )


def _why_equal_under_net(is_not_finite: bool) -> str:
    if is_not_finite:
        cause, advice = _NOT_FINITE
        return (
            f"the control is equal, because {cause}; so this check could not fail: {advice}. Or "
            f"prove it for any numbers: {_PROOF}"
        )
    return (
        "payloads packed in another order give the same bits under this net, so this check could "
        "not fail. A reduce-scatter shows the order only where channels add in different orders: "
        "take two nodes or more with two channels or more, or rings of your own that differ. An "
        "all-reduce shows it on one node, too, but not between two ranks. No net shows it in fp32 "
        'accumulation or where sums are exact: take accumulate="wire", and values that a sum '
        f"rounds. Or prove it for any numbers: {_PROOF}"
    )


def _check_layouts(
    config: TrainConfig,
    layouts: Mapping[str, BucketLayout],
    is_resharded: bool,
    graph: GraphRun | SimulatedGraphRun,
) -> tuple[str, ...]:
    """Check that the layouts of graph and eager are equal, and what else a pass must not do; return
    ``Parity.unread``.

    Args:
        is_resharded: the graph must gather again whatever its backward reads.
    """
    __tracebackhide__ = True
    unread: tuple[str, ...] = ()
    if not config.replicate:  # DDP has no buckets of parameters
        unread = assert_same_layout(layouts["graph"], layouts["eager"])
    kept = layouts["graph"].kept
    if is_resharded and kept and not config.replicate:
        raise LayoutDifference(
            "reshard_after_forward=True, and the backward reads the forward's copy of "
            f"{spell_some(kept, 1)}: a pass between resharding and bucketing lost its "
            "second all-gather"
        )
    wasted, written = graph.wasted(), graph.written()
    if wasted:
        raise LayoutDifference(wasted)
    if written:
        raise facts.FailedCheck(written)
    return unread


def _reshards(options: Mapping[str, Any]) -> bool:
    """Return whether our own pipeline reshards; ``passes`` replaces it with its options."""
    return bool(options["reshard_after_forward"]) and options["passes"] is None


def paths_of_first(
    net: Net,
    layouts: Mapping[str, BucketLayout],
    group_of: GroupOf,
    verdict: Verdict,
    record: Record,
) -> Iterator[str]:
    """Yield lines about the first gradient that differs: its place and order of sums on each side.

    ``layouts`` are those of rank 0; ``group_of`` maps its groups to those of another rank.
    """
    gradients = (found for found in verdict.differences if found.key.phase == "gradient")
    found = next((found for found in gradients if found.element is not None), None)
    if found is None or found.element is None:
        return
    name, rank, gradient = found.key.name, found.key.rank, record[found.key]
    offset = 0
    for index, extent in zip(found.element, gradient.shape, strict=True):
        offset = offset * extent + index
    for side, layout in layouts.items():
        reductions = [payload for each in _REDUCTIONS for payload in layout.of(each)]
        own = [payload for payload in reductions if name in payload.parameters]
        if not layout.payloads:  # a replicated parameter's gradient, which no bucket holds
            path = net.explain(ALL_REDUCE_NAME, offset, gradient.numel(), gradient.dtype)
            yield f"  {side}: reduced by itself, element {offset} of {gradient.numel()}, {path}"
        elif not own:
            yield f"  {side}: no reduction of its layout holds {name}"
        for payload in own:
            place, count = payload.parameters.index(name), _numel(payload)
            element = payload.slots[place].offset // payload.dtype.itemsize + offset
            ranks = group_of(rank, payload.ranks)
            its_net = net if len(ranks) == net.size else net.for_group(ranks)
            path = its_net.explain(
                payload.collective, element, count, payload.dtype, ranks.index(rank), payload.op
            )
            where = f"element {element} of {count}, {path}"
            yield f"  {side}: bucket {payload.label!r}, {payload.collective}, {where}"
            first = max(place - _AROUND, 0)
            for at, slot in enumerate(payload.slots[first : place + _AROUND + 1], first):
                mark = ">" if at == place else " "
                yield f"    {mark} byte {slot.offset}: {slot.parameter}, {slot.nbytes} bytes"
