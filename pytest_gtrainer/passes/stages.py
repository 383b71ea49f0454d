"""Cut the graph of a pipeline's stage into parts that a schedule runs apart from each other.

*Parts*, in order: ``unshard`` gathers parameters, ``forward`` computes the outputs,
``backward_input`` the gradients of the inputs (dI), ``backward_weight`` what else the backward
computes (dW), ``reduce`` reduces gradients of parameters. *Idea.* A node's part follows from what
it reads and what reads it. *Invariant.* No node reads what a later part computes, and writes and
random draws keep their order, or the cut is refused. *Cost.* Linear in nodes and edges.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.facts import spell_some
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

# In the order in which they may run.
PARTS = ("unshard", "forward", "backward_input", "backward_weight", REDUCE)
_UNSHARD, _FORWARD, _INPUT, _WEIGHT, _REDUCE = range(len(PARTS))


@dataclass(frozen=True, slots=True)
class StagePart:
    """One graph of a stage: ``gm(*values named takes) -> values named gives``."""

    gm: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """A stage's graph in parts, which hand values on by the names of the whole graph's nodes.

    Attributes:
        parts: the graphs by name, in the order of ``PARTS``; a part may be empty.
        inputs: names of the whole graph's inputs, in its order.
        results: names of what the whole graph returns, in its order; None for a gradient that does
            not exist.
        accumulates: names of the values of which a step reduces, or returns, the sum over its
            microbatches.
    """

    parts: Mapping[str, StagePart]
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]
    accumulates: tuple[str, ...]

    def run(self, values: dict[str, Any], *parts: str) -> None:
        """Run parts on ``values``, which holds what they take and gets what they give.

        Raises:
            ValueError: there is no such part, or ``values`` lacks what one takes.
        """
        for name in parts:
            if not isinstance(name, str) or name not in self.parts:
                raise ValueError(f"a stage has no part {name!r}; it has {', '.join(self.parts)}")
            part = self.parts[name]
            missing = [taken for taken in part.takes if taken not in values]
            if missing:
                raise ValueError(
                    f"the part {name} takes {spell_some(missing)}, which values does not hold: "
                    f"{self._givers_of(missing[0])}"
                )
            # The backward is in the graph, so autograd has nothing to record.
            with torch.no_grad():
                given = part.gm(*(values[taken] for taken in part.takes))
            values.update(zip(part.gives, given, strict=True))

    def _givers_of(self, value: str) -> str:
        """Return what to do for a value that is missing."""
        if value in self.inputs:
            return "give it, as an input of the whole graph"
        giving = [name for name, part in self.parts.items() if value in part.gives]
        return f"run {' or '.join(giving)} before"


def split_stage_graph(
    gm: fx.GraphModule, *, moved: Mapping[fx.Node, str] | None = None
) -> StageGraphs:
    """Cut a stage's graph into unshard, forward, dI, dW and reduce.

    Run in this order they give the same bits. The graph is left as it was. Bucket it before: a
    bucket that is reduced is cut in front of its packing.

    Args:
        gm: the graph of ``trace_stage``, or what passes have made of it.
        moved: nodes that are to run in another part than their own, by its name.

    Raises:
        ValueError: the graph is not of a stage, or ``moved`` names no part, or a node that
            computes nothing in it.
        PlanError: a node reads what a later part computes, or would write or draw in another order.
    """
    outputs = gm.graph.output_node().meta.get(STAGE_OUTPUTS)
    if outputs is None:
        raise ValueError(
            "the graph is not of a pipeline's stage: trace it by trace_stage(module, inputs)"
        )
    part_of = _assign_parts(gm, outputs)
    for node, part in (moved or {}).items():
        if part not in PARTS:
            raise ValueError(f"a stage has no part {part!r}; it has {', '.join(PARTS)}")
        if node not in part_of:
            raise ValueError(
                f"moved has {node}, which computes nothing in this graph: take a node of gm.graph, "
                "after its passes"
            )
        part_of[node] = PARTS.index(part)
    _check_order(gm, part_of)
    results = results_of(gm)
    parts: dict[str, StagePart] = {}
    for number, part in enumerate(PARTS):
        parts[part] = cut_part(gm, part_of, number, results)
    for name in parts[REDUCE].takes:
        if name in parts["forward"].gives:
            raise PlanError(
                f"the reduction of a gradient reads {name}, a value of the forward: microbatches "
                "differ in it"
            )

    # Parameters are gathered, and gradients reduced, once a step; the rest once a microbatch.
    names = [getattr(result, "name", None) for result in results]
    once = {*parts["unshard"].takes, *parts["unshard"].gives, *parts[REDUCE].gives}
    summed = dict.fromkeys([*parts[REDUCE].takes, *names[sum(outputs) :]])
    return StageGraphs(
        parts,
        inputs=tuple(map(str, gm.graph.find_nodes(op="placeholder"))),
        results=tuple(names),
        accumulates=tuple(name for name in summed if name is not None and name not in once),
    )


def _assign_parts(gm: fx.GraphModule, outputs: tuple[int, int]) -> dict[fx.Node, int]:
    """Return the part of every node that computes something.

    Args:
        outputs: place and count of the gradients of the inputs among the results.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    unshard = {node for node in inputs if node.meta["gt_input"]["kind"] == "parameter"}
    reduce = {member.launch for member in fsdp_reduce_scatters(gm)}
    nodes = []
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            nodes.append(node)
    for node in nodes:
        # What is computed from parameters alone, as gathers and casts, is the same for each
        # microbatch. Draws and writes are not.
        reads = node.all_input_nodes
        is_bucket = "fsdp_bucket" in node.meta and direction(node) == BACKWARD
        is_marked = (node.meta.get("custom") or {}).get(PART) == REDUCE  # by the tracer
        if reads and unshard.issuperset(reads) and not is_random(node) and not mutates(node):
            unshard.add(node)
        elif not reduce.isdisjoint(reads) or is_bucket or is_marked:
            reduce.add(node)

    first, count = outputs
    needed = _find_operands(nodes, results_of(gm)[first : first + count])
    part_of: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in part_of:
            # Tuples are handed on element by element, so an element stays with its operator.
            part_of[node] = part_of[node.args[0]]
        elif node in unshard:
            part_of[node] = _UNSHARD
        elif node in reduce:
            part_of[node] = _REDUCE
        elif direction(node) != BACKWARD:
            part_of[node] = _FORWARD
        elif node in needed:
            part_of[node] = _INPUT
        else:
            part_of[node] = _WEIGHT
    return part_of


