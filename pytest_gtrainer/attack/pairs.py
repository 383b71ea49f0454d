"""Cut two versions of a graph to the values in which they differ.

A pass changes a few nodes of many. Each value gets a *number*: the same operator on operands of
equal numbers makes values of one number, which are equal. Where both versions of a node read
operands of different numbers, these are a *pair*. Behind a pair both versions count on as if its
values were equal. If then all results have equal numbers, the versions are equal if each pair is.

The pairs are proven together, over abstract inputs in place of all values whose number both
versions have. Each pair is equal for any such inputs, so the values of the new version are those of
the old one, by induction over its nodes. The converse does not hold: pairs that differ for some
inputs may be equal for those that the graph makes, and then whole graphs have to be proven.

A view is known by what it is a view of, and by its layout there. So a view of a view is one of
memory, and a view that changes nothing has the number of its operand. Both versions run once, on
numbers, because only that shows layouts: a pass may leave metadata that is no longer true.

Nodes that draw have to be the same in both versions, in one order, and so have those that write to
one memory. So a value of memory that is written to has, besides its number, a *history*: the
numbers of the nodes that have written to it so far. Two such memories are never one, but as long as
nobody has written to them, who reads them gets what any equal call gives.

Cost: linear in the nodes. Source: "SAT sweeping" of circuits, Kuehlmann and Krohm, 1997.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer._torch.values import OpOverload, is_composite
from pytest_gtrainer.graph.collectives import group_of, launches
from pytest_gtrainer.graph.nodes import (
    has_effect,
    held,
    is_random,
    is_view,
    is_wait,
    leaves_of,
    places_of,
    returns_an_operand,
    short_name,
    written_operands,
)
from pytest_gtrainer.proofs.inputs import draw_inputs

_CALLS = (torch.ops.higher_order.cond, torch.ops.higher_order.invoke_subgraph)
"""Operators that do what the graphs inside do, and nothing else."""

_KNOWN = (*_CALLS, operator.getitem)

Value = tuple[int, tuple[int, ...]]
"""The number of a value, and those of the writes to its memory so far."""

Pair = tuple[fx.Node, fx.Node]
"""A node of the new version, and one of the old version, that have to be equal."""


class CannotCut(Exception):
    """Nothing is known without a proof of whole graphs."""


def cut_to_pairs(
    after: fx.GraphModule,
    before: fx.GraphModule,
    *,
    is_deeper: bool = False,
    only_results: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Return two small graphs; if these are equal, so are the versions of the graph.

    Args:
        after, before: the versions; they stay as they are.
        is_deeper: the nodes whose values would be inputs belong to the graphs, too. One input may
            be a copy of another one, which nobody would know.
        only_results: pairs are what the versions return, write and draw, and no nodes in between. A
            pass that swaps two operators keeps their names, and each has another value.

    Returns:
        Graphs of the pairs, over the same inputs; None if there is no pair, so nothing is left to
        prove.

    Raises:
        CannotCut: the versions differ in what they write or draw, or in more than pairs.
        Exception: one of them cannot run. Nothing else would run a node behind a pair, which may
            not take other strides.
    """
    if len(before.graph.find_nodes(op="placeholder")) != len(
        after.graph.find_nodes(op="placeholder")
    ):
        raise CannotCut("the inputs are others")
    old, new = _Version(before, before), _Version(after, before)
    numbers: dict[Any, int] = {}
    for node in before.graph.nodes:
        old.number(node, numbers)
    # Before the new version adds numbers of its own.
    known = set(numbers.values())
    by_name = {node.name: node for node in before.graph.nodes}
    partners = {} if only_results else _partners(after, by_name)
    pairs: list[Pair] = []
    for node in after.graph.nodes:
        number = new.number(node, numbers)
        if number in known:
            continue
        if node.op == "output" or node in new.stateful:
            pairs += _pairs_of_operands(node, _partner_in_order(node, new, old), new, old)
            continue
        same = None if only_results else by_name.get(node.name)
        if same is not None and _is_decided(node) and _may_read_alike(node, same, new, old):
            with suppress(CannotCut):
                pairs += _pairs_of_operands(node, same, new, old)
                continue
        for partner in partners.get(node, ()):
            if _may_be_pair(node, partner, new, old):
                pairs.append((node, partner))
                new.take_number(node, old, partner)
                break
    if len(old.stateful) != len(new.stateful):
        raise CannotCut("writes or draws are gone")
    if not pairs:
        return None
    shared = new.known() & old.known()
    cones = _cones_of(pairs, new, old, shared)
    if is_deeper:
        cones = _cones_of(pairs, new, old, shared - _numbers_of_inputs(cones))
    return _graphs_of(cones, old)


