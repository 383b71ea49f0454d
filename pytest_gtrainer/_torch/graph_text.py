"""What graph text writes and reads: groups, operators, symbols, nodes.

- ``ProcessGroup.group_desc`` is ``mesh_<dimension>`` for a group made by ``init_device_mesh``
  and ``default_pg`` for the world, also where a mesh uses the world as its one dimension.
- ``SymInt.node`` (a ``SymNode`` with ``expr`` and ``shape_env``), ``ShapeEnv.backed_var_to_val``,
  and ``symbol_is_type`` with ``SymT`` to tell a data-dependent symbol from one with a known
  example.
- ``torch._C._dispatch_find_schema_or_throw`` and ``_dispatch_get_all_op_names``: the operators of
  the dispatcher, ``aten::add.Tensor``; those of TorchScript alone, which reach files, are not
  there.
- ``torch._ops._higher_order_ops``: higher-order operators by name.
- ``fx.Graph``: ``_insert``, ``_len``, ``_find_nodes_lookup_table`` and ``_graph_namespace``, as
  ``create_node`` uses them; it warns of symbolic operands, which a text may name, and repeats a
  parser's checks.
- ``torch._C._nn``: the functions of ``torch.nn.functional`` that are written in C++, as Dynamo's
  graphs call them.
- ``torch._C._set_grad_enabled`` and ``_log_api_usage_once``: what Dynamo's graphs call for
  ``no_grad`` and checkpoints.
- ``torch._higher_order_ops.triton_kernel_wrap``: a node names a Triton kernel and its constants by
  their places in ``kernel_side_table``, as ``kernel_idx`` and ``constant_args_idx``; the places
  depend on what was traced before.
- ``nn.Module``: the tables of hooks that its ``__call__`` runs around ``forward``. Beside
  ``_forward_hooks`` stand ``_forward_hooks_with_kwargs`` and ``_forward_hooks_always_called`` with
  the same keys.
- ``ShapeEnv``: the tables that ``create_symbol`` and ``create_unbacked_symint`` fill; these look
  for the user's line on the stack, which takes milliseconds, imports Inductor, and is no line here.
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
    """The ranks of a process group, in its order, and what its maker called it."""

    ranks: tuple[int, ...]
    description: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "ResolvedGroup":
        """Its ranks and description."""
        return cls(tuple(dist.get_process_group_ranks(group)), group.group_desc)


FUNCTIONS_OF_DYNAMO = {
    f"torch._C.{name}": getattr(torch._C, name)
    for name in ("_set_grad_enabled", "_log_api_usage_once")
}
"""Functions without a result that Dynamo leaves in a graph: of ``no_grad``, and for counting calls.
"""

PLAIN_FUNCTIONS = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
}
"""Where functions that Dynamo's graphs call live, by the module's name."""


def resolve_group(name: str) -> ResolvedGroup | None:
    """The process group of that name; None if this process has none."""
    try:
        return ResolvedGroup.of(group_named(name)) if dist.is_initialized() else None
    except ValueError:
        return None


def named_groups() -> dict[str, ResolvedGroup]:
    """This process's groups by name, in the order in which they were made."""
    return (
        {group.group_name: ResolvedGroup.of(group) for group in live_groups()}
        if dist.is_initialized()
        else {}
    )


def expression(value: Any) -> Any:
    """The sympy expression of a symbolic number; an ordinary number as it is."""
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def is_unbacked(symbol: Any) -> bool:
    """Return whether the size is known only when the graph runs."""
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def hint(symbol: Any, value: Any) -> int | float | None:
    """The example that a backed symbol of a symbolic ``value`` was traced with."""
    known = value.node.shape_env.backed_var_to_val.get(symbol)
    return None if known is None else int(known) if known.is_Integer else float(known)


def number_of(value: Any, given: Mapping[str, int]) -> int | list[str]:
    """A symbolic size with the ``given`` numbers of symbols, else those of its trace; the symbols
    that have neither.
    """
    told = value.node.shape_env.simplify(value.node.expr)
    numbers = {symbol: given.get(str(symbol), hint(symbol, value)) for symbol in told.free_symbols}
    unknown = sorted(str(symbol) for symbol, number in numbers.items() if number is None)
    return unknown or int(
        told.xreplace({symbol: sympy.Integer(number) for symbol, number in numbers.items()})
    )


def operator_names() -> list[str]:
    """``aten::add.Tensor`` for every operator that the dispatcher knows now; takes 2 ms."""
    return torch._C._dispatch_get_all_op_names()


def operator_overload(namespace: str, name: str, overload: str) -> OpOverload | None:
    """An operator of the dispatcher; None if it has none of that name."""
    try:
        torch._C._dispatch_find_schema_or_throw(
            f"{namespace}::{name}", "" if overload == "default" else overload
        )
    except RuntimeError:
        return None
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")


def register_prims_of_inductor() -> None:
    """Register the operators that Inductor draws random numbers by; its import does."""
    import torch._inductor.inductor_prims  # noqa: F401


def higher_order_operators() -> dict[str, HigherOrderOperator]:
    """Higher-order operators by name, those that need an import of their own included."""
    import torch.nn.attention.flex_attention  # noqa: F401 - registers the two that are not imported with torch

    return dict(_higher_order_ops)


def is_kernel_call(target: Any) -> bool:
    """Return whether an operator runs a Triton kernel."""
    return target is triton_kernel_wrapper_mutation or target is triton_kernel_wrapper_functional


def kernel_of(arguments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the Triton kernel that a node is given, None if torch's table has none there, and its
    constants.
    """
    kernel = kernel_side_table.id_to_kernel.get(arguments["kernel_idx"])
    return kernel, kernel_side_table.constant_args.get(arguments["constant_args_idx"], {})


def hooks_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return what runs before and after a module's forward and backward, by table: hooks, with how
    they are called.
    """
    found: dict[str, list[Any]] = {}
    for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        for key, hook in getattr(module, table).items():
            marks = [
                mark
                for mark in ("with_kwargs", "always_called")
                if key in vars(module).get(f"{table}_{mark}", ())
            ]
            if table == "_backward_hooks" and module._is_full_backward_hook:
                marks.append("full")
            found.setdefault(table, []).append((hook, *marks) if marks else hook)
    return found


def append_node(
    graph: fx.Graph, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """``graph.create_node`` at the end, for arguments known to be legal."""
    name = graph._graph_namespace.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def backed_symbol(env: ShapeEnv, place: int, example: int | float) -> Any:
    """A new symbol of a shape environment, with an example and no guard but a range."""
    if isinstance(example, float):
        symbol, known = make_symbol(SymT.FLOAT, place, real=True), sympy.Float(example)
        env.var_to_range[symbol] = ValueRanges(-sympy.oo, sympy.oo)
    else:
        symbol, known = (
            make_symbol(SymT.SIZE, place, positive=True, integer=True),
            sympy.Integer(example),
        )
        env.var_to_range[symbol] = ValueRanges(min(example, 2), int_oo)
    env.backed_var_to_val[symbol] = known
    env.var_to_sources[symbol] = []
    env.symbol_guard_counter[symbol] = 0
    return symbol


def unbacked_symbol(env: ShapeEnv, is_float: bool) -> Any:
    """A new data-dependent symbol of a shape environment: a size, or any real number."""
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
    """A symbolic number: ``kind`` is int, float or bool."""
    if kind is bool:
        return env.create_symboolnode(expression)
    example = expression.xreplace(env.backed_var_to_val)
    hint = None if example.free_symbols else kind(example)
    create = env.create_symfloatnode if kind is float else env.create_symintnode
    return create(expression, hint=hint)
