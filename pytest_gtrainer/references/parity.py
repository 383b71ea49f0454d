"""Does the rewritten graph train as eager code does, on many nodes? Layouts first, then bits, and a control.

A layout that differs names the parameter without any arithmetic. Bits find what a layout cannot see. The
control packs payloads in another order: where that gives the same bits too, the check could not have
failed, and is an error instead of a pass (S3).

A difference is told with its *path*: where the element sits on either side, and in which order each side adds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_gtrainer import facts
from pytest_gtrainer.graph.bucket_plan import PayloadOrder
from pytest_gtrainer.graph.layout import (
    ALL_REDUCE_NAME,
    REDUCE_SCATTER_NAME,
    BucketLayout,
    LayoutDifference,
    assert_same_layout,
)
from pytest_gtrainer.numerics.compare import BitwiseDifference, Verdict, compare, explained
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.references.simulated import (
    ConfigOfMesh,
    SimulatedGraphRun,
    SimulatedRun,
    config_of_mesh,
    simulated_eager,
)
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated.net import Net, check_choice, row_of
from pytest_gtrainer.worlds.spec import World

GroupOf = Callable[[int, tuple[int, ...]], tuple[int, ...]]
_AROUND = 2
_REDUCTIONS = (REDUCE_SCATTER_NAME, ALL_REDUCE_NAME)


class VacuousCheck(Exception):
    """The check cannot fail: its control, with payloads packed otherwise, gives the same bits."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Both sides of a check that has passed, the control's verdict, and the layout that both have."""

    graph: Record
    eager: Record
    control: Verdict
    layout: BucketLayout


def assert_simulated_parity(
    config: TrainConfig | ConfigOfMesh,
    world: World,
    *,
    payload_order: PayloadOrder = "managed",
    reduce_scatter_first: bool = True,
    invisible: str = "refuse",
) -> Parity:
    """Train by the rewritten graph and eagerly, all ranks, by the net of ``world``; every bit must be equal.

    Args:
        config: builds the configuration from a rank's mesh; or a finished one, if its mesh is all it has.
        payload_order, reduce_scatter_first: of the graph; see ``references.graph.rewrite``.
        invisible: what to do under a net that does not show the order of a payload: "refuse", or "report" in
            the table of a sweep over nets.

    Raises:
        LayoutDifference: the graph packs other payloads than ``fully_shard``; names bucket and parameter, and
            tells what comes of it in bits.
        BitwiseDifference: step, rank, parameter and element; where it sits, and in which order it is summed.
        VacuousCheck: the control has no other bits under this net.
        ValueError: a world of one rank.
    """
    __tracebackhide__ = True
    net = net_of(world)
    check_choice("invisible", invisible, ("refuse", "report"))
    if world.size == 1:
        raise ValueError("a world of 1 rank adds nothing, so no order can show: take size=16, nodes=2, for example")
    with _row_of_table(net) as row:
        subject = SimulatedGraphRun(
            config, world, payload_order=payload_order, reduce_scatter_first=reduce_scatter_first
        )
        eager = simulated_eager(config, net, mesh=world.mesh)
        record = _compared(subject, eager, net, row)
        control = _control(config, world, subject, record)
        row["result"] = "equal" if control.outcome == "different" else "equal, but proves nothing: so is the control"
        if control.outcome != "different" and invisible == "refuse":
            raise VacuousCheck(
                "payloads packed in another order give the same bits under this net, so this check could not fail. "
                "A reduce-scatter shows the order only where channels add in different orders: take two nodes or more "
                "with two channels or more, or rings of your own that differ. An all-reduce shows it on one node, too, "
                "but not between two ranks. No net shows it in fp32 accumulation or where sums are exact: take "
                'accumulate="wire", and values that a sum rounds'
            )
    return Parity(record, eager.record, control, eager.layout)


@contextmanager
def _row_of_table(net: Net) -> Iterator[dict[str, Any]]:
    """Tell the summary what came out for this net, whatever that is: the row's ``result``."""
    row = {**row_of(net), "result": ""}
    try:
        yield row
    except Exception as error:
        row["result"] = row["result"] or f"stopped by {type(error).__name__}"
        raise
    finally:
        facts.emit("net", **row)


