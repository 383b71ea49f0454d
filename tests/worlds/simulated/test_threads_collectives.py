"""Every collective on threads gives what it gives on real gloo ranks."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_gtrainer import NetModel, assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.worlds.simulated import collectives
from pytest_gtrainer.worlds.simulated.threads import run_threads
from tests.worlds.simulated.gloo import GlooNet

RANKS = 3


def numbers(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=generator).to(dtype)


def reduced(rank):
    sums = {}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = numbers(rank, 5, 7, dtype=dtype)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
            part = torch.empty(4, dtype=dtype)
            dist.reduce_scatter_single(
                part, numbers(rank, 12, dtype=dtype), op=getattr(dist.ReduceOp, op)
            )
            sums[op, dtype] = tensor, part
    whole = torch.arange(4) * (rank + 1)
    dist.all_reduce(whole)
    return sums, whole, [dist.get_rank(), dist.get_world_size()]


def gathered(rank):
    flat, stacked = torch.empty(6), torch.empty(RANKS, 2)
    dist.all_gather_single(flat, numbers(rank, 2))
    dist.all_gather_single(stacked, numbers(rank, 1, 2))
    listed = [torch.empty(2, 1) for _ in range(RANKS)]
    dist.all_gather(listed, numbers(rank, 2, 1))
    at_root = [torch.empty(3) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(numbers(rank, 3), at_root, dst=1)
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    return flat, stacked, listed, at_root, objects


def sent(rank):
    root = numbers(rank, 4).to(torch.float64)
    dist.broadcast(root, src=2)
    part = torch.empty(2)
    dist.scatter(part, [numbers(part, 2) for part in range(RANKS)] if rank == 0 else None, src=0)
    objects = ["of rank 1", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    received = torch.empty(3)
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    works = [
        dist.P2POp(dist.isend, numbers(rank, 3), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    later = numbers(rank, 3)
    if rank == 0:
        dist.send(later, 1)
        later.zero_()  # what was sent is the receiver's
    elif rank == 1:
        dist.recv(later, 0)
    return root, part, objects, received, later


def exchanged(rank):
    even = torch.empty(6, 2)
    dist.all_to_all_single(even, numbers(rank, 6, 2))
    sends, receives = (
        [rank, 0, 2],
        [[0, 1, 2][source] if rank == 0 else 0 if rank == 1 else 2 for source in range(3)],
    )
    uneven = torch.empty(sum(receives), 2)
    dist.all_to_all_single(uneven, numbers(rank, sum(sends), 2), receives, sends)
    nothing = torch.empty(0, 4)
    dist.all_to_all_single(nothing, torch.empty(0, 4), [0] * RANKS, [0] * RANKS)
    return even, uneven, nothing


def in_groups(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    results = []
    for group in pairs:
        tensor = numbers(rank, 3)
        if dist.get_rank(group) >= 0:
            dist.all_reduce(tensor, group=group)
        results.append((tensor, dist.get_rank(group)))
    return results, [
        dist.get_process_group_ranks(group) for group in pairs if dist.get_rank(group) >= 0
    ]


def asynchronous(rank):
    """Two groups, in another order on each rank, and waited for in reverse."""
    groups = [dist.group.WORLD, dist.new_group([0, 1, 2])]
    tensors = [numbers(rank, 4), numbers(rank + 7, 4)]
    order = [0, 1] if rank != 1 else [1, 0]
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in reversed(works):
        work.wait()
    whole = [tensor.round() for tensor in tensors]
    with _coalescing_manager():
        for tensor in whole:
            dist.all_reduce(tensor)
    polled = dist.barrier(async_op=True)
    while not polled.is_completed():  # the others must get their turn
        pass
    return tensors, whole, all(work.is_completed() for work in works)


def unseen_by_autograd(rank):
    """A product saves its factors; a collective that overwrites them is not noticed."""
    weight = numbers(rank, 4).requires_grad_()
    factor = weight * 1
    product = (factor * factor).sum()
    dist.all_reduce(factor)
    product.backward()
    return weight.grad, factor.detach()


def by_functional_collectives(rank):
    group = dist.group.WORLD
    given = numbers(rank, 6)
    results = [
        functional.all_reduce(given, "sum", group),
        functional.all_gather_single(given, 0, group),
        functional.reduce_scatter_single(given, "avg", 0, group),
        functional.all_to_all_single(given, None, None, group),
        functional.broadcast(given, 1, group),
        *functional.all_reduce_coalesced(
            [given.round(), given.round() + 1], "sum", group
        ),  # gloo joins them
    ]
    return [result + 0 for result in results]  # waits


@pytest.mark.parametrize(
    "function",
    [
        reduced,
        gathered,
        sent,
        exchanged,
        in_groups,
        asynchronous,
        unseen_by_autograd,
        by_functional_collectives,
    ],
)
def test_threads_do_what_gloo_does(gt_ranks, function):
    """S8: values and orders of addition, bit for bit."""
    real = gt_ranks.run(on_rank, function, size=RANKS)
    simulated = run_threads(RANKS, function, net=GlooNet(RANKS))
    assert_equal(simulated, real)


def assert_equal(simulated, real):
    for index, (one, other) in enumerate(
        zip(tree_leaves(simulated), tree_leaves(real), strict=True)
    ):
        same = (
            one.dtype == other.dtype and one.equal(other)
            if isinstance(one, torch.Tensor)
            else one == other
        )
        assert same, f"leaf {index}: {one} on threads, {other} on gloo"


def on_rank(function):
    return function(dist.get_rank())


def test_another_net_gives_other_bits():
    """The twin of the above: the sums are the net's."""
    of_gloo, of_rings = (
        run_threads(4, summed, net=net) for net in (GlooNet(4), NetModel(2, 2, channels=2))
    )
    assert not of_gloo[0].equal(of_rings[0])
    torch.testing.assert_close(of_gloo, of_rings)


