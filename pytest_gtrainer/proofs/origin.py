"""Find where a difference begins: the first value of one program that the other never makes.

The elements of a value are looked up one by one, whatever tensor the other program has them in, so
buckets, splits, pads and other layouts do not hide them. A value that the other program never
makes, computed from values that it does make, is where they part. Only values that the differing
result depends on count.

A value may be wrong and be made elsewhere all the same: of ``sum(x) / 4``, a mean in place of the
sum makes what the division should. If both programs are graphs of nearly the same nodes, as before
and after a pass, the nodes of one name are compared, too: ``ValuesByNode``.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import storage_id
from pytest_gtrainer.arithmetic.hashing import scramble
from pytest_gtrainer.arithmetic.mode import line_of_program
from pytest_gtrainer.arithmetic.operators import MOVES, base_name
from pytest_gtrainer.arithmetic.values import Value
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.graph.nodes import node_fqn, storage_of, written_operands


@dataclass(slots=True)
class Step:
    """An operator that ran.

    Attributes:
        where: the node or the operator, for a message.
        node, rank: the node, if a graph runs, and the rank that runs it, if it is one.
        operands: the steps that made what it read, by their number.
        are_operands_known: whether the other program makes all elements of its operands.
        unknown_at: the place of an element that the other program never makes; None if it makes
            all.
    """

    where: str
    node: fx.Node | None
    rank: int | None
    operands: list[int]
    are_operands_known: bool
    unknown_at: tuple[int, ...] | None


class ValuesByNode:
    """The values that each node of a graph makes, as hashes, by its name and rank."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, int | None], fx.Node] = {}
        self._hashes: dict[tuple[str, int | None], list[int | None]] = {}
        self._now: list[int | None] | None = None

    def enter_node(self, node: fx.Node, rank: int | None) -> None:
        """Note which node runs next."""
        self.nodes[node.name, rank] = node
        self._now = self._hashes.setdefault((node.name, rank), [])

    def add(self, value: Value | None) -> None:
        """Note what the node makes; None for a known tensor."""
        if self._now is None:
            return
        if value is None:
            self._now.append(None)
            return
        elements = value.elements.reshape(-1)
        places = torch.arange(1, elements.numel() + 1, device=elements.device)
        self._now.append(int(scramble(elements + scramble(places)).sum()))

    def has_values(self, name: str, rank: int | None) -> bool:
        """Return whether a node made something: a view does not."""
        return bool(self._hashes.get((name, rank)))

    def differ(self, other: "ValuesByNode", name: str, rank: int | None) -> bool:
        """Return whether nodes of this name make other values in two graphs."""
        return self._hashes.get((name, rank)) != other._hashes.get((name, rank))


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
        self.by_node = ValuesByNode()

    def __call__(self, operator: Any, operands: Sequence[Tensor], made: Any, read: Any) -> None:
        for tensor in made:
            value = read(tensor)
            self._add(value)
            self.by_node.add(value)
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
_MOST_LETTERS = 120  # of a call that is expected


