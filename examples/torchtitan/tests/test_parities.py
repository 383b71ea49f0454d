"""Flavours that torchtitan's CI runs, trained on gloo ranks: graph_trainer against the eager trainer.

Both sides are torchtitan's own ``Trainer``: by the command line of the flavour, and by that of eager
torchtitan for the same model and parallelism. The two add in another order. So both compute in
float64, and losses, gradients and weights are compared as float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from flavours import FLAVOURS, SAME_GRAPH, eager_chunks, eager_config, eager_line, line_of
from whole_trainer import COMPILERS, config_of, in_float64, train

from pytest_gtrainer import assert_runs_equal

SHARDS = ("--parallelism.data_parallel_shard_degree", "2")
# Experts' weights that are gathered in another dtype are not cast: tests/test_faults.py.
CAST = {"param_dtype": "bfloat16"}


@dataclass(frozen=True)
class Parity:
    """How a flavour runs here: groups are smaller than on GPUs, and there are all kinds of them."""

    ranks: int = 4
    degrees: tuple[str, ...] = SHARDS
    eager: Callable[[list[str]], list[str]] = eager_line
    param_dtype: str = "float32"
    without_passes: tuple[str, ...] = ()
    is_long: bool = False


PARITIES = {
    "aot_fx_trace_llama3_fsdp_tp_cp": Parity(
        # Parameters are sharded over the ranks of a sequence, too.
        degrees=("--parallelism.data_parallel_shard_degree", "1"),
        eager=eager_config("_eager"),
    ),
    "aot_fx_trace_llama3_fsdp_tp": Parity(),
    # What is not in the one before: recomputation, and copies that stand for offloads.
    "aot_fx_trace_llama3_fsdp_tp_sac_and_offload": Parity(is_long=True),
    "aot_fx_trace_deepseek_v3_flexattn_regional_inductor_ep_overlap_transformer_batch": Parity(
        degrees=(
            *("--parallelism.data_parallel_shard_degree", "4"),
            *("--parallelism.expert_parallel_degree", "2"),
            "--compile.ep_overlap.disable_early_grad_accumulation",
        ),
        eager=eager_chunks,
        **CAST,
    ),
    "aot_fx_trace_qwen3_moe_fsdp_tp_ep": Parity(
        degrees=(*SHARDS, "--parallelism.expert_parallel_degree", "4"),
        without_passes=("deduplicate_fsdp_unshard_chains_pass",),
    ),
    "aot_fx_trace_muse_glimmer_fsdp_tp": Parity(),
    # A part of the one before.
    "aot_fx_trace_muse_glimmer_fsdp": Parity(ranks=2, is_long=True),
}


BLOCKED = {
    "aot_fx_trace_deepseek_v3_fused_mla_swiglu_fsdp_tp": "its kernels are Triton's",
    "aot_fx_trace_deepseek_v3_minimal_async_ep": "its buffers are symmetric memory of GPUs",
    **dict.fromkeys(
        (
            "aot_fx_trace_deepseek_v3_graph_pp_interleaved_1f1b_full_inductor",
            "aot_fx_trace_deepseek_v3_graph_pp_zbv_zero_bubble_full_inductor",
            "aot_fx_trace_deepseek_v3_graph_pp_dual_pipe_v_full_inductor",
        ),
        "its runtime reads fwd_cache of torch's stages, which torch 2.15 has not",
    ),
}
GOLDENS = Path(__file__).parents[1] / "golden" / "tests" / "test_flavours"


def params():
    for name, parity in PARITIES.items():
        marks = [pytest.mark.gt_world("ranks", size=parity.ranks, timeout=600)]
        if parity.is_long:
            marks.append(pytest.mark.long)
        yield pytest.param(line_of(name), parity, id=name, marks=marks)
    for name, reason in BLOCKED.items():
        yield pytest.param(line_of(name), None, id=name, marks=pytest.mark.skip(reason=reason))


def test_each_flavour_of_the_ci_is_compared_or_named():
    switched_on = {name for name, flavour in FLAVOURS.items() if not flavour.disabled}
    same = {name for name in SAME_GRAPH if not FLAVOURS[name].disabled}
    assert {*PARITIES, *same, *BLOCKED} == switched_on
    assert len(switched_on) == 14


@pytest.mark.parametrize(("name", "other"), list(SAME_GRAPH.items()))
def test_two_flavours_of_one_graph(name, other):
    def graph_of(flavour):
        text = (GOLDENS / f"test_the_schedule-{flavour}.fxgraph").read_text()
        return [line for line in text.splitlines() if not line.startswith("#")]

    assert graph_of(name) == graph_of(other)
    assert other in PARITIES or FLAVOURS[other].disabled


@pytest.mark.usefixtures("gt_dense_flex_attention", "gt_deterministic")
@pytest.mark.parametrize(("line", "parity"), list(params()))
def test_the_graph_trains_as_the_eager_trainer_does(line, parity, gt_world, tmp_path):
    def run(line):
        config = config_of(line, tmp_path, *parity.degrees)
        config.training.mixed_precision_param = parity.param_dtype
        if hasattr(config.compile, "disable_passes"):
            config.compile.disable_passes = [
                *config.compile.disable_passes,
                *COMPILERS,
                *parity.without_passes,
            ]
        config.model_spec.model.layers = config.model_spec.model.layers[:2]
        config.loss.num_chunks = 2
        with in_float64():
            seen = train(config)
        return {name: tensor.float() for name, tensor in seen.items()}

    eager = {}

    def run_eager():
        eager.update(run(parity.eager(line)))
        return eager

    def off_by_a_millionth():
        name = [name for name in eager if name.startswith("step 1 gradient")][-1]
        return eager | {name: eager[name] * (1 + 2**-20)}

    assert_runs_equal(lambda: run(line), run_eager, control=off_by_a_millionth)