def summed(rank):
    tensor = numbers(rank, 1000)
    dist.all_reduce(tensor)
    return tensor


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def watched(rank):
    tensor = numbers(rank, 3)
    with Operators() as operators:
        dist.all_reduce(tensor)
    return operators.seen


def test_what_a_collective_does_inside_is_seen_by_no_mode_of_a_rank():
    """The last rank adds for all; a mode there that counts operators counts none of that."""
    assert run_threads(3, watched, net=NetModel(1, 3)) == [[]] * 3


def inputs_are_freed(rank):
    given = numbers(rank, 2)
    freed = weakref.ref(given)
    work = dist.all_gather_single(torch.empty(6), given, async_op=True)
    del given
    work.wait()
    return freed() is None


def test_a_work_that_is_kept_keeps_no_inputs():
    assert run_threads(3, inputs_are_freed, net=NetModel(1, 3)) == [True] * 3


def messages(rank):
    """Three to rank 1, two under one tag; received in another order than sent.

    Two to rank 2, which asks first.
    """
    received = [torch.empty(2) for _ in range(3)]
    if rank == 0:
        buffer = torch.empty(2)
        for value, tag in ((1.0, 7), (2.0, 5), (3.0, 7)):
            dist.send(buffer.fill_(value), 1, tag=tag)
        dist.barrier()
        for value in (4.0, 5.0):
            dist.send(torch.full((2,), value), 2, tag=1)
    elif rank == 1:
        dist.barrier()
        for tensor, tag in zip(received, (5, 7, 7), strict=True):
            dist.recv(tensor, 0, tag=tag)
    else:
        works = [dist.irecv(tensor, 0, tag=1) for tensor in received[:2]]
        dist.barrier()
        for work in works:
            work.wait()
    return [tensor[0].item() for tensor in received]


def messages_of_a_group(rank):
    """Send from the second rank of a group to its first, by their numbers in the world and in the
    group.
    """
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group, received = groups[rank % 2], torch.empty(2)
    for in_world, in_group in (
        ({"src": rank + 2}, {"group_src": 1}),
        ({"dst": rank - 2}, {"group_dst": 0}),
    ):
        for number in (in_world, in_group):
            if rank < 2 and "src" in str(number):
                dist.recv(received, group=group, **number)
            elif rank >= 2 and "dst" in str(number):
                dist.send(torch.full((2,), float(rank)), group=group, **number)
    return received.tolist()


def test_messages_of_a_group_go_to_its_members():
    assert run_threads(4, messages_of_a_group, net=NetModel(1, 4))[:2] == [[2.0, 2.0], [3.0, 3.0]]


def test_messages_come_under_their_tags_and_in_the_order_in_which_they_were_sent():
    _, of_one, of_two = run_threads(3, messages, net=NetModel(1, 3))
    assert of_one == [2.0, 1.0, 3.0], "by tag 5, then both of tag 7 in their order"
    assert of_two[:2] == [4.0, 5.0], (
        "two messages that are waited for before they are sent, in the order of the waits"
    )


def a_list_for_each(rank):
    received = [torch.empty(2) for _ in range(3)]
    dist.all_to_all(received, [torch.full((2,), 10.0 * rank + member) for member in range(3)])
    return [tensor[0].item() for tensor in received]


