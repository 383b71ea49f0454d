"""Construct and run the pipeline: passes with their options, in the order of ``SLOTS``."""

import itertools
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.graph_modules import compiled, copied_lazily
from pytest_gtrainer._torch.passes import log_artefact
from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.bucket_plan import (
    SUGGESTS,
    BucketPlan,
    PayloadOrder,
    get_default_transformer_block_buckets,
)
from pytest_gtrainer.graph.foreign import refuse_without_output
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.passes.canonicalize import (
    DEFAULT_RULES,
    canonicalize_graph_pass,
    eliminate_dead_code_pass,
)
from pytest_gtrainer.passes.chunking.chunk import chunk_pass
from pytest_gtrainer.passes.chunking.config import ChunkConfig, check_surroundings
from pytest_gtrainer.passes.chunking.schedule import chunk_schedule_pass
from pytest_gtrainer.passes.collectives import (
    deduplicate_fsdp_unshard_chains_pass,
    reassign_collective_pgs_pass,
    reduce_scatter_before_all_reduce_pass,
)
from pytest_gtrainer.passes.graph_pass import (
    REWRITE,
    BoundPass,
    all_bound,
    bind_options,
    lint,
    options_of,
    refusing_written_constants,
    returned,
)
from pytest_gtrainer.passes.joint import joint_transformer_block_bucketing_reordering_pass
from pytest_gtrainer.passes.remat import (
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
)

Slot = Literal[
    "dead_code",
    "canonicalize",
    "deduplicate",
    "memory_policy",
    "offload",
    "remat",
    "chunk",
    "chunk_schedule",
    "process_groups",
    "bucketing",
    "concretize",
]
SLOTS: tuple[Slot, ...] = get_args(Slot)
"""Places in the pipeline, in order. Offload and concretize only have passes from ``extra``."""

