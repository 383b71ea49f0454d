"""From an FX graph to its text: the sections of a view, folded. The view ``schedule`` has a module
of its own.

- ``full`` shows every operator, and all that it takes to make the graph again. One walk over the
  nodes finds where each belongs, a second one names and spells them. Graphs inside the graph are
  drawn the same way.
- ``layout`` shows which parameter sits at which byte of which collective. A section is a kind of
  collective, in it a layer where all parameters of a payload belong to one. A ``payload`` line says
  group, dtype, where the graph issues it, reduction and bytes of one rank's slice; below it stand
  its parameters, each ``at`` a byte of it.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.graph_modules import result_structure
from pytest_gtrainer._torch.graph_text import hooks_of
from pytest_gtrainer.graph.bucket_plan import managed_order
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopted
from pytest_gtrainer.graph.layout import BucketLayout, bucket_layout
from pytest_gtrainer.graph.nodes import bodies_of, held, node_fqn, spell_dtype
from pytest_gtrainer.graphtext import header as headers
from pytest_gtrainer.graphtext import schedule_view
from pytest_gtrainer.graphtext.folding import INDENT, fold, unfold
from pytest_gtrainer.graphtext.operators import groups_of, groups_of_ranks, operator_of, word
from pytest_gtrainer.graphtext.scopes import is_computed, is_item, tags_of
from pytest_gtrainer.graphtext.sections import (
    GraphLine,
    Layer,
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
NOTHING = "payloads = []"  # what a layout without any payload says, so that its text is not empty
_Drawn = tuple[
    list[str], list[Section]
]  # definitions at the head, then sections, before they are folded


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
    drawn = _draw(adopted(gm, names), view, mesh or {}, sizes)
    return _written({**({} if view == "full" else {"view": view}), **(header or {})}, *drawn)


def render_layout(
    layout: BucketLayout,
    *,
    header: Mapping[str, str] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> str:
    """The text of a layout, of a graph or of an eager model; ``header`` and ``mesh`` as for
    ``render``.
    """
    return _written({"view": "layout", **(header or {})}, *_layout(layout, mesh or {}, {}))


def lines_of(
    gm: AnyGraph,
    view: str = "full",
    *,
    mesh: Mapping[str, int] | None = None,
    names: Names | None = None,
) -> tuple[GraphLine, ...]:
    """The lines of the graph's text, unfolded: what two graphs are compared by."""
    preamble, sections = _draw(adopted(gm, names), view, mesh or {})
    return unfold("\n".join(preamble)) + tuple(
        line for section in sections for line in section.unfolded()
    )


def _written(
    header: Mapping[str, str], preamble: Sequence[str], sections: Sequence[Section]
) -> str:
    return "\n".join([*headers.write(header), *preamble, *fold(sections)]) + "\n"


def _draw(gm: fx.GraphModule, view: str, mesh: Mapping[str, int], sizes: str = "both") -> _Drawn:
    if view == "full":
        return _full(gm, mesh, Backed(sizes), is_body=False)
    if view == "schedule":
        return schedule_view.draw(gm, mesh)
    if view == "layout":
        known = {
            group.ranks: group.symbol
            for group in reversed(groups_of(gm, mesh).values())
            if group.ranks
        }
        return _layout(bucket_layout(gm), mesh, known)
    raise ValueError(f"view {view!r}: this version has {', '.join(VIEWS)}")


def _full(gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed, *, is_body: bool) -> _Drawn:
    tensors = (
        node.meta.get("val")
        for node in gm.graph.nodes
        if node.op != "get_attr" and not is_item(node)
    )
    device = next(
        (value.device.type for value in tensors if isinstance(value, torch.Tensor)), "cpu"
    )
    bodies, bodies_text = _bodies(gm, mesh, backed)
    speller = Speller(gm, mesh, backed, device, bodies)
    scopes, output = speller.scopes, gm.graph.output_node()
    settings = []  # what holds for the graph as a whole, where it is not what it usually is
    if scopes.unowned and not any(node_fqn(node) for node in scopes.computed):
        settings.append("owners = inferred")
        scopes.unowned.clear()
    if not isinstance(output.args[0], tuple):
        settings.append("returns = list" if isinstance(output.args[0], list) else "returns = value")
    structure = output.meta.get("gt_structure")
    if (
        structure is None and "gt_outputs" not in output.meta
    ):  # names say the structure of a traced step
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
    definitions = [str(group) for group in speller.groups.values()]
    definitions += [] if is_body else backed.definitions()
    definitions += [f'default = device("{device}")'] if device != "cpu" else []
    paths = dict.fromkeys(str(node.target) for node in scopes.computed if node.op == "call_module")
    modules = [speller.module_definition(path) for path in paths]
    return definitions + settings + modules + bodies_text, sections


