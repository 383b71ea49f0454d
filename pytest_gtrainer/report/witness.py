"""What the report shows of a test, taken down where the test runs: in this process, in a worker, in each rank.

A witness turns notifications of passes, comparisons and layouts (``facts.notify``) into facts of the test's reports:

- ``graph_text``: a graph's text by its key, compressed; equal texts of a test once;
- ``pass``: name, fingerprint, seconds, the keys of the graphs before and after, what changed in words and in lines; of
  what ``gt_compile`` recorded each stage is a pipeline that begins with its graph;
- ``schedule``: the timeline of a graph that communicates, by the graph's key;
- ``memory``: the bytes alive at each node and what is alive at the peak, by the graph's key; of a graph whose peak the
  test itself asked for, by a key of its own;
- ``layout``: who sits at which byte; of a pipeline's result, or of the two sides that were compared;
- ``golden_difference``: a graph golden and what was obtained, and what changed in words and in lines;
- ``comparison``: a digest of every phase of every step and rank, and the first difference;
- ``not_shown``: what could not be taken down. A witness never makes a test fail.

Graphs are taken down by one rank only. Nothing here runs without ``--gt-report`` or ``--junitxml``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_gtrainer import facts
from pytest_gtrainer.facts import packed
from pytest_gtrainer.numerics.verdict import page_order

if TYPE_CHECKING:
    from torch import fx

    from pytest_gtrainer.compiling.record import CompileRecord
    from pytest_gtrainer.graph.layout import BucketLayout
    from pytest_gtrainer.graph.memory import PeakMemory
    from pytest_gtrainer.numerics.record import Record
    from pytest_gtrainer.numerics.verdict import Verdict
    from pytest_gtrainer.passes.pipeline import PassRun

_MOST_SPANS = 6_000
_MOST_DIFFERING = 5_000
_MOST_PIPELINES = 8  # of a test that runs more pipelines than that, the first ones are shown
_TOPICS = {
    "comparison": "a comparison",
    "graph_pass": "a pass",
    "graph_passes": "a pipeline",
    "layouts": "a layout",
    "memory": "a memory curve",
    "compiled": "what was compiled",
}
"""What a witness watches, each by its method of that name."""


class Witness:
    """Takes down what one test shows, graphs and layouts only if ``graphs``; ``mesh`` names their process groups."""

    def __init__(self, *, graphs: bool = True, mesh: Mapping[str, int] | None = None) -> None:
        self._graphs, self._mesh = graphs, mesh
        self._texts: set[str] = set()
        self._last: tuple[object, str, str] | None = None  # a graph, its text and key
        self._pipeline = 0
        self._key: str | None = None  # of the graph whose memory is asked for here

    @property
    def watchers(self) -> dict[str, facts.Watcher]:
        """What to hand to ``facts.watching``."""
        topics = _TOPICS if self._graphs else ("comparison",)
        return {topic: _guarded(_TOPICS[topic], getattr(self, topic)) for topic in topics}

    def graph_pass(self, run: PassRun, before: fx.GraphModule, after: fx.GraphModule) -> None:
        if self._pipeline >= _MOST_PIPELINES:
            return
        from pytest_gtrainer.graphtext import unfold
        from pytest_gtrainer.graphtext.differences import words
        from pytest_gtrainer.graphtext.differences.lines import changed_lines

        (old, old_key), (new, new_key) = self._text(before), self._text(after)
        unfolded = (unfold(old), unfold(new)) if old_key != new_key else ((), ())
        told = words(*unfolded) if unfolded[0] != unfolded[1] else []
        facts.emit(
            "pass",
            pipeline=self._pipeline,
            name=run.name,
            fingerprint=run.fingerprint,
            seconds=round(run.seconds, 6),
            nodes=[len(before.graph.nodes), len(after.graph.nodes)],
            before=old_key,
            after=new_key,
            words=told,
            changes=changed_lines(old, new) if old_key != new_key else [],
        )

    def compiled(self, record: CompileRecord) -> None:
        from pytest_gtrainer.passes.pipeline import PassRun

        stages = [
            (graph, stage)
            for graph in record
            for stage in graph.stages
            if not stage.endswith("_after_passes")
        ]
        for graph, stage in stages:
            gm, passes = graph.stages[stage], "pre_grad" if stage == "dynamo" else stage
            self.graph_pass(PassRun(f"{stage} of {graph.id}", "as recorded", 0.0), gm, gm)
            for run in graph.passes:
                if run.stage == passes and run.changed:
                    self.graph_pass(PassRun(run.name, run.slot, run.seconds), gm, run.after)
                    gm = run.after
            if (last := graph.stages.get(f"{stage}_after_passes")) is not None and str(
                last.graph
            ) != str(gm.graph):
                self.graph_pass(PassRun("what else Inductor did", "", 0.0), gm, last)
            self._pipeline += 1
        if self._pipeline > _MOST_PIPELINES:
            facts.emit(
                "not_shown", what=f"stages after the first {_MOST_PIPELINES}", why="they are many"
            )

    def _text(self, gm: fx.GraphModule) -> tuple[str, str]:
        """A graph's text and its key; sent along when it is new. A pass's graph is the next one's before."""
        if self._last is None or self._last[0] is not gm:
            from pytest_gtrainer.graphtext import render
            from pytest_gtrainer.graphtext.schedule_view import communicates

            text = render(gm, mesh=self._mesh)
            key = hashlib.sha256(text.encode()).hexdigest()[:16]
            if key not in self._texts:
                self._texts.add(key)
                facts.emit("graph_text", key=key, lines=text.count("\n"), packed=packed(text))
                self._curve(gm, key)
                try:
                    if communicates(gm):
                        facts.emit(
                            "schedule", key=key, packed=packed(json.dumps(schedule(gm, self._mesh)))
                        )
                except ValueError as error:  # a collective whose cost nobody can tell
                    facts.emit("not_shown", what="a schedule", why=str(error)[:500])
            self._last = gm, text, key
        return self._last[1], self._last[2]

    def _curve(self, gm: fx.GraphModule, key: str) -> None:
        from pytest_gtrainer.graph.memory import peak_memory

        self._key = key
        try:
            peak_memory(gm)
        except ValueError as error:  # no values, or sizes that only the run knows
            if str(error) not in self._texts:
                self._texts.add(str(error))
                facts.emit("not_shown", what="a memory curve", why=str(error)[:500])
        finally:
            self._key = None

    def memory(self, peak: PeakMemory) -> None:
        curve = list(peak.curve)
        text = json.dumps(
            {"told": str(peak), "at": curve.index(peak.at), "curve": list(peak.curve.values())}
        )
        key = self._key or hashlib.sha256(text.encode()).hexdigest()[:16]
        facts.emit("memory", key=key, asked=self._key is None, packed=packed(text))

    def graph_passes(self, given: fx.GraphModule, result: fx.GraphModule) -> None:
        number, self._pipeline = self._pipeline, self._pipeline + 1
        self._last = None
        if number >= _MOST_PIPELINES:
            facts.emit(
                "not_shown",
                what=f"pipelines of passes after the first {_MOST_PIPELINES}",
                why="they are many",
            )
            return
        from pytest_gtrainer.graph.layout import bucket_layout

        try:
            layout = bucket_layout(result)
        except (
            ValueError
        ) as error:  # a group that does not exist here, or a bucket that cannot be read
            facts.emit("not_shown", what="a layout", why=str(error)[:500])
            return
        if layout.payloads:
            facts.emit(
                "layout",
                pipeline=number,
                sides=[["rewritten graph", payloads(layout)]],
                problems=[],
            )

    def layouts(
        self, actual: BucketLayout, expected: BucketLayout, problems: list[str], actual_is: str
    ) -> None:
        sides = [[actual_is, payloads(actual)], ["expected", payloads(expected)]]
        facts.emit("layout", pipeline=None, sides=sides, problems=problems[:100])

    def comparison(
        self, actual: Any, expected: Any, verdict: Verdict, what: str, must_differ: bool
    ) -> None:
        from pytest_gtrainer.numerics.record import Record

        sides = [table(side) if isinstance(side, Record) else [] for side in (actual, expected)]
        differing = [list(each.key) for each in verdict.differences[:_MOST_DIFFERING]]
        facts.emit(
            "comparison",
            what=what,
            outcome=verdict.outcome,
            must_differ=must_differ,
            tensors=verdict.compared,
            actual=sides[0],
            expected=sides[1],
            first=list(verdict.first.key) if verdict.first else None,
            told=str(verdict)[:2_000],
            differing=differing,
            untold=len(verdict.differences) - len(differing),
        )