def find_false_metadata(gm: fx.GraphModule, inputs_of: fx.GraphModule) -> str:
    """Return the first node whose traced value has another shape or dtype than a run; "" for none.

    Nodes without a traced value are not looked at. Strides are not compared: most passes leave
    those of later nodes as they were.

    Args:
        inputs_of: a graph with the same inputs, whose metadata is true.

    Raises:
        Exception: the graph cannot run.
    """
    layouts = _Layouts(gm)
    with random_states_kept(), torch.no_grad():
        layouts.run(*draw_inputs(inputs_of, seed=0))
    for node, (_, shape, _, dtype, *_) in layouts.of.items():
        val = node.meta.get("val")
        if isinstance(val, Tensor) and (tuple(val.shape), val.dtype) != (shape, dtype):
            said = f"{list(val.shape)}, {val.dtype}"
            return f'{node} is {list(shape)}, {dtype}; its meta["val"] is {said}'
    return ""


class _Layouts(fx.Interpreter):
    """A run of a graph that notes how each tensor lies in memory.

    Attributes:
        of: the layouts, by node.
        roots: of views, the nodes that made the memory.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.of: dict[fx.Node, tuple[Any, ...]] = {}
        self.roots: dict[fx.Node, fx.Node] = {}
        self._memory: dict[fx.Node, int] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if not isinstance(value, Tensor):
            return value
        shape, stride = tuple(value.shape), value.stride()
        bits = value.dtype, value.is_conj(), value.is_neg()
        self.of[node] = value.storage_offset(), shape, stride, *bits
        operand = _shown_operand(node)
        self._memory[node] = memory = value.untyped_storage().data_ptr()
        # A reshape is a view, or a copy. Empty tensors have no memory.
        if operand is not None and memory == self._memory.get(operand) != 0:
            self.roots[node] = self.roots.get(operand, operand)
        return value


def _shown_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand of which a node shows elements, as its layout says; None for no view.

    Extents may be read from other tensors, whose shapes are known.
    """
    if node.target is operator.getitem:
        parts = node.all_input_nodes[0]  # such as those of a split
        return _shown_operand(parts) if is_view(parts.target) else None
    # ``as_strided`` may show elements of the memory that its operand has not.
    if not isinstance(node.target, OpOverload) or node.target is torch.ops.aten.as_strided.default:
        return None
    if not is_view(node.target) and not is_composite(node.target):
        return None
    operands = [each for each in node.all_input_nodes if not short_name(each).startswith("sym_")]
    return operands[0] if len(operands) == 1 else None


