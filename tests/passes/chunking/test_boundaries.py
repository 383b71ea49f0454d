"""Boundaries of chunks: values that all share, values that are cut or joined, values between
chunks.
"""

import gc
import operator
import re
import sys

import pytest
import torch
from torch import nn

from fixtures.chunking import Case, check_equals_eager, chunked, strict, token_batch
from fixtures.models import chunkable, deepseek_v3
from fixtures.models.chunkable import DIM, Net, net
from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.loss import ce_step
from pytest_gtrainer import MixedPrecisionPolicy, data_parallel, trace_step
from pytest_gtrainer._torch.chunking import is_engine_addition, symbols_of
from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from pytest_gtrainer.graph.nodes import (
    BODY,
    MATERIALIZATION,
    SPLIT_BOUNDARY,
    chunk_annotation,
    direction,
    node_fqn,
)

aten = torch.ops.aten


def rewritten(model, config, inputs):
    """The traced step, and its chunked graph."""
    traced = trace_step(model, ce_step, inputs, chunk=config)
    return traced, chunked(traced, config)


def annotation_of(node):
    return chunk_annotation(node.meta.get("custom") or {})


def with_role(gm, role):
    return [
        node
        for node in gm.graph.nodes
        if (found := annotation_of(node)) is not None and found.role == role
    ]


def of_parameters_alone(traced, gm):
    """Forward nodes that only parameters reach: their gathers, waits, casts and views."""
    found = set(list(gm.graph.find_nodes(op="placeholder"))[: len(traced.parameter_fqns)])
    for node in gm.graph.nodes:
        sources = node.all_input_nodes
        if (
            node.op == "call_function"
            and direction(node) == "fwd"
            and sources
            and found.issuperset(sources)
        ):
            found.add(node)
    return [node for node in gm.graph.nodes if node in found]


