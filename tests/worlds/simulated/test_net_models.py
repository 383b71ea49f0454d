"""Net models against their specification, and what they make visible."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_gtrainer import Net, NetModel, assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.worlds.simulated import NoModel
from tests.worlds.simulated import specification
from tests.worlds.simulated.buckets import sees_the_order_of_a_bucket

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COLLECTIVES = ["reduce_scatter", "all_reduce"]


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


@st.composite
def nets(draw):
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = nodes * per_node
    rings = draw(st.none() | st.lists(st.permutations(range(size)), min_size=1, max_size=3))
    net = NetModel(
        nodes,
        per_node,
        channels=None if rings else draw(st.integers(1, 5)),
        partition=draw(st.sampled_from(["contiguous", "round-robin"])),
        accumulate=draw(st.sampled_from(["wire", "fp32"])),
        average=draw(st.sampled_from(["premultiply", "divide"])),
        rings=rings,
        chunk_bytes=draw(st.sampled_from([16, 32])),
    )
    members = draw(st.none() | st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    return net if members is None else net.for_group(members)


# parts of 8 and 3 elements: rows of 3 fill the inputs, but no part of 3 begins at one
@example(NetModel(1, 3, channels=2), "reduce_scatter", 11, torch.float32, "sum")
# an fp32 sum is divided before it is rounded to the wire: the other way round would round twice
@example(
    NetModel(1, 3, channels=1, accumulate="fp32", average="divide"),
    "all_reduce",
    21,
    torch.bfloat16,
    "avg",
)
@settings(max_examples=150)
@given(
    nets(),
    st.sampled_from(COLLECTIVES),
    st.integers(0, 21),
    st.sampled_from(DTYPES),
    st.sampled_from(["sum", "avg", "product", "max", "min"]),
)
def test_fast_equals_its_specification(net, collective, length, dtype, op):
    """S1's model: every element, in every dtype, is what the definition says."""
    width = length * net.size if collective == "reduce_scatter" else length
    inputs = numbers(net.size, width, dtype=dtype).where(
        numbers(net.size, width, seed=1) > -1, -0.0
    )
    expected = getattr(specification, collective)(net, inputs, op)
    actual = getattr(net, collective)(inputs, op)
    assert actual.shape == expected.shape
    if length == 0:
        return  # no element to compare
    assert_bitwise_equal(
        actual, expected, what=f"{collective} ({op}) against its specification, under {net}"
    )


@settings(max_examples=50)
@given(nets(), st.integers(0, 21), st.sampled_from(["sum", "avg"]), st.data())
def test_shards_of_some_destinations_alone(net, length, op, data):
    """The same bits as in the whole, of which only their part is given."""
    first = data.draw(st.integers(0, net.size - 1))
    some = range(first, data.draw(st.integers(first + 1, net.size)))
    inputs = numbers(net.size, net.size * length)
    part = inputs[:, some.start * length : some.stop * length]
    whole = net.reduce_scatter(inputs, op)[some.start : some.stop]
    shards = net.reduce_scatter(part, op, some)
    assert shards.shape == whole.shape
    if length == 0:
        return  # no element to compare
    assert_bitwise_equal(shards, whole, what=f"shards of ranks {some} alone, under {net}")


def test_shards_of_some_destinations_alone_by_pat():
    """Large payloads are like this: some destinations are summed at a time."""
    net, inputs = NetModel(5, 1, algorithm="pat"), numbers(5, 5 * 3)
    alone = net.reduce_scatter(inputs[:, 2 * 3 :], "sum", range(2, 5))
    assert_bitwise_equal(alone, net.reduce_scatter(inputs, "sum")[2:])


