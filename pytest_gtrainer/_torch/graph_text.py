"""Groups, operators, symbols and nodes, as graph text writes and reads them.

Graph text names a process group by its description and ranks, an operator by its name in the
dispatcher, and a symbolic size by its sympy expression. The reader makes nodes and symbols of
these names without torch's own constructors, which check what the parser has checked already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.process_groups import group_named, live_groups
from pytest_gtrainer._torch.values import SYMBOLIC, HigherOrderOperator, OpOverload

with private_names():
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    )
    from torch._ops import _higher_order_ops
    from torch.utils._sympy import functions
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.symbol import SymT, make_symbol, symbol_is_type
    from torch.utils._sympy.value_ranges import ValueRanges

ATTRIBUTES = {
    "torch._C": (
        "_nn",
        "_dispatch_get_all_op_names",
        "_dispatch_find_schema_or_throw",
        "_set_grad_enabled",
        "_log_api_usage_once",
    ),
    "torch.utils._sympy.symbol:SymT": ("UNBACKED_INT", "UNBACKED_FLOAT", "FLOAT", "SIZE"),
    "torch.fx:Graph": ("_insert", "_len", "_find_nodes_lookup_table", "_graph_namespace"),
    "torch._higher_order_ops.triton_kernel_wrap:KernelSideTable": ("id_to_kernel", "constant_args"),
    "torch.nn:Module": (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_is_full_backward_hook",
    ),
    "torch.fx.graph:_Namespace": ("create_name", "associate_name_with_obj"),
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": (
        "backed_var_to_val",
        "simplify",
        "var_to_range",
        "var_to_sources",
        "symbol_guard_counter",
        "unbacked_symint_counter",
        "unbacked_symfloat_counter",
        "create_symintnode",
        "create_symboolnode",
        "create_symfloatnode",
    ),
}

__all__ = [
    "FUNCTIONS_OF_DYNAMO",
    "PLAIN_FUNCTIONS",
    "SYMBOLIC",
    "ResolvedGroup",
    "functions",
    "resolve_group",
]

POLICIES = {policy.name.lower(): policy for policy in torch.utils.checkpoint.CheckpointPolicy}


@dataclass(frozen=True, slots=True)
class ResolvedGroup:
    """The ranks of a process group in its order, and its description.

    The description is ``mesh_<dimension>`` for a group of ``init_device_mesh``, and ``default_pg``
    for the world, also if the world is the only dimension of a mesh.
    """

    ranks: tuple[int, ...]
    description: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "ResolvedGroup":
        """Read ranks and description of a group."""
        return cls(tuple(dist.get_process_group_ranks(group)), group.group_desc)


# Functions without a result that Dynamo leaves in a graph: for ``no_grad``, and for counting calls
# of checkpoints.
FUNCTIONS_OF_DYNAMO = {
    "torch._C._set_grad_enabled": torch._C._set_grad_enabled,
    "torch._C._log_api_usage_once": torch._C._log_api_usage_once,
}

# Modules whose functions Dynamo's graphs call. ``torch._C._nn`` has those of
# ``torch.nn.functional`` that are written in C++.
PLAIN_FUNCTIONS = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
}


def resolve_group(name: str) -> ResolvedGroup | None:
    """Return the process group of that name; None if this process has none."""
    if not dist.is_initialized():
        return None
    try:
        return ResolvedGroup.of(group_named(name))
    except ValueError:
        return None


def named_groups() -> dict[str, ResolvedGroup]:
    """Return this process's groups by name, in the order in which they were made."""
    return {group.group_name: ResolvedGroup.of(group) for group in live_groups()}


def expression(value: Any) -> Any:
    """Return the sympy expression of a symbolic number; any other number as it is."""
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def is_unbacked(symbol: Any) -> bool:
    """Return whether the size is known only when the graph runs."""
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def hint(symbol: Any, value: Any) -> int | float | None:
    """Return the example that a symbol of ``value`` was traced with; None if it is unbacked."""
    known = value.node.shape_env.backed_var_to_val.get(symbol)
    if known is None:
        return None
    return int(known) if known.is_Integer else float(known)


def number_of(value: Any, given: Mapping[str, int]) -> int | list[str]:
    """Return the number of a symbolic size, for the ``given`` numbers of its symbols.

    A symbol that is not given has the example of its trace. If a symbol has neither, the result is
    the list of these symbols' names.
    """
    size = value.node.shape_env.simplify(value.node.expr)
    numbers = {symbol: given.get(str(symbol), hint(symbol, value)) for symbol in size.free_symbols}
    unknown = sorted(str(symbol) for symbol, number in numbers.items() if number is None)
    if unknown:
        return unknown
    return int(size.xreplace({symbol: sympy.Integer(each) for symbol, each in numbers.items()}))


