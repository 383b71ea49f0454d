"""Compare two graphs in all that a text promises to keep."""

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pytest_gtrainer._torch.graph_text import expression
from pytest_gtrainer.graph.nodes import direction, node_fqn
from pytest_gtrainer.graphtext import constants, lines_of, parse, render, unfold
from pytest_gtrainer.graphtext.scopes import is_computed, is_item
from pytest_gtrainer.graphtext.spelling import is_contiguous


def assert_comes_back(gm: fx.GraphModule, *inputs: torch.Tensor) -> fx.GraphModule:
    """The graph is the same, its text is the same, and so are its results."""
    text = render(gm)
    again = parse(text, constants=constants(gm))
    again.graph.lint()
    assert_same_graph(again, gm)
    assert render(again) == text
    assert unfold(text) == lines_of(gm)
    if inputs:
        expected, got = gm(*[x.clone() for x in inputs]), again(*[x.clone() for x in inputs])
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return again


def assert_same_graph(one: fx.GraphModule, other: fx.GraphModule) -> None:
    """Operators, operands, metadata that passes read, results; in the same order."""
    ours, theirs = described(one), described(other)
    for node, expected in zip(ours, theirs, strict=False):
        assert node == expected, f"{node}\n{expected}"
    assert len(ours) == len(theirs)


def described(gm: fx.GraphModule) -> list[Any]:
    """Every node that has a line, with operands by position."""
    places: dict[fx.Node, int] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or is_computed(node):
            places[node] = len(places)
            operands = pytree.tree_map_only(
                fx.Node,
                lambda operand: _operand(gm, operand, places),
                [node.args, sorted(node.kwargs.items())],
            )
            target = node.target if node.op not in ("placeholder", "output") else node.op
            lines.append((target, _plain(operands), _meta(node)))
    return lines


def _operand(gm: fx.GraphModule, node: fx.Node, places: dict[fx.Node, int]) -> Any:
    if is_item(node):
        return ("item", _operand(gm, node.args[0], places), node.args[1])
    if node.op == "get_attr":
        return ("attribute", _attribute(gm, str(node.target)))
    return ("value", places[node])


def _attribute(gm: Any, path: str) -> Any:
    for part in path.split("."):
        gm = getattr(gm, part)
    if isinstance(gm, fx.GraphModule):
        return described(gm)
    return (_kind(gm), None if gm.is_meta else gm.tolist()) if isinstance(gm, torch.Tensor) else gm


def _plain(value: Any) -> Any:
    """Return literals so that ``==`` compares bits: repr distinguishes -0.0, nan, and 1 from 1.0
    and True.
    """
    return repr(
        pytree.tree_map_only((torch.SymInt, torch.SymFloat), lambda v: str(v.node.hint), value)
    )


def _meta(node: fx.Node) -> dict[str, Any]:
    kept = ("gt_input", "gt_outputs", "fsdp_bucket", "recompute")
    values = {key: node.meta.get(key) for key in kept}
    if node.op not in ("placeholder", "output"):
        custom = {
            key: value
            for key, value in (node.meta.get("custom") or {}).items()
            if key != "module_fqn"
        }
        values |= {"fqn": node_fqn(node), "direction": direction(node), "custom": custom}
    return {**values, "val": _kind(node.meta.get("val"))}


def _kind(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return (type(value).__name__, [_kind(item) for item in value])
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return None
        shape, strides = (
            [expression(e) for e in value.shape],
            [expression(s) for s in value.stride()],
        )
        usual = is_contiguous(shape, strides)
        return (
            value.dtype,
            value.device.type,
            [_hint(e) for e in value.shape],
            usual or [_hint(s) for s in value.stride()],
        )
    fixed = (
        isinstance(value, torch.SymInt) and value.node.expr.is_number
    )  # symbolic no more: a guard has fixed it
    return ("int" if fixed else type(value).__name__, _hint(value))


def _hint(value: Any) -> Any:
    """Return the size that the example had when it was traced; the form of a size without one."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint if value.node.has_hint() else len(value.node.expr.free_symbols)
    return value
