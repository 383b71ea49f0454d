"""A configuration of modules, extents and inputs, and nodes in messages."""

import re

import pytest
import torch
from torch import fx

from pytest_gtrainer import ChunkConfig, ChunkError
from pytest_gtrainer.passes.chunking.config import BLOCK, MOE, describe


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("layers.*", BLOCK),
        ("layers.3", BLOCK),
        ("model.layers.*", BLOCK),
        ("layers.*.moe", MOE),
        ("blocks.moe", MOE),
        *(
            (pattern, None)
            for pattern in ("*", "moe", ".*", ".moe", "a..*", "layers.*.norm", "layers.x*", "", 3)
        ),
    ],
)
def test_a_pattern_names_blocks_or_moe_layers(pattern, kind):
    """G2: the last component decides."""
    if kind is not None:
        assert ChunkConfig(pattern).kind == kind
        return
    with pytest.raises(ChunkError, match=re.escape(f"module_fqn={pattern!r} names neither")):
        ChunkConfig(pattern)


@pytest.mark.parametrize(
    ("pattern", "fqn", "root"),
    [
        ("layers.*", "layers.10.moe.router", "layers.10"),
        ("layers.*", "layers", ""),
        ("layers.*", "mtp_layers.0", ""),
        ("layers.1", "layers.10", ""),
        ("*layers.*", "mtp_layers.0.w", "mtp_layers.0"),
        ("layers.*.moe", "layers.0.moe.experts", "layers.0.moe"),
        ("layers.*.moe", "layers.0.moe_norm", ""),
        ("layers.*.moe", "layers.0", ""),
    ],
)
def test_a_module_lies_in_the_root_that_matches_component_by_component(pattern, fqn, root):
    config = ChunkConfig(pattern)
    assert config.root_of(fqn) == root
    assert config.matches(fqn) == (root == fqn)
    assert not config.matches("")


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("extent", range(13))
def test_an_extent_is_cut_into_equal_chunks_of_something_or_refused(num_chunks, extent):
    config = ChunkConfig("layers.*.moe", num_chunks=num_chunks, chunk_dim="sequence")
    if extent and extent % num_chunks == 0:
        assert config.chunk_extent(extent, "x") * num_chunks == extent
        return
    words = (
        f"x: extent {extent} of the sequence dimension does not divide into {num_chunks} chunks; "
        f"choose num_chunks among the divisors of {extent}"
    )
    with pytest.raises(ChunkError, match=f"^{re.escape(words)}$"):
        config.chunk_extent(extent, "x")


INPUTS = (
    2.0,
    torch.zeros(4, 6),
    {"labels": torch.zeros(4, 6, dtype=torch.int64)},
    torch.zeros(6),
    torch.zeros(()),
)
"""Leaves 1 and 2 have both dimensions; leaf 3 has as many elements as there are positions."""


@pytest.mark.parametrize(
    ("config", "leaves", "shapes"),
    [
        (ChunkConfig("layers.*"), [(1, 0), (2, 0)], [(2, 6), (2, 6), (6,), ()]),
        (ChunkConfig("layers.*.moe", "sequence", 3), [(1, 1), (2, 1)], [(4, 2), (4, 2), (6,), ()]),
    ],
    ids=["batch", "sequence"],
)
def test_inputs_of_a_twin(config, leaves, shapes):
    """G9: the first tensor with the dimension gives the extent; what has this extent there is cut,
    and contiguous.
    """
    assert config.dynamic_dims(INPUTS) == {config.chunk_dim: leaves}, (
        "inputs of the first one's extent, no others"
    )
    scalar, tokens, labels, *others = config.twin_inputs(INPUTS)
    cut = [tokens, labels["labels"], *others]
    assert (scalar, [tuple(tensor.shape) for tensor in cut]) == (2.0, shapes)
    assert not [tensor for tensor in cut if not tensor.is_contiguous()]
    assert INPUTS[1].shape == (4, 6)


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        (
            ChunkConfig("layers.*.moe", "sequence"),
            (1, torch.zeros(6)),
            r"has a sequence dimension \(dimension 1\)",
        ),
        (ChunkConfig("layers.*"), (), r"has a batch dimension \(dimension 0\)"),
        (
            ChunkConfig("layers.*", num_chunks=3),
            INPUTS,
            r"layers\.\*, the step's inputs: extent 4 of the batch dimension .* into 3 chunks; "
            r".* divisors of 4",
        ),
    ],
)
def test_inputs_that_cannot_be_cut(config, inputs, message):
    """G9."""
    with pytest.raises(ChunkError, match=message):
        config.twin_inputs(inputs)


def test_a_node_in_a_message():
    """Name, operator, extents, module and the innermost line of the user's code, as far as they are
    known.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    neg = graph.call_function(torch.ops.aten.neg.default, (x,))
    assert (describe(x), describe(neg)) == ("placeholder x", "neg_default = aten.neg.default")
    x.meta["val"] = torch.zeros(4, 6)
    trace = (
        'File "model.py", line 3, in forward\n  x = block(x)\n'
        'File "block.py", line 12, in forward\n  -x\n'
    )
    neg.meta |= {"val": torch.zeros(()), "custom": {"module_fqn": "layers.0"}, "stack_trace": trace}
    assert (describe(x), describe(neg)) == (
        "placeholder x [4, 6]",
        "neg_default = aten.neg.default [] in layers.0 at block.py:12",
    )
