"""``trace_once``: two ranks trace, the others take the graph over, and it is the one that they
would have traced.
"""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from fixtures.training import deepseek_v3_training
from pytest_gtrainer import (
    RanksDisagree,
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    dense_flex_attention,
    graphtext,
    trace_once,
    trace_step,
)
from pytest_gtrainer._torch.graph_bytes import bytes_of, graphs_of
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import shard_traceably

FOUR = pytest.mark.gt_world("ranks", size=4)
TAKEN = "from another rank"


class Traces:
    """Counts the traces of a step of ``model``, a module that takes one tensor."""

    def __init__(self, model, *inputs, step=lambda model, x: model(x).sum(), **options):
        self.model, self.inputs, self.step, self.options = model, inputs, step, options
        self.count = 0

    def __call__(self):
        self.count += 1
        return trace_step(self.model, self.step, self.inputs, **self.options)

    def once(self, mesh, **options):
        return trace_once(self, self.model, self.inputs, mesh, **options)


def net(rows=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, rows), nn.ReLU(), nn.Linear(rows, 4))


def batch():
    return torch.arange(8.0).reshape(2, 4) + dist.get_rank()


@FOUR
def test_two_ranks_trace_and_the_others_get_the_graph_they_would_have_traced(gt_mesh):
    """R4: the graph comes with its metadata, the groups of this rank, and the same bits."""
    traces = Traces(data_parallel(net(), gt_mesh), batch())
    taken = traces.once(gt_mesh)
    ends = dist.get_rank() in (0, 3)
    assert traces.count == ends
    assert (taken.handed_over == TAKEN) is not ends
    own = traces()
    assert graphtext.render(taken.gm) == graphtext.render(own.gm)
    for ours, theirs in zip(taken.gm.graph.nodes, own.gm.graph.nodes, strict=True):
        assert (ours.op, ours.name, str(ours.args), str(ours.kwargs)) == (
            theirs.op,
            theirs.name,
            str(theirs.args),
            str(theirs.kwargs),
        )
        assert ours.meta.get("custom") == theirs.meta.get("custom")
        assert str(ours.meta.get("val")) == str(theirs.meta.get("val"))
    assert [str(fake) for fake in taken.example_inputs] == [
        str(fake) for fake in own.example_inputs
    ]
    results = taken.results(traces.model, *traces.inputs)
    assert_bitwise_equal(results, own.results(traces.model, *traces.inputs))
    assert_bitwise_different(results, own.results(traces.model, batch() + 1))


@FOUR
def test_views_of_one_memory_stay_views_of_one_memory(gt_mesh):
    traces = Traces(
        data_parallel(net(), gt_mesh),
        batch(),
        step=lambda net, x: net(x.view(4, 2).t().reshape(2, 4)).sum(),
    )

    def shared(traced):
        memory = [
            node.meta["val"].untyped_storage()._cdata
            for node in traced.gm.graph.nodes
            if is_tensor(node)
        ]
        return [memory.index(each) for each in memory]

    def is_tensor(node):
        return isinstance(node.meta.get("val"), torch.Tensor)

    assert shared(traces.once(gt_mesh)) == shared(traces())


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4, mesh={"efsdp": 2, "ep": 2})
def test_experts_with_data_dependent_sizes_are_handed_over(gt_mesh):
    """Two meshes, groups of two ranks each, symbols of the trace."""
    config = deepseek_v3_training(gt_mesh, "fp32", "debug_small", steps=1)
    model, inputs = shard_traceably(new_model(config), config), config.inputs(0)

    def trace():
        return trace_step(model, config.step, inputs)

    taken = trace_once(trace, model, inputs, config.mesh, check=True)
    assert (taken.handed_over == TAKEN) == (dist.get_rank() in (1, 2))
    assert graphtext.render(taken.gm) == graphtext.render(trace().gm)


@FOUR
def test_a_twin_is_handed_over_too(gt_mesh):
    traces = Traces(data_parallel(net(), gt_mesh), batch(), twin_inputs=(batch()[:1],))
    taken, own = traces.once(gt_mesh), traces()
    assert graphtext.render(taken.twin) == graphtext.render(own.twin)
    assert graphtext.render(taken.twin) != graphtext.render(own.gm)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=8, mesh={"dp": 4, "tp": 2})
