"""Does the rewritten graph train as eager code does, on many nodes? Layouts first, then bits, and a control.

A layout that differs names the parameter without any arithmetic. Bits find what a layout cannot see. The
control packs payloads in another order: where that gives the same bits too, the check could not have
failed, and is an error instead of a pass (S3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_gtrainer.numerics.assertions import BitwiseDifference
from pytest_gtrainer.numerics.compare import Difference, Verdict, compare
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.passes.layout import REDUCE_SCATTER_NAME, BucketLayout, Payload, Slot, assert_same_layout
from pytest_gtrainer.passes.payload_order import PayloadOrder
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.worlds.simulated.graph_training import SimulatedGraphRun
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.simulated.threads.training import ConfigOfMesh, simulated_eager
from pytest_gtrainer.worlds.simulated.world import net_of
from pytest_gtrainer.worlds.world import World

_AROUND = 2


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
    config: TrainConfig | ConfigOfMesh, world: World, *, payload_order: PayloadOrder = "managed"
) -> Parity:
    """Train by the rewritten graph and eagerly, all ranks, by the net of ``world``; every bit must be equal.

    Raises:
        LayoutDifference: the graph packs other payloads than ``fully_shard``; names bucket and parameter.
        BitwiseDifference: step, rank, parameter and element; where it sits, and in which order it is summed.
        VacuousCheck: the control has no other bits under this net.
    """
    __tracebackhide__ = True
    net = net_of(world)
    subject = SimulatedGraphRun(config, world, payload_order=payload_order)
    eager = simulated_eager(config, net, mesh=world.mesh)
    assert_same_layout(subject.layout(), eager.layout)
    record = subject.run()
    verdict = compare(record, eager.record)
    if verdict.outcome != "equal":
        told = [str(verdict), *_where(verdict, record, subject.layout(), eager.layout, net)]
        raise BitwiseDifference("\n".join(told), verdict)
    control = _control(config, world, subject.layout(), record)
    if control.outcome != "different":
        raise VacuousCheck(
            "payloads packed in another order give the same bits under this net, so this check could not fail: take "
            'two nodes or more with two channels or more, accumulate="wire", and a reduction in the wire\'s dtype '
            "whose sums are not exact"
        )
    return Parity(record, eager.record, control, eager.layout)


def _control(config: TrainConfig | ConfigOfMesh, world: World, layout: BucketLayout, record: Record) -> Verdict:
    """The first step with every payload packed backwards, against what the graph gave."""
    order = [slot.parameter for payload in layout.of(REDUCE_SCATTER_NAME) for slot in reversed(payload.slots)]
    one_step = replace(config, steps=1) if isinstance(config, TrainConfig) else _first_step(config)
    backwards = SimulatedGraphRun(one_step, world, payload_order=order).run()
    return compare(*({str(key): value for key, value in side.select(step=0).items()} for side in (backwards, record)))


def _first_step(config: ConfigOfMesh) -> ConfigOfMesh:
    return lambda mesh: replace(config(mesh), steps=1)


def _where(verdict: Verdict, record: Record, graph: BucketLayout, eager: BucketLayout, net: Net) -> Iterator[str]:
    """Where the first gradient that differs sits on either side, and how its element is summed."""
    first = next((found for found in verdict.differences if found.key.phase == "gradient" and found.element), None)
    if first is None:
        return
    for side, layout in (("graph", graph), ("eager", eager)):
        for payload in layout.of(REDUCE_SCATTER_NAME):
            place = next((at for at, slot in enumerate(payload.slots) if slot.parameter == first.key.name), None)
            if place is not None:
                summed = _summed(first, record, payload, payload.slots[place], net)
                yield f"  {side}: bucket {payload.label!r}, {summed}"
                yield from (f"    {line}" for line in _neighbours(payload, place))


def _summed(found: Difference, record: Record, payload: Payload, slot: Slot, net: Net) -> str:
    """Channel and order of ranks of the element that differs first."""
    assert found.element is not None
    shape = record[found.key].shape
    within = sum(index * math.prod(shape[dim + 1 :]) for dim, index in enumerate(found.element))
    item = payload.dtype.itemsize
    offset, count = slot.offset // item + within, sum(other.nbytes for other in payload.slots) // item
    group = net if len(payload.ranks) == net.size else net.for_group(payload.ranks)
    place = payload.ranks.index(found.key.rank) if found.key.rank in payload.ranks else 0
    return f"element {offset} of {count}, {group.explain('reduce_scatter', offset, count, payload.dtype, place)}"


def _neighbours(payload: Payload, place: int) -> Iterator[str]:
    for at in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(payload.slots))):
        slot = payload.slots[at]
        mark = ">" if at == place else " "
        yield f"{mark} byte {slot.offset}: {slot.parameter}, {slot.nbytes} bytes"
