"""The view ``schedule``: collectives, their waits, and how much is computed between them.

Sections are those of the full text, and a collective has the name that it has there:

- ``launch(bucket(layers[i+1]).all_gather_into_tensor, fsdp, bf16[43136], bytes=86_272,
  tensors=9)``: the collective, its group, the larger of what one rank puts in and gets out, and how
  many tensors are packed into it if several;
- ``wait(bucket(L).all_gather_into_tensor)``: its result is needed from here on;
- ``compute(L, mm*7, mul*18, ..., ops=59)``: the operators up to the next launch or wait, and the
  module of all of them;
- ``call(L.moe, cond, cond_graph_0)``: runs an inner graph that contains collectives.

*Packing* is work for one launch only (the cast of a parameter, the copy into a bucket's payload) or
for one wait (the copies out of it), next to it in the schedule. It has no line of its own. A *free*
node costs nothing: a view, the arithmetic of sizes, a guard. All others compute.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.graph.collectives import group_of, hides, is_fused, ranks_given, reduction_of
from pytest_gtrainer.graph.nodes import bodies_of, is_view, is_wait, spell_dtype, tensors_in
from pytest_gtrainer.graph.packing import sent_operands
from pytest_gtrainer.graphtext.folding import INDENT, fold
from pytest_gtrainer.graphtext.header import EMPTY
from pytest_gtrainer.graphtext.operators import operator_of, spell_ranks, word
from pytest_gtrainer.graphtext.scopes import is_computed, is_item, users_of
from pytest_gtrainer.graphtext.sections import (
    Line,
    Scope,
    Section,
    common_parent,
    section_keys,
    stretches,
)
from pytest_gtrainer.graphtext.spelling import Backed, Speller

_GUARDS = frozenset(
    {
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)
_SYNCS = frozenset({"_local_scalar_dense", "item"})
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_HEAVY = re.compile(r"mm$|attention|convolution")


def is_launch(node: fx.Node) -> bool:
    """Return whether a node starts a collective, a send or a receive."""
    return operator_of(node).launches


def is_free(node: fx.Node) -> bool:
    """Return whether a node costs nothing.

    An operator that copies only if it must counts as a view.
    """
    short = operator_of(node).short
    # The result of some collectives is a view of their operand, and that of a sync is a number.
    if short in _SYNCS or is_launch(node):
        return False
    if isinstance(node.meta.get("val"), _NUMBERS) or short in _GUARDS:
        return True
    return node.op == "call_function" and is_view(node.target)


def packing(nodes: Sequence[fx.Node], scopes: Mapping[fx.Node, Scope]) -> dict[fx.Node, fx.Node]:
    """Return the launch or wait that each packing node works for."""
    # Only graph inputs, and no collectives, have gone into these nodes.
    from_inputs: set[fx.Node] = set()
    for node in nodes:
        computed = {operand for operand in operands_of(node) if operand.op != "placeholder"}
        is_event = is_launch(node) or is_wait(node)
        if node.all_input_nodes and not is_event and computed <= from_inputs:
            from_inputs.add(node)

    def same_bucket(node: fx.Node, event: fx.Node) -> bool:
        return scopes[node].is_bucket and scopes[node] == scopes[event]

    def packs(node: fx.Node, launch: fx.Node) -> bool:
        return node in from_inputs or same_bucket(node, launch)

    before = _serving(reversed(nodes), is_launch, users_of, packs)
    return before | _serving(nodes, is_wait, operands_of, same_bucket)


def _serving(
    nodes: Iterable[fx.Node],
    is_event: Callable[[fx.Node], bool],
    neighbours: Callable[[fx.Node], Iterable[fx.Node]],
    may_serve: Callable[[fx.Node, fx.Node], bool],
) -> dict[fx.Node, fx.Node]:
    """Return by node the event (launch or wait) that it serves.

    All neighbours of such a node are this event, or serve it themselves. Only nodes that serve and
    free ones may stand between the node and its event.
    """
    serves: dict[fx.Node, fx.Node] = {}
    near: set[fx.Node] = set()
    for node in nodes:
        if is_event(node):
            near.add(node)
            continue
        served = {serves.get(other, other) for other in neighbours(node)}
        event = served.pop() if len(served) == 1 else None
        if event in near and may_serve(node, event):
            serves[node] = event
        elif not is_free(node):
            near.clear()

    return serves


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the values that go into a node; items are looked through."""
    return list(map(_source, node.all_input_nodes))


