"""Running a graph on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer import facts
from pytest_gtrainer.worlds.simulated.interpreter.compiler import compiled
from pytest_gtrainer.worlds.simulated.interpreter.groups import RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.random_states import RandomStates, generator_kept
from pytest_gtrainer.worlds.simulated.interpreter.values import PerRank, of_rank
from pytest_gtrainer.worlds.simulated.net import Net


class Interpreter:
    """A graph, ready to run on all ranks of a world as often as wanted.

    Args:
        graph: what one rank traced; it must not depend on the rank, see ``check_same_on_all``.
        net: the order of reductions, for as many ranks as the graph was traced for.
        random: random generator states of the ranks, by default all as the process's is now.

    Raises:
        NoModel: the graph has an operator without a model in a simulated world, named in the message.
        ValueError: the net is for another number of ranks.
    """

    def __init__(self, graph: RankGraph, net: Net, *, random: RandomStates | None = None) -> None:
        if net.size != graph.size:
            raise ValueError(f"the net connects {net.size} ranks, the graph was traced for {graph.size}")
        self.random = random or RandomStates()
        self._graph, self._net = graph, net
        self._program = compiled(graph, net)

    def run(self, inputs: Sequence[Any]) -> Any:
        """Outputs, in the structure that the graph returns; inputs and outputs are uniform or ``PerRank``.

        Tensors that the graph writes to (buffers) are written to, as in a replay. Runs without autograd, and
        on one thread, as ranks do: some kernels' bits depend on the number, and waking threads for small
        tensors costs more than it gives.

        Raises:
            CollectiveMismatch: ranks come to a collective with different sizes or splits.
            DependsOnRank: an input has not the traced shape on every rank, or belongs to all ranks and is
                written to by each.
        """
        facts.tell("replay_on_all", graph=self._graph, net=self._net, inputs=inputs, random=self.random)
        with torch.no_grad(), generator_kept(), one_thread():
            return self._program.run(inputs, self.random)


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks compute: on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def interpret(
    gm: fx.GraphModule, inputs_per_rank: Sequence[Sequence[Any]], net: Net, *meshes: DeviceMesh
) -> list[Any]:
    """Run ``gm`` once on all ranks: every rank's inputs in, every rank's outputs out.

    Call it in the world that the graph was traced in. An input that is the same object on all ranks is
    uniform. For several runs, or to keep values uniform between them, make an ``Interpreter``.

    Raises:
        As ``RankGraph.of``, ``Interpreter`` and its ``run``.
    """
    interpreter = Interpreter(RankGraph.of(gm, *meshes), net)
    if len(inputs_per_rank) != net.size:
        raise ValueError(f"inputs are given for {len(inputs_per_rank)} ranks, the net connects {net.size}")
    output = interpreter.run([PerRank(values) for values in zip(*inputs_per_rank, strict=True)])
    return [of_rank(output, rank) for rank in range(net.size)]
