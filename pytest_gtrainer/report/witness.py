"""The witness of a test: records what the report shows, in the process that runs the test.

This is the pytest process, a worker of xdist, or a rank. The witness turns notifications of passes,
comparisons and layouts (``facts.notify``) into facts of the test's reports:

- ``graph_text``: a graph's text, compressed, by its key; equal texts of a test once;
- ``pass``: name, fingerprint, seconds, the keys of the graphs before and after, and the change in
  words and in lines; each stage that ``gt_compile`` recorded is a pipeline that begins with its
  graph;
- ``schedule``: the timeline of a graph that communicates, by the graph's key;
- ``memory``: the bytes alive at each node and the allocations at the peak, by the graph's key; if
  the test itself called ``peak_memory``, by a key of its own;
- ``layout``: the byte of each parameter, in a pipeline's result or in two sides that were compared;
- ``golden_difference``: a graph golden, the obtained graph, and the change in words and in lines;
- ``golden_text``: what a test claims for a golden, if runs are compared (``--gt-against``) or
  repetitions (``--gt-repeat``);
- ``imported``: where modules came from, if runs are compared;
- ``comparison``: a digest of every phase of every step and rank, and the first difference;
- ``calls``: a digest of each operator, if a repeated test is observed (``--gt-repeat``);
- ``not_shown``: what could not be recorded. A witness never makes a test fail.

Only one rank records graphs. Nothing here runs without ``--gt-report`` or ``--junitxml``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_gtrainer import facts
from pytest_gtrainer.facts import packed
from pytest_gtrainer.numerics.verdict import page_order

if TYPE_CHECKING:
    from torch import fx

    from pytest_gtrainer.compiling.record import CompiledGraph, CompileRecord
    from pytest_gtrainer.graph.layout import BucketLayout
    from pytest_gtrainer.graph.memory import PeakMemory
    from pytest_gtrainer.numerics.record import Record
    from pytest_gtrainer.numerics.verdict import Verdict
    from pytest_gtrainer.passes.pipeline import PassRun

_MOST_SPANS = 6_000
_MOST_DIFFERING = 5_000
_MOST_PIPELINES = 8  # of a test; those after them are counted only
_TOPICS = {
    "comparison": "a comparison",
    "graph_pass": "a pass",
    "graph_passes": "a pipeline",
    "layouts": "a layout",
    "memory": "a memory curve",
    "compiled": "what was compiled",
}
"""The watched topics, each by the method of its name, and what the page calls it."""


class Witness:
    """Records what one test shows.

    Args:
        graphs: record graphs and layouts too, not only comparisons.
        mesh: dimensions of the test's mesh, which name the process groups of graphs.
    """

    def __init__(self, *, graphs: bool = True, mesh: Mapping[str, int] | None = None) -> None:
        self._graphs, self._mesh = graphs, mesh
        self._texts: set[str] = set()  # keys of the texts that were sent
        self._last: tuple[object, str, str] | None = None  # a graph, its text and key
        self._pipeline = 0
        self._key: str | None = None  # of the graph whose memory the witness itself asks for

    @property
    def watchers(self) -> dict[str, facts.Watcher]:
        """The watchers for ``facts.watching``, by topic."""
        topics = _TOPICS if self._graphs else ("comparison",)
        return {topic: _guarded(_TOPICS[topic], getattr(self, topic)) for topic in topics}

    def graph_pass(self, run: PassRun, before: fx.GraphModule, after: fx.GraphModule) -> None:
        if self._pipeline >= _MOST_PIPELINES:
            return
        from pytest_gtrainer.graphtext import unfold
        from pytest_gtrainer.graphtext.differences import words
        from pytest_gtrainer.graphtext.differences.lines import changed_lines

        old, old_key = self._send_text(before)
        new, new_key = self._send_text(after)
        described, changes = [], []
        if old_key != new_key:
            changes = changed_lines(old, new)
            unfolded = unfold(old), unfold(new)
            # Two texts may differ only in how they are folded.
            if unfolded[0] != unfolded[1]:
                described = words(*unfolded)

        facts.emit(
            "pass",
            pipeline=self._pipeline,
            name=run.name,
            fingerprint=run.fingerprint,
            seconds=round(run.seconds, 6),
            nodes=[len(before.graph.nodes), len(after.graph.nodes)],
            before=old_key,
            after=new_key,
            words=described,
            changes=changes,
        )

    def compiled(self, record: CompileRecord) -> None:
        for graph in record:
            for stage in graph.stages:
                if not stage.endswith("_after_passes"):
                    self._compiled_stage(graph, stage)
                    self._pipeline += 1
        if self._pipeline > _MOST_PIPELINES:
            what = f"stages after the first {_MOST_PIPELINES}"
            facts.emit("not_shown", what=what, why="they are many")

    def _compiled_stage(self, graph: CompiledGraph, stage: str) -> None:
        from pytest_gtrainer.passes.pipeline import PassRun

        gm = graph.stages[stage]
        self.graph_pass(PassRun(f"{stage} of {graph.id}", "as recorded", 0.0), gm, gm)
        # Inductor calls its passes on Dynamo's graph "pre_grad".
        stage_of_passes = "pre_grad" if stage == "dynamo" else stage
        for run in graph.passes:
            if run.stage == stage_of_passes and run.changed:
                self.graph_pass(PassRun(run.name, run.slot, run.seconds), gm, run.after)
                gm = run.after

        last = graph.stages.get(f"{stage}_after_passes")
        if last is not None and str(last.graph) != str(gm.graph):
            self.graph_pass(PassRun("what else Inductor did", "", 0.0), gm, last)

    def _send_text(self, gm: fx.GraphModule) -> tuple[str, str]:
        """Return a graph's text and key, and emit them with schedule and memory if they are new."""
        # The graph after a pass is the graph before the next one: it is rendered once.
        if self._last is not None and self._last[0] is gm:
            return self._last[1], self._last[2]
        from pytest_gtrainer.graphtext import render
        from pytest_gtrainer.graphtext.schedule_view import communicates

        text = render(gm, mesh=self._mesh)
        key = facts.key_of(text)
        if key not in self._texts:
            self._texts.add(key)
            facts.emit("graph_text", key=key, lines=text.count("\n"), packed=packed(text))
            self._send_memory(gm, key)
            try:
                if communicates(gm):
                    schedule = json.dumps(describe_schedule(gm, self._mesh))
                    facts.emit("schedule", key=key, packed=packed(schedule))
            except ValueError as error:  # the graph does not say what a collective costs
                facts.emit("not_shown", what="a schedule", why=str(error)[:500])

        self._last = gm, text, key
        return text, key

    def _send_memory(self, gm: fx.GraphModule, key: str) -> None:
        from pytest_gtrainer.graph.memory import peak_memory

        self._key = key
        try:
            peak_memory(gm)  # notifies ``memory`` below
        except ValueError as error:  # no values, or sizes that are known only when the graph runs
            if str(error) not in self._texts:
                self._texts.add(str(error))
                facts.emit("not_shown", what="a memory curve", why=str(error)[:500])
        finally:
            self._key = None

    def memory(self, peak: PeakMemory) -> None:
        content = {
            "summary": str(peak),
            "at": list(peak.curve).index(peak.at),
            "curve": list(peak.curve.values()),
        }
        text = json.dumps(content)
        key = self._key or facts.key_of(text)
        facts.emit("memory", key=key, asked=self._key is None, packed=packed(text))

    def graph_passes(self, given: fx.GraphModule, result: fx.GraphModule) -> None:
        from pytest_gtrainer.graph.layout import bucket_layout

        number = self._pipeline
        self._pipeline += 1
        self._last = None
        if number >= _MOST_PIPELINES:
            what = f"pipelines of passes after the first {_MOST_PIPELINES}"
            facts.emit("not_shown", what=what, why="they are many")
            return

        # A group may not be in this world, and a bucket may be of another tool.
        try:
            layout = bucket_layout(result)
        except ValueError as error:
            facts.emit("not_shown", what="a layout", why=str(error)[:500])
            return

        if layout.payloads:
            sides = [["rewritten graph", describe_payloads(layout)]]
            facts.emit("layout", pipeline=number, sides=sides, problems=[])

    def layouts(
        self, actual: BucketLayout, expected: BucketLayout, problems: list[str], actual_is: str
    ) -> None:
        sides = [
            [actual_is, describe_payloads(actual)],
            ["expected", describe_payloads(expected)],
        ]
        facts.emit("layout", pipeline=None, sides=sides, problems=problems[:100])

    def comparison(
        self, actual: Any, expected: Any, verdict: Verdict, what: str, must_differ: bool
    ) -> None:
        from pytest_gtrainer.numerics.record import Record

        differing = [list(each.key) for each in verdict.differences[:_MOST_DIFFERING]]
        # A run has a digest for each step, rank and phase; plain tensors have one in all.
        of_actual, of_expected, values = [], [], []
        if isinstance(actual, Record) and isinstance(expected, Record):
            of_actual, of_expected = digest_rows(actual), digest_rows(expected)
        else:
            values = _digest_of(actual)

        facts.emit(
            "comparison",
            what=what,
            outcome=verdict.outcome,
            must_differ=must_differ,
            tensors=verdict.compared,
            actual=of_actual,
            expected=of_expected,
            values=values,
            first=next(iter(differing), None),
            verdict=str(verdict)[:2_000],
            differing=differing,
            more=len(verdict.differences) - len(differing),
        )


