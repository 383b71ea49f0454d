"""Before anything runs: do all ranks issue the same collectives? And values only where they mean
something.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode

from fixtures.training import llama3_training
from pytest_gtrainer import graphtext, train_eager
from pytest_gtrainer._torch.passes import ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.graph.same_on_ranks import collective_lines, node_lines
from pytest_gtrainer.references.graph import (
    GraphRun,
    RanksDisagree,
    assert_same_collectives,
)
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.simulated.threads.run import run_threads


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4)
def test_ranks_that_pad_differently_agree_and_a_swapped_launch_is_named(gt_mesh):
    """D14: uneven shards agree. When rank 2 sums and others average, every rank says so."""
    graph = GraphRun(llama3_training(gt_mesh, "fp32", "debug_odd"))
    assert_same_collectives(graph.traced.gm)
    if gt_mesh.get_rank() == 2:
        graph.traced.gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)[1].meta[
            "val"
        ] = torch.empty(7)
    with pytest.raises(
        RanksDisagree, match=r"rank 0 issues _c10d_functional.reduce_scatter.*rank 2 issues .*\[7\]"
    ):
        graph.run()


def issuing(count):
    """A graph of so many all-reduces in the group of all ranks."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for _ in range(count):
        node = graph.call_function(ALL_REDUCE, (node, "sum", dist.group.WORLD.group_name))
        node.meta["val"] = torch.empty(2)
    graph.output(node)
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize(("first", "last"), [(2, 1), (1, 2)])
def test_a_rank_that_ends_before_the_others_is_named(first, last):
    """The others would wait in their last collective for ever."""

    def check(rank):
        more = r"_c10d_functional\.all_reduce.* over 3 ranks"
        ends = (more, "nothing more") if first > last else ("nothing more", more)
        words = "collective 1 differs: rank 0 issues {}, rank 2 issues {}".format(*ends)
        with pytest.raises(RanksDisagree, match=words):
            assert_same_collectives(issuing(last if rank == 2 else first))

    run_threads(3, check, net=NetModel(1, 3))


PARTITIONS = {
    "pairs": ([[0, 1], [0, 1], [2, 3], [2, 3]], None),
    "uneven": (
        [[0, 1, 2]] * 3 + [[3]],
        "differs: rank 0 issues .* over 3 ranks, rank 3 .* over 1 ranks",
    ),
    "paired with 1 for 2": (
        [[0, 1], [0, 1], [2, 3], [1, 3]],
        r"rank 2 has \[2, 3\], .* rank 3 has \[1, 3\]",
    ),
}


@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize(("groups", "words"), PARTITIONS.values(), ids=list(PARTITIONS))
def test_groups_of_one_size_that_do_not_divide_the_ranks_are_named(gt_world, groups, words):
    """V4: of the second collective; the first is that of all ranks."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    gm = issuing(2)
    _, second = gm.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    second.update_arg(2, made[tuple(groups[gt_world.rank])].group_name)
    with (
        nullcontext()
        if words is None
        else pytest.raises(RanksDisagree, match=f"collective 1.*{words}")
    ):
        assert_same_collectives(gm)
    for group in made.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


SENDING = """
two = group([0, 1])
if P:
  P.a: f32[2]
  P.b: f32[2]
if fwd:
  with bucket(layers[0], norm):
    gathered: f32[8] = _c10d_functional.all_gather_into_tensor(P.a, 2, two)
  with layers[0]:
    own: f32[4] = _c10d_functional.all_gather_into_tensor(P.b, 2, two)
    wait: f32[4] = _c10d_functional.wait_tensor(own)
if bwd:
  with bucket(layers[0], norm):
    reduced: bf16[6] = _c10d_functional.reduce_scatter_tensor(saved.layers[0].wait, "sum", 2, two)
if out:
  yield bwd.bucket(layers[0], norm).reduced
"""


@pytest.mark.gt_world("fake", size=2, mesh={"two": 2})
def test_what_of_a_collective_the_ranks_must_share(gt_mesh):
    """D14: sizes of buckets, which ranks share; sizes of others, uneven or of the data, may differ.

    Waits are none.
    """
    gm = graphtext.parse(SENDING, groups={"two": gt_mesh.get_group().group_name})
    assert [line.text for line in collective_lines(gm)] == [
        "_c10d_functional.all_gather_into_tensor.default float32 [8] of layers.0+norm over 2 ranks",
        "_c10d_functional.all_gather_into_tensor.default float32 any shape of layers.0 over 2 "
        "ranks",
        "_c10d_functional.reduce_scatter_tensor.default bfloat16 [6] of layers.0+norm over 2 ranks",
    ]


@pytest.mark.gt_world("fake", size=4)
def test_training_under_a_fake_world_is_refused(gt_mesh):
    """W1: its collectives move no data."""
    with pytest.raises(ValueError, match="a fake world moves no data"):
        train_eager(llama3_training(gt_mesh, "fp32"))


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_a_factory_that_hands_out_one_model_twice_is_refused(gt_mesh):
    config = llama3_training(gt_mesh, "fp32", steps=1)
    model = config.model()
    shared = llama3_training(gt_mesh, "fp32", steps=1, model=lambda: model)
    GraphRun(shared)
    with pytest.raises(ValueError, match="must build a new, unsharded model at every call"):
        GraphRun(shared)


def test_a_constant_has_its_numbers_or_their_digest_in_its_line():
    """Ranks compare it by these; one without numbers is compared by dtype and shape."""
    lines = {}
    for name, held in {
        "small": torch.ones(2),
        "large": torch.zeros(1000),
        "other": torch.zeros(1000).index_fill(0, torch.tensor(999), 1),
        "meta": torch.ones(2, device="meta"),
        "fake": FakeTensorMode().from_tensor(torch.ones(2)),
    }.items():
        graph = fx.Graph()
        graph.output(graph.get_attr("held"))
        first, _ = node_lines(fx.GraphModule({"held": held}, graph), 0, {})
        lines[name] = first.text.removeprefix("get_attr ")
    assert lines["small"].startswith("float32[2] [1.0, 1.0]")
    assert lines["large"] != lines["other"]
    assert max(map(len, lines.values())) < 100
    assert lines["meta"].startswith("float32[2] without numbers")
    assert lines["fake"].startswith("float32[2] without numbers")
