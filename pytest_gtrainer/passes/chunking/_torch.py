"""Torch's private parts that chunking relies on; a new torch breaks this file first.

Read against torch 2.13:

- an operator's ``_schema`` tells whether its result is an operand that it wrote to;
- ``_LazyGraphModule`` generates its code when it is first run;
- nodes that autograd's engine makes when it adds two gradients carry ``meta["is_gradient_acc"]``, and the
  ``seq_nr`` of whatever ran before; in graphs without that mark, an addition in the backward is the engine's
  if an operand of the backward has a smaller ``seq_nr``, because the backward counts down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

try:
    from torch.fx._lazy_graph_module import _LazyGraphModule
except ImportError as error:  # pragma: no cover - needs another torch
    raise ImportError(
        f"pytest-gtrainer {__name__} reads torch 2.13's graph modules and found torch {torch.__version__}: {error}"
    ) from error

_ADD = torch.ops.aten.add.Tensor
_ACCUMULATE = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


def returns_an_operand(node: fx.Node) -> bool:
    """Whether the result is the operand that the operator writes to, as of ``add_``."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def is_engine_addition(node: fx.Node) -> bool:
    """Whether autograd's engine added two gradients of one tensor: older plus newer."""
    if node.target not in _ACCUMULATE or not node.meta.get("autograd_backward"):
        return False
    if len(node.args) != 2 or node.kwargs or not all(isinstance(operand, fx.Node) for operand in node.args):
        return False
    return bool(node.meta.get("is_gradient_acc")) or _counts_up(node)


def _counts_up(node: fx.Node) -> bool:
    own = node.meta.get("seq_nr")
    backward = [source.meta.get("seq_nr") for source in node.all_input_nodes if source.meta.get("autograd_backward")]
    return own is not None and any(number is not None and number < own for number in backward)


def lazy_graph_module(attributes: dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule of the graph, and of what its ``get_attr`` nodes name; its code is made when it is needed."""
    made: fx.GraphModule = _LazyGraphModule(attributes, graph)
    return made