def test_beside_tensor_parallelism_ranks_of_one_part_of_the_model_share_a_trace(gt_mesh):
    """The rows of a vocabulary begin at another number on the other part: over all ranks nothing is
    handed over.
    """
    plan = {"0": RowwiseParallel(input_layouts=Replicate())}
    net = parallelize_module(
        nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 4)), gt_mesh["tp"], plan
    )
    traces = Traces(data_parallel(net, gt_mesh["dp"]), torch.arange(4))
    taken = traces.once(gt_mesh["dp"], check=True)
    assert (taken.handed_over == TAKEN) == (2 <= dist.get_rank() <= 5)
    assert graphtext.render(taken.gm) == graphtext.render(traces().gm)
    whole = init_device_mesh("cpu", (8,))
    assert "traced here: rank 0 has call_function aten.lt.Scalar" in traces.once(whole).handed_over


@FOUR
def test_ranks_with_other_sizes_trace_by_themselves_and_say_what_differs(gt_mesh):
    """R4: 6 rows on 4 ranks, the last has none."""
    traces = Traces(data_parallel(net(6), gt_mesh), batch())
    message = traces.once(gt_mesh).handed_over
    assert traces.count == 1
    assert message.startswith("traced here: rank 0 has 0.weight float32[2, 4]")
    assert "rank 3 0.weight float32[0, 4]" in message


@FOUR
def test_inputs_that_lie_otherwise_on_one_rank_are_told(gt_mesh):
    """R4: its graph views them, or copies them first."""
    x = torch.arange(8.0).reshape(4, 2).t() if dist.get_rank() == 2 else batch()
    message = Traces(data_parallel(net(), gt_mesh), x).once(gt_mesh).handed_over
    assert re.fullmatch(r"traced here: rank 0 has input 0 .*\(4, 1\), rank 2 .*\(1, 2\)", message)


@FOUR
@pytest.mark.parametrize("mode", ["eval", "autocast"])
def test_a_mode_of_one_rank_is_told(gt_mesh, mode):
    """R4, V5: a graph holds the computation of one mode."""
    model, is_apart = data_parallel(net(), gt_mesh), dist.get_rank() == 2
    if is_apart and mode == "eval":
        model[1].eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_apart and mode == "autocast"):
        traced = Traces(model, batch()).once(gt_mesh)
    assert re.match(
        "traced here: rank 0 has mode RunMode.*, rank 2 mode RunMode", traced.handed_over
    )


@FOUR
def test_a_step_that_was_handed_over_is_replayed_in_its_mode_only(gt_mesh):
    """V5: also on the ranks that have taken it over."""
    model = data_parallel(net(), gt_mesh)
    traced = Traces(model, batch()).once(gt_mesh)
    model[1].eval()
    with pytest.raises(ValueError, match="1 was in train mode at the trace and is in eval mode"):
        traced.replay(model, batch())


@FOUR
def test_a_number_that_another_rank_is_given_is_told(gt_mesh):
    """R4: it is a literal of the graph, and the rank neither the first nor the last."""
    factor = 2.0 if dist.get_rank() == 2 else 3.0
    step = lambda net, x, factor: net(x).sum() * factor  # noqa: E731
    traces = Traces(data_parallel(net(), gt_mesh), batch(), factor, step=step)
    assert (
        traces.once(gt_mesh).handed_over
        == "traced here: rank 0 has input 1 3.0, rank 2 input 1 2.0"
    )


@FOUR
def test_a_graph_that_depends_on_the_rank_is_not_handed_over(gt_mesh):
    step = lambda net, x: (net(x) * (dist.get_rank() + 1)).sum()  # noqa: E731
    traces = Traces(data_parallel(net(), gt_mesh), batch(), step=step)
    traced = traces.once(gt_mesh)
    assert traces.count == 1
    assert "rank 0 has call_function aten.mul.Tensor" in traced.handed_over
    assert ", 4]" in traced.handed_over.replace(")", "]")
    expected = traces().results(traces.model, *traces.inputs)
    assert_bitwise_equal(traced.results(traces.model, *traces.inputs), expected)


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale, self._calls = net(), scale, dist.get_rank()

    def forward(self, x):
        return self.inner(x) * self.scale


