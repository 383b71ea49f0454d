"""``gt_compile``: records what torch.compile does inside a block.

Dynamo's graph and the user's options are read where torch.compile calls Inductor; forward and backward where Inductor
is given each; the joint graph by a pass of ours before all others. When a pass begins and ends, torch's structured
trace tells, and the graph that is being worked on is copied if it has changed.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import is_
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch import compiling as private
from pytest_gtrainer.compiling.record import CompiledGraph, CompileRecord, GraphBreak, RecordedPass
from pytest_gtrainer.graph.foreign import adopted

_EXPLAINED = re.compile(r"\n\n(.*?)\n\s*Explanation: (.*?)\n", re.DOTALL)
_PLACE = re.compile(r'Graph break in user code at (\S+)|File "([^"]+)", line (\d+)')
_NO_FAKE_KERNEL = re.compile(
    r"no fake impl registered for .*?\((\w+)::(\w+)|unsupported operator: (\w+)\.(\w+)"
)


@dataclass(slots=True)
class _Work:
    """A graph that is being compiled: its stage, and the module that passes rewrite, then the bodies they go into."""

    compiled: CompiledGraph
    stage: str
    gms: list[fx.GraphModule | None]
    begun: list[tuple[str, fx.GraphModule | None, float]] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    copy: fx.GraphModule | None = None

    def snapshot(self) -> fx.GraphModule | None:
        """A copy of the graph as it is now, with our names; the last one, if nothing has changed since."""
        if (gm := self.gms[-1]) is None:
            return None
        seen: list[Any] = []
        for part in gm.modules():
            for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                seen += (node, node.target, node.args, node.kwargs, node.meta.get("val"))
        if self.copy is None or len(seen) != len(self.seen) or not all(map(is_, seen, self.seen)):
            self.seen, self.copy = seen, _copied(gm, self.compiled, self.stage)
        return self.copy

    def keep(self, stage: str) -> None:
        if (found := self.snapshot()) is not None:
            place = f"{self.compiled.place}." if self.compiled.place else ""
            found.meta.setdefault("gt_stage", f"{place}{stage}")
            self.compiled.stages[stage] = found


def _copied(gm: fx.GraphModule, compiled: CompiledGraph, stage: str) -> fx.GraphModule:
    """The graph with the names of Dynamo's inputs; a graph behind the partitioner has one direction."""
    copy = adopted(gm, compiled.stages.get("dynamo", gm))
    copy.meta.pop("gt_stage", None)
    if stage in ("forward", "backward"):
        for node in copy.graph.nodes:
            if node.op != "placeholder":
                node.meta["autograd_backward"] = stage == "backward"
    return copy


