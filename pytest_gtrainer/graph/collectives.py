"""Find the collectives of a graph, their kinds and groups, and the parameters that they move.

An operator of a communicating namespace launches something unless it is known not to. A *member* is
one parameter's all-gather or reduce-scatter. Its *chain* of casts, pads and views lies between it
and the parameter, or between it and the output.
"""

import operator
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    is_control_dependency,
)
from pytest_gtrainer._torch.process_groups import name_of_group, spell_reduction
from pytest_gtrainer._torch.values import OpOverload, OpOverloadPacket, pytree, schema
from pytest_gtrainer.graph.nodes import (
    COMMUNICATING,
    argument_of,
    arguments_given,
    bodies_of,
    direction,
    is_parameter,
    is_wait,
    leaves_of,
    mutates,
    node_fqn,
    places_of,
    short_name,
    waits,
    walk,
)

_STANDS_BESIDE = frozenset(
    {
        "wait_tensor",
        "wait_tensors",
        "_wrap_tensor_autograd",
        "mesh_get_process_group",
        "check_for_nan",
        "memset32_",
        "stream_write_value32_",
        "_async_input_mm",
        "_rendezvous",
        "get_remote_tensors",
    }
)
"""Operators of communicating namespaces that start nothing: waits, look-ups, preparations."""
_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_MESSAGES = ("isend", "irecv", "send", "recv_", "recv_any_source_", "batch_p2p_ops")
_KIND = re.compile(r"all_?gather|reduce_scatter|all_?reduce|all_?to_?all|broadcast")
_KINDS = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}


class PlanError(ValueError):
    """A plan that does not fit the graph or model; the message names what does not."""

    __module__ = "pytest_gtrainer"


@dataclass(frozen=True, slots=True)
class FsdpCollective:
    """One parameter's collective.

    Attributes:
        chain: in graph order, from the parameter to the gather, or from the reduction to the
            output.
        parameter: the FQN.
        position: its place among the graph's inputs, of a gradient among the outputs.
    """

    launch: fx.Node
    wait: fx.Node
    chain: tuple[fx.Node, ...]
    parameter: str
    position: int

    @property
    def bucket_fqn(self) -> str:
        """FQN of the collective's module, which decides the bucket."""
        return node_fqn(self.launch)

    @property
    def direction(self) -> str:
        """The direction of the launch, "fwd" or "bwd"."""
        return direction(self.launch)

    @property
    def value(self) -> torch.Tensor:
        """The result of the launch as a fake tensor.

        Raises:
            PlanError: the graph was not traced on fake tensors.
        """
        value = self.launch.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f'the collective of {self.parameter} lacks meta["val"]: trace on fake tensors'
            )
        return value

    @property
    def all_reduce(self) -> tuple[fx.Node, fx.Node] | None:
        """The all-reduce over replicas after a reduce-scatter, and its wait, if there is one."""
        users = list(self.wait.users)
        if len(users) != 1 or users[0].target is not ALL_REDUCE:
            return None
        second = only_wait(users[0])
        if second is None:
            return None
        return (users[0], second)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Group, op and dtype; members that differ in it are never merged. Raises as ``value``."""
        value = self.value
        second = settings_of(self.all_reduce[0]) if self.all_reduce else None
        return (self.launch.target, *settings_of(self.launch), value.dtype, value.device, second)


def launches(target: Any) -> bool:
    """Return whether an operator starts a collective, a send or a receive."""
    return isinstance(target, OpOverload) and _is_launch(target)


@cache
def _is_launch(target: Any) -> bool:
    space, _, name = schema(target).name.partition("::")
    if space in COMMUNICATING:
        return name not in _STANDS_BESIDE
    # Torch's packing operators take a group, too, and start nothing.
    takes_group = any(argument.name == "group_name" for argument in schema(target).arguments)
    return takes_group and space != "bucketing"


def communicates_unseen(node: fx.Node) -> bool:
    """Return whether a node communicates, as far as its name says, and calls no operator.

    ``symbolic_trace``, and passes that forget ``.default``, call packets of operators, and Python
    functions as ``dist.all_reduce``.
    """
    target: Any = node.target
    if node.op == "call_method":
        return bool(target == "wait")
    if node.op != "call_function" or isinstance(target, OpOverload):
        return False
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return any(launches(overload) or waits(overload) for overload in overloads)
    home, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    is_of_distributed = (home or "").startswith("torch.distributed.")
    # ``DTensor.from_local`` checks what ranks have only if it is asked to.
    return is_of_distributed and not name.startswith(("_", "get_", "is_", "from_local"))


def unseen(node: fx.Node) -> PlanError:
    """Return the error that refuses such a node."""
    name = str(node.target)
    if not isinstance(node.target, OpOverloadPacket):
        name = getattr(node.target, "__qualname__", name)
    return PlanError(
        f"{node.name} calls {name}, which is no operator, so nobody can say what it communicates: "
        "trace the graph (trace_step, make_fx), or call an overload, all_reduce.default"
    )


def refuse_unseen(gm: fx.GraphModule) -> None:
    """Refuse a graph with communication that its operators do not show.

    Raises:
        PlanError: it has; the message names the node.
    """
    for node in gm.graph.nodes:
        if communicates_unseen(node):
            raise unseen(node)


def is_message(node: fx.Node) -> bool:
    """Return whether a node sends to another rank, or receives from one."""
    return launches(node.target) and short_name(node) in _MESSAGES


def kind_of(launch: fx.Node) -> str:
    """Return the kind of a collective, as "all_gather"; "" if it is none of the usual kinds."""
    found = _KIND.search(schema(launch.target).name.partition("::")[2])
    if found is None or is_fused(launch):
        return ""
    return _KINDS.get(found[0], found[0])


def is_fused(launch: fx.Node) -> bool:
    """Return whether a collective computes products, so that its operands are not what it sends."""
    return "matmul" in schema(launch.target).name.partition("::")[2]


def group_of(launch: fx.Node) -> str | None:
    """Return the name of a collective's process group; None if the graph names none."""
    group = argument_of(launch, "group_name", "process_group")
    return name_of_group(group, launch.graph.owning_module)


