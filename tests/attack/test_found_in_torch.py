"""Mistakes of torch's own passes that ``fuzz`` has found in torch 2.13; docs/conformance.md lists
them.

Each test holds as long as torch has the mistake.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.fx_passes import bucketing, ddp_fusion
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from fixtures.torch_passes import without_a_gpu

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


class Graph(fx.Graph):
    """A graph whose nodes have the traced values that passes of collectives read."""

    def __init__(self):
        super().__init__()
        self.mode = FakeTensorMode()

    def input(self, name, *shape, dtype=torch.float32):
        node = self.placeholder(name)
        with self.mode:
            value = torch.empty(*shape, dtype=dtype)
        node.meta.update(val=value, tensor_meta=_extract_tensor_metadata(value))
        return node

    def call(self, operator, *args):
        node = self.call_function(operator, args)
        with self.mode:
            value = operator(*fx.node.map_arg(args, lambda each: each.meta["val"]))
        node.meta.update(val=value, tensor_meta=_extract_tensor_metadata(value))
        return node

    def collective(self, operator, *args):
        return self.call(functional.wait_tensor.default, self.call(operator, *args))

    def average(self, gradient, group):
        """Average over two ranks, as DDP does with ``optimize_ddp = "python_reducer"``."""
        quotient = self.call(aten.div.Tensor, gradient, 2)
        return self.collective(functional.all_reduce.default, quotient, "sum", group)

    def run(self):
        """Return the traced values of the results, computed anew."""
        inputs = [node.meta["val"] for node in self.find_nodes(op="placeholder")]
        with self.mode:
            return fx.GraphModule({}, self)(*inputs)

    def count(self, operator):
        return len(self.find_nodes(op="call_function", target=operator))


@mended_later
@pytest.mark.gt_world("fake", size=2)
def test_what_is_gathered_moves_past_its_reader(gt_world):
    """The manual schedule moves all that a prefetched gather needs, also what stands early enough.

    A plan of two layers: the second one's gather is waited for, then the first one's two follow.
    """
    graph, settings = Graph(), (2, dist.group.WORLD.group_name)
    gather, wait = functional.all_gather_into_tensor.default, functional.wait_tensor.default
    first, second = graph.input("first", 4), graph.input("second", 4)
    launches = [graph.call(gather, second, *settings)]
    shard = graph.call(aten.relu.default, first)
    launches.append(graph.call(gather, shard, *settings))
    reader = graph.call(aten.neg.default, shard)
    waits = [graph.call(wait, launches[0])]
    launches.append(graph.call(gather, graph.call(aten.relu.default, first), *settings))
    waits += [graph.call(wait, launch) for launch in launches[1:]]
    graph.output((reader, *waits))
    layers = dict(zip(launches, ("model.second", "model.first", "model.first"), strict=True))

    def stack(node):
        return [(layers[node], torch.nn.Module)] if node in layers else []

    plan = ["model.second", "model.first"]
    wrong_order = pytest.raises(RuntimeError, match="used before it has been defined")
    with without_a_gpu(), wrong_order:
        manual_overlap_bucketing(fx.GraphModule({}, graph), plan, module_stack_fn=stack)


FUSIONS = (ddp_fusion.fuse_ddp_with_concat_op, ddp_fusion.fuse_ddp_with_coalesced_op)


@pytest.mark.gt_world("fake", size=2)
def test_gradients_of_two_dtypes_get_the_dtype_of_one(gt_world):
    """One bucket takes all of DDP's gradients, and ``cat`` casts them; eager DDP's has one dtype."""
    graph = Graph()
    gradients = [graph.input("bf16", 4, dtype=torch.bfloat16), graph.input("f32", 4)]
    graph.output(tuple(graph.average(each, dist.group.WORLD.group_name) for each in gradients))
    assert [each.dtype for each in graph.run()] == [torch.bfloat16, torch.float32]
    with V.set_fake_mode(graph.mode):
        ddp_fusion.fuse_ddp_with_concat_op(graph, 25)
    assert [each.dtype for each in graph.run()] == [torch.float32, torch.float32]


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.gt_world("fake", mesh={"left": 2, "right": 2})
def test_gradients_of_two_groups_are_summed_over_the_ranks_of_one(fuse, gt_world, gt_mesh):
    """Two models in one compiled function, each with replicas of its own."""
    groups = [gt_mesh.get_group(name).group_name for name in ("left", "right")]
    graph = Graph()
    gradients = [graph.input(f"gradient_{group}", 4) for group in groups]
    graph.output(tuple(map(graph.average, gradients, groups)))
    with V.set_fake_mode(graph.mode):
        fuse(graph, 25)
    launches = [node for node in graph.nodes if "all_reduce" in str(node.target)]
    assert [launch.args[2] for launch in launches] == groups[1:]


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.gt_world("fake", size=2)
def test_one_gradient_that_is_averaged_twice_ends_a_compilation(fuse, gt_world):
    """CSE makes one division of two of an equal gradient, and leaves the collectives."""
    graph, group = Graph(), dist.group.WORLD.group_name
    quotient = graph.call(aten.div.Tensor, graph.input("gradient", 4), 2)
    launch = functional.all_reduce.default, quotient, "sum", group
    graph.output((graph.collective(*launch), graph.collective(*launch)))
    with V.set_fake_mode(graph.mode), pytest.raises(AssertionError):
        fuse(graph, 25)


@pytest.mark.gt_world("fake", size=2)
def test_a_sum_that_nobody_reads_ends_a_compilation(gt_world):
    """Dead code elimination keeps each wait, by torch's own registration of side effects."""
    graph = Graph()
    x = graph.input("x", 4)
    graph.collective(functional.all_reduce.default, x, "sum", dist.group.WORLD.group_name)
    graph.output((x,))
    graph.eliminate_dead_code()
    assert graph.count(functional.wait_tensor.default) == 1
    with pytest.raises(AssertionError, match="zero outputs/users"):
        ddp_fusion.schedule_comm_wait(graph)