class _Recorder(logging.Handler):
    """Hears the structured trace, and stands where torch.compile calls Inductor."""

    def __init__(self, record: CompileRecord, *, lower: bool) -> None:
        super().__init__()
        self.record, self.lower = record, lower
        self.thread = threading.current_thread()
        self.works: list[_Work] = []
        self.fault: Exception | None = None
        self.failed: CompiledGraph | None = None  # or not done yet
        self.is_open = True

    def around(self, compile_fx: private.CompileFx) -> private.CompileFx:
        def recorded(
            gm: fx.GraphModule,
            example_inputs: Sequence[Any],
            inner_compile: Callable[..., Any] = private.compile_fx_inner,
            config_patches: dict[str, Any] | None = None,
            **rest: Any,
        ) -> Any:
            if (here := threading.current_thread()) is not self.thread:
                said = f"thread {here.name!r} compiled, and this records what {self.thread.name!r} does"
                self.record.faults.append(
                    f"{said}: enter gt_compile in the thread that calls the compiled function"
                )
            if here is not self.thread or self.works:  # with options it calls itself
                return compile_fx(gm, example_inputs, inner_compile, config_patches, **rest)
            now = private.current_compile_id()
            told = (each for each in self.record.graphs if each.id == now and not each.stages)
            compiled = self.failed = next(told, None) or self._added(now)
            with self._working(compiled, "pre_grad", gm) as work:
                work.keep("dynamo")
                patches = private.with_first_joint_pass(
                    config_patches, private.Watching("gtrainer-joint-graph", self._joint_began)
                )
                made = compile_fx(
                    gm, example_inputs, self._inner(compiled, inner_compile), patches, **rest
                )
                self.failed = None
                return made

        return recorded

    def _added(self, compile_id: str) -> CompiledGraph:
        self.record.graphs.append(CompiledGraph(compile_id, len(self.record.graphs), self.lower))
        return self.record.graphs[-1]

    def _inner(
        self, compiled: CompiledGraph, inner_compile: Callable[..., Any]
    ) -> Callable[..., Any]:
        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
            stage = "backward" if options.get("is_backward") else "forward"
            compiled.is_late |= not self.is_open

            def given(inputs: list[Any]) -> None:
                if stage not in compiled.inputs and not compiled.is_late:
                    copies = (
                        each.detach().clone() if isinstance(each, Tensor) else each
                        for each in inputs
                    )
                    compiled.inputs[stage] = list(copies)

            with self._working(compiled, stage, gm) if self.is_open else nullcontext() as work:
                if work is not None:
                    work.keep(stage)
                if self.lower:
                    return inner_compile(gm, example_inputs, **options)
                is_inference = bool(options.get("is_inference"))
                return private.with_kernels_of_eager(
                    gm, example_inputs, is_inference=is_inference, given=given
                )

        return inner

    @contextmanager
    def _working(self, compiled: CompiledGraph, stage: str, gm: fx.GraphModule) -> Iterator[_Work]:
        self.works.append(_Work(compiled, stage, [gm]))
        try:
            yield self.works[-1]
        finally:
            self.works.pop()

    def _joint_began(self, gm: fx.GraphModule) -> None:
        if self.works and self.works[-1].stage == "joint":
            work = self.works[-1]
            work.gms[-1] = gm
            if len(work.gms) == 2:
                work.keep("joint")

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() not in (self.thread, *(work.thread for work in self.works)):
            return
        try:
            self._heard(getattr(record, "metadata", None) or {}, getattr(record, "payload", None))
        except (
            Exception
        ) as error:  # a compile must not fail because it is watched: the end of the block tells it
            self.fault = self.fault or error

    def _heard(self, told: dict[str, Any], payload: Any) -> None:
        compile_id = f"{told.get('frame_id')}/{told.get('frame_compile_id')}"
        artefact = (told.get("artifact") or {}).get("name", "")
        if private.EVENT in told:
            event = json.loads(payload) if isinstance(payload, str) else payload
            if self.works and event["ph"] in ("B", "E"):
                self._phase(event["name"], event["ph"] == "B")
        elif (
            private.COMPILED_GRAPH in told and self.failed and self.failed.id == compile_id
        ):  # Dynamo begins again
            self.failed.stages.clear()
            self.failed.passes.clear()
        elif private.COMPILED_GRAPH in told:
            self._added(compile_id)
            if compile_id.endswith("/0"):
                self.record.compiled.append(compile_id)
            else:
                self.record.recompiled.setdefault(compile_id, [])
        elif private.CODE in told and self.works:
            work = self.works[-1]
            work.compiled.code[work.stage] = str(payload)
        elif artefact == private.BREAK:
            self._break(str(payload))
        elif artefact == private.RECOMPILE:
            reasons = json.loads(payload) if str(payload).startswith("[") else [payload]
            self.record.recompiled[compile_id] = [
                " ".join(str(each).splitlines()[0].split()) for each in reasons
            ]
        elif "cache_" in artefact:
            self.record.cache[artefact] = self.record.cache.get(artefact, 0) + 1

    def _phase(self, name: str, begins: bool) -> None:
        work = self.works[-1]
        if name in (private.JOINT_PASSES, private.POST_GRAD_PASSES):
            is_joint = name == private.JOINT_PASSES
            work.order.clear()
            if begins:
                # inside compile_fx, or inside the forward's compile for inference; then each body's, and its own
                work.stage = "joint" if is_joint else work.stage
                work.gms.append(None if is_joint else work.gms[-1])
                return
            if len(work.gms) == 2:
                work.keep(f"{work.stage}_after_passes")
            work.gms.pop()
            return
        _, _, rest = name.partition("pass.")
        family, _, slot = rest.partition(".")
        if not family.endswith("_passes"):
            return
        if begins:
            work.begun.append((slot, work.snapshot(), time.perf_counter()))
            return
        end, (slot, before, begin) = time.perf_counter(), work.begun.pop()
        own, after = private.own_passes(slot), work.snapshot()
        place = work.order[slot] = work.order.get(slot, -1) + 1
        if after is None or (slot == "joint_custom_pre_pass" and place == 0):  # ours
            return
        title = (
            slot
            if place >= len(own)
            else getattr(own[place], "__name__", type(own[place]).__name__)
        )
        found = (title, slot, work.stage, before or after, after, work.compiled, end - begin)
        work.compiled.passes.append(RecordedPass(*found))

    def _break(self, text: str) -> None:
        place, why = _PLACE.search(text), _EXPLAINED.search(text)
        where = (place[1] or f"{place[2]}:{place[3]}") if place else "an unknown place"
        where = where.removeprefix(f"{Path.cwd()}{os.sep}")
        reason = f"{why[1].strip()}. {why[2].strip()}" if why else text.strip().splitlines()[0]
        reason = _of_no_fake_kernel(text) or reason.strip()
        for number, known in enumerate(self.record.breaks):
            if (known.where, known.reason) == (where, reason):
                self.record.breaks[number] = replace(known, times=known.times + 1)
                return
        self.record.breaks.append(GraphBreak(where, reason))