def size_symbols(value: Any) -> set[str]:
    """Return the names of the symbols of a symbolic size, as ``number_of`` takes them."""
    size = value.node.shape_env.simplify(value.node.expr)
    return {str(symbol) for symbol in size.free_symbols}


def operator_names() -> list[str]:
    """Return the name of every operator of the dispatcher, such as ``aten::add.Tensor``.

    Operators of TorchScript alone, which can open files, are not among them. Takes 2 ms.
    """
    return torch._C._dispatch_get_all_op_names()


def operator_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """Return an operator of the dispatcher; None if it has none of that name."""
    try:
        torch._C._dispatch_find_schema_or_throw(
            f"{namespace}::{name}", "" if overload == "default" else overload
        )
    except RuntimeError:
        return None
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")


def register_prims_of_inductor() -> None:
    """Import the module of Inductor that registers its operators for random numbers."""
    import torch._inductor.inductor_prims  # noqa: F401


def higher_order_operators() -> dict[str, HigherOrderOperator]:
    """Return all higher-order operators by name."""
    # Registers two operators that torch itself does not import.
    import torch.nn.attention.flex_attention  # noqa: F401

    return dict(_higher_order_ops)


def is_kernel_call(target: Any) -> bool:
    """Return whether an operator runs a Triton kernel."""
    return target is triton_kernel_wrapper_mutation or target is triton_kernel_wrapper_functional


def kernel_of(arguments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the Triton kernel of a node and its constants; None for a kernel that is gone.

    A node holds places in tables of torch, which depend on what the process traced before.
    """
    kernel = kernel_side_table.id_to_kernel.get(arguments["kernel_idx"])
    return kernel, kernel_side_table.constant_args.get(arguments["constant_args_idx"], {})


def hooks_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the hooks around a module's forward and backward, by torch's table.

    A hook with options is a tuple of the hook and their names.
    """
    found: dict[str, list[Any]] = {}
    for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        for key, hook in getattr(module, table).items():
            options = []
            for option in ("with_kwargs", "always_called"):
                # ``_forward_hooks_with_kwargs`` has the keys of hooks that are called with kwargs.
                if key in vars(module).get(f"{table}_{option}", ()):
                    options.append(option)
            if table == "_backward_hooks" and module._is_full_backward_hook:
                options.append("full")
            found.setdefault(table, []).append((hook, *options) if options else hook)
    return found


def append_node(
    graph: fx.Graph, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """Append a node as ``graph.create_node`` does, for arguments known to be legal.

    ``create_node`` warns of symbolic operands, which a text may name, and checks all arguments.
    """
    name = graph._graph_namespace.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def backed_symbol(env: ShapeEnv, place: int, example: int | float) -> Any:
    """Return a new symbol of a shape environment, with an example and no guard but a range."""
    # ``ShapeEnv.create_symbol`` looks for the user's line on the stack: it takes milliseconds and
    # imports Inductor, and no line of a text is on the stack.
    if isinstance(example, float):
        symbol, known = make_symbol(SymT.FLOAT, place, real=True), sympy.Float(example)
        env.var_to_range[symbol] = ValueRanges(-sympy.oo, sympy.oo)
    else:
        symbol = make_symbol(SymT.SIZE, place, positive=True, integer=True)
        known = sympy.Integer(example)
        env.var_to_range[symbol] = ValueRanges(min(example, 2), int_oo)
    env.backed_var_to_val[symbol] = known
    env.var_to_sources[symbol] = []
    env.symbol_guard_counter[symbol] = 0
    return symbol


def unbacked_symbol(env: ShapeEnv, is_float: bool) -> Any:
    """Return a new data-dependent symbol of a shape environment: a size, or any real number."""
    if is_float:
        symbol = make_symbol(SymT.UNBACKED_FLOAT, env.unbacked_symfloat_counter, real=True)
        env.unbacked_symfloat_counter += 1
        env.var_to_range[symbol] = ValueRanges(-sympy.oo, sympy.oo)
    else:
        symbol = make_symbol(SymT.UNBACKED_INT, env.unbacked_symint_counter, integer=True)
        env.unbacked_symint_counter += 1
        env.var_to_range[symbol] = ValueRanges(0, int_oo)
    return symbol


def symbolic(env: ShapeEnv, expression: Any, kind: type) -> Any:
    """Return an expression as a SymInt, SymFloat or SymBool; ``kind`` is int, float or bool."""
    if kind is bool:
        return env.create_symboolnode(expression)
    example = expression.xreplace(env.backed_var_to_val)
    hint = None if example.free_symbols else kind(example)
    create = env.create_symfloatnode if kind is float else env.create_symintnode
    return create(expression, hint=hint)