@settings(max_examples=100)
@given(nets(), st.sampled_from(COLLECTIVES), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_explain_tells_the_path_of_the_specification(net, collective, count, dtype, data):
    offset = data.draw(st.integers(0, count - 1))
    destination = data.draw(st.integers(0, net.size - 1))
    expected = specification.path_of(net, collective, offset, count, dtype, destination)
    assert list(net.explain(collective, offset, count, dtype, destination).ranks) == expected


def test_a_sum_that_is_large_enough_to_be_done_in_blocks():
    """Blocks of columns are seams that small examples do not have."""
    net = NetModel(nodes=2, ranks_per_node=2, channels=1)
    inputs = numbers(4, 4 * 150_001)
    shards = net.reduce_scatter(inputs, "sum")
    rows = inputs.view(4, 4, -1)
    for destination in range(4):
        first, *others = (
            rows[rank, destination]
            for rank in net.explain("reduce_scatter", 0, 150_001, torch.bfloat16, destination).ranks
        )
        for row in others:
            first = first + row
        assert torch.equal(shards[destination], first)


def test_a_sum_of_negative_zeros_is_one():
    """Zero plus negative zero is zero, so a sum that starts at zero would be another."""
    inputs = torch.full((4, 64), -0.0)
    inputs[2, 5] = 0.0
    summed = NetModel(nodes=2, ranks_per_node=2).reduce_scatter(inputs, "sum")
    assert summed.eq(0).all()
    assert summed.view(-1).signbit().logical_not().nonzero().tolist() == [[5]]


TWO_NODES = NetModel(nodes=2, channels=4)


@pytest.mark.parametrize("partition", ["contiguous", "round-robin"])
@pytest.mark.parametrize("channels", [2, 4, 8])
def test_two_nodes_see_the_order_of_a_bucket(partition, channels):
    """S1: on two nodes with two channels or more, the order of packing shows."""
    net = dataclasses.replace(TWO_NODES, partition=partition, channels=channels, chunk_bytes=64)
    assert sees_the_order_of_a_bucket(net)


@pytest.mark.parametrize(
    "net",
    [
        NetModel(nodes=1, channels=4),
        NetModel(nodes=2, channels=1),
        NetModel(nodes=2, channels=4, accumulate="fp32"),
    ],
    ids=["one node", "one channel", "accumulated in fp32"],
)
@pytest.mark.parametrize("partition", ["contiguous", "round-robin"])
def test_where_the_order_of_a_bucket_is_invisible(net, partition):
    """S1: by a reduce-scatter, on one node with rail rings (one cycle), with one channel, or
    accumulated in fp32.
    """
    net = dataclasses.replace(net, partition=partition, chunk_bytes=64)
    assert not sees_the_order_of_a_bucket(net)


def test_an_average_multiplies_first_or_divides_last():
    """Only a power of two of ranks hides the difference."""
    inputs = numbers(6, 6 * 50)
    net = NetModel(nodes=2, ranks_per_node=3)
    first, last = (
        dataclasses.replace(net, average=average).reduce_scatter(inputs, "avg")
        for average in ("premultiply", "divide")
    )
    assert_bitwise_different(first, last)
    assert_bitwise_equal(last, net.reduce_scatter(inputs, "sum") / 6)


def test_an_average_multiplies_by_a_factor_of_the_wires_dtype():
    """Also where sums are kept in fp32: NCCL hands the factor on in the dtype of the data."""
    inputs = numbers(3, 3 * 50).to(torch.bfloat16)
    net = NetModel(1, 3, accumulate="fp32")
    averaged = net.reduce_scatter(inputs, "avg")
    third = torch.tensor(1 / 3, dtype=torch.bfloat16)
    assert_bitwise_equal(averaged, net.reduce_scatter(inputs * third, "sum"))
    assert_bitwise_different(
        averaged, net.reduce_scatter((inputs.float() * (1 / 3)).to(torch.bfloat16), "sum")
    )


def test_whole_numbers_are_summed_exactly():
    inputs = torch.arange(32).view(4, 8) ** 7
    assert torch.equal(NetModel(1, 4).all_reduce(inputs, "sum"), inputs.sum(0))


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REDUCED = {
    "sum": lambda inputs: inputs.sum(0),
    "product": lambda inputs: inputs.prod(0),
    "max": lambda inputs: inputs.amax(0),
    "min": lambda inputs: inputs.amin(0),
}


@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_of_every_size_are_reduced(dtype, op):
    inputs = (torch.arange(12) % 3 + 1).view(4, 3).to(dtype)
    reduced = NetModel(1, 4).all_reduce(inputs, op)
    assert reduced.dtype == dtype
    assert torch.equal(reduced, REDUCED[op](inputs).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [*REDUCED, "avg"])
def test_floats_of_every_size_are_reduced(dtype, op):
    inputs = torch.ones(4, 3, dtype=dtype)
    reduced = NetModel(1, 4).all_reduce(inputs, op)
    assert torch.equal(reduced, torch.full((3,), 4.0 if op == "sum" else 1.0, dtype=dtype))


def test_inputs_may_be_strided():
    inputs = numbers(4, 16)
    net = NetModel(1, 4)
    assert torch.equal(
        net.reduce_scatter(inputs.t().contiguous().t(), "sum"), net.reduce_scatter(inputs, "sum")
    )
    assert torch.equal(
        net.all_reduce(inputs[:, 3:], "sum"), net.all_reduce(inputs[:, 3:].clone(), "sum")
    )


def test_a_world_of_one_gives_what_it_gets():
    inputs = numbers(1, 9)
    for op in ("sum", "avg"):
        assert torch.equal(NetModel(1, 1).reduce_scatter(inputs, op), inputs)
        for algorithm in ("ring", "tree", "pat"):
            assert torch.equal(
                NetModel(1, 1, algorithm=algorithm).all_reduce(inputs, op), inputs[0]
            )
            assert torch.equal(
                NetModel(1, 1, algorithm=algorithm).reduce_scatter(inputs, op), inputs
            )


@pytest.mark.parametrize("algorithm", ["ring", "tree", "pat"])
def test_nothing_is_summed_to_nothing(algorithm):
    net = NetModel(2, 1, algorithm=algorithm, partition="cells")
    assert net.all_reduce(torch.empty(2, 0), "sum").shape == (0,)
    assert net.reduce_scatter(torch.empty(2, 0), "sum").shape == (2, 0)


@pytest.mark.parametrize("ranks", [3, 6, 7])
def test_cells_begin_at_whole_words_where_ranks_do_not_divide_the_traffic(ranks):
    """A kernel moves 16 bytes at a time, so a part of eight bf16 numbers never lies across two
    channels.
    """
    net, count = NetModel(1, ranks, channels=4, partition="cells"), 8_000
    channel = [
        net.explain("reduce_scatter", at, count, torch.bfloat16).channel for at in range(count)
    ]
    torn = [at for at in range(1, count) if channel[at] != channel[at - 1] and at % 8]
    assert not torn, f"with {ranks} ranks a channel begins inside a word of 8 elements, at {torn}"


def test_explain_reads_as_a_sentence():
    path = (
        NetModel(2, 2, channels=2)
        .for_group((1, 3))
        .explain("reduce_scatter", 9, 16, torch.bfloat16, 0)
    )
    assert str(path) == "channel 1, summed in the order of ranks 3 1"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"channels": 0}, "channels=0: give a whole number, 1 or more"),
        ({"nodes": True}, "nodes=True: give a whole number, 1 or more"),
        ({"nodes": 10**9}, "a net has at most 1,048,576 ranks: take fewer"),
        ({"partition": "even"}, "partition='even': use one of contiguous, cells, round-robin"),
        ({"accumulate": "fp64"}, "accumulate='fp64': use one of wire, fp32"),
        ({"algorithm": "Tree"}, "algorithm='Tree': use one of ring, tree, pat"),
        ({"protocol": "LL64"}, "protocol='LL64': use one of Simple, LL128, LL"),
        ({"chunk_bytes": 0}, "chunk_bytes=0: give a whole number, 1 or more"),
        (
            {"algorithm": "pat", "accumulate": "fp32"},
            "accumulate=\"fp32\" adds all ranks in one order, and algorithm='pat' does not",
        ),
        ({"trees": (((1,), ()),)}, "there are 1 trees for 4 channels: give one for each"),
        ({"rings": []}, "rings is empty: give one ring for each channel"),
        (
            {"rings": [(0, 1, 1, 3)]},
            "the ring of channel 0 visits rank 1 more than once, 0 1 1 3: list every rank",
        ),
        (
            {"rings": [(0, 1, 2, 3), (0, 1, 2)]},
            "the ring of channel 1 leaves out rank 3 of 4, 0 1 2: list every rank",
        ),
        (
            {"rings": [(0, 1, 2, 4)]},
            "the ring of channel 0 visits rank 4, but ranks are 0..3: list every rank",
        ),
        (
            {"rings": [(0, 1, 2, 3)], "channels": 2},
            "channels=2, but there are 1 rings: leave channels out",
        ),
        ({"channels": 1, "trees": [[[1], []]]}, "the tree of channel 0: it has 2 of 4 ranks"),
        (
            {"channels": 1, "trees": [[[1], [4], [], []]]},
            r"channel 0: rank 4 is not one of its ranks, 0\.\.3",
        ),
        (
            {"channels": 1, "trees": [[[1], [], [3], [2]]]},
            "channel 0: rank 2 is not below the root, rank 0",
        ),
        ({"members": ()}, "a group without ranks has no net"),
        ({"members": (1, 1)}, r"the group \(1, 1\) repeats a rank: name each once"),
        ({"members": (1, 4)}, "rank 4 of the group is not in the world of 4 ranks: they are 0..3"),
    ],
)
def test_a_net_that_cannot_be_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        NetModel(**{"nodes": 2, "ranks_per_node": 2, **fields})


