"""Extra process groups for all-gathers of parameters: whose, how many, how long they live."""

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import graphtext
from pytest_gtrainer import reassign_collective_pgs_pass as reassign
from pytest_gtrainer._torch.passes import ALL_GATHER
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.worlds.fake import fake_world
from pytest_gtrainer.worlds.spec import make_spec


def gathering(*groups):
    """A graph that gathers a parameter in each of the groups."""
    names = {f"g{place}": group.group_name for place, group in enumerate(groups)}
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    text = [
        *(f"g{place} = group({found})" for place, found in enumerate(ranks)),
        "if P:",
        *(f"  P.w{place}: f32[2]" for place in range(len(ranks))),
        "if fwd:",
        *(
            GATHER.format(n=place, size=len(found), extent=2 * len(found))
            for place, found in enumerate(ranks)
        ),
        "if out:",
        *(f"  yield wait_{place}" for place in range(len(ranks))),
    ]
    return graphtext.parse("\n".join(text), groups=names)


GATHER = """\
  gather_{n}: f32[{extent}] = _c10d_functional.all_gather_into_tensor(P.w{n}, {size}, g{n})
  wait_{n}: f32[{extent}] = _c10d_functional.wait_tensor(gather_{n})"""


def groups_in(gm):
    return [node.args[-1] for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)]


@pytest.mark.gt_world("fake", size=4)
def test_each_source_has_one_extra_group_of_its_ranks(gt_mesh):
    """F1: two sources may have the same ranks, and a second graph uses the same extra groups."""
    one, two, world = dist.new_group([0, 2]), dist.new_group([0, 2]), gt_mesh.get_group()
    first = groups_in(reassign(gathering(one, two, world, one)))
    assert first[0] == first[3]
    assert len({*first, *(group.group_name for group in (one, two, world))}) == 6
    assert [group_ranks(name) for name in first] == [(0, 2), (0, 2), (0, 1, 2, 3), (0, 2)]
    assert groups_in(reassign(gathering(two, one))) == [first[1], first[0]]


@pytest.mark.gt_world("fake", size=4)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_extras_are_made_in_one_order_whatever_the_graph_gathers_first(gt_mesh, order):
    """F1: each rank's graph has an order of its own, and ranks that made overlapping groups so
    would wait for ever.
    """
    sources = [dist.new_group([0, 3]), dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    reassign(gathering(*(sources[place] for place in order)))
    made = [
        name for name in dist.distributed_c10d._world.pg_names.values() if name.endswith(":extra")
    ]
    assert [group_ranks(name) for name in made] == [(0, 1), (0, 1, 2), (0, 3)]


def test_a_group_that_does_not_exist_is_refused_and_nothing_moves():
    """D11: the first of two sources could be moved, so neither is."""
    with fake_world(make_spec("fake", size=4)):
        gm = gathering(dist.group.WORLD, dist.new_group([0, 1]))
        list(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))[1].update_arg(2, "gone")
        before = groups_in(gm)
        with pytest.raises(
            ValueError, match="process group 'gone' of the graph does not exist in this process"
        ):
            reassign(gm)
        assert groups_in(gm) == before


@pytest.mark.gt_world("ranks", size=4, mesh={"replicate": 2, "fsdp": 2})
def test_extra_groups_gather_the_same_on_real_ranks(gt_mesh, gt_world):
    """Each rank makes the groups that it is in; both sources' extras are apart."""
    sources = [gt_mesh["fsdp"].get_group(), gt_mesh["replicate"].get_group()]
    gm = gathering(*sources)
    shard = torch.full((2,), float(dist.get_rank()))
    before = gm(shard, shard)
    after = reassign(gm)(shard, shard)
    torch.testing.assert_close(list(after), list(before), rtol=0, atol=0)
    assert len({*groups_in(gm), *(group.group_name for group in sources)}) == 4