def ranks_given(launch: fx.Node) -> tuple[int, ...] | None:
    """Return the ranks that the older ``c10d_functional`` takes in place of a group."""
    given = argument_of(launch, "ranks")
    return tuple(given) if isinstance(given, list | tuple) else None


def reduction_of(launch: fx.Node) -> str | None:
    """Return the reduction, as "avg" or "premul_sum(0.25)"; None if there is none to see."""
    return spell_reduction(argument_of(launch, "reduce_op", "reduceOp", "red_op"))


def hides(launch: fx.Node) -> bool:
    """Return whether group and reduction are objects without a text, as in ``c10d``'s operators."""
    return any(argument.name == "process_group" for argument in schema(launch.target).arguments)


def group_size_of(launch: fx.Node) -> int:
    """Return the number of ranks of an all-gather's or reduce-scatter's process group."""
    return int(argument_of(launch, "group_size"))


def settings_of(launch: fx.Node) -> tuple[Any, ...]:
    """Return a collective's arguments after its operand: reduction, number of ranks, group."""
    _, *settings = (given for _, given in arguments_given(launch))
    return tuple(settings)


def input_name(placeholder: fx.Node, position: int, module: str) -> str:
    """Return the FQN of a gathered input; without a name, its position in the gathering module."""
    known = placeholder.meta.get("gt_input") or {"fqn": f"{module}.input{position}"}
    return str(known["fqn"])


def output_name(output: fx.Node, position: int, module: str) -> str:
    """Return the FQN of a gradient; without a name, its position in the reducing module."""
    known = output.meta.get("gt_outputs")
    return known[position] if known else f"{module}.output{position}"


def results_of(gm: fx.GraphModule) -> list[Any]:
    """Return the results, flat; None is a result, that of an input without a gradient."""
    results: list[Any] = pytree.tree_leaves(gm.graph.output_node().args[0])
    return results


def fsdp_all_gathers(gm: fx.GraphModule) -> list[FsdpCollective]:
    """Return the all-gathers of parameters, in graph order.

    Exactly one graph input is above each, and it is a parameter, or of an unknown kind.
    """
    positions = places_of(gm.graph.find_nodes(op="placeholder"))
    members = []
    for launch in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
        found = _chain_to_input(launch)
        if found is None:
            continue
        source, chain = found
        # The model itself may gather buffers and user inputs.
        if not is_parameter(source):
            continue
        parameter = input_name(source, positions[source], node_fqn(launch))
        wait = only_wait(launch)
        if wait is None:
            raise PlanError(
                f"the all-gather of {parameter} has {len(launch.users)} users, "
                "not just its one wait"
            )

        members.append(FsdpCollective(launch, wait, chain, parameter, positions[source]))

    return sorted(members, key=lambda member: member.launch)


def only_wait(launch: fx.Node) -> fx.Node | None:
    """Return the wait of a collective, None unless it is its one user."""
    users = list(launch.users)
    if len(users) == 1 and is_wait(users[0]):
        return users[0]
    return None


