"""Programs that can run in an arithmetic, and what their runs make."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.graph.nodes import AFTERWARDS
from pytest_gtrainer.numerics.graph_run import named_outputs
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.inputs import input_name
from pytest_gtrainer.worlds.simulate import simulate_graph
from pytest_gtrainer.worlds.simulated.interpreter.program import NodeByNode
from pytest_gtrainer.worlds.simulated.net import Net

Key = tuple[str, int | None]
"""The name of a result, and in a world the rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A result of a run.

    Attributes:
        elements: int64; of a known tensor its real numbers.
        is_known: it depends on no abstract input.
    """

    elements: Tensor
    dtype: torch.dtype
    is_known: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What a program made in an arithmetic.

    Attributes:
        results: by name and rank.
        arithmetic: in which it ran.
        reads: operators by which the program asked for real numbers.
    """

    results: dict[Key, Made]
    arithmetic: Arithmetic
    reads: Mapping[str, int]


class Program(ABC):
    """A program with its inputs. A run changes neither them nor the program.

    Attributes:
        last: the results of the last run, as real tensors.
    """

    last: dict[Key, Tensor]
    _before: dict[Key, "Made"]

    def run(self, arithmetic: Arithmetic, on_result: Any = None) -> Run:
        """Run in an arithmetic, from a random state that is always the same."""
        mode = ArithmeticMode(arithmetic, owner=id(self))
        mode.on_result = on_result
        with random_states_kept():
            torch.manual_seed(0)
            self._before = {}
            results = self._results(mode)
        self.last = results
        made = {}
        for key, leaf in results.items():
            before = self._before.get(key)
            own = self._made(mode, leaf)
            # State counts only if the program writes to it.
            if before is None or not _same(before, own):
                made[key] = own
        return Run(made, arithmetic, mode.reads)

    @abstractmethod
    def _results(self, mode: ArithmeticMode) -> dict[Key, Tensor]:
        """Run under the mode, and return every result and all state that is left."""

    def _note_state(self, mode: ArithmeticMode, key: Key, tensor: Tensor) -> None:
        """Note what a tensor is before the program may write to it."""
        self._before[key] = self._made(mode, tensor)

    @staticmethod
    def _made(mode: ArithmeticMode, tensor: Tensor) -> Made:
        value = mode.shadows.read(tensor)
        if value is None:
            return Made(tensor.detach().clone(), tensor.dtype, True)
        elements = mode.arithmetic.compared(value.elements)
        return Made(elements.clone(), value.dtype, False)


def _same(before: Made, after: Made) -> bool:
    return before.is_known == after.is_known and torch.equal(
        before.elements.nan_to_num(), after.elements.nan_to_num()
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class GraphProgram(Program):
    """A graph without collectives."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm, self.inputs = gm, inputs
        gm.recompile()

    def _results(self, mode: ArithmeticMode) -> dict[Key, Tensor]:
        gm = copy.deepcopy(self.gm)
        given = copies(self.inputs)
        for place, value in enumerate(given):
            if _is_float(value):
                mode.make_abstract(value, place)
        held = dict(gm.named_parameters())
        for name, tensor in held.items():
            mode.make_abstract(tensor.detach(), name)
        state = self._state(gm, given, None) | _named_afterwards(gm.named_parameters())
        for key, value in state.items():
            self._note_state(mode, key, value)
        with torch.no_grad(), mode:
            outputs = NodeByNode(gm, None).run(*given)
        found: dict[Key, Tensor] = {}
        for name, leaf in named_outputs(outputs, gm).items():
            found[name, None] = leaf
        return found | state

    @staticmethod
    def _state(gm: fx.GraphModule, given: Sequence[Any], rank: int | None) -> dict[Key, Tensor]:
        """Return the inputs that are tensors, by what they are called after the run."""
        found: dict[Key, Tensor] = {}
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True):
            if isinstance(value, Tensor):
                found[f"{input_name(node)}{AFTERWARDS}", rank] = value
        return found


class SimulatedProgram(Program):
    """A graph with collectives, on all ranks of a net."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Sequence[Any]], net: Net) -> None:
        self.gm, self.inputs, self.net = gm, inputs, net
        gm.recompile()

    def _results(self, mode: ArithmeticMode) -> dict[Key, Tensor]:
        net = AnyOrder.of(self.net) if isinstance(mode.arithmetic, Field) else self.net
        shared: dict[int, Any] = {}
        given = [copies(own, shared) for own in self.inputs]
        for rank, own in enumerate(given):
            for place, value in enumerate(own):
                if _is_float(value) and not mode.shadows.has(value):
                    mode.make_abstract(value, (place, rank))
        state: dict[Key, Tensor] = {}
        for rank, own in enumerate(given):
            state |= GraphProgram._state(self.gm, own, rank)
        for key, value in state.items():
            self._note_state(mode, key, value)
        with torch.no_grad(), mode:
            of_ranks = simulate_graph(self.gm, given, net)
        found: dict[Key, Tensor] = {}
        for rank, results in enumerate(of_ranks):
            for name, leaf in results.items():
                if isinstance(leaf, Tensor):
                    found[name, rank] = leaf
        return found | state


class FunctionProgram(Program):
    """An eager function, or a module, called with copies of its inputs.

    Modules among the inputs have abstract parameters. What is left in ``grad`` is a result.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.function, self.inputs = function, inputs

    def _results(self, mode: ArithmeticMode) -> dict[Key, Tensor]:
        function, given = copy_of_modules((self.function, list(self.inputs)))
        state = named_state(function, given)
        for name, tensor in state.items():
            is_buffer = name.startswith("buffer ")
            if tensor.is_floating_point() and not is_buffer:
                mode.make_abstract(tensor.detach(), name)
        afterwards = _named_afterwards(state.items())
        for key, tensor in afterwards.items():
            self._note_state(mode, key, tensor)
        with mode:
            outputs = function(*given)
        found: dict[Key, Tensor] = {}
        for name, leaf in named_outputs(outputs).items():
            found[name, None] = leaf.detach()
        found |= afterwards
        for name, tensor in state.items():
            if tensor.grad is not None:
                found[f"gradient of {name}", None] = tensor.grad.detach()
        return found


def _named_afterwards(state: Iterable[tuple[str, Tensor]]) -> dict[Key, Tensor]:
    return {(f"{name}{AFTERWARDS}", None): tensor.detach() for name, tensor in state}


def named_state(function: Any, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors that a call is given: of modules by FQN, of others by their place."""
    found: dict[str, Tensor] = {}
    for place, value in enumerate([function, *inputs]):
        if isinstance(value, nn.Module):
            found |= dict(value.named_parameters())
            found |= {f"buffer {name}": tensor for name, tensor in value.named_buffers()}
        elif isinstance(value, Tensor):
            found[f"input {place - 1}"] = value
        elif place:
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, Tensor):
                    found[f"input {place - 1}{pytree.keystr(path)}"] = leaf
    return found


def copy_of_modules(values: Any) -> Any:
    """Return copies of the tensors and modules in a structure; what is shared stays shared."""
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module | Tensor):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:
                leaf = leaf.detach()
            return copy.deepcopy(leaf, memo)
        return leaf

    return pytree.tree_map(copied, values)


def copies(inputs: Sequence[Any], shared: dict[int, Any] | None = None) -> list[Any]:
    """Return clones of tensors; one tensor that is given twice stays one."""
    shared = {} if shared is None else shared
    made = []
    for value in inputs:
        if isinstance(value, Tensor):
            if id(value) not in shared:
                shared[id(value)] = value.detach().clone()
            value = shared[id(value)]
        made.append(value)
    return made
