"""What graph trainers write into ``node.meta``, read in one place: graphs traced elsewhere go straight in.

- ``meta["custom"]["module_fqn"]``, else ``nn_module_stack``: the module that a node belongs to;
- ``meta["autograd_backward"]``: True on nodes that the backward made, the one source of direction;
- ``meta["gt_gathers_once"]`` on the output node: True where a parameter is gathered once however often it is
  read, so that its gradient is complete before it is reduced;
- ``meta["gt_dynamic_dims"]`` there: per dimension that the graph keeps as a symbol, by name, the symbol and the
  extent of the example.
"""

from __future__ import annotations

from torch import fx

FORWARD, BACKWARD = "fwd", "bwd"
GATHERS_ONCE = "gt_gathers_once"
DYNAMIC_DIMS = "gt_dynamic_dims"


def direction(node: fx.Node) -> str:
    """ "bwd" for nodes the backward made, else "fwd" (A3)."""
    return BACKWARD if node.meta.get("autograd_backward") else FORWARD


def node_fqn(node: fx.Node) -> str:
    """Module FQN of a node: from ``custom``, else the innermost of ``nn_module_stack``, else "" (D12)."""
    meta = node.meta
    custom = meta.get("custom")
    if custom and (fqn := custom.get("module_fqn")):
        return str(fqn)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""