def wait_of(launch: fx.Node) -> fx.Node:
    """Return the wait of a collective, which may stand inside a control dependency."""
    for user in launch.users:
        call = _call_of(launch.graph.owning_module, user)
        # Another control dependency may only stand after the launch.
        reads = launch in _operands_of(user)
        if reads and (is_wait(call) or is_control_dependency(call)):
            return user
    raise PlanError(
        f"nothing waits for the collective {launch} of {node_fqn(launch) or 'the root'}: "
        "the graph is not whole"
    )


def find_early_read(graph: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """Return a functional collective and the first node that reads its result before a wait for it;
    None if there is no such node.

    A view of a result, or an entry of several, is waited for as the result is. Whoever asks for its
    size reads no number of it.
    """
    # Launches, and views of their results, by the launch.
    on_the_way: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        call = _call_of(graph.owning_module, node)
        pending = [each for each in _operands_of(node) if each in on_the_way]
        operator_called = _overload_of(call.target)
        # A control dependency whose body is not known may hold the wait.
        if pending and (waits(operator_called) or is_control_dependency(call)):
            arrived = {on_the_way[each] for each in pending}
            for value, launch in list(on_the_way.items()):
                if launch in arrived:
                    del on_the_way[value]
        elif pending and _passes_on(call):
            on_the_way[node] = on_the_way[pending[0]]
        elif pending and not short_name(call).startswith("sym_"):
            return on_the_way[pending[0]], node

        # Other namespaces wait by themselves, or return works.
        if not launches(operator_called) or operator_called.namespace not in _FUNCTIONAL:
            continue
        if operator_called is not call.target or not mutates(call):
            on_the_way[node] = node

    return None


def _overload_of(target: Any) -> Any:
    """Return the operator that a packet of a single overload calls; anything else as it is."""
    if isinstance(target, OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    return target


def unread_launches(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the collectives whose results reach neither the results of the graph nor a write.

    They cost traffic, and other ranks wait for them.
    """
    ends, launched = [], []
    for node in gm.graph.nodes:
        call = _call_of(gm, node)
        if node.op == "output" or mutates(call):
            ends.append(node)
        if launches(call.target):
            launched.append(node)
    read = walk(ends, _operands_of)
    return [node for node in launched if node not in read]


def _operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node reads; others only come before a control dependency."""
    if is_control_dependency(node):
        return [leaf for leaf in leaves_of(node.args[2:]) if isinstance(leaf, fx.Node)]
    return node.all_input_nodes


def _call_of(gm: fx.GraphModule | None, node: fx.Node) -> fx.Node:
    """Return the one call in the body of a control dependency; any other node as it is."""
    if is_control_dependency(node):
        for body in bodies_of(gm, node).values():
            calls = [each for each in body.graph.nodes if each.op == "call_function"]
            if len(calls) == 1:
                return calls[0]
    return node


def _passes_on(node: fx.Node) -> bool:
    """Return whether a node's result is in the memory of its operand, which it does not read."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.is_view or schema(node.target).name.endswith("::_wrap_tensor_autograd")


def _chain_to_input(launch: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Return the one placeholder above ``launch``, and the nodes in between; else None."""

    def ends(node: fx.Node) -> bool:
        # The result of a collective is no parameter, nor is what was written to.
        return is_wait(node) or mutates(node)

    above = walk(launch.all_input_nodes, lambda node: () if ends(node) else node.all_input_nodes)
    sources = [node for node in above if node.op == "placeholder"]
    if len(sources) != 1 or any(map(ends, above)):
        return None
    return sources[0], tuple(sorted(above.difference(sources)))


def fsdp_reduce_scatters(gm: fx.GraphModule) -> list[FsdpCollective]:
    """Return the reduce-scatters of gradients, in graph order.

    Only operators of one operand lie between such a collective and the output.
    """
    output = gm.graph.output_node()
    positions: dict[fx.Node, int] = {}
    for index, result in enumerate(results_of(gm)):
        if isinstance(result, fx.Node):
            positions.setdefault(result, index)  # a result may be returned twice
    members = []
    for launch in gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER):
        wait = only_wait(launch)
        if wait is None:
            continue
        chain = chain_to_output(wait, output)
        # An operator of two operands sums chunks or replicas; what it reads is no bucket's member.
        if chain is not None:
            position = positions[[wait, *chain][-1]]
            parameter = output_name(output, position, node_fqn(launch))
            members.append(FsdpCollective(launch, wait, chain, parameter, position))

    return sorted(members, key=lambda member: member.launch)


def chain_to_output(start: fx.Node, output: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the nodes from ``start`` to the output; None if one has other users or operands."""
    chain = [start]
    while len(users := list(chain[-1].users)) == 1:
        if users[0] is output:
            return tuple(chain[1:])
        if len(users[0].all_input_nodes) != 1:
            return None
        chain.append(users[0])
    return None
