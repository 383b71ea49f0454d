"""The pipeline: which passes run, in which order, with which options, and how they are run.

The order (M1) is that of ``SLOTS``. A slot holds the passes of that kind that were asked for; those
that this package does not have (offload), or does not have yet, are given by ``extra``::

    passes = construct_default_graph_passes(n_layers=32, loss=LossConfig("chunked_cross_entropy", 8),
                                            extra={"offload": [bind_options(my_offload_pass, gibibytes=4)]})
    gm = apply_graph_passes(traced.gm, traced.example_inputs, passes, disable=["my_offload_pass"])
"""

from __future__ import annotations

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
from pytest_gtrainer.graph.bucket_plan import BucketPlan, PayloadOrder, get_default_transformer_block_buckets
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.passes.canonicalize import DEFAULT_RULES, canonicalize_graph_pass, eliminate_dead_code_pass
from pytest_gtrainer.passes.chunking.chunk import chunk_pass
from pytest_gtrainer.passes.chunking.config import ChunkConfig, check_surroundings
from pytest_gtrainer.passes.chunking.schedule import chunk_schedule_pass
from pytest_gtrainer.passes.collectives import (
    deduplicate_fsdp_unshard_chains_pass,
    reassign_collective_pgs_pass,
    reduce_scatter_before_all_reduce_pass,
)
from pytest_gtrainer.passes.graph_pass import REWRITE, BoundPass, bind_options, lint, options_of
from pytest_gtrainer.passes.joint import joint_transformer_block_bucketing_reordering_pass
from pytest_gtrainer.passes.remat import selective_activation_remat_pass, tag_with_memory_policy_pass

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
            raise ValueError(f"the loss {self.kind!r} is not known: choose one of {', '.join(_LOSSES)}")
        if self.num_chunks < 1 or (self.num_chunks > 1 and self.kind != CHUNKED_CROSS_ENTROPY):
            raise ValueError(f"{self.num_chunks} chunks of the loss {self.kind!r}: only {CHUNKED_CROSS_ENTROPY!r} has")


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
    extra: Mapping[str, Sequence[BoundPass]] | None = None,
) -> list[BoundPass]:
    """The passes of a training step in the order of ``SLOTS``, with their options bound.

    The plan follows from the model and its loss: "loss" is in the last bucket if that is chunked cross entropy.

    Args:
        n_layers, moe_layers, expert_fsdp_degree: the model, see ``get_default_transformer_block_buckets``.
        loss: the configured loss, by default cross entropy.
        bucket_plan: a plan by hand, for other models; instead of the model and its loss.
        payload_order, reorder, require_buckets: see ``joint_transformer_block_bucketing_reordering_pass``.
        reduce_scatter_first: for hybrid sharding, right before bucketing: ``reduce_scatter_before_all_reduce_pass``.
        reshard_after_forward, keep_unsharded: gather again in the backward, see ``tag_with_memory_policy_pass``.
        canonical_rules: see ``canonicalize_graph_pass``.
        chunk: regions to run in chunks, see ``chunk_pass``; give ``apply_graph_passes`` the twin.
        schedule_chunks: let them take turns, see ``chunk_schedule_pass``.
        extra: passes of the caller's by slot; they run behind ours of that slot.

    Raises:
        ValueError: neither or both of ``n_layers`` and ``bucket_plan``, a slot that does not exist, a bucket that
            reaches out of a chunked layer, or chunks at a ``tensor_parallel_degree`` above 1.
    """
    plan = _plan(n_layers, loss, moe_layers, expert_fsdp_degree, bucket_plan)
    if unknown := [slot for slot in extra or () if slot not in SLOTS]:
        raise ValueError(f"there is no slot {', '.join(map(repr, unknown))}; there are {', '.join(SLOTS)}")
    if chunk is not None:
        check_surroundings(chunk, plan, tensor_parallel_degree)
    gathering: dict[str, Any] = {"reshard_after_forward": True, "keep_unsharded": keep_unsharded}
    told = {"require_buckets": True} if require_buckets else {}  # an option that is left alone is in no fingerprint
    packing: dict[str, Any] = {"bucket_plan": plan, "payload_order": payload_order, "reorder": reorder, **told}
    ours: dict[Slot, list[BoundPass]] = {  # a slot that is misspelt or missing fails the check of types
        "dead_code": [bind_options(eliminate_dead_code_pass)],
        "canonicalize": [bind_options(canonicalize_graph_pass, rules=canonical_rules)],
        "deduplicate": [bind_options(deduplicate_fsdp_unshard_chains_pass)],
        "memory_policy": [bind_options(tag_with_memory_policy_pass, **gathering)] * reshard_after_forward,
        "remat": [bind_options(selective_activation_remat_pass)] * reshard_after_forward,
        "chunk": [] if chunk is None else [bind_options(chunk_pass, config=chunk)],
        "chunk_schedule": [bind_options(chunk_schedule_pass)] * schedule_chunks,
        "process_groups": [bind_options(reassign_collective_pgs_pass)],
        "bucketing": [bind_options(reduce_scatter_before_all_reduce_pass)] * reduce_scatter_first
        + [bind_options(joint_transformer_block_bucketing_reordering_pass, **packing)],
    }
    return [step for slot in SLOTS for step in (*ours.get(slot, ()), *(extra or {}).get(slot, ()))]


