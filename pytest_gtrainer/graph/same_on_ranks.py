"""Compare the graphs of several ranks, and find the first line in which they differ.

Ranks run one program, but their graphs name groups of their own and may hold numbers of their own
rank. A *line* is what a node says without those: ``node_lines`` has one for each node,
``collective_lines`` one for each launch. Lines of ranks are equal if the ranks may exchange their
graphs, or issue the same collectives.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.passes import ALL_GATHER_OUT, PRE_BUCKET_ALL_GATHER
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer._torch.values import FakeTensor, OpOverload, schema
from pytest_gtrainer.graph.collectives import group_of, launches
from pytest_gtrainer.graph.nodes import argument_of, graphs_in, node_fqn

Partition = tuple[tuple[int, ...], ...]
"""Every rank's group along one dimension of the device mesh."""
GROUP = "group_name"
"""The parameter by which torch's operators take their process group."""
_MOST_CHARACTERS = 1000  # of the numbers of a constant; every rank keeps its lines


class Line(NamedTuple):
    """The text of a node, or of a launch, and where it stands."""

    text: str
    where: str


class Difference(NamedTuple):
    """The first line, by its place, in which the graph of ``other`` is not that of ``rank``."""

    place: int
    rank: int
    line: Line
    other: int
    other_line: Line


def first_difference(lines_of_rank: Mapping[int, Iterable[Line]]) -> Difference | None:
    """Compare the lines of every rank with those of the first one; None if all are equal."""
    nothing = Line("nothing more", "")
    (rank, lines), *others = lines_of_rank.items()
    lines = list(lines)
    for other, other_lines in others:
        pairs = zip_longest(lines, other_lines, fillvalue=nothing)
        for place, (line, other_line) in enumerate(pairs):
            if line.text != other_line.text:
                return Difference(place, rank, line, other, other_line)
    return None


def nodes_within(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph, and of the graphs in it."""
    for module in graphs_in(gm):
        yield from module.graph.nodes


def describe_input(node: fx.Node) -> str:
    """Name a placeholder: "parameter layers.0.wq.weight" where the tracer wrote that down."""
    known = node.meta.get("gt_input")
    if known:
        return f"{known['kind']} {known['fqn']}"
    return f"input {node.name}"


def describe_node(node: fx.Node) -> str:
    """Name a node by its operator and module."""
    return f"{node.name} ({', '.join(filter(None, (str(node.target), node_fqn(node))))})"


def node_lines(
    gm: fx.GraphModule, rank: int, partitions: Mapping[str, Partition], prefix: str = ""
) -> Iterator[Line]:
    """Yield the lines of all nodes, those of graphs inside the graph after the node that holds
    them.

    Args:
        rank: the rank that traced the graph.
        partitions: by the name of a group in this graph, every rank's group in its place.
    """
    numbers = {node: f"%{index}" for index, node in enumerate(gm.graph.nodes)}
    for index, node in enumerate(gm.graph.nodes):
        # The names of placeholders are the tracer's own; what they hold stands in ``name``.
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        held = None
        if node.op in ("get_attr", "call_module"):
            held = attrgetter(target)(gm)
        if node.op == "get_attr":
            # Constants have names by number; their values are what must be equal.
            target = type(held).__name__
            if isinstance(held, Tensor):
                target = f"{value_text(held)} {_numbers_text(held)}"

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        if isinstance(node.target, OpOverload):
            args = _without_rank(node, args, rank, partitions)
        name = describe_input(node) if node.op == "placeholder" else describe_node(node)
        text = f"{node.op} {target}{(args, kwargs)} -> {value_text(node.meta.get('val'))}"
        yield Line(text, f"node {prefix}{index}, {name}")
        if isinstance(held, fx.GraphModule):
            yield from node_lines(held, rank, partitions, f"{prefix}{index}.")


def _numbers_text(constant: Tensor) -> str:
    """Return the elements of a constant, or a digest of them if they are many."""
    if isinstance(constant, FakeTensor) or constant.is_meta:
        return "without numbers"
    text = str(constant.tolist())
    if len(text) > _MOST_CHARACTERS:
        text = hashlib.sha256(text.encode()).hexdigest()
    return text


def _without_rank(
    node: fx.Node, args: Sequence[Any], rank: int, partitions: Mapping[str, Partition]
) -> list[Any]:
    """Replace a group by the groups of all ranks, and the place of the own part in a gather's
    buffer by "own part".
    """
    found = list(args)
    for place, argument in enumerate(schema(node.target).arguments[: len(found)]):
        if argument.name == GROUP:
            found[place] = partitions.get(found[place], found[place])
        elif argument.name == "rank" and schema(node.target).name == PRE_BUCKET_ALL_GATHER:
            found[place] = "own rank"

    if node.target is torch.ops.aten.slice.Tensor and len(node.args) == 4:
        buffer, _, start, stop = node.args
        for user in buffer.users:
            if user.target is ALL_GATHER_OUT and user.kwargs["out"] is buffer:
                groups = partitions[argument_of(user, GROUP)]
                own = next(ranks for ranks in groups if rank in ranks)
                # An all-gather in place reads the own part from the buffer that it fills.
                if start == own.index(rank) * (stop - start):
                    found[2:] = ["own part"]

    return found


def collective_lines(gm: fx.GraphModule) -> Iterator[Line]:
    """Yield a line for each launch: operator, dtype, number of ranks, and where the payload comes
    from.

    Extents count in buckets only: sizes that data decides, and shards that are not even, differ by
    right.
    """
    for node in gm.graph.nodes:
        if not launches(node.target):
            continue
        value = node.meta["val"]
        if isinstance(value, list | tuple) and value:
            value = value[0]
        dtype = str(getattr(value, "dtype", "no")).removeprefix("torch.")
        shape, where = "any shape", node_fqn(node)
        if "fsdp_bucket" in node.meta:
            shape = str(list(value.shape))
            where = "+".join(node.meta["fsdp_bucket"]["plan_fqns"])
        group = group_of(node)
        over = "a group that the graph does not name"
        if group is not None:
            over = f"{len(group_ranks(group))} ranks"
        yield Line(f"{node.target} {dtype} {shape} of {where} over {over}", node.name)


def dtype_text(tensor: Tensor) -> str:
    """Return a dtype without its module: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def value_text(value: Any) -> str:
    """Return dtypes and shapes of what a node gives.

    >>> value_text((torch.ones(2, 3), 1, None))
    '(float32[2, 3], 1, None)'
    """
    if isinstance(value, Tensor):
        return f"{dtype_text(value)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(value_text, value)) + ")"
    return str(value)