def _of_no_fake_kernel(text: str) -> str | None:
    """A sentence that names the operator, whether the decorator ``custom_op`` or ``define`` made it."""
    if (found := _NO_FAKE_KERNEL.search(text)) is None:
        return None
    operator = "::".join(filter(None, found.groups()))
    told = f"{operator} has no fake kernel, without which it is in no graph"
    return f'{told}: register one with torch.library.register_fake("{operator}")'


_open = threading.Lock()


@contextmanager
def gt_compile(*, lower: bool = False, caches: bool = False) -> Iterator[CompileRecord]:
    """Record what torch.compile does inside the block: graphs of every stage, passes, graph breaks, code.

        with gt_compile() as record:
            torch.compile(model)(x).sum().backward()
        record.assert_no_graph_breaks()
        gt_golden.check(record.backward)

    Dynamo is reset before and after the block, and all is as it was when the block ends, also by an error.

    Args:
        lower: False runs all of Inductor's passes on graphs, and then operators of eager: no compiler is needed, and
            calls are remembered for ``assert_pass_bitwise``. True generates and runs Inductor's code.
        caches: leave Inductor's caches on. What they give runs no pass, so nothing of it is recorded.

    Raises:
        RuntimeError: another recorder is open.
    """
    if not _open.acquire(blocking=False):
        raise RuntimeError(
            "gt_compile is open already: a compilation is recorded once; use the outer record"
        )
    record = CompileRecord()
    recorder = _Recorder(record, lower=lower)
    try:
        with (
            private.fresh(caches=caches),
            private.instead_of_compile_fx(recorder.around),
            private.heard_by(recorder),
        ):
            yield record
    except Exception as error:
        if (said := _of_no_fake_kernel(str(error))) is not None:
            error.add_note(f"gt_compile: {said}")
        elif isinstance(error, private.Unsupported):
            said = "gt_compile: fullgraph=True ends at the first graph break"
            error.add_note(
                f"{said}; without it record.breaks tells all of them, each with its reason and line"
            )
        raise
    finally:
        recorder.is_open = False
        _open.release()
        facts.notify("compiled", record=record)
    if recorder.fault is not None:
        raise recorder.fault
