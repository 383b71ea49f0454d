"""The pipeline: which passes run, in the order of ``SLOTS`` (M1), with which options, and how they are run."""

import itertools
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
from pytest_gtrainer.graph.bucket_plan import (
    BucketPlan,
    PayloadOrder,
    get_default_transformer_block_buckets,
)
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
"""Places in the pipeline, in order. Without an entry of ``extra``, offload and concretize are empty."""

CHUNKED_CROSS_ENTROPY = "chunked_cross_entropy"
_LOSSES = ("cross_entropy", CHUNKED_CROSS_ENTROPY, "other")
_AWKWARD = re.compile(r"[^\w.-]")  # in a file's name
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
        if self.num_chunks < 1 or (self.num_chunks > 1 and self.kind != CHUNKED_CROSS_ENTROPY):
            raise ValueError(
                f"{self.num_chunks} chunks of the loss {self.kind!r}: only {CHUNKED_CROSS_ENTROPY!r} has"
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
        loss: its loss, by default cross entropy. With chunked cross entropy, "loss" is in the last bucket.
        bucket_plan: for any other model, instead of these: a list of module FQNs, or of lists that share a bucket.
        payload_order, reorder, require_buckets: see ``joint_transformer_block_bucketing_reordering_pass``.
        reduce_scatter_first: for hybrid sharding, right before bucketing: ``reduce_scatter_before_all_reduce_pass``.
        reshard_after_forward, keep_unsharded: gather again in the backward, see ``tag_with_memory_policy_pass``.
        canonical_rules: see ``canonicalize_graph_pass``.
        chunk: regions to run in chunks, see ``chunk_pass``; give ``apply_graph_passes`` the twin.
        schedule_chunks: interleave the chunks, see ``chunk_schedule_pass``.
        extra: your own passes, by slot; they run after ours of that slot.

    Raises:
        ValueError: neither or both of ``n_layers`` and ``bucket_plan`` are given, a slot does not exist, a bucket
            reaches out of a chunked layer, or there are chunks with a ``tensor_parallel_degree`` above 1.
    """
    plan = _plan(
        bucket_plan, n_layers, loss, moe_layers=moe_layers, expert_fsdp_degree=expert_fsdp_degree
    )
    if unknown := [slot for slot in extra or () if slot not in SLOTS]:
        raise ValueError(
            f"there is no slot {', '.join(map(repr, unknown))}; there are {', '.join(SLOTS)}"
        )
    if chunk is not None:
        check_surroundings(chunk, plan, tensor_parallel_degree)
    gathering: dict[str, Any] = {"reshard_after_forward": True, "keep_unsharded": keep_unsharded}
    told = (
        {"require_buckets": True} if require_buckets else {}
    )  # an option that is left alone is in no fingerprint
    packing: dict[str, Any] = {
        "bucket_plan": plan,
        "payload_order": payload_order,
        "reorder": reorder,
        **told,
    }
    ours: dict[
        Slot, list[BoundPass]
    ] = {  # a slot that is misspelt or missing fails the check of types
        "dead_code": [bind_options(eliminate_dead_code_pass)],
        "canonicalize": [bind_options(canonicalize_graph_pass, rules=canonical_rules)],
        "deduplicate": [bind_options(deduplicate_fsdp_unshard_chains_pass)],
        "memory_policy": [bind_options(tag_with_memory_policy_pass, **gathering)]
        * reshard_after_forward,
        "remat": [bind_options(selective_activation_remat_pass)] * reshard_after_forward,
        "chunk": [] if chunk is None else [bind_options(chunk_pass, config=chunk)],
        "chunk_schedule": [bind_options(chunk_schedule_pass)] * schedule_chunks,
        "process_groups": [bind_options(reassign_collective_pgs_pass)],
        "bucketing": [bind_options(reduce_scatter_before_all_reduce_pass)] * reduce_scatter_first
        + [bind_options(joint_transformer_block_bucketing_reordering_pass, **packing)],
    }
    return all_bound(
        step for slot in SLOTS for step in (*ours.get(slot, ()), *(extra or {}).get(slot, ()))
    )


def _plan(
    by_hand: BucketPlan | None, n_layers: int | None, loss: LossConfig | None, **experts: Any
) -> BucketPlan:
    if (n_layers is None) is (by_hand is None):
        raise ValueError(
            "give either n_layers, for the default plan of buckets, or a bucket_plan by hand"
        )
    if n_layers is not None:
        is_chunked = loss is not None and loss.kind == CHUNKED_CROSS_ENTROPY
        return get_default_transformer_block_buckets(
            n_layers, chunked_loss_enabled=is_chunked, **experts
        )
    if loss is not None:
        raise ValueError("a bucket_plan already says where the loss belongs: leave loss out")
    assert by_hand is not None
    return by_hand


def to_whoever_looks(line: str) -> None:
    """The default progress: to those who watch ``progress``, as a terminal does; else a line on the error stream."""
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
    progress: Callable[[str], None] | None = to_whoever_looks,
    long: float = 2.0,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """Run the passes on a copy of ``gm``, which never changes; lint and recompile once, at the end.

    The result's ``meta["gt_passes"]`` lists what ran, as ``PassRun``. With the variable ``TORCH_TRACE`` the graphs
    before and after each pass also go to torch's structured log, which tlparse reads.

    Args:
        gm, example_inputs: a joint graph, and its inputs (or None), which are handed to each pass.
        passes: from ``construct_default_graph_passes``, or a list of your own: functions, or ``bind_options(...)``.
        disable: names of passes to leave out.
        require_changes: names of passes that must change the graph's text; costs a copy and two texts a pass.
        observer: called with a pass's name and the graph before and after it; costs a copy a pass.
        progress: called with a line a pass, once the pipeline has run for ``long`` seconds.
        twin: ``TracedStep.twin``, for ``chunk_pass``; the passes before it run on a copy of it, too.

    Raises:
        ValueError: ``disable`` or ``require_changes`` names a pass that does not run.
        AssertionError: a pass of ``require_changes`` left the graph as it was.
        TypeError: an entry of the list is no pass, or a pass does not return a graph.
        RuntimeError: a pass left the graph out of order; the passes then run again, to find the one that did it.
        Any error of a pass, with a note that names the pass.
    """
    __tracebackhide__ = True
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(
            f"apply_graph_passes takes a GraphModule, not a {type(gm).__name__}: give its .gm"
        )
    off = _names(disable, given := all_bound(passes), "disable")
    steps = [step for step in given if step.name not in off]
    idle = set(_names(require_changes, steps, "require"))
    current, runs = _run_all(gm, example_inputs, steps, idle, (observer, progress, long), twin)
    if idle:
        raise AssertionError(
            f"{', '.join(sorted(idle))} changed nothing in the graph: require_changes names it"
        )
    try:
        lint(current.graph, "the pipeline")
    except RuntimeError:
        if observer is not _lint_after:  # once more, to name the pass
            apply_graph_passes(
                gm, example_inputs, steps, observer=_lint_after, progress=None, twin=twin
            )
        raise
    done = compiled(current)
    done.meta["gt_passes"] = tuple(runs)
    facts.notify("graph_passes", given=gm, result=done)
    return done


def _run_all(
    gm: fx.GraphModule,
    inputs: Any,
    steps: list[BoundPass],
    idle: set[str],
    told: tuple[Any, Any, float],
    twin: Any,
) -> tuple[fx.GraphModule, list[PassRun]]:
    """The graph behind all passes, not linted, and what ran; takes those that changed it out of ``idle``."""
    __tracebackhide__ = True
    observer, progress, long = told
    runs: list[PassRun] = []
    log = PipelineLog(gm) if os.environ.get("TORCH_TRACE") else None
    is_watched = log is not None or observer is not None or facts.is_watched("graph_pass")
    started, current = time.perf_counter(), copied_lazily(gm)
    other = None if twin is None else copied_lazily(twin)
    for number, step in enumerate(steps, 1):
        spent = time.perf_counter() - started
        if progress is not None and spent >= long:
            progress(f"graph passes: {step.name} ({number} of {len(steps)}), {spent:.1f} s so far")
        before, current = (
            current,
            copied_lazily(current) if is_watched or step.name in idle else current,
        )
        module = getattr(
            step.function, "__module__", ""
        )  # that a clean-up of ours finds nothing is usual
        is_ours = (
            module.startswith("pytest_gtrainer.passes.") and module != all_bound.__module__
        )  # users' passes
        held = [] if is_ours else _held(current)
        begun = time.perf_counter()
        current, other = _run(step, current, inputs, other)
        runs.append(PassRun(step.name, step.fingerprint, time.perf_counter() - begun))
        if (
            held
            and len(held) == len(now := _held(current))
            and all(a is b for a, b in zip(held, now, strict=True))
        ):
            facts.emit("idle", what=f"{step.name} changed nothing")
        if step.name in idle and render(before) != render(current):
            idle.remove(step.name)
        facts.notify("graph_pass", run=runs[-1], before=before, after=current)
        if log is not None:
            log.add(runs[-1], current)
        if observer is not None:
            observer(step.name, before, current)
    if log is not None:
        log.close()
    return current, runs


def _held(gm: fx.GraphModule) -> list[object]:
    """What the graph consists of: the same objects behind a pass that has changed nothing."""
    nodes = (
        (node, node.target, node.args, node.kwargs, node.meta.items()) for node in gm.graph.nodes
    )
    parts = [
        (*own, *(part for key, value in meta for part in (key, value))) for *own, meta in nodes
    ]
    inner = (value for own in parts for value in own if type(value) is dict)
    return [part for own in parts for part in own] + [
        part for value in inner for part in (*value, *value.values())
    ]


def _lint_after(name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
    lint(after.graph, name)


class PipelineLog:
    """What one pipeline leaves in the log that ``TORCH_TRACE`` asks for: the graphs around each pass, an overview."""

    def __init__(self, given: fx.GraphModule) -> None:
        self._name, self._text = f"gt_passes_{next(_pipelines)}", render(given)
        self._overview: list[dict[str, Any]] = []

    def add(self, run: PassRun, after: fx.GraphModule) -> None:
        before, self._text = self._text, render(after)
        if changed := before != self._text:
            stem = f"{self._name}_{len(self._overview):02}_{_AWKWARD.sub('_', run.name)}"
            log_artefact(f"{stem}_before", before)
            log_artefact(f"{stem}_after", self._text)
        self._overview.append({**asdict(run), "changed": changed})

    def close(self) -> None:
        log_artefact(f"{self._name}_overview", self._overview)


def _names(asked: Collection[str], steps: list[BoundPass], verb: str) -> Collection[str]:
    names, asked = [step.name for step in steps], [asked] if isinstance(asked, str) else asked
    if unknown := [name for name in asked if name not in names]:
        told = ", ".join(f"{name!r}{' (a slot)' if name in SLOTS else ''}" for name in unknown)
        raise ValueError(
            f"there is no pass {told} to {verb}; there are {', '.join(dict.fromkeys(names))}"
        )
    return asked


def _run(
    step: BoundPass,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None,
    twin: fx.GraphModule | None,
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """The graph and its twin after a pass, which runs on both; one that reads the twin ends its use."""
    __tracebackhide__ = True
    given = {"twin": twin} if "twin" in options_of(step.function) else {}
    rewrite = getattr(
        step.function, REWRITE, None
    )  # of one of ours, which changes the graph in place
    try:
        result = (rewrite or step.function)(gm, example_inputs, **{**given, **step.options})
        result = gm if rewrite is not None else returned(result)
    except Exception as error:
        error.add_note(f"in the graph pass {step}")
        raise
    return result, None if given or twin is None else _run(step, twin, None, None)[0]
