"""A graph that differs between the first and the last rank is refused (S4)."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fixtures.training import llama3_training
from pytest_gtrainer import annotate_module_fqns
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer.conformance.recipes import Recipe
from pytest_gtrainer.graph.same_on_ranks import first_difference, node_lines
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.simulated import DependsOnRank
from pytest_gtrainer.worlds.simulated.interpreter import RankGraph, RankLiterals, check_same_on_all
from pytest_gtrainer.worlds.spec import make_spec
from tests.worlds.simulated.graphs import c10d, numbers, wait, world_group


@contextmanager
def playing(rank, **mesh):
    """A world in which this process is ``rank``; its mesh."""
    with fake_world(make_spec("fake", mesh=mesh, rank=rank)) as world:
        yield make_mesh(world)


def at_both_ends(trace, **mesh):
    """``trace(mesh)`` as the first rank and as the last traces it."""
    size = torch.Size(mesh.values()).numel()
    graphs = []
    for rank in (0, size - 1):
        with playing(rank, **mesh) as device_mesh:
            graphs.append(RankGraph.of(trace(device_mesh), device_mesh))
    return graphs


@pytest.mark.second_tier
def test_a_sharded_step_is_the_same_on_all_ranks():
    """S4: traced, rewritten and bucketed; shards of equal size."""
    first, last = at_both_ends(lambda mesh: GraphRun(Recipe().config(mesh)).traced.gm, fsdp=8)
    assert (first.rank, last.rank) == (0, 7)
    check_same_on_all(first, last)


@pytest.mark.second_tier
def test_uneven_shards_are_refused_by_the_first_node_that_differs():
    """S4: only some ranks pad: here the last one's rows of a parameter are fewer."""
    graphs = at_both_ends(
        lambda mesh: GraphRun(llama3_training(mesh, "fp32", "debug_odd")).traced.gm, fsdp=8
    )
    # 201 rows of w1 over 8 ranks: 26 on all but the last
    first = (
        r"first at node \d+, parameter layers\.0\.feed_forward\.w1\.weight: rank 0 has placeholder "
        r".*\[26, 72\]"
    )
    with pytest.raises(DependsOnRank, match=first) as error:
        check_same_on_all(*graphs)
    assert "float32[19, 72]" in str(error.value)
    assert "choose sizes that the ranks divide" in str(error.value)


def test_an_input_of_another_shape_is_refused():
    """S4: the operators behind it are the same, so only the shape differs."""
    graphs = at_both_ends(
        lambda mesh: make_fx(lambda x: x + 1, tracing_mode="fake")(numbers(3 + dist.get_rank())),
        fsdp=2,
    )
    with pytest.raises(
        DependsOnRank, match=r"rank 0 has placeholder .*\[3\], rank 1 has placeholder .*\[4\]"
    ):
        check_same_on_all(*graphs)


def test_names_of_inputs_do_not_count():
    """They are those of a tracer; their order, dtypes and shapes are compared."""

    def named(mesh):
        gm = make_fx(lambda x: x + 1)(numbers(3))
        next(iter(gm.graph.nodes)).target = f"input_of_rank_{dist.get_rank()}"
        return gm

    check_same_on_all(*at_both_ends(named, fsdp=2))


def on_rows_and_columns(mesh):
    """Groups of a rank's own along both dimensions, which have other names on other ranks."""
    names = [mesh[name].get_group().group_name for name in mesh.mesh_dim_names]
    gm = make_fx(lambda x: [wait(c10d.all_reduce(x, "sum", name)) for name in names])(numbers(3))
    on_rows_and_columns.names.append(names)
    return gm


def test_groups_are_compared_by_what_they_are():
    on_rows_and_columns.names = []
    check_same_on_all(*at_both_ends(on_rows_and_columns, replicate=2, shard=2))
    first, last = on_rows_and_columns.names
    assert first != last

    def swapped(mesh):
        order = mesh.mesh_dim_names if dist.get_rank() == 0 else reversed(mesh.mesh_dim_names)
        names = [mesh[name].get_group().group_name for name in order]
        return make_fx(lambda x: [wait(c10d.all_reduce(x, "sum", name)) for name in names])(
            numbers(3)
        )

    with pytest.raises(
        DependsOnRank,
        match=r"node 1, all_reduce .*: .*\(\(0, 2\), \(1, 3\)\).*\(\(0, 1\), \(2, 3\)\)",
    ):
        check_same_on_all(*at_both_ends(swapped, replicate=2, shard=2))


class Offset(torch.nn.Module):
    """Asks for its rank."""

    def forward(self, x):
        return x + dist.get_rank()


class Scaled(torch.nn.Module):
    """Has its rank in a keyword."""

    def forward(self, x):
        return torch.add(x, x, alpha=dist.get_rank() + 2)


class Longer(torch.nn.Module):
    def forward(self, x):
        return x.sin() if dist.get_rank() else x


class Constant(torch.nn.Module):
    def forward(self, x):
        return x * torch.tensor([1.0, dist.get_rank()])


class InBranch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x * dist.get_rank(), lambda x: x + 1, (x,))


