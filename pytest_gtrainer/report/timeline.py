"""The schedule of a graph as a picture: when its nodes would run under a cost model, a roofline.

One lane computes, in the order of the graph; each process group has its own lane. A collective
starts when the compute lane reaches its launch and its own lane is free. A wait stops the compute
lane until the collective has ended: this time is *exposed*. Communication beside an operator that
computes is *overlapped*. Nothing is measured, and no machine is predicted. Coarse: no fusion, a
view costs nothing, a nested graph costs the bytes of its operands and results, and groups do not
share a link.

- compute: ``max(flops / flops_per_second, bytes / bytes_per_second) + overhead``, with the bytes of
  all operands and results. ``torch.utils.flop_counter`` counts products, convolutions and
  attention; other operators count as bytes.
- collective of n ranks: ``latency + wire / link``. A rank puts on the wire ``(n-1)/n`` of the
  larger side of an all-gather, reduce-scatter or all-to-all, twice that for an all-reduce, and all
  of a broadcast or a send.

>>> from pytest_gtrainer.graphtext import parse
>>> gm = parse('''fsdp = group(range(0, 2))
... if I:
...   I[0]: f32[500000]
... if fwd:
...   with _:
...     all_reduce: f32[500000] = _c10d_functional.all_reduce(I[0], "sum", fsdp)
...     sin: f32[500000] = aten.sin(I[0])
...     wait_tensor: f32[500000] = _c10d_functional.wait_tensor(all_reduce)
... if out:
...   out[0] = wait_tensor
...   out[1] = sin
... ''')
>>> schedule = timeline(gm, CostModel(bytes_per_second=4e9, link=1e9, overhead=0.0, latency=0.0))
>>> print(schedule.summary)
compute 1.00 ms, communication 2.00 ms, of it overlapped 1.00 ms, exposed 1.00 ms: 2.00 ms in all
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from pytest_gtrainer._torch.tracing import GuardOnDataDependentSymNode
from pytest_gtrainer.facts import check_type
from pytest_gtrainer.graph.collectives import group_of, kind_of, refuse_unseen
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopt
from pytest_gtrainer.graph.nodes import direction, is_view, is_wait, node_fqn, written_operands
from pytest_gtrainer.graph.packing import nbytes_of
from pytest_gtrainer.graphtext.operators import Group, groups_of, operator_of
from pytest_gtrainer.graphtext.schedule_view import is_free, is_launch, operands_of, payload_of
from pytest_gtrainer.graphtext.scopes import is_computed

COMPUTE = "compute"
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates of an imagined accelerator; the defaults are round figures of one of 2023.

    Attributes:
        flops_per_second: of products, as reached, not as advertised.
        bytes_per_second: of a rank's memory.
        overhead: seconds a kernel takes at least.
        link: bytes per second that a rank puts on the wire in a collective.
        latency: seconds a collective takes at least.
    """

    flops_per_second: float = 400e12
    bytes_per_second: float = 2e12
    overhead: float = 4e-6
    link: float = 50e9
    latency: float = 20e-6

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            check_type(number, (int, float), f"a cost model's {each.name}", "a number")
        for name in ("flops_per_second", "bytes_per_second", "link"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"a cost model's {name} is a rate above 0, not {getattr(self, name)!r}"
                )
        for name in ("overhead", "latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"a cost model's {name} is a number of seconds, 0 or more, not "
                    f"{getattr(self, name)!r}"
                )

    def __str__(self) -> str:
        return (
            f"{self.flops_per_second:.3g} flop/s, memory {self.bytes_per_second:.3g} B/s, "
            f"link {self.link:.3g} B/s, {self.overhead * 1e6:g} µs a kernel, "
            f"{self.latency * 1e6:g} µs a collective"
        )

    def compute_seconds(self, node: fx.Node) -> float:
        """Return the seconds that a node computes; 0 for views and the arithmetic of sizes."""
        if is_free(node):
            return 0.0
        nbytes = sum(nbytes_of(part.meta.get("val")) for part in (*node.all_input_nodes, node))
        roofline = max(flops_of(node) / self.flops_per_second, nbytes / self.bytes_per_second)
        return roofline + self.overhead

    def collective_seconds(self, launch: fx.Node, ranks: int) -> float:
        """Return the seconds that a collective of ``ranks`` ranks communicates."""
        share = (ranks - 1) / max(ranks, 1)
        trips = {"": 1.0, "broadcast": 1.0, "all_reduce": 2 * share}.get(kind_of(launch), share)
        return self.latency + trips * nbytes_of(payload_of(launch)) / self.link


