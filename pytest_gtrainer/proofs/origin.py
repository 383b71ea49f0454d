"""Find where a difference begins: the first value of one program that the other never makes.

The elements of a value are looked up one by one, whatever tensor the other program has them in, so
buckets, splits, pads and other layouts do not hide them. A value that the other program never
makes, computed from values that it does make, is where they part. Only values that the differing
result depends on count.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import storage_id
from pytest_gtrainer.arithmetic.hashing import scramble
from pytest_gtrainer.arithmetic.mode import line_of_program
from pytest_gtrainer.arithmetic.operators import MOVES, base_name
from pytest_gtrainer.arithmetic.values import Value
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.graph.nodes import node_fqn


@dataclass(slots=True)
class Step:
    """An operator that ran.

    Attributes:
        where: the node or the operator, for a message.
        node: the node, if a graph runs.
        operands: the steps that made what it read, by their number.
        are_operands_known: whether the other program makes all elements of its operands.
        unknown_at: the place of an element that the other program never makes; None if it makes
            all.
    """

    where: str
    node: fx.Node | None
    operands: list[int]
    are_operands_known: bool
    unknown_at: tuple[int, ...] | None


class AllElements:
    """The set of all elements that a program makes, as a Bloom filter with two bits for each.

    For n elements, one that was never made is taken for a made one with a chance of
    (2 n / _BITS) ** 2. Then the difference is found one step later. A sorted list took minutes.
    It is called with each operator that runs.
    """

    def __init__(self) -> None:
        # Memory of the system is zero without being touched: of 64 MiB only some pages are used.
        self._bits = torch.frombuffer(mmap.mmap(-1, _BITS), dtype=torch.bool)
        self._seen: set[int] = set()

    def __call__(self, operator: Any, operands: Sequence[Tensor], made: Any, read: Any) -> None:
        for tensor in made:
            self._add(read(tensor))
            self._seen.add(storage_id(tensor))
        for tensor in operands:
            # Inputs and constants, which no operator has made.
            if storage_id(tensor) not in self._seen:
                self._seen.add(storage_id(tensor))
                self._add(read(tensor))

    def _add(self, value: Value | None) -> None:
        if value is not None:
            for place in _places_of(value.elements):
                self._bits[place] = True

    def missing(self, value: Value | None) -> tuple[int, ...] | None:
        """Return the place of an element that was never made; None if all were."""
        if value is None or not value.elements.numel():
            return None
        first, second = _places_of(value.elements)
        is_missing = ~(self._bits[first] & self._bits[second])
        if not bool(is_missing.any()):
            return None
        return tuple(is_missing.nonzero()[0].tolist())


def _places_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    hashed = scramble(elements + 1)
    return hashed & (_BITS - 1), (hashed >> 32) & (_BITS - 1)


_BITS = 1 << 26


class Trail:
    """Follow a program, and note each value that the other one never makes.

    It is called with each operator that runs.
    """

    def __init__(self, others: AllElements) -> None:
        self.others = others
        self.steps: list[Step] = []
        self.where = ""
        self._node: fx.Node | None = None
        self._writer: dict[int, int] = {}

    def enter_node(self, node: fx.Node, rank: int | None) -> None:
        """Note which node runs next."""
        fqn, self._node = node_fqn(node), node
        self.where = f"node {node.name} ({node.target})"
        if fqn:
            self.where += f" of {fqn}"
        if rank is not None:
            self.where += f", rank {rank}"

    def __call__(self, operator: Any, operands: Sequence[Tensor], made: Any, read: Any) -> None:
        writers = {self._writer.get(storage_id(tensor)) for tensor in operands}
        before = sorted(writer for writer in writers if writer is not None)
        known = all(self.steps[writer].unknown_at is None for writer in before)
        where = self.where
        if not where:
            line = line_of_program()  # in a backward, the line that calls it
            where = f"{operator} at {line}" if line else str(operator)
        for tensor in made:
            place = None
            # A move makes no new elements.
            if not known or base_name(operator) not in MOVES:
                place = self.others.missing(read(tensor))
            self._writer[storage_id(tensor)] = len(self.steps)
            self.steps.append(Step(where, self._node, before, known, place))

    def origin_of(self, result: Tensor) -> str:
        """Return where the difference of a result begins."""
        todo = [self._writer.get(storage_id(result))]
        seen: set[int] = set()
        while todo:
            number = todo.pop()
            if number is not None and number not in seen:
                seen.add(number)
                todo += self.steps[number].operands
        for number in sorted(seen):  # in the order in which they ran
            step = self.steps[number]
            if step.unknown_at is not None and step.are_operands_known:
                where = step.where + _describe_modules_before(step.node)
                return f"{where}, element {list(step.unknown_at)}"
        return "a move: the expected program makes every value, at another place"


def _describe_modules_before(node: fx.Node | None) -> str:
    """Return the modules before a node that is in none itself, in words; "" if it is in one."""
    if node is None or node_fqn(node):
        return ""
    modules: dict[str, None] = {}
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        each = todo.pop(0)
        fqn = node_fqn(each)
        if fqn:
            modules[fqn] = None
        elif each not in seen:
            seen.add(each)
            todo += each.all_input_nodes
    return f", after {spell_some(list(modules))}" if modules else ""
