"""The ``gt_golden`` fixture: ``gt_golden.check(value)``."""

import inspect
import os
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from pytest_gtrainer import devices, extensions, facts
from pytest_gtrainer.environment import installed_minor
from pytest_gtrainer.golden import artifacts, values
from pytest_gtrainer.golden.naming import Claim, golden_path
from pytest_gtrainer.golden.plugin import HAS_PASSED, GoldenPlugin
from pytest_gtrainer.golden.store import normal
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.marker import id_of, spec_of

WHOLE = "full"
_NUMBERS = (bool, int, float, list, tuple, Mapping)


class GoldenMismatch(facts.FailedCheck):
    """A golden is missing or differs; the message has the difference and the command to accept."""

    __module__ = "pytest_gtrainer"


class Golden:
    """Compares what a test computes with the files a person has accepted."""

    def __init__(self, item: pytest.Item) -> None:
        self._plugin: GoldenPlugin = item.config.pluginmanager.getplugin("gtrainer-goldens")
        self._item = item
        self._pid = os.getpid()
        self._spec = spec_of(item)
        self._mesh = self._spec.mesh if self._spec else None
        self._names: set[str] = set()
        self._is_used = False
        nodeid = id_of(item)
        # The command from the root directory is the same for everyone.
        self._made_by = {
            "test": nodeid,
            "remake": shlex.join(["pytest", nodeid, "--gt-update-goldens"]),
        }

    @facts.check
    def check(
        self,
        value: Any,
        name: str | None = None,
        *,
        view: str = WHOLE,
        per: str | None = None,
        names: Any = None,
        sizes: str = "both",
    ) -> None:
        """Compare ``value`` with the golden of this test, or of this test and ``name``.

        Args:
            value: an FX graph (a ``GraphModule``, an ``fx.Graph``, an ``ExportedProgram``, of any
                tracer), a traced step (anything with a graph as ``.gm``), a bucket layout, a text,
                or numbers in lists and dicts of any depth. Numbers are compared bit for bit with
                those of the same environment (torch, device, instruction set, threads); in another
                one they are not judged, and kept with ``--gt-artifacts``.
            name: needed if a test has several goldens; the default for a recorded graph is its
                stage.
            view: how much of a graph to show.
            per: "torch" keeps a file for each minor version of torch that changes the value. A file
                is used from its version on, up to the next version that has a file.
            names, sizes: what inputs of a graph are, and how dynamic sizes are written, as for
                ``graphtext.render``.

        Raises:
            GoldenMismatch: the golden is missing or different and not updated, or the text of a
                graph that is to be written would be read back as another graph.
            ValueError: a second check with this name in the test, an unknown ``per``, or ``per``
                for numbers.
            HiddenValue: the graph calls or holds something that no text can show, and a golden
                would accept any other.
            HiddenGroup: a process group of the graph is not known here, so a golden cannot name its
                ranks.
            TypeError: ``value`` is none of these.
            RuntimeError: in a process that the test forked.
        """
        __tracebackhide__ = True
        self._is_used = True
        if os.getpid() != self._pid:
            # What is claimed, or to be written, would end with this process.
            raise RuntimeError(
                "a golden is checked in the process of its test, and this one was forked from it: "
                "hand the value to the test"
            )

        if per not in (None, "torch"):
            raise ValueError(
                f'per={per!r}: a golden is kept per="torch", or without it serves all versions'
            )

        if _is_graph(value):
            from pytest_gtrainer.graph.foreign import adopt

            stage, value = getattr(value, "gt_stage", None), adopt(value, names)
            name = name or stage or value.meta.get("gt_stage")
        elif names is not None:
            raise TypeError(
                "names says what a graph's inputs are, and this golden is of "
                f"{type(value).__name__}"
            )

        if (name or "") in self._names:
            which = f"named {name!r}" if name else "without a name"
            raise ValueError(
                f"this test has checked a golden {which} already: give each check its own name"
            )

        kind, text = self._text(value, view, sizes)
        if kind != "graph" and values.are_computed(value):
            facts.emit("values")  # the summary says if the test's world moves no data
        path = golden_path(self._made_by["test"], name, kind, _minor_version(per, kind))
        self._names.add(name or "")
        if odd := _not_a_proof(kind, text, value):
            what = odd[0]
            if len(odd) > 1:
                what += f", and {len(odd) - 1} more"
            facts.emit(
                "idle",
                what=f"{path}: {what}: other computations give that, too, so it proves nothing",
            )

        rank = getattr(self._item.config, "workerinput", {}).get("gt_rank", 0)
        whole = ""
        # Beside a partial view artifacts have the whole graph, that of one rank, as ranks agree.
        if view != WHOLE and rank == 0 and artifacts.folder(self._item.config) is not None:
            whole = self._graph_text(value, WHOLE, sizes)
        claim = Claim(name or "", path.as_posix(), kind, text, whole)
        failure = self._plugin.claim(
            self._item, claim, partial(self._why_not_to_write, value, view, sizes, claim)
        )
        if failure is not None:
            raise GoldenMismatch(facts.escaped(failure))

    def note_use(self) -> None:
        """Note for the summary whether a test that asks for this has checked anything.

        Nothing is noted if the test has not passed, or has this through another fixture: it may
        have no use for it.
        """
        function = getattr(self._item, "function", None)
        if function is None or "gt_golden" not in inspect.signature(function).parameters:
            return
        if self._is_used or self._item.stash.get(HAS_PASSED, False):
            name = self._made_by["test"].partition("[")[0]
            facts.emit("golden_use", test=name, checks=self._is_used)

    def _why_not_to_write(self, value: Any, view: str, sizes: str, claim: Claim) -> str | None:
        """Return the reason why the text of a graph must not be written, None if it may."""
        if view != WHOLE or not _is_graph(value):
            return None
        from pytest_gtrainer.graphtext.parsing import unfaithful

        where = unfaithful(value, claim.text, mesh=self._mesh, sizes=sizes)
        if where is None:
            return None
        return f"{claim.path} was not written: it would be read back as another graph: {where}"

    def _text(self, value: Any, view: str, sizes: str) -> tuple[str, str]:
        """Return the kind of a value, and its canonical text."""
        if _is_graph(value):
            return "graph", self._graph_text(value, view, sizes)
        if view != WHOLE:
            raise TypeError(
                f"view={view!r} says how much of a graph to show, and this is of "
                f"{type(value).__name__}"
            )

        if isinstance(value, str):
            return "text", normal(value)
        layouts = sys.modules.get("pytest_gtrainer.graph.layout")
        if layouts is not None and isinstance(value, layouts.BucketLayout):
            from pytest_gtrainer.graphtext.rendering import render_layout

            return "graph", render_layout(value, header=self._header(), mesh=self._mesh)

        if isinstance(value, _NUMBERS):
            numbers = values.Entry(values.decisive(environment_of(self._item)), values.plain(value))
            return "numbers", values.text_of(self._made_by, [numbers])
        kind, advice = type(value).__name__, ""
        if kind in ("Tensor", "Parameter", "DTensor"):
            advice = ": check digest(tensor), which holds every bit, or tensor.tolist()"
        raise TypeError(
            "a golden is made of an FX graph, a traced step, a layout, a text or numbers; "
            f"not of {kind}{advice}"
        )

    def _graph_text(self, value: Any, view: str, sizes: str) -> str:
        from pytest_gtrainer.graphtext import render
        from pytest_gtrainer.graphtext.operators import refuse_hidden_groups
        from pytest_gtrainer.graphtext.spelling import refuse_hidden

        refuse_hidden_groups(value)
        if view == WHOLE:
            refuse_hidden(value)
        text = render(value, view, header=self._header(), mesh=self._mesh, sizes=sizes)
        return extensions.scrubbed(self._item.config, text)

    def _header(self) -> Mapping[str, str]:
        """Return the fields of a header: test, world, mesh, version of torch, command."""
        import torch

        fields, spec = {"test": self._made_by["test"]}, self._spec
        if spec is not None:
            fields["world"] = f"{spec.kind}, {spec.size} ranks"
            if spec.kind == "fake":
                fields["world"] += f", rank {spec.rank}"
            fields["mesh"] = ", ".join(f"{name}={extent}" for name, extent in spec.mesh.items())
        return {**fields, "torch": str(torch.__version__), "remake": self._made_by["remake"]}


