"""The view ``layout``: which parameter sits at which byte of which collective.

A section is a kind of collective, in it a layer where all parameters of a payload belong to one.
A ``payload`` line says group, dtype, where the graph issues it, reduction and bytes of one rank's
slice; below it stand its parameters, each ``at`` a byte of that slice. ``with`` equal layers the
text folds as that of a whole graph does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from pytest_gtrainer.graph.layout import BucketLayout, Payload, bucket_layout
from pytest_gtrainer.graphtext import header as headers
from pytest_gtrainer.graphtext.folding import fold
from pytest_gtrainer.graphtext.groups import Group, groups_of, groups_of_ranks
from pytest_gtrainer.graphtext.paths import Layer, spell_from, split_layer
from pytest_gtrainer.graphtext.sections import Key, Line, Section
from pytest_gtrainer.graphtext.vocabulary import spell_dtype

NOTHING = "payloads = []"
"""What a layout without any payload says, so that its text is not empty."""


def render_layout(
    layout: BucketLayout, *, header: Mapping[str, str] | None = None, mesh: Mapping[str, int] | None = None
) -> str:
    """The text of a layout, of a graph or of an eager model.

    Args:
        layout: from ``bucket_layout`` or ``eager_bucket_layout``.
        header: comment lines that say what made it, never compared.
        mesh: dimensions and extents over all ranks, outermost first; names the process groups
            that do not say themselves which dimension they belong to.
    """
    preamble, sections = draw_layout(layout, mesh or {})
    return "\n".join([*headers.write({"view": "layout", **(header or {})}), *preamble, *fold(sections)]) + "\n"


def draw(gm: fx.GraphModule, mesh: Mapping[str, int]) -> tuple[list[str], list[Section]]:
    """Definitions and sections of a graph's layout.

    Raises:
        ValueError: neither this process nor the graph's text knows the ranks of a process group.
    """
    known = {group.ranks: group.symbol for group in reversed(groups_of(gm, mesh).values()) if group.ranks}
    return draw_layout(bucket_layout(gm), mesh, known)


def draw_layout(
    layout: BucketLayout, mesh: Mapping[str, int], known: Mapping[tuple[int, ...], str] | None = None
) -> tuple[list[str], list[Section]]:
    """Definitions and sections of a layout; ``known`` are symbols of groups by their ranks."""
    groups = groups_of_ranks([payload.ranks for payload in layout.payloads], mesh, known or {})
    kinds = dict.fromkeys(payload.collective for payload in layout.payloads)
    sections = [section for kind in kinds for section in _sections(layout.of(kind), groups)]
    return [str(group) for group in groups.values()] or [NOTHING], sections


def _sections(payloads: Sequence[Payload], groups: Mapping[tuple[int, ...], Group]) -> Iterable[Section]:
    for key, members in itertools.groupby(payloads, _key):
        yield Section(key, tuple(line for payload in members for line in _lines(payload, key.layer, groups)))


def _key(payload: Payload) -> Key:
    layers = {split_layer(fqn)[0] for fqn in payload.parameters}
    return Key(payload.collective, layers.pop() if len(layers) == 1 else None)


def _lines(payload: Payload, here: Layer | None, groups: Mapping[tuple[int, ...], Group]) -> Iterable[Line]:
    told = [groups[payload.ranks].symbol, spell_dtype(payload.dtype), *payload.directions]
    told += [f'op="{payload.op}"'] if payload.op else []
    nbytes = sum(slot.nbytes for slot in payload.slots)
    yield Line("", f"payload({', '.join(told)}, bytes={nbytes:_})")
    for slot in payload.slots:
        yield Line("", f"{spell_from(slot.parameter, here)}: at({slot.offset:_}, bytes={slot.nbytes:_})")
