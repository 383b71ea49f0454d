"""Render FX graphs and layouts as text: the sections of a view, folded.

- ``full`` shows every operator, and all that ``parse`` needs to make the graph again. One walk over
  the nodes finds the scope of each, a second one names and spells them. Bodies are rendered in the
  same way.
- ``schedule`` has a module of its own.
- ``layout`` shows which parameter sits at which byte of which collective. A section is a kind of
  collective, and in it a layer if all parameters of a payload belong to one. A ``payload`` line has
  group, dtype, the directions of the graph that issue it, reduction and bytes of one rank's slice;
  below it stand its parameters, each ``at`` a byte of it.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_modules import result_structure
from pytest_gtrainer._torch.graph_text import hooks_of
from pytest_gtrainer.graph.bucket_plan import managed_order
from pytest_gtrainer.graph.collectives import refuse_unseen
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopt
from pytest_gtrainer.graph.layout import BucketLayout, bucket_layout
from pytest_gtrainer.graph.nodes import bodies_of, held, node_fqn, spell_dtype
from pytest_gtrainer.graphtext import header as headers
from pytest_gtrainer.graphtext import schedule_view
from pytest_gtrainer.graphtext.folding import INDENT, fold, unfold
from pytest_gtrainer.graphtext.operators import groups_of, groups_of_ranks, operator_of, word
from pytest_gtrainer.graphtext.scopes import is_computed, is_item, tags_of
from pytest_gtrainer.graphtext.sections import (
    GraphLine,
    Line,
    Section,
    SectionKey,
    section_keys,
    spell_from,
    split_layer,
    stretches,
)
from pytest_gtrainer.graphtext.spelling import (
    SIZES,
    Backed,
    Speller,
    spell_description,
    spell_structure,
)

VIEWS = ("full", "schedule", "layout")
_Drawing = tuple[list[str], list[Section]]
"""The lines at the head, and the sections before they are folded."""


def render(
    gm: AnyGraph,
    view: str = "full",
    *,
    names: Names | None = None,
    header: Mapping[str, str] | None = None,
    mesh: Mapping[str, int] | None = None,
    sizes: str = "both",
) -> str:
    """Return the canonical text of a graph.

    Args:
        gm: the graph, with ``meta["val"]`` and the metadata named in ``scopes``; or one of Dynamo,
            AOTAutograd, Inductor or ``torch.export``, whose own names are read.
        view: "full" shows every operator and can be parsed; "schedule" shows collectives, waits and
            the amount of compute between them; "layout" shows which parameter lies at which byte of
            which collective.
        names: what the inputs are, if the graph does not say it: the model, FQNs by placeholder, or
            Dynamo's graph for one of AOTAutograd.
        header: comment lines that say what made the graph; they are never compared.
        mesh: dimensions and extents over all ranks, outermost first; they name groups without a
            dimension of their own.
        sizes: dynamic sizes in the view "full": "both" writes symbols with the traced example, ``s0
            = size(16)``; "symbols" writes no example; "examples" writes only the example.

    Raises:
        ValueError: unknown view or sizes; a layout whose process groups nobody knows; ``names``
            that do not fit.
    """
    if sizes not in SIZES:
        raise ValueError(
            f"sizes={sizes!r}: dynamic sizes are written as {', '.join(map(repr, SIZES))}"
        )
    head, sections = _draw(adopt(gm, names), view, mesh or {}, sizes)
    fields = {} if view == "full" else {"view": view}
    return _write({**fields, **(header or {})}, head, sections)


def render_layout(
    layout: BucketLayout,
    *,
    header: Mapping[str, str] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> str:
    """Return the text of a layout, of a graph or of an eager model.

    ``header`` and ``mesh`` are those of ``render``.
    """
    return _write({"view": "layout", **(header or {})}, *_draw_layout(layout, mesh or {}, {}))


def lines_of(
    gm: AnyGraph,
    view: str = "full",
    *,
    mesh: Mapping[str, int] | None = None,
    names: Names | None = None,
) -> tuple[GraphLine, ...]:
    """Return the unfolded lines of the graph's text, by which two graphs are compared."""
    head, sections = _draw(adopt(gm, names), view, mesh or {})
    lines = list(unfold("\n".join(head)))
    for section in sections:
        lines += section.unfolded()
    return tuple(lines)


def _write(header: Mapping[str, str], head: Sequence[str], sections: Sequence[Section]) -> str:
    return "\n".join([*headers.write(header), *head, *fold(sections)]) + "\n"


