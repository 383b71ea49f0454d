"""Programs: a graph as segments of plain nodes and single steps, made once for many runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.interpreter.blocks import Block, Segment, blocks_of
from pytest_gtrainer.worlds.simulated.interpreter.lifetimes import source_of
from pytest_gtrainer.worlds.simulated.interpreter.naming import described, input_name
from pytest_gtrainer.worlds.simulated.interpreter.random_states import RandomStates
from pytest_gtrainer.worlds.simulated.interpreter.scratch import Scratch
from pytest_gtrainer.worlds.simulated.interpreter.steps import Frame, Step
from pytest_gtrainer.worlds.simulated.interpreter.values import Kind, Kinds, PerRank, at


@dataclass(frozen=True, slots=True)
class Single:
    """A node with a step of its own; nobody needs ``dying`` after it."""

    node: fx.Node
    step: Step
    dying: frozenset[fx.Node]

    def run(self, frame: Frame) -> None:
        try:
            frame.values[self.node] = self.step.run(frame, self.dying)
        except Exception as error:
            error.add_note(f"in {described(self.node)}")
            raise


@dataclass(frozen=True, slots=True)
class Plain:
    """A segment, and its blocks for every combination of kinds that its inputs have had."""

    segment: Segment
    plans: dict[tuple[Kind, ...], list[Block]] = field(default_factory=dict)

    @property
    def dying(self) -> frozenset[fx.Node]:
        return self.segment.dying

    def run(self, frame: Frame) -> None:
        inputs = self.segment.inputs
        kinds = tuple(map(frame.kinds.of, frame.of(inputs)))
        if kinds not in self.plans:
            self.plans[kinds] = blocks_of(self.segment, dict(zip(inputs, kinds, strict=True)), frame.kinds)
        for block in self.plans[kinds]:
            block.run(frame.values, frame.scratch, frame.kinds)


Part = Single | Plain


@dataclass(frozen=True, slots=True)
class Program:
    """The parts of a graph, in its order.

    ``placeholders`` are the nodes of its inputs, ``output`` is what it returns, with nodes in it.
    """

    kinds: Kinds
    placeholders: Sequence[fx.Node]
    parts: Sequence[Part]
    output: Any
    scratch: Scratch = field(default_factory=Scratch)

    def run(self, inputs: Sequence[Any], random: RandomStates) -> Any:
        """What the graph returns for these inputs, both uniform or per rank, in the structure of its output."""
        names = [input_name(node) for node in self.placeholders]
        _check_inputs(self.placeholders, names, inputs, self.kinds.size)
        self.scratch.give_back()
        values = {node: self._own(value) for node, value in zip(self.placeholders, inputs, strict=True)}
        frame = Frame(self.kinds, random, self.scratch, values, list(zip(names, inputs, strict=True)))
        for part in self.parts:
            part.run(frame)
            for node in part.dying:
                values.pop(node, None)
        return fx.node.map_arg(self.output, lambda node: values[source_of(node)])

    def _own(self, value: Any) -> Any:
        """A list that may be emptied, unless the value is uniform."""
        return self.kinds.value(list(value)) if type(value) is PerRank else value


def _check_inputs(placeholders: Sequence[fx.Node], names: Sequence[str], inputs: Sequence[Any], size: int) -> None:
    """The graph has baked in the shapes and dtypes that it was traced with.

    Raises:
        ValueError: the number of inputs, or of ranks that have one.
        DependsOnRank: a rank's tensor is another than the traced one.
    """
    if len(inputs) != len(placeholders):
        raise ValueError(f"the graph takes {len(placeholders)} inputs, it got {len(inputs)}")
    for node, name, value in zip(placeholders, names, inputs, strict=True):
        if type(value) is PerRank and len(value) != size:
            raise ValueError(f"{name} is given for {len(value)} ranks, the world has {size}")
        traced = node.meta.get("val")
        if isinstance(traced, torch.Tensor) and all(isinstance(extent, int) for extent in traced.shape):
            for rank in range(size) if type(value) is PerRank else (0,):
                _check_tensor(name, rank, at(value, rank), traced)


def _check_tensor(name: str, rank: int, given: Any, traced: torch.Tensor) -> None:
    if not isinstance(given, torch.Tensor) or given.shape != traced.shape or given.dtype != traced.dtype:
        found = f"{given.dtype}{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise DependsOnRank(
            f"{name} of rank {rank} is {found}, the graph was traced with {traced.dtype}{list(traced.shape)}: "
            "one graph serves ranks with equal shapes only, so choose sizes that the ranks divide"
        )
