"""Run any graph, or any eager function, on all ranks of a simulated world: for code that no ``TrainConfig`` describes.

Both give what every rank returns, by name, and add in the order of one net:

    actual = simulate_graph(gm, inputs_of_rank, gt_world)
    assert_bitwise_equal(actual, simulate_eager(function, inputs_of_rank, gt_world))
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer._torch.process_groups import live_groups, names_of_live_groups
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graph.collectives import group_of, launches
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopted
from pytest_gtrainer.graph.same_on_ranks import Partition, nodes_within
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.simulated.net import Net, NetModel
from pytest_gtrainer.worlds.simulated.threads.group import ThreadGroup
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads
from pytest_gtrainer.worlds.spec import World

AnyWorld: TypeAlias = World | Net | int
"""The world of a ``gt_world("simulated")`` test, a net, or a number of ranks on one node."""
Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]
InputsOfRank: TypeAlias = Callable[[int], Inputs] | Sequence[Inputs]
"""The inputs of each rank, in order or by name: a function of the rank, or one entry a rank."""
Groups: TypeAlias = Mapping[str, Sequence[Sequence[int]]]


def simulate_graph(
    gm: AnyGraph,
    inputs_of_rank: InputsOfRank,
    world: AnyWorld,
    *,
    names: Names | None = None,
    groups: Groups | None = None,
    outputs: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Run one graph on all simulated ranks, with its functional collectives; it must not depend on the rank.

    Args:
        gm: a graph of any tracer that calls operators. It may write to its input tensors.
        inputs_of_rank: inputs by rank: a function, a sequence or a mapping by FQN (or by the name of the placeholder).
        names: what the inputs are, as in ``graphtext.render``.
        groups: ranks of process groups that this process does not have, ``{"fsdp": [[0, 1], [2, 3]]}``. Other names
            are those of this process; without a process group "0" is the group of all ranks.
        outputs: names of the results; by default those that the graph tells, else "output_0", "output_1", ...

    Returns:
        By rank, the tensors that the graph returns, by name; numbers as tensors, None as it is.

    Raises:
        VacuousCheck: the world has one rank, or the graph no collective.
        NoModel: an operator that a simulated world does not model.
        DependsOnRank: inputs of other shapes than the traced ones.
        ValueError: inputs, outputs or groups that do not fit.
    """
    net, gm = _net_of(world), adopted(gm, names)
    if not (collectives := [node for node in nodes_within(gm) if launches(node.target)]):
        raise VacuousCheck(
            "the graph has no collective, so no net changes a bit of it: run it by itself"
        )
    mesh = torch.arange(net.size).view(
        *(world.mesh.values() if isinstance(world, World) else (net.size,))
    )
    here = dist.is_initialized() and dist.get_world_size() == net.size
    known = _groups_of(collectives, net.size, groups or {}, here)
    graph = RankGraph(gm, dist.get_rank() if here else 0, net.size, known, (mesh,)).with_graph(gm)
    given = [
        _in_order(gm, inputs, rank)
        for rank, inputs in enumerate(_of_ranks(inputs_of_rank, net.size))
    ]
    values = [
        own[0] if all(one is own[0] for one in own) else PerRank(own)
        for own in zip(*given, strict=True)
    ]
    result = Interpreter(graph, net).run(values)
    told = outputs or gm.graph.output_node().meta.get("gt_outputs")
    return [
        _named(pytree.tree_map(functools.partial(of_rank, rank=rank), result), told)
        for rank in range(net.size)
    ]


def simulate_eager(
    function: Callable[..., Any],
    inputs_of_rank: InputsOfRank,
    world: AnyWorld,
    *,
    outputs: Sequence[str] | None = None,
    timeout: float = LIMIT,
) -> list[dict[str, Any]]:
    """Call ``function(*inputs)`` on all ranks, each a thread with a ``torch.distributed`` of its own.

    Arguments (``inputs_of_rank``, ``world``, ``outputs``) and results are those of ``simulate_graph``. Inputs by name
    are keywords; a mapping names its results. ``timeout``: seconds that a rank may run up to its next collective.

    Raises:
        VacuousCheck: the world has one rank, or no rank came to a collective.
        NotOnThreads: the function traces or compiles.
        CollectiveMismatch, Standstill, TimeLimit: as ranks misbehave.
        ValueError: inputs or outputs that do not fit.
    """
    net = _net_of(world)
    inputs = _of_ranks(inputs_of_rank, net.size)

    def call(rank: int) -> tuple[dict[str, Any], int]:
        own = inputs[rank]
        result = function(**own) if isinstance(own, Mapping) else function(*own)
        return _named(result, outputs), sum(
            g.issued for g in live_groups() if isinstance(g, ThreadGroup)
        )

    results, issued = zip(*run_threads(net.size, call, net=net, timeout=timeout), strict=True)
    if not any(issued):
        raise VacuousCheck(
            "no rank came to a collective, so no net changes a bit: the function calls no collective"
        )
    return list(results)