def test_ranks_that_the_nodes_do_not_divide():
    assert NetModel.of_world(16, nodes=2) == NetModel(2, 8)
    with pytest.raises(ValueError, match="nodes=0: give a whole number, 1 or more"):
        NetModel.of_world(4, nodes=0)
    with pytest.raises(ValueError, match="15 ranks do not divide over 2 nodes: change one of them"):
        NetModel.of_world(15, nodes=2)


@pytest.mark.parametrize(
    ("dtype", "op", "sentence"),
    [
        *(
            (dtype, "avg", f"averages {dtype}, which backends truncate differently: sum it and")
            for dtype in (torch.int64, torch.int32, torch.uint8)
        ),
        (torch.float8_e4m3fn, "sum", "of torch.float8_e4m3fn has no model in a simulated world"),
        (
            torch.float32,
            "bxor",
            "with op 'bxor' has no model in a simulated world: use one of sum, avg",
        ),
    ],
)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_reduction_without_a_model_is_refused_by_name(collective, dtype, op, sentence):
    """S5."""
    with pytest.raises(NoModel, match=f"{collective} {sentence}"):
        getattr(NetModel(1, 2), collective)(torch.ones(2, 2).to(dtype), op)


def test_payloads_of_a_wrong_shape_are_refused():
    with pytest.raises(
        ValueError, match=r"all_reduce takes one row for each of 4 ranks; not shape \(3, 8\)"
    ):
        NetModel(1, 4).all_reduce(torch.ones(3, 8), "sum")
    with pytest.raises(
        ValueError, match="reduce_scatter of 6 elements over 4 ranks: pad them first"
    ):
        NetModel(1, 4).reduce_scatter(torch.ones(4, 6), "sum")
    with pytest.raises(ValueError, match="element 8 is not in a payload of 8"):
        NetModel(1, 4).explain("all_reduce", 8, 8, torch.float32)


