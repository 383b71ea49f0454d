"""The ``gt_golden`` fixture: ``gt_golden.check(value)``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer.extensions import scrubbed
from pytest_gtrainer.golden import artifacts, values
from pytest_gtrainer.golden.claims import Claim
from pytest_gtrainer.golden.environment import environment_of
from pytest_gtrainer.golden.naming import golden_path, id_of
from pytest_gtrainer.golden.store import normal
from pytest_gtrainer.marker import spec_of
from pytest_gtrainer.supported import installed_minor

if TYPE_CHECKING:
    from pytest_gtrainer.golden.plugin import GoldenPlugin

WHOLE = "full"
_NUMBERS = (bool, int, float, list, tuple, Mapping)


class GoldenMismatch(AssertionError):
    """A golden is missing or differs; the message says how, and the command to accept it."""


def golden_of(request: pytest.FixtureRequest) -> Golden:
    """The ``Golden`` of the running test."""
    plugin: GoldenPlugin = request.config.pluginmanager.getplugin("gtrainer-goldens")
    return Golden(plugin, request.node)


class Golden:
    """Compares what a test computes with the files a person has accepted."""

    def __init__(self, plugin: GoldenPlugin, item: pytest.Item) -> None:
        self._plugin = plugin
        self._item = item
        self._names: set[str] = set()

    def check(self, value: Any, name: str | None = None, *, view: str = WHOLE, per: str | None = None) -> None:
        """Compare ``value`` with the golden of this test, or of this test and ``name``.

        Numbers (exact, in lists and dicts of any depth, digests as texts among them) are compared
        with those of the same environment: torch, device, instruction set, threads. In another one
        they are not judged, and kept with ``--gt-artifacts``.

        Args:
            value: an FX graph, a traced step (anything with a graph as ``.gm``), a bucket layout, a
                text, or numbers.
            name: tells several goldens of one test apart.
            view: how much of a graph to show.
            per: "torch" keeps a file for each minor version of torch that changes the value. A file holds from
                its version on, until one of a newer version lies beside it.

        Raises:
            GoldenMismatch: the golden is missing or different, and is not being updated; or the text of a
                graph, about to be written, would be read back as another graph.
            ValueError: the test has checked a golden of this name already; ``per`` is something else, or given for
                numbers, which are kept per environment anyway.
            TypeError: ``value`` is none of these.
        """
        __tracebackhide__ = True
        if (name or "") in self._names:
            which = f"named {name!r}" if name else "without a name"
            raise ValueError(f"this test has checked a golden {which} already: give each check its own name")
        if per not in (None, "torch"):
            raise ValueError(f'per={per!r}: a golden is kept per="torch", or without it serves all versions')
        kind, text = self._text(value, view)
        if per is not None and kind == "numbers":
            raise ValueError('per="torch" is not for numbers: their file has an entry for each environment anyway')
        minor = installed_minor()
        if per is not None and minor is None:
            raise ValueError('per="torch" needs a version like 2.15, and that of the installed torch does not begin so')
        path = golden_path(id_of(self._item), name, kind, minor if per else None)
        self._names.add(name or "")
        whole = self._whole_graph(value, view)
        claim = Claim(name or "", path.as_posix(), kind, text, whole)
        is_whole = view == WHOLE and _is_graph(value)
        failure = self._plugin.claim(self._item, claim, lambda: self._unfaithful(value, claim) if is_whole else None)
        if failure is not None:
            raise GoldenMismatch(failure)

    def _text(self, value: Any, view: str) -> tuple[str, str]:
        """The kind of a value, and its canonical text."""
        if _is_graph(value):
            return "graph", self._graph_text(value, view)
        if view != WHOLE:
            raise TypeError(f"view={view!r} says how much of a graph to show, and this is of {type(value).__name__}")
        if isinstance(value, str):
            return "text", normal(value)
        if _is_layout(value):
            return "graph", self._layout_text(value)
        if isinstance(value, _NUMBERS):
            numbers = values.Entry(values.decisive(environment_of(self._item)), values.plain(value))
            return "numbers", values.text_of(self._made_by(), [numbers])
        kind = type(value).__name__
        raise TypeError(f"a golden is made of an FX graph, a traced step, a layout, a text or numbers; not of {kind}")

    def _graph_text(self, value: Any, view: str) -> str:
        from pytest_gtrainer.graphtext import render

        spec = spec_of(self._item)
        graph = getattr(value, "gm", value)
        text = render(graph, view, header=self._header(), mesh=spec.mesh if spec else None)
        return scrubbed(self._item.config, text)

    def _unfaithful(self, value: Any, claim: Claim) -> str | None:
        """Why a graph's text is not to be written: it would be read back as another graph."""
        from pytest_gtrainer.graphtext.parsing import unfaithful

        spec = spec_of(self._item)
        where = unfaithful(getattr(value, "gm", value), claim.text, mesh=spec.mesh if spec else None)
        return (
            None if where is None else f"{claim.path} was not written: it would be read back as another graph: {where}"
        )

    def _layout_text(self, layout: Any) -> str:
        from pytest_gtrainer.graphtext.rendering import render_layout

        spec = spec_of(self._item)
        return render_layout(layout, header=self._header(), mesh=spec.mesh if spec else None)

    def _whole_graph(self, value: Any, view: str) -> str:
        """What an artifact shows beside a partial view; where ranks agree, one of them is enough."""
        if view == WHOLE or artifacts.folder(self._item.config) is None:
            return ""
        rank = getattr(self._item.config, "workerinput", {}).get("gt_rank", 0)
        return self._graph_text(value, WHOLE) if rank == 0 else ""

    def _header(self) -> Mapping[str, str]:
        """What a golden's reader may want to know of its making."""
        import torch

        made_by, spec = self._made_by(), spec_of(self._item)
        fields = {"test": made_by["test"]}
        if spec is not None:
            played = f", rank {spec.rank}" if spec.kind == "fake" else ""
            fields["world"] = f"{spec.kind}, {spec.size} ranks{played}"
            fields["mesh"] = ", ".join(f"{name}={extent}" for name, extent in spec.mesh.items())
        return {**fields, "torch": str(torch.__version__), "remake": made_by["remake"]}

    def _made_by(self) -> Mapping[str, str]:
        return {"test": id_of(self._item), "remake": self._plugin.remake_command(self._item)}


def _is_graph(value: Any) -> bool:
    fx = sys.modules.get("torch.fx")  # who has a graph has imported it
    return fx is not None and isinstance(getattr(value, "gm", value), fx.GraphModule)


def _is_layout(value: Any) -> bool:
    module = sys.modules.get("pytest_gtrainer.graph.layout")
    return module is not None and isinstance(value, module.BucketLayout)
