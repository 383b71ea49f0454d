"""Compare Dynamo's graph with the module or function that it was traced from.

Dynamo lifts parameters, buffers and other tensors of a model to inputs of the graph, and orders the
inputs by their first use. Each has a name: an FQN, or the path of an argument. Here the inputs of
the graph are looked up by it, in copies of the model and of the inputs of one call.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, fx, nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.mode import ArithmeticMode, CountReads
from pytest_gtrainer.facts import counted
from pytest_gtrainer.graph import name_of, split_path
from pytest_gtrainer.graph.nodes import input_fqn
from pytest_gtrainer.proofs.programs import FunctionProgram, refuse_another_kind
from pytest_gtrainer.proofs.state import tensors_of_model
from pytest_gtrainer.worlds.simulated.interpreter.program import NodeByNode

__tracebackhide__ = facts.hides_frames

_OF_A_MODEL = ("parameter", "buffer")


def takes_state(gm: fx.GraphModule, function: Any, inputs: Any) -> bool:
    """Return whether a graph takes the state of a model as inputs, and the call has the model.

    A call with as many inputs as the graph may give it the state itself.
    """
    given = pytree.tree_leaves(inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    state = [node for node in placeholders if _is_state(node)]
    if not state or not _models(function, given):
        return False
    if len(given) != len(placeholders):
        return True
    call = _Call(function, inputs)
    try:
        for node in state:
            call.value_of(node)
    except (AttributeError, LookupError, TypeError):
        return False
    return True


def _is_state(node: fx.Node) -> bool:
    return node.meta.get("gt_input", {}).get("kind") in _OF_A_MODEL


class _WithoutPython(FunctionProgram):
    """A program of which Python values, such as counters, are not compared.

    Dynamo changes them in the code around its graph.
    """

    def _python_values(self, function: Callable[..., Any], given: Sequence[Any]) -> dict[str, str]:
        return {}


class TensorsOfFunction(_WithoutPython):
    """A function whose results are the tensors that it makes, in order.

    Dynamo's graph returns them so: the code around it builds tuples and dicts, and returns inputs
    and state of the model, and what it has returned before.
    """

    def _called(self, mode: ArithmeticMode, function: Callable[..., Any], given: list[Any]) -> Any:
        models = _models(function, given)
        before = [tensors_of_model(each) for each in models]
        outputs = super()._called(mode, function, given)
        for model, held in zip(models, before, strict=True):
            for path, tensor in tensors_of_model(model).items():
                if tensor is not held.get(path):
                    raise ValueError(
                        f"the call puts another tensor into {path}, which Dynamo does in the code "
                        "around its graph: compare a model that returns it"
                    )
        return _made(outputs, [*given, *before])


class FilledGraph(_WithoutPython):
    """A graph that is called as the function that it was traced from."""

    def __init__(
        self, gm: fx.GraphModule, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> None:
        """Take ``inputs`` of the function.

        Raises:
            ValueError: an input of the graph that the call does not have, or of another size; the
                graph is of a later stage than Dynamo's.
        """
        stage = str(gm.meta.get("gt_stage", "dynamo")).rpartition(".")[2]
        if stage != "dynamo":
            raise ValueError(
                f"the graph is that of the stage {stage!r}, which also returns what other stages "
                "need: against the model give Dynamo's, record.dynamo"
            )
        super().__init__(function, inputs)
        self.gm = gm
        for node, value in zip(self._placeholders(), self.inputs_of_graph(), strict=True):
            refuse_another_kind(node, value)

    def inputs_of_graph(self) -> list[Any]:
        """Return what the call gives to each input of the graph."""
        return self._values(self.function, self.inputs)

    def _placeholders(self) -> list[fx.Node]:
        return list(self.gm.graph.find_nodes(op="placeholder"))

    def _values(self, function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
        """Return what the call gives to each placeholder."""
        call = _Call(function, given)
        values = []
        for node in self._placeholders():
            try:
                values.append(call.value_of(node))
            except (AttributeError, LookupError, TypeError):
                raise ValueError(
                    f"the graph takes {input_fqn(node)!r}, which a call of {_name(function)} with "
                    "inputs= does not have: give the inputs of the call that was traced"
                ) from None
        return values

    def _called(self, mode: ArithmeticMode, function: Callable[..., Any], given: list[Any]) -> Any:
        values = self._values(function, given)
        held = [tensors_of_model(each) for each in _models(function, given)]
        with mode, CountReads(mode):
            outputs = NodeByNode(self.gm, None).run(*values)
        return _made(outputs, [*given, *held])


class _Call:
    """A call of a function, in which the inputs of its graph are found."""

    def __init__(self, function: Callable[..., Any], given: Sequence[Any]) -> None:
        self._given = given
        self._arguments = _arguments(function, given)
        self._models = _models(function, given)
        called = function.forward if isinstance(function, nn.Module) else function
        self._globals = getattr(inspect.unwrap(called), "__globals__", {})

    def value_of(self, node: fx.Node) -> Any:
        """Return what the call gives to a placeholder.

        Raises:
            AttributeError, LookupError, TypeError: the call does not have it.
            ValueError: two models of the call have it.
        """
        path = [name_of(part) for part in split_path(input_fqn(node))]
        first, *rest = path
        is_state = _is_state(node)
        found = self._in_models(path) if is_state else []
        if not found and first in self._arguments:
            return _number_or_tensor(_value_at(self._arguments[first], rest))
        if not found and first == "args" and rest and self._is_wrapped(rest[0]):
            # Dynamo compiles modules of libraries, and those with hooks, in a wrapper.
            return _number_or_tensor(_value_at(self._given[int(rest[0])], rest[1:]))
        if not found and not is_state:
            # The first part is the name of ``self`` for an attribute that is no buffer.
            found = (self._in_models(rest) if rest else []) or self._in_models(path)
        if len(found) > 1:
            raise ValueError(
                f"the graph takes {input_fqn(node)!r}, and {counted(len(found), 'model')} of the "
                "call have that: prove a function that takes one of them"
            )
        return found[0] if found else _number_or_tensor(_value_at(self._globals[first], rest))

    def _in_models(self, path: Sequence[str]) -> list[Any]:
        """Return what models of the call, and lists and dicts of them, have at a path."""
        containers = [each for each in self._given if isinstance(each, list | tuple | dict)]
        found = {}
        for holder in (*self._models, *containers):
            with suppress(AttributeError, LookupError, TypeError):
                value = _number_or_tensor(_value_at(holder, path))
                found[id(value)] = value
        return list(found.values())

    def _is_wrapped(self, place: str) -> bool:
        return place.isdigit() and int(place) < len(self._given)


def _number_or_tensor(value: Any) -> Any:
    if not isinstance(value, Tensor | int | float | bool):
        raise TypeError(f"{type(value).__name__} is no input of a graph")
    return value


def _models(function: Any, given: Sequence[Any]) -> list[nn.Module]:
    """Return the modules of a call."""
    leaves = (function, *pytree.tree_leaves(given))
    return [each for each in leaves if isinstance(each, nn.Module)]


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
            value = {str(key): each for key, each in value.items()}[name]
        elif isinstance(value, list | tuple) and name.isdigit():
            value = value[int(name)]
        else:
            value = getattr(value, name)
        if inspect.ismethod(value) or inspect.isbuiltin(value):
            value = value()
    return value


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _made(outputs: Any, given: Any) -> tuple[Any, ...]:
    """Return the tensors among results that are neither given nor results before.

    Objects are among them, which ``check_outputs`` refuses.
    """
    plain = (bool, int, float, complex, str, type(None))
    seen = {id(each) for each in pytree.tree_leaves(given)}
    made = []
    for leaf in pytree.tree_leaves(outputs):
        if id(leaf) not in seen and (isinstance(leaf, Tensor) or not isinstance(leaf, plain)):
            made.append(leaf)
            seen.add(id(leaf))
    return tuple(made)
