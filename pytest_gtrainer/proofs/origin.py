"""Where a difference begins: the first value of one program that the other never makes.

Values are compared element by element and wherever they are, so buckets, splits, pads and other
layouts do not hide them. A value that the other program never makes, computed from values that it
does make, is where they part. Only values that the differing result depends on count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import storage_id
from pytest_gtrainer.arithmetic.values import Value
from pytest_gtrainer.graph.nodes import node_fqn


@dataclass(slots=True)
class Step:
    """An operator that ran.

    Attributes:
        where: the node or the operator, for a message.
        operands: the steps that made what it read, by their number.
        given: are all elements of its operands made by the other program?
        made: a place of an element that the other program never makes; None if it makes all.
    """

    where: str
    operands: list[int]
    given: bool
    made: tuple[int, ...] | None


@dataclass(slots=True)
class AllElements:
    """Collects every element that a program makes."""

    parts: list[Tensor] = field(default_factory=list)
    _count: int = 0

    def __call__(self, operator: Any, operands: Sequence[Tensor], made: Any, read: Any) -> None:
        for tensor in (*operands, *made):
            value = read(tensor)
            if value is None:
                continue
            # Storages are kept alive by nobody, so a view of the elements would change.
            self.parts.append(value.elements.reshape(-1).clone())
            self._count += value.elements.numel()
            if self._count > _MOST_LOOSE:
                self.parts, self._count = [self.sorted()], 0

    def sorted(self) -> Tensor:
        if not self.parts:
            return torch.zeros(0, dtype=torch.int64)
        return torch.cat(self.parts).unique()


_MOST_LOOSE = 1 << 24  # elements, before those that are equal become one


class Trail:
    """Follows a program, and notes each value that another never makes."""

    def __init__(self, others: Tensor) -> None:
        self.others = others
        self.steps: list[Step] = []
        self.where = ""
        self._writer: dict[int, int] = {}

    def come_to(self, node: fx.Node, rank: int | None) -> None:
        """Note which node runs next."""
        fqn = node_fqn(node)
        self.where = f"node {node.name} ({node.target})"
        if fqn:
            self.where += f" of {fqn}"
        if rank is not None:
            self.where += f", rank {rank}"

    def _missing(self, value: Value | None) -> tuple[int, ...] | None:
        """Return the place of an element that the other program does not make."""
        if value is None or not value.elements.numel():
            return None
        elements = value.elements
        if not len(self.others):
            return (0,) * elements.ndim
        places = torch.searchsorted(self.others, elements.contiguous()).clamp(
            max=len(self.others) - 1
        )
        found = (self.others[places] != elements).nonzero()
        return tuple(found[0].tolist()) if len(found) else None

    def __call__(self, operator: Any, operands: Sequence[Tensor], made: Any, read: Any) -> None:
        before, given = set(), True
        written = set(map(storage_id, made))
        for tensor in operands:
            writer = self._writer.get(storage_id(tensor))
            if writer is not None:
                before.add(writer)
            if storage_id(tensor) not in written:
                given = given and self._missing(read(tensor)) is None
            elif writer is not None:
                # It holds the result already; what it held was the result of an earlier step.
                given = given and self.steps[writer].made is None
        for tensor in made:
            place = self._missing(read(tensor))
            self._writer[storage_id(tensor)] = len(self.steps)
            self.steps.append(Step(self.where or str(operator), sorted(before), given, place))

    def origin_of(self, result: Tensor) -> str:
        """Return where the difference of a result begins."""
        last = self._writer.get(storage_id(result))
        todo, seen = [] if last is None else [last], set()
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo += self.steps[number].operands
        for number in sorted(seen):
            step = self.steps[number]
            if step.made is not None and step.given:
                return f"{step.where}, element {list(step.made)}"
        return "a move: the expected program makes every value, at another place"