def flops_of(node: fx.Node) -> float:
    """Return a node's flops by torch's formula; 0 without a formula or with unknown sizes."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", node.target))
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=node.meta.get("val"))
            # A SymInt is the product of sizes that are known only when the graph runs.
            return float(flops) if isinstance(flops, int | float) else 0.0
        # The registry lacks the attention operator of CPU.
        if getattr(node.target, "__name__", "").startswith(_CPU_ATTENTION + ".default"):
            return float(sdpa_flop_count(*(operand.shape for operand in args[:3])))
    # Formulas compare and assert sizes, which fails if they are missing or depend on data.
    except (TypeError, ValueError, AssertionError, AttributeError, GuardOnDataDependentSymNode):
        pass

    return 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of seconds in a lane.

    Attributes:
        lane: "compute" or the symbol of a process group.
        kind: "compute", "collective", or "exposed" for the time in a wait.
    """

    lane: str
    start: float
    duration: float
    label: str
    kind: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of a graph's schedule in the order of the graph, and their cost model."""

    spans: tuple[Span, ...]
    model: CostModel
    seconds: float

    @property
    def lanes(self) -> tuple[str, ...]:
        """The compute lane, then the groups in order of first use."""
        return tuple(dict.fromkeys([COMPUTE, *(span.lane for span in self.spans)]))

    def total(self, kind: str) -> float:
        """Return the seconds of all spans of a kind."""
        return sum(span.duration for span in self.spans if span.kind == kind)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed because a collective has not ended."""
        return self.total("exposed")

    @property
    def overlapped(self) -> float:
        """Seconds of communication, of all lanes, in which something is computed.

        Communication of two lanes at once, or that nothing waits for, may be neither overlapped nor
        exposed.
        """
        computes = [span for span in self.spans if span.kind == COMPUTE]
        starts = [span.start for span in computes]
        sums = list(accumulate((span.duration for span in computes), initial=0.0))

        def computed_until(time: float) -> float:
            place = bisect_right(starts, time)
            if not place:
                return 0.0
            last = computes[place - 1]
            return sums[place - 1] + min(last.duration, time - last.start)

        seconds = 0.0
        for span in self.spans:
            if span.kind == "collective":
                end = span.start + span.duration
                seconds += computed_until(end) - computed_until(span.start)
        return seconds

    @property
    def summary(self) -> str:
        """The sums in one line."""
        compute, communication = self.total("compute"), self.total("collective")
        return (
            f"compute {1000 * compute:.2f} ms, communication {1000 * communication:.2f} ms, "
            f"of it overlapped {1000 * self.overlapped:.2f} ms, "
            f"exposed {1000 * self.exposed:.2f} ms: {1000 * self.seconds:.2f} ms in all"
        )

    def merged(self) -> list[Span]:
        """Return the spans by lane and time, with adjacent compute spans of one label merged."""
        spans: list[Span] = []
        for span in sorted(self.spans, key=lambda span: (self.lanes.index(span.lane), span.start)):
            if spans and span.kind == COMPUTE:
                last = spans[-1]
                is_same = (last.lane, last.kind, last.label) == (span.lane, span.kind, span.label)
                if is_same and span.start <= last.start + last.duration + 1e-12:
                    spans[-1] = replace(last, duration=span.start + span.duration - last.start)
                    continue
            spans.append(span)
        return spans

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the Trace Event Format of chrome://tracing and Perfetto; times in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes)}
        events: list[dict[str, Any]] = []
        for lane, number in lanes.items():
            name = {"name": "thread_name", "args": {"name": lane}}
            events.append({"ph": "M", "pid": 0, "tid": number, **name})
        for span in self.spans:
            times = {"ts": span.start * 1e6, "dur": span.duration * 1e6}
            place = {"ph": "X", "pid": 0, "tid": lanes[span.lane]}
            events.append({**place, **times, "name": span.label, "cat": span.kind})
        return {"traceEvents": events, "otherData": {"cost model": str(self.model)}}

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write ``to_chrome_trace`` to a file."""
        Path(path).write_text(json.dumps(self.to_chrome_trace()), encoding="utf-8")


