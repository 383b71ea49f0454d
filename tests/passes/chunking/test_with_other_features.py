"""Chunking beside FlexAttention, a chunked loss, gradients from inside and outside, offloading and recomputing."""

import operator

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy

from fixtures.chunking import Case, check_equals_eager, chunked, strict, token_batch
from fixtures.flex_attention import flex_attention_backward_on_cpu
from fixtures.models import chunkable
from fixtures.models.chunkable import DIM, HEADS, Net, net
from fixtures.models.chunked_loss import chunked_ce_step
from pytest_gtrainer import apply_graph_passes, bind_options, chunk_pass, selective_activation_remat_pass
from pytest_gtrainer.conventions import direction, node_fqn

aten = torch.ops.aten


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.wo = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, block_mask):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.wo(flex_attention(q, k, v, block_mask=block_mask).transpose(1, 2).flatten(2))


class FlexNet(Net):
    """Tokens see earlier ones of their own document; a document ends behind each token 3."""

    def forward(self, tokens):
        x, document = self.tok_embeddings(tokens), (tokens == 3).cumsum(1)

        def same_document(b, h, q, kv):
            return (q >= kv) & (document[b, q] == document[b, kv])

        size = tokens.shape[1]
        mask = create_block_mask(same_document, len(tokens), None, size, size, device="cpu", BLOCK_SIZE=16)
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(x)


def test_flex_attention_with_a_block_mask():
    """I2, H1: the mask is cut along the batch, and nested graphs are those of a chunk."""
    with flex_attention_backward_on_cpu():
        gm = check_equals_eager(
            Case(model=lambda: FlexNet(Flex), config=strict("layers.*"), batch=lambda s: token_batch(s, 4, 32), steps=2)
        )
    nested = [module for name, module in gm.named_modules() if name.endswith("_of_chunk")]
    assert nested
    shapes = {tuple(n.meta["val"].shape) for m in nested for n in m.graph.nodes if torch.is_tensor(n.meta.get("val"))}
    assert (2, 32) in shapes
    assert (4, 32) not in shapes


@pytest.mark.parametrize(("root", "block"), [("layers.*", chunkable.Attention), ("layers.*.moe", chunkable.Bare)])
def test_a_chunked_loss(root, block):
    """G16: the loss, its backward in the forward and its annotation leave autograd's additions alone."""
    check_equals_eager(Case(model=net(block), config=strict(root, num_chunks=4), step=chunked_ce_step(4), steps=2))


def saved_activations(gm):
    """Forward nodes of blocks that the backward reads."""
    nodes = [node for node in gm.graph.nodes if node_fqn(node).startswith("layers.") and direction(node) == "fwd"]
    return [node for node in nodes if any(direction(user) == "bwd" for user in node.users)]


def offload(gm, saved):
    """A saved value leaves for the other memory behind the forward and comes back before its backward reader."""
    readers = [user for user in saved.users if direction(user) == "bwd"]
    with gm.graph.inserting_after(saved):
        away = gm.graph.call_function(aten.clone.default, (saved,))
    with gm.graph.inserting_before(readers[0]):
        back = gm.graph.call_function(aten.clone.default, (away,))
    for node in (away, back):
        node.meta = {"val": saved.meta["val"], "custom": dict(saved.meta["custom"])}
    back.meta["autograd_backward"] = True
    for reader in readers:
        reader.replace_input_with(saved, back)
    gm.recompile()


def test_offload_copies():
    """G20: written by hand into both twins, they are dataflow like any other."""

    def offloaded(traced, config):
        for gm in (traced.gm, traced.twin):
            offload(gm, next(node for node in saved_activations(gm) if node.target is aten.view.default))
        return chunked(traced, config)

    config = strict("layers.*", num_chunks=4)
    gm = check_equals_eager(Case(model=net(chunkable.Dense), config=config, rewrite=offloaded))
    copies = [n for n in gm.graph.nodes if n.target is aten.clone.default and "chunk_id" in n.meta.get("custom", {})]
    assert len(copies) == 8


def test_recomputed_nodes():
    """G12: behind the remat pass, which the pipeline runs on the twin, too."""

    def rematerialised(traced, config):
        for gm in (traced.gm, traced.twin):
            for node in gm.graph.nodes:
                if node_fqn(node).startswith("layers.") and node.target in (aten.gelu.default, aten.view.default):
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        passes = [bind_options(selective_activation_remat_pass), bind_options(chunk_pass, config=config)]
        return apply_graph_passes(traced.gm, traced.example_inputs, passes, twin=traced.twin)

    model, config = net(chunkable.Dense, chunkable.Dense), strict("layers.*", num_chunks=4)
    gm = check_equals_eager(Case(model=model, config=config, rewrite=rematerialised))
    again = [node for node in gm.graph.nodes if "recomputed" in node.name]
    assert {node.meta["custom"]["chunk_id"] for node in again} == {0, 1, 2, 3}


def test_values_that_are_lists_and_sizes():
    """G20: operators of several results cross boundaries item by item."""

    class Splitting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(DIM, DIM)

        def forward(self, x):
            low, high = self.w(x).chunk(2, -1)
            top = (x.topk(3, -1).values).sum(-1, keepdim=True)
            return x + torch.cat((high, low), -1) * top

    gm = check_equals_eager(Case(model=net(Splitting), config=strict("layers.*", num_chunks=4)))
    items = [node for node in gm.graph.nodes if node.target is operator.getitem and "_chunk" in node.name]
    assert items
