"""Why EP overlap by a graph pass has other last bits than eager chunks: it adds chunks before ranks.

An eager chunk gathers each weight for itself, so each chunk's gradient is reduced over the ranks, and
the two results are added. The graph has one gather. Its pass adds the two gradients where they are
made, in front of the reduction, and so it does with ``disable_early_grad_accumulation``, whose help
promises the order of eager chunks: ``_grad_escape_boundaries`` deletes that argument.
"""

from unittest import mock

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import torch
from flavours import eager_chunks, line_of
from torch._inductor.pattern_matcher import stable_topological_sort
from torchtitan.experiments.graph_trainer import ep_chunk_pass, passes
from whole_trainer import COMPILERS, config_of, on_gloo, train

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal

SUMS = ("graph_output_partial_sum", "backward_partial_sum")
FLAVOUR = "aot_fx_trace_deepseek_v3_flexattn_regional_inductor_ep_overlap_transformer_batch"
DEGREES = (
    *("--parallelism.data_parallel_shard_degree", "2"),
    *("--parallelism.expert_parallel_degree", "2"),
    "--compile.ep_overlap.disable_early_grad_accumulation",
)


def line_with_chunks_of(root, dim):
    kept = [part for part in line_of(FLAVOUR) if not part.startswith("--compile.ep_overlap.chunk")]
    kept = [part for part in kept if not part.startswith("--compile.ep_overlap.module_fqn")]
    return [
        *kept,
        f"--compile.ep_overlap.module_fqn {root}",
        f"--compile.ep_overlap.chunk_dim {dim}",
    ]


def reduces_each_chunk(gm):
    """Move the sum of two chunks' gradients behind what is done to it: the order of eager chunks."""
    for total in list(gm.graph.nodes):
        if total.meta.get("chunked_materialization_proof") not in SUMS:
            continue
        chain = []
        last = total
        while [user.op for user in last.users] == ["call_function"]:
            (last,) = last.users
            chain.append(last)
        chunks = []
        for chunk in total.args:
            done = {total: chunk}
            for node in chain:
                with gm.graph.inserting_before(chain[-1]):
                    done[node] = gm.graph.node_copy(
                        node, lambda each, done=done: done.get(each, each)
                    )
            chunks.append(done[last])
        if chain:
            with gm.graph.inserting_after(last):
                add = gm.graph.call_function(torch.ops.aten.add.Tensor, tuple(chunks))
            last.replace_all_uses_with(add)
            add.meta = dict(last.meta)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


@pytest.mark.usefixtures("gt_dense_flex_attention", "gt_deterministic")
@pytest.mark.gt_world("ranks", size=2, timeout=600)
@pytest.mark.parametrize(
    ("root", "dim"),
    [
        ("layers.*.moe", "batch"),
        pytest.param("layers.*.moe", "seq", marks=pytest.mark.long),
        pytest.param("layers.*", "batch", marks=pytest.mark.long),
    ],
)
def test_the_order_of_sums(root, dim, gt_world, tmp_path, monkeypatch):
    check = ep_chunk_pass._validate_selected_symbol_shapes

    def sorted_first(gm, **options):
        # The pass leaves graphs of layers.*.moe out of order: tests/test_flavours.py.
        stable_topological_sort(gm.graph)
        check(gm, **options)

    monkeypatch.setattr(ep_chunk_pass, "_validate_selected_symbol_shapes", sorted_first)

    def run(line):
        config = config_of(line, tmp_path, *DEGREES)
        # Bucketing merges reductions of several parameters, and changes no sum of two ranks.
        bucketing = "joint_transformer_block_bucketing_reordering_pass"
        config.compile.disable_passes = [*config.compile.disable_passes, *COMPILERS, bucketing]
        config.model_spec.model.layers = config.model_spec.model.layers[:2]
        config.loss.num_chunks = 2
        with on_gloo():
            return train(config, steps=1)

    graph = line_with_chunks_of(root, dim)
    eager = run(eager_chunks(graph))
    assert_bitwise_different(run(graph), eager)

    chunk = passes.ep_overlap_chunk_pass

    def chunk_and_reduce(gm, example_inputs=None, **options):
        return reduces_each_chunk(chunk(gm, example_inputs, **options))

    with mock.patch.object(passes, "ep_overlap_chunk_pass", chunk_and_reduce):
        assert_bitwise_equal(run(graph), eager, what=f"{root} by {dim}")
