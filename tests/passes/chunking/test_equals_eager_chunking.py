"""G1: a chunked graph equals eager chunking, bit for bit, three steps of AdamW long."""

import pytest
import torch

from fixtures.chunking import Case, check_equals_eager, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import net

BLOCKS = {
    "sdpa": net(chunkable.Attention, chunkable.Attention),
    "plain attention": net(chunkable.plain_attention),
    "dropout": net(chunkable.TwoDropouts, chunkable.TwoDropouts),
    "buffer updated then read": net(chunkable.RunningMean),
    "buffer read then updated": net(chunkable.read_then_update),
    "weight used three times": net(chunkable.WeightTwice),
    "weight shared across blocks": chunkable.SharedAcrossBlocks,
    "cast weight": net(chunkable.CastWeight),
    "factories": net(chunkable.Factories),
    "checkpointed": net(chunkable.Checkpointed, chunkable.Dense),
    "transposed inside": net(chunkable.Transposed),
    "moe between attention": net(chunkable.Attention, chunkable.MoEBlock, chunkable.Dense),
}
MOE = {
    "loop": net(chunkable.Dense, chunkable.MoEBlock, chunkable.Dense, chunkable.MoEBlock),
    "grouped": net(chunkable.grouped_moe),
    "beside a residual": net(chunkable.Bare),
    "before a residual": net(chunkable.BareFirst),
}
# every value of each column meets every block, and most pairs of columns
NUMBERS = [2, 4, 3, 8]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("name", "index"), [(name, index) for index, name in enumerate(BLOCKS)])
def test_transformer_blocks_by_batch(name, index):
    """G1, G13, G15."""
    for offset in (0, 1):
        chunks = NUMBERS[(index + 2 * offset) % 4]
        check_equals_eager(_case(BLOCKS[name], strict("layers.*", "batch", chunks), DTYPES[(index + offset) % 2]))


@pytest.mark.parametrize("chunk_dim", ["batch", "sequence"])
@pytest.mark.parametrize(("name", "index"), [(name, index) for index, name in enumerate(MOE)])
def test_moe_layers(name, index, chunk_dim):
    """G3: dense layers between MoE layers are left alone."""
    chunks = NUMBERS[(index + (chunk_dim == "batch")) % 4]
    check_equals_eager(_case(MOE[name], strict("layers.*.moe", chunk_dim, chunks), DTYPES[index % 2]))


def _case(model, config, dtype):
    """A chunk has two rows, or two positions."""
    extents = {"batch": 8, "seq": 8} | {"seq" if config.dim else "batch": 2 * config.num_chunks}
    return Case(model=model, config=config, dtype=dtype, batch=lambda step: token_batch(step, **extents))


@pytest.mark.long
@pytest.mark.parametrize("chunks", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("model", "root", "chunk_dim"),
    [
        *(pytest.param(model, "layers.*", "batch", id=f"block-{name}") for name, model in BLOCKS.items()),
        *(
            pytest.param(model, "layers.*.moe", dim, id=f"moe-{dim}-{name}")
            for name, model in MOE.items()
            for dim in ("batch", "sequence")
        ),
    ],
)
def test_the_whole_matrix(model, root, chunk_dim, dtype, chunks):
    """The long form: everything with everything (``make chunk-matrix``)."""
    check_equals_eager(_case(model, strict(root, chunk_dim, chunks), dtype))
