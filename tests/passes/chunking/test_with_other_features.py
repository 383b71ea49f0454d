"""Chunking of nested graphs, offload copies, recomputed nodes and operators of several results.

That their bits are eager chunking's is tested in ``test_equals_eager_chunking``.
"""

import operator

import pytest
import torch
from torch import nn

from fixtures.chunking import Case, check_equals_eager, chunked, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import DIM, net
from fixtures.models.flex import Flex, FlexNet
from fixtures.models.loss import ce_step
from fixtures.rewritten_by_hand import offloaded, rematerialised
from pytest_gtrainer import dense_flex_attention, trace_step

aten = torch.ops.aten


def rewritten(model, config, rewrite=chunked, inputs=None):
    return rewrite(trace_step(model, ce_step, inputs or token_batch(0), chunk=config), config)


@pytest.mark.second_tier
def test_nested_graphs_of_flex_attention():
    """I2, H1: the mask is cut along the batch, and nested graphs are those of a chunk."""
    with dense_flex_attention():
        gm = rewritten(FlexNet(Flex), strict("layers.*"), inputs=token_batch(0, 4, 32))
    nested = [module for name, module in gm.named_modules() if name.endswith("_of_chunk")]
    assert nested
    shapes = {
        tuple(n.meta["val"].shape)
        for m in nested
        for n in m.graph.nodes
        if torch.is_tensor(n.meta.get("val"))
    }
    assert (2, 32) in shapes
    assert (4, 32) not in shapes


def test_offload_copies():
    """G20: written by hand into both twins, they are dataflow like any other."""
    gm = rewritten(net(chunkable.Dense)(), strict("layers.*", num_chunks=4), offloaded)
    copies = [
        n
        for n in gm.graph.nodes
        if n.target is aten.clone.default and "chunk_id" in n.meta.get("custom", {})
    ]
    assert len(copies) == 8


def test_recomputed_nodes():
    """G12: behind the remat pass, which the pipeline runs on the twin, too."""
    gm = rewritten(
        net(chunkable.Dense, chunkable.Dense)(), strict("layers.*", num_chunks=4), rematerialised
    )
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
    items = [
        node for node in gm.graph.nodes if node.target is operator.getitem and "_chunk" in node.name
    ]
    assert items


class Weighing(nn.Module):
    """Its operands are constants of the graph: one of the model, and one of the batch in another
    dtype or value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(DIM, DIM)

    def forward(self, x):
        weight = self.w.weight * torch.tensor([0.5, 2.0] * (DIM // 2))
        return x + x @ weight / torch.tensor([float(len(x))]) + torch.tensor([[[3.0]]] * len(x))


class WeighedNet(chunkable.Net):
    def forward(self, tokens):
        return super().forward(tokens) * torch.tensor(1.5)


def test_constants_of_the_graph():
    """G4: what is the same at either extent stands there once; what is not, by value or extent, is
    each chunk's own.
    """
    gm = check_equals_eager(
        Case(model=lambda: WeighedNet(Weighing), config=strict("layers.*", num_chunks=4))
    )
    constants = [node for node in gm.graph.nodes if node.op == "get_attr"]
    values = {
        str(node.target): getattr(gm, str(node.target)).flatten().tolist() for node in constants
    }
    assert len(values) == len(constants)
    own = {name: values.pop(name) for name in [*values] if name.endswith("_of_chunk")}
    assert sorted(own.values()) == [[2.0], [3.0, 3.0]]
    assert sorted(values.values()) == [[0.5, 2.0] * (DIM // 2), [1.5]]
