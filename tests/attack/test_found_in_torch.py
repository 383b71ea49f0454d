"""Mistakes of torch's own passes that ``fuzz`` has found in torch 2.13; docs/conformance.md lists
them.

Each test holds as long as torch has the mistake.
"""

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.fx_passes import bucketing
from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
from torch._subclasses.fake_tensor import FakeTensorMode

aten, functional = torch.ops.aten, torch.ops._c10d_functional

mended_later = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="mended after torch 2.13, by 2.15"
)


@mended_later
def test_equal_draws_of_randn_like_become_one():
    """``rand_ops`` lists rand_like and not randn_like."""

    def graph_of(draw):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(tuple(graph.call_function(draw, (x,)) for _ in range(2)))
        return fx_graph_cse(graph)

    for draw, left in ((aten.randn_like.default, 1), (aten.rand_like.default, 2)):
        calls = graph_of(draw).find_nodes(op="call_function", target=draw)
        assert len(calls) == left


@mended_later
def test_a_compiled_function_draws_once():
    """The difference of two draws is zero, without a word."""

    def noisy(x):
        return torch.randn_like(x) - torch.randn_like(x) + x

    x = torch.ones(4, requires_grad=True)
    assert not torch.equal(noisy(x), x)
    assert torch.equal(torch.compile(noisy, backend="aot_eager")(x), x)


def test_a_buffer_that_is_written_to_becomes_one_with_another():
    """Reads in between are kept apart by regions of mutation; the memory is not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, other = (graph.call_function(aten.zeros_like.default, (x,)) for _ in range(2))
    graph.call_function(aten.add_.Tensor, (one, x))
    graph.output((graph.call_function(aten.neg.default, (other,)),))
    merged = fx.GraphModule({}, fx_graph_cse(graph))
    (wanted,), (found,) = fx.GraphModule({}, graph)(torch.ones(2)), merged(torch.ones(2))
    assert (wanted.tolist(), found.tolist()) == ([0, 0], [-1, -1])


@mended_later
@pytest.mark.second_tier
def test_a_compiled_sum_loses_the_factor_of_a_product():
    """Inductor's pattern of ``add`` and ``mm`` makes an ``addmm`` of them and ignores ``alpha``."""

    def scaled(x, a, b):
        return torch.add(x, a @ b, alpha=4)

    x, a, b = torch.ones(3, 8, 8).unbind()
    assert scaled(x, a, b).unique().tolist() == [33]
    assert torch.compile(scaled)(x, a, b).unique().tolist() == [9]


@pytest.mark.gt_world("fake", size=2)
def test_a_gather_of_a_scalar_ends_a_compilation(gt_world):
    """Eager gathers it; the bucket takes the first extent of a shape that has none."""
    group, mode = dist.group.WORLD.group_name, FakeTensorMode()
    graph, waited = fx.Graph(), []
    for name, shape in (("matrix", (2, 2)), ("scalar", ())):
        shard = graph.placeholder(name)
        with mode:
            shard.meta["val"] = torch.empty(shape)
            gathered = functional.all_gather_into_tensor(shard.meta["val"], 2, group)
        launch = graph.call_function(functional.all_gather_into_tensor.default, (shard, 2, group))
        waited.append(graph.call_function(functional.wait_tensor.default, (launch,)))
        launch.meta["val"] = waited[-1].meta["val"] = gathered
    graph.output(tuple(waited))
    gm = fx.GraphModule({}, graph)
    assert [list(each.shape) for each in gm(torch.ones(2, 2), torch.ones(()))] == [[4, 2], [2]]
    buckets = bucketing.bucket_all_gather_by_mb(gm, lambda index: 25.0)
    with pytest.raises(IndexError, match="tuple index out of range"):
        bucketing.merge_all_gather(gm, buckets)


@pytest.mark.gt_world("fake", size=2)
def test_draws_move_past_each_other_if_one_is_sent(gt_world):
    """The scheduler keeps operands in order; nothing says that a draw depends on the draw before.

    Inductor replaces draws before, unless ``fallback_random`` asks for the numbers of eager.
    """
    mode = FakeTensorMode()
    graph = fx.Graph()
    x = graph.placeholder("x")

    def call(operator, operand, *others):
        node = graph.call_function(operator, (operand, *others))
        with mode:
            node.meta["val"] = operator(operand.meta["val"], *others)
        return node

    with mode:
        x.meta["val"] = torch.empty(4)
    kept, sent = (call(aten.rand_like.default, x) for _ in range(2))
    launch = call(functional.all_reduce.default, sent, "sum", dist.group.WORLD.group_name)
    graph.output((kept, call(functional.wait_tensor.default, launch)))
    gm = fx.GraphModule({}, graph)
    torch.manual_seed(0)
    first, second = torch.rand(4), torch.rand(4)
    torch.manual_seed(0)
    assert torch.equal(gm(torch.ones(4))[0], first)

    scheduled = schedule_overlap_bucketing(gm, custom_runtime_estimation=lambda node, size: 1.0)
    scheduled.recompile()
    torch.manual_seed(0)
    assert torch.equal(scheduled(torch.ones(4))[0], second)
