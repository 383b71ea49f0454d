"""Steps: what is done for a node of the graph that is more than a plain operator, for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.interpreter.binding import Binder
from pytest_gtrainer.worlds.simulated.interpreter.collective_calls import Handler, written_result
from pytest_gtrainer.worlds.simulated.interpreter.groups import Partition
from pytest_gtrainer.worlds.simulated.interpreter.lifetimes import source_of
from pytest_gtrainer.worlds.simulated.interpreter.memory import Values, make_private, reaches, storages_of
from pytest_gtrainer.worlds.simulated.interpreter.random_states import RandomStates
from pytest_gtrainer.worlds.simulated.interpreter.scratch import Scratch
from pytest_gtrainer.worlds.simulated.interpreter.values import Kinds, PerRank, at, is_per_rank
from pytest_gtrainer.worlds.simulated.net import Net


@dataclass(slots=True)
class Frame:
    """A run of a graph: the values that are still needed, and what all steps use.

    ``inputs`` are the names and values that the graph was called with.
    """

    kinds: Kinds
    random: RandomStates
    scratch: Scratch
    values: Values
    inputs: Sequence[tuple[str, Any]]

    def of(self, nodes: Sequence[fx.Node]) -> list[Any]:
        """The values of nodes."""
        return [self.values[source_of(node)] for node in nodes]

    def own_memory(self, written: Sequence[fx.Node]) -> None:
        """Give every rank memory of its own for what it is about to write to (S7).

        Raises:
            DependsOnRank: it is memory of an input, in which the ranks' writes would be lost.
        """
        storages = make_private(self.values, list(map(source_of, written)), self.kinds.size)
        for name, value in self.inputs if storages else ():
            if reaches(value, storages):
                raise DependsOnRank(
                    f"{name} is one tensor for several ranks, and each writes to it: give every rank its own"
                )


class Step(Protocol):
    """One node; nobody needs the values of ``dying`` after it."""

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any: ...


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """An attribute of the graph's module."""

    value: Any

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class EffectStep:
    """An operator that writes to operands or draws random numbers: its effect is on every rank by itself.

    Attributes:
        operands: the nodes that ``bind`` takes the values of.
        written: the nodes whose values it writes to.
        random: whether it draws.
    """

    target: Callable[..., Any]
    operands: Sequence[fx.Node]
    bind: Binder
    written: Sequence[fx.Node]
    random: bool

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        uniform = not is_per_rank(frame.of(self.operands)) and not (self.random and not frame.random.uniform)
        if uniform:
            return self._uniform(frame)
        if self.written:
            frame.own_memory(self.written)
        return frame.kinds.value([self._of(rank, frame) for rank in range(frame.kinds.size)])

    def _uniform(self, frame: Frame) -> Any:
        if not self.random:
            return self._call(frame.of(self.operands))
        with frame.random.drawn_uniformly():
            return self._call(frame.of(self.operands))

    def _of(self, rank: int, frame: Frame) -> Any:
        own = [at(value, rank) for value in frame.of(self.operands)]
        if not self.random:
            return self._call(own)
        with frame.random.drawn_by(rank, frame.kinds.size):
            return self._call(own)

    def _call(self, own: Sequence[Any]) -> Any:
        args, kwargs = self.bind(own)
        return self.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """A collective among the ranks of each group.

    Attributes:
        names: of the arguments that ``bind`` gives by position.
        nets: those of the groups.
        written: the argument that the result is written to, in place, and the nodes in it.
    """

    operands: Sequence[fx.Node]
    bind: Binder
    names: Sequence[str]
    partition: Partition
    nets: Sequence[Net]
    handler: Handler
    written: tuple[str, Sequence[fx.Node]] | None

    def run(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        calls = self._calls(frame)
        if self.written is None:
            self._give_up(frame, dying)
        results: list[Any] = [None] * frame.kinds.size
        for ranks, net in zip(self.partition, self.nets, strict=True):
            for rank, result in zip(ranks, self.handler(net, [calls[rank] for rank in ranks]), strict=True):
                results[rank] = result
        frame.scratch.give_back()
        if self.written is None or self._nobody_sees(frame, dying):
            return frame.kinds.value(results)
        return self._write(frame, results)

    def _calls(self, frame: Frame) -> list[dict[str, Any]]:
        """Every rank's arguments by name."""
        operands, calls = frame.of(self.operands), []
        for rank in range(frame.kinds.size):
            args, kwargs = self.bind([at(value, rank) for value in operands])
            calls.append({"rank": rank, **dict(zip(self.names, args, strict=False)), **kwargs})
        return calls

    def _give_up(self, frame: Frame, dying: frozenset[fx.Node]) -> None:
        """Hold on to no operand that dies: a reduction needs its memory."""
        for node in dying.intersection(map(source_of, self.operands)):
            value = frame.values[node]
            if type(value) is PerRank:
                value[:] = [None] * len(value)

    def _nobody_sees(self, frame: Frame, dying: frozenset[fx.Node]) -> bool:
        """No value that lives on looks into the memory that is written to: then the result may lie elsewhere."""
        assert self.written is not None
        storages = {storage for value in frame.of(self.written[1]) for storage in storages_of(value)}
        live = [value for node, value in frame.values.items() if node not in dying]
        return not any(reaches(value, storages) for value in [*live, *(value for _, value in frame.inputs)])

    def _write(self, frame: Frame, results: list[Any]) -> Any:
        assert self.written is not None
        argument, nodes = self.written
        frame.own_memory(nodes)
        targets = [call[argument] for call in self._calls(frame)]
        return frame.kinds.value(
            [written_result(target, result) for target, result in zip(targets, results, strict=True)]
        )