class Trail:
    """Follow a program, and note each value that the other one never makes.

    It is called with each operator that runs.
    """

    def __init__(self, others: AllElements) -> None:
        self.others = others
        self.steps: list[Step] = []
        self.where = ""
        self._node: fx.Node | None = None
        self._rank: int | None = None
        self._writer: dict[int, int] = {}
        self._by_node = ValuesByNode()

    def enter_node(self, node: fx.Node, rank: int | None) -> None:
        """Note which node runs next."""
        self._node, self._rank = node, rank
        self.where = _describe(node, rank)
        self._by_node.enter_node(node, rank)

    def __call__(self, operator: Any, operands: Sequence[Tensor], made: Any, read: Any) -> None:
        writers = {self._writer.get(storage_id(tensor)) for tensor in operands}
        before = sorted(writer for writer in writers if writer is not None)
        known = all(self.steps[writer].unknown_at is None for writer in before)
        where = self.where
        if not where:
            line = line_of_program()  # in a backward, the line that calls it
            where = f"{operator} at {line}" if line else str(operator)
        for tensor in made:
            place, value = None, read(tensor)
            self._by_node.add(value)
            # A move makes no new elements.
            if not known or base_name(operator) not in MOVES:
                place = self.others.missing(value)
            self._writer[storage_id(tensor)] = len(self.steps)
            self.steps.append(Step(where, self._node, self._rank, before, known, place))

    def origin_of(self, result: Tensor, rank: int | None) -> str:
        """Return where the difference of a rank's result begins."""
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
                changed = self._changed_before(step.node, step.rank)
                if changed:
                    return changed
                where = step.where + _describe_modules_before(step.node)
                return f"{where}, element {list(step.unknown_at)}"
        nodes = self._by_node.nodes
        ends = [(node, at) for (_, at), node in nodes.items() if node.op == "output"]
        ends.sort(key=lambda end: end[1] != rank)  # where one rank stands for all, that is another
        changed = self._changed_before(*ends[0], itself=True) if ends else ""
        return changed or "a move: the expected program makes every value, at another place"

    def _changed_before(self, node: fx.Node | None, rank: int | None, itself: bool = False) -> str:
        """Return the node that makes a known value where another one is expected; "" if none does.

        Args:
            node: that of a step, of which the difference is known.
            itself: it may be the changed node, too.
        """
        if node is None or not self._have_same_nodes(rank):
            return ""
        changed = self._find_changed(node, rank)
        if changed is None or (changed is node and not itself):
            return ""
        return self._describe_changed(changed, rank)

    def _describe_changed(self, changed: fx.Node, rank: int | None) -> str:
        """Return a node in words, with what is expected in its place.

        If it stands in both graphs alike, what it reads was written in another way: return the
        write that has changed, or "" if nobody knows.
        """
        expected = self.others.by_node.nodes
        namesake = expected[changed.name, rank]
        if _spell(changed) != _spell(namesake):
            spelled = shorten(_spell(namesake), _MOST_LETTERS)
            return f"{_describe(changed, rank)}, where {spelled} is expected"
        written = _written_before(changed)
        for node in written:
            other = expected.get((node.name, rank))
            if other is None:
                return _describe(node, rank)
            if _spell(node) != _spell(other):
                return self._describe_changed(node, rank)
        return "" if written or _written_before(namesake) else _describe(changed, rank)

    def _find_changed(self, node: fx.Node, rank: int | None) -> fx.Node | None:
        """Go up from a node, as long as it stands in both graphs alike and an operand has another
        value. Return the last one; None if the graphs do not say it.
        """
        expected, changed = self.others.by_node, None
        while True:
            namesake = expected.nodes.get((node.name, rank))
            if namesake is None:
                return changed
            if _spell(node) != _spell(namesake):
                return node
            operands = node.all_input_nodes
            differing = [n for n in operands if self._by_node.differ(expected, n.name, rank)]
            if not differing:
                break
            node = changed = differing[0]

        for operand in operands:  # a view makes nothing, so only what it is says that it is changed
            if operand.op == "call_function" and not expected.has_values(operand.name, rank):
                found = self._find_changed(operand, rank)
                if found is not None:
                    return found
        return changed

    def _have_same_nodes(self, rank: int | None) -> bool:
        """Return whether nodes of one name are mostly one node, as before and after a pass."""
        expected = self.others.by_node.nodes
        same = 0
        for (name, of_rank), node in expected.items():
            own = self._by_node.nodes.get((name, of_rank))
            same += own is not None and _spell(own) == _spell(node)
        return 4 * same >= 3 * len(expected)


def _written_before(node: fx.Node) -> list[fx.Node]:
    """Return the nodes before a node that write to what it reads, in graph order."""
    operands = {storage_of(operand) for operand in node.all_input_nodes}
    before = []
    for each in node.graph.nodes:
        if each is node:
            break
        if not operands.isdisjoint(map(storage_of, written_operands(each))):
            before.append(each)
    return before


def _describe(node: fx.Node, rank: int | None) -> str:
    fqn = node_fqn(node)
    text = f"node {node.name} ({node.target})"
    if fqn:
        text += f" of {fqn}"
    if rank is not None:
        text += f", rank {rank}"
    return text


def _spell(node: fx.Node) -> str:
    """Return the call of a node, with its operands by their names."""
    arguments = [str(each) for each in node.args]
    arguments += [f"{name}={value}" for name, value in node.kwargs.items()]
    return f"{node.target}({', '.join(arguments)})"


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