class _Version:
    """One version of a graph, with the number of each node.

    Attributes:
        layouts: of all tensors, as a run has shown them.
        numbers: of nodes; of memory that is written to they say which it is, not its value.
        values: numbers of what nodes make, before anybody writes to it.
        stateful: nodes that draw, write or make memory without a value, and which of these they
            are: a draw by its place, the others by their name.
        created: nodes that make memory which others write to, by the name of who writes to it
            first. Equal ones are not one.
        shows: nodes whose value is such memory, or a view of it.
        histories: by reader and operand, the nodes that wrote to the operand's memory before.
    """

    def __init__(self, gm: fx.GraphModule, inputs_of: fx.GraphModule) -> None:
        self.gm = gm
        self.layouts = _Layouts(gm)
        with random_states_kept(), torch.no_grad():
            self.layouts.run(*draw_inputs(inputs_of, seed=0))
        inputs = gm.graph.find_nodes(op="placeholder")
        self._inputs = {node: place for place, node in enumerate(inputs)}
        self.numbers: dict[fx.Node, int] = {}
        self.values: dict[fx.Node, int] = {}
        self.stateful: dict[fx.Node, tuple[str, Any]] = {}
        self.created: dict[fx.Node, tuple[str, int]] = {}
        self.histories: dict[fx.Node, dict[fx.Node, tuple[fx.Node, ...]]] = {}
        memory: dict[fx.Node, set[fx.Node]] = {}
        first_writers: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            memory[node] = _memory_of(node, memory, node in self.layouts.roots)
            for operand in written_operands(node):
                for each in memory[operand]:
                    first_writers.setdefault(each, node)
        written = first_writers.keys()
        self.shows = {node for node in gm.graph.nodes if memory[node] & written}
        # In the order of the graph: a reader sees what was written before it.
        writers: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
        for node in gm.graph.nodes:
            self.histories[node] = {}
            for operand in node.all_input_nodes:
                found: set[fx.Node] = set()
                for each in memory[operand]:
                    found.update(writers[each])
                self.histories[node][operand] = tuple(sorted(found))
            for operand in written_operands(node):
                for each in memory[operand]:
                    writers[each][node] = None
            self._classify(node, first_writers)

    def _classify(self, node: fx.Node, first_writers: Mapping[fx.Node, fx.Node]) -> None:
        """Say whether the place of a node among others matters."""
        if node.op in ("placeholder", "output"):
            return
        # Memory that nobody has written yet is another one each time; if nobody reads it either, it
        # may go.
        is_fresh = "empty" in short_name(node) and bool(node.users)
        if is_random(node):
            self.stateful[node] = "draw", sum(kind == "draw" for kind, _ in self.stateful.values())
        elif is_fresh or written_operands(node):
            self.stateful[node] = "memory", node.name
        elif node in first_writers:
            # Passes keep the names of writers. A writer may write to several.
            name = first_writers[node].name
            self.created[node] = name, sum(name == other for other, _ in self.created.values())

    def number(self, node: fx.Node, numbers: dict[Any, int]) -> int:
        """Number a node whose operands have numbers.

        Raises:
            CannotCut: nobody knows what the node does.
        """
        number = self._number_of(node, numbers, of_memory=True)
        self.numbers[node] = self.values[node] = number
        if node in self.shows and node not in self.stateful:
            self.values[node] = self._number_of(node, numbers, of_memory=False)
        return number

    def _number_of(self, node: fx.Node, numbers: dict[Any, int], of_memory: bool) -> int:
        """Return the number of a node; or of its value, as if nobody wrote to its memory."""
        key: Any
        if node.op == "placeholder":
            key = "input", self._inputs[node]
        elif node.op == "output":
            key = "output", self._spelled(node.args, node, of_memory)
        elif node in self.layouts.roots:
            root = self.layouts.roots[node]
            number = self.numbers[root] if of_memory else self.values[root]
            layouts = self.layouts.of[root], self.layouts.of[node]
            if layouts[0] == layouts[1]:
                return number
            key = "view", number, layouts
        elif node.op == "get_attr":
            key = "attribute", _spelled_attribute(held(self.gm, str(node.target)))
        elif isinstance(node.target, OpOverload) or node.target in _KNOWN:
            place = self.stateful.get(node), self.created.get(node) if of_memory else None
            key = node.target, place, self._spelled((node.args, node.kwargs), node, of_memory)
        else:
            raise CannotCut(f"{node} calls {node.target}")
        return numbers.setdefault(key, len(numbers))

    def take_number(self, node: fx.Node, other: "_Version", partner: fx.Node) -> None:
        """Count on as if a node were the one of the other version."""
        self.numbers[node] = other.numbers[partner]
        self.values[node] = other.values[partner]

    def known(self) -> set[int]:
        """Return all numbers of nodes and values."""
        return {*self.numbers.values(), *self.values.values()}

    def value(self, operand: fx.Node, reader: fx.Node, of_memory: bool = True) -> Value:
        """Return number and history of an operand, which say what a reader gets.

        Args:
            of_memory: to who writes to it, or shows it, it matters which memory it is.
        """
        history = tuple(self.numbers[writer] for writer in self.histories[reader][operand])
        is_memory = of_memory and (reader in self.shows or reader in self.stateful)
        if history or is_memory:
            return self.numbers[operand], history
        return self.values[operand], ()

    def _spelled(self, argument: Any, reader: fx.Node, of_memory: bool = True) -> Any:
        """Return an argument with values in the place of nodes, as a part of a key."""
        if isinstance(argument, fx.Node):
            return "node", self.value(argument, reader, of_memory)
        if isinstance(argument, Mapping):
            names = sorted(argument)
            return tuple((name, self._spelled(argument[name], reader, of_memory)) for name in names)
        if isinstance(argument, list | tuple):
            return tuple(self._spelled(each, reader, of_memory) for each in argument)
        if isinstance(argument, str) and launches(reader.target) and argument == group_of(reader):
            return "ranks", tuple(group_ranks(argument))  # two groups of them do the same
        # 1, 1.0 and True are equal for Python.
        return type(argument).__name__, repr(argument)


