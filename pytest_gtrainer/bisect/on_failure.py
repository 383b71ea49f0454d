"""Bisection without asking for it: what the passes and replays of a test leave behind, and what to do when bits differ.

A ``PassWitness`` sees each pipeline that runs, and the inputs of the first replays of its result, in this process or on
all ranks of a simulated world. When a bitwise comparison is made afterwards and differs, it bisects each of these
pipelines. If records were compared, it does so on the inputs of the step where they begin to differ, for the pass
behind the longest prefix that gives what was expected there; else, or if no prefix does, on the first inputs on which
the passes change a bit of what the graph gives without them. On real ranks every rank must come to the same
comparison: they vote, and all replay together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_gtrainer.bisect.search import (
    Run,
    Stage,
    Values,
    bisect_stages,
    bisect_towards,
    local_run,
    on_any_rank,
    run_as,
)
from pytest_gtrainer.facts import Watcher
from pytest_gtrainer.numerics.record import Record, Tensors
from pytest_gtrainer.numerics.verdict import Key, Verdict

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.interpreter import RankGraph, RankRandomStates
    from pytest_gtrainer.worlds.simulated.net import Net

MOST_REPLAYS = 8
"""Of how many replays of a graph the inputs are kept."""


@dataclass(slots=True)
class _Pipeline:
    """The graphs between passes, and how to run them from the inputs of each of the result's first replays."""

    stages: list[Stage]
    result: fx.GraphModule
    runs: list[Run] = field(default_factory=list)

    def explained(self, step: int | None, expected: Tensors) -> str:
        if step is not None and step < len(self.runs) and isinstance(expected, Record):
            found = bisect_towards(self.stages, self.runs[step], _results(expected, step))
            if found is not None:
                return f"bisection of step {step}: {found}"
        replays = 0
        for number, run in enumerate(self.runs, 1):
            found = bisect_stages(self.stages, run)
            if found.outcome == "different":
                return f"bisection{f' of replay {number}' if number > 1 else ''}: {found}"
            replays += found.replays
        told = f"bisection: no pass of {len(self.stages) - 1} changes a bit ({replays} replays)"
        return told + (f", on the inputs of the first {len(self.runs)} replays" if len(self.runs) > 1 else "")

def _results(expected: Record, step: int) -> Values:
    """What a graph has to give at a step: losses, gradients before clipping and buffers, by rank and name."""
    values: Values = {}
    for (_, rank, phase, name), tensor in expected.select(step=step).items():
        if phase in ("loss", "gradient", "buffer"):
            place = 0 if expected.rank is not None else rank  # a process of one rank calls it 0
            values[Key(0, place, "", name if phase != "buffer" else f"{name} afterwards")] = tensor
    return values


@dataclass(slots=True)
class PassWitness:
    """Remembers pipelines and their first inputs; tells, once a comparison differs, where it came from."""

    _running: list[Stage] = field(default_factory=list)
    _pipelines: list[_Pipeline] = field(default_factory=list)

    def watchers(self) -> Mapping[str, Watcher]:
        """What to hand to ``facts.watching``."""
        return {
            "graph_pass": self._see_pass,
            "graph_passes": self._see_pipeline,
            "replay": self._see_replay,
            "replay_on_all": self._see_replay_on_all,
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
        self._keep(gm, lambda: local_run(inputs))

    def _see_replay_on_all(self, graph: RankGraph, net: Net, inputs: list[Any], random: RankRandomStates) -> None:
        self._keep(graph.gm, lambda: run_as(graph, net, inputs, random))

    def _keep(self, gm: fx.GraphModule, run: Callable[[], Run]) -> None:
        for pipeline in self._pipelines:
            if pipeline.result is gm and len(pipeline.runs) < MOST_REPLAYS:
                pipeline.runs.append(run())

    def _see_judged(self, verdict: Verdict, expected: Tensors, explanations: list[str]) -> None:
        if on_any_rank(verdict.outcome == "different"):
            first = verdict.first.key.step if verdict.first is not None else None
            step = next((step for step in range(MOST_REPLAYS) if on_any_rank(first == step)), None)
            replayed = [pipeline for pipeline in self._pipelines if pipeline.runs]
            explanations += [pipeline.explained(step, expected) for pipeline in replayed]
            if not replayed:
                explanations.append(
                    "bisection: no graph was rewritten by apply_graph_passes and replayed before this comparison"
                )