def _net_of(world: AnyWorld) -> Net:
    if not isinstance(world, World | Net) and (type(world) is not int or world < 1):
        raise ValueError(f"world is a simulated World, a Net, or a number of ranks; not {world!r}")
    net = (
        net_of(world)
        if isinstance(world, World)
        else NetModel.of_world(world)
        if isinstance(world, int)
        else world
    )
    if net.size == 1:
        raise VacuousCheck(
            "in a world of one rank nothing is added to anything: take two ranks or more"
        )
    return net


def _of_ranks(inputs_of_rank: InputsOfRank, size: int) -> list[Inputs]:
    if not callable(inputs_of_rank) and len(inputs_of_rank) != size:
        raise ValueError(
            f"inputs_of_rank has inputs for {len(inputs_of_rank)} ranks, the world has {size}"
        )
    told = [
        inputs_of_rank(rank) if callable(inputs_of_rank) else inputs_of_rank[rank]
        for rank in range(size)
    ]
    for rank, inputs in enumerate(told):
        if not isinstance(inputs, list | tuple | Mapping):
            kind = type(inputs).__name__
            raise ValueError(
                f"the inputs of rank {rank} are a {kind}: give a tuple, (tensor,) for one, or a mapping"
            )
    return told


def _in_order(gm: fx.GraphModule, inputs: Inputs, rank: int) -> Sequence[Any]:
    if not isinstance(inputs, Mapping):
        return inputs
    placeholders = gm.graph.find_nodes(op="placeholder")
    names: list[str] = [
        node.meta.get("gt_input", {}).get("fqn", str(node.target)) for node in placeholders
    ]
    if wrong := ", ".join(sorted({*names} ^ {*inputs})):
        raise ValueError(
            f"the inputs of rank {rank} and those of the graph, {', '.join(names)}, differ in {wrong}"
        )
    return [inputs[name] for name in names]


def _named(result: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Results by name; those of a mapping by its keys, joined by dots."""
    paths, _ = pytree.tree_flatten_with_path(result)
    if names is None and isinstance(result, Mapping):
        names = [".".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths]
    names = names or [f"output_{place}" for place in range(len(paths))]
    if len(names) != len(paths):
        raise ValueError(
            f"{len(names)} names of outputs for {len(paths)} results: {', '.join(names)}"
        )
    leaves = [torch.tensor(leaf) if isinstance(leaf, int | float) else leaf for _, leaf in paths]
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return dict(zip(names, detached, strict=True))


def _groups_of(
    collectives: Sequence[fx.Node], size: int, given: Groups, here: bool
) -> dict[str, Partition]:
    """Groups on all ranks that this process does not know; it knows some if its world is ``here``."""
    for name, partition in given.items():
        if sorted(rank for ranks in partition for rank in ranks) != list(range(size)):
            raise ValueError(
                f"groups[{name!r}] is {partition}: every rank of 0..{size - 1} belongs to one group of it"
            )
    live = set(names_of_live_groups().values()) if here else set()
    known = {"0": [range(size)], **given} if not here else given
    for node in collectives:
        group = group_of(node)
        if group is not None and group not in known and group not in live:
            raise ValueError(
                f"{node.name} ({node.target}) communicates in process group {group!r}, which this simulated world "
                f"lacks; it has {', '.join(map(repr, sorted({*known, *live})))}: tell the ranks, "
                f"groups={{{group!r}: [[0, 1], ...]}}"
            )
    return {name: tuple(map(tuple, partition)) for name, partition in known.items()}