def _compared(subject: SimulatedGraphRun, eager: SimulatedRun, net: Net, row: dict[str, Any]) -> Record:
    """Train by the graph; layouts and bits must be equal."""
    __tracebackhide__ = True
    layout = subject.layout()
    misplaced = ""
    if not subject.config.replicate:
        try:
            assert_same_layout(layout, eager.layout)
        except LayoutDifference as difference:
            misplaced = str(difference)
    record = subject.run()
    verdict = compare(record, eager.record)
    what = "graph against eager"
    facts.emit("verdict", outcome=verdict.outcome, tensors=verdict.compared, what=what)
    facts.tell("comparison", actual=record, expected=eager.record, verdict=verdict, what=what, must_differ=False)
    explanations = explained(verdict, eager.record)
    if verdict.outcome != "equal":
        at = verdict.first.key if verdict.first else None
        row["result"] = f"DIFFERENT at step {at.step}, {at.phase} of {at.name}" if at else "UNVERIFIED"
        layouts = {"graph": layout, "eager": eager.layout}
        paths = paths_of_first(net, layouts, subject.group_of, verdict, record)
        told = "\n".join([str(verdict), *paths, *explanations])
        if misplaced:
            raise LayoutDifference(f"{misplaced}\nand therefore bits are {told}")
        raise BitwiseDifference(told, verdict)
    if misplaced:
        row["result"] = "layouts differ, bits do not"
        raise LayoutDifference(f"{misplaced}\nall bits are equal under this net: only the layout tells")
    return record


def _control(config: TrainConfig | ConfigOfMesh, world: World, subject: SimulatedGraphRun, record: Record) -> Verdict:
    """The first step with every payload packed otherwise, against what the graph gave."""
    if subject.config.replicate:
        build, mesh = config_of_mesh(config, world.size, world.mesh)
        other_buckets = partial(replace, steps=1, ddp_bucket_mb=None)
        other = simulated_eager(lambda own: other_buckets(build(own)), net_of(world), mesh=mesh).record
    else:
        scatters = subject.layout().of(REDUCE_SCATTER_NAME)
        backwards = [slot.parameter for payload in scatters for slot in reversed(payload.slots)]
        other = subject.rewritten(payload_order=backwards).run(steps=1)
    return compare(*({str(key): value for key, value in side.select(step=0).items()} for side in (other, record)))


def paths_of_first(
    net: Net, layouts: Mapping[str, BucketLayout], group_of: GroupOf, verdict: Verdict, record: Record
) -> Iterator[str]:
    """Lines about the first gradient that differs, which ``record`` has; none if no gradient does.

    Args:
        layouts: by side, "graph" and "eager"; of rank 0.
        group_of: the group of a rank that stands for the same dimension of the mesh as these ranks of rank 0.
    """
    gradients = (found for found in verdict.differences if found.key.phase == "gradient")
    found = next((found for found in gradients if found.element is not None), None)
    if found is None or found.element is None:
        return
    name, gradient = found.key.name, record[found.key]
    offset = sum(index * math.prod(gradient.shape[dim + 1 :]) for dim, index in enumerate(found.element))
    for side, layout in layouts.items():
        own = [payload for each in _REDUCTIONS for payload in layout.of(each) if name in payload.parameters]
        if not layout.payloads:  # a replicated parameter's gradient, which no bucket holds
            path = net.explain(ALL_REDUCE_NAME, offset, gradient.numel(), gradient.dtype)
            yield f"  {side}: reduced by itself, element {offset} of {gradient.numel()}, {path}"
        elif not own:
            yield f"  {side}: no reduction of its layout holds {name}"
        for payload in own:
            place, item = payload.parameters.index(name), payload.dtype.itemsize
            begin, count = payload.slots[place].offset // item, sum(slot.nbytes for slot in payload.slots) // item
            ranks = group_of(found.key.rank, payload.ranks)
            its_net = net if len(ranks) == net.size else net.for_group(ranks)
            member = ranks.index(found.key.rank)
            path = its_net.explain(payload.collective, begin + offset, count, payload.dtype, member, payload.op)
            where = f"element {begin + offset} of {count}, {path}"
            yield f"  {side}: bucket {payload.label!r}, {payload.collective}, {where}"
            for at in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(payload.slots))):
                slot, mark = payload.slots[at], ">" if at == place else " "
                yield f"    {mark} byte {slot.offset}: {slot.parameter}, {slot.nbytes} bytes"
