"""From an FX graph to its text: scopes, names, sections, lines; then folded.

Every step is one walk over the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_gtrainer.graphtext import header as headers
from pytest_gtrainer.graphtext.folding import INDENT, fold
from pytest_gtrainer.graphtext.groups import groups_of
from pytest_gtrainer.graphtext.naming import names_of
from pytest_gtrainer.graphtext.operators import operator_of, word
from pytest_gtrainer.graphtext.paths import Layer, spell_from, split_layer
from pytest_gtrainer.graphtext.scopes import is_computed, scopes_of
from pytest_gtrainer.graphtext.sections import Key, Line, Record, Section, section_keys
from pytest_gtrainer.graphtext.spelling import Speller
from pytest_gtrainer.graphtext.unfolding import unfold

VIEWS = ("full",)


def render(
    gm: fx.GraphModule,
    view: str = "full",
    *,
    header: Mapping[str, str] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> str:
    """The canonical text of a graph.

    Args:
        gm: the graph, with ``meta["val"]`` and the metadata named in ``scopes``.
        view: what to show; "full" in this version.
        header: comment lines that say what made the graph, never compared.
        mesh: dimensions and extents over all ranks, outermost first; names the process groups
            that do not say themselves which dimension they belong to.

    Raises:
        ValueError: an unknown view.
    """
    if view not in VIEWS:
        raise ValueError(f"view {view!r}: this version has {', '.join(VIEWS)}")
    drawing = _draw(gm, mesh or {})
    lines = [*headers.write(header or {}), *drawing.preamble, *fold(drawing.sections)]
    return "\n".join(lines) + "\n"


def records(gm: fx.GraphModule, *, mesh: Mapping[str, int] | None = None) -> tuple[Record, ...]:
    """The graph's lines, unfolded: what two graphs are compared by."""
    drawing = _draw(gm, mesh or {})
    preamble = unfold("\n".join(drawing.preamble))
    return preamble + tuple(record for section in drawing.sections for record in section.records())


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A text before folding: definitions, then the schedule in sections."""

    preamble: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def _draw(gm: fx.GraphModule, mesh: Mapping[str, int]) -> _Drawing:
    nodes = list(gm.graph.nodes)
    groups = groups_of(gm, mesh)
    device = _default_device(nodes)
    preamble = [str(group) for group in groups.values()]
    if device != "cpu":
        preamble.append(f'default = device("{device}")')
    bodies = _Bodies(gm, nodes, mesh)
    scopes = scopes_of(nodes)
    names = names_of(nodes, scopes, [group.symbol for group in groups.values()])
    speller = Speller(gm, scopes, names, groups, device, bodies.names)
    sections = [
        *_input_sections(nodes, scopes, names, speller),
        *_schedule(nodes, scopes, names, speller),
        *_output_sections(nodes, scopes, speller),
    ]
    return _Drawing(preamble + bodies.text, sections)


def _default_device(nodes: Iterable[fx.Node]) -> str:
    """Where the graph's first tensor is."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


class _Bodies:
    """Graphs inside the graph, each told once: equal bodies have one name, after their user."""

    def __init__(self, gm: fx.GraphModule, nodes: Iterable[fx.Node], mesh: Mapping[str, int]) -> None:
        self.names: dict[str, str] = {}
        self.text: list[str] = []
        self._by_content: dict[str, str] = {}
        for node in nodes:
            if node.op == "get_attr" and isinstance(body := _attribute(gm, str(node.target)), fx.GraphModule):
                self.names[str(node.target)] = self._define(node, body, mesh)

    def _define(self, node: fx.Node, body: fx.GraphModule, mesh: Mapping[str, int]) -> str:
        drawing = _draw(body, mesh)
        content = "\n".join(INDENT + line for line in [*drawing.preamble, *fold(drawing.sections)])
        if content not in self._by_content:
            user = next((operator_of(user).short for user in node.users if is_computed(user)), "unused")
            name = word(f"{user}_graph_{len(self._by_content)}")
            self._by_content[content] = name
            self.text += [f"def {name}():", *content.splitlines()]
        return self._by_content[content]


