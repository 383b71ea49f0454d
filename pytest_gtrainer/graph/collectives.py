"""Collectives in a graph: which nodes launch one, of which kind, in which group; whose parameter a
member moves.

An operator of a communicating namespace that is not known not to launch anything does. A *member*
is one parameter's all-gather or reduce-scatter; its *chain* of casts, pads and views lies between
it and the parameter, or the output.
"""

import re
from dataclasses import dataclass
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
from pytest_gtrainer._torch.values import OpOverload, schema
from pytest_gtrainer.graph.nodes import (
    COMMUNICATING,
    argument_of,
    direction,
    is_wait,
    mutates,
    node_fqn,
    walked,
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
"""Operators of communicating namespaces that start nothing: waits, look-ups, what prepares memory.
"""
_KIND = re.compile(r"all_?gather|reduce_scatter|all_?reduce|all_?to_?all|broadcast")
_FUSED = "matmul"


class PlanError(ValueError):
    """A plan that does not fit the graph or model; the message names what does not."""

    __module__ = "pytest_gtrainer"


@dataclass(frozen=True, slots=True)
class FsdpCollective:
    """One parameter's collective."""

    launch: fx.Node
    wait: fx.Node
    chain: tuple[
        fx.Node, ...
    ]  # in graph order, from the parameter to the gather, or from the reduction to the output
    parameter: str  # its FQN
    position: int  # its place among the graph's inputs (outputs)

    @property
    def bucket_fqn(self) -> str:
        """Module FQN of the collective, which decides the bucket."""
        return node_fqn(self.launch)

    @property
    def direction(self) -> str:
        """ "fwd" or "bwd"."""
        return direction(self.launch)

    @property
    def value(self) -> torch.Tensor:
        """Return what the collective gives, as a fake tensor; a PlanError if the graph was not
        traced on fake tensors.
        """
        value = self.launch.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f'the collective of {self.parameter} lacks meta["val"]: trace on fake tensors'
            )
        return value

    @property
    def all_reduce(self) -> tuple[fx.Node, fx.Node] | None:
        """Of a gradient that replicas alone reduce after its reduce-scatter: that collective and
        its wait.
        """
        users = list(self.wait.users)
        if len(users) != 1 or users[0].target is not ALL_REDUCE:
            return None
        second = only_wait(users[0])
        return None if second is None else (users[0], second)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Group, op and dtype: members that differ in it are never merged; raises as
        ``value``.
        """
        value = self.value
        second = self.all_reduce[0].args[1:] if self.all_reduce else None
        return (self.launch.target, *self.launch.args[1:], value.dtype, value.device, second)


def launches(target: Any) -> bool:
    """Return whether an operator starts a collective, a send or a receive; torch's packing
    operators do not.
    """
    if not isinstance(target, OpOverload):
        return False
    space, _, name = schema(target).name.partition("::")
    if space in COMMUNICATING:
        return name not in _STANDS_BESIDE
    return space != "bucketing" and any(
        argument.name == "group_name" for argument in schema(target).arguments
    )


def kind_of(launch: fx.Node) -> str:
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``; "" of any
    other.
    """
    name = schema(launch.target).name.partition("::")[2]
    if (found := _KIND.search(name)) is None or _FUSED in name:
        return ""
    return {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}.get(
        found[0], found[0]
    )


def is_fused(launch: fx.Node) -> bool:
    """Return whether it computes products beside: its operands and results are not what it
    communicates.
    """
    return _FUSED in schema(launch.target).name


def group_of(launch: fx.Node) -> str | None:
    """Name of the process group that a collective communicates in; None where the graph names none."""
    return name_of_group(
        argument_of(launch, "group_name", "process_group"), launch.graph.owning_module
    )


def ranks_given(launch: fx.Node) -> tuple[int, ...] | None:
    """The ranks that an operator of the older ``c10d_functional`` takes in place of a group."""
    given = argument_of(launch, "ranks")
    return tuple(given) if isinstance(given, list | tuple) else None


def reduction_of(launch: fx.Node) -> str | None:
    """``sum``, ``avg``, ``premul_sum(0.25)`` of a collective that reduces; None of others and of
    one that hides it.
    """
    return spell_reduction(argument_of(launch, "reduce_op", "reduceOp", "red_op"))