def _spelled_attribute(value: Any) -> Any:
    """Return what says which value an attribute is; graphs by their nodes.

    Raises:
        CannotCut: a graph writes, draws, communicates or calls a graph.
    """
    if not isinstance(value, fx.GraphModule):
        return id(value)
    lines = []
    for node in value.graph.nodes:
        if node.op == "call_function":
            is_known = isinstance(node.target, OpOverload) or node.target is operator.getitem
            if not is_known or has_effect(node):
                raise CannotCut(f"{node} of a graph inside has an effect")
        elif node.op not in ("placeholder", "output"):
            raise CannotCut(f"{node} of a graph inside is an attribute")
        lines.append(f"{node} {node.op} {node.target} {node.args} {node.kwargs}")
    return tuple(lines)


def _memory_of(
    node: fx.Node, memory: Mapping[fx.Node, set[fx.Node]], is_seen_view: bool
) -> set[fx.Node]:
    """Return the nodes whose memory a value may share; itself, if it has its own.

    Args:
        is_seen_view: a run has shown that it shares that of its operand.
    """
    shown: Sequence[fx.Node] = ()
    own = {node}
    if is_seen_view or is_view(node.target) or node.target is operator.getitem or is_wait(node):
        shown = node.all_input_nodes
        own = set()
    elif returns_an_operand(node):
        shown = written_operands(node)
    elif node.target in _CALLS:
        shown = node.all_input_nodes  # a graph inside may return what it is given
    elif isinstance(node.target, OpOverload) and is_composite(node.target):
        # Several operands, as of ``broadcast_tensors``: which of them it shares is not looked at.
        shown = node.all_input_nodes if len(node.all_input_nodes) > 1 else ()
    for operand in shown:
        own |= memory[operand]
    return own


