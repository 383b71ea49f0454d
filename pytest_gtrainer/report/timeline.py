"""The schedule of a graph as a picture: what would run when, under a stated cost model, a roofline.

One lane computes, in the order of the graph; each process group has its own lane. A collective starts when the compute
lane reaches its launch and its own lane is free. A wait stops the compute lane until the collective has ended: this
time is *exposed*, the rest of the communication is *overlapped* with compute. Nothing is measured, and no machine is
predicted. Coarse: no fusion, a view costs nothing, a nested graph costs the bytes of its operands and results, and
groups do not share a link.

- compute: ``max(flops / flops_per_second, bytes / bytes_per_second) + overhead``, with the bytes of all operands and
  results. ``torch.utils.flop_counter`` counts products, convolutions and attention; other operators count as bytes.
- collective of n ranks: ``latency + wire / link``. A rank puts on the wire ``(n-1)/n`` of the larger side of an
  all-gather, reduce-scatter or all-to-all, twice that for an all-reduce, and all of a broadcast or a send.

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
>>> told = timeline(gm, CostModel(bytes_per_second=4e9, link=1e9, overhead=0.0, latency=0.0))
>>> print(told.summary)
compute 1.00 ms, communication 2.00 ms, of it overlapped 1.00 ms, exposed 1.00 ms: 2.00 ms in all
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from pytest_gtrainer._torch.tracing import GuardOnDataDependentSymNode
from pytest_gtrainer.graph.collectives import group_of, kind_of
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopted
from pytest_gtrainer.graph.nodes import direction, is_wait, node_fqn
from pytest_gtrainer.graph.packing import nbytes_of
from pytest_gtrainer.graphtext.operators import groups_of, operator_of
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
        for name in ("flops_per_second", "bytes_per_second", "link"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"a cost model's {name} is a rate above 0, not {getattr(self, name)!r}"
                )

    def __str__(self) -> str:
        said = f"{self.flops_per_second:.3g} flop/s, memory {self.bytes_per_second:.3g} B/s, link {self.link:.3g} B/s"
        return (
            f"{said}, {self.overhead * 1e6:g} µs a kernel, {self.latency * 1e6:g} µs a collective"
        )

    def compute_seconds(self, node: fx.Node) -> float:
        """How long a node computes; 0 for views and the arithmetic of sizes."""
        if is_free(node):
            return 0.0
        moved = sum(nbytes_of(part.meta.get("val")) for part in (*node.all_input_nodes, node))
        return (
            max(flops_of(node) / self.flops_per_second, moved / self.bytes_per_second)
            + self.overhead
        )

    def collective_seconds(self, launch: fx.Node, ranks: int) -> float:
        """How long a collective of so many ranks communicates."""
        share = (ranks - 1) / max(ranks, 1)
        trips = {"": 1.0, "broadcast": 1.0, "all_reduce": 2 * share}.get(kind_of(launch), share)
        wire = trips * nbytes_of(payload_of(launch))
        return self.latency + wire / self.link


def flops_of(node: fx.Node) -> float:
    """Floating-point operations by torch's formula for the operator; 0 where it has none."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", node.target))
    try:
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda operand: operand.meta.get("val")
        )
        if formula is not None:
            counted = formula(*args, **kwargs, out_val=node.meta.get("val"))
            return (
                float(counted) if isinstance(counted, int | float) else 0.0
            )  # of a size that only the run knows
        if getattr(node.target, "__name__", "").startswith(_CPU_ATTENTION + ".default"):
            return float(sdpa_flop_count(*(operand.shape for operand in args[:3])))
    # sizes that are not known numbers
    except (TypeError, ValueError, AssertionError, AttributeError, GuardOnDataDependentSymNode):
        pass
    return 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds in a lane ("compute" or a group's symbol), of kind "compute", "collective", or "exposed" in a wait."""

    lane: str
    start: float
    duration: float
    label: str
    kind: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of a graph's schedule, in the order of the graph, and what they were computed from."""

    spans: tuple[Span, ...]
    model: CostModel
    seconds: float

    @property
    def lanes(self) -> tuple[str, ...]:
        """The compute lane, then the groups in order of first use."""
        return tuple(dict.fromkeys([COMPUTE, *(span.lane for span in self.spans)]))

    def total(self, kind: str) -> float:
        """Seconds of all spans of a kind."""
        return sum(span.duration for span in self.spans if span.kind == kind)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed because a collective has not ended."""
        return self.total("exposed")

    @property
    def overlapped(self) -> float:
        """Seconds of communication, of all lanes, beyond those that are exposed."""
        return max(
            0.0, self.total("collective") - self.exposed
        )  # sums in another order may differ by a bit

    @property
    def summary(self) -> str:
        """The sums in one line."""
        parts = (
            self.total("compute"),
            self.total("collective"),
            self.overlapped,
            self.exposed,
            self.seconds,
        )
        told = [f"{1000 * seconds:.2f} ms" for seconds in parts]
        return "compute {}, communication {}, of it overlapped {}, exposed {}: {} in all".format(
            *told
        )

    def merged(self) -> list[Span]:
        """The spans with neighbours of one lane, kind and label as one: what a picture needs."""
        found: list[Span] = []
        for span in sorted(self.spans, key=lambda span: (self.lanes.index(span.lane), span.start)):
            last = found[-1] if found and span.kind == COMPUTE else None
            is_same = last and (last.lane, last.kind, last.label) == (
                span.lane,
                span.kind,
                span.label,
            )
            if last and is_same and span.start <= last.start + last.duration + 1e-12:
                found[-1] = replace(last, duration=span.start + span.duration - last.start)
            else:
                found.append(span)
        return found

    def to_chrome_trace(self) -> dict[str, Any]:
        """The Trace Event Format that chrome://tracing and Perfetto read; times in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes)}
        names = [
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        spans = [
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes[span.lane],
                "ts": span.start * 1e6,
                "dur": span.duration * 1e6,
                "name": span.label,
                "cat": span.kind,
            }
            for span in self.spans
        ]
        return {"traceEvents": [*names, *spans], "otherData": {"cost model": str(self.model)}}

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
    """What would run when, under a cost model. ``mesh`` names the groups and ``names`` the inputs, as in
    ``graphtext.render``.

    An operator that uses a collective's result without a wait is held until it has ended.
    Cost: one walk over the nodes.

    Raises:
        ValueError: what a collective costs is not known: its group, or what it moves, is not told by the graph.
    """
    gm = adopted(gm, names)
    model = model or CostModel()
    groups = groups_of(gm, mesh or {})
    now = 0.0  # of the compute lane
    free: dict[str, float] = {}  # when each group's lane is
    ends: dict[fx.Node, float] = {}  # of collectives
    spans = []
    for node in gm.graph.nodes:
        if not is_computed(node):
            continue
        if is_launch(node):
            group = groups.get(group_of(node) or "")
            if group is None or not group.ranks or not payload_of(node):
                told = f"a timeline cannot tell when {node.name} ({operator_of(node).text}) ends"
                if group is None or group.ranks:
                    raise ValueError(
                        f"{told}: what it moves, or in which group, is not known from its operands"
                    )
                unknown = f"the ranks of its group {group.symbol} are not known here"
                raise ValueError(f"{told}: {unknown}, in the world of its trace they are")
            lane = group.symbol
            seconds = model.collective_seconds(node, len(group.ranks))
            start = max(now, free.get(lane, 0.0))
            spans.append(
                Span(
                    lane, start, seconds, f"{operator_of(node).short} {_place(node)}", "collective"
                )
            )
            free[lane] = ends[node] = start + seconds
            continue
        needs = operands_of(node)  # of a collective that no wait stands behind
        if is_wait(node):
            # of a coalesced collective the launch lies behind one of its outputs
            operands = node.all_input_nodes
            needs = [
                *operands,
                *(behind for operand in operands for behind in operand.all_input_nodes),
            ]
        ended = max((ends.get(launch, 0.0) for launch in needs), default=0.0)
        if ended > now:
            spans.append(Span(COMPUTE, now, ended - now, f"waits: {_place(node)}", "exposed"))
            now = ended
        seconds = 0.0 if is_wait(node) else model.compute_seconds(node)
        if seconds:
            spans.append(Span(COMPUTE, now, seconds, _place(node), "compute"))
            now += seconds
    return Timeline(tuple(spans), model, max([now, *free.values()]))


def _place(node: fx.Node) -> str:
    bucket = node.meta.get("fsdp_bucket")
    owner = "+".join(bucket["plan_fqns"]) if bucket else node_fqn(node)
    return f"{direction(node)} {owner or '(no module)'}"
