"""Refusals of chunking: by module, dimension, extent and node, with the way out."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

from fixtures.chunking import chunked, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import DIM, Net, net
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ChunkConfig,
    ChunkError,
    chunk_pass,
    construct_default_graph_passes,
    trace_step,
)


class Block(nn.Module):
    """A linear layer, and what a test adds to it."""

    def __init__(self, then) -> None:
        super().__init__()
        self.w = nn.Linear(DIM, DIM)
        self.then = then

    def forward(self, x):
        return self.then(self.w(x))


def chunk(
    then=lambda x: x,
    *,
    root="layers.*",
    chunk_dim="batch",
    num_chunks=2,
    extents=(4, 6),
    model=None,
):
    """Trace a net of one such block, and chunk it."""
    config = strict(root, chunk_dim, num_chunks)
    traced = trace_step(
        model or Net(lambda: Block(then)), ce_step, token_batch(0, *extents), chunk=config
    )
    return chunked(traced, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_dim": "heads"}, "chunk_dim='heads': choose 'batch' or 'sequence'"),
        ({"num_chunks": 1}, "num_chunks=1: give an integer of at least 2"),
        ({"num_chunks": 2.0}, r"num_chunks=2\.0: give an integer"),
        (
            {"row_wise": "mylib::norm_all"},
            r"row_wise='mylib::norm_all': give a tuple of full names, such as \('mylib::norm',\)",
        ),
        ({"row_wise": None}, "row_wise=None: give a tuple of full names"),
        (
            {"row_wise": ("layers.+",)},
            r"row_wise names 'layers\.\+', which is neither .*'layers\.\*'",
        ),
        ({"chunk_dim": ["batch"]}, r"chunk_dim=\['batch'\]: choose"),
        (
            {"module_fqn": "layers.*.attention"},
            "names neither transformer blocks, .* nor MoE layers",
        ),
        ({"module_fqn": "*"}, "names neither transformer blocks"),
        (
            {"chunk_dim": "sequence"},
            r"by sequence: a transformer block holds attention, .*\(layers\.\*\.moe\)",
        ),
    ],
)
def test_a_configuration_is_checked_when_it_is_built(options, message):
    """G3."""
    with pytest.raises(ChunkError, match=message):
        ChunkConfig(**{"module_fqn": "layers.*", **options})


def test_a_graph_without_a_match():
    """G2."""
    with pytest.raises(
        ChunkError, match=r"'blocks\.\*' matches no module of the graph; .* layers, lm_head, loss"
    ):
        chunk(root="blocks.*")


class Deaf(nn.Module):
    """Does not look at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        return self.bias.tanh()


class Beside(Net):
    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        return self.lm_head(sum((layer(x) for layer in self.layers), x))


def test_modules_that_the_dimension_does_not_reach():
    """G2: all of them are named, beside one that can be chunked."""
    with pytest.raises(
        ChunkError, match=r"^nothing in layers\.0, layers\.2 depends on the batch dimension"
    ):
        chunk(model=Beside(Deaf, lambda: Block(lambda x: x), Deaf))


@pytest.mark.parametrize(("batch", "num_chunks"), [(3, 2), (2, 4)])
def test_an_extent_that_does_not_divide(batch, num_chunks):
    """G9."""
    message = rf"extent {batch} of the batch dimension does not divide into {num_chunks} chunks"
    with pytest.raises(ChunkError, match=message):
        chunk(extents=(batch, 6), num_chunks=num_chunks)


def test_blocks_that_hand_each_other_the_batch_in_another_place():
    """G6: chunks could go from one to the other, which eager chunking, that joins along dimension
    0, does not do.
    """
    blocks = [lambda: Block(lambda x: x.transpose(0, 1).contiguous()) for _ in range(2)]
    with pytest.raises(
        ChunkError, match=r"enters the chunked module layers\.1 with the chunk dimension in place 1"
    ):
        chunk(model=Net(*blocks))


def test_a_twin_of_another_number_of_chunks():
    """G9."""
    traced = trace_step(
        net(chunkable.Dense)(), ce_step, token_batch(0), chunk=strict("layers.*", num_chunks=4)
    )
    with pytest.raises(
        ChunkError,
        match=r"twin of placeholder .* extent 2 where the batch dimension has 8; .* has 4",
    ):
        chunk_pass(traced.gm, config=strict("layers.*", num_chunks=2), twin=traced.twin)


