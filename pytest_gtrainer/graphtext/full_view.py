"""The view ``full``: every operator, and all that it takes to make the graph again.

One walk over the nodes finds where each belongs, a second one names and spells them. Graphs
inside the graph are drawn the same way, each under a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import plain_attributes
from pytest_gtrainer.graph.bucket_plan import managed_order
from pytest_gtrainer.graph.nodes import node_fqn
from pytest_gtrainer.graphtext.folding import INDENT, fold
from pytest_gtrainer.graphtext.groups import groups_of
from pytest_gtrainer.graphtext.lines import input_sections, output_sections, schedule_sections
from pytest_gtrainer.graphtext.naming import names_of
from pytest_gtrainer.graphtext.operators import operator_of, word
from pytest_gtrainer.graphtext.scopes import Scopes, is_computed, is_item, scopes_of
from pytest_gtrainer.graphtext.sections import Section
from pytest_gtrainer.graphtext.spelling import Speller
from pytest_gtrainer.graphtext.symbols import Backed


def draw(gm: fx.GraphModule, mesh: Mapping[str, int]) -> tuple[list[str], list[Section]]:
    """Definitions and sections of a graph."""
    with plain_attributes():
        return _draw(gm, mesh, Backed(), is_body=False)


def _draw(
    gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed, *, is_body: bool
) -> tuple[list[str], list[Section]]:
    scopes = scopes_of(gm.graph.nodes)
    groups = groups_of(gm, mesh, scopes.collectives)
    device = _default_device(gm)
    bodies = _Bodies(gm, mesh, backed)
    settings = _settings(gm, scopes)
    names = names_of(scopes, [*(group.symbol for group in groups.values()), *bodies.names.values()])
    speller = Speller(gm, scopes, names, groups, device, bodies.names, backed)
    sections = [
        *input_sections(scopes, speller),
        *schedule_sections(scopes, names, speller),
        *output_sections(gm.graph.output_node(), scopes, speller),
    ]
    definitions = [str(group) for group in groups.values()]
    definitions += [] if is_body else backed.definitions()
    definitions += [f'default = device("{device}")'] if device != "cpu" else []
    return definitions + settings + bodies.text, sections


def _settings(gm: fx.GraphModule, scopes: Scopes) -> list[str]:
    """What holds for the graph as a whole, where it is not what it usually is."""
    output = gm.graph.output_node()
    told = []
    if scopes.unowned and not any(node_fqn(node) for node in scopes.computed):
        told.append("owners = inferred")
        scopes.unowned.clear()
    if not isinstance(output.args[0], tuple):
        told.append("returns = list" if isinstance(output.args[0], list) else "returns = value")
    managed = output.meta.get("gt_managed_order")
    parameters = [source.fqn for source in scopes.inputs.values() if source.space == "P"]
    if managed is not None and list(managed) != managed_order(parameters):
        told.append(f"managed = {list(managed)}")
    return told


def _default_device(gm: fx.GraphModule) -> str:
    """Where the graph's first tensor is, constants aside: they may stand anywhere."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op != "get_attr" and not is_item(node):
            return value.device.type
    return "cpu"


class _Bodies:
    """Graphs inside the graph, each told once: equal bodies have one name, after their user."""

    def __init__(self, gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed) -> None:
        self.names: dict[str, str] = {}
        self.text: list[str] = []
        self._by_content: dict[str, str] = {}
        for node, user in _bodies_by_use(gm):
            body = _attribute(gm, str(node.target))
            self.names[str(node.target)] = self._define(user, *_draw(body, mesh, backed, is_body=True))

    def _define(self, user: fx.Node, definitions: list[str], sections: list[Section]) -> str:
        content = "\n".join(INDENT + line for line in [*definitions, *fold(sections)])
        if content not in self._by_content:
            short = operator_of(user).short if is_computed(user) else user.op
            name = word(f"{short}_graph_{len(self._by_content)}")
            self._by_content[content] = name
            self.text += [f"def {name}():", *content.splitlines()]
        return self._by_content[content]


def _bodies_by_use(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """The nodes that hold a body, with the first user of each, as they are used: where they stand says nothing."""
    holders = gm.graph.find_nodes(op="get_attr")
    bodies = {node for node in holders if isinstance(_attribute(gm, str(node.target)), fx.GraphModule)}
    if not bodies:
        return []
    first: dict[fx.Node, fx.Node] = {}
    for user in gm.graph.nodes:
        for operand in user.all_input_nodes:
            if operand in bodies:
                first.setdefault(operand, user)
    return list(first.items())


def _attribute(gm: Any, target: str) -> Any:
    for part in target.split("."):
        gm = getattr(gm, part, None)
    return gm
