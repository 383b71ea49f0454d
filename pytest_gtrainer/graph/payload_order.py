"""The order of parameters inside a bucket: eager FSDP2's, from parameter names alone.

FSDP2 manages parameters in the order of ``_get_managed_modules`` (torch 2.13,
``torch/distributed/fsdp/_fully_shard/_fsdp_init.py``): modules depth first, children before
a module's own parameters, own parameters in registration order. ``named_parameters`` lists
own parameters first, so the two differ as soon as a module has both; packing in the wrong
one changes bits on real networks (D2, D3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pytest_gtrainer.graph.bucket_plan import Bucket
from pytest_gtrainer.graph.collectives import Member

ORDERS = ("managed", "registration", "execution")
PayloadOrder = str | Sequence[str]
Key = Callable[[Bucket, Member], tuple[int, ...]]


def managed_order(parameter_fqns: Iterable[str]) -> list[str]:
    """All parameters of a model in FSDP2's order, given in ``named_parameters`` order.

    In that order modules appear in registration order, which suffices to know the tree. Since
    the walk is depth first, the order within any one module is a contiguous part of it.

    >>> managed_order(["scale", "w.weight", "w.bias", "norm.weight"])
    ['w.weight', 'w.bias', 'norm.weight', 'scale']
    """
    tree = _Node()
    for fqn in parameter_fqns:
        tree.add(fqn.split("."), fqn)
    return list(tree.walk())


class _Node:
    """A module: its children and its own parameters, each in order of first appearance."""

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.own: list[str] = []

    def add(self, path: list[str], fqn: str) -> None:
        if len(path) == 1:
            self.own.append(fqn)
        else:
            self.children.setdefault(path[0], _Node()).add(path[1:], fqn)

    def walk(self) -> Iterable[str]:
        for child in self.children.values():
            yield from child.walk()
        yield from self.own


def root_index(bucket: Bucket, parameter: str) -> int:
    """Which of the bucket's roots holds the parameter; behind all of them if none does.

    >>> root_index(Bucket(0, ("norm", "lm_head"), ("norm", "lm_head")), "lm_head.weight")
    1
    """
    for index, fqn in enumerate(bucket.roots):
        if not fqn or parameter.startswith(f"{fqn}."):
            return index
    return len(bucket.roots)


def sort_key(
    order: PayloadOrder,
    parameter_fqns: Sequence[str],
    graph_position: Callable[[Member], int],
    managed: Sequence[str] | None = None,
) -> Key:
    """The key that puts a bucket's members into payload order.

    ``parameter_fqns`` are in registration order; ``managed`` is FSDP2's order where a tracer that
    saw the modules wrote it down, else it follows from the names.

    ``order`` is "managed" (eager FSDP2's), "registration" (``named_parameters``), "execution"
    (the graph's), or a list of parameter FQNs. Parameters unknown to it come last, in graph order.

    Raises:
        ValueError: another word.
    """
    if order == "execution":
        return lambda bucket, member: (graph_position(member),)
    if isinstance(order, str) and order not in ORDERS:
        raise ValueError(f"payload_order={order!r}: expected {', '.join(ORDERS)}, or a list of parameter FQNs")
    if isinstance(order, str):
        fqns = list(managed or managed_order(parameter_fqns)) if order == "managed" else list(parameter_fqns)
    else:
        fqns = list(order)
    rank = {fqn: place for place, fqn in enumerate(fqns)}

    def key(bucket: Bucket, member: Member) -> tuple[int, ...]:
        place = rank.get(member.parameter, len(rank))
        root = root_index(bucket, member.parameter) if order == "managed" else 0
        return (root, place, graph_position(member))

    return key