def fuse_products(graph):
    """Run torch's pass as on a machine whose groups have symmetric memory."""
    available = mock.patch.object(dist, "is_nccl_available", return_value=True)
    with available, _symmetric_memory._test_mode():
        micro_pipeline_tp_pass(graph)


@pytest.mark.gt_world("fake", size=2)
def test_a_product_between_a_gather_and_a_scatter_ends_a_compilation(gt_world):
    """All pairs are found first; the gather's fusion erases the product that the scatter's reads."""
    graph, group = Graph(), dist.group.WORLD.group_name
    x, weight = graph.input("x", 4, 3), graph.input("weight", 3, 5)
    gathered = graph.collective(functional.all_gather_into_tensor.default, x, 2, group)
    product = graph.call(aten.mm.default, gathered, weight)
    scattered = graph.collective(functional.reduce_scatter_tensor.default, product, "sum", 2, group)
    graph.output((scattered,))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        fuse_products(graph)


def gathered_in_parts(order, rows):
    """Return a graph that gathers the middle dimension, as pads are cut off, and multiplies."""
    graph, group = Graph(), dist.group.WORLD.group_name
    x, weight = graph.input("x", 1, 2, 3), graph.input("weight", 3, 5)
    gathered = graph.collective(functional.all_gather_into_tensor.default, x, 2, group)
    parts = [graph.call(aten.slice.Tensor, gathered, 0, rank, rank + 1) for rank in order]
    whole = graph.call(aten.cat.default, parts, 1)
    whole = graph.call(aten.slice.Tensor, whole, 1, 0, rows)
    flat = graph.call(aten.reshape.default, whole, [rows, 3])
    product = graph.call(aten.mm.default, flat, weight)
    graph.output((graph.call(aten.reshape.default, product, [1, rows, 5]),))
    return graph


@pytest.mark.gt_world("fake", size=2)
def test_pads_that_are_cut_off_a_gather_come_back(gt_world):
    """A sequence of three tokens on two ranks: the slice behind the gather is dropped."""
    graph = gathered_in_parts((0, 1), rows=3)
    assert graph.run()[0].shape == (1, 3, 5)
    fuse_products(graph)
    assert graph.run()[0].shape == (1, 4, 5)


@pytest.mark.gt_world("fake", size=2)
def test_parts_of_a_gather_in_another_order_are_fused_as_in_the_order_of_ranks(gt_world):
    """The load balancing of context parallelism orders them so."""
    texts = []
    for order in ((0, 1), (1, 0)):
        graph = gathered_in_parts(order, rows=4)
        fuse_products(graph)
        assert graph.count(torch.ops.symm_mem.fused_all_gather_matmul.default) == 1
        texts.append(str(graph))
    assert texts[0] == texts[1]


@pytest.mark.gt_world("fake", size=2)
def test_a_product_that_is_given_another_shape_is_scattered_in_the_old_one(gt_world):
    """The shape behind the product is compared for gathers, and not for scatters."""
    graph, group = Graph(), dist.group.WORLD.group_name
    x, weight = graph.input("x", 2, 4, 3), graph.input("weight", 3, 5)
    product = graph.call(aten.mm.default, graph.call(aten.reshape.default, x, [8, 3]), weight)
    other = graph.call(aten.reshape.default, product, [4, 2, 5])
    scatter = functional.reduce_scatter_tensor.default
    graph.output((graph.collective(scatter, other, "sum", 2, group),))
    assert graph.run()[0].shape == (2, 2, 5)
    fuse_products(graph)
    assert graph.run()[0].shape == (1, 4, 5)
