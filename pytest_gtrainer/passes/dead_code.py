"""Drop what nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pytest_gtrainer.graph.effects import has_effect
from pytest_gtrainer.passes.graph_pass import graph_pass


@graph_pass
def eliminate_dead_code_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> bool:
    """Remove nodes without users, in place; mutations, collectives and random operators stay (M5).

    A collective that nobody waits for stays because the other ranks issue theirs; a random operator
    because the numbers that later ones draw depend on it. Inputs stay. One walk from the output up.
    """
    dead = False
    for node in reversed(gm.graph.nodes):
        if not node.users and not has_effect(node):
            gm.graph.erase_node(node)
            dead = True
    return dead
