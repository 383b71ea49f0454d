"""Check that a graph, or a compiled artefact, that one rank made serves every rank.

Ranks compile one program, so one of them may compile for all. Then a number that the program takes
from its rank in Python, as where its part of the vocabulary begins, is a constant of the graph: the
number of the rank that traced.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.foreign_graphs import ExportedProgram
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer._torch.values import OpOverload, pytree, schema
from pytest_gtrainer.facts import counted, spell_some
from pytest_gtrainer.graph.foreign import AnyGraph, adopt
from pytest_gtrainer.graph.nodes import held
from pytest_gtrainer.numerics.bits import NoBytes, byte_view, copied, count_not_finite, same_bytes
from pytest_gtrainer.numerics.calls import Call, gives_values, kept_calls, numbers_in
from pytest_gtrainer.numerics.compare import BitwiseDifference, compare
from pytest_gtrainer.numerics.graph_run import copies
from pytest_gtrainer.numerics.verdict import Verdict
from pytest_gtrainer.proofs.state import tensors_held_by
from pytest_gtrainer.worlds.gathering import gather_objects
from pytest_gtrainer.worlds.simulate import (
    AnyWorld,
    Groups,
    Inputs,
    InputsOfRank,
    inputs_of_ranks,
    net_of_any,
    run_on_net,
)
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.threads.run import run_threads

Results = dict[str, Tensor]
Sides = tuple[list[Call], list[Call]]  # of the graph, of the function
_MOST_NUMBERS = 8


@facts.check
def assert_rank_agnostic(
    graph: AnyGraph | Callable[..., Any],
    function: Callable[..., Any],
    inputs_of_rank: InputsOfRank,
    world: AnyWorld,
    *,
    groups: Groups | None = None,
    what: str = "",
) -> list[Verdict]:
    """Check that a graph of one rank, replayed as every rank, gives what that rank computes.

    Results are compared, tensors and numbers, and what both leave in their inputs: what is written
    there, and gradients. In a test on ranks results that require gradients have a backward, too.

    Args:
        graph: a graph of any tracer, as one rank has traced it, or an artefact: what
            ``torch.export.load`` returns, or the ``module()`` of that. Weights of an
            ``ExportedProgram`` are its first inputs. In a test on ranks also any callable, as what
            ``torch.compile`` returns.
        function: the eager program. On each rank it takes the same inputs, and its results have the
            graph's order.
        inputs_of_rank: inputs by rank, as for ``simulate_graph``.
        world: the world of a simulated test, a net, or a number of ranks. In a test on ranks its
            world: then every rank calls this, and runs the graph itself.
        groups: ranks of process groups that this process does not have, as for ``simulate_graph``.
        what: what is run, for the message.

    Returns:
        The verdict of each rank.

    Raises:
        BitwiseDifference: ranks on which the results differ, and the first operator: its line in
            the function, the numbers that the graph gives it, and those of the rank.
        VacuousCheck: a world of one rank, or no finite result.
        DependsOnRank: inputs of a rank have other shapes than the traced ones.
        ValueError: inputs, results or groups that do not fit, or one of both writes a tensor that
            is none of its inputs, such as a buffer, which would not be compared.
    """
    __tracebackhide__ = True
    sides = _OnRanks if dist.is_initialized() and dist.get_backend() != "fake" else _Simulated
    runs = sides(graph, function, inputs_of_rank, world, groups)
    verdicts: list[Verdict] = []
    first = None
    for actual, expected in runs.results():
        _refuse_written_state(actual, expected)
        if len(actual.results) != len(expected.results):
            raise ValueError(
                f"the graph returns {counted(len(actual.results), 'tensor')}, the function "
                f"{len(expected.results)}: return the same, in one order"
            )
        first = first or expected
        own, wanted = _with_what_is_left(actual, expected)
        verdict = compare(own, wanted)
        reason = _other_form(actual, expected, first, len(verdicts))
        if reason:
            verdict = replace(verdict, outcome="different", reasons=(*verdict.reasons, reason))
        facts.emit("verdict", outcome=verdict.label, tensors=verdict.compared, what=what)
        elements = sum(tensor.numel() for tensor in wanted.values())
        if not elements or elements == sum(map(count_not_finite, wanted.values())):
            raise VacuousCheck(
                f"no result of rank {len(verdicts)} is finite, so its bits are equal whatever "
                "computes them: take other inputs"
            )
        verdicts.append(verdict)

    wrong = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome != "equal"]
    if wrong:
        verdict = verdicts[wrong[0]]
        lines = [
            f"{what or 'the graph'} does not give the results of "
            f"rank{'s' * (len(wrong) > 1)} {spell_some(wrong, 8)}, of {len(verdicts)}",
            *_first_constant(runs.calls()),
            str(verdict),
        ]
        raise BitwiseDifference("\n".join(lines), verdict)
    return verdicts


class _Simulated:
    """The graph in the interpreter of a simulated world, the function on its threads."""

    def __init__(
        self,
        graph: Any,
        function: Callable[..., Any],
        inputs_of_rank: InputsOfRank,
        world: AnyWorld,
        groups: Groups | None,
    ) -> None:
        self.gm, self.function, self.groups = _without_guards(adopt(graph)), function, groups
        self.world, self.net = world, net_of_any(world)
        self.inputs = inputs_of_ranks(inputs_of_rank, self.net.size)

    def results(self) -> list[tuple["_Outcome", "_Outcome"]]:
        """Return what both sides give, by rank."""
        inputs = _copied(self.inputs)
        with _kept_state(self.gm) as of_graph:
            results = run_on_net(self.gm, inputs, self.world, self.net, groups=self.groups)
        by_graph = []
        for given, own, result in zip(self.inputs, inputs, results, strict=True):
            left = _left_in(pytree.tree_leaves(own), pytree.tree_leaves(given))
            by_graph.append(_Outcome(_named(result), left, None, of_graph))
        with _kept_state(self.function) as of_function:
            by_function = run_threads(
                self.net.size,
                lambda rank: _call(self.function, self.inputs[rank]).outcome(of_function),
                net=self.net,
            )
        return list(zip(by_graph, by_function, strict=True))

    def calls(self) -> list[Sides]:
        """Return the operators of the graph and of the function, by rank."""

        by_function = run_threads(
            self.net.size, lambda rank: _calls(self.function, self.inputs[rank]), net=self.net
        )
        nodes = [node for node in self.gm.graph.nodes if _gives_a_tensor(node)]
        found: list[Sides] = []
        for values, own in zip(
            self._replay(_with_output(self.gm, nodes)), by_function, strict=True
        ):
            by_graph = []
            for node, value in zip(nodes, values.values(), strict=True):
                call = Call(str(node.target), "", [value], numbers=self._numbers(node))
                by_graph.append(call)
            found.append((by_graph, own))
        return found

    def _replay(self, gm: fx.GraphModule) -> list[dict[str, Any]]:
        return run_on_net(gm, _copied(self.inputs), self.world, self.net, groups=self.groups)

    def _numbers(self, node: fx.Node) -> tuple[int | float, ...]:
        """Return the numbers among the arguments of a node, and of small constants among them."""
        found = list(numbers_in(node.args, node.kwargs))
        for operand in node.all_input_nodes:
            # ``torch.tensor(4)`` in a program is a constant and a copy of it.
            if "lift_fresh" in str(operand.target):
                operand = operand.all_input_nodes[0]
            if operand.op == "get_attr":
                constant = held(self.gm, str(operand.target))
                if isinstance(constant, Tensor) and constant.numel() <= _MOST_NUMBERS:
                    found += constant.flatten().tolist()
        return tuple(found)


class _OnRanks:
    """Both sides on real ranks; each rank has a copy of the graph, or of the artefact."""

    def __init__(
        self,
        graph: Any,
        function: Callable[..., Any],
        inputs_of_rank: InputsOfRank,
        world: AnyWorld,
        groups: Groups | None,
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            raise VacuousCheck("in a world of one rank every graph serves all: take two or more")
        self.inputs: Inputs = inputs_of_ranks(inputs_of_rank, size)[rank]
        self.graph = graph
        # An ``ExportedProgram`` has ``__call__``, which only raises.
        if isinstance(graph, ExportedProgram) or not callable(graph):
            self.graph = adopt(graph)
        self.function = function

    def results(self) -> list[tuple["_Outcome", "_Outcome"]]:
        """Return what both sides give, by rank. Every rank must call it."""
        calls, states = [], []
        for side in (self.graph, self.function):
            with _kept_state(side) as state:
                calls.append(_call(side, self.inputs))
            states.append(state)
        flags = [call.gradient_flags() for call in calls]
        # A backward may communicate, so all ranks have one or none has.
        if all(gather_objects(flags[0] == flags[1] and any(flags[0]))):
            for call in calls:
                call.run_backward()
        own = [call.outcome(state) for call, state in zip(calls, states, strict=True)]
        return gather_objects((own[0], own[1]))

    def calls(self) -> list[Sides]:
        """Return the operators of both sides, by rank. Every rank must call it."""
        sides = self.graph, self.function
        return gather_objects(tuple(_calls(side, self.inputs) for side in sides))


def _without_guards(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph without what ``ExportedProgram.module()`` puts into it to check its inputs."""

    def is_guard(node: fx.Node) -> bool:
        return (
            node.op == "call_module"
            and type(gm.get_submodule(str(node.target))).__name__ == "GuardsFn"
        )

    if not any(map(is_guard, gm.graph.nodes)):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        if is_guard(node):
            graph.erase_node(node)
    return fx.GraphModule(gm, graph)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The results of one side on one rank.

    Attributes:
        results: copies of tensors and numbers, by their order.
        left: inputs that it has written, and the gradients that inputs then have.
        form: of each result the keys on its way, and what it is; None if nobody knows.
        written: names of tensors that it has written, and that are none of its inputs.
    """

    results: Results
    left: Results
    form: tuple[tuple[str, str], ...] | None
    written: list[str]


@dataclass(frozen=True, slots=True)
class _Called:
    """A call of a function: what it was given, the copies that it got, and its result.

    A function may put something into the containers among its inputs, so these are leaves.
    """

    given: list[Any]
    inputs: list[Any]
    result: Any

    def gradient_flags(self) -> list[bool]:
        """Return which results require gradients; none if no input does, or inputs have theirs."""
        inputs = self._trained_inputs()
        if not inputs or any(leaf.grad is not None for leaf in inputs):
            return []
        return [leaf.requires_grad for leaf in _tensors_of(self.result)]

    def run_backward(self) -> None:
        """Give inputs their gradients, of ones for each result: a graph may have a backward."""
        inputs = self._trained_inputs()
        outputs = [leaf for leaf in _tensors_of(self.result) if leaf.requires_grad]
        ones = [torch.ones_like(leaf) for leaf in outputs]
        # ``backward`` would add to the gradients of the user's module, too.
        gradients = torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
        for leaf, gradient in zip(inputs, gradients, strict=True):
            leaf.grad = gradient

    def outcome(self, written: list[str]) -> _Outcome:
        left = _left_in(self.inputs, self.given)
        return _Outcome(_named(self.result), left, _form(self.result), written)

    def _trained_inputs(self) -> list[Tensor]:
        return [leaf for leaf in _tensors_of(self.inputs) if leaf.requires_grad and leaf.is_leaf]


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _call(function: Callable[..., Any], inputs: Inputs) -> _Called:
    """Call a function with copies of the inputs, from the random states of now."""
    own = _copied(inputs, keep_grad=True)
    leaves = pytree.tree_leaves(own)
    with random_states_kept():
        result = function(**own) if isinstance(own, Mapping) else function(*own)
    return _Called(pytree.tree_leaves(inputs), leaves, result)


def _left_in(inputs: Sequence[Any], given: Sequence[Any]) -> Results:
    """Return copies of the inputs that are no longer as given, and of the gradients they have."""
    found: Results = {}
    for place, (own, before) in enumerate(zip(inputs, given, strict=True)):
        if not isinstance(own, Tensor):
            continue
        if not same_bytes(byte_view(own.detach()), byte_view(before.detach())):
            found[f"input_{place} after the call"] = copied(own.detach()).cpu()
        if own.grad is not None:
            found[f"gradient of input_{place}"] = copied(own.grad.detach()).cpu()
    return found


@contextmanager
def _kept_state(function: Any) -> Iterator[list[str]]:
    """Put back what a function writes besides its inputs, and then yield the names of that."""
    held_before = tensors_held_by(function)
    before: dict[str, Tensor] = {}
    for name, tensor in held_before.items():
        with suppress(NoBytes):
            before[name] = copied(tensor.detach())
    written: list[str] = []
    try:
        yield written
    finally:
        for name, own in tensors_held_by(function).items():
            if name not in before:
                continue  # a cache that is filled once
            if same_bytes(byte_view(own.detach()), byte_view(before[name])):
                continue
            written.append(name)
            with torch.no_grad():
                held_before[name].copy_(before[name])


def _refuse_written_state(*sides: _Outcome) -> None:
    for who, side in zip(("graph", "function"), sides, strict=True):
        if side.written:
            raise ValueError(
                f"the {who} writes {spell_some(side.written)}, which is none of its inputs, and so "
                "would not be compared: give it as an input"
            )


def _with_what_is_left(actual: _Outcome, expected: _Outcome) -> tuple[Results, Results]:
    """Return the results of both sides, with what they leave in their inputs."""
    own, wanted = dict(actual.results), dict(expected.results)
    own |= actual.left
    for name, tensor in expected.left.items():
        # A functional graph returns what the function writes.
        returned = [copy for copy in actual.results.values() if copy.shape == tensor.shape]
        same = [copy for copy in returned if same_bytes(byte_view(copy), byte_view(tensor))]
        if name in actual.left or not same:
            wanted[name] = tensor
    return own, wanted


def _form(result: Any) -> tuple[tuple[str, str], ...]:
    """Return the keys on the way to each leaf of a result, and what it is."""
    found = []
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        keys = [str(step.key) for step in path if isinstance(step, pytree.MappingKey)]
        what = f"a {type(leaf).__name__}"
        if isinstance(leaf, Tensor):
            what = "a tensor"
        elif leaf is None or isinstance(leaf, str | complex):
            what = repr(leaf)
        found.append((".".join(keys), what))
    return tuple(found)


def _other_form(actual: _Outcome, expected: _Outcome, first: _Outcome, rank: int) -> str:
    """Return how the results are other things than those of rank 0, or than the graph's; or ""."""
    if expected.form != first.form:
        return (
            f"on rank {rank} the function returns {_spell_form(expected)}, on rank 0 "
            f"{_spell_form(first)}: no graph gives both"
        )
    own, wanted = actual.form or (), expected.form or ()
    # A graph of some tracers has no keys, and no places without a tensor.
    if len(own) != len(wanted):
        return ""
    kinds = [[what for _, what in form] for form in (own, wanted)]
    keys = [[key for key, _ in form] for form in (own, wanted)]
    if kinds[0] == kinds[1] and (keys[0] == keys[1] or not any(keys[0]) or not any(keys[1])):
        return ""
    return f"the graph returns {_spell_form(actual)}, the function {_spell_form(expected)}"