def test_a_list_for_every_member():
    """Tensor j of rank i comes to rank j in place i."""
    assert run_threads(3, a_list_for_each, net=NetModel(1, 3)) == [
        [rank, 10 + rank, 20 + rank] for rank in range(3)
    ]


def premultiplied(rank):
    tensor = numbers(rank, 100, dtype=torch.bfloat16)
    dist.all_reduce(tensor, op=dist.ReduceOp.PREMUL_SUM(1 / 3))
    return tensor


def test_a_premultiplied_sum_multiplies_every_input_first():
    """gloo does not have it, and FSDP2 asks for it on NCCL: the factor has the dtype that
    is sent.
    """
    inputs = torch.stack([numbers(rank, 100, dtype=torch.bfloat16) for rank in range(4)])
    expected = NetModel(1, 4).all_reduce(inputs * torch.tensor(1 / 3, dtype=torch.bfloat16), "sum")
    for rank, result in enumerate(run_threads(4, premultiplied, net=NetModel(1, 4))):
        assert result.equal(expected), (
            f"rank {rank} has {result[:3].tolist()} ..., but the sum of the inputs, each "
            f"multiplied by 1/3 in bfloat16 "
            f"first, is {expected[:3].tolist()} ..."
        )


def test_ranks_of_other_sizes():
    assert run_threads(1, summed, net=NetModel(1, 1))[0].equal(numbers(0, 1000))
    with pytest.raises(ValueError, match="a net of 8 ranks for 4 ranks"):
        run_threads(4, summed, net=NetModel(1, 8))
    with pytest.raises(ValueError, match="size is a whole number, 1 or more; not 0"):
        run_threads(0, summed, net=NetModel(1, 8))


def scattered(rank):
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        outputs.append(torch.empty(4, dtype=dtype))
        dist.reduce_scatter_single(outputs[-1], numbers(rank, 24, dtype=dtype))
    return outputs


def test_large_reduce_scatters_are_done_in_parts(monkeypatch):
    """Every destination's shard by itself gives the bits of all together."""
    net = NetModel(2, 3, channels=2)
    together = run_threads(6, scattered, net=net)
    monkeypatch.setattr(collectives, "PART_BYTES", 1)
    in_parts = run_threads(6, scattered, net=net)
    assert_bitwise_equal(
        tree_leaves(in_parts), tree_leaves(together), what="shards reduced in parts, and together"
    )
    elsewhere = run_threads(6, scattered, net=NetModel(1, 6, channels=2))
    assert_bitwise_different(tree_leaves(elsewhere), tree_leaves(in_parts))


def scattered_lists(rank):
    """Rank 1 gets the second entry of all lists; a work returns its result."""
    made = torch.empty(2, 2)
    work = dist.reduce_scatter(
        made, [numbers(10 * rank + place, 2, 2) for place in range(3)], async_op=True
    )
    future = work.get_future().wait()
    return made, work.result(), future, work.is_success(), work.is_completed()


def test_a_list_that_is_scattered_and_what_a_work_tells():
    net = NetModel(1, 3)
    for rank, (made, *rest) in enumerate(run_threads(3, scattered_lists, net=net)):
        whole = [
            torch.cat([numbers(10 * other + place, 4) for place in range(3)]) for other in range(3)
        ]
        assert_equal(made.view(-1), net.reduce_scatter(torch.stack(whole), "sum")[rank])
        assert_equal(rest, [[made], [made], True, True])


def test_a_timeout_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="timeout is a number of seconds above 0; not 0"):
        run_threads(8, summed, net=NetModel(1, 8), timeout=0)


@pytest.mark.parametrize(
    "name", ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]
)
def test_a_list_that_is_too_short_is_told(name):
    """With its length, or its size where it is joined first; by a rank that has it."""

    def short(rank):
        one, pair = torch.ones(2), [torch.ones(2), torch.ones(2)]
        {
            "all_gather": lambda: dist.all_gather(pair, one),
            "gather": lambda: dist.gather(one, pair if rank == 0 else None, dst=0),
            "scatter": lambda: dist.scatter(one, pair if rank == 0 else None, src=0),
            "reduce_scatter": lambda: dist.reduce_scatter(one, pair),
            "all_to_all": lambda: dist.all_to_all(pair, pair),
        }[name]()

    message = "a list of 2 tensors for 3 ranks"
    if name == "reduce_scatter":
        message = r"the input float32\[4\] must be 3 times the output float32\[2\]"
    with pytest.raises(ValueError, match=rf"{name}\w*: {message}") as failure:
        run_threads(3, short, net=NetModel(1, 3))
    assert failure.value.__notes__ == ["raised on rank 0 of 3 ranks on threads"]