CHUNKED_CROSS_ENTROPY = "chunked_cross_entropy"
_LOSSES = ("cross_entropy", CHUNKED_CROSS_ENTROPY, "other")
_NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]")
_pipelines = itertools.count()


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss that a trainer is configured with.

    Attributes:
        kind: "cross_entropy"; "chunked_cross_entropy", which runs the head itself, chunk by chunk,
            whatever the number of chunks; or "other".
        num_chunks: into how many parts chunked cross entropy cuts the tokens.
    """

    kind: str = "cross_entropy"
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _LOSSES:
            raise ValueError(
                f"the loss {self.kind!r} is not known: choose one of {', '.join(_LOSSES)}"
            )
        if type(self.num_chunks) is not int or self.num_chunks < 1:
            raise ValueError(
                f"{self.num_chunks!r} chunks of the loss: give a whole number, 1 or more"
            )
        if self.num_chunks > 1 and self.kind != CHUNKED_CROSS_ENTROPY:
            raise ValueError(
                f"{self.num_chunks} chunks of the loss {self.kind!r}: only "
                f"{CHUNKED_CROSS_ENTROPY!r} has"
            )


@dataclass(frozen=True, slots=True)
class PassRun:
    """A pass that was run: its name, the fingerprint of its options, and the seconds it took."""

    name: str
    fingerprint: str
    seconds: float


def construct_default_graph_passes(
    *,
    n_layers: int | None = None,
    loss: LossConfig | None = None,
    moe_layers: Collection[int] = (),
    expert_fsdp_degree: int = 1,
    bucket_plan: BucketPlan | None = None,
    payload_order: PayloadOrder = "managed",
    reorder: bool = True,
    require_buckets: bool = False,
    reduce_scatter_first: bool = False,
    reshard_after_forward: bool = False,
    keep_unsharded: Collection[str] = (),
    canonical_rules: Collection[str] = DEFAULT_RULES,
    chunk: ChunkConfig | None = None,
    schedule_chunks: bool = False,
    tensor_parallel_degree: int = 1,
    extra: Mapping[str, Sequence[BoundPass | Callable[..., Any]]] | None = None,
) -> list[BoundPass]:
    """Return the passes of a training step in the order of ``SLOTS``, with their options bound.

    Args:
        n_layers, moe_layers, expert_fsdp_degree: for a model with torchtitan's module names, see
            ``get_default_transformer_block_buckets``.
        loss: its loss, by default cross entropy. With chunked cross entropy, "loss" is in the last
            bucket.
        bucket_plan: for any other model, instead of these: a list of module FQNs, or of lists that
            share a bucket.
        payload_order, reorder, require_buckets: see
            ``joint_transformer_block_bucketing_reordering_pass``.
        reduce_scatter_first: for hybrid sharding, right before bucketing:
            ``reduce_scatter_before_all_reduce_pass``.
        reshard_after_forward, keep_unsharded: gather again in the backward, see
            ``tag_with_memory_policy_pass``.
        canonical_rules: see ``canonicalize_graph_pass``.
        chunk: regions to run in chunks, see ``chunk_pass``; give ``apply_graph_passes`` the twin.
        schedule_chunks: interleave the chunks, see ``chunk_schedule_pass``.
        extra: your own passes, by slot; they run after ours of that slot.

    Raises:
        ValueError: neither or both of ``n_layers`` and ``bucket_plan`` are given, a slot does not
            exist, a bucket reaches out of a chunked layer, or there are chunks with a
            ``tensor_parallel_degree`` above 1.
        TypeError: ``reshard_after_forward`` is a number of ranks, as FSDP2 takes it.
    """
    check_switches(
        reorder=reorder,
        require_buckets=require_buckets,
        reduce_scatter_first=reduce_scatter_first,
        schedule_chunks=schedule_chunks,
    )
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"reshard_after_forward={reshard_after_forward!r}: give True or False; resharding to a "
            "smaller number of ranks, as FSDP2 can, is not supported"
        )
    plan = _plan(
        bucket_plan, n_layers, loss, moe_layers=moe_layers, expert_fsdp_degree=expert_fsdp_degree
    )
    extra = extra or {}
    unknown = [slot for slot in extra if slot not in SLOTS]
    if unknown:
        raise ValueError(
            f"there is no slot {', '.join(map(repr, unknown))}; there are {', '.join(SLOTS)}"
        )
    if type(tensor_parallel_degree) is not int or tensor_parallel_degree < 1:
        raise ValueError(
            f"tensor_parallel_degree={tensor_parallel_degree!r}: give a number of ranks, 1 or more"
        )
    if chunk is not None:
        check_surroundings(chunk, plan, tensor_parallel_degree)

    # Each slot is a key here, so that mypy finds one that is misspelt or missing.
    ours: dict[Slot, list[BoundPass]] = {
        "dead_code": [bind_options(eliminate_dead_code_pass)],
        "canonicalize": [bind_options(canonicalize_graph_pass, rules=canonical_rules)],
        "deduplicate": [bind_options(deduplicate_fsdp_unshard_chains_pass)],
        "memory_policy": [],
        "remat": [],
        "chunk": [] if chunk is None else [bind_options(chunk_pass, config=chunk)],
        "chunk_schedule": [bind_options(chunk_schedule_pass)] * schedule_chunks,
        "process_groups": [bind_options(reassign_collective_pgs_pass)],
        "bucketing": [bind_options(reduce_scatter_before_all_reduce_pass)] * reduce_scatter_first,
    }
    if reshard_after_forward:
        tag = bind_options(
            tag_with_memory_policy_pass, reshard_after_forward=True, keep_unsharded=keep_unsharded
        )
        ours["memory_policy"] = [tag]
        ours["remat"] = [bind_options(selective_activation_remat_pass)]
    bucketing: dict[str, Any] = {
        "bucket_plan": plan,
        "payload_order": payload_order,
        "reorder": reorder,
    }
    if require_buckets:
        # An option that keeps its default is in no fingerprint, so these stay as they were.
        bucketing["require_buckets"] = True
    bucket = bind_options(joint_transformer_block_bucketing_reordering_pass, **bucketing)
    ours["bucketing"].append(bucket)
    passes: list[BoundPass | Callable[..., Any]] = []
    for slot in SLOTS:
        passes += [*ours.get(slot, ()), *extra.get(slot, ())]
    return all_bound(passes)


def _plan(
    bucket_plan: BucketPlan | None, n_layers: int | None, loss: LossConfig | None, **experts: Any
) -> BucketPlan:
    if (n_layers is None) is (bucket_plan is None):
        raise ValueError(
            "give either n_layers, for the default plan of buckets, or a bucket_plan by hand; "
            f"{SUGGESTS}"
        )
    if bucket_plan is None:
        assert n_layers is not None
        is_chunked = loss is not None and loss.kind == CHUNKED_CROSS_ENTROPY
        return get_default_transformer_block_buckets(
            n_layers, chunked_loss_enabled=is_chunked, **experts
        )
    if loss is not None:
        raise ValueError("a bucket_plan already says where the loss belongs: leave loss out")
    return bucket_plan


def report_progress(line: str) -> None:
    """Report a line to watchers of ``progress``, as a terminal, or else to the error stream."""
    if facts.is_watched("progress"):
        facts.notify("progress", text=line)
    else:
        print(line, file=sys.stderr, flush=True)


def apply_graph_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None,
    passes: Iterable[BoundPass | Callable[..., Any]],
    *,
    disable: Collection[str] = (),
    require_changes: Collection[str] = (),
    observer: Callable[[str, fx.GraphModule, fx.GraphModule], None] | None = None,
    progress: Callable[[str], None] | None = report_progress,
    long: float = 2.0,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """Run the passes on a copy of ``gm``, which never changes; lint and recompile once, at the end.

    The result's ``meta["gt_passes"]`` lists what ran, as ``PassRun``. With the variable
    ``TORCH_TRACE`` the graphs before and after each pass also go to torch's structured log, which
    tlparse reads.

    Args:
        gm, example_inputs: a joint graph, and its inputs (or None), which are handed to each pass.
        passes: from ``construct_default_graph_passes``, or a list of your own: functions, or
            ``bind_options(...)``.
        disable: names of passes to leave out.
        require_changes: names of passes that must change the graph's text; costs a copy and two
            texts a pass.
        observer: called with a pass's name and the graph before and after it; costs a copy a pass.
        progress: called with a line a pass, once the pipeline has run for ``long`` seconds.
        twin: ``TracedStep.twin``, for ``chunk_pass``; the passes before it run on a copy of it,
            too.

    Raises:
        ValueError: ``disable`` or ``require_changes`` names a pass that does not run, or the graph
            has no output node.
        AssertionError: a pass of ``require_changes`` left the graph as it was.
        TypeError: an entry of the list is no pass, or a pass does not return a graph.
        RuntimeError: a pass left the graph out of order; the passes then run again, to find the one
            that did it.
        Any error of a pass, with a note that names the pass.
    """
    __tracebackhide__ = True
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(
            f"apply_graph_passes takes a GraphModule, not a {type(gm).__name__}: give its .gm"
        )
    refuse_without_output(gm.graph)
    bound = all_bound(passes)
    disabled = _check_names(disable, bound, "disable")
    steps = [step for step in bound if step.name not in disabled]
    required = set(_check_names(require_changes, steps, "require"))
    pipeline = PipelineRun(gm, twin, required, observer, progress, long)
    pipeline.run(steps, example_inputs)
    if pipeline.unchanged:
        raise facts.FailedCheck(
            f"{', '.join(sorted(pipeline.unchanged))} changed nothing in the graph: "
            "require_changes names it"
        )
    try:
        lint(pipeline.gm.graph, "the pipeline")
    except RuntimeError:
        if observer is not _lint_after:  # once more, to name the pass
            apply_graph_passes(
                gm, example_inputs, steps, observer=_lint_after, progress=None, twin=twin
            )
        raise
    done = compiled(pipeline.gm)
    done.meta["gt_passes"] = tuple(pipeline.runs)
    facts.notify("graph_passes", given=gm, result=done)
    return done


class PipelineRun:
    """One run of a pipeline, pass by pass.

    Attributes:
        gm, twin: copies of the given graphs, after the passes that have run; not linted.
        unchanged: names of passes that must change the graph and have not done so yet.
        runs: what ran.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        twin: fx.GraphModule | None,
        required: set[str],
        observer: Callable[[str, fx.GraphModule, fx.GraphModule], None] | None,
        progress: Callable[[str], None] | None,
        long: float,
    ) -> None:
        self.unchanged = required
        self._observer, self._progress, self._long = observer, progress, long
        self._log = PipelineLog(gm) if os.environ.get("TORCH_TRACE") else None
        self._is_watched = (
            observer is not None or self._log is not None or facts.is_watched("graph_pass")
        )
        self.runs: list[PassRun] = []
        self._started = time.perf_counter()
        self.gm = copied_lazily(gm)
        self.twin = None if twin is None else copied_lazily(twin)

    def run(self, steps: Sequence[BoundPass], example_inputs: Sequence[Any] | None) -> None:
        """Run all passes, and report each."""
        __tracebackhide__ = True
        try:
            for number, step in enumerate(steps, 1):
                spent = time.perf_counter() - self._started
                if self._progress is not None and spent >= self._long:
                    place = f"{number} of {len(steps)}"
                    self._progress(f"graph passes: {step.name} ({place}), {spent:.1f} s so far")
                self._run_step(step, example_inputs)
        finally:
            # The overview is most wanted of a pipeline that a pass ended.
            if self._log is not None:
                self._log.close()

    def _run_step(self, step: BoundPass, example_inputs: Sequence[Any] | None) -> None:
        __tracebackhide__ = True
        before = self.gm
        # Passes rewrite in place, so a graph that somebody will look at is copied before.
        if self._is_watched or step.name in self.unchanged:
            self.gm = copied_lazily(before)
        parts = [] if _is_ours(step) else _parts_of(self.gm)

        begun = time.perf_counter()
        self.gm, self.twin = _run(step, self.gm, example_inputs, self.twin)
        run = PassRun(step.name, step.fingerprint, time.perf_counter() - begun)
        self.runs.append(run)

        if parts and _are_same(parts, _parts_of(self.gm)):
            facts.emit("idle", what=f"{step.name} changed nothing")
        if step.name in self.unchanged and render(before) != render(self.gm):
            self.unchanged.remove(step.name)
        facts.notify("graph_pass", run=run, before=before, after=self.gm)
        if self._log is not None:
            self._log.add(run, self.gm)
        if self._observer is not None:
            self._observer(step.name, before, self.gm)