def _spell_form(outcome: _Outcome) -> str:
    spelled = []
    for keys, what in outcome.form or ():
        spelled.append(f"{keys}: {what}" if keys else what)
    return f"({', '.join(spelled)})"


def _calls(function: Callable[..., Any], inputs: Inputs) -> list[Call]:
    own = _copied(inputs, keep_grad=True)
    with random_states_kept(), kept_calls(views=True) as calls:
        function(**own) if isinstance(own, Mapping) else function(*own)
    return calls.calls


def _copied(inputs: Any, *, keep_grad: bool = False) -> Any:
    leaves, structure = pytree.tree_flatten(inputs)
    return pytree.tree_unflatten(copies(leaves, keep_grad=keep_grad), structure)


def _named(result: Any) -> Results:
    """Return copies of the tensors and numbers of a result on the host, by their order."""
    found: Results = {}
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, int | float):
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, Tensor):
            found[f"output_{len(found)}"] = copied(leaf.detach()).cpu()
    return found


def _gives_a_tensor(node: fx.Node) -> bool:
    """Return whether a node computes or shows one tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    if not (gives_values(node.target) or node.target.is_view):
        return False
    return [str(result.type) for result in schema(node.target).returns] == ["Tensor"]


def _with_output(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a copy of a graph that returns the values of these nodes."""
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
    graph.output(tuple(copy_of[node] for node in nodes))
    return fx.GraphModule(gm, graph)