@pytest.mark.gt_world("fake", size=2)
def test_what_is_of_parameters_alone_is_shared(gt_mesh):
    """G4: gathers and casts, also those that the module itself writes, stand there once, whatever
    N.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = data_parallel(net(chunkable.CastWeight, chunkable.Dense)(), gt_mesh, mp_policy=policy)
    traced, gm = rewritten(model, strict("layers.*", num_chunks=4), token_batch(0))
    before, after = (of_parameters_alone(traced, graph) for graph in (traced.gm, gm))
    assert [node.target for node in after] == [node.target for node in before]
    assert {ALL_GATHER, aten._to_copy.default, aten.t.default} <= {node.target for node in after}
    assert not [node for node in after if annotation_of(node)]


@pytest.mark.parametrize(
    ("root", "chunk_dim"), [("layers.*", "batch"), ("layers.*.moe", "sequence")]
)
def test_a_chunk_is_copied_only_where_a_view_is_not_contiguous(root, chunk_dim):
    """G5: a chunk of the batch is a view; a chunk of the sequence is copied once, contiguous."""
    _, gm = rewritten(net(chunkable.grouped_moe)(), strict(root, chunk_dim), token_batch(0))
    cut = with_role(gm, SPLIT_BOUNDARY)
    copies = [node for node in cut if node.target is aten.clone.default]
    views = [node for node in cut if node.target is operator.getitem]
    assert len(views) == 2 * len(
        [node for node in cut if node.target is aten.split_with_sizes.default]
    )
    message = "each part of a sequence is copied, a gradient's, too; a part of a batch is a view"
    assert [copy.args[0] for copy in copies] == (views if chunk_dim == "sequence" else []), message
    assert not [node for node in copies or views if not node.meta["val"].is_contiguous()]


class SummedNet(Net):
    """The gradient that enters its last block is expanded, and so not contiguous."""

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x.sum(1, keepdim=True).expand(-1, tokens.shape[1], -1))


def test_a_gradient_is_cut_along_the_batch_by_views():
    """G5: as the backward of a concatenation does, also where it is not contiguous."""
    _, gm = rewritten(SummedNet(chunkable.Dense), strict("layers.*"), token_batch(0))
    cut = [node for node in with_role(gm, SPLIT_BOUNDARY) if direction(node) == "bwd"]
    assert not [node for node in cut if node.target is aten.clone.default]
    assert [
        node
        for node in cut
        if node.target is operator.getitem and not node.meta["val"].is_contiguous()
    ]


class Gated(nn.Module):
    """A block that also reads a gate ``[batch, 1, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(DIM, DIM)

    def forward(self, x, mask):
        return x + self.w(x) * mask


class GatedNet(Net):
    def forward(self, tokens):
        x, mask = self.tok_embeddings(tokens), tokens[:, :1, None].float()
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(x)


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_in_a_row_hand_their_chunks_on(blocks):
    """G6: however many, the activation and its gradient are cut once and joined once; the gate is
    cut once for all.
    """
    config = strict("layers.*", num_chunks=4)
    _, gm = rewritten(GatedNet(*[Gated] * blocks), config, token_batch(0))
    joins, splits = with_role(gm, MATERIALIZATION), with_role(gm, SPLIT_BOUNDARY)
    assert [(node_fqn(node), direction(node)) for node in joins] == [
        (f"layers.{blocks - 1}", "fwd"),
        ("layers.0", "bwd"),
    ]
    assert len([node for node in splits if node.target is aten.split_with_sizes.default]) == 3


@pytest.mark.parametrize("block", [chunkable.Bare, chunkable.BareFirst])
@pytest.mark.parametrize("chunk_dim", ["batch", "sequence"])
def test_gradients_that_meet_outside_are_added_before_they_are_joined(block, chunk_dim):
    """G6: chunk by chunk, in the chunks they are in; only what comes from outside is cut."""
    _, gm = rewritten(net(block)(), strict("layers.*.moe", chunk_dim), token_batch(0))
    splits = [
        node
        for node in with_role(gm, SPLIT_BOUNDARY)
        if node.target is aten.split_with_sizes.default
    ]
    assert (len(splits), len(with_role(gm, MATERIALIZATION))) == (2, 2)


class PositionsFirst(nn.Module):
    """Has the batch in dimension 1 while it works, and views that: an extent before it may be any
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(DIM, DIM)

    def forward(self, x):
        h = self.w(x).transpose(0, 1).contiguous()
        return (
            (h.view(x.shape[1], x.shape[0], 2, -1).tanh() + 1)
            .view(h.shape)
            .transpose(0, 1)
            .contiguous()
        )


def test_a_view_may_have_the_batch_by_chance_in_front_of_the_chunk_dimension():
    """G10: as many positions as rows; a view that leaves them where they are cuts a chunk as it
    cuts the whole.
    """
    check_equals_eager(
        Case(
            model=net(PositionsFirst),
            config=strict("layers.*"),
            batch=lambda n: token_batch(n, 4, 4),
        )
    )


class Positions(nn.Module):
    """A linear layer over the positions: the gradient that leaves it is a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x):
        return self.w(x.mT).mT.contiguous()


@pytest.mark.gt_world("fake", size=6, mesh={"replicate": 2, "fsdp": 3}, rank=5)
def test_replicas_reduce_padded_gradients_once_a_chunk(gt_mesh):
    """G8: of hybrid sharding with uneven shards, a pad stands between the two collectives of a
    gradient.
    """
    model = data_parallel(net(chunkable.Dense)(), gt_mesh, mode="hybrid_shard")
    config = strict("layers.*")
    gm = chunked(
        trace_step(model, ce_step, token_batch(0), chunk=config, reuse_gathers=False), config
    )
    counts = {
        "outside": 2,
        "in chunks": 2 * 4,
    }  # of the two weights outside, and of four parameters of the block
    for collective in (ALL_REDUCE, REDUCE_SCATTER):
        found = gm.graph.find_nodes(op="call_function", target=collective)
        chunks = [node for node in found if "_chunk" in node.name]
        assert {"outside": len(found) - len(chunks), "in chunks": len(chunks)} == counts