def _find_operands(nodes: list[fx.Node], gradients: Iterable[Any]) -> set[Any]:
    """Return the nodes of the backward that the gradients of the inputs are computed from."""
    needed = set(gradients)
    for node in reversed(nodes):
        if node in needed and direction(node) == BACKWARD:
            needed.update(node.all_input_nodes)
    return needed


def _check_order(gm: fx.GraphModule, part_of: dict[fx.Node, int]) -> None:
    """Refuse a node that reads what a later part computes, or writes or draws in another order."""
    for node, part in part_of.items():
        for read in node.all_input_nodes:
            if part_of.get(read, 0) > part:
                raise PlanError(
                    f"{_describe(node, part)} needs {_describe(read, part_of[read])}, which runs "
                    "later"
                )
    # Draws advance one generator, and a reader of memory needs the last write.
    ordered = [list(filter(is_random, part_of))]
    for memory in writes(gm.graph):
        ordered.append([n for n in part_of if memory in map(storage_of, n.all_input_nodes)])
    for nodes in ordered:
        for first, then in pairwise(nodes):
            if part_of[first] > part_of[then]:
                raise PlanError(
                    f"{_describe(first, part_of[first])} comes before "
                    f"{_describe(then, part_of[then])} in the stage, and both draw random numbers "
                    "or touch memory that is written to: cut apart they would change places"
                )


def _describe(node: fx.Node, part: int) -> str:
    return f"{node.name} of {node_fqn(node) or 'the root'} ({PARTS[part]})"


def cut_part(
    gm: fx.GraphModule, part_of: dict[fx.Node, int], part: int, results: Iterable[Any]
) -> StagePart:
    """Return the graph of one part, which takes what earlier parts give, or the whole graph."""
    graph, copies = fx.Graph(), {}
    body = [node for node, number in part_of.items() if number == part]
    takes: dict[fx.Node, None] = {}
    constants: dict[fx.Node, None] = {}  # the part holds them itself
    for node in body:
        for read in node.all_input_nodes:
            if part_of.get(read) != part:
                if read.op == "get_attr":
                    constants[read] = None
                else:
                    takes[read] = None
    for read in takes:
        copies[read] = graph.placeholder(read.name)
        copies[read].meta = dict(read.meta)
    for node in (*constants, *body):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = set(results)
    gives = []
    for node in body:
        if node in returned or any(part_of.get(user, part) != part for user in node.users):
            gives.append(node)
    graph.output(tuple(copies[node] for node in gives))
    return StagePart(
        fx.GraphModule(gm, graph),
        takes=tuple(map(str, takes)),
        gives=tuple(map(str, gives)),
    )
