"""Our passes inside Inductor: the same buckets, the same bits, and an order that its scheduler
keeps.
"""

from functools import partial

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    bind_options,
    bucket_layout,
    data_parallel,
    facts,
    graphtext,
    gt_compile,
    inductor_options,
    joint_transformer_block_bucketing_reordering_pass,
    peak_memory,
    simulate_graph,
)
from pytest_gtrainer.report.witness import Witness
from pytest_gtrainer.tracing.sharding import reusing_gathers
from tests.compiling.test_recorder import Rescale

PLAN = ["layers.0", "layers.1", "head"]
ADDMM = torch.ops.aten.addmm.default
NAME = "joint_transformer_block_bucketing_reordering_pass"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(mesh, rank):
    torch.manual_seed(0)
    return data_parallel(Model(), mesh), torch.randn(4, 16) + rank


def gradients(model, function, x):
    model.zero_grad()
    function(x).sum().backward()
    return {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}


def bucketing(**options):
    return bind_options(
        joint_transformer_block_bucketing_reordering_pass, bucket_plan=PLAN, **options
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("slot", ["joint_custom_post_pass", "post_grad_custom_post_pass"])
def test_bucketing_in_inductor_is_eager_bit_for_bit(gt_mesh, gt_world, slot, lower):
    model, x = sharded(gt_mesh, gt_world.rank)
    expected = gradients(model, model, x)
    with gt_compile(lower=lower) as record:
        compiled = torch.compile(model, options=inductor_options(bucketing(), slot=slot))
        actual, other = gradients(model, compiled, x), gradients(model, compiled, x + 1)
    record.assert_no_graph_breaks()
    record.assert_compiles(1)
    found = [
        sent
        for run in record.passes(NAME, changed=True)
        for sent in bucket_layout(run.after).payloads
    ]
    assert [sent.label for sent in found] == [*PLAN, *reversed(PLAN)]
    assert_bitwise_equal(actual, expected)
    assert_bitwise_different(other, expected)


class Tied(nn.Module):
    """An embedding that is the head, too, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.randn(16))

    def forward(self, tokens):
        x = self.layer(torch.relu(self.layer(self.embedding(tokens))))
        return self.head(x) * self.scale


def reused(model, tokens):
    with reusing_gathers():
        return model(tokens)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_ties_and_reused_gathers_compile_to_eagers_bits(gt_mesh, gt_world):
    """One graph, one gather and one reduction a parameter: a tied one's contributions are added
    before it.
    """
    torch.manual_seed(0)
    model, tokens = data_parallel(Tied(), gt_mesh), torch.arange(6) + 4 * gt_world.rank
    apart = gradients(model, model, tokens)
    expected = gradients(model, partial(reused, model), tokens)
    assert_bitwise_different(apart, expected)  # each use is reduced alone

    def around(tokens):
        with reusing_gathers():
            return compiled(tokens)

    for once, within in ((True, True), (True, False), (False, False)):
        for backend in ("aot_eager", "inductor"):
            with gt_compile() as record:
                compiled = torch.compile(
                    partial(reused, model) if once and within else model, backend=backend
                )
                actual = gradients(model, around if once and not within else compiled, tokens)
            record.assert_no_graph_breaks()
            record.assert_compiles(1)
            if backend == "aot_eager":
                assert_bitwise_equal(actual, expected if once else apart)
        found = graphtext.render(record.joint)
        kinds = ("all_gather_into_tensor", "reduce_scatter_tensor")
        assert [found.count(f"= _c10d_functional.{kind}(") for kind in kinds] == (
            [3, 3] if once else [6, 6]
        )


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
@pytest.mark.parametrize(
    ("dtype", "lower"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=str,
)
def test_inductors_bits_of_ties_are_eagers_without_its_patterns(gt_mesh, gt_world, dtype, lower):
    """One of them makes ``addmm`` of the sum of a tied weight's contributions: in bf16 it rounds
    once, not twice.
    """
    torch.manual_seed(0)
    model, tokens = data_parallel(Tied().to(dtype), gt_mesh), torch.arange(6) + 4 * gt_world.rank
    for once, patterns in ((False, True), (True, True), (True, False)):
        function = partial(reused, model) if once else model
        with (
            torch._inductor.config.patch(pattern_matcher=patterns),
            gt_compile(lower=lower) as record,
        ):
            actual = gradients(model, torch.compile(function), tokens)
        record.assert_no_graph_breaks()
        products = len(
            record.backward_after_passes.graph.find_nodes(op="call_function", target=ADDMM)
        )
        assert products == (
            2 if once and patterns else 0
        )  # of the embedding that is the head, of the layer
        if not products or dtype is torch.bfloat16:  # in fp32 the CPU and its library decide
            same = assert_bitwise_different if products else assert_bitwise_equal
            same(actual, gradients(model, function, tokens))


@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
def test_data_parallel_compiles_to_one_graph_whose_results_have_names(gt_mesh, gt_world):
    model, x = sharded(gt_mesh, 0)
    with gt_compile() as record:
        gradients(model, torch.compile(model), x)
    record.assert_no_graph_breaks()
    record.assert_compiles(1)
    outputs = record.joint.graph.output_node().meta["gt_outputs"]
    names = [name for name, _ in model.named_parameters()]
    assert {*outputs} == {"output_0", "x", *names, *(f"{name}.device_mesh" for name in names)}


@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
def test_memory_of_a_graph_with_dtensors_is_that_of_its_shards(gt_mesh):
    """Dynamo's graph has them; the report draws a curve of each stage."""
    model, x = sharded(gt_mesh, 0)
    with (
        facts.collecting() as collected,
        facts.watching(Witness().watchers),
        gt_compile() as record,
    ):
        gradients(model, torch.compile(model), x)
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert [
        peak_memory(getattr(record, one)).by_kind["parameter"] for one in ("dynamo", "joint")
    ] == [shards, shards]
    kinds = [fact["kind"] for fact in collected]
    assert (
        kinds.count("graph_text")
        == kinds.count("memory")
        == len({fact["key"] for fact in collected if "lines" in fact})
    )
    assert "not_shown" not in kinds


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
@pytest.mark.parametrize("slot", ["joint_custom_post_pass", "post_grad_custom_post_pass"])
def test_the_scheduler_keeps_an_order_that_dependencies_demand(gt_mesh, gt_world, slot):
    model, x = sharded(gt_mesh, gt_world.rank)
    reduce, wait = "reduce_scatter_tensor", "wait_tensor"
    for demanded in (False, True):
        with gt_compile(lower=True) as record:
            options = inductor_options(bucketing(insert_overlap_deps=demanded), slot=slot)
            gradients(model, torch.compile(model, options=options), x)
        ordered = partial(
            record.assert_launch_order, reduce, reduce, wait, wait, wait, direction="backward"
        )
        if demanded:
            ordered()
        else:  # each is waited for where it is launched
            with pytest.raises(
                AssertionError,
                match="the backward does not launch 'wait_tensor' after 'wait_tensor'",
            ):
                ordered()


def test_a_pass_without_collectives():
    def rescale(gm, example_inputs=None, *, by: float):
        Rescale(by)(gm.graph)
        return gm

    model, x = Model(), torch.randn(4, 16)
    for slot in ("joint_custom_pre_pass", "post_grad_custom_pre_pass"):
        with gt_compile() as record:
            options = inductor_options(bind_options(rescale, by=2.0), slot=slot)
            torch.compile(model, options=options)(x).sum().backward()
        assert [run.changed for run in record.passes("rescale")] == [True, False][
            : 2 - ("joint" in slot)
        ]


@pytest.mark.second_tier
def test_a_backend_that_gives_the_forward_is_a_pass_here_too():
    def backend(gm, example_inputs):
        Rescale(2.0)(gm.graph)
        gm.recompile()
        return gm.forward

    with gt_compile() as record, torch.no_grad():
        torch.compile(torch.relu, options=inductor_options(backend))(torch.randn(4, 16))
    assert [run.changed for run in record.passes("backend")] == [True]


def test_the_id_for_caches_tells_options_apart():
    ids = [
        inductor_options(bucketing(reorder=reorder), files=files)["joint_custom_post_pass"][
            0
        ].uuid()
        for reorder, files in ((True, ()), (False, ()), (True, (__file__,)), (True, ()))
    ]
    assert len({*ids}) == 3
    assert ids[0] == ids[3]


def test_bad_input():
    with pytest.raises(ValueError, match="inductor_options was given no pass"):
        inductor_options()
    with pytest.raises(
        ValueError, match="slot='joint': Inductor runs passes of users in joint_custom_pre_pass, "
    ):
        inductor_options(bucketing(), slot="joint")

    def other(gm, example_inputs=None):
        return torch.fx.GraphModule(gm, gm.graph)

    with (
        pytest.raises(Exception, match="other returned another graph: a pass of Inductor rewrites"),
        gt_compile(),
    ):
        torch.compile(Model(), options=inductor_options(other))(torch.randn(4, 16))


@pytest.mark.gt_world("simulated", size=2, mesh={"fsdp": 2})
def test_a_graph_behind_the_post_grad_passes_runs_on_all_simulated_ranks(gt_mesh, gt_world):
    """Its gathers give every rank the whole parameters."""
    whole = Model()
    state = {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}
    with gt_compile() as record, torch.no_grad():
        torch.compile(data_parallel(whole, gt_mesh))(torch.randn(4, 16))
    xs = [torch.randn(4, 16) for _ in range(2)]

    def inputs(rank):
        given = {name: tensor.chunk(2)[rank].contiguous() for name, tensor in state.items()} | {
            "x": xs[rank]
        }
        placeholders = record.forward_after_passes.graph.find_nodes(op="placeholder")
        return {
            name: given.get(name)
            for name in (node.meta["gt_input"]["fqn"] for node in placeholders)
        }

    plain = Model()
    plain.load_state_dict(state)
    for rank, results in enumerate(simulate_graph(record.forward_after_passes, inputs, gt_world)):
        assert_bitwise_equal(results["output_0"], plain(xs[rank]))
        assert_bitwise_different(results["output_0"], plain(xs[1 - rank]))