def _is_ours(step: BoundPass) -> bool:
    """Return whether a pass is one of this package, whose clean-ups often find nothing."""
    module = str(getattr(step.function, "__module__", ""))  # None, if it was made by exec
    # ``as_pass`` wraps passes of users in a function of ``graph_pass``.
    return module.startswith("pytest_gtrainer.passes.") and module != all_bound.__module__


def _parts_of(gm: fx.GraphModule) -> list[object]:
    """Return the objects that a graph consists of: the same ones after a pass without changes."""
    # Compared by identity, these cost less than two texts of the graph for each pass.
    parts: list[object] = []
    for node in gm.graph.nodes:
        parts += (node, node.target, node.args, node.kwargs, *node.kwargs, *node.kwargs.values())
        for key, value in node.meta.items():
            parts += (key, value)
            if type(value) is dict:
                parts += (*value, *value.values())
    return parts


def _are_same(before: Sequence[object], after: Sequence[object]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


def _lint_after(name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
    lint(after.graph, name)


class PipelineLog:
    """The artefacts of one pipeline for ``TORCH_TRACE``: graphs around passes, an overview."""

    def __init__(self, given: fx.GraphModule) -> None:
        self._name, self._text = f"gt_passes_{next(_pipelines)}", render(given)
        self._overview: list[dict[str, Any]] = []

    def add(self, run: PassRun, after: fx.GraphModule) -> None:
        before, self._text = self._text, render(after)
        changed = before != self._text
        if changed:
            name = _NOT_IN_FILE_NAMES.sub("_", run.name)
            stem = f"{self._name}_{len(self._overview):02}_{name}"
            log_artefact(f"{stem}_before", before)
            log_artefact(f"{stem}_after", self._text)
        self._overview.append({**asdict(run), "changed": changed})

    def close(self) -> None:
        log_artefact(f"{self._name}_overview", self._overview)


def _check_names(requested: Collection[str], steps: list[BoundPass], verb: str) -> Collection[str]:
    """Return the requested names of passes; refuse one that no step has."""
    names = dict.fromkeys(step.name for step in steps)
    requested = [requested] if isinstance(requested, str) else requested
    unknown = []
    for name in requested:
        if name not in names:
            unknown.append(f"{name!r} (a slot)" if name in SLOTS else repr(name))
    if unknown:
        raise ValueError(
            f"there is no pass {', '.join(unknown)} to {verb}; there are {', '.join(names)}"
        )
    return requested


def _run(
    step: BoundPass,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None,
    twin: fx.GraphModule | None,
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Return graph and twin after a pass, which runs on both; one that reads the twin ends it."""
    __tracebackhide__ = True
    reads_twin = "twin" in options_of(step.function)
    options = {"twin": twin, **step.options} if reads_twin else step.options
    # A pass of ours would lint and recompile; its rewrite leaves both to the end of the pipeline.
    rewrite = getattr(step.function, REWRITE, None)
    try:
        if rewrite is not None:
            rewrite(gm, example_inputs, **options)
            result = gm
        else:
            with refusing_written_constants(gm, step.name):
                result = returned(step.function(gm, example_inputs, **options))
    except Exception as error:
        error.add_note(f"in the graph pass {step}")
        raise
    if reads_twin or twin is None:
        return result, None
    # The twin needs the same passes, or it would no longer correspond node for node.
    return result, _run(step, twin, None, None)[0]
