"""How a graph is run again and again from one start: the same inputs, random states and buffers, copied each time.

A ``Run`` takes a graph and gives its results by rank and name: those of this process, or those of every rank of a
simulated world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.numerics.record import Key
from pytest_gtrainer.numerics.seeds import random_states_kept, random_states_now
from pytest_gtrainer.tracing.state import ModelState, local

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.interpreter import RankGraph, RankRandomStates
    from pytest_gtrainer.worlds.simulated.net import Net
    from pytest_gtrainer.worlds.world import World

Values = dict[Key, Tensor]
"""By ``Key(0, rank, "", name)``; where a process has one rank only, that is 0."""
Run = Callable[[fx.GraphModule], Values]


def flat_inputs(inputs: Sequence[Any]) -> list[Any]:
    """The graph's inputs: the state of a model, then the leaves of the batch; flat ones as they are."""
    if not inputs or not isinstance(inputs[0], nn.Module):
        return list(inputs)
    return [local(tensor) for tensor in [*ModelState.of(inputs[0]).tensors, *pytree.tree_leaves(inputs[1:])]]


def local_run(flat: Sequence[Any]) -> Run:
    """Runs a graph in this process, from its random states of now."""
    kept, random_states = _copies(flat), random_states_now()

    def run(gm: fx.GraphModule) -> Values:
        given = _copies(kept)
        with random_states_kept(), torch.no_grad():
            random_states()
            return _named(gm, gm(*given), given)

    return run


def run_in_world(inputs: Sequence[Sequence[Any]], world: World, meshes: Sequence[DeviceMesh]) -> Run:
    """Runs a graph on all ranks of a simulated world, which have these flat inputs."""
    from pytest_gtrainer.worlds.simulated.interpreter import PerRank, RankGraph
    from pytest_gtrainer.worlds.simulated.world import net_of

    merged = [PerRank(values) for values in zip(*inputs, strict=True)]
    return _on_all(lambda gm: RankGraph.of(gm, *meshes), net_of(world), merged)


def run_as(graph: RankGraph, net: Net, inputs: Sequence[Any], random: RankRandomStates) -> Run:
    """Runs other graphs as ``Interpreter(graph, net, random=random).run(inputs)`` is about to run this one."""
    return _on_all(graph.with_graph, net, inputs, random.copy())


def _on_all(
    ranked: Callable[[fx.GraphModule], RankGraph],
    net: Net,
    inputs: Sequence[Any],
    random: RankRandomStates | None = None,
) -> Run:
    from pytest_gtrainer.worlds.simulated.interpreter import Interpreter
    from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank

    kept = _copies(inputs)

    def run(gm: fx.GraphModule) -> Values:
        given = _copies(kept)
        output = Interpreter(ranked(gm), net, random=random.copy() if random else None).run(given)
        values: Values = {}
        for rank in range(net.size):
            values |= _named(gm, of_rank(output, rank), [of_rank(value, rank) for value in given], rank)
        return values

    return run


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of all tensors; what was one tensor on several ranks is one again."""
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return type(value)(map(copied, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]

    return [copied(value) for value in values]


def _named(gm: fx.GraphModule, outputs: Any, given: Sequence[Any], rank: int = 0) -> Values:
    """Results by name, and the buffers after the run."""
    leaves = pytree.tree_leaves(outputs)
    told = gm.graph.output_node().meta.get("gt_outputs") or ()
    names = told if len(told) == len(leaves) else [f"output {index}" for index in range(len(leaves))]
    values = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, given, strict=True):
        source = node.meta.get("gt_input", {})
        if source.get("kind") == "buffer":
            values[f"{source['fqn']} afterwards"] = value
    return {Key(0, rank, "", name): value for name, value in values.items()}
