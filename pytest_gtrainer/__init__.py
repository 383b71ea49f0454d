"""Tests for distributed compile: worlds, goldens, bitwise numerics, and the passes they test.

Every public name is importable from here and loaded on first use, so that
``import pytest_gtrainer`` costs nothing and in particular does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME: dict[str, str] = {
    # tracing
    "annotate_module_fqns": "tracing.model",
    "MixedPrecisionPolicy": "tracing.sharding",
    "data_parallel": "tracing.sharding",
    "TracedStep": "tracing.step",
    "trace_step": "tracing.step",
    "TracedStage": "tracing.stage",
    "trace_stage": "tracing.stage",
    # passes
    "get_default_transformer_block_buckets": "graph.bucket_plan",
    "joint_transformer_block_bucketing_reordering_pass": "passes.joint",
    "transformer_block_bucketing_reordering_pass": "passes.joint",
    "deduplicate_fsdp_unshard_chains_pass": "passes.collectives",
    "canonicalize_graph_pass": "passes.canonicalize",
    "eliminate_dead_code_pass": "passes.canonicalize",
    "reassign_collective_pgs_pass": "passes.collectives",
    "reduce_scatter_before_all_reduce_pass": "passes.collectives",
    "tag_with_memory_policy_pass": "passes.remat",
    "selective_activation_remat_pass": "passes.remat",
    "ChunkConfig": "passes.chunking.config",
    "ChunkError": "passes.chunking.config",
    "ChunkWarning": "passes.chunking.config",
    "chunk_pass": "passes.chunking.chunk",
    "chunk_schedule_pass": "passes.chunking.schedule",
    "concretize_chunk_symbolic_shapes_pass": "passes.chunking.twins",
    "split_stage_graph": "passes.stages",
    "StageGraphs": "passes.stages",
    "construct_default_graph_passes": "passes.pipeline",
    "apply_graph_passes": "passes.pipeline",
    "LossConfig": "passes.pipeline",
    "bind_options": "passes.graph_pass",
    # layouts
    "BucketLayout": "graph.layout",
    "bucket_layout": "graph.layout",
    "assert_same_layout": "graph.layout",
    "eager_bucket_layout": "references.eager",
    # references
    "TrainConfig": "references.config",
    "eager_chunked": "references.chunked",
    "train_eager": "references.training",
    "train_graph": "references.training",
    "assert_parity": "references.parity",
    "assert_replicas_equal": "references.replicas",
    "VacuousCheck": "worlds.simulated",
    # numerics
    "Record": "numerics.record",
    "digest": "numerics.digest",
    "compare": "numerics.compare",
    "Verdict": "numerics.verdict",
    "assert_bitwise_equal": "numerics.compare",
    "assert_bitwise_different": "numerics.compare",
    "deterministic": "numerics.determinism",
    "DebugConfig": "numerics.determinism",
    "ActivationCheckpointConfig": "numerics.determinism",
    "flex_attention_options": "numerics.determinism",
    "mesh_seed": "numerics.determinism",
    "balanced_loss": "numerics.loss_balance",
    "Sweep": "numerics.sweep",
    "Rule": "numerics.sweep",
    "assert_run_to_run": "numerics.run_to_run",
    "bisect_passes": "bisect",
    "capture_operators": "numerics.operators",
    "compare_operators": "numerics.operators",
    # torch.compile
    "gt_compile": "compiling.recorder",
    "CompileRecord": "compiling.record",
    "NotRecorded": "compiling.record",
    "assert_pass_bitwise": "compiling.bitwise",
    "assert_compiled_bitwise": "compiling.bitwise",
    "inductor_options": "compiling.inductor",
    # worlds
    "World": "worlds.spec",
    "WorldSpec": "worlds.spec",
    # simulated world
    "Net": "worlds.simulated.net",
    "NetModel": "worlds.simulated.net",
    "assert_simulated_parity": "references.parity",
    "sweep_nets": "worlds.simulated.net",
    "simulate_graph": "worlds.simulate",
    "simulate_eager": "worlds.simulate",
    # memory
    "peak_memory": "graph.memory",
    "assert_peak_memory": "graph.memory",
    # schedules
    "timeline": "report.timeline",
    "CostModel": "report.timeline",
    # text
    "graphtext": "graphtext",
    "check_graph": "checks.checker",
    "async_tp_decisions": "checks.async_tp",
    "AsyncTpDecision": "checks.async_tp",
    "assert_graph": "checks.checker",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ImportError as error:
        from pytest_gtrainer.supported import complaint

        error.add_note(complaint() or "")
        raise
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