def _partners(
    after: fx.GraphModule, by_name: Mapping[str, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Return, for a node of the new version, those of the old one that it may stand for.

    It is read where the old one was, by a node that kept its name; or it has the same name.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in after.graph.nodes:
        same = by_name.get(node.name)
        if same is None or same.op != node.op:
            continue
        if len(node.all_input_nodes) == len(same.all_input_nodes):
            for operand, was in zip(node.all_input_nodes, same.all_input_nodes, strict=True):
                found.setdefault(operand, []).append(was)
    # Passes that change a node in place keep its name; those that replace it keep its readers.
    for node in after.graph.nodes:
        if node.name in by_name:
            found.setdefault(node, []).append(by_name[node.name])
    return found


def _partner_in_order(node: fx.Node, new: _Version, old: _Version) -> fx.Node:
    """Return the node of the old version in the fixed place of a node.

    Raises:
        CannotCut: there is none.
    """
    if node.op == "output":
        return old.gm.graph.output_node()
    for partner, place in old.stateful.items():
        if place == new.stateful[node]:
            return partner
    raise CannotCut(f"{node} is another one")


def _is_decided(node: fx.Node) -> bool:
    """Return whether a value is a tensor that no abstract element is in, or several tensors.

    Abstract numbers that only decide what is true prove nothing; so their operands have to be
    equal.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return not value.is_floating_point()
    return isinstance(value, list | tuple)


def _may_read_alike(node: fx.Node, partner: fx.Node, new: _Version, old: _Version) -> bool:
    """Return whether two nodes do the same with what they read, and make no fixed memory."""
    is_fixed = node in new.shows or partner in old.shows or partner in old.stateful
    return not is_fixed and _skeleton(node) == _skeleton(partner)


def _pairs_of_operands(node: fx.Node, partner: fx.Node, new: _Version, old: _Version) -> list[Pair]:
    """Return the operands of a node that have to be those of the old one.

    Then the node has the old one's number.

    Raises:
        CannotCut: it differs in more, or in which memory it reads or writes.
    """
    given = [each for each in leaves_of((node.args, node.kwargs)) if isinstance(each, fx.Node)]
    wanted = [
        each for each in leaves_of((partner.args, partner.kwargs)) if isinstance(each, fx.Node)
    ]
    if _skeleton(node) != _skeleton(partner):
        raise CannotCut(f"{node} is another one")
    pairs = []
    for operand, was in zip(given, wanted, strict=True):
        if new.value(operand, node) == old.value(was, partner):
            continue
        is_fixed = operand in new.shows or was in old.shows
        is_result = node.op == "output" or node in new.stateful
        if is_fixed or was in old.stateful or (is_result and was.op == "placeholder"):
            raise CannotCut(f"{node} reads another memory")
        if not _may_be_pair(operand, was, new, old):
            raise CannotCut(f"{node} reads another kind of value")
        pairs.append((operand, was))
    new.take_number(node, old, partner)
    return pairs


def _skeleton(node: fx.Node) -> str:
    """Return operator and arguments without the nodes that it reads."""
    return str((node.target, map_arg((node.args, node.kwargs), lambda operand: "node")))


def _may_be_pair(node: fx.Node, partner: fx.Node, new: _Version, old: _Version) -> bool:
    """Return whether two nodes are alike: tensors of one shape and dtype, in the same memory."""
    if partner in old.stateful or new.created.get(node) != old.created.get(partner):
        return False
    # Views of memory that is written to have to be the same.
    if (node in new.shows or partner in old.shows) and node not in new.created:
        return False
    value, wanted = node.meta.get("val"), partner.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
        return False
    return value.shape == wanted.shape and value.dtype == wanted.dtype


def _cones_of(
    pairs: Sequence[Pair], new: "_Version", old: "_Version", shared: set[int]
) -> tuple["_Cone", "_Cone"]:
    """Return what makes each side of all pairs.

    Args:
        shared: numbers of values that may be inputs.
    """
    cones = _Cone(new, shared), _Cone(old, shared)
    for made, wanted in pairs:
        cones[0].add(made, new.numbers[made] != old.numbers[wanted])
        cones[1].add(wanted)
    return cones


def _numbers_of_inputs(cones: Sequence["_Cone"]) -> set[int]:
    """Return the numbers of what are inputs, but need not be: their place does not matter."""
    numbers: set[int] = set()
    for cone in cones:
        numbers.update(number for number, _ in cone.inputs)
    for cone in cones:
        version = cone.version
        numbers -= {version.numbers[node] for node in (*version.stateful, *version.shows)}
    return numbers


def _graphs_of(
    cones: tuple["_Cone", "_Cone"], old: "_Version"
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graphs of two cones, over the same inputs."""
    # Of the old version, as a pass may leave metadata that is no longer true.
    values: dict[int, Any] = {}
    for numbers in (old.numbers, old.values):
        for node, number in numbers.items():
            values.setdefault(number, node.meta.get("val"))
    inputs = {}
    for value in sorted(cones[0].inputs | cones[1].inputs):
        inputs[value] = values[value[0]]
    return cones[0].graph_over(inputs), cones[1].graph_over(inputs)


class _Cone:
    """The nodes of a version that make its side of the pairs."""

    def __init__(self, version: _Version, shared: set[int]) -> None:
        self.version, self._shared = version, shared
        self._kept: set[fx.Node] = set()
        self._results: list[fx.Node] = []
        self._as_input: dict[fx.Node, Value] = {}
        # Of what is read, the writes to its memory so far; of all readers the same.
        self._histories: dict[fx.Node, tuple[int, ...]] = {}
        self.inputs: set[Value] = set()

    def add(self, result: fx.Node, other_number: bool = False) -> None:
        """Add a side of a pair, and what makes it.

        Args:
            result: the side.
            other_number: it has another number than the other side, so it may be an input.

        Raises:
            CannotCut: a node of it writes or draws, or reads what is written to and is no input.
        """
        self._results.append(result)
        number = self.version.numbers[result]
        is_given = other_number or result.op == "placeholder"
        if is_given and self._is_input(result, number):
            # The other side makes this very value of it, as an alias does.
            value: Value = number, ()
            self.inputs.add(value)
            self._as_input[result] = value
            return
        todo = [result]
        while todo:
            node = todo.pop()
            if node in self._kept:
                continue
            self._kept.add(node)
            for operand in node.all_input_nodes:
                number, history = self._read(operand, node)
                if self._is_input(operand, number):
                    self.inputs.add((number, history))
                elif operand in self.version.stateful:
                    raise CannotCut(f"{operand} is written to, or drawn")
                elif history and operand not in self.version.layouts.roots:
                    raise CannotCut(f"{operand} is written to")
                elif self._histories.setdefault(operand, history) != history:
                    raise CannotCut(f"{operand} is written to between its readers")
                else:
                    todo.append(operand)

    def _read(self, operand: fx.Node, reader: fx.Node) -> Value:
        """Return what a node reads. Nobody writes here, so it is no matter in which memory.

        A view shows what its operand is where the view is read, and not where it is made.
        """
        history = self._histories.get(reader)
        if history:
            return self.version.numbers[operand], history
        return self.version.value(operand, reader, of_memory=False)

    def _is_input(self, node: fx.Node, number: int) -> bool:
        """Return whether an input stands for a value; its elements have to be abstract."""
        value = node.meta.get("val")
        is_abstract = isinstance(value, Tensor) and value.is_floating_point()
        return node.op == "placeholder" or (number in self._shared and is_abstract)

    def graph_over(self, inputs: Mapping[Value, Any]) -> fx.GraphModule:
        """Return the graph of all added nodes, with inputs for these values."""
        graph = fx.Graph()
        given: dict[Value, fx.Node] = {}
        copies: dict[fx.Node, fx.Node] = {}
        for place, (read, value) in enumerate(inputs.items()):
            made = graph.placeholder(f"value_{read[0]}_{place}")
            fqn = made.name
            made.meta.update(val=_with_own_elements(value), gt_input={"kind": "input", "fqn": fqn})
            given[read] = made
        for node in sorted(self._kept, key=places_of(self.version.gm.graph.nodes).__getitem__):
            operands = {}
            for operand in node.all_input_nodes:
                # A side of another pair, too: behind it both versions go on with one value.
                read = self._read(operand, node)
                if self._is_input(operand, read[0]):
                    operands[operand] = given[read]
                else:
                    operands[operand] = copies[operand]
            copies[node] = graph.node_copy(node, operands.__getitem__)
        results = []
        for node in self._results:
            stands_for = self._as_input.get(node)
            results.append(copies[node] if stands_for is None else given[stands_for])
        graph.output(tuple(results))
        return fx.GraphModule(self.version.gm, graph)


def _with_own_elements(value: Tensor) -> Tensor:
    """Return a value whose elements lie apart: an expanded one would know some to be equal."""
    if all(stride or size == 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
