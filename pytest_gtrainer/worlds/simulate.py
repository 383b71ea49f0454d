"""Run any graph, or any eager function, on all ranks of a simulated world.

Use them for code that no ``TrainConfig`` describes. Both return the results of every rank by name,
and reductions add in the order of one net:

    actual = simulate_graph(gm, inputs_of_rank, gt_world)
    assert_bitwise_equal(actual, simulate_eager(function, inputs_of_rank, gt_world))
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer._torch.process_groups import names_of_live_groups
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graph.collectives import find_early_read, group_of, launches
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopt
from pytest_gtrainer.graph.nodes import distinct, input_fqn
from pytest_gtrainer.graph.same_on_ranks import Partition, nodes_within
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank
from pytest_gtrainer.worlds.simulated.net import Net, NetModel
from pytest_gtrainer.worlds.simulated.threads.run import LIMIT, run_threads
from pytest_gtrainer.worlds.spec import World

# The world of a ``gt_world("simulated")`` test, a net, or a number of ranks on one node.
AnyWorld: TypeAlias = World | Net | int
# The inputs of each rank, in order or by name: a function of the rank, or one entry a rank.
Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]
InputsOfRank: TypeAlias = Callable[[int], Inputs] | Sequence[Inputs]
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
    """Run one graph on all simulated ranks, with its functional collectives.

    The graph must not depend on the rank.

    Args:
        gm: a graph of any tracer that calls operators. It may write to its input tensors.
        inputs_of_rank: inputs by rank: a function, or one entry a rank. An entry is a sequence, or
            a mapping by FQN or name of the placeholder.
        names: names of the inputs, as in ``graphtext.render``.
        groups: ranks of process groups that this process does not have:
            ``{"fsdp": [[0, 1], [2, 3]]}``. Other names are those of this process; without a process
            group "0" is the group of all ranks.
        outputs: names of the results; by default the graph's ``gt_outputs``, else "output_0",
            "output_1", ...

    Returns:
        By rank, the tensors that the graph returns, by name; numbers as tensors, None as it is.

    Raises:
        VacuousCheck: the world has one rank, or the graph no collective.
        NoModel: an operator that a simulated world does not model.
        DependsOnRank: inputs of other shapes than the traced ones.
        ValueError: inputs, outputs or groups that do not fit; or a collective is read before its
            wait.
    """
    net, gm = net_of_any(world), adopt(gm, names)
    if not any(launches(node.target) for node in nodes_within(gm)):
        raise VacuousCheck(
            "the graph has no collective, so no net changes a bit of it: run it by itself"
        )
    early = find_early_read(gm.graph)
    if early is not None:
        launch, reader = early
        raise ValueError(
            f"{reader.name} reads {launch.name} before it is waited for, so on real ranks nobody "
            "knows what it reads: wait first"
        )
    return run_on_net(
        gm, inputs_of_ranks(inputs_of_rank, net.size), world, net, groups=groups, outputs=outputs
    )


def run_on_net(
    gm: fx.GraphModule,
    inputs: Sequence[Inputs],
    world: AnyWorld,
    net: Net,
    *,
    groups: Groups | None = None,
    outputs: Sequence[str] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run a graph on all ranks of a world, with sums by ``net``; see ``simulate_graph``.

    ``options`` are those of ``Interpreter``.
    """
    collectives = [node for node in nodes_within(gm) if launches(node.target)]
    extents = world.mesh.values() if isinstance(world, World) else (net.size,)
    mesh = torch.arange(net.size).view(*extents)
    # A world of another size may be up: its groups are not those of the simulated ranks.
    is_here = dist.is_initialized() and dist.get_world_size() == net.size
    known = _groups_of(collectives, net.size, groups or {}, is_here)
    own_rank = dist.get_rank() if is_here else 0
    graph = RankGraph(gm, own_rank, net.size, known, (mesh,)).with_graph(gm)

    given = [_in_order(gm, own, rank) for rank, own in enumerate(inputs)]
    values: list[Any] = []
    for own in zip(*given, strict=True):
        # One object for all ranks is a uniform value: what depends on nothing else runs once.
        if all(value is own[0] for value in own):
            values.append(own[0])
        else:
            values.append(PerRank(own))

    result = Interpreter(graph, net, **options).run(values)

    results = []
    named = gm.graph.output_node().meta.get("gt_outputs") or ()
    for rank in range(net.size):
        own = pytree.tree_map(functools.partial(of_rank, rank=rank), result)
        if outputs is None and len(named) == len(pytree.tree_leaves(own)):
            results.append(_named(own, distinct(named)))
        else:
            results.append(_named(own, outputs))  # a graph may name only some of its results

    return results


