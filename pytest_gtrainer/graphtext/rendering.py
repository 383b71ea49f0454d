"""From an FX graph to its text: the sections of a view, folded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from pytest_gtrainer.graphtext import full_view, layout_view, schedule_view
from pytest_gtrainer.graphtext import header as headers
from pytest_gtrainer.graphtext.folding import fold
from pytest_gtrainer.graphtext.sections import Record, Section
from pytest_gtrainer.graphtext.unfolding import unfold

_VIEWS = {"full": full_view.draw, "schedule": schedule_view.draw, "layout": layout_view.draw}
VIEWS = tuple(_VIEWS)


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
        view: "full" shows every operator and can be parsed; "schedule" shows collectives, waits and
            how much is computed between them; "layout" which parameter sits at which byte of which
            collective.
        header: comment lines that say what made the graph, never compared.
        mesh: dimensions and extents over all ranks, outermost first; names the process groups
            that do not say themselves which dimension they belong to.

    Raises:
        ValueError: an unknown view; a layout whose process groups nobody knows.
    """
    preamble, sections = _draw(gm, view, mesh)
    told = {} if view == "full" else {"view": view}
    lines = [*headers.write({**told, **(header or {})}), *preamble, *fold(sections)]
    return "\n".join(lines) + "\n"


def records(gm: fx.GraphModule, view: str = "full", *, mesh: Mapping[str, int] | None = None) -> tuple[Record, ...]:
    """The lines of the graph's text, unfolded: what two graphs are compared by."""
    preamble, sections = _draw(gm, view, mesh)
    told = unfold("\n".join(preamble))
    return told + tuple(record for section in sections for record in section.records())


def _draw(gm: fx.GraphModule, view: str, mesh: Mapping[str, int] | None) -> tuple[list[str], list[Section]]:
    """Definitions at the head, then sections, before they are folded."""
    if view not in _VIEWS:
        raise ValueError(f"view {view!r}: this version has {', '.join(VIEWS)}")
    return _VIEWS[view](gm, mesh or {})