@FOUR
@pytest.mark.parametrize("value", [3.0, True, 1])
def test_a_number_that_a_module_of_a_rank_in_the_middle_holds_is_told(gt_mesh, value):
    """The others would give it their own graph; equal numbers, and counters, are no difference."""
    for scale, is_apart in ((value if dist.get_rank() == 2 else 1.0, True), (1.0, False)):
        model = data_parallel(Scaled(scale), gt_mesh)
        step = Traces(model, batch()).once(gt_mesh)
        if is_apart:
            words = f"traced here: rank 0 has scale 1.0, rank 2 scale {value}"
            assert step.handed_over == words
        elif dist.get_rank() in (1, 2):
            assert step.handed_over == TAKEN


@FOUR
def test_a_parameter_that_a_rank_in_the_middle_has_frozen_is_told(gt_mesh):
    model = net()
    model[0].bias.requires_grad_(dist.get_rank() != 2)
    model = data_parallel(model, gt_mesh)
    words = r"traced here: rank 0 has 0\.bias .*, trained .*, rank 2 0\.bias .*, fixed "
    assert re.match(words, Traces(model, batch()).once(gt_mesh).handed_over)


@FOUR
def test_a_rank_in_the_middle_that_is_apart_is_seen_by_check_alone(gt_mesh):
    step = lambda net, x: net(x).sum() * (2 if dist.get_rank() == 2 else 3)  # noqa: E731
    traces = Traces(data_parallel(net(), gt_mesh), batch(), step=step)
    assert (traces.once(gt_mesh).handed_over == TAKEN) == (dist.get_rank() in (1, 2))
    if dist.get_rank() == 2:
        with pytest.raises(
            RanksDisagree, match=r"is not the own one: rank 0 has .*mul.*3.*, rank 2 .*mul.*2"
        ):
            traces.once(gt_mesh, check=True)
    else:
        traces.once(gt_mesh, check=True)


@FOUR
def test_a_trace_that_fails_on_one_rank_leaves_nobody_waiting(gt_mesh):
    def step(net, x):
        if dist.get_rank() == 3:
            raise RuntimeError("not on the last rank")
        return net(x).sum()

    traces = Traces(data_parallel(net(), gt_mesh), batch(), step=step)
    if dist.get_rank() == 3:
        with pytest.raises(RuntimeError, match="not on the last rank"):
            traces.once(gt_mesh)
    else:
        message = traces.once(gt_mesh).handed_over
        assert (
            message
            == "traced here: rank 3 cannot hand over its graph, RuntimeError: not on the last rank"
        )


@FOUR
@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_names_its_own_gpu(gt_mesh, apart):
    """Each rank may have a GPU. A graph that names the GPU of another rank is not handed over."""
    own = torch.device("cuda", dist.get_rank())
    named = torch.device("cuda", (dist.get_rank() + 1) % 4) if apart else own
    with new_fake_mode():
        x = torch.empty(2, 4, device=own)

    def trace():
        step = trace_step(net(), lambda net, x: net(x).sum(), (torch.ones(2, 4),))

        def on_gpus(x):
            return x + torch.ones(2, 4, device=own), torch.ones(4, device=named)

        with x.fake_mode:
            return replace(step, gm=make_fx(on_gpus)(x))

    taken = trace_once(trace, nn.Module(), (x,), gt_mesh)
    if apart:
        assert "traced here: rank 0 has call_function aten.ones.default" in taken.handed_over
        assert "cuda', index=1" in taken.handed_over
    else:
        assert (taken.handed_over == TAKEN) == (dist.get_rank() in (1, 2))
    assert graphtext.render(taken.gm) == graphtext.render(trace().gm)
    nodes = list(taken.gm.graph.nodes)[:-1]
    assert {node.meta["val"].device for node in nodes} == {own, named}
    assert {node.kwargs["device"] for node in nodes if "device" in node.kwargs} == {own, named}


