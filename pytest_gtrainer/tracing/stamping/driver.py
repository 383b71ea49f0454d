"""Trace the cut model, prove, stamp: what ``trace_step(..., repeat_layers=)`` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from pytest_gtrainer._torch.graph_modules import finished
from pytest_gtrainer.tracing.stamping.copying import stamp
from pytest_gtrainer.tracing.stamping.outline import check_outline, recorded_calls
from pytest_gtrainer.tracing.stamping.runs import Names, Run, cut, find_runs
from pytest_gtrainer.tracing.stamping.state import unchanged_state
from pytest_gtrainer.tracing.stamping.units import Units
from pytest_gtrainer.tracing.stamping.verdict import FullLayers, Refused, RepeatedLayers


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A step's graph, and the placements of its gradients, in the order of its outputs."""

    gm: fx.GraphModule
    gradient_placements: tuple[Any, ...]


Trace = Callable[[], TracedModel]
"""Traces the step of the model as it stands."""


def stamped_graph(
    model: nn.Module, step: Callable[..., Any], trace: Trace, state: Sequence[str], trainable: Sequence[str]
) -> tuple[TracedModel | None, RepeatedLayers]:
    """The step's graph from a cut model, None where nothing is proven alike; and what was done.

    The runs that a proof refuses are left out and the others tried again, so it ends after as many tries as runs.

    Args:
        trace: traces ``step`` of ``model`` as it is when it is called.
        state, trainable: names of parameters and buffers in the order of the graph's inputs, and of the parameters
            that require a gradient in the order of its outputs.
    """
    runs, full = find_runs(model)
    while runs:
        try:
            found = _stamped(model, step, trace, state, trainable, runs)
        except Refused as refused:
            where = [run for run in runs if run.container == refused.module] or runs
            full += [FullLayers(run.container, refused.reason) for run in where]
            runs = [run for run in runs if run not in where]
        else:
            return found, RepeatedLayers(tuple(run.told() for run in runs), tuple(full))
    return None, RepeatedLayers((), tuple(full))


def _stamped(
    model: nn.Module,
    step: Callable[..., Any],
    trace: Trace,
    state: Sequence[str],
    trainable: Sequence[str],
    runs: list[Run],
) -> TracedModel:
    names = Names(model, runs)
    with unchanged_state(model, step):
        with cut(model, runs), recorded_calls(names) as calls:
            small = _traced(trace)
        check_outline(model, names, calls, lambda: _traced(trace).gm)
    graph = stamp(Units(small.gm.graph, names), trainable)
    inputs = [node.meta["gt_input"] for node in graph.find_nodes(op="placeholder")]
    if [given["fqn"] for given in inputs if given["kind"] != "input"] != list(state):
        raise Refused("", "parameters and buffers of the layers are not registered one layer after another")
    placed = {
        name: placements
        for fqn, placements in zip(
            small.gm.graph.output_node().meta["gt_outputs"][1:], small.gradient_placements, strict=True
        )
        for _, name in names.stands_for(fqn)
    }
    attributes = {str(node.target): getattr(small.gm, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    return TracedModel(finished(graph, small.gm, attributes), tuple(placed[fqn] for fqn in trainable))


def _traced(trace: Trace) -> TracedModel:
    try:
        return trace()
    except Refused:
        raise
    except Exception as error:  # whatever user code makes of fewer layers
        reason = f"with fewer layers, or none inside, the step cannot be traced: {type(error).__name__}: {error}"
        raise Refused("", reason) from error
