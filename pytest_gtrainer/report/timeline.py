"""The schedule of a graph as a picture: what would run when, under a stated cost model.

One lane computes, in the order of the graph; each process group is a lane of its own, as a communication
stream is. A collective starts when the compute lane comes to its launch and its own lane is free; a wait holds
the compute lane until the collective has ended. What is held there is *exposed*, the rest of the communication is
*overlapped* with compute.

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

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from pytest_gtrainer.graph.nodes import direction, is_wait, node_fqn
from pytest_gtrainer.graphtext.operators import Group, groups_of, operator_of
from pytest_gtrainer.graphtext.schedule_view import group_of, is_launch
from pytest_gtrainer.graphtext.scopes import is_computed
from pytest_gtrainer.report.costs import CostModel

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time in a lane.

    Attributes:
        lane: "compute", or the symbol of a process group.
        start, duration: in seconds.
        label: operator and module.
        kind: "compute", "collective", or "exposed" where the compute lane is held by a wait.
    """

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
        return max(0.0, self.total("collective") - self.exposed)  # sums in another order may differ by a bit

    @property
    def summary(self) -> str:
        """The sums in one line."""
        parts = (self.total("compute"), self.total("collective"), self.overlapped, self.exposed, self.seconds)
        told = [f"{1000 * seconds:.2f} ms" for seconds in parts]
        return "compute {}, communication {}, of it overlapped {}, exposed {}: {} in all".format(*told)

    def merged(self) -> Iterator[Span]:
        """The spans with neighbours of one lane, kind and label as one: what a picture needs."""
        last: Span | None = None
        for span in sorted(self.spans, key=lambda span: (self.lanes.index(span.lane), span.start)):
            touches = last and (last.lane, last.kind, last.label) == (span.lane, span.kind, span.label)
            if last and touches and span.start <= last.start + last.duration + 1e-12 and span.kind == COMPUTE:
                last = Span(span.lane, last.start, span.start + span.duration - last.start, span.label, span.kind)
                continue
            if last:
                yield last
            last = span
        if last:
            yield last

    def to_chrome_trace(self) -> dict[str, Any]:
        """The Trace Event Format that chrome://tracing and Perfetto read; times in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes)}
        names = [{"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}}
                 for lane, number in lanes.items()]  # fmt: skip
        spans = [{"ph": "X", "pid": 0, "tid": lanes[span.lane], "ts": span.start * 1e6, "dur": span.duration * 1e6,
                  "name": span.label, "cat": span.kind} for span in self.spans]  # fmt: skip
        return {"traceEvents": [*names, *spans], "otherData": {"cost model": str(self.model)}}

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write ``to_chrome_trace`` to a file."""
        Path(path).write_text(json.dumps(self.to_chrome_trace()), encoding="utf-8")


def timeline(
    gm: fx.GraphModule, model: CostModel | None = None, *, mesh: Mapping[str, int] | None = None
) -> Timeline:
    """What would run when, under a cost model. ``mesh`` names the groups, as in ``graphtext.render``.

    Cost: one walk over the nodes.
    """
    run = _Run(model or CostModel(), groups_of(gm, mesh or {}))
    run.all(node for node in gm.graph.nodes if is_computed(node))
    return Timeline(tuple(run.spans), run.model, max([run.now, *run.free.values()]))


@dataclass(slots=True)
class _Run:
    """The state of a walk: the time of the compute lane, when each group's lane is free, when collectives end."""

    model: CostModel
    groups: Mapping[str, Group]
    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    ends: dict[fx.Node, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def all(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if is_launch(node):
                self.launch(node)
            elif is_wait(node):
                self.wait(node)
            else:
                self.compute(node)

    def compute(self, node: fx.Node) -> None:
        seconds = self.model.compute_seconds(node)
        if seconds:
            self.spans.append(Span(COMPUTE, self.now, seconds, _place(node), "compute"))
            self.now += seconds

    def launch(self, node: fx.Node) -> None:
        group = self.groups.get(group_of(node) or "")
        lane = group.symbol if group else "group"
        seconds = self.model.collective_seconds(node, len(group.ranks or ()) if group else 1)
        start = max(self.now, self.free.get(lane, 0.0))
        self.spans.append(Span(lane, start, seconds, f"{operator_of(node).short} {_place(node)}", "collective"))
        self.free[lane] = self.ends[node] = start + seconds

    def wait(self, node: fx.Node) -> None:
        ended = max((self.ends.get(operand, 0.0) for operand in _launches(node)), default=0.0)
        if ended > self.now:
            self.spans.append(Span(COMPUTE, self.now, ended - self.now, f"waits: {_place(node)}", "exposed"))
            self.now = ended


def _launches(wait: fx.Node) -> Iterator[fx.Node]:
    """The collectives that a wait is for; of a coalesced one by way of its outputs."""
    for operand in wait.all_input_nodes:
        yield operand
        yield from operand.all_input_nodes


def _place(node: fx.Node) -> str:
    bucket = node.meta.get("fsdp_bucket")
    owner = "+".join(bucket["plan_fqns"]) if bucket else node_fqn(node)
    return f"{direction(node)} {owner or '(no module)'}"