def _first_constant(calls: Sequence[Sides]) -> list[str]:
    """Name the first operator whose value is another, on the rank where it is the first.

    A collective carries what is wrong on one rank to all, so that they differ later.
    """
    found: dict[int, tuple[int, Call, Call]] = {}
    for rank, (by_graph, by_function) in enumerate(calls):
        first = _first_differing(by_graph, by_function)
        if first is not None:
            found[rank] = first
    if not found:
        for rank, (by_graph, by_function) in enumerate(calls):
            left = Counter(call.what for call in by_graph)
            for call in by_function:
                left[call.what] -= 1
                if left[call.what] < 0 and not call.is_collective:
                    return [f"rank {rank} calls {call}, which the graph does not"]
        return ["no operator was seen whose value is another"]

    rank, (place, call, own) = min(found.items(), key=lambda item: item[1][0])
    lines = [f"first operator whose value is another, on rank {rank}: {own}"]
    if call.numbers != own.numbers:
        lines.append(f"  its numbers: {_spell(call)} in the graph, {_spell(own)} on rank {rank}")
    if len(found) == len(calls) and all(first[0] == place for first in found.values()):
        lines.append(
            "  this is so on every rank, also on the one that traced: the graph is of another "
            "program, or rounds otherwise"
        )
    return lines


def _first_differing(
    by_graph: Sequence[Call], by_function: Sequence[Call]
) -> tuple[int, Call, Call] | None:
    counts = Counter(call.what for call in by_graph)
    own_counts = Counter(call.what for call in by_function)
    own_calls = _by_number(by_function)
    for place, (key, call) in enumerate(_by_number(by_graph).items()):
        # Where one side calls an operator more often, nobody knows which calls are one.
        if call.is_collective or counts[call.what] != own_counts[call.what]:
            continue
        own = own_calls[key]
        for x, y in zip(call.outputs, own.outputs, strict=False):
            if x.shape != y.shape or not same_bytes(byte_view(x), byte_view(y)):
                return place, call, own
    return None


def _by_number(calls: Sequence[Call]) -> dict[tuple[str, int], Call]:
    found: dict[tuple[str, int], Call] = {}
    counts: Counter[str] = Counter()
    for call in calls:
        counts[call.what] += 1
        found[call.what, counts[call.what]] = call
    return found


def _spell(call: Call) -> str:
    return spell_some(call.numbers, _MOST_NUMBERS) or "none"