def test_what_is_joined_is_contiguous_whatever_the_whole_was():
    """G5: the whole gradient was a transpose; its join is reported, and lies, as a concatenation
    gives it.
    """
    traced, gm = rewritten(Net(Positions), strict("layers.*"), token_batch(0))
    [joined] = [node for node in with_role(gm, MATERIALIZATION) if direction(node) == "bwd"]
    shape, whole = (
        joined.meta["val"].shape,
        [n.meta["val"] for n in traced.gm.graph.nodes if node_fqn(n) == "layers.0"],
    )
    assert [value for value in whole if value.shape == shape and not value.is_contiguous()]
    made = aten.cat.default([part.meta["val"] for part in joined.args[0]], joined.args[1])
    assert joined.meta["val"].stride() == made.stride() == (8 * DIM, DIM, 1)


class Thrice(Net):
    """Its block, and twice the model itself, read one activation."""

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        return self.lm_head(self.layers[0](x) + x.sin() + x.cos())


def test_a_partial_sum_of_gradients_that_something_else_reads_stays():
    """A pass may let two sums share one: what reads the sum so far gets it, and the whole sum is
    what it was.
    """
    torch.manual_seed(0)
    model, inputs, config = Thrice(chunkable.Dense), token_batch(0), strict("layers.*")
    traced = trace_step(model, ce_step, inputs, chunk=config)
    for graph in (traced.gm.graph, traced.twin.graph):
        partial, *_ = (node for node in graph.nodes if is_engine_addition(node))
        output = graph.output_node()
        with graph.inserting_before(output):
            reader = graph.call_function(aten.neg.default, (partial,))
        reader.meta.update(val=partial.meta["val"], autograd_backward=True)
        output.args = ((*output.args[0], reader),)
    given = [*(tensor.detach() for tensor in (*model.parameters(), *model.buffers())), *inputs]
    before, after = torch.fx.Interpreter(traced.gm).run(*given), chunked(traced, config)(*given)
    assert torch.equal(after[-1], before[-1]), "the sum so far, row by row"
    assert all(
        torch.allclose(one, other, atol=1e-6) for one, other in zip(before, after, strict=True)
    )


def test_copies_keep_their_module_and_direction():
    """G11: each also says its region, its role and, in a body, its chunk."""
    config = strict("layers.*", num_chunks=4)
    traced, gm = rewritten(net(chunkable.Dense, chunkable.WeightTwice)(), config, token_batch(0))
    given = {node.name: node for node in traced.gm.graph.nodes}
    bodies = with_role(gm, BODY)
    for node in bodies:
        name, chunk = re.fullmatch(r"(.+)_chunk(\d)", node.name).groups()
        assert (node_fqn(node), direction(node)) == (node_fqn(given[name]), direction(given[name]))
        assert annotation_of(node).chunk_id == int(chunk)
        assert node_fqn(node).startswith(annotation_of(node).fqn) or not node_fqn(node)
    assert len(bodies) == 4 * len({node.name.rpartition("_chunk")[0] for node in bodies})
    orders = {
        way: [annotation_of(node).chunk_id for node in bodies if direction(node) == way]
        for way in ("fwd", "bwd")
    }
    both = {way: list(dict.fromkeys(order)) for way, order in orders.items()}
    assert both == {"fwd": [0, 1, 2, 3], "bwd": [3, 2, 1, 0]}, (
        "chunks run as eagerly: the backward's the last first"
    )
    for node in [*with_role(gm, SPLIT_BOUNDARY), *with_role(gm, MATERIALIZATION)]:
        assert (annotation_of(node).chunk_id, annotation_of(node).fqn) == (
            None,
            node_fqn(node),
        )


def sizes_in(value):
    """Extents of values and integers among arguments, in any nesting."""
    found = set()
    torch.utils._pytree.tree_map(
        lambda item: found.update(
            item.shape if isinstance(item, torch.Tensor) else [item] if type(item) is int else []
        ),
        value,
    )
    return found


