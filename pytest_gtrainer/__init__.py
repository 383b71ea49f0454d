"""Tests for distributed compile: worlds, goldens, bitwise numerics, and the passes they test.

Every public name is importable from here and loaded on first use, so that
``import pytest_gtrainer`` costs nothing and in particular does not import torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES: dict[str, tuple[str, ...]] = {
    "tracing.model": ("annotate_module_fqns",),
    "tracing.sharding": ("MixedPrecisionPolicy", "data_parallel"),
    "tracing.step": ("TracedStep", "trace_step"),
    "tracing.stage": ("TracedStage", "trace_stage"),
    "graph.bucket_plan": ("get_default_transformer_block_buckets",),
    "passes.joint": tuple(
        f"{kind}transformer_block_bucketing_reordering_pass" for kind in ("joint_", "")
    ),
    "passes.collectives": (
        "AsyncTpDecision",
        "async_tp_decisions",
        "deduplicate_fsdp_unshard_chains_pass",
        "reassign_collective_pgs_pass",
        "reduce_scatter_before_all_reduce_pass",
    ),
    "passes.canonicalize": ("canonicalize_graph_pass", "eliminate_dead_code_pass"),
    "passes.remat": ("tag_with_memory_policy_pass", "selective_activation_remat_pass"),
    "passes.chunking.config": ("ChunkConfig", "ChunkError", "ChunkWarning"),
    "passes.chunking.chunk": ("chunk_pass",),
    "passes.chunking.schedule": ("chunk_schedule_pass",),
    "passes.chunking.twins": ("concretize_chunk_symbolic_shapes_pass",),
    "passes.stages": ("split_stage_graph", "StageGraphs"),
    "passes.pipeline": ("construct_default_graph_passes", "apply_graph_passes", "LossConfig"),
    "passes.graph_pass": ("bind_options",),
    "graph.collectives": ("PlanError",),
    "graph.layout": ("BucketLayout", "LayoutDifference", "bucket_layout", "assert_same_layout"),
    "references.eager": ("eager_bucket_layout",),
    "references.config": ("TrainConfig",),
    "references.chunked": ("eager_chunked",),
    "references.hand_over": ("trace_once",),
    "references.parity": ("assert_parity", "assert_simulated_parity", "train_eager", "train_graph"),
    "references.invariant": ("assert_invariant",),
    "references.rank_agnostic": ("assert_rank_agnostic",),
    "references.replicas": ("RanksDisagree", "ReplicasDiffer", "assert_replicas_equal"),
    "references.runs": ("assert_runs_equal",),
    "references.same_model": ("assert_same_model",),
    "attack.deadlock": (
        "Collective",
        "Deadlock",
        "OrderByLuck",
        "Receive",
        "Send",
        "assert_no_deadlock",
    ),
    "worlds.simulated": ("CollectiveMismatch", "VacuousCheck"),
    "worlds.simulated.threads.team": ("Standstill",),
    "numerics.record": ("Record",),
    "numerics.digest": ("digest",),
    "numerics.compare": (
        "BitwiseDifference",
        "ControlFailed",
        "compare",
        "assert_bitwise_equal",
        "assert_bitwise_different",
    ),
    "numerics.verdict": ("Verdict",),
    "numerics.determinism": (
        "deterministic",
        "DebugConfig",
        "ActivationCheckpointConfig",
        "flex_attention_options",
        "mesh_seed",
        "balanced_loss",
    ),
    "numerics.flex_attention": ("dense_flex_attention",),
    "numerics.sweep": ("Sweep", "Rule"),
    "numerics.run_to_run": ("assert_run_to_run",),
    "bisect": ("bisect_passes",),
    "over_time.recorder": ("record_training",),
    "over_time.files": ("RecordError",),
    "over_time.resuming": ("NotResumed", "assert_resumes"),
    "numerics.operators": ("capture_operators", "compare_operators"),
    "compiling.recorder": ("gt_compile",),
    "compiling.record": ("CompileRecord", "NotRecorded"),
    "compiling.bitwise": ("assert_pass_bitwise", "assert_compiled_bitwise"),
    "compiling.accuracy": ("Accuracy", "LessAccurate", "assert_no_less_accurate"),
    "compiling.inductor": ("inductor_options",),
    "worlds.spec": ("World", "WorldSpec"),
    "worlds.simulated.net": ("Net", "NetModel", "sweep_nets"),
    "worlds.simulate": ("simulate_graph", "simulate_eager"),
    "graph.memory": ("peak_memory", "assert_peak_memory"),
    "report.timeline": ("timeline", "CostModel"),
    "arithmetic.formulas": ("meaning",),
    "proofs.contexts": ("field_arithmetic", "term_arithmetic"),
    "proofs.prove": ("assert_same_function", "prove"),
    "proofs.proof": ("AnotherFunction", "Proof"),
    "graphtext": ("graphtext",),
    "checks.checker": ("assert_graph",),
    "checks.subject": ("CheckError", "CheckFailure"),
    "golden.check": ("GoldenMismatch",),
}
"""By module, the public names that it holds."""

_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ImportError as error:
        from pytest_gtrainer.environment import complaint

        error.add_note(complaint() or "")
        raise
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