def _draw(gm: fx.GraphModule, view: str, mesh: Mapping[str, int], sizes: str = "both") -> _Drawing:
    if view == "full":
        return _draw_full(gm, mesh, Backed(sizes), is_body=False)
    if view == "schedule":
        refuse_unseen(gm)
        return schedule_view.draw(gm, mesh)
    if view == "layout":
        # Of groups with the same ranks, the first one names them.
        groups = reversed(groups_of(gm, mesh).values())
        known = {group.ranks: group.symbol for group in groups if group.ranks}
        return _draw_layout(bucket_layout(gm), mesh, known)
    raise ValueError(f"view {view!r}: this version has {', '.join(VIEWS)}")


def _draw_full(
    gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed, *, is_body: bool
) -> _Drawing:
    """Return the definitions and settings of a graph, and its sections.

    Args:
        is_body: the graph is one that another graph calls, which has the other's sizes.
    """
    device = backed.device(_default_device(gm))
    bodies, bodies_text = _bodies(gm, mesh, backed)
    speller = Speller(gm, mesh, backed, device, bodies)
    scopes, output = speller.scopes, gm.graph.output_node()

    # Settings hold for the graph as a whole; the usual ones are left out.
    settings = []
    results = output.args[0]
    if scopes.unowned and not any(node_fqn(node) for node in scopes.computed):
        settings.append("owners = inferred")
        scopes.unowned.clear()
    if isinstance(results, list):
        settings.append("returns = list")
    elif not isinstance(results, tuple):
        settings.append("returns = value")

    structure = output.meta.get("gt_structure")
    # The outputs of a traced step have names, which show their structure.
    if structure is None and "gt_outputs" not in output.meta:
        structure = result_structure(gm.graph)
    if structure is not None and (spelled := spell_structure(structure)) is not None:
        settings.append(f"structure = {spelled}")

    managed = output.meta.get("gt_managed_order")
    parameters = [source.fqn for source in scopes.inputs.values() if source.space == "P"]
    if managed is not None and list(managed) != managed_order(parameters):
        settings.append(f"managed = {list(managed)}")
    if hooks := hooks_of(gm):
        settings.append(f"hooks = {spell_description(hooks)}")

    sections = [
        *_input_sections(speller),
        *_schedule_sections(speller),
        *_output_sections(output, speller),
    ]

    # Last, as the sections name the groups and modules that they use.
    definitions = list(map(str, speller.groups.values()))
    if not is_body:
        definitions += backed.definitions()
    if device != "cpu":
        definitions.append(f'default = device("{device}")')
    modules: dict[str, None] = {}
    for node in scopes.computed:
        if node.op == "call_module":
            modules[speller.module_definition(str(node.target))] = None
    return [*definitions, *settings, *modules, *bodies_text], sections


