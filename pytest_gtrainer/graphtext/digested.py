"""What a text tells by a digest or a path only: to give ``parse`` beside the text."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graphtext.literals import digest_of


def constants(gm: fx.GraphModule) -> dict[str, Any]:
    """Large constants and objects without a spelling by their digest, called modules by their path.

    Bodies included. ``parse(render(gm), constants=constants(gm))`` is the graph again.
    """
    found: dict[str, Any] = {}
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_module":
                    found[str(node.target)] = module.get_submodule(str(node.target))
                found |= {digest: value for value in _values(module, node) if (digest := digest_of(value))}
    return found


def _values(gm: fx.GraphModule, node: fx.Node) -> Iterator[Any]:
    """The constants that a node names or holds."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(gm)
        if not isinstance(value, fx.GraphModule):
            yield value
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        if not isinstance(leaf, fx.Node):
            yield leaf
