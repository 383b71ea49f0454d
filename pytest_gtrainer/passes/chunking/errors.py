"""The error of chunking, and how it names a node."""

from __future__ import annotations

import re

import torch
from torch import fx

from pytest_gtrainer.graph.conventions import node_fqn

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class ChunkError(ValueError):
    """A region cannot be chunked as asked; the message says which, where, and what to do."""


def described(node: fx.Node) -> str:
    """A node as messages show it: name, operator, extents, module and, if it is known, source line."""
    parts = [f"{node.name} = {node.target}" if node.op == "call_function" else f"{node.op} {node.target}"]
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        parts.append(str(list(value.shape)))
    if fqn := node_fqn(node):
        parts.append(f"in {fqn}")
    if line := source_line(node):
        parts.append(f"at {line}")
    return " ".join(parts)


def source_line(node: fx.Node) -> str:
    """ "file:line" of the innermost frame of the node's stack trace, "" without one."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