def _attribute(gm: Any, target: str) -> Any:
    for part in target.split("."):
        gm = getattr(gm, part, None)
    return gm


def _grouped(keys: Sequence[Key], items: Sequence[Any]) -> Iterable[tuple[Key, list[Any]]]:
    """Neighbours of one key together."""
    start = 0
    for place in range(1, len(keys) + 1):
        if place == len(keys) or keys[place] != keys[start]:
            yield keys[start], list(items[start:place])
            start = place


def _input_sections(nodes: Any, scopes: Any, names: Any, speller: Speller) -> Iterable[Section]:
    inputs = [node for node in nodes if node.op == "placeholder"]
    keys = [Key(scopes[node].space, scopes[node].layer) for node in inputs]
    for key, members in _grouped(keys, inputs):
        speller.enter_section(key)
        targets = [speller.prefix(scopes[node]) + names[node] for node in members]
        kinds = [speller.type_of(node.meta.get("val")) for node in members]
        lines = [Line("", f"{target}: {kind}") for target, kind in zip(targets, kinds, strict=True)]
        yield Section(key, tuple(lines))


def _schedule(nodes: Any, scopes: Any, names: Any, speller: Speller) -> Iterable[Section]:
    computed = [node for node in nodes if is_computed(node)]
    own = [Key(scopes[node].space, scopes[node].layer) for node in computed]
    floating = [scopes[n].is_bucket or scopes[n].is_nowhere or operator_of(n).is_collective for n in computed]
    for key, members in _grouped(section_keys(own, floating), computed):
        speller.enter_section(key)
        scope, heading, lines = None, "", []
        for node in members:
            if scopes[node] != scope:
                scope = scopes[node]
                heading = speller.enter_scope(scope)
            lines.append(Line(heading, _statement(node, names[node], speller)))
        yield Section(key, tuple(lines))


def _statement(node: fx.Node, name: str, speller: Speller) -> str:
    operator = operator_of(node)
    kind = speller.type_of(node.meta.get("val"))
    tag = node.meta.get("recompute")
    if tag is not None:
        kind += f" | {getattr(tag, 'name', str(tag)).lower()}"
    return f"{name}: {kind} = {speller.call(node, operator)}"


def _output_sections(nodes: Any, scopes: Any, speller: Speller) -> Iterable[Section]:
    """One line a returned value: by the name the tracer gives it, else in the layer it comes from."""
    result, told = nodes[-1].args[0], nodes[-1].meta.get("gt_outputs")
    leaves = list(result) if isinstance(result, list | tuple) else [result]
    if isinstance(result, dict) or any(isinstance(leaf, list | tuple | dict) for leaf in leaves):
        yield from _nested_output(result, speller)
        return
    if told is not None and len(told) == len(leaves):
        layers = [split_layer(fqn)[0] for fqn in told]
    else:
        told, layers = [None] * len(leaves), _layers_of(leaves, scopes)
    keys = [Key("out", layer) for layer in layers]
    for key, members in _grouped(keys, list(zip(told, leaves, strict=True))):
        speller.enter_section(key)
        yield Section(key, tuple(_output_line(fqn, leaf, key, speller) for fqn, leaf in members))


def _output_line(fqn: str | None, leaf: Any, key: Key, speller: Speller) -> Line:
    value = speller.argument(leaf)
    return Line("", f"yield {value}" if fqn is None else f"{spell_from(fqn, key.layer)} = {value}")


def _layers_of(leaves: Sequence[Any], scopes: Any) -> list[Layer | None]:
    """The layers that values come from; a constant stands with its neighbour."""
    layers: list[Layer | None] = []
    for leaf in leaves:
        known = isinstance(leaf, fx.Node) and leaf in scopes
        layers.append(scopes[leaf].layer if known else layers[-1] if layers else None)
    return layers


def _nested_output(result: Any, speller: Speller) -> Iterable[Section]:
    key = Key("out", None)
    speller.enter_section(key)
    yield Section(key, (Line("", f"yield from {speller.argument(result)}"),))
