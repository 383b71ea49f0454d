"""What a node is to the schedule.

- A *launch* starts a collective, a *wait* ends it.
- *Packing* serves one launch only (the cast of a parameter, the copy into a bucket's payload) or one
  wait (the copies out of it), and stands next to it: it is shown as a part of it.
- A *free* node costs nothing: a view, the arithmetic of sizes, a guard.
- All others compute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import overload
from pytest_gtrainer.graph.nodes import is_view, is_wait
from pytest_gtrainer.graphtext.operators import operator_of
from pytest_gtrainer.graphtext.scopes import Scope, is_computed, is_item

_GUARDS = frozenset({
    "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size"
})  # fmt: skip
_SYNCS = frozenset({"_local_scalar_dense", "item"})
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_HEAVY = re.compile(r"mm$|attention|convolution")


def is_launch(node: fx.Node) -> bool:
    """Whether a node communicates; torch's packing operators name a group, too, and do not."""
    operator = operator_of(node)
    return bool(operator.group_arguments) and not operator.text.startswith("bucketing.")


def is_free(node: fx.Node) -> bool:
    """Whether a node costs nothing; an operator that copies only where it must counts as a view."""
    short = operator_of(node).short
    if short in _SYNCS:
        return False
    if isinstance(node.meta.get("val"), _NUMBERS) or short in _GUARDS:
        return True
    return node.op == "call_function" and is_view(node.target)


def weight(short: str) -> int:
    """How early an operator is named among those of a stretch: waits for the device, products, others."""
    return 0 if short in _SYNCS else 1 if _HEAVY.search(short) else 2


def packing(nodes: Sequence[fx.Node], scopes: Mapping[fx.Node, Scope]) -> dict[fx.Node, fx.Node]:
    """The launch or wait that a node is shown as a part of."""
    return _packed_before_launches(nodes, scopes) | _unpacked_after_waits(nodes, scopes)


def _packed_before_launches(nodes: Sequence[fx.Node], scopes: Mapping[fx.Node, Scope]) -> dict[fx.Node, fx.Node]:
    from_inputs = _computed_from_inputs(nodes)
    serves: dict[fx.Node, fx.Node] = {}
    near: set[fx.Node] = set()
    for node in reversed(nodes):
        if is_launch(node):
            near.add(node)
            continue
        served = {serves.get(user, user) for user in users_of(node)}
        launch = served.pop() if len(served) == 1 else None
        if launch in near and (node in from_inputs or _same_bucket(node, launch, scopes)):
            serves[node] = launch
        elif not is_free(node):
            near.clear()
    return serves


def _unpacked_after_waits(nodes: Iterable[fx.Node], scopes: Mapping[fx.Node, Scope]) -> dict[fx.Node, fx.Node]:
    serves: dict[fx.Node, fx.Node] = {}
    near: set[fx.Node] = set()
    for node in nodes:
        if is_wait(node):
            near.add(node)
            continue
        served = {serves.get(operand, operand) for operand in operands_of(node)}
        wait = served.pop() if len(served) == 1 else None
        if wait in near and _same_bucket(node, wait, scopes):
            serves[node] = wait
        elif not is_free(node):
            near.clear()
    return serves


def packed_tensors(serves: Mapping[fx.Node, fx.Node]) -> Counter[fx.Node]:
    """How many tensors are packed into each launch."""
    into = {
        (operand, event)
        for node, event in serves.items()
        for operand in node.all_input_nodes
        if serves.get(_source(operand)) is not event
    }
    return Counter(event for _, event in into)


def _same_bucket(node: fx.Node, event: fx.Node | None, scopes: Mapping[fx.Node, Scope]) -> bool:
    return event is not None and scopes[node].is_bucket and scopes[node] == scopes[event]


def _computed_from_inputs(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that nothing but graph inputs has gone into, and no collective."""
    found: set[fx.Node] = set()
    for node in nodes:
        operands = operands_of(node)
        known = all(operand in found or operand.op == "placeholder" for operand in operands)
        if operands and known and not is_launch(node) and not is_wait(node):
            found.add(node)
    return found


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The values that go into a node, looking through the picking of outputs."""
    return [_source(operand) for operand in node.all_input_nodes]


def _source(node: fx.Node) -> fx.Node:
    while is_item(node):
        node = node.all_input_nodes[0]
    return node


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a value goes into, looking through the picking of outputs."""
    for user in node.users:
        yield from users_of(user) if is_item(user) else [user]


def payload_of(launch: fx.Node) -> list[torch.Tensor]:
    """What a collective moves: its result, or its operands where these are known to be larger."""
    sent = [tensor for operand in launch.all_input_nodes for tensor in _tensors(operand.meta.get("val"))]
    received = _tensors(launch.meta.get("val"))
    sizes = [_known_elements(tensors) for tensors in (sent, received)]
    return sent if None not in sizes and sizes[0] > sizes[1] else received  # type: ignore[operator]


def _tensors(value: Any) -> list[torch.Tensor]:
    found = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _known_elements(tensors: Iterable[torch.Tensor]) -> int | None:
    sizes = [tensor.numel() for tensor in tensors]
    return sum(sizes) if all(type(size) is int for size in sizes) else None


def group_of(launch: fx.Node) -> str | None:
    """The name of the process group that a collective communicates in."""
    return _argument(launch, "group_name")


def reduction_of(launch: fx.Node) -> str | None:
    """``sum``, ``avg``, ... of a collective that reduces."""
    return _argument(launch, "reduce_op")


def _argument(node: fx.Node, name: str) -> str | None:
    arguments = overload(node.target).arguments
    place = arguments.index(name) if name in arguments else len(node.args)
    value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return value if isinstance(value, str) else None


def communicates(gm: fx.GraphModule) -> bool:
    """Whether a graph, or one inside it, launches a collective."""
    return any(is_computed(node) and (is_launch(node) or any(bodies_of(gm, node))) for node in gm.graph.nodes)


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs inside the graph that a node runs and that communicate."""
    for operand in node.all_input_nodes:
        body = attrgetter(str(operand.target))(gm) if operand.op == "get_attr" else None
        if isinstance(body, fx.GraphModule) and communicates(body):
            yield body


def computed_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that have a line of their own in the full text."""
    return [node for node in gm.graph.nodes if is_computed(node)]
