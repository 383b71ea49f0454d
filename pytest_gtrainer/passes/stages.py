"""Cut the graph of a pipeline's stage into what a schedule runs apart from each other.

*Parts*, in order: ``unshard`` gathers parameters, ``forward`` computes the outputs, ``backward_input`` the gradients of
the inputs (dI), ``backward_weight`` what else the backward computes (dW), ``reduce`` reduces gradients of parameters.
*Idea.* A node's part follows from what it reads and what reads it. *Invariant.* No node reads what a later part
computes, and writes and random draws keep their order, or the cut is refused. *Cost.* Linear in nodes and edges.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.graph.collectives import PlanError, fsdp_reduce_scatters, results_of
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    PART,
    REDUCE,
    STAGE_OUTPUTS,
    direction,
    is_random,
    mutates,
    node_fqn,
    storage_of,
    writes,
)

PARTS = (
    "unshard",
    "forward",
    "backward_input",
    "backward_weight",
    REDUCE,
)  # in the order in which they may run
_UNSHARD, _FORWARD, _INPUT, _WEIGHT, _REDUCE = range(len(PARTS))


@dataclass(frozen=True, slots=True)
class StagePart:
    """One graph of a stage: ``gm(*values named takes) -> values named gives``."""

    gm: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """A stage's graph in parts, which hand each other values by the names of the whole graph's nodes.

    Attributes:
        parts: the graphs by name, in the order of ``PARTS``; a part may be empty.
        inputs: names of the whole graph's inputs, in its order.
        results: names of what the whole graph returns, in its order; None of a gradient that there is not.
        accumulates: names of the values of which a step reduces, or returns, the sum over its microbatches.
    """

    parts: Mapping[str, StagePart]
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]
    accumulates: tuple[str, ...]

    def run(self, values: dict[str, Any], *parts: str) -> None:
        """Run parts on ``values``, which holds what they take and gets what they give."""
        for name in parts:
            part = self.parts[name]
            with torch.no_grad():
                given = part.gm(*(values[taken] for taken in part.takes))
            values.update(zip(part.gives, given, strict=True))


def split_stage_graph(
    gm: fx.GraphModule, *, moved: Mapping[fx.Node, str] | None = None
) -> StageGraphs:
    """Cut a stage's graph into unshard, forward, dI, dW and reduce; run in this order they give the same bits.

    The graph is left as it was. Bucket it before: a bucket that is reduced is cut in front of its packing.

    Args:
        gm: the graph of ``trace_stage``, or what passes have made of it.
        moved: nodes that are to run in another part than their own, by its name.

    Raises:
        ValueError: the graph is not of a stage, or ``moved`` names no part.
        PlanError: a node reads what a later part computes, or would write or draw in another order.
    """
    outputs = gm.graph.output_node().meta.get(STAGE_OUTPUTS)
    if outputs is None:
        raise ValueError(
            "the graph is not of a pipeline's stage: trace it by trace_stage(module, inputs)"
        )
    if unknown := sorted(set((moved or {}).values()) - set(PARTS)):
        raise ValueError(f"a stage has no part {unknown[0]!r}; it has {', '.join(PARTS)}")
    part_of = _parts_of(gm, outputs) | {
        node: PARTS.index(part) for node, part in (moved or {}).items()
    }
    _check(gm, part_of)
    results = [result if isinstance(result, fx.Node) else None for result in results_of(gm)]
    parts = {name: cut_part(gm, part_of, number, results) for number, name in enumerate(PARTS)}
    once = {*parts["unshard"].takes, *parts["unshard"].gives, *parts[REDUCE].gives}
    summed = [
        *parts[REDUCE].takes,
        *(node.name for node in results[sum(outputs) :] if node is not None),
    ]
    if mixed := [name for name in parts[REDUCE].takes if name in parts["forward"].gives]:
        raise PlanError(
            f"the reduction of a gradient reads {mixed[0]}, a value of the forward: microbatches differ in it"
        )
    return StageGraphs(
        parts,
        inputs=tuple(node.name for node in gm.graph.find_nodes(op="placeholder")),
        results=tuple(None if node is None else node.name for node in results),
        accumulates=tuple(dict.fromkeys(name for name in summed if name not in once)),
    )


def _parts_of(gm: fx.GraphModule, outputs: tuple[int, int]) -> dict[fx.Node, int]:
    """The part of every node that computes something; parts of one result stay with it."""
    nodes = [
        node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr")
    ]
    unshard = {
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta["gt_input"]["kind"] == "parameter"
    }
    reduce = {member.launch for member in fsdp_reduce_scatters(gm)}
    for node in nodes:
        reads, is_bucket = (
            node.all_input_nodes,
            "fsdp_bucket" in node.meta and direction(node) == BACKWARD,
        )
        is_marked = (
            is_bucket or (node.meta.get("custom") or {}).get(PART) == REDUCE
        )  # by a bucket, or by the tracer
        if reads and unshard.issuperset(reads) and not is_random(node) and not mutates(node):
            unshard.add(node)
        elif not reduce.isdisjoint(reads) or is_marked:
            reduce.add(node)
    first, count = outputs
    needed = {node for node in results_of(gm)[first : first + count] if isinstance(node, fx.Node)}
    for node in reversed(nodes):
        if node in needed and direction(node) == BACKWARD:
            needed.update(node.all_input_nodes)

    part_of: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in part_of:
            part_of[node] = part_of[node.args[0]]
        elif node in unshard or node in reduce:
            part_of[node] = _UNSHARD if node in unshard else _REDUCE
        elif direction(node) != BACKWARD:
            part_of[node] = _FORWARD
        else:
            part_of[node] = _INPUT if node in needed else _WEIGHT
    return part_of


def _check(gm: fx.GraphModule, part_of: dict[fx.Node, int]) -> None:
    """Refuse a node that reads what a later part computes, or writes, or draws, in another place among its like."""
    for node, part in part_of.items():
        late = next((read for read in node.all_input_nodes if part_of.get(read, 0) > part), None)
        if late is not None:
            raise PlanError(
                f"{_told(node, part)} needs {_told(late, part_of[late])}, which runs later"
            )
    touching = (
        [n for n in part_of if memory in map(storage_of, n.all_input_nodes)]
        for memory in writes(gm.graph)
    )
    for nodes in ([node for node in part_of if is_random(node)], *touching):
        for first, then in pairwise(nodes):
            if part_of[first] > part_of[then]:
                raise PlanError(
                    f"{_told(first, part_of[first])} comes before {_told(then, part_of[then])} in the stage, and both "
                    "draw random numbers or touch memory that is written to: cut apart they would change places"
                )


def _told(node: fx.Node, part: int) -> str:
    return f"{node.name} of {node_fqn(node) or 'the root'} ({PARTS[part]})"


def cut_part(
    gm: fx.GraphModule, part_of: dict[fx.Node, int], part: int, results: Iterable[fx.Node | None]
) -> StagePart:
    """The graph of one part: it takes what earlier ones give, or the whole graph is given."""
    graph, copies = fx.Graph(), {}
    body = [node for node, number in part_of.items() if number == part]
    reads = dict.fromkeys(
        read for node in body for read in node.all_input_nodes if part_of.get(read) != part
    )
    takes, held = (
        [read for read in reads if (read.op == "get_attr") is is_held] for is_held in (False, True)
    )
    for read in takes:
        copies[read] = graph.placeholder(read.name)
        copies[read].meta = dict(read.meta)
    for node in (*held, *body):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = set(results)
    gives = [
        node
        for node in body
        if node in returned or any(part_of.get(user, part) != part for user in node.users)
    ]
    graph.output(tuple(copies[node] for node in gives))
    return StagePart(
        fx.GraphModule(gm, graph),
        tuple(node.name for node in takes),
        tuple(node.name for node in gives),
    )