@pytest.mark.second_tier
@FOUR
def test_groups_of_a_users_own_are_found_by_the_order_in_which_they_were_made(gt_mesh):
    """Each rank has its own pairs, under names that torch hashes.

    One of ranks 1 to 3 has no counterpart on rank 0.
    """
    row, column = divmod(dist.get_rank(), 2)
    own_pairs = ([2 * row, 2 * row + 1], [column, column + 2]) * 2
    pairs = [dist.new_group(ranks, use_local_synchronization=True) for ranks in own_pairs]
    groups = pairs

    def step(net, x):
        return sum(all_reduce(net(x), "sum", group).sum() for group in groups)

    traces = Traces(data_parallel(net(), gt_mesh), batch(), step=step)
    taken = traces.once(gt_mesh, check=True)
    assert (taken.handed_over == TAKEN) == (dist.get_rank() in (1, 2))
    assert graphtext.render(taken.gm) == graphtext.render(traces().gm)

    later = dist.new_group([1, 2, 3])
    groups = [later if dist.get_rank() else gt_mesh.get_group()]
    message = traces.once(gt_mesh).handed_over
    assert re.fullmatch(
        r"traced here: rank 3 cannot hand over .* its process group '\w+' has no counterpart .*",
        message,
    )
    for made in [*pairs, *([later] if dist.get_rank() else [])]:
        dist.destroy_process_group(made)


@pytest.mark.gt_world("fake", size=4)
def test_in_a_fake_world_the_only_rank_traces(gt_mesh):
    traces = Traces(data_parallel(net(), gt_mesh), torch.ones(2, 4))
    assert traces.once(gt_mesh).handed_over == "traced here: a fake world has no other rank"


@pytest.mark.gt_world("ranks", size=2)
def test_of_two_ranks_both_trace(gt_mesh):
    traces = Traces(data_parallel(net(), gt_mesh), batch())
    assert (
        traces.once(gt_mesh).handed_over
        == f"traced here, and on rank {1 - dist.get_rank()}, for 2 ranks"
    )


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.where(x > 0, x * self.weight, torch.tensor([1.0, 2.0, 3.0, 4.0]))


class Recomputed(Constants):
    """Calls a graph in the graph."""

    def forward(self, x):
        q = (x * self.weight).reshape(1, 1, 2, 4)
        return flex_attention(
            q, q, q, score_mod=lambda score, batch, head, row, column: score + row - column
        )


class Drawn(Constants):
    def forward(self, x):
        return nn.functional.dropout(x * self.weight, 0.5)


class SizesOfData(Constants):
    def forward(self, x):
        rows = (x > 1).sum().item()
        torch._check(rows >= 0)
        torch._check(rows <= 8)
        return (x.reshape(-1)[:rows] * self.weight[0]).sum()


@pytest.mark.parametrize("model", [Constants, Recomputed, Drawn, SizesOfData])
def test_what_graphs_hold_comes_through_bytes(model):
    """Constants, graphs in a graph, random numbers, symbols of sizes, each in the bits that the
    graph gives here.
    """
    net, x = model(), torch.tensor([[0.0, 1.0, 2.0, 3.0], [-1.0, 2.0, -3.0, 4.0]])
    with dense_flex_attention():
        traced = trace_step(net, lambda net, x: net(x).sum(), (x,))
    written = bytes_of([traced.gm], ("beside", traced.example_inputs), x.device)
    (taken,), beside = graphs_of(written, new_fake_mode(), x.device)
    assert (beside[0], str(beside[1])) == ("beside", str(traced.example_inputs))
    assert graphtext.render(taken) == graphtext.render(traced.gm)
    results = []
    for gm in (traced.gm, taken):
        torch.manual_seed(0)
        results.append(dict(enumerate(gm(net.weight.detach(), x))))
    assert_bitwise_equal(*results)
    assert_bitwise_different(results[1], dict(enumerate(taken(2 * net.weight.detach(), x))))
