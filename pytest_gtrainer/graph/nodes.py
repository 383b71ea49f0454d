"""What a node of a graph is."""

from __future__ import annotations

from torch import fx

from pytest_gtrainer._torch.operators import OpOverload, schema
from pytest_gtrainer._torch.passes import draws_random_numbers, is_collective, is_impure

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


def mutates(node: fx.Node) -> bool:
    """Whether the operator writes to an operand."""
    return isinstance(node.target, OpOverload) and bool(schema(node.target).is_mutable)


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random generator.

    Attention without dropout does not, though torch tags its operator as if it did.
    """
    if not isinstance(node.target, OpOverload) or not draws_random_numbers(node.target):
        return False
    return _argument(node, "dropout_p") != 0.0


def _argument(node: fx.Node, name: str) -> object:
    """The value of an operator's argument, its default where it is not given; None if it has none of that name."""
    assert isinstance(node.target, OpOverload)
    for place, argument in enumerate(schema(node.target).arguments):
        if argument.name == name:
            given: object = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def has_effect(node: fx.Node) -> bool:
    """Whether the node must stay though nobody reads it (M5): mutations, collectives, random operators, assertions.

    What cannot be judged from here stays too: modules, methods, operators that run graphs.
    """
    if node.op in ("placeholder", "output", "call_module", "call_method"):
        return True
    if node.op == "get_attr":
        return False
    if isinstance(node.target, OpOverload):
        if is_random(node) or is_collective(node.target):
            return True
        return is_impure(node, random=False)
    return not _is_plain_function(node) or is_impure(node, random=True)


def _is_plain_function(node: fx.Node) -> bool:
    """Python's operators on sizes and tuples."""
    module = getattr(node.target, "__module__", "")
    return module in ("_operator", "math", "builtins") or node.target is getattr