def _guarded(what: str, take_down: facts.Watcher) -> facts.Watcher:
    def guarded(**objects: Any) -> None:
        try:
            take_down(**objects)
        except Exception as error:  # whatever it is, it is the report's trouble, not the test's
            facts.emit("not_shown", what=what, why=f"{type(error).__name__}: {error}"[:500])

    return guarded


def payloads(layout: BucketLayout) -> list[dict[str, Any]]:
    """A layout in plain types, in the order of its payloads."""
    return [
        {
            "label": each.label,
            "collective": each.collective,
            "op": each.op,
            "dtype": str(each.dtype).removeprefix("torch."),
            "ranks": len(each.ranks),
            "directions": list(each.directions),
            "slots": [[slot.parameter, slot.offset, slot.nbytes] for slot in each.slots],
        }
        for each in layout.payloads
    ]


def schedule(gm: fx.GraphModule, mesh: Mapping[str, int] | None) -> dict[str, Any]:
    """A timeline in plain types: lanes, and spans of times in microseconds, neighbours as one."""
    from pytest_gtrainer.report.timeline import timeline

    told = timeline(gm, mesh=mesh)
    lanes, spans = {lane: number for number, lane in enumerate(told.lanes)}, told.merged()
    shown = sorted(spans, key=lambda span: -span.duration)[:_MOST_SPANS]
    rows = [
        [
            lanes[span.lane],
            round(span.start * 1e6, 3),
            round(span.duration * 1e6, 3),
            span.label,
            span.kind,
        ]
        for span in sorted(shown, key=lambda span: (lanes[span.lane], span.start))
    ]
    sums = {
        "summary": told.summary,
        "model": str(told.model),
        "lanes": list(lanes),
        "seconds": told.seconds,
    }
    return {**sums, "left_out": len(spans) - len(shown), "spans": rows}


def table(record: Record) -> list[list[Any]]:
    """``[step, rank, phase, digest]``: one digest for all tensors of a phase."""
    from pytest_gtrainer.numerics.digest import digest

    parts: dict[tuple[int, int, str], dict[str, Any]] = {}
    for key, tensor in record.items():
        parts.setdefault((key.step, key.rank, key.phase), {})[key.name] = tensor
    ordered = sorted(parts, key=lambda place: page_order(*place))
    return [[*place, digest(parts[place]).partition(":")[2][:16]] for place in ordered]
