"""Compare Dynamo's graph with the module or function that it was traced from.

Dynamo lifts parameters, buffers and other tensors of a model to inputs of the graph, and orders the
inputs by their first use. Each has a name: an FQN, or the path of an argument. Here the inputs of
the graph are looked up by it, in copies of the model and of the inputs of one call.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.mode import ArithmeticMode, CountReads
from pytest_gtrainer.graph import name_of, split_path
from pytest_gtrainer.graph.nodes import input_fqn
from pytest_gtrainer.proofs.programs import FunctionProgram, refuse_another_kind
from pytest_gtrainer.worlds.simulated.interpreter.program import NodeByNode

__tracebackhide__ = facts.hides_frames

_OF_A_MODEL = ("parameter", "buffer")


def takes_state(gm: fx.GraphModule, function: Any, inputs: Any) -> bool:
    """Return whether a graph takes the state of a model as inputs, and the call has the model."""
    given = pytree.tree_leaves(inputs)
    if not any(isinstance(each, nn.Module) for each in (function, *given)):
        return False
    placeholders = gm.graph.find_nodes(op="placeholder")
    return any(node.meta.get("gt_input", {}).get("kind") in _OF_A_MODEL for node in placeholders)


class TensorsOfFunction(FunctionProgram):
    """A function whose results are the tensors that it returns, in order.

    Dynamo's graph returns them so: the code around it builds tuples and dicts.
    """

    def _called(self, mode: ArithmeticMode, function: Callable[..., Any], given: list[Any]) -> Any:
        return _tensors(super()._called(mode, function, given))


class FilledGraph(FunctionProgram):
    """A graph that is called as the function that it was traced from."""

    def __init__(
        self, gm: fx.GraphModule, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> None:
        """Take ``inputs`` of the function.

        Raises:
            ValueError: an input of the graph that the call does not have, or of another size.
        """
        super().__init__(function, inputs)
        self.gm = gm
        for node, value in zip(self._placeholders(), self._values(function, inputs), strict=True):
            refuse_another_kind(node, value)

    def _placeholders(self) -> list[fx.Node]:
        return list(self.gm.graph.find_nodes(op="placeholder"))

    def _values(self, function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
        """Return what the call gives to each placeholder."""
        arguments = _arguments(function, given)
        models = [each for each in (function, *pytree.tree_leaves(given)) if _is_model(each)]
        values = []
        for node in self._placeholders():
            kind = node.meta.get("gt_input", {}).get("kind")
            path = [name_of(part) for part in split_path(input_fqn(node))]
            try:
                if kind in _OF_A_MODEL:
                    value = _value_at(models[0], path)
                elif path[0] in arguments:
                    value = _value_at(arguments[path[0]], path[1:])
                else:  # the name of ``self``, and an attribute that is no buffer
                    value = _value_at(models[0], path[1:] if len(path) > 1 else path)
            except (AttributeError, LookupError, ValueError, TypeError):
                raise ValueError(
                    f"the graph takes {input_fqn(node)!r}, which a call of {_name(function)} with "
                    "inputs= does not have: give the inputs of the call that was traced, and of "
                    "torch.compile the graph of Dynamo"
                ) from None
            values.append(value)
        return values

    def _called(self, mode: ArithmeticMode, function: Callable[..., Any], given: list[Any]) -> Any:
        values = self._values(function, given)
        with mode, CountReads(mode):
            return _tensors(NodeByNode(self.gm, None).run(*values))


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _arguments(function: Callable[..., Any], given: Sequence[Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name, those that are not given with their defaults."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        bound = inspect.signature(called).bind(*given)
    except TypeError as error:
        raise ValueError(f"{_name(function)} cannot be called with inputs=: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _value_at(value: Any, path: Sequence[str]) -> Any:
    """Return what a path leads to, through modules, containers, attributes and ``size()``."""
    for name in path:
        if isinstance(value, nn.Module):
            value = getattr(value, name)
        elif isinstance(value, Mapping):
            value = value[name] if name in value else value[int(name)]
        elif isinstance(value, list | tuple) and name.isdigit():
            value = value[int(name)]
        else:
            value = getattr(value, name)
        if inspect.ismethod(value) or inspect.isbuiltin(value):
            value = value()
    return value


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _tensors(outputs: Any) -> tuple[Any, ...]:
    """Return the tensors among results, and objects, which ``check_outputs`` refuses."""
    leaves = pytree.tree_leaves(outputs)
    plain = (bool, int, float, complex, str, type(None))
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor) or not isinstance(leaf, plain))
