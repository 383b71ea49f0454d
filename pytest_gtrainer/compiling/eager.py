"""Trace Dynamo's graph as eager runs it on one rank: operators on local tensors.

Dynamo's graph holds DTensors and calls their methods; a simulated world replays operators. So the
graph runs once more, with autograd, by the code that eager runs, and the operators that reach
local tensors are recorded: nothing is decomposed, made functional or removed. AOTAutograd takes a
DTensor as its local tensor, followed by its mesh, and so are inputs and outputs here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Partial, Replicate

from pytest_gtrainer._torch.tracing import make_fx, new_fake_mode, tracing_backward_metadata
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.facts import counted
from pytest_gtrainer.graph.nodes import value_of
from pytest_gtrainer.tracing.model import local, rewrap


def holds_dtensors(gm: fx.GraphModule) -> bool:
    """Return whether a graph computes with DTensors."""
    return any(isinstance(value_of(node), DTensor) for node in gm.graph.nodes)


def flat_size(value: Any) -> int:
    """Return how many inputs or results of AOTAutograd's graph a value is."""
    return len(value.__tensor_flatten__()[0]) if isinstance(value, DTensor) else 1


@dataclass(frozen=True, slots=True)
class EagerTrace:
    """Traces Dynamo's graph with its backward.

    Attributes:
        gm: Dynamo's graph.
        trained: for each input of ``gm``, whether its gradient is a result.
        n_primals: the number of inputs that AOTAutograd makes of those.
        n_outputs: the number of results that are no gradients, as AOTAutograd counts them.
    """

    gm: fx.GraphModule
    trained: Sequence[bool]
    n_primals: int
    n_outputs: int

    def trace(self, values: Sequence[Any]) -> fx.GraphModule:
        """Return a graph from the tensors among ``values`` to outputs and gradients.

        Args:
            values: the inputs of AOTAutograd's graph: those of ``gm``, then the tangents.

        Raises:
            NoMeaning: ``gm`` has other inputs or results than AOTAutograd's graph.
        """
        mode = new_fake_mode()
        given: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                value = mode.from_tensor(value.detach(), static_shapes=True)
            given.append(value)

        def run(*traced: Tensor) -> list[Any]:
            rest = iter(traced)
            own = [next(rest) if isinstance(value, Tensor) else value for value in given]
            return self._run(own[: self.n_primals], own[self.n_primals :])

        with tracing_backward_metadata(), mode:
            return make_fx(run)(*[value for value in given if isinstance(value, Tensor)])

    def _run(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Return the outputs, and if there are tangents a gradient or None for each input."""
        inputs = self._inputs(primals)
        with torch.set_grad_enabled(bool(tangents)):
            outputs = pytree.tree_leaves(fx.Interpreter(self.gm).run(*inputs))
        results = _flat(outputs)
        if len(results) != self.n_outputs:
            raise NoMeaning(
                f"Dynamo's graph has {counted(len(results), 'output')}, that of AOTAutograd "
                f"{self.n_outputs}: views of inputs, for example, are made after it"
            )
        if not tangents:
            return results

        ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if sum(map(flat_size, ends)) != len(tangents):
            raise NoMeaning(
                f"Dynamo's graph has gradients of {counted(len(ends), 'output')}, that of "
                f"AOTAutograd {counted(len(tangents), 'input')} for gradients"
            )
        weights = []
        place = 0
        for end in ends:
            weights.append(_tangent(tangents[place], end))
            place += flat_size(end)
        leaves = [value for value, yes in zip(inputs, self.trained, strict=True) if yes]
        found = iter(torch.autograd.grad(ends, leaves, weights, allow_unused=True))
        with torch.no_grad():
            for is_trained in self.trained:
                gradient = next(found) if is_trained else None
                results.append(None if gradient is None else local(gradient))
        return results

    def _inputs(self, primals: Sequence[Any]) -> list[Any]:
        """Return the inputs of Dynamo's graph, those that are trained as leaves."""
        likes = [value_of(node) for node in self.gm.graph.find_nodes(op="placeholder")]
        if sum(map(flat_size, likes)) != len(primals):
            raise NoMeaning(
                f"Dynamo's graph has {counted(len(likes), 'input')}, which AOTAutograd takes as "
                f"{len(primals)}"
            )
        inputs: list[Any] = []
        place = 0
        for like, is_trained in zip(likes, self.trained, strict=True):
            value = primals[place]
            place += flat_size(like)
            if isinstance(value, Tensor):
                with torch.no_grad():  # the input of the graph itself must not become a leaf
                    value = rewrap(value.view_as(value), like)
                value.requires_grad_(is_trained)
            inputs.append(value)
        return inputs


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return local tensors, that of a DTensor with None after it, in the place of its mesh."""
    found: list[Any] = []
    with torch.no_grad():
        for value in values:
            found.append(local(value) if isinstance(value, Tensor) else value)
            found += [None] * (flat_size(value) - 1)
    return found


def _tangent(value: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of an output: of a pending sum it is that of the whole sum."""
    if not isinstance(output, DTensor):
        return value
    placements = [Replicate() if isinstance(p, Partial) else p for p in output.placements]
    with torch.no_grad():
        return rewrap(value, output, placements=placements)
