"""G1: a chunked graph equals eager chunking, bit for bit: both producers, against the eager run
itself.
"""

from functools import partial

import pytest
import torch

from fixtures.chunking import PRODUCERS, Case, check_equals_eager, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.models.flex import Flex, FlexNet
from fixtures.rewritten_by_hand import offloaded, rematerialised
from pytest_gtrainer import dense_flex_attention
from pytest_gtrainer.graph.nodes import GRAPH

BLOCKS = {
    "sdpa": {"model": net(chunkable.Attention, chunkable.Attention)},
    "plain attention": {"model": net(chunkable.plain_attention)},
    "flex attention": {"model": lambda: FlexNet(Flex), "seq": 32},
    "dropout": {"model": net(chunkable.TwoDropouts, chunkable.TwoDropouts)},
    "buffer updated then read": {"model": net(chunkable.RunningMean)},
    "buffer read then updated": {"model": net(chunkable.read_then_update)},
    "weight used three times": {"model": net(chunkable.WeightTwice)},
    "weight shared across blocks": {"model": chunkable.SharedAcrossBlocks},
    "cast weight": {"model": net(chunkable.CastWeight)},
    "factories": {"model": net(chunkable.Factories)},
    "checkpointed": {"model": net(chunkable.Checkpointed, chunkable.Dense)},
    "transposed inside": {"model": net(chunkable.Transposed)},
    "chunked loss": {"model": net(chunkable.Attention), "step": chunked_ce_step(4)},
    "offloaded": {"model": net(chunkable.Dense), "rewrite": offloaded},
    "rematerialised": {"model": net(chunkable.Dense, chunkable.Dense), "rewrite": rematerialised},
    "moe between attention": {
        "model": net(chunkable.Attention, chunkable.MoEBlock, chunkable.Dense)
    },
}
MOE = {
    "loop": {
        "model": net(chunkable.Dense, chunkable.MoEBlock, chunkable.Dense, chunkable.MoEBlock)
    },
    "grouped": {"model": net(chunkable.grouped_moe)},
    "beside a residual": {"model": net(chunkable.Bare)},
    "before a residual": {"model": net(chunkable.BareFirst)},
    "passed on last": {"model": net(chunkable.BareLast)},
    "chunked loss": {"model": net(chunkable.Bare), "step": chunked_ce_step(4)},
}
STRATEGIES = [
    *(pytest.param(case, "layers.*", "batch", id=f"block-{name}") for name, case in BLOCKS.items()),
    *(
        pytest.param(case, "layers.*.moe", dim, id=f"moe-{dim}-{name}")
        for name, case in MOE.items()
        for dim in ("batch", "sequence")
    ),
]
NUMBERS = [2, 3, 4, 8]
DTYPES = [torch.float32, torch.bfloat16]
HEAVY = ("flex attention", "moe between attention", "loop")


def in_short():
    """Pairs instead of the whole matrix: each strategy meets both types and both producers, the
    heavy ones one of them; each number of chunks meets every type and producer, and they each
    other.
    """
    for row, strategy in enumerate(STRATEGIES):
        heavy = strategy.id.endswith(HEAVY)
        numbers = NUMBERS[:2] if heavy else NUMBERS
        for turn in range(1 if heavy else 2):
            number = numbers[(row + turn) % len(numbers)]
            dtype, producer = DTYPES[(row // 4 + turn) % 2], PRODUCERS[(row // 8 + turn) % 2]
            name = f"{strategy.id}-{number}-{str(dtype).removeprefix('torch.')}-{producer}"
            yield pytest.param(*strategy.values, number, dtype, producer, id=name)


IN_SHORT = list(in_short())


@pytest.fixture(autouse=True)
def flex_attention_trains():
    with dense_flex_attention():
        yield


@pytest.mark.second_tier(
    "block",
    "moe-batch-before a residual-8",
    "moe-batch-beside a residual-3",
    "moe-batch-chunked loss-2",
    "moe-batch-grouped-8",
    "moe-batch-loop",
    "moe-sequence-before a residual",
    "moe-sequence-beside a residual-4",
    "moe-sequence-chunked loss-3",
    "moe-sequence-grouped-8",
    "moe-sequence-loop",
    "moe-batch-beside a residual-2",
    "moe-sequence-chunked loss-4",
)
@pytest.mark.parametrize(("given", "root", "chunk_dim", "chunks", "dtype", "producer"), IN_SHORT)
def test_pairs(given, root, chunk_dim, chunks, dtype, producer):
    """G1, G3, G7, G12, G13, G15, G16, G20: two steps, so that an optimizer's lies between."""
    check_equals_eager(case_of(given, strict(root, chunk_dim, chunks), dtype, steps=2), producer)


@pytest.mark.parametrize(
    "block",
    [chunkable.Shifted, chunkable.Literals],
    ids=["a buffer read without the batch, then updated", "literals of the batch"],
)
def test_what_a_chunk_sees_though_no_tensor_of_the_operator_has_the_batch(block):
    """G7, G15: the buffer as the chunk before has left it, and the numbers of a chunk."""
    check_equals_eager(Case(model=net(block), config=strict("layers.*", num_chunks=4), steps=2))


@pytest.mark.second_tier("2-t", "4-by itself", "4-twice")
@pytest.mark.parametrize(
    "options", [{}, {"thrice": True}, {"by_itself": True}], ids=["twice", "thrice", "by itself"]
)
@pytest.mark.parametrize("chunks", [2, 4])
def test_the_gradient_of_a_sum_of_parameters_is_complete_in_each_chunk(options, chunks):
    """G14: its uses in one chunk are added before another chunk's."""
    model = net(partial(chunkable.SumOfParameters, **options))
    check_equals_eager(Case(model=model, config=strict("layers.*", num_chunks=chunks), steps=1))


@pytest.mark.long
@pytest.mark.parametrize("chunks", NUMBERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("given", "root", "chunk_dim"), STRATEGIES)
def test_the_whole_matrix(given, root, chunk_dim, dtype, chunks):
    """The long form: everything with everything (``-m long``), three steps of AdamW."""
    by_hand = "rewrite" in given  # which eager code has not
    check_equals_eager(
        case_of(given, strict(root, chunk_dim, chunks), dtype, steps=3),
        *((GRAPH,) if by_hand else PRODUCERS),
    )


def case_of(given, config, dtype, steps):
    """A chunk has two rows, or two positions."""
    fields = dict(given)
    extents = {"batch": 8, "seq": fields.pop("seq", 8)}
    extents |= {"seq" if config.dim else "batch": 2 * config.num_chunks}
    return Case(
        **fields,
        config=config,
        dtype=dtype,
        batch=lambda step: token_batch(step, **extents),
        steps=steps,
    )


def test_the_short_form_has_pairs():
    ids = [param.id for param in IN_SHORT]
    assert {strategy.id for strategy in STRATEGIES} == {name.rsplit("-", 3)[0] for name in ids}
    columns = list(
        zip(
            *(name.rsplit("-", 3) for name in ids if not any(heavy in name for heavy in HEAVY)),
            strict=True,
        )
    )
    strategy, number, dtype, producer = columns
    for one, other in [
        (strategy, dtype),
        (strategy, producer),
        (number, dtype),
        (number, producer),
        (dtype, producer),
    ]:
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other))
