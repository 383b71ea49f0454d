"""Nodes in messages."""

from __future__ import annotations

from torch import fx

from pytest_gtrainer.graph.nodes import node_fqn


def input_name(node: fx.Node) -> str:
    """What a placeholder stands for: "parameter layers.0.wq.weight" where the tracer said so."""
    known = node.meta.get("gt_input")
    return f"{known['kind']} {known['fqn']}" if known else f"input {node.name}"


def described(node: fx.Node) -> str:
    """A node by its name, operator and module."""
    fqn = node_fqn(node)
    return f"{node.name} ({node.target}{f', {fqn}' if fqn else ''})"
