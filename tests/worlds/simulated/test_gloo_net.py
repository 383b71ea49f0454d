"""The gloo net against real gloo (S8)."""

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import NetModel
from tests.worlds.simulated.gloo import GlooNet, run_length

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
}
LENGTHS = [1, 3, 7, 8, 33, 1001]
SEVERAL_SEGMENTS = (
    600_001  # of 4 bytes on 4 ranks: more than the 8 segments that there are at least
)


def numbers(rows, columns, dtype):
    generator = torch.Generator().manual_seed(columns)
    return (torch.randn(rows, columns, generator=generator) / 4 + 1).to(dtype)


def real_all_reduce(own, op):
    result = own.clone()
    dist.all_reduce(result, op=OPS[op])
    return result


def real_reduce_scatter(own, op):
    result = own.new_empty(own.numel() // dist.get_world_size())
    dist.reduce_scatter_single(result, own.clone(), op=OPS[op])
    return result


@pytest.mark.second_tier("dtype1", "dtype2")
@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_bit_of_real_gloo(gt_world, dtype):
    """S8: all ops, lengths that ranks and segments divide or not."""
    net, rank = GlooNet(gt_world.size), gt_world.rank
    for length in LENGTHS:
        for op in OPS:
            inputs = numbers(4, 4 * length, dtype)
            assert torch.equal(
                net.reduce_scatter(inputs, op)[rank], real_reduce_scatter(inputs[rank], op)
            )
            odd = inputs[:, 1:]
            assert torch.equal(net.all_reduce(odd, op), real_all_reduce(odd[rank], op))


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_real_gloo_in_several_segments(gt_world, dtype):
    """S8: tensors of more than a MiB a segment."""
    net, rank = GlooNet(gt_world.size), gt_world.rank
    inputs = numbers(4, 4 * SEVERAL_SEGMENTS, dtype)
    assert 4 * run_length(4 * SEVERAL_SEGMENTS, dtype.itemsize, 4) > 4 * SEVERAL_SEGMENTS
    assert torch.equal(
        net.reduce_scatter(inputs, "sum")[rank], real_reduce_scatter(inputs[rank], "sum")
    )
    assert torch.equal(net.all_reduce(inputs, "avg"), real_all_reduce(inputs[rank], "avg"))


@pytest.mark.gt_world("ranks", size=3)
def test_every_bit_of_real_gloo_on_three_ranks_and_in_a_subgroup(gt_world):
    """S8: an average by a number of ranks that is no power of two.

    A group knows nothing of the others.
    """
    net, rank = GlooNet(gt_world.size), gt_world.rank
    inputs = numbers(3, 3 * 77, torch.bfloat16)
    assert torch.equal(
        net.reduce_scatter(inputs, "avg")[rank], real_reduce_scatter(inputs[rank], "avg")
    )
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        own = inputs[rank].clone()
        dist.all_reduce(own, group=group)
        assert torch.equal(net.for_group((0, 2)).all_reduce(inputs[[0, 2]], "sum"), own)
        dist.destroy_process_group(group)


def test_where_gloo_hides_the_order_of_a_payload():
    """W4: where a run of segments is a shard, which an even number of elements a rank decides, and
    no single width.
    """
    for ranks in (2, 3, 4, 8):
        hidden = [count for count in range(1, 100) if run_length(ranks * count, 4, ranks) == count]
        assert hidden == list(range(2, 100, 2))


def test_another_order_differs():
    """The twin: what real gloo is compared with could have differed."""
    inputs = numbers(4, 4 * 1001, torch.bfloat16)
    assert not torch.equal(
        GlooNet(4).reduce_scatter(inputs, "sum"), NetModel(1, 4).reduce_scatter(inputs, "sum")
    )
    assert not torch.equal(
        GlooNet(4).all_reduce(inputs, "sum"), NetModel(1, 4).all_reduce(inputs, "sum")
    )


def test_explain_follows_the_runs_of_segments():
    net = GlooNet(4)
    inputs = numbers(4, 33, torch.bfloat16)
    summed = net.all_reduce(inputs, "sum")
    for offset in range(33):
        first, *others = (
            inputs[rank, offset]
            for rank in net.explain("all_reduce", offset, 33, torch.bfloat16).ranks
        )
        for value in others:
            first = first + value
        assert first == summed[offset]
    # the run of rank 0 holds 34 elements, one of them in the shard of rank 1
    assert net.explain("reduce_scatter", 0, 33, torch.float32, 1).ranks == (3, 2, 1, 0)
    assert net.explain("reduce_scatter", 1, 33, torch.float32, 1).ranks == (0, 3, 2, 1)
    assert str(net.for_group((2, 3)).explain("all_reduce", 0, 9, torch.float32)) == (
        "channel 0, summed in the order of ranks 3 2"
    )


def test_a_net_that_cannot_be():
    with pytest.raises(ValueError, match="ranks=0: give a whole number, 1 or more"):
        GlooNet(0)
    assert GlooNet(2).all_reduce(torch.empty(2, 0), "sum").shape == (0,)