def _plan(
    n_layers: int | None,
    loss: LossConfig | None,
    moe_layers: Collection[int],
    expert_fsdp_degree: int,
    by_hand: BucketPlan | None,
) -> BucketPlan:
    if n_layers is not None and by_hand is None:
        return get_default_transformer_block_buckets(
            n_layers,
            chunked_loss_enabled=loss is not None and loss.kind == CHUNKED_CROSS_ENTROPY,
            moe_layers=moe_layers,
            expert_fsdp_degree=expert_fsdp_degree,
        )
    if n_layers is not None or by_hand is None:
        raise ValueError("give either n_layers, for the default plan of buckets, or a bucket_plan by hand")
    if loss is not None:
        raise ValueError("a bucket_plan by hand says itself where the loss belongs: leave loss out")
    return by_hand


def to_whoever_looks(line: str) -> None:
    """The default progress: to those who watch ``progress``, as a terminal does; else a line on the error stream."""
    if facts.is_watched("progress"):
        facts.tell("progress", text=line)
    else:
        print(line, file=sys.stderr, flush=True)


def apply_graph_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None,
    passes: Iterable[BoundPass],
    *,
    disable: Collection[str] = (),
    observer: Callable[[str, fx.GraphModule, fx.GraphModule], None] | None = None,
    progress: Callable[[str], None] | None = to_whoever_looks,
    long: float = 2.0,
    twin: fx.GraphModule | None = None,
) -> fx.GraphModule:
    """Run the passes on a copy of the graph; lint and recompile once, at the end.

    The given graph is never changed, so it is as it was also if a pass fails. The result's
    ``meta["gt_passes"]`` tells what ran, as ``PassRun``. With the environment variable ``TORCH_TRACE`` the graphs
    before and after each pass go to torch's structured log, too, which tlparse reads.

    Args:
        passes: see ``construct_default_graph_passes``, or ``bind_options`` for a list of your own. Passes that
            ``graph_pass`` did not make may recompile as often as they like: it costs nothing here.
        disable: names of passes to leave out.
        observer: called with a pass's name and the graph before and after it; costs a copy a pass.
        progress: called with a line a pass, once the pipeline has been running for ``long`` seconds.
        twin: ``TracedStep.twin``, for ``chunk_pass``; the passes before it run on a copy of it, too.

    Raises:
        ValueError: ``disable`` names a pass that is not in the list.
        TypeError: a pass of the list is not bound, or returns something else than a graph.
        RuntimeError: a pass left the graph out of order; the passes run once more to name it.
        Whatever a pass raises, with a note that names the pass.
    """
    steps = _enabled(list(passes), disable)
    runs: list[PassRun] = []
    log = PipelineLog(gm)
    is_watched = log.is_wanted or observer is not None or facts.is_watched("graph_pass")
    started, current = time.perf_counter(), copied_lazily(gm)
    other = None if twin is None else copied_lazily(twin)
    for number, step in enumerate(steps, 1):
        spent = time.perf_counter() - started
        if progress is not None and spent >= long:
            progress(f"graph passes: {step.name} ({number} of {len(steps)}), {spent:.1f} s so far")
        before, current = current, copied_lazily(current) if is_watched else current
        begun = time.perf_counter()
        current, other = _run(step, current, example_inputs, other)
        runs.append(PassRun(step.name, step.fingerprint, time.perf_counter() - begun))
        facts.tell("graph_pass", run=runs[-1], before=before, after=current)
        log.add(runs[-1], current)
        if observer is not None:
            observer(step.name, before, current)
    log.close()
    try:
        lint(current.graph, "the pipeline")
    except RuntimeError:
        if observer is not _lint_after:  # once more, to name the pass
            apply_graph_passes(gm, example_inputs, steps, observer=_lint_after, progress=None, twin=twin)
        raise
    done = compiled(current)
    done.meta["gt_passes"] = tuple(runs)
    facts.tell("graph_passes", given=gm, result=done)
    return done