def timeline(
    gm: AnyGraph,
    model: CostModel | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    names: Names | None = None,
) -> Timeline:
    """Schedule a graph under a cost model, in one walk over its nodes.

    An operator that uses a collective's result without a wait, or what a collective in place writes
    to, is held until the collective has ended.

    Args:
        gm: a graph of any tracer, with fake values on its nodes.
        model: the rates; by default those of ``CostModel()``.
        mesh: dimensions of the mesh, which name the groups, as in ``graphtext.render``.
        names: what the inputs are, if the graph does not say it.

    Raises:
        PlanError: a node communicates and calls no operator.
        ValueError: the cost of a collective is not known: the graph does not say its group or its
            payload.
    """
    gm = adopt(gm, names)
    refuse_unseen(gm)
    model = model or CostModel()
    groups = groups_of(gm, mesh or {})
    now = 0.0  # the time of the compute lane
    free: dict[str, float] = {}  # when the lane of a group is free, by its symbol
    ends: dict[fx.Node, float] = {}  # when a collective ends
    spans = []
    for node in gm.graph.nodes:
        if not is_computed(node):
            continue
        if is_launch(node):
            group = groups.get(group_of(node) or "")
            if group is None or not group.ranks or not payload_of(node):
                raise _unknown_cost(node, group)
            lane = group.symbol
            seconds = model.collective_seconds(node, len(group.ranks))
            start = max(now, free.get(lane, 0.0))
            label = f"{operator_of(node).short} {_place(node)}"
            spans.append(Span(lane, start, seconds, label, "collective"))
            free[lane] = ends[node] = start + seconds
            for written in written_operands(node):
                ends[_memory_of(written)] = ends[node]
            continue

        if is_wait(node):
            # A coalesced collective returns a list: the wait reads a getitem that reads it.
            launches = list(node.all_input_nodes)
            for operand in node.all_input_nodes:
                launches += operand.all_input_nodes
        else:
            launches = operands_of(node)  # a collective without a wait, used directly
        launches += map(_memory_of, node.all_input_nodes)

        ended = max((ends.get(launch, 0.0) for launch in launches), default=0.0)
        if ended > now:
            spans.append(Span(COMPUTE, now, ended - now, f"waits: {_place(node)}", "exposed"))
            now = ended
        seconds = 0.0 if is_wait(node) else model.compute_seconds(node)
        if seconds:
            spans.append(Span(COMPUTE, now, seconds, _place(node), "compute"))
            now += seconds

    return Timeline(tuple(spans), model, max([now, *free.values()]))


def _memory_of(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor which a view shows, or a write in place returns."""
    while True:
        sources = written_operands(node)
        if is_view(node.target):
            sources = node.all_input_nodes
        if not sources:
            return node
        node = sources[0]


def _unknown_cost(node: fx.Node, group: Group | None) -> ValueError:
    collective = f"a timeline cannot say when {node.name} ({operator_of(node).text}) ends"
    if group is None or group.ranks:
        why = "what it moves, or in which group, is not known from its operands"
    else:
        why = (
            f"the ranks of its group {group.symbol} are not known here, "
            "in the world of its trace they are"
        )
    return ValueError(f"{collective}: {why}")


def _place(node: fx.Node) -> str:
    bucket = node.meta.get("fsdp_bucket")
    owner = "+".join(bucket["plan_fqns"]) if bucket else node_fqn(node)
    return f"{direction(node)} {owner or '(no module)'}"
