"""Graphs before and after each pass in torch's structured log, which ``TORCH_TRACE=folder`` asks for and tlparse reads.

Each pipeline leaves artefacts there, numbered by pipeline and pass:

- ``gt_passes_0_02_canonicalize_graph_pass_before`` and ``..._after``, as graph text, of each pass that changed it;
- ``gt_passes_0_overview``, JSON: name, fingerprint and seconds of each pass, and whether it changed the graph.

With the variable set a graph is rendered once a pass; without it nothing of this runs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from pytest_gtrainer._torch.passes import log_artefact
from pytest_gtrainer.graphtext.rendering import render

_pipelines = itertools.count()
_AWKWARD = re.compile(r"[^\w.-]")  # in a file's name


class PipelineLog:
    """What one pipeline leaves in the log."""

    def __init__(self) -> None:
        self._name = f"gt_passes_{next(_pipelines)}"
        self._overview: list[dict[str, Any]] = []
        self._last: tuple[fx.GraphModule, str] | None = None

    @classmethod
    def if_wanted(cls) -> PipelineLog | None:
        """A new one if the process was started with ``TORCH_TRACE``."""
        return cls() if os.environ.get("TORCH_TRACE") else None

    def add(self, run: Mapping[str, Any], before: fx.GraphModule, after: fx.GraphModule) -> None:
        """Log what a pass did; ``run`` is what the overview says of it."""
        texts = {"before": self._text(before), "after": self._text(after)}
        changed = texts["before"] != texts["after"]
        stem = f"{self._name}_{len(self._overview):02}_{_AWKWARD.sub('_', run['name'])}"
        for side, text in texts.items() if changed else ():
            log_artefact(f"{stem}_{side}", text)
        self._overview.append({**run, "changed": changed})

    def close(self) -> None:
        """Log the overview."""
        log_artefact(f"{self._name}_overview", self._overview)

    def _text(self, gm: fx.GraphModule) -> str:
        if self._last is None or self._last[0] is not gm:  # a pass's graph is the next one's before
            self._last = gm, render(gm)
        return self._last[1]
