"""Bisection without asking for it: what the passes and replays of a test leave behind, and what to do when bits differ.

A ``Witness`` sees every pipeline that runs and the inputs of the first replay of its result. When a bitwise comparison
is made afterwards and differs, it bisects each of these pipelines on those inputs. On real ranks every rank must come
to the same comparison: they vote, and all replay together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pytest_gtrainer.facts import Watcher
from pytest_gtrainer.numerics.bisect import Run, Stage, bisect_stages, local_run, on_any_rank
from pytest_gtrainer.numerics.compare import Verdict


@dataclass(slots=True)
class _Pipeline:
    """The graphs between passes; ``run`` appears with the first replay."""

    stages: list[Stage]
    result: fx.GraphModule
    run: Run | None = None


@dataclass(slots=True)
class Witness:
    """Remembers pipelines and their first inputs; tells, once a comparison differs, where it came from."""

    _running: list[Stage] = field(default_factory=list)
    _pipelines: list[_Pipeline] = field(default_factory=list)

    def watchers(self) -> Mapping[str, Watcher]:
        """What to hand to ``facts.watching``."""
        return {
            "graph_pass": self._see_pass,
            "graph_passes": self._see_pipeline,
            "replay": self._see_replay,
            "judged": self._see_judged,
        }

    def _see_pass(self, run: Any, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self._running = self._running or [Stage("", before)]
        self._running.append(Stage(run.name, after))

    def _see_pipeline(self, given: fx.GraphModule, result: fx.GraphModule) -> None:
        if self._running:
            self._pipelines.append(_Pipeline(self._running, result))
        self._running = []

    def _see_replay(self, gm: fx.GraphModule, inputs: list[Any]) -> None:
        for pipeline in self._pipelines:
            if pipeline.result is gm and pipeline.run is None:
                pipeline.run = local_run(inputs)

    def _see_judged(self, verdict: Verdict, explanations: list[str]) -> None:
        if on_any_rank(verdict.outcome == "different"):
            explanations += self.explain()

    def explain(self) -> list[str]:
        """A text for each pipeline, or why there is none."""
        replayed = [pipeline for pipeline in self._pipelines if pipeline.run is not None]
        if not replayed:
            return ["bisection: no graph was rewritten by apply_graph_passes and replayed before this comparison"]
        return [f"bisection: {bisect_stages(each.stages, each.run)}" for each in replayed if each.run is not None]