def _minor_version(per: str | None, kind: str) -> tuple[int, int] | None:
    """Return the version of torch that a golden is kept for; None for one that serves all.

    Raises:
        ValueError: it cannot be kept so.
    """
    __tracebackhide__ = True
    if per is None:
        return None
    if kind == "numbers":
        raise ValueError(
            'per="torch" is not for numbers: their file has an entry for each environment anyway'
        )
    minor = installed_minor()
    if minor is None:
        raise ValueError(
            'per="torch" needs a version like 2.15, and that of the installed torch does not '
            "begin so"
        )
    return minor


def _is_graph(value: Any) -> bool:
    # A test that has a graph has imported torch; others need not wait for the import.
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    graphs = (torch.fx.GraphModule, torch.fx.Graph, torch.export.ExportedProgram)
    return isinstance(value, graphs) or isinstance(getattr(value, "gm", None), graphs)


def _not_a_proof(kind: str, text: str, value: Any) -> list[str]:
    """Return why a golden of this text says nothing, or values that any program may give."""
    if kind == "numbers":
        return values.not_a_proof(values.plain(value))
    if kind == "text":
        return [] if text.strip() else ["no text is in it"]
    content = header.body(text).strip()
    if content == header.EMPTY["layout"]:
        return ["no payload is in it"]
    if content == header.EMPTY["schedule"]:
        return ["no launch, wait or operator is in it"]
    return []


def environment_of(item: pytest.Item) -> dict[str, str | int]:
    """Return the environment that the bits of a test's numbers depend on.

    The device is that of the test's ranks, or torch's default device.
    """
    import torch

    spec = spec_of(item)
    device = str(torch.get_default_device().type)
    if spec is not None and spec.kind == "ranks":
        device = devices.resolve(item.config).kind
    if device == "cuda":
        # Other models of a GPU add in other orders.
        device = f"cuda {torch.cuda.get_device_name()}"
    return {
        "torch": str(torch.__version__),
        "device": device,
        # oneDNN and MKL choose their kernels by these two.
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **extensions.environment(item.config),
    }