@pytest.mark.parametrize(
    ("module", "difference"),
    [
        (
            InBranch,
            "rank 0 has call_function aten.mul.Tensor*0*rank 3 has call_function aten.mul.Tensor*3",
        ),
        (
            Offset,
            "rank 0 has call_function aten.add.Tensor*%0*, 0*rank 3 has call_function "
            "aten.add.Tensor*%0*, 3",
        ),
        (Scaled, "rank 0 has call_function aten.add.Tensor*'alpha': 2*rank 3 has *'alpha': 5"),
        (Longer, "rank 0 has output *rank 3 has call_function aten.sin.default"),
        (
            Constant,
            "rank 0 has get_attr float32[[]2] [[]1.0, 0.0]*rank 3 has get_attr float32[[]2] "
            "[[]1.0, 3.0]",
        ),
    ],
)
def test_code_that_asks_for_its_rank_is_refused(module, difference):
    from fnmatch import fnmatch

    def trace(mesh):
        root = torch.nn.Sequential(module())
        with annotate_module_fqns(root), torch.fx.traceback.preserve_node_meta():
            return make_fx(root)(torch.ones(2))

    with pytest.raises(DependsOnRank) as error:
        check_same_on_all(*at_both_ends(trace, fsdp=4))
    assert fnmatch(str(error.value), f"the graph depends on the rank, first at node *{difference}*")


def plus(number, rank):
    return RankGraph(make_fx(lambda x: x + number)(torch.ones(2)), rank, 3, {})


def test_a_number_of_each_rank_is_that_of_its_place():
    """S4: a graph that inner ranks alone have is refused, and so is the number of another place."""
    first, second, last = plus(0, 0), plus(4, 1), plus(0, 2)
    literals = RankLiterals.of({0: [first.gm, second.gm, last.gm]})
    assert [literals.of_rank((rank,)) for rank in range(3)] == [[0], [4], [0]], "numbers by rank"
    check_same_on_all(first, literals.with_numbers_of_first(first.gm, second, (1,)))
    with pytest.raises(DependsOnRank, match=r"rank 0 has .*, 0.* rank 1 has .*, 8"):
        check_same_on_all(first, literals.with_numbers_of_first(first.gm, plus(8, 1), (1,)))


@pytest.mark.parametrize("shift", [0, 2])
def test_a_rank_fills_its_own_part_of_a_buffer_that_a_gather_fills(shift):
    """Torch buckets all-gathers like this: its own part begins elsewhere on each rank.

    Any other place is a difference.
    """

    def trace(mesh):
        gm = make_fx(
            lambda x: c10d.all_gather_into_tensor_out(x[:2], 4, world_group(), out=torch.empty(8)),
            tracing_mode="fake",
        )(numbers(2))
        buffer = next(node for node in gm.graph.nodes if "empty" in str(node.target))
        start = dist.get_rank() * 2 - (shift if dist.get_rank() else 0)
        with gm.graph.inserting_after(buffer):
            gm.graph.call_function(torch.ops.aten.slice.Tensor, (buffer, 0, start, start + 2))
        return gm

    if not shift:
        return check_same_on_all(*at_both_ends(trace, fsdp=4))
    with pytest.raises(
        DependsOnRank, match=r"rank 0 has .*'own part'.* rank 3 has .*aten\.slice\.Tensor.*0, 4, 6"
    ):
        check_same_on_all(*at_both_ends(trace, fsdp=4))


@pytest.mark.second_tier
@pytest.mark.parametrize("mode", ["default", "custom_ops"])
def test_the_rank_in_torchs_buckets_is_no_difference(mode):
    """A rank's number may be the place of its part in a gathered buffer, but no other place."""
    from torch._inductor.fx_passes.bucketing import merge_all_gather_bucket

    def trace(mesh, shift=0):
        fake_mode = new_fake_mode()
        fakes = [
            fake_mode.from_tensor(value, static_shapes=True) for value in (numbers(2), numbers(3))
        ]
        with fake_mode:
            gm = make_fx(
                lambda a, b: [
                    wait(c10d.all_gather_into_tensor(x, 4, world_group())) for x in (a, b)
                ]
            )(*fakes)
        launches = gm.graph.find_nodes(
            op="call_function", target=c10d.all_gather_into_tensor.default
        )
        merge_all_gather_bucket(gm.graph, launches, mode=mode)
        if shift and dist.get_rank():
            (part,) = (
                node
                for node in gm.graph.find_nodes(
                    op="call_function", target=torch.ops.aten.slice.Tensor
                )
            )
            part.args = (*part.args[:2], part.args[2] - shift, part.args[3] - shift)
        return gm

    check_same_on_all(*at_both_ends(trace, fsdp=4))
    with pytest.raises(DependsOnRank, match=r"aten\.slice\.Tensor"):
        check_same_on_all(*at_both_ends(lambda mesh: trace(mesh, shift=5), fsdp=4))


def holding(constant):
    """Return a graph that reads a constant."""
    root, graph = torch.nn.Module(), fx.Graph()
    root.constant = constant
    graph.output((graph.get_attr("constant"),))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("count", [1, 2, 100, 5_000])
@pytest.mark.parametrize("place", [0, 0.5, -1], ids=["first", "middle", "last"])
def test_a_constant_of_another_rank_is_told_whichever_element_it_is(count, place):
    """A rank keeps a digest of many numbers, which is one of all of them."""
    constants = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    constants[2][count // 2 if place == 0.5 else place] = 1
    lines = {rank: list(node_lines(holding(each), rank, {})) for rank, each in enumerate(constants)}
    assert max(len(line.text) for line in lines[0]) < 1_200
    assert first_difference({rank: lines[rank] for rank in (0, 1)}) is None
    found = first_difference(lines)
    assert found is not None, "rank 2 has another number, and its line is that of the others"
    assert (found.rank, found.other, found.place) == (0, 2, 0)
    assert first_difference({5: lines[2], 3: lines[0]}).other == 3


def test_a_graph_that_ends_early_is_told():
    one = node_lines(holding(torch.zeros(1)), 0, {})
    found = first_difference({0: one, 1: []})
    assert found.other_line.text == "nothing more"
    assert found.place == 0
