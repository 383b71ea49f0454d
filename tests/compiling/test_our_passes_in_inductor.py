"""Each pass of ours as a pass of Inductor: it changes the graph, and eager's bits stay; or a
sentence says why not.
"""

import pytest
import torch
from torch import nn

from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.moe import MoE, MoEConfig
from pytest_gtrainer import (
    ChunkConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_graph,
    bind_options,
    canonicalize_graph_pass,
    chunk_pass,
    chunk_schedule_pass,
    concretize_chunk_symbolic_shapes_pass,
    construct_default_graph_passes,
    data_parallel,
    deduplicate_fsdp_unshard_chains_pass,
    eager_chunked,
    graphtext,
    gt_compile,
    inductor_options,
    reassign_collective_pgs_pass,
    reduce_scatter_before_all_reduce_pass,
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
    transformer_block_bucketing_reordering_pass,
)
from pytest_gtrainer._torch.fsdp2 import fully_shard
from pytest_gtrainer._torch.passes import ALL_TO_ALL
from tests.compiling.test_inductor import NAME, PLAN, Model, Tied, bucketing, gradients, sharded

JOINT, POST_GRAD = "joint_custom_post_pass", "post_grad_custom_post_pass"
AGAIN = [
    bind_options(tag_with_memory_policy_pass, reshard_after_forward=True),
    selective_activation_remat_pass,
]
PIPELINES = {
    f"{NAME}, dependencies": [bucketing(insert_overlap_deps=True)],
    f"{NAME}, default pipeline": construct_default_graph_passes(bucket_plan=PLAN),
    f"{NAME}, gathers again": construct_default_graph_passes(
        bucket_plan=PLAN, reshard_after_forward=True
    ),
}
CASES = {
    "canonicalize_graph_pass": [canonicalize_graph_pass],
    "reassign_collective_pgs_pass": [reassign_collective_pgs_pass, bucketing()],
    "selective_activation_remat_pass": AGAIN,
    NAME: [bucketing(reorder=False)],
    **PIPELINES,
}


def pairs():
    """Yield cases, slots, and whether code is generated, for each pipeline in one of its slots."""
    for slot in (JOINT, POST_GRAD):
        for case in CASES:
            yield pytest.param(case, False, slot)
        for place, case in enumerate(PIPELINES):
            is_other = (place % 2 == 0) != (slot == JOINT)
            yield pytest.param(case, True, slot, marks=[pytest.mark.long] * is_other)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
@pytest.mark.parametrize(("case", "lower", "slot"), pairs())
def test_a_pass_of_ours_changes_the_graph_and_no_bit(gt_mesh, gt_world, case, slot, lower):
    """P4: of eager ``data_parallel``, by kernels of eager and by generated code."""
    model, x = sharded(gt_mesh, gt_world.rank)
    expected = gradients(model, model, x)
    with gt_compile(lower=lower) as record:
        compiled = torch.compile(model, options=inductor_options(*CASES[case], slot=slot))
        actual, other = gradients(model, compiled, x), gradients(model, compiled, x + 1)
    record.assert_no_graph_breaks()
    assert record.passes(case.partition(",")[0], changed=True)
    assert_bitwise_equal(actual, expected)
    assert_bitwise_different(other, expected)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_what_is_gathered_twice_is_gathered_once(gt_mesh, gt_world):
    """The joint graph gathers once; after the partitioner, forward and backward each gather for
    themselves.
    """
    torch.manual_seed(0)
    model, tokens = data_parallel(Tied(), gt_mesh), torch.arange(6) + 4 * gt_world.rank
    expected = gradients(model, model, tokens)
    with gt_compile() as record:
        compiled = torch.compile(
            model, options=inductor_options(deduplicate_fsdp_unshard_chains_pass)
        )
        actual, other = gradients(model, compiled, tokens), gradients(model, compiled, tokens + 1)
    [run] = record.passes("deduplicate_fsdp_unshard_chains_pass", changed=True)
    assert_graph(run.before, "count 6 all_gather_into_tensor")
    assert_graph(run.after, "count 3 all_gather_into_tensor")
    assert_bitwise_equal(actual, expected)
    assert_bitwise_different(other, expected)


@pytest.mark.second_tier("gathered")
@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
@pytest.mark.parametrize("passes", [[], AGAIN], ids=["kept", "gathered again"])
def test_the_partitioner_follows_what_says_to_gather_again(gt_mesh, passes):
    """The backward of the head comes first; torch 2.15 gathers it both times in the forward."""
    model, x = sharded(gt_mesh, 0)
    with gt_compile() as record:
        gradients(
            model, torch.compile(model, options=inductor_options(*passes) if passes else None), x
        )
    assert_graph(record.forward, "count 2 all_gather_into_tensor in layers.1")
    assert_graph(record.backward, f"count {2 if passes else 0} all_gather_into_tensor in layers.1")


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4, mesh={"replicate": 2, "fsdp": 2})
@pytest.mark.parametrize("slot", [JOINT, POST_GRAD])
def test_hybrid_sharding_in_inductor_has_the_bits_of_fully_shard(gt_mesh, gt_world, slot):
    """D16: reduced among shards first, then among replicas; without the pass it is the other way
    round.
    """
    torch.manual_seed(0)
    model, eager = Model(), Model()
    eager.load_state_dict(model.state_dict())
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(gt_world.rank))
    for part in (*eager.layers, eager.head, eager):
        fully_shard(part, mesh=gt_mesh)
    expected = gradients(eager, eager, x)
    data_parallel(model, gt_mesh, mode="hybrid_shard")
    for passes in ([reduce_scatter_before_all_reduce_pass, bucketing()], [bucketing()]):
        with gt_compile() as record:
            actual = gradients(
                model, torch.compile(model, options=inductor_options(*passes, slot=slot)), x
            )
        assert record.passes(NAME, changed=True)
        (assert_bitwise_equal if len(passes) == 2 else assert_bitwise_different)(actual, expected)