def simulate_eager(
    function: Callable[..., Any],
    inputs_of_rank: InputsOfRank,
    world: AnyWorld,
    *,
    outputs: Sequence[str] | None = None,
    timeout: float = LIMIT,
) -> list[dict[str, Any]]:
    """Call ``function(*inputs)`` on all ranks.

    Each rank is a thread with a ``torch.distributed`` of its own.

    Args:
        inputs_of_rank, world, outputs: as for ``simulate_graph``. Inputs by name are keywords.
        timeout: seconds that a rank may run up to its next collective.

    Returns:
        As ``simulate_graph``; a mapping that the function returns names its results.

    Raises:
        VacuousCheck: the world has one rank, or no rank came to a collective or a message.
        NotOnThreads: the function traces or compiles.
        CollectiveMismatch, Standstill, TimeLimit: as ranks misbehave.
        ValueError: inputs or outputs that do not fit.
    """
    net = net_of_any(world)
    inputs = inputs_of_ranks(inputs_of_rank, net.size)

    def call(rank: int) -> tuple[dict[str, Any], bool]:
        own = inputs[rank]
        world: Any = dist.group.WORLD  # a ThreadGroup, which the function may destroy
        result = function(**own) if isinstance(own, Mapping) else function(*own)
        return _named(result, outputs), bool(world.partners)

    results, communicated = zip(*run_threads(net.size, call, net=net, timeout=timeout), strict=True)
    if not any(communicated):
        raise VacuousCheck(
            "no rank came to a collective or a message, so no net changes a bit: the function does "
            "not communicate"
        )
    return list(results)


def net_of_any(world: AnyWorld) -> Net:
    """Return the net of a world, or of a number of ranks."""
    if not isinstance(world, World | Net) and (type(world) is not int or world < 1):
        raise ValueError(f"world is a simulated World, a Net, or a number of ranks; not {world!r}")
    net = NetModel.of_world(world) if isinstance(world, int) else world
    if isinstance(net, World):
        net = net_of(net)
    if net.size == 1:
        raise VacuousCheck(
            "in a world of one rank nothing is added to anything: take two ranks or more"
        )
    return net


def inputs_of_ranks(inputs_of_rank: InputsOfRank, size: int) -> Sequence[Inputs]:
    """Return the inputs of each rank, checked."""
    if callable(inputs_of_rank):
        inputs_of_rank = list(map(inputs_of_rank, range(size)))
    if len(inputs_of_rank) != size:
        raise ValueError(
            f"inputs_of_rank has inputs for {len(inputs_of_rank)} ranks, the world has {size}"
        )
    for rank, inputs in enumerate(inputs_of_rank):
        if not isinstance(inputs, list | tuple | Mapping):
            raise ValueError(
                f"the inputs of rank {rank} are a {type(inputs).__name__}: "
                "give a tuple, (tensor,) for one, or a mapping"
            )
    return inputs_of_rank


def _in_order(gm: fx.GraphModule, inputs: Inputs, rank: int) -> Sequence[Any]:
    if not isinstance(inputs, Mapping):
        return inputs
    names = list(map(input_fqn, gm.graph.find_nodes(op="placeholder")))
    wrong = sorted({*names} ^ {*inputs})
    if wrong:
        raise ValueError(
            f"the inputs of rank {rank} and those of the graph, {', '.join(names)}, "
            f"differ in {', '.join(wrong)}"
        )
    return [inputs[name] for name in names]


def _named(result: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return results by name; those of a mapping by its keys, joined by dots."""
    leaves, _ = pytree.tree_flatten_with_path(result)
    by_default = []
    for path, _ in leaves:
        if isinstance(result, Mapping):
            by_default.append(".".join(str(getattr(key, "key", key)) for key in path))
        else:
            by_default.append(f"output_{len(by_default)}")

    names = names or by_default
    if len(names) != len(leaves):
        raise ValueError(
            f"{len(names)} names of outputs for {len(leaves)} results: {', '.join(names)}"
        )

    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} names more than one result: give each one a name")

    named = {}
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if isinstance(leaf, int | float | torch.Tensor):
            leaf = torch.as_tensor(leaf).detach()
        named[name] = leaf
    return named


def _groups_of(
    collectives: Sequence[fx.Node], size: int, given: Groups, is_here: bool
) -> dict[str, Partition]:
    """Return the groups that this process lacks, each with the ranks of all groups in its place.

    ``is_here``: this process has the groups of its own world.
    """
    for name, partition in given.items():
        if sorted(chain.from_iterable(partition)) != list(range(size)):
            raise ValueError(
                f"groups[{name!r}] is {partition}: "
                f"every rank of 0..{size - 1} belongs to one group of it"
            )

    called = {group_of(node) for node in collectives}
    idle = sorted(given.keys() - called)
    if idle:
        # Else a name that is misspelt would leave the ranks to the groups of this process.
        raise ValueError(
            f"no collective of the graph is in {', '.join(map(repr, idle))} of groups=; its groups "
            f"are {', '.join(sorted(map(repr, called)))}"
        )

    live, known = set(), {"0": [range(size)], **given}
    if is_here:
        live, known = set(names_of_live_groups().values()), dict(given)
    for node in collectives:
        group = group_of(node)
        if group is not None and group not in known and group not in live:
            raise ValueError(
                f"{node.name} ({node.target}) communicates in process group {group!r}, which this "
                f"simulated world lacks; it has {', '.join(map(repr, sorted({*known, *live})))}: "
                f"where groups= is an argument, list the ranks, groups={{{group!r}: [[0, 1], "
                "...]}; else run in a world whose mesh makes that group, world=gt_world"
            )

    return {name: tuple(map(tuple, partition)) for name, partition in known.items()}