def _guarded(what: str, record: facts.Watcher) -> facts.Watcher:
    def guarded(**objects: Any) -> None:
        try:
            record(**objects)
        # Watchers run inside the test's calls: any error here would be the test's.
        except Exception as error:
            facts.emit("not_shown", what=what, why=f"{type(error).__name__}: {error}"[:500])

    return guarded


def describe_payloads(layout: BucketLayout) -> list[dict[str, Any]]:
    """Return a layout in plain types, in the order of its payloads."""
    described: list[dict[str, Any]] = []
    for payload in layout.payloads:
        described.append(
            {
                "label": payload.label,
                "collective": payload.collective,
                "op": payload.op,
                "dtype": str(payload.dtype).removeprefix("torch."),
                "ranks": len(payload.ranks),
                "directions": list(payload.directions),
                "slots": [[slot.parameter, slot.offset, slot.nbytes] for slot in payload.slots],
            }
        )

    return described


def describe_schedule(gm: fx.GraphModule, mesh: Mapping[str, int] | None) -> dict[str, Any]:
    """Return a timeline in plain types: lanes, and the longest spans with times in microseconds."""
    from pytest_gtrainer.report.timeline import timeline

    schedule = timeline(gm, mesh=mesh)
    spans = schedule.merged()
    lanes = {lane: number for number, lane in enumerate(schedule.lanes)}
    shown = sorted(spans, key=lambda span: -span.duration)[:_MOST_SPANS]
    rows = []
    for span in sorted(shown, key=lambda span: (lanes[span.lane], span.start)):
        start, duration = round(span.start * 1e6, 3), round(span.duration * 1e6, 3)
        rows.append([lanes[span.lane], start, duration, span.label, span.kind])
    return {
        "summary": schedule.summary,
        "model": str(schedule.model),
        "lanes": list(lanes),
        "seconds": schedule.seconds,
        "left_out": len(spans) - len(shown),
        "spans": rows,
    }


def _digest_of(values: Any) -> list[str]:
    """Return a digest of compared tensors that are no record; none if they hold no values."""
    from pytest_gtrainer.numerics.digest import digest

    try:
        return [digest(values).partition(":")[2][:16]]
    except (TypeError, ValueError):  # no tensors, fake ones: the verdict is about that
        return []


def digest_rows(record: Record) -> list[list[Any]]:
    """Return ``[step, rank, phase, digest]`` of a record: one digest for all tensors of a phase."""
    from pytest_gtrainer.numerics.digest import digest

    parts: dict[tuple[int, int, str], dict[str, Any]] = {}
    for key, tensor in record.items():
        parts.setdefault((key.step, key.rank, key.phase), {})[key.name] = tensor
    ordered = sorted(parts, key=lambda place: page_order(*place))
    return [[*place, digest(parts[place]).partition(":")[2][:16]] for place in ordered]
