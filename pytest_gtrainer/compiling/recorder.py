"""``gt_compile``: records what torch.compile does inside a block.

Dynamo's graph and the user's options are read where torch.compile calls Inductor, forward and
backward where Inductor is given each, and the joint graph by a pass of ours before all others.
torch's structured trace logs the beginning and end of each pass; then the graph that is being
compiled is copied if it has changed.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import is_
from pathlib import Path
from typing import Any

from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch import compiling as private
from pytest_gtrainer.compiling.record import CompiledGraph, CompileRecord, GraphBreak, RecordedPass
from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.foreign import adopt
from pytest_gtrainer.numerics.graph_run import copies

_EXPLAINED = re.compile(r"\n\n(.*?)\n\s*Explanation: (.*?)\n", re.DOTALL)
_PLACE = re.compile(r'Graph break in user code at (\S+)|File "([^"]+)", line (\d+)')
_NO_FAKE_KERNEL = re.compile(
    r"no fake impl registered for .*?\((\w+)::(\w+)|unsupported operator: (\w+)\.(\w+)"
)


@dataclass(slots=True)
class _Compilation:
    """A stage of a graph that is being compiled.

    Attributes:
        compiled: the record of the graph.
        stage: the stage whose graph is ``gms[-1]``.
        gms: the module that passes rewrite; then, while torch runs passes on bodies of higher-order
            operators, each body inside the one before. None until a joint graph is seen.
        begun: passes that have begun and not ended: slot, graph before, time.
        order: the number of the last pass of each slot.
        seen: the parts of the graph at the last copy, compared by identity.
        thread: the thread that compiles.
        copy: the last copy.
    """

    compiled: CompiledGraph
    stage: str
    gms: list[fx.GraphModule | None]
    begun: list[tuple[str, fx.GraphModule | None, float]] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    copy: fx.GraphModule | None = None

    def snapshot(self) -> fx.GraphModule | None:
        """Return a copy of the graph with our names; the last one if nothing has changed."""
        gm = self.gms[-1]
        if gm is None:
            return None
        seen: list[Any] = []
        for part in gm.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.nodes:
                    seen += (node, node.target, node.args, node.kwargs, node.meta.get("val"))
        if self.copy is None or len(seen) != len(self.seen) or not all(map(is_, seen, self.seen)):
            # ``seen`` holds the objects, so that none of them can be freed and its id used again.
            self.seen = seen
            self.copy = _copy(gm, self.compiled, self.stage)
        return self.copy

    def keep(self, stage: str) -> None:
        """Record the graph as it is now as a stage."""
        gm = self.snapshot()
        if gm is not None:
            place = f"{self.compiled.place}." if self.compiled.place else ""
            gm.meta.setdefault("gt_stage", f"{place}{stage}")
            self.compiled.stages[stage] = gm


def _copy(gm: fx.GraphModule, compiled: CompiledGraph, stage: str) -> fx.GraphModule:
    """Copy a graph with the names of Dynamo's inputs."""
    copy = adopt(gm, compiled.stages.get("dynamo", gm))
    copy.meta.pop("gt_stage", None)
    # A graph after the partitioner has one direction, whatever its nodes had in the joint graph.
    if stage in ("forward", "backward"):
        for node in copy.graph.nodes:
            if node.op != "placeholder":
                node.meta["autograd_backward"] = stage == "backward"
    return copy


