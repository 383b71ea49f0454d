"""The ``gt_golden`` fixture: ``gt_golden.check(value)``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer.golden.claims import Claim
from pytest_gtrainer.golden.naming import golden_path
from pytest_gtrainer.golden.store import normal
from pytest_gtrainer.worlds.spec import WorldSpec, spec_of

if TYPE_CHECKING:
    from pytest_gtrainer.golden.plugin import GoldenPlugin


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

    def check(self, value: Any, name: str | None = None, *, view: str = "full") -> None:
        """Compare ``value`` with the golden of this test, or of this test and ``name``.

        Args:
            value: an FX graph, a traced step (anything with a graph as ``.gm``), or a text.
            name: tells several goldens of one test apart.
            view: how much of a graph to show.

        Raises:
            GoldenMismatch: the golden is missing or different, and is not being updated.
            ValueError: the test has checked a golden of this name already.
            TypeError: ``value`` is none of these.
        """
        __tracebackhide__ = True
        if (name or "") in self._names:
            which = f"named {name!r}" if name else "without a name"
            raise ValueError(f"this test has checked a golden {which} already: give each check its own name")
        kind, text = self._text(value, view)
        self._names.add(name or "")
        path = golden_path(self._item.nodeid, name, kind)
        failure = self._plugin.claim(self._item, Claim(name or "", path.as_posix(), kind, text))
        if failure is not None:
            raise GoldenMismatch(failure)

    def _text(self, value: Any, view: str) -> tuple[str, str]:
        if isinstance(value, str):
            return "text", normal(value)
        graph = getattr(value, "gm", value)
        fx = sys.modules.get("torch.fx")  # who has a graph has imported it
        if fx is None or not isinstance(graph, fx.GraphModule):
            kind = type(value).__name__
            raise TypeError(f"a golden is made of an FX graph, a traced step or a text; not of {kind}")
        from pytest_gtrainer.graphtext import render

        spec = spec_of(self._item)
        return "graph", render(graph, view, header=self._header(spec), mesh=spec.mesh if spec else None)

    def _header(self, spec: WorldSpec | None) -> Mapping[str, str]:
        import torch

        fields = {"test": self._item.nodeid}
        if spec is not None:
            played = f", rank {spec.rank}" if spec.kind == "fake" else ""
            fields["world"] = f"{spec.kind}, {spec.size} ranks{played}"
            fields["mesh"] = ", ".join(f"{name}={extent}" for name, extent in spec.mesh.items())
        return {**fields, "torch": str(torch.__version__), "remake": self._plugin.remake_command(self._item)}