def _bodies(
    gm: fx.GraphModule, mesh: Mapping[str, int], backed: Backed
) -> tuple[dict[str, str], list[str]]:
    """Graphs inside the graph by their attributes, and their text, as they are used; equal ones
    have one name.
    """
    names: dict[str, str] = {}
    by_content: dict[str, str] = {}
    for user in gm.graph.nodes:
        called = {str(operand.target): body for operand, body in bodies_of(gm, user).items()}
        if user.op == "call_module" and isinstance(
            module := held(gm, str(user.target)), fx.GraphModule
        ):
            called[str(user.target)] = module
        for path, body in called.items():
            if path in names:
                continue
            definitions, sections = _full(body, mesh, backed, is_body=True)
            content = "\n".join(INDENT + line for line in [*definitions, *fold(sections)])
            short = operator_of(user).short if is_computed(user) else user.op
            names[path] = by_content.setdefault(content, word(f"{short}_graph_{len(by_content)}"))
    return names, [
        line
        for content, name in by_content.items()
        for line in [f"def {name}():", *content.splitlines()]
    ]


def _input_sections(speller: Speller) -> Iterable[Section]:
    inputs, told = list(speller.scopes.inputs), speller.scopes.inputs.values()
    keys = [SectionKey(s.space, split_layer(s.fqn)[0] if s.space != "I" else None) for s in told]
    for key, here in stretches(keys):
        speller.enter_section(key)
        lines = []
        for node in inputs[here]:
            default = f" = {speller.argument(node.args[0])}" if node.args else ""
            words = [speller.type_of(node.meta.get("val")), *tags_of(node, False, speller.module)]
            lines.append(Line("", f"{speller.reference(node)}: {' | '.join(words)}{default}"))
        yield Section(key, tuple(lines))


def _schedule_sections(speller: Speller) -> Iterable[Section]:
    scopes, computed = speller.scopes, speller.scopes.computed
    floating = [operator_of(node).floats or scopes.of[node].floats for node in computed]
    for key, here in stretches(section_keys([scopes.of[node].key for node in computed], floating)):
        speller.enter_section(key)
        lines = []
        for scope, members in itertools.groupby(computed[here], scopes.of.__getitem__):
            heading = speller.enter_scope(scope)
            for node in members:
                told = [
                    speller.type_of(node.meta.get("val")),
                    *tags_of(node, node in scopes.unowned, speller.module),
                ]
                lines.append(
                    Line(
                        heading,
                        f"{speller.names[node][1]}: {' | '.join(told)} = {speller.call(node)}",
                    )
                )
        yield Section(key, tuple(lines))


def _output_sections(output: fx.Node, speller: Speller) -> Iterable[Section]:
    """One line a returned value: by the name the tracer gives it, else in the layer it comes from."""
    result: Any = output.args[0]
    leaves = list(result) if isinstance(result, list | tuple) else [result]
    is_named = isinstance(result, dict) or hasattr(result, "_fields")
    if is_named or any(isinstance(leaf, list | tuple | dict) for leaf in leaves):
        speller.enter_section(key := SectionKey("out", None))
        yield Section(key, (Line("", f"yield from {speller.argument(result)}"),))
        return
    told = output.meta.get("gt_outputs") or ()
    told = told if len(told) == len(leaves) else [None] * len(leaves)
    layers: list[Layer | None] = []
    for fqn, leaf in zip(told, leaves, strict=True):
        known = speller.scopes.of.get(leaf) if isinstance(leaf, fx.Node) else None
        neighbour = layers[-1] if layers else None  # a constant stands with it
        layers.append(
            split_layer(fqn)[0] if fqn is not None else known.layer if known else neighbour
        )
    for key, here in stretches([SectionKey("out", layer) for layer in layers]):
        speller.enter_section(key)
        lines = []
        for fqn, leaf in zip(told[here], leaves[here], strict=True):
            value = speller.argument(leaf)
            lines.append(
                Line(
                    "",
                    f"yield {value}" if fqn is None else f"{spell_from(fqn, key.layer)} = {value}",
                )
            )
        yield Section(key, tuple(lines))


def _layout(
    layout: BucketLayout, mesh: Mapping[str, int], known: Mapping[tuple[int, ...], str]
) -> _Drawn:
    """A layout; ``known`` are symbols of groups by their ranks."""
    groups = groups_of_ranks([payload.ranks for payload in layout.payloads], mesh, known)
    placed = []
    for payload in layout.payloads:
        layers = {split_layer(fqn)[0] for fqn in payload.parameters}
        placed.append(
            (SectionKey(payload.collective, layers.pop() if len(layers) == 1 else None), payload)
        )
    kinds = {key.space: place for place, (key, _) in reversed(list(enumerate(placed)))}
    placed.sort(key=lambda pair: kinds[pair[0].space])
    sections = []
    for key, members in itertools.groupby(placed, lambda pair: pair[0]):
        lines = []
        for _, payload in members:
            told = [groups[payload.ranks].symbol, spell_dtype(payload.dtype), *payload.directions]
            told += [f'op="{payload.op}"'] if payload.op else []
            nbytes = sum(slot.nbytes for slot in payload.slots) + payload.padding
            lines.append(Line("", f"payload({', '.join(told)}, bytes={nbytes:_})"))
            for slot in payload.slots:
                path = spell_from(slot.parameter, key.layer)
                lines.append(Line("", f"{path}: at({slot.offset:_}, bytes={slot.nbytes:_})"))
        sections.append(Section(key, tuple(lines)))
    return [str(group) for group in groups.values()] or [NOTHING], sections