class _Recorder(logging.Handler):
    """Handles the structured trace, and wraps Inductor's ``compile_fx``."""

    def __init__(self, record: CompileRecord, *, lower: bool) -> None:
        super().__init__()
        self.record, self.lower = record, lower
        self.thread = threading.current_thread()
        self.running: list[_Compilation] = []
        self.fault: Exception | None = None
        self.unfinished: CompiledGraph | None = None  # whose compilation failed, or still runs
        self.is_open = True

    def wrap(self, compile_fx: private.CompileFx) -> private.CompileFx:
        """Return ``compile_fx`` with recording around it."""

        def recorded(
            gm: fx.GraphModule,
            example_inputs: Sequence[Any],
            inner_compile: Callable[..., Any] = private.compile_fx_inner,
            config_patches: dict[str, Any] | None = None,
            **rest: Any,
        ) -> Any:
            here = threading.current_thread()
            if here is not self.thread:
                self.record.faults.append(
                    f"thread {here.name!r} compiled, and this records what {self.thread.name!r} "
                    "does: enter gt_compile in the thread that calls the compiled function"
                )

            # With options of the user, ``compile_fx`` patches the configuration and calls itself.
            if here is not self.thread or self.running:
                return compile_fx(gm, example_inputs, inner_compile, config_patches, **rest)
            compiled = self.unfinished = self._graph_of(private.current_compile_id())
            with self._compiling(compiled, "pre_grad", gm) as compilation:
                compilation.keep("dynamo")
                patches = private.with_first_joint_pass(
                    config_patches, private.Watching("gtrainer-joint-graph", self._see_joint)
                )
                inner = self._wrap_inner(compiled, inner_compile)
                function = compile_fx(gm, example_inputs, inner, patches, **rest)
                self.unfinished = None
                return function

        return recorded

    def _graph_of(self, compile_id: str) -> CompiledGraph:
        """Return the graph that the trace has announced for this compilation, or add one."""
        for graph in self.record.graphs:
            if graph.id == compile_id and not graph.stages:
                return graph
        return self._add_graph(compile_id)

    def _add_graph(self, compile_id: str) -> CompiledGraph:
        graph = CompiledGraph(compile_id, len(self.record.graphs), self.lower)
        self.record.graphs.append(graph)
        return graph

    def _wrap_inner(
        self, compiled: CompiledGraph, inner_compile: Callable[..., Any]
    ) -> Callable[..., Any]:
        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
            stage = "backward" if options.get("is_backward") else "forward"
            # AOTAutograd compiles a backward when it is first called, maybe after the block.
            compiled.is_late |= not self.is_open

            def keep_inputs(inputs: list[Any]) -> None:
                if stage not in compiled.inputs and not compiled.is_late:
                    compiled.inputs[stage] = copies(inputs)

            with ExitStack() as stack:
                if self.is_open:
                    stack.enter_context(self._compiling(compiled, stage, gm)).keep(stage)
                if self.lower:
                    return inner_compile(gm, example_inputs, **options)
                return private.with_kernels_of_eager(
                    gm,
                    example_inputs,
                    is_inference=bool(options.get("is_inference")),
                    given=keep_inputs,
                )

        return inner

    @contextmanager
    def _compiling(
        self, compiled: CompiledGraph, stage: str, gm: fx.GraphModule
    ) -> Iterator[_Compilation]:
        self.running.append(_Compilation(compiled, stage, [gm]))
        try:
            yield self.running[-1]
        finally:
            self.running.pop()

    def _see_joint(self, gm: fx.GraphModule) -> None:
        """Note the joint graph, or a body inside it, as our pass is called with it."""
        if self.running and self.running[-1].stage == "joint":
            compilation = self.running[-1]
            compilation.gms[-1] = gm
            if len(compilation.gms) == 2:
                compilation.keep("joint")

    def emit(self, record: logging.LogRecord) -> None:
        threads = [self.thread, *(compilation.thread for compilation in self.running)]
        if threading.current_thread() not in threads:
            return
        # A compilation must not fail because it is recorded: the end of the block raises the error.
        try:
            self._read(getattr(record, "metadata", None) or {}, getattr(record, "payload", None))
        except Exception as error:
            self.fault = self.fault or error

    def _read(self, metadata: dict[str, Any], payload: Any) -> None:
        compile_id = f"{metadata.get('frame_id')}/{metadata.get('frame_compile_id')}"
        artefact = (metadata.get("artifact") or {}).get("name", "")
        if private.EVENT in metadata:
            event = json.loads(payload) if isinstance(payload, str) else payload
            if self.running and event["ph"] in ("B", "E"):
                self._read_event(event["name"], begins=event["ph"] == "B")
        elif private.COMPILED_GRAPH in metadata:
            if self.unfinished and self.unfinished.id == compile_id:
                # Dynamo begins again, under the same id.
                self.unfinished.stages.clear()
                self.unfinished.passes.clear()
                return
            self._add_graph(compile_id)
            if compile_id.endswith("/0"):
                self.record.compiled.append(compile_id)
            else:
                self.record.recompiled.setdefault(compile_id, [])
        elif private.CODE in metadata and self.running:
            compilation = self.running[-1]
            compilation.compiled.code[compilation.stage] = str(payload)
        elif artefact == private.BREAK:
            self._read_break(str(payload))
        elif artefact == private.RECOMPILE:
            reasons = json.loads(payload) if str(payload).startswith("[") else [payload]
            guards = [" ".join(str(reason).splitlines()[0].split()) for reason in reasons]
            self.record.recompiled[compile_id] = guards
        elif "cache_" in artefact:
            self.record.cache[artefact] = self.record.cache.get(artefact, 0) + 1

    def _read_event(self, name: str, *, begins: bool) -> None:
        if name in (private.JOINT_PASSES, private.POST_GRAD_PASSES):
            self._read_phase(is_joint=name == private.JOINT_PASSES, begins=begins)
            return
        _, _, rest = name.partition("pass.")
        family, _, slot = rest.partition(".")
        if family.endswith("_passes"):
            self._read_pass(slot, begins=begins)

    def _read_phase(self, *, is_joint: bool, begins: bool) -> None:
        """Follow the passes of the joint graph, or those after the partitioner.

        They begin inside ``compile_fx``, or inside the forward's compilation for inference. Inside
        them torch runs the same passes on each body of a higher-order operator.
        """
        compilation = self.running[-1]
        compilation.order.clear()
        if begins:
            if is_joint:
                compilation.stage = "joint"
            # The joint graph, or the body, is seen by our first pass.
            compilation.gms.append(None if is_joint else compilation.gms[-1])
            return

        if len(compilation.gms) == 2:
            compilation.keep(f"{compilation.stage}_after_passes")
        compilation.gms.pop()

    def _read_pass(self, slot: str, *, begins: bool) -> None:
        compilation = self.running[-1]
        if begins:
            compilation.begun.append((slot, compilation.snapshot(), time.perf_counter()))
            return
        end = time.perf_counter()
        slot, before, begin = compilation.begun.pop()
        after = compilation.snapshot()
        number = compilation.order[slot] = compilation.order.get(slot, -1) + 1
        # The first pass of this slot is ours.
        if after is None or (slot == "joint_custom_pre_pass" and number == 0):
            return
        # A slot of the user holds passes, any other name is a pass of Inductor.
        name = slot
        own = private.own_passes(slot)
        if number < len(own):
            name = getattr(own[number], "__name__", type(own[number]).__name__)
        run = RecordedPass(
            name=name,
            slot=slot,
            stage=compilation.stage,
            before=before or after,
            after=after,
            compiled=compilation.compiled,
            seconds=end - begin,
        )
        compilation.compiled.passes.append(run)

    def _read_break(self, text: str) -> None:
        where, reason = "an unknown place", text.strip().splitlines()[0].strip()
        place = _PLACE.search(text)
        if place:
            where = place[1] or f"{place[2]}:{place[3]}"
        explained = _EXPLAINED.search(text)
        if explained:
            reason = f"{explained[1].strip()}. {explained[2].strip()}"
        found = GraphBreak(
            where.removeprefix(f"{Path.cwd()}{os.sep}"), _describe_no_fake_kernel(text) or reason
        )
        for number, known in enumerate(self.record.breaks):
            if (known.where, known.reason) == (found.where, found.reason):
                self.record.breaks[number] = replace(known, times=known.times + 1)
                return
        self.record.breaks.append(found)