NETS = [
    NetModel(1, 4),
    NetModel(2, 2, algorithm="pat"),
    NetModel(2, 4).for_group((5, 0, 1, 7)),
    NetModel(1, 4, accumulate="fp32"),
]


@pytest.mark.parametrize("net", NETS)
def test_destinations_are_ranks_that_follow_each_other(net):
    inputs = numbers(4, 8)
    whole = net.reduce_scatter(inputs, "sum")
    for wanted in (range(4), range(1), range(1, 3), range(3, 4)):
        rows = inputs.view(4, 4, 2)[:, wanted.start : wanted.stop].reshape(4, -1)
        part = net.reduce_scatter(rows, "sum", wanted)
        assert torch.equal(part, whole[wanted.start : wanted.stop])
    for wrong in (
        range(0),
        range(2, 2),
        range(0, 4, 2),
        range(3, -1, -1),
        range(3, 5),
        range(-1, 2),
    ):
        with pytest.raises(ValueError, match=r"destinations=range\(.*: give ranks of 0\.\.3 that"):
            net.reduce_scatter(inputs, "sum", wrong)


@pytest.mark.parametrize("net", NETS)
def test_an_explanation_is_of_a_rank_and_reduction_that_there_are(net):
    for destination in (9, 4, -1, None, 1.5):
        with pytest.raises(ValueError, match=f"destination={destination}: the net has ranks 0..3"):
            net.explain("reduce_scatter", 0, 8, torch.float32, destination)
    with pytest.raises(NoModel, match="reduce_scatter with op 'bxor' has no model"):
        net.explain("reduce_scatter", 0, 8, torch.float32, op="bxor")
    assert net.explain("reduce_scatter", 0, 8, torch.float32, 3).ranks


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ((), "a group without ranks has no net"),
        ((1, 1), "repeats a rank"),
        ((0, 4), "rank 4 of the group is not in the world of 4 ranks"),
        ((-1,), "rank -1 of the group"),
        ((0, 1.0), "rank 1.0 of the group"),
        ((False, 2), "rank False of the group"),
        ("01", "rank '0' of the group"),
    ],
)
def test_a_group_of_a_net_of_ones_own_is_checked(ranks, sentence):
    """A class of a user need not check its fields."""
    for net in (UncheckedNet(), NetModel(1, 4), NetModel(1, 4).for_group((0, 1))):
        with pytest.raises(ValueError, match=sentence):
            net.for_group(ranks)
    assert UncheckedNet().for_group([3, 0]).members == (3, 0)


@dataclasses.dataclass(frozen=True)
class UncheckedNet(Net):
    by_destination = False
    members: tuple[int, ...] | None = None

    @property
    def world_size(self):
        return 4

    def reduce_scatter(self, inputs, op, destinations=None):
        raise NotImplementedError

    all_reduce = explain = reduce_scatter