def _default_device(gm: fx.GraphModule) -> torch.device:
    """Return the device of the first tensor; types on this device do not name it."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op != "get_attr" and not is_item(node):
            return value.device
    return torch.device("cpu")


def _bodies(
    gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed
) -> tuple[dict[str, str], list[str]]:
    """Return the names of bodies by their attributes, and their text in the order of first use.

    Bodies with equal text have one name.
    """
    names: dict[str, str] = {}
    by_content: dict[str, str] = {}
    for user in gm.graph.nodes:
        called = {str(operand.target): body for operand, body in bodies_of(gm, user).items()}
        if user.op == "call_module":
            module = held(gm, str(user.target))
            if isinstance(module, fx.GraphModule):
                called[str(user.target)] = module
        for path, body in called.items():
            if path in names:
                continue
            definitions, sections = _draw_full(body, mesh, backed, is_body=True)
            content = "\n".join(INDENT + line for line in [*definitions, *fold(sections)])
            short = operator_of(user).short if is_computed(user) else user.op
            names[path] = by_content.setdefault(content, word(f"{short}_graph_{len(by_content)}"))

    text = []
    for content, name in by_content.items():
        text += [f"def {name}():", *content.splitlines()]
    return names, text


def _input_sections(speller: Speller) -> Iterable[Section]:
    inputs = list(speller.scopes.inputs)
    keys = []
    for space, fqn, _ in speller.scopes.inputs.values():
        layer = None
        if space != "I":  # user inputs have names of arguments, which are no paths of modules
            layer, _ = split_layer(fqn)
        keys.append(SectionKey(space, layer))

    for key, here in stretches(keys):
        speller.enter_section(key)
        lines = []
        for node in inputs[here]:
            words = [speller.type_of(node.meta.get("val")), *tags_of(node, False, speller.module)]
            text = f"{speller.reference(node)}: {' | '.join(words)}"
            if node.args:  # a default
                text += f" = {speller.argument(node.args[0])}"
            lines.append(Line("", text))
        yield Section(key, tuple(lines))


def _schedule_sections(speller: Speller) -> Iterable[Section]:
    scopes, computed = speller.scopes, speller.scopes.computed
    movable = [operator_of(node).is_movable or scopes.of[node].is_movable for node in computed]
    for key, here in stretches(section_keys([scopes.of[node].key for node in computed], movable)):
        speller.enter_section(key)
        lines = []
        for scope, members in itertools.groupby(computed[here], scopes.of.__getitem__):
            heading = speller.enter_scope(scope)
            for node in members:
                tags = tags_of(node, node in scopes.unowned, speller.module)
                words = " | ".join([speller.type_of(node.meta.get("val")), *tags])
                name = speller.names[node][1]
                lines.append(Line(heading, f"{name}: {words} = {speller.call(node)}"))
        yield Section(key, tuple(lines))


def _output_sections(output: fx.Node, speller: Speller) -> Iterable[Section]:
    """Yield a line for each result, by its name, or else in the layer that it comes from."""
    result: Any = output.args[0]
    leaves = list(result) if isinstance(result, list | tuple) else [result]
    # AOTAutograd returns a flat list; a graph of ``make_fx`` may return any structure.
    is_named = isinstance(result, dict) or hasattr(result, "_fields")
    if is_named or any(isinstance(leaf, list | tuple | dict) for leaf in leaves):
        speller.enter_section(key := SectionKey("out", None))
        yield Section(key, (Line("", f"yield from {speller.argument(result)}"),))
        return

    fqns = output.meta.get("gt_outputs") or ()
    if len(fqns) != len(leaves):
        fqns = [None] * len(leaves)
    keys: list[SectionKey] = []
    for fqn, leaf in zip(fqns, leaves, strict=True):
        if fqn is not None:
            layer = split_layer(fqn)[0]
        elif isinstance(leaf, fx.Node) and leaf in speller.scopes.of:
            layer = speller.scopes.of[leaf].layer
        elif keys:
            # A constant stands with the result before it.
            layer = keys[-1].layer
        else:
            layer = None
        keys.append(SectionKey("out", layer))

    for key, here in stretches(keys):
        speller.enter_section(key)
        lines = []
        for fqn, leaf in zip(fqns[here], leaves[here], strict=True):
            target = "yield"
            if fqn is not None:
                target = f"{spell_from(fqn, key.layer)} ="
            lines.append(Line("", f"{target} {speller.argument(leaf)}"))
        yield Section(key, tuple(lines))


def _draw_layout(
    layout: BucketLayout, mesh: Mapping[str, int], known: Mapping[tuple[int, ...], str]
) -> _Drawing:
    """Draw a layout; ``known`` has symbols of groups by their ranks."""
    groups = groups_of_ranks([payload.ranks for payload in layout.payloads], mesh, known)
    placed = []
    for payload in layout.payloads:
        layers = {split_layer(fqn)[0] for fqn in payload.parameters}
        layer = None
        if len(layers) == 1:
            layer = layers.pop()
        placed.append((SectionKey(payload.collective, layer), payload))

    # Kinds of collectives stand in the order of their first payload.
    kinds = list(dict.fromkeys(key.space for key, _ in placed))
    placed.sort(key=lambda pair: kinds.index(pair[0].space))
    sections = []
    for key, members in itertools.groupby(placed, lambda pair: pair[0]):
        lines = []
        for _, payload in members:
            words = [groups[payload.ranks].symbol, spell_dtype(payload.dtype), *payload.directions]
            if payload.op:
                words.append(f'op="{payload.op}"')
            nbytes = sum(slot.nbytes for slot in payload.slots) + payload.padding
            lines.append(Line("", f"payload({', '.join(words)}, bytes={nbytes:_})"))
            for slot in payload.slots:
                path = spell_from(slot.parameter, key.layer)
                lines.append(Line("", f"{path}: at({slot.offset:_}, bytes={slot.nbytes:_})"))
        sections.append(Section(key, tuple(lines)))

    return list(map(str, groups.values())) or [headers.EMPTY["layout"]], sections