def _lint_after(name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
    lint(after.graph, name)


class PipelineLog:
    """What one pipeline leaves in the log that ``TORCH_TRACE`` asks for: the graphs around each pass, an overview."""

    def __init__(self, given: fx.GraphModule) -> None:
        self.is_wanted = bool(os.environ.get("TORCH_TRACE"))
        self._name = f"gt_passes_{next(_pipelines)}"
        self._overview: list[dict[str, Any]] = []
        self._text = render(given) if self.is_wanted else ""

    def add(self, run: PassRun, after: fx.GraphModule) -> None:
        if not self.is_wanted:
            return
        before, self._text = self._text, render(after)
        changed = before != self._text
        if changed:
            stem = f"{self._name}_{len(self._overview):02}_{_AWKWARD.sub('_', run.name)}"
            log_artefact(f"{stem}_before", before)
            log_artefact(f"{stem}_after", self._text)
        self._overview.append({**asdict(run), "changed": changed})

    def close(self) -> None:
        if self.is_wanted:
            log_artefact(f"{self._name}_overview", self._overview)


def _enabled(steps: list[BoundPass], disable: Collection[str]) -> list[BoundPass]:
    """The passes that run, those without options bound as they are; those to disable are among them."""
    for index, step in enumerate(steps):
        if not callable(step) and not isinstance(step, BoundPass):
            raise TypeError(f"pass {index} of the list is {step!r}: give a function gm -> gm, or bind_options(...)")
    steps = [step if isinstance(step, BoundPass) else bind_options(step) for step in steps]
    names = [step.name for step in steps]
    disable = [disable] if isinstance(disable, str) else disable
    if unknown := [name for name in disable if name not in names]:
        raise ValueError(
            f"there is no pass {', '.join(map(repr, unknown))} to disable; there are {', '.join(dict.fromkeys(names))}"
        )
    return [step for step in steps if step.name not in disable]


def _run(
    step: BoundPass, gm: fx.GraphModule, example_inputs: Sequence[Any] | None, twin: fx.GraphModule | None
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """The graph and its twin after a pass, which runs on both; one that reads the twin ends its use."""
    given = {"twin": twin} if "twin" in options_of(step.function) else {}
    rewrite = getattr(step.function, REWRITE, None)  # of one of ours, which changes the graph in place
    try:
        result = (rewrite or step.function)(gm, example_inputs, **{**given, **step.options})
        # a backend of torch.compile may give the graph's ``forward``
        result = gm if rewrite is not None else getattr(result, "__self__", result)
        if not isinstance(result, fx.GraphModule):
            raise TypeError(f"a pass returns a GraphModule, this one returned a {type(result).__name__}")
    except Exception as error:
        error.add_note(f"in the graph pass {step}")
        raise
    return result, None if given or twin is None else _run(step, twin, None, None)[0]