def hides(launch: fx.Node) -> bool:
    """Return whether group or reduction are objects which a graph does not tell, as those of
    ``c10d``'s operators in place.
    """
    return any(argument.name == "process_group" for argument in schema(launch.target).arguments)


def group_size_of(launch: fx.Node) -> int:
    """Number of ranks of an all-gather's or reduce-scatter's process group."""
    return int(launch.args[-2])


def input_name(placeholder: fx.Node, position: int, module: str) -> str:
    """FQN of a gathered input; in a graph traced elsewhere the module that gathers it, and its
    position.
    """
    known = placeholder.meta.get("gt_input")
    return known["fqn"] if known else f"{module}.input{position}"


def output_name(output: fx.Node, position: int, module: str) -> str:
    """FQN of the gradient at ``position``; in a graph traced elsewhere the module that reduces it,
    and its position.
    """
    known = output.meta.get("gt_outputs")
    return known[position] if known else f"{module}.output{position}"


def results_of(gm: fx.GraphModule) -> list[Any]:
    """Return what the graph returns, flat."""
    results = gm.graph.output_node().args[0]
    return list(results) if isinstance(results, list | tuple) else [results]


def fsdp_all_gathers(gm: fx.GraphModule) -> list[FsdpCollective]:
    """The all-gathers of parameters, in graph order: exactly one graph input is their ancestor
    .
    """
    positions = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    members = []
    for launch in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
        found = _chain_to_input(launch)
        # buffers and user inputs may be gathered too; that is the model's business, not FSDP's
        if (
            found is None
            or found[0].meta.get("gt_input", {"kind": "parameter"})["kind"] != "parameter"
        ):
            continue
        source, chain = found
        parameter = input_name(source, positions[source], node_fqn(launch))
        if (wait := only_wait(launch)) is None:
            raise PlanError(
                f"the all-gather of {parameter} has {len(launch.users)} users, not just its one wait"
            )
        members.append(FsdpCollective(launch, wait, chain, parameter, positions[source]))
    return sorted(members, key=lambda member: member.launch)


def only_wait(launch: fx.Node) -> fx.Node | None:
    """The wait of a collective, None unless it is its one user."""
    users = list(launch.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def wait_of(launch: fx.Node) -> fx.Node:
    """The wait of a collective; a control dependency may have wrapped it, and another may hang on
    the launch.
    """
    for user in launch.users:
        if is_wait(user) or (is_control_dependency(user) and launch in user.args[2:]):
            return user
    raise PlanError(
        f"nothing waits for the collective {launch} of {node_fqn(launch) or 'the root'}: the graph is not whole"
    )


def _chain_to_input(launch: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The one placeholder above ``launch`` and the nodes in between; None if there are more, or
    fewer.
    """

    def ends(
        node: fx.Node,
    ) -> bool:  # the result of a collective is no parameter, nor what was written to
        return is_wait(node) or mutates(node)

    above = walked(launch.all_input_nodes, lambda node: () if ends(node) else node.all_input_nodes)
    sources = [node for node in above if node.op == "placeholder"]
    if len(sources) != 1 or any(map(ends, above)):
        return None
    return sources[0], tuple(sorted(above.difference(sources)))


def fsdp_reduce_scatters(gm: fx.GraphModule) -> list[FsdpCollective]:
    """The reduce-scatters of gradients, in graph order: their result reaches the output by unary
    steps.
    """
    output = gm.graph.output_node()
    every = reversed(
        list(enumerate(results_of(gm)))
    )  # of a result that is returned twice the first place
    positions = {result: index for index, result in every if isinstance(result, fx.Node)}
    members = []
    for launch in gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER):
        wait = only_wait(launch)
        chain = chain_to_output(wait, output) if wait is not None else None
        if wait is not None and chain is not None:
            position = positions[chain[-1] if chain else wait]
            parameter = output_name(output, position, node_fqn(launch))
            members.append(FsdpCollective(launch, wait, chain, parameter, position))
    return sorted(members, key=lambda member: member.launch)


def chain_to_output(start: fx.Node, output: fx.Node) -> tuple[fx.Node, ...] | None:
    """Nodes after ``start`` up to the output, each the only user of the one before and of nothing
    else.
    """
    chain = [start]
    while len(users := list(chain[-1].users)) == 1:
        if users[0] is output:
            return tuple(chain[1:])
        if len(users[0].all_input_nodes) != 1:
            return None
        chain.append(users[0])
    return None