def _describe_no_fake_kernel(text: str) -> str | None:
    """Return a sentence about an operator without fake kernel, if ``text`` is about one.

    The two messages are of an operator of ``custom_op`` and of one of ``define``.
    """
    found = _NO_FAKE_KERNEL.search(text)
    if found is None:
        return None
    operator = "::".join(filter(None, found.groups()))
    return (
        f"{operator} has no fake kernel, without which it is in no graph: "
        f'register one with torch.library.register_fake("{operator}")'
    )


# One recorder at a time, as it stands in the place of Inductor's only ``compile_fx``.
_open = threading.Lock()


@contextmanager
def gt_compile(*, lower: bool = False, caches: bool = False) -> Iterator[CompileRecord]:
    """Record what torch.compile does in the block: graphs of every stage, passes, breaks, code.

        with gt_compile() as record:
            torch.compile(model)(x).sum().backward()
        record.assert_no_graph_breaks()
        gt_golden.check(record.backward)

    Dynamo is reset before and after the block. All settings are put back when it ends, also by an
    error.

    Args:
        lower: False runs all of Inductor's passes on graphs, and then operators of eager: no
            compiler is needed, and inputs are kept for ``assert_pass_bitwise``. True generates and
            runs Inductor's code.
        caches: leave Inductor's caches on. A graph from a cache runs no pass, so it is not
            recorded.

    Yields:
        The record. It grows inside the block.

    Raises:
        RuntimeError: another recorder is open.
    """
    check_switches(lower=lower, caches=caches)
    if not _open.acquire(blocking=False):
        raise RuntimeError(
            "gt_compile is open already: a compilation is recorded once; use the outer record"
        )

    record = CompileRecord()
    recorder = _Recorder(record, lower=lower)
    try:
        with (
            private.fresh(caches=caches),
            private.instead_of_compile_fx(recorder.wrap),
            private.heard_by(recorder),
        ):
            yield record
    except Exception as error:
        no_kernel = _describe_no_fake_kernel(str(error))
        if no_kernel:
            error.add_note(f"gt_compile: {no_kernel}")
        elif isinstance(error, private.Unsupported):
            error.add_note(
                "gt_compile: fullgraph=True ends at the first graph break; without it "
                "record.breaks lists all of them, each with its reason and line"
            )
        raise
    finally:
        # Functions that were compiled here live on, and may compile their backward later.
        recorder.is_open = False
        _open.release()
        facts.notify("compiled", record=record)

    if recorder.fault is not None:
        raise recorder.fault
    if not record.graphs and not record.breaks:
        # A loop over the graphs, or a test that no graph broke, would check nothing.
        facts.emit("idle", what="gt_compile: nothing was compiled inside the block")