def joined_by_extent(x):
    rows, others = x.detach(), x.detach().tanh()
    parts = [rows, others, rows] if len(x) == 4 else [rows, rows, others]
    return x + (torch.cat(parts, -1) * torch.arange(3.0 * DIM)).unflatten(-1, (3, DIM)).sum(-2)


def multiplied_by_extent(x):
    rows, others = x.detach(), x.detach().tanh()
    factors = (others, rows) if len(x) == 4 else (rows, others)
    return x + torch.addcmul(rows, *factors, value=2).addcmul(*factors)


def added_by_extent(x):
    rows, others = x.detach(), x.detach().tanh()
    again = (rows, others, others) if len(x) == 4 else (rows, others, rows)
    return x + torch.addcmul(*again)


@pytest.mark.parametrize(
    "then",
    [joined_by_extent, multiplied_by_extent, added_by_extent],
    ids=lambda then: then.__name__,
)
def test_operands_that_change_their_places_with_the_extent(then):
    """G18: both twins call the same operators on the same two values."""
    with pytest.raises(ChunkError, match="the operators of the step depend on the chunk dimension"):
        chunk(then)


def test_a_graph_without_its_twin():
    traced = trace_step(net(chunkable.Dense)(), ce_step, token_batch(0))
    with pytest.raises(
        ChunkError,
        match=r"trace with trace_step\(\.\.\., chunk=config\) and give twin=traced\.twin",
    ):
        chunk_pass(traced.gm, config=strict("layers.*"))
    with pytest.raises(ChunkError, match="have inputs of the same extents"):
        chunk_pass(traced.gm, config=strict("layers.*"), twin=traced.gm)


def test_a_loop_over_the_batch():
    """G18."""
    with pytest.raises(
        ChunkError, match=r"depend on the chunk dimension's extent.* in layers\.0, at"
    ):
        chunk(lambda x: torch.stack([row.tanh() for row in x]))


def test_a_dimension_that_an_extent_of_one_loses():
    """G18: the operators are the same, and give another number of dimensions."""
    with pytest.raises(
        ChunkError,
        match=r"depend on .*squeeze.* \[2, 6, 16\] in layers\.0, .*squeeze.* \[6, 16\] in",
    ):
        chunk(lambda x: x.squeeze().reshape(x.shape), extents=(2, 6))


def test_a_fixed_extent_that_a_chunk_does_not_have():
    """G10: the twin cannot be traced; the line is the model's."""
    with pytest.raises(
        ValueError, match=r"twin's inputs .* at .*test_refusals\.py:\d+: .*\n.*x\.shape\[i\]"
    ):
        chunk(lambda x: x.view(4, 6 * DIM).view(4, 6, DIM))


def test_a_fixed_extent_that_cuts_a_chunk_otherwise():
    """G10: the twin can be traced, but rows of a chunk would mix."""

    def fixed(x):
        return x + x.view(4, -1, DIM).mean(1, keepdim=True).mean(0)

    with pytest.raises(
        ChunkError, match=r"in layers\.0 has the full extent 4 as a fixed number: .* \[2, 6, 16\]"
    ):
        chunk(fixed)


@pytest.mark.gt_world("fake", size=2)
def test_a_collective_that_is_not_expert_parallel(gt_world):
    """G8: by its group."""
    group = r"over the process group '0' of ranks \[0, 1\]"
    with pytest.raises(
        ChunkError, match=rf"all_reduce.* {group} .* inside layers\.0\. Only .* tensor parallelism"
    ):
        chunk(lambda x: funcol.wait_tensor(funcol.all_reduce(x.detach(), "sum", "0")) + x)


def test_a_forward_that_reads_the_backward():
    """G8: for example a recomputed node that nobody has marked as the backward's."""
    config = strict("layers.*")
    traced = trace_step(net(chunkable.Dense)(), ce_step, token_batch(0), chunk=config)
    for gm in (traced.gm, traced.twin):
        untold = next(
            node for node in gm.graph.nodes if node.target is torch.ops.aten.gelu_backward.default
        )
        del untold.meta["autograd_backward"]
    message = (
        r"gelu_backward .* in the forward of layers\.0 reads .*layers\.0\.w2.* of the "
        r"backward: .*; mark recom"
    )
    with pytest.raises(ChunkError, match=message):
        chunked(traced, config)