def _source(node: fx.Node) -> fx.Node:
    while is_item(node):
        node = node.all_input_nodes[0]
    return node


def payload_of(launch: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a collective moves: its result, or operands known to be larger.

    Returns an empty list for a fused collective, whose operands are those of its matmul.
    """
    if is_fused(launch):
        return []
    sent = tensors_in([node.meta.get("val") for node in sent_operands(launch)])
    received = tensors_in(launch.meta.get("val"))
    put_in = sum(tensor.numel() for tensor in sent)
    got_out = sum(tensor.numel() for tensor in received)
    # Comparing symbolic sizes would add a guard to the graph's shape environment.
    if type(put_in) is int and type(got_out) is int and put_in > got_out:
        return sent
    return received


def communicates(gm: fx.GraphModule) -> bool:
    """Return whether a graph, or one inside it, launches a collective."""
    for node in filter(is_computed, gm.graph.nodes):
        if is_launch(node) or any(map(communicates, bodies_of(gm, node).values())):
            return True
    return False


_MOST_KINDS, _MOST_OWNERS = 5, 2


def draw(
    gm: fx.GraphModule, mesh: Mapping[str, int], outer: Backed | None = None
) -> tuple[list[str], list[Section]]:
    """Return the lines at the head and the sections of a schedule.

    The head has groups, symbols and the bodies that communicate. Symbols of a body are those of its
    ``outer`` graph.
    """
    backed = outer or Backed()
    speller = Speller(gm, mesh, backed, most_owners=_MOST_OWNERS)
    called: dict[fx.Node, list[str]] = {}  # names of these bodies
    names: dict[str, str] = {}  # by the body's text, so equal bodies have one name
    for node in speller.scopes.computed:
        for body in filter(communicates, bodies_of(gm, node).values()):
            definitions, sections = draw(body, mesh, backed)
            content = "\n".join(INDENT + line for line in [*definitions, *fold(sections)])
            name = names.setdefault(content, word(f"{operator_of(node).short}_graph_{len(names)}"))
            called.setdefault(node, []).append(name)

    sections = list(_Schedule(speller, called).sections())
    head = list(map(str, speller.groups.values()))
    if outer is None:
        head += backed.definitions()
    for content, name in names.items():
        head += [f"def {name}():", *content.splitlines()]
    if not head and not sections and outer is None:
        head.append(EMPTY["schedule"])
    return head, sections


class _Schedule:
    """Spells the lines of one graph, as seen from the section that was entered last."""

    def __init__(self, speller: Speller, called: Mapping[fx.Node, list[str]]) -> None:
        self._speller, self._called = speller, called
        self._nodes, self._scopes = speller.scopes.computed, speller.scopes.of
        self._serves = packing(self._nodes, self._scopes)
        packed = set()
        for node, event in self._serves.items():
            for operand in node.all_input_nodes:
                if self._serves.get(_source(operand)) is not event:
                    packed.add((operand, event))
        # the number of tensors that are packed for each launch
        self._packed = Counter(event for _, event in packed)

    def sections(self) -> Iterable[Section]:
        shown = [node for node in self._nodes if node not in self._serves and not is_free(node)]
        movable = []
        for node in shown:
            operator = operator_of(node)
            is_movable = self._scopes[node].is_movable or operator.is_movable
            movable.append(is_movable or operator.launches)
        keys = section_keys([self._scopes[node].key for node in shown], movable)
        for key, here in stretches(keys):
            self._speller.enter_section(key)
            lines = []
            for _, nodes in itertools.groupby(shown[here], self._stretch):
                lines.append(Line("", self._line(list(nodes))))
            yield Section(key, tuple(lines))

    def _stretch(self, node: fx.Node) -> Hashable:
        """Return a value that is equal for neighbours that share a line."""
        if is_wait(node):
            return "wait", operands_of(node)[0]
        if is_launch(node) or node in self._called:
            return node
        scope = self._scopes[node]
        if scope.is_bucket:
            return scope.space, scope.owners
        return scope.space, scope.layer or scope.owners[0].partition(".")[0]

    def _line(self, nodes: Sequence[fx.Node]) -> str:
        """Return the line of a launch, a wait or a call, or of several operators in a row."""
        first = nodes[0]
        if is_launch(first):
            return f"launch({', '.join(self._launch(first))})"
        if is_wait(first):
            return f"wait({self._speller.reference(operands_of(first)[0])})"
        scopes = [self._scopes[node] for node in nodes]
        if first in self._called:
            bodies = ", ".join(self._called[first])
            return f"call({self._module(scopes)}, {operator_of(first).short}, {bodies})"

        counts = Counter(operator_of(node).short for node in nodes)

        def weight(short: str) -> tuple[bool, bool, int]:
            # Waits of the host for the device come first, then products of matrices.
            return short not in _SYNCS, _HEAVY.search(short) is None, -counts[short]

        kinds = sorted(counts, key=weight)
        operators = []
        for short in kinds[:_MOST_KINDS]:
            operators.append(word(short))
            if counts[short] > 1:
                operators[-1] += f"*{counts[short]}"

        if len(kinds) > _MOST_KINDS:
            operators.append("...")
        return f"compute({self._module(scopes)}, {', '.join(operators)}, ops={len(nodes)})"

    def _launch(self, node: fx.Node) -> Iterable[str]:
        """Yield the name, the group, the payload of each dtype, and the sums of a launch.

        A payload is ``bf16[256, 64]``, or the number of all elements of several tensors.
        """
        if hides(node):
            raise ValueError(
                f"{node.name} is {operator_of(node).text}, a collective in place: its graph holds "
                "the group and the reduction as objects without a text form; trace "
                "torch.distributed._functional_collectives instead"
            )

        yield self._speller.reference(node)
        if (group := group_of(node)) is not None:
            yield self._speller.groups[group].symbol
        elif (ranks := ranks_given(node)) is not None:
            yield f"group({spell_ranks(ranks)})"

        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        size: Any = 0
        payload = payload_of(node)
        for tensor in payload:
            by_dtype[tensor.dtype].append(tensor)
            size += tensor.numel() * tensor.element_size()
        for dtype, alike in by_dtype.items():
            shape: Sequence[Any] = alike[0].shape
            if len(alike) > 1:
                # ``numel`` of a tensor keeps symbols; that of a ``torch.Size`` specializes them.
                shape = [sum(tensor.numel() for tensor in alike)]
            yield f"{spell_dtype(dtype)}[{', '.join(map(self._speller.size, shape)) or '()'}]"

        if (reduction := reduction_of(node)) is not None:
            yield f'op="{reduction}"'
        if type(size) is not int:
            yield f"bytes={self._speller.size(size)}"
        elif payload:
            yield f"bytes={size:_}"

        if (tensors := max(len(payload), self._packed[node])) > 1:
            yield f"tensors={tensors}"

    def _module(self, scopes: Sequence[Scope]) -> str:
        """Return the bucket, or the module that all of the scopes have in common."""
        if scopes[0].is_bucket:
            return self._speller.heading(scopes[0])
        parent = common_parent([scope.owners[0] for scope in scopes])
        return self._speller.heading(Scope((parent,), scopes[0].space))
