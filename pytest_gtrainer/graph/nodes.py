"""What a node of a graph is: where it belongs, and what it does beside computing its value.

Where it belongs stands in ``node.meta``, as graph trainers write it, so graphs traced elsewhere go straight in:

- ``meta["custom"]["module_fqn"]``, else ``nn_module_stack``: the module that a node belongs to;
- ``meta["autograd_backward"]``: True on nodes that the backward made, the one source of direction;
- ``meta["gt_gathers_once"]`` on the output node: True if a parameter is gathered once however often it is read, so that
  its gradient is complete before it is reduced;
- ``meta["gt_dynamic_dims"]`` there: per dimension that the graph keeps as a symbol, by name, the symbol and the
  extent of the example;
- ``meta["gt_stage_outputs"]`` there, of a pipeline's stage: how many outputs and gradients of inputs it gives;
- ``meta["custom"]["gt_part"]`` in a stage: ``"reduce"`` on what reduces a parameter's gradient over ranks.

What it does is told by its operator: it communicates, waits, draws random numbers, shows memory, writes to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import WAITS
from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, schema

FORWARD, BACKWARD = "fwd", "bwd"
GATHERS_ONCE = "gt_gathers_once"
DYNAMIC_DIMS = "gt_dynamic_dims"
STAGE_OUTPUTS = "gt_stage_outputs"
PART, REDUCE = "gt_part", "reduce"

COMMUNICATING = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "_dtensor")
_OF_TORCHS_BUCKET = "bucketing_custom_sources"
"""Key of ``meta`` that ``torch._inductor.fx_passes.bucketing`` sets on every node that it makes."""
_DRAWING = ("run_and_save_rng_state", "run_with_rng_state")
_IN_PLACE = frozenset(
    getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, f"__{name[1:]}__")
)
"""``operator.iadd`` and its family."""
_WRITING = {setattr, delattr, operator.setitem, operator.delitem, *_IN_PLACE}
"""Python's operators that write to their first operand, as graphs of Dynamo have them."""


def direction(node: fx.Node) -> str:
    """ "bwd" for nodes the backward made, else "fwd" (A3).

    Torch's bucketing sets no mark on the nodes that it makes: they are of the direction of what they serve.
    """
    meta = node.meta
    if meta.get("autograd_backward"):
        return BACKWARD
    return _direction_of_bucket(node) if _OF_TORCHS_BUCKET in meta else FORWARD


def _direction_of_bucket(node: fx.Node) -> str:
    """By the nodes around torch's bucket: the first that use it, else those that go into it."""
    for neighbours in (lambda one: list(one.users), lambda one: one.all_input_nodes):
        todo, seen, found = [node], {node}, set()
        while todo:
            for other in neighbours(todo.pop()):
                if other not in seen and other.op not in ("placeholder", "output", "get_attr"):
                    seen.add(other)
                    if _OF_TORCHS_BUCKET in other.meta:
                        todo.append(other)
                    else:
                        found.add(bool(other.meta.get("autograd_backward")))
        if found:
            return BACKWARD if found == {True} else FORWARD
    return FORWARD


def reached(start: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes that one comes to from ``start``, from neighbours to their neighbours."""
    todo, seen = [start], set[fx.Node]()
    while todo:
        found = {*neighbours(todo.pop())} - seen
        todo += found
        seen |= found
    return seen


def node_fqn(node: fx.Node) -> str:
    """Module FQN of a node: from ``custom``, else the innermost of ``nn_module_stack``, else "" (D12)."""
    meta = node.meta
    custom = meta.get("custom")
    if custom and (fqn := custom.get("module_fqn")):
        return str(fqn)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def is_collective(node: fx.Node) -> bool:
    """Whether the operator communicates, or waits for one that does."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COMMUNICATING


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a functional collective, or for several."""
    return any(node.target is wait for wait in WAITS)


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random generator.

    Attention without dropout does not, though torch tags its operator as if it did.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.name() in _DRAWING
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return argument_of(node, "dropout_p") != 0.0


def argument_of(node: fx.Node, *names: str) -> Any:
    """What an operator is given as the first argument of these names, or its default; None if it has none."""
    for place, argument in enumerate(schema(node.target).arguments):
        if argument.name in names:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return argument.default_value if given is None else given
    return None


def short_name(node: fx.Node) -> str:
    """The operator's name without namespace and overload; of others as Python has it."""
    if isinstance(node.target, OpOverload):
        return str(schema(node.target).name).partition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def held(gm: Any, path: str) -> Any:
    """What a graph's module holds under a dotted name; None if it holds nothing there."""
    for step in path.split("."):
        gm = getattr(gm, step, None)
    return gm


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """The graphs inside a graph that a node is given, by the operands that hold them."""
    found = {one: held(gm, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"}
    return {one: body for one, body in found.items() if isinstance(body, fx.GraphModule)}


def is_view(target: object) -> bool:
    """Whether an operator's result shares memory with its operand, to which it does not write."""
    return isinstance(target, OpOverload) and (target.is_view or target is torch.ops.aten._unsafe_view.default)


def mutates(node: fx.Node) -> bool:
    """Whether the operator writes to an operand."""
    return bool(written_operands(node))


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that the node's operator writes to; ``x += 1`` of a number makes another one."""
    written: list[fx.Node] = []
    if not isinstance(node.target, OpOverload):
        if node.op == "call_function" and node.target in _WRITING and isinstance(first := node.args[0], fx.Node):
            value = first.meta.get("val", first.meta.get("example_value"))
            if value is None or isinstance(value, torch.Tensor):
                written.append(first)
        return written
    for place, argument in enumerate(schema(node.target).arguments):
        if argument.is_write:
            given = node.args[place] if place < len(node.args) else None
            fx.node.map_arg(node.kwargs.get(argument.name, given), written.append)
    return written


def returns_an_operand(node: fx.Node) -> bool:
    """Whether the result is, or holds, the operand that the operator writes to, as of ``add_`` and ``+=``."""
    if isinstance(node.target, OpOverload):
        return any(result.is_write for result in schema(node.target).returns)
    return node.target in _IN_PLACE


def walked(
    starts: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]], is_of_it: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """The nodes that ``onward`` leads to, step by step, the starts among them, as far as all ``is_of_it``."""
    found: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in found and is_of_it(node):
            found.add(node)
            todo += onward(node)
    return found


def storage_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view, a part of one, a wait, or the result of an operator in place, shows."""
    while True:
        if (is_view(node.target) or node.target is operator.getitem or is_wait(node)) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        elif returns_an_operand(node) and (written := written_operands(node)):
            node = written[0]
        else:
            return node


def writes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes whose memory is written to, each with those that write to it, in graph order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in written_operands(node):
            found.setdefault(storage_of(operand), []).append(node)
    return found


def has_effect(node: fx.Node) -> bool:
    """Whether the node must stay though nobody reads it (M5): mutations, collectives, random operators, assertions.

    What cannot be judged from here stays too: modules, methods, operators that run graphs.
    """
    if node.op in ("placeholder", "output", "call_module", "call_method"):
        return True
    if node.op == "get_attr":
        return False
    if isinstance(node.target, OpOverload):
        return is_random(node) or is_collective(node) or bool(node.is_impure(impure_random=False))
    # Python's operators on sizes and tuples have none; x += y and x.grad = y write, and nobody may read what they give
    plain = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
    return not plain or node.target in _WRITING or bool(node.is_impure())