def test_attention_by_sequence():
    """G3: where a MoE layer holds attention after all."""

    class Attentive(nn.Module):
        def __init__(self, attend) -> None:
            super().__init__()
            self.moe = Block(attend)

        def forward(self, x):
            return x + self.moe(x)

    def plain(x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x

    for attend in (lambda x: F.scaled_dot_product_attention(x, x, x), plain):
        words = (
            r"(every row to every other one|attends over dimension) .* inside layers\.0\.moe: "
            r".* sequence"
        )
        with pytest.raises(ChunkError, match=words):
            chunk(
                root="layers.*.moe",
                chunk_dim="sequence",
                model=Net(lambda attend=attend: Attentive(attend)),
            )


def test_an_error_ends_with_what_was_asked_for():
    """G9: the pattern, the dimension, its extent and the number of chunks, whatever is wrong."""
    with pytest.raises(ChunkError) as refused:
        chunk(lambda x: x + x.view(4, -1, DIM).mean(1, keepdim=True).mean(0))
    assert refused.value.__notes__ == [
        "while layers.* was chunked by batch, of extent 4, into 2 chunks"
    ]


@pytest.mark.parametrize("degree", [2, 8])
def test_tensor_parallelism(degree):
    """G3: by its degree, before anything is traced."""
    with pytest.raises(
        ChunkError,
        match=(
            rf"layers\.\*\.moe .* tensor-parallel degree of {degree}: .*; chunk with a degree "
            rf"of 1"
        ),
    ):
        construct_default_graph_passes(
            n_layers=2, chunk=ChunkConfig("layers.*.moe"), tensor_parallel_degree=degree
        )
    construct_default_graph_passes(n_layers=2, tensor_parallel_degree=degree)
    construct_default_graph_passes(
        n_layers=2, chunk=ChunkConfig("layers.*.moe"), tensor_parallel_degree=1
    )


class Outward(Net):
    """Uses what its block keeps."""

    def __init__(self, keep, use) -> None:
        super().__init__(lambda: Block(self.note))
        self.keep, self.use = keep, use

    def note(self, x):
        self.kept = self.keep(x)
        return x

    def forward(self, tokens):
        return self.use(super().forward(tokens), self.kept)


@pytest.mark.parametrize(
    ("keep", "use", "message"),
    [
        (
            lambda x: x.square().mean(),
            lambda y, kept: y + kept,
            "does not have the chunk dimension",
        ),
        (lambda x: x[x[..., 0] > 0], lambda y, kept: y + kept.sum(), "known only at run time"),
        (lambda x: x.argmax().item(), lambda y, kept: y * kept, "is no tensor"),
        (
            lambda x: x.transpose(0, 1).tanh(),
            lambda y, kept: y + kept.sum(),
            "in place 1; eager chunking .* along 0",
        ),
        (
            lambda x: x.transpose(1, 2).tanh(),
            lambda y, kept: y + kept.sum(),
            r"strides \[96, 1, 16\]; .* make it",
        ),
        (
            lambda x: x.flatten(0, 1) @ x.flatten(0, 1).T,
            lambda y, kept: y + kept.sum(),
            "every row to every other one",
        ),
    ],
    ids=["no dimension", "data-dependent", "scalar", "another place", "strides", "two dimensions"],
)
def test_values_that_leave_a_region(keep, use, message):
    """G6, G17: named with the module and who uses them."""
    with pytest.raises(ChunkError, match=message) as refused:
        chunk(model=Outward(keep, use))
    assert "layers.0" in str(refused.value)


def test_a_size_that_leaves_a_region():
    """G17: it is that of the whole."""
    gm = chunk(model=Outward(lambda x: x.shape[0], lambda y, kept: y.clamp(max=kept)))
    (outside,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default)
    assert outside.args[1:] == (None, 4)


def test_a_data_dependent_value_that_enters_a_region():
    """G17."""

    class Inward(Net):
        def forward(self, tokens):
            self.rows = tokens.flatten()[tokens.flatten() > 3].float()
            return super().forward(tokens)

    model = Inward(lambda: Block(lambda x: x + (x.unsqueeze(-1) * model.rows).mean(-1)))
    with pytest.raises(
        ChunkError, match=r"extent that is known only at run time, so layers\.0 cannot read it"
    ):
        chunk(model=model)


def test_a_region_that_leaves_and_re_enters():
    """G17: another module's work, between two parts of a block."""

    class Between(Net):
        def __init__(self) -> None:
            super().__init__(lambda: Block(self.outside))

        def outside(self, x):
            return self.lm_head(x)[..., :DIM] + x

    with pytest.raises(
        ChunkError, match=r"fwd region of layers\.0 leaves and re-enters .* depends on .*lm_head"
    ):
        chunk(model=Between())