@pytest.mark.second_tier
def test_no_full_extent_is_left_in_a_body():
    """G10: nor one times the positions; no size of the model happens to be one."""
    batch, seq = 52, 6
    config = strict("layers.*", num_chunks=4)
    model = net(chunkable.Attention, chunkable.Factories, chunkable.plain_attention)()
    traced, gm = rewritten(model, config, token_batch(0, batch, seq))
    full = {batch, batch * seq, batch * chunkable.HEADS}
    given = [
        sizes_in([node.meta.get("val"), node.args, node.kwargs]) for node in traced.gm.graph.nodes
    ]
    assert set().union(*given) >= full
    for node in with_role(gm, BODY):
        assert not full & sizes_in([node.meta.get("val"), node.args, node.kwargs]), node


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2, mesh={"ep": 2})
def test_forward_values_reach_the_backward_of_their_own_chunk(gt_mesh):
    """G17: counts, split sizes and saved activations of data-dependent extents, none of which could
    be joined.
    """
    config = deepseek_v3.DeepSeekV3Config(
        dim=16,
        n_layers=1,
        n_dense_layers=0,
        n_heads=2,
        q_lora_rank=0,
        kv_lora_rank=8,
        ffn_dim=24,
        vocab_size=40,
        moe=deepseek_v3.MoEConfig(n_experts=4, ffn_dim=12),
    )
    model = deepseek_v3.DeepSeekV3(config)
    model.init_weights()
    _, gm = rewritten(
        apply_expert_parallel(model, gt_mesh["ep"]), strict("layers.*.moe"), token_batch(0, 4, 8)
    )
    handed = {"sizes": 0, "of unknown extent": 0}
    for node in with_role(gm, BODY):
        for source in node.all_input_nodes if direction(node) == "bwd" else ():
            if (home := annotation_of(source)) is not None and home.role == BODY:
                assert home.chunk_id == annotation_of(node).chunk_id, node
                value = source.meta["val"]
                handed["sizes"] += isinstance(value, torch.SymInt)
                handed["of unknown extent"] += isinstance(value, torch.Tensor) and not all(
                    type(extent) is int for extent in value.shape
                )
    assert all(handed.values()), handed


@pytest.mark.second_tier
def test_chunks_have_sizes_of_the_data_of_their_own():
    """G17: a size that one chunk's data makes is no other chunk's."""
    _, gm = rewritten(
        net(chunkable.MoEBlock)(), strict("layers.*.moe", num_chunks=2), token_batch(0)
    )
    made = {}
    for node in with_role(gm, BODY):
        for symbol in node.meta.get("unbacked_bindings") or ():
            made.setdefault(symbol, set()).add(annotation_of(node).chunk_id)
    assert len(made) >= 2
    assert all(len(chunks) == 1 for chunks in made.values()), made
    for node in with_role(gm, BODY):
        used = {symbol for symbol in symbols_of(node.meta.get("val")) if symbol in made}
        assert all(made[symbol] == {annotation_of(node).chunk_id} for symbol in used), node


def calls_of_chunking(layers):
    """Count the functions that one rewriting of so many blocks calls, those of C among them."""
    config = strict("layers.*")
    traced = trace_step(net(*[chunkable.Dense] * layers)(), ce_step, token_batch(0), chunk=config)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what a collection finalizes calls functions, too, and is other tests' rubbish
    sys.setprofile(count)
    try:
        chunked(traced, config)
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


@pytest.mark.second_tier
def test_the_work_grows_with_the_nodes():
    """G19: each further block costs as many calls as those before it; ``benchmarks.chunking`` takes
    the time.
    """
    calls_of_chunking(4)  # what is only done once
    few, some, many = (calls_of_chunking(layers) for layers in (4, 8, 12))
    assert many - some < 1.02 * (some - few)  # longer names of layers cost 0.7 %
