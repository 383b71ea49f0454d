"""From a node's arguments, with nodes in them, to those of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pytest_gtrainer._torch.operators import schema

Arguments = tuple[Sequence[Any], dict[str, Any]]
Binder = Callable[[Sequence[Any]], Arguments]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the value of the node's input with this number."""

    index: int


def binder(node: fx.Node) -> Binder:
    """A function from the values of ``node.all_input_nodes`` to arguments and keywords."""
    numbers = {given: index for index, given in enumerate(node.all_input_nodes)}
    args = fx.node.map_arg(node.args, lambda given: _Slot(numbers[given]))
    kwargs = fx.node.map_arg(node.kwargs, lambda given: _Slot(numbers[given]))
    places = [(place, arg.index) for place, arg in enumerate(args) if isinstance(arg, _Slot)]
    if len(places) == _count(args) + _count(kwargs):
        return _flat_binder(args, dict(kwargs), places)
    return lambda values: (_filled(args, values), _filled(dict(kwargs), values))


def _flat_binder(args: Any, kwargs: dict[str, Any], places: list[tuple[int, int]]) -> Binder:
    """Faster, for arguments that are nodes themselves: most."""
    template = list(args)

    def bind(values: Sequence[Any]) -> Arguments:
        filled = template.copy()
        for place, index in places:
            filled[place] = values[index]
        return filled, kwargs

    return bind


def _count(tree: Any) -> int:
    if isinstance(tree, _Slot):
        return 1
    if isinstance(tree, slice):
        return _count((tree.start, tree.stop, tree.step))
    if isinstance(tree, dict):
        return _count(tuple(tree.values()))
    return sum(map(_count, tree)) if isinstance(tree, list | tuple) else 0


def _filled(tree: Any, values: Sequence[Any]) -> Any:
    if isinstance(tree, _Slot):
        return values[tree.index]
    if isinstance(tree, list):
        return [_filled(item, values) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_filled(item, values) for item in tree)
    if isinstance(tree, dict):
        return {key: _filled(item, values) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*_filled((tree.start, tree.stop, tree.step), values))
    return tree


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by the names in its schema."""
    named = {argument.name: given for argument, given in zip(schema(node.target).arguments, node.args, strict=False)}
    return {**named, **node.kwargs}