CHUNKED = ChunkConfig(module_fqn="layers.*")


def trained(model, function, x):
    """Each parameter's gradient of a step, by name."""
    model.zero_grad()
    function(x).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.second_tier("True")
@pytest.mark.parametrize("lower", [False, True])
def test_a_model_in_chunks_compiles_to_eagers_bits(lower):
    """``chunk_pass`` is replaced here. A pattern of Inductor would make one ``addmm`` of a product
    and a sum: other bits on some CPUs.
    """
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 16)
    with eager_chunked(model, CHUNKED):
        expected = trained(model, model, x)
        with gt_compile(lower=lower) as record:
            compiled = torch.compile(model, options={"pattern_matcher": False})
            actual, other = trained(model, compiled, x), trained(model, compiled, x + 1)
        record.assert_no_graph_breaks()
        record.assert_compiles(1)
        assert_graph(
            record.dynamo, "count 2 relu in layers.0\ncount 2 relu in layers.1"
        )  # a chunk each
        assert ".run" not in graphtext.render(
            record.dynamo
        )  # as modules below a chunked forward were called
        assert_bitwise_equal(actual, expected)
        assert_bitwise_different(other, expected)


class Experts(nn.Module):
    """One layer of four experts, beside its input: f32[batch, sequence, 16] in and out."""

    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"moe": MoE(16, MoEConfig(n_experts=4, ffn_dim=12, n_shared=0))})
        self.layers = nn.ModuleList([layer])

    def forward(self, x):
        return x + self.layers[0]["moe"](x)


def exchanges(graph):
    """The chunk of each all-to-all, in graph order."""
    return [node.meta["custom"]["chunk_id"] for node in graph.nodes if node.target is ALL_TO_ALL]


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
@pytest.mark.parametrize("slot", [pytest.param(JOINT, marks=pytest.mark.long), POST_GRAD])
def test_chunks_take_turns_and_no_bit_changes(gt_mesh, gt_world, slot):
    """Against the same compilation without the pass."""
    torch.manual_seed(0)
    model = apply_expert_parallel(Experts(), gt_mesh["ep"])
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(gt_world.rank))
    pairs = []
    with eager_chunked(model, ChunkConfig(module_fqn="layers.*.moe")):
        for passes in ([], [chunk_schedule_pass]):
            with torch._dynamo.config.patch(capture_scalar_outputs=True), gt_compile() as record:
                compiled = torch.compile(
                    model, options=inductor_options(*passes, slot=slot) if passes else {}
                )
                pairs.append([trained(model, compiled, x), trained(model, compiled, x + 1)])
            record.assert_no_graph_breaks()
    (expected, _), (actual, other) = pairs
    assert_bitwise_equal(actual, expected)
    assert_bitwise_different(other, expected)
    forward = record.passes("chunk_schedule_pass", changed=True)[0]  # or the joint graph
    assert exchanges(forward.before.graph)[:6] == [0, 0, 0, 1, 1, 1]
    assert exchanges(forward.after.graph)[:6] == [0, 1, 0, 1, 0, 1]
    assert_graph(forward.after, "then all_to_all_single in layers.0.moe.routed_experts")


# Each pass in one slot, and each slot with two passes.
@pytest.mark.second_tier("joint-chunks of", "joint-one", "post grad-chunks]", "post grad-sizes")
@pytest.mark.parametrize(
    ("a_pass", "dynamic", "wrong"),
    [
        (bind_options(chunk_pass, config=CHUNKED), False, "or compile it inside eager_chunked"),
        (
            bind_options(chunk_pass, config=CHUNKED),
            True,
            "chunk_pass returned another graph: a pass of Inductor rewri",
        ),
        (
            concretize_chunk_symbolic_shapes_pass,
            True,
            "concretize_chunk_symbolic_shapes_pass returned another graph",
        ),
        (
            bind_options(
                transformer_block_bucketing_reordering_pass, direction="fwd", bucket_plan=PLAN
            ),
            False,
            "the graph has nodes of the backward: for a joint graph use "
            "joint_transformer_block_bucketing_reordering_p",
        ),
    ],
    ids=["chunks", "chunks of any size", "sizes of chunks", "one direction"],
)
@pytest.mark.parametrize("slot", [JOINT, POST_GRAD], ids=["joint", "post grad"])
def test_a_pass_that_cannot_run_there_says_so(a_pass, dynamic, wrong, slot):
    def compiles():
        with gt_compile():
            model = torch.compile(
                Model(), options=inductor_options(a_pass, slot=slot), dynamic=dynamic
            )
            model(torch.randn(4, 16)).sum().backward()

    with pytest.raises(Exception, match=wrong):
        compiles()
