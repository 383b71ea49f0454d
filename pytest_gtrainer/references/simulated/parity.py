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

import torch

from pytest_gtrainer import facts
from pytest_gtrainer.graph.bucket_plan import PayloadOrder
from pytest_gtrainer.graph.layout import (
    ALL_REDUCE_NAME,
    REDUCE_SCATTER_NAME,
    BucketLayout,
    LayoutDifference,
    Payload,
    assert_same_layout,
)
from pytest_gtrainer.numerics.compare import BitwiseDifference, Difference, Verdict, compare, explained
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.references.simulated.eager import ConfigOfMesh, SimulatedRun, simulated_eager
from pytest_gtrainer.references.simulated.graph import SimulatedGraphRun
from pytest_gtrainer.worlds.simulated.net import Net, check_choice, row_of
from pytest_gtrainer.worlds.simulated.world import net_of
from pytest_gtrainer.worlds.world import World

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
        row.result = "equal" if control.outcome == "different" else "equal, and so in every order"
        if control.outcome != "different" and invisible == "refuse":
            raise VacuousCheck(
                "payloads packed in another order give the same bits under this net, so this check could not fail: "
                'take two nodes or more with two channels or more, accumulate="wire", and a reduction in the wire\'s '
                "dtype whose sums are not exact"
            )
    return Parity(record, eager.record, control, eager.layout)


@dataclass(slots=True)
class _Row:
    result: str = ""


@contextmanager
def _row_of_table(net: Net) -> Iterator[_Row]:
    """Tell the summary what came out for this net, whatever that is."""
    row = _Row()
    try:
        yield row
    except Exception as error:
        row.result = row.result or f"stopped by {type(error).__name__}"
        raise
    finally:
        facts.emit("net", **row_of(net), result=row.result)


def _compared(subject: SimulatedGraphRun, eager: SimulatedRun, net: Net, row: _Row) -> Record:
    """Train by the graph; layouts and bits must be equal."""
    __tracebackhide__ = True
    layout = subject.layout()
    misplaced = "" if subject.config.replicate else _layout_difference(layout, eager.layout)
    record = subject.run()
    verdict = compare(record, eager.record)
    what = "graph against eager"
    facts.emit("verdict", outcome=verdict.outcome, tensors=verdict.compared, what=what)
    facts.tell("comparison", actual=record, expected=eager.record, verdict=verdict, what=what, must_differ=False)
    explanations = explained(verdict, eager.record)
    if verdict.outcome != "equal":
        row.result = _first(verdict)
        paths = Paths(net, {"graph": layout, "eager": eager.layout}, subject.group_of)
        told = "\n".join([str(verdict), *paths.of_first(verdict, record), *explanations])
        if misplaced:
            raise LayoutDifference(f"{misplaced}\nand therefore bits are {told}")
        raise BitwiseDifference(told, verdict)
    if misplaced:
        row.result = "layouts differ, bits do not"
        raise LayoutDifference(f"{misplaced}\nall bits are equal under this net: only the layout tells")
    return record


def _layout_difference(graph: BucketLayout, eager: BucketLayout) -> str:
    try:
        assert_same_layout(graph, eager)
    except LayoutDifference as difference:
        return str(difference)
    return ""


def _first(verdict: Verdict) -> str:
    first = verdict.first
    return f"DIFFERENT at step {first.key.step}, {first.key.phase} of {first.key.name}" if first else "UNVERIFIED"


def _control(config: TrainConfig | ConfigOfMesh, world: World, subject: SimulatedGraphRun, record: Record) -> Verdict:
    """The first step with every payload packed otherwise, against what the graph gave."""
    if subject.config.replicate:
        other = simulated_eager(_changed(config, steps=1, ddp_bucket_mb=None), net_of(world), mesh=world.mesh).record
    else:
        scatters = subject.layout().of(REDUCE_SCATTER_NAME)
        backwards = [slot.parameter for payload in scatters for slot in reversed(payload.slots)]
        other = subject.rewritten(payload_order=backwards).run(steps=1)
    return compare(*({str(key): value for key, value in side.select(step=0).items()} for side in (other, record)))


def _changed(config: TrainConfig | ConfigOfMesh, **fields: object) -> TrainConfig | ConfigOfMesh:
    if isinstance(config, TrainConfig):
        return replace(config, **fields)  # type: ignore[arg-type]
    return lambda mesh: replace(config(mesh), **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Paths:
    """Tells the path of a gradient's element through the reductions of several sides.

    Attributes:
        layouts: by side, "graph" and "eager"; of rank 0.
        group_of: the group of a rank that stands for the same dimension of the mesh as these ranks of rank 0.
    """

    net: Net
    layouts: Mapping[str, BucketLayout]
    group_of: GroupOf

    def of_first(self, verdict: Verdict, record: Record) -> Iterator[str]:
        """Lines about the first gradient that differs, which ``record`` has; none if no gradient does."""
        for found in verdict.differences:
            if found.key.phase == "gradient" and found.element is not None:
                element = _Element.of(found, record[found.key])
                for side, layout in self.layouts.items():
                    yield from self._of_side(side, layout, element)
                return

    def _of_side(self, side: str, layout: BucketLayout, element: _Element) -> Iterator[str]:
        payloads = [payload for name in _REDUCTIONS for payload in layout.of(name)]
        own = [payload for payload in payloads if element.parameter in payload.parameters]
        if not layout.payloads:
            yield f"  {side}: {self._path_alone(element)}"
        elif not own:
            yield f"  {side}: no reduction of its layout holds {element.parameter}"
        for payload in own:
            place = payload.parameters.index(element.parameter)
            yield f"  {side}: bucket {payload.label!r}, {payload.collective}, {self._path(element, payload, place)}"
            yield from (f"    {line}" for line in _neighbours(payload, place))

    def _path(self, element: _Element, payload: Payload, place: int) -> str:
        item = payload.dtype.itemsize
        offset = payload.slots[place].offset // item + element.offset
        count = sum(slot.nbytes for slot in payload.slots) // item
        ranks = self.group_of(element.rank, payload.ranks)
        net = self.net if len(ranks) == self.net.size else self.net.for_group(ranks)
        path = net.explain(payload.collective, offset, count, payload.dtype, ranks.index(element.rank))
        return f"element {offset} of {count}, {path}"

    def _path_alone(self, element: _Element) -> str:
        """Of a replicated parameter's gradient, which no bucket holds."""
        path = self.net.explain(ALL_REDUCE_NAME, element.offset, element.count, element.dtype)
        return f"reduced by itself, element {element.offset} of {element.count}, {path}"


@dataclass(frozen=True, slots=True)
class _Element:
    """One element of one rank's gradient: its number ``offset`` among the ``count`` that the rank holds."""

    rank: int
    parameter: str
    offset: int
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, found: Difference, gradient: torch.Tensor) -> _Element:
        assert found.element is not None
        shape = gradient.shape
        offset = sum(index * math.prod(shape[dim + 1 :]) for dim, index in enumerate(found.element))
        return cls(found.key.rank, found.key.name, offset, gradient.numel(), gradient.dtype)


def _neighbours(payload: Payload, place: int) -> Iterator[str]:
    for at in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(payload.slots))):
        slot = payload.slots[at]
        mark = ">" if at == place else " "
        yield f"{mark} byte {slot.offset}: {slot.parameter}, {slot.nbytes} bytes"
