"""One graph for all ranks: is the first rank's also the last one's? (S4)

Ranks that are neither are taken to be like one of them: shards, pads and offsets that depend on the rank
show at one of the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.interpreter import ALL_GATHER_OUT, PRE_BUCKET_ALL_GATHER
from pytest_gtrainer._torch.operators import OpOverload, schema
from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.interpreter.groups import GROUP, RankGraph, group_name
from pytest_gtrainer.worlds.simulated.interpreter.naming import described, input_name
from pytest_gtrainer.worlds.simulated.interpreter.operators import attribute

_NOTHING = "nothing more"


def check_same_on_all(first: RankGraph, last: RankGraph) -> None:
    """Refuse a graph that is another on the last rank than on the first.

    Names of nodes and of groups may differ; groups must stand for the same dimension of the mesh.

    Raises:
        DependsOnRank: naming the first node that differs.
    """
    pairs = zip_longest(_lines(first, first.gm), _lines(last, last.gm), fillvalue=(_NOTHING, ""))
    for (ours, where), (theirs, elsewhere) in pairs:
        if ours != theirs:
            raise DependsOnRank(
                f"the graph depends on the rank, first at {where or elsewhere}: rank {first.rank} has {ours}, "
                f"rank {last.rank} has {theirs}; a simulated world replays one graph on all ranks: choose sizes that "
                "the ranks divide, and code that does not ask for its rank"
            )


def _lines(graph: RankGraph, gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every node without what may differ between ranks, and in which place it stands."""
    numbers = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node, index in numbers.items():
        where = f"node {prefix}{index}, {input_name(node) if node.op == 'placeholder' else described(node)}"
        yield _line(graph, gm, node, numbers), where
        module = attribute(gm, str(node.target)) if node.op in ("get_attr", "call_module") else None
        if isinstance(module, fx.GraphModule):
            yield from _lines(graph, module, f"{prefix}{index}.")


def _line(graph: RankGraph, gm: fx.GraphModule, node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    target = "" if node.op in ("placeholder", "output") else str(node.target)
    if node.op == "get_attr":
        target = _constant(attribute(gm, str(node.target)))
    arguments = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: _leaf(leaf, numbers))
    return f"{node.op} {target}{_without_rank(graph, node, arguments)} -> {_value(node.meta.get('val'))}"


def _leaf(leaf: Any, numbers: dict[fx.Node, int]) -> Any:
    return f"%{numbers[leaf]}" if isinstance(leaf, fx.Node) else leaf


def _without_rank(graph: RankGraph, node: fx.Node, arguments: Any) -> Any:
    """A group by its ranks everywhere; the place of the own part in a gather's buffer by that."""
    if not isinstance(node.target, OpOverload):
        return arguments
    args = list(arguments[0])
    for place, argument in enumerate(schema(node.target).arguments[: len(args)]):
        if argument.name == GROUP:
            args[place] = graph.partitions.get(args[place], args[place])
        elif argument.name == "rank" and schema(node.target).name == PRE_BUCKET_ALL_GATHER:
            args[place] = "own rank"
    if _is_own_part(graph, node):
        args[2:] = ["own part"]
    return args, arguments[1]


def _is_own_part(graph: RankGraph, node: fx.Node) -> bool:
    """Whether this cuts the rank's own place out of a buffer that a gather fills."""
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) != 4:
        return False
    buffer, _, start, stop = node.args
    for user in buffer.users:
        if user.target is ALL_GATHER_OUT and user.kwargs.get("out") is buffer:
            own = next(ranks for ranks in graph.partitions[group_name(user)] if graph.rank in ranks)
            return bool(start == own.index(graph.rank) * (stop - start))
    return False


def _constant(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_value(value)} {value.tolist()}"
    return type(value).__name__


def _value(value: Any) -> str:
    """
    >>> _value((torch.ones(2, 3), 1, None))
    '(float32[2, 3], 1, None)'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    return str(value)
