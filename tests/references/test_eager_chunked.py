"""Eager chunking: what is wrapped, what runs, what is refused."""

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fixtures.models import deepseek_v3
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ActivationCheckpointConfig,
    ChunkConfig,
    ChunkError,
    ChunkWarning,
    assert_bitwise_different,
    assert_bitwise_equal,
    eager_chunked,
    trace_step,
)
from pytest_gtrainer.graph.nodes import chunk_annotation, direction, node_fqn
from pytest_gtrainer.references.config import checkpoint_layers


class Block(nn.Module):
    """Notes the extents that its forward sees."""

    def __init__(self, join=lambda x: x) -> None:
        super().__init__()
        self.join, self.seen = join, []

    def forward(self, x, mask=None, positions=None, rope=None):
        self.seen.append(
            [None if value is None else tuple(value.shape) for value in (x, mask, positions, rope)]
        )
        self.contiguous = x.is_contiguous()
        return self.join(x * 2)


class Net(nn.Module):
    def __init__(self, block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])


BATCH = ChunkConfig("layers.*", num_chunks=2)
X = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)


def chunked(config=BATCH, **options):
    block = Block(**options)
    eager_chunked(Net(block), config)
    return block


def test_the_forward_runs_once_per_chunk_in_order_and_outputs_are_joined():
    """I1."""
    block = chunked()
    assert_bitwise_equal(block(X), X * 2)
    assert_bitwise_different(
        torch.cat(X.chunk(2)[::-1]) * 2, X * 2, what="chunks joined in another order"
    )
    assert [extents[0] for extents in block.seen] == [(2, 6, 8), (2, 6, 8)]


def test_chunks_are_contiguous():
    """I1: also where they are cut from the middle, or from a transposed tensor."""
    block = chunked()
    block(X.transpose(0, 1).contiguous().transpose(0, 1))
    assert block.contiguous


def test_gradients_of_chunks_are_contiguous_where_they_are_cut_from_the_middle():
    """G5: the gradient of a chunk of the sequence is strided, so both sides copy it."""
    contiguous = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            contiguous.append(gradient.is_contiguous())
            return gradient * 2

    x = X.clone().requires_grad_()
    layer = nn.ModuleDict({"moe": Block(Doubled.apply)})
    eager_chunked(Net(layer), ChunkConfig("layers.*.moe", chunk_dim="sequence", num_chunks=2))
    loss = (layer["moe"](x) * X).sum()
    contiguous.clear()  # what the trial on fake tensors has noted
    loss.backward()
    assert contiguous == [True, True], (
        "a chunk's backward has a strided gradient, for which other operators may run"
    )


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_constant_that_counts_rows_is_told_though_all_its_rows_are_equal(by_rows, recwarn):
    """G3: 1 / 4 in every row of the whole, 1 / 2 in every row of a chunk."""
    chunked(
        join=lambda x: x * torch.tensor([1 / len(x) if by_rows else 0.5] * len(x))[:, None, None]
    )(X)
    warned = [str(warning.message) for warning in recwarn if warning.category is ChunkWarning]
    assert bool(warned) == by_rows, (
        f"the constant of a chunk was not compared with that of the whole: {warned}"
    )


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_and_lists_are_joined_item_by_item(kind):
    """I1."""
    joined = chunked(join=lambda x: kind((x, x + 1)))(X)
    assert type(joined) is kind
    assert_bitwise_equal(list(joined), [X * 2, X * 2 + 1])


def test_another_output_is_a_type_error():
    """I1."""
    with pytest.raises(TypeError, match=r"layers\.0 returns a dict"):
        chunked(join=lambda x: {"x": x})(X)


def test_a_scalar_output_is_refused():
    """I1: there is nothing to join it along."""
    with pytest.raises(
        ValueError,
        match=r"layers\.0 returns a tensor of 0 dimensions, which has no batch dimension",
    ):
        chunked(join=torch.sum)(X)


class Log:
    """An object that a module may hold: no module, no container."""

    def __init__(self) -> None:
        self.means, self.by_name = [], {"last": []}


def test_objects_that_a_module_holds_keep_nothing_of_the_trial_forward():
    """It runs on a copy, on fake tensors: lists of other objects, in dicts too, would have one."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log, self.table = Log(), {"all": []}

        def forward(self, x):
            for kept in (self.log.means, self.log.by_name["last"], self.table["all"]):
                kept.append(x.mean())
            return x * 2

    with eager_chunked(net := Net(Logging()), BATCH):
        net.layers[0](X)
    block = net.layers[0]
    means = [part.mean() for part in X.chunk(2)]
    assert [block.log.means, block.log.by_name["last"], block.table["all"]] == [means] * 3


class Numbered(nn.Module):
    """Meets the numbers of its rows, which only twins of its forward see."""

    def forward(self, x, positions=None):
        return x * torch.arange(x.shape[0])[:, None, None]


def test_a_checkpointed_layer_is_judged_as_without_a_checkpoint():
    """G15: what stands for its forward is no method."""
    net = Net(Numbered())
    checkpoint_layers(net, ActivationCheckpointConfig(preserve_rng_state=False))
    with (
        eager_chunked(net, BATCH),
        pytest.warns(ChunkWarning, match="brings into rows what depends on their number"),
    ):
        net.layers[0](X)


def test_a_forward_that_is_another_objects_is_followed_while_it_runs():
    """It has no module of which a copy could run."""
    net, seen = Net(Block()), []

    class Other:
        def forward(self, x):
            seen.append(tuple(x.shape))
            return x * 2

    net.layers[0].forward = Other().forward
    with eager_chunked(net, BATCH):
        assert_bitwise_equal(net.layers[0](X), X * 2)
    assert seen == [(2, 6, 8)] * 2


@pytest.mark.parametrize(
    ("turned", "words"),
    [
        (
            lambda x: x.transpose(0, 1) * 2,
            r"returns float32\[6, 2, 8\], which has the batch in dimension 1",
        ),
        (
            lambda x: x.sum(0),
            r"returns float32\[6, 8\], which has the batch nowhere, as far as can be seen",
        ),
        (
            lambda x: (x, x.mT, x.sum(0)),
            r"returns float32\[6, 8\] in place 2, which has the batch nowhere",
        ),
    ],
    ids=["elsewhere", "nowhere", "the third"],
)
def test_rows_that_a_followed_forward_returns_elsewhere_are_refused(turned, words):
    """G6: joined along dimension 0 they would be something else, of a shape that another operator
    may take.
    """
    net = Net(Block())

    class Other:
        def forward(self, x):
            return turned(x)

    net.layers[0].forward = Other().forward
    with eager_chunked(net, BATCH), pytest.raises(ChunkError, match=words):
        net.layers[0](X)


def test_positions_are_followed_along_the_batch():
    """G3: in a forward without a twin, rows of what stands beside the activation."""

    class Turned(nn.Module):
        def forward(self, x, positions):
            return x + positions.flip(0)[..., None] if x.isfinite().all() else x

    with (
        eager_chunked(net := Net(Turned()), BATCH),
        pytest.raises(ChunkError, match=r"flip.* reverses dimension 0"),
    ):
        net.layers[0](X, torch.zeros(4, 6))


def test_wrapping_twice_is_wrapping_once():
    """I1."""
    net = Net(Block())
    first, second = eager_chunked(net, BATCH), eager_chunked(net, BATCH)
    net.layers[0](X)
    assert len(net.layers[0].seen) == 2
    second.remove()
    net.layers[0](X)
    assert len(net.layers[0].seen) == 4
    first.remove()
    net.layers[0](X)
    assert len(net.layers[0].seen) == 5


def test_unwrapping_restores_the_module():
    """I1: a forward that the instance had is put back."""
    net = Net(Block())
    net.layers[0].forward = own = net.layers[0].forward
    with eager_chunked(net, BATCH):
        assert net.layers[0].forward is not own
    assert net.layers[0].forward is own
    del net.layers[0].forward
    with eager_chunked(net, BATCH):
        pass
    assert "forward" not in net.layers[0].__dict__


@pytest.mark.parametrize("changes", [{"num_chunks": 4}, {"chunk_dim": "sequence"}], ids=str)
def test_another_chunking_of_a_chunked_module_is_refused(changes):
    net, config = Net(nn.ModuleDict({"moe": Block()})), ChunkConfig("layers.*.moe", num_chunks=2)
    with (
        eager_chunked(net, config),
        pytest.raises(ValueError, match=r"moe runs in 2 chunks by batch already"),
    ):
        eager_chunked(net, replace(config, **changes))


def test_no_match_is_an_error():
    """G2."""
    with pytest.raises(
        ValueError, match=r"'blocks\.\*' matches no module of the model; outermost are layers"
    ):
        eager_chunked(Net(Block()), ChunkConfig("blocks.*"))


def test_what_beside_the_activation_is_cut():
    """I2: masks and positions with a batch are chunked.

    A rotary cache is not, though its first extent may be that of the batch.
    """
    block = chunked()
    rows = 6  # three rows a chunk, so that they are not as many as chunks
    block(
        torch.zeros(rows, 6, 8),
        torch.zeros(rows, 1, 6, 6),
        torch.zeros(rows, 6),
        torch.zeros(rows, 6),
    )
    assert block.seen == [[(3, 6, 8), (3, 1, 6, 6), (3, 6), (6, 6)]] * 2


def test_positions_go_to_the_chunk_of_their_rows():
    """I2: the numbers, not the extents alone."""

    class Shifted(nn.Module):
        def forward(self, x, positions):
            return x + positions[..., None]

    positions = torch.arange(24.0).view(4, 6)
    with eager_chunked(net := Net(Shifted()), BATCH):
        assert_bitwise_equal(net.layers[0](X, positions), X + positions[..., None])


def test_what_beside_the_activation_is_shared():
    """I2: what has no batch, or one that is broadcast."""
    block = chunked()
    block(X, torch.zeros(6, 6), torch.zeros(1, 6))
    assert block.seen == [[(2, 6, 8), (6, 6), (1, 6), None]] * 2


@pytest.mark.parametrize(
    ("x", "positions", "seen"),
    [
        (X, torch.zeros(6), (6,)),
        (X, torch.zeros(4), (2,)),
        (X[:, :4], torch.zeros(1, 4), (1, 4)),
        (X[:, :4], torch.zeros(4, 4), (2, 4)),
        (X[:, :4], torch.zeros(1), (1,)),
    ],
    ids=["of the sequence", "of the batch", "square, shared", "square, cut", "square, one for all"],
)
def test_positions_of_one_or_two_dimensions(x, positions, seen):
    """I2: the ways out of an ambiguous call, and the calls beside it that are clear."""
    block = chunked()
    block(x, None, positions)
    assert [arguments[2] for arguments in block.seen] == [seen] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), r"layers\.0 was called with \(x: int\), .* an activation with that dimension"),
        ((X, "causal"), r"\(x: float32\[4, 6, 8\], mask: str\), which cannot be chunked by batch"),
        ((X, torch.zeros(3, 1, 6, 6)), "the first extent of mask is neither the batch's nor 1"),
        (
            (X[:, :4], torch.zeros(4, 4)),
            "whether mask has a batch dimension is unclear: give it as 4-D",
        ),
        (
            (X[:, :4], None, torch.zeros(4)),
            r"whether positions has a batch .* give it as 2-D, \[1, sequence\] or",
        ),
        (
            (X[:, :4], torch.zeros(4)),
            "whether mask has a batch dimension is unclear: give it as 2-D",
        ),
        (
            (X[:3],),
            r"layers\.0: extent 3 of the batch dimension does not divide into 2 chunks; .* "
            r"divisors of 3",
        ),
    ],
    ids=[
        "no activation",
        "not a mask",
        "another extent",
        "ambiguous",
        "positions",
        "a row",
        "indivisible",
    ],
)
def test_calls_that_cannot_be_chunked(arguments, message):
    """I2, G9."""
    with pytest.raises(ValueError, match=message):
        chunked()(*arguments)


@pytest.mark.gt_world("fake", size=2)
def test_an_activation_that_is_sharded_is_refused_by_its_mesh(gt_mesh):
    """I2: tensor parallelism; torch would cut it, with a collective for each chunk."""
    x = DTensor.from_local(X, gt_mesh, [Shard(0)], run_check=False)
    with pytest.raises(
        ValueError, match=r"layers\.0 .*: x is a DTensor, \(Shard\(dim=0\),\) over DeviceMesh\("
    ):
        chunked()(x)


def test_a_call_without_arguments_cannot_be_chunked():
    """I2: of a module that does without."""
    block = nn.Identity()
    block.forward = lambda x=None: x
    eager_chunked(Net(block), BATCH)
    with pytest.raises(
        ValueError, match=r"layers\.0 was called with \(\), .* an activation with that dimension"
    ):
        block()


def test_a_moe_layer_takes_one_activation():
    """I2."""
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"moe": Block()})])})
    eager_chunked(net, ChunkConfig("layers.*.moe", "sequence", 3))
    net.layers[0].moe(X)
    assert [extents[0] for extents in net.layers[0].moe.seen] == [(4, 2, 8)] * 3
    with pytest.raises(ValueError, match="a MoE layer takes one activation and nothing else"):
        net.layers[0].moe(X, torch.zeros(6, 6))


def test_a_trace_tells_the_parts_of_an_eagerly_chunked_module():
    """I3: the forward goes chunk by chunk, the backward from the last chunk to the first."""

    class Around(Net):
        def forward(self, x):
            return self.layers[0](x.exp()).sum()

    net = Around(nn.Linear(8, 8))
    with eager_chunked(net, BATCH):
        traced = trace_step(net, lambda model, x: model(x), (X,))
    chunk_words = {"fwd": [], "bwd": []}
    for node in (node for node in traced.gm.graph.nodes if node.op == "call_function"):
        if (found := chunk_annotation(node.meta.get("custom", {}))) is not None:
            assert (found.fqn, found.producer, node_fqn(node)) == (
                "layers.0",
                "eager",
                "layers.0",
            ), node.name
            chunk_words[direction(node)].append(" ".join(found.words()))
        else:
            assert not node_fqn(node).startswith("layers"), (
                f"{node.name} of the chunked module does not say so"
            )
    assert list(dict.fromkeys(chunk_words["fwd"])) == [
        "split_boundary eager",
        "0 eager",
        "1 eager",
        "materialization eager",
    ]
    assert [word for word in dict.fromkeys(chunk_words["bwd"]) if word[0].isdigit()] == [
        "1 eager",
        "0 eager",
    ]


@pytest.mark.second_tier
def test_its_annotations_survive_tracing():
    """I3."""
    with torch.device("meta"):
        model = deepseek_v3.DeepSeekV3(
            replace(deepseek_v3.FLAVORS["debug"], moe=deepseek_v3.MoEConfig(n_experts=2))
        )
    with eager_chunked(model, ChunkConfig("layers.*.moe", num_chunks=2)):
        traced = trace_step(model, ce_step, (torch.zeros(2, 4, dtype=torch.int64),) * 2)
    customs = [
        node.meta["custom"]
        for node in traced.gm.graph.nodes
        if "chunk_id" in node.meta.get("custom", {})
    ]
    assert {custom["chunked_region_fqn"] for custom in customs} == {"layers.1.moe", "layers.2.moe"}
    assert {custom["chunk_id"] for custom in customs} == {0, 1}
    assert {
        (custom["chunked_region_producer"], custom["chunked_region_role"]) for custom in customs
    } == {("eager", "body")}
    assert all(custom["module_fqn"].startswith(custom["chunked_region_fqn"]) for custom in customs)


class Leaves(nn.Module):
    """Leaves what ``keep`` makes of its rows in attributes."""

    def __init__(self, keep):
        super().__init__()
        self.w, self.keep = nn.Linear(8, 8), keep
        self.kept, self.losses, self.aux = [], Log(), None
        self.cache = None

    def forward(self, x):
        y = self.w(x)
        if self.cache is None:
            self.cache = torch.ones(8)
        before = 0.0 if self.aux is None else self.aux.detach()
        self.keep(self, y)
        return y + self.cache * before


def keep_scalar(layer, y):
    layer.aux = y.square().mean()


def keep_in_list(layer, y):
    layer.kept.append(y.mean())


def keep_in_object(layer, y):
    layer.losses.means.append((y.mean(), "load"))


KEPT = {
    "a scalar": (keep_scalar, lambda layer: 2 * layer.aux),
    "rows": (lambda layer, y: setattr(layer, "rows", y.mean(-1)), lambda layer: layer.rows.shape),
    "in a list": (keep_in_list, lambda layer: sum(layer.kept)),
    "in a tuple in an object": (
        keep_in_object,
        lambda layer: torch.stack([loss for loss, _ in layer.losses.means]),
    ),
    "of a part": (
        lambda layer, y: setattr(layer.w, "aux", y.sum()),
        lambda layer: layer.w.aux.item(),
    ),
}


@pytest.mark.parametrize(("keep", "read"), KEPT.values(), ids=KEPT)
def test_what_the_last_chunk_leaves_in_an_attribute_cannot_be_read(keep, read):
    layer = Leaves(keep)
    chunking = eager_chunked(Net(layer), BATCH)
    for _ in range(2):
        layer(X)
        with pytest.raises(
            ChunkError, match=r"layers\.0 has run in 2 chunks and left float32\[.* in row_wise="
        ):
            read(layer)
    chunking.remove()
    read(layer)


def test_a_chunk_reads_what_the_chunk_before_it_has_left():
    """As without eager chunking: the state of a module goes from chunk to chunk, and step to step."""
    layer, reference = Leaves(keep_scalar), Leaves(keep_scalar)
    reference.load_state_dict(layer.state_dict())
    with eager_chunked(Net(layer), BATCH):
        outputs = [layer(X), layer(X)]
    for output in outputs:
        assert torch.equal(output, torch.cat([reference(X[:2]), reference(X[2:])]))
    assert torch.equal(layer.aux, reference.aux)


def test_what_an_attribute_has_had_before_or_without_a_gradient_stays():
    layer = Leaves(lambda layer, y: setattr(layer, "seen", y.detach().mean()))
    layer.before = layer.w.weight.sum()
    answered = replace(BATCH, row_wise=(BATCH.module_fqn,))
    with eager_chunked(Net(layer), BATCH):
        layer(X)
        assert float(layer.seen + layer.cache.sum() + layer.before)
    layer.keep = keep_scalar
    with eager_chunked(Net(layer), answered):
        layer(X)
        assert float(layer.aux)


def keep_unit_weight(layer, y):
    layer.unit = layer.w.weight / layer.w.weight.norm()


@pytest.mark.parametrize("is_normed", [False, True], ids=["by hand", "weight_norm"])
def test_what_is_made_of_parameters_alone_is_the_same_in_each_chunk(is_normed):
    layer = Leaves(lambda layer, y: None if is_normed else keep_unit_weight(layer, y))
    if is_normed:
        layer.w = torch.nn.utils.weight_norm(layer.w)
    with eager_chunked(Net(layer), BATCH):
        output = layer(X)
        made = layer.w.weight if is_normed else layer.unit
        loss = output.square().mean() + made.square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


class Switched(nn.Module):
    """Mixes rows only when it is called or set up in one way."""

    def __init__(self, mixes) -> None:
        super().__init__()
        self.mixes, self.layer, self.on = mixes, nn.Linear(8, 8), False
        self.norm = nn.BatchNorm1d(6)
        self.sizes, self.names, self.settings = [0], {"b"}, SimpleNamespace(on=False)
        self.options = {"on": False, "sizes": []}

    def forward(self, x, mask=None):
        x = self.layer(x)
        if self.mixes == "norm":
            return self.norm(x)
        return x - x.mean(0, keepdim=True) if self.mixes(self, x, mask) else x


LATER = {
    "training": ("norm", lambda block: block.train()(X)),
    "training of a part": ("norm", lambda block: (block.norm.train(), block(X))),
    "a setting of a part": (
        lambda block, *_: block.layer.in_features == 9,
        lambda block: (setattr(block.layer, "in_features", 9), block(X)),
    ),
    "mask": (lambda *given: given[2] is not None, lambda block: block(X, torch.ones(4, 6))),
    "attribute": (lambda block, *_: block.on, lambda block: (setattr(block, "on", True), block(X))),
    "list": (lambda block, *_: block.sizes[0], lambda block: (block.sizes.insert(0, 1), block(X))),
    "dict": (
        lambda block, *_: block.options["on"],
        lambda block: (block.options.update(on=True), block(X)),
    ),
    "set": (lambda block, *_: "a" in block.names, lambda block: (block.names.add("a"), block(X))),
    "list in a dict": (
        lambda block, *_: block.options["sizes"],
        lambda block: (block.options["sizes"].append(1), block(X)),
    ),
    "settings": (
        lambda block, *_: block.settings.on,
        lambda block: (setattr(block.settings, "on", True), block(X)),
    ),
    "extent": (lambda _, x, __: x.shape[1] > 6, lambda block: block(torch.cat([X, X], 1))),
    "dtype": (
        lambda _, x, __: x.dtype == torch.float64,
        lambda block: block.double()(X.double()),
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_forward_of_another_way_is_judged(name):
    mixes, later = LATER[name]
    block = Switched(mixes).eval()
    eager_chunked(Net(block), BATCH)
    block(X)
    block(X)
    with pytest.raises(ChunkError, match=r"in layers\.0 (brings into rows|takes batch statistics)"):
        later(block)


def test_a_forward_that_mixes_rows_of_what_needs_a_gradient_is_refused():
    block = Switched(lambda _, x, mask: x.requires_grad).eval()
    eager_chunked(Net(block), BATCH)
    with torch.no_grad():
        block(X)
    with pytest.raises(ChunkError, match=r"in layers\.0 brings into rows"):
        block(X)


def test_an_input_that_needs_a_gradient_is_another_way():
    block, mask = Switched(lambda _, x, mask: mask.requires_grad).eval(), torch.ones(4, 6)
    eager_chunked(Net(block), BATCH)
    block(X, mask)
    with pytest.raises(ChunkError, match=r"in layers\.0 brings into rows"):
        block(X, mask.requires_grad_())


def test_a_frozen_parameter_is_another_way():
    block = Switched(lambda _, x, mask: not x.requires_grad).eval()
    eager_chunked(Net(block), BATCH)
    block(X)
    block.layer.requires_grad_(False)
    with pytest.raises(ChunkError, match=r"in layers\.0 brings into rows"):
        block(X)


def test_a_forward_of_one_way_is_judged_once():
    class Counts(nn.Module):
        def forward(self, x):
            return x * x.shape[0]

    block = Counts()
    eager_chunked(Net(block), BATCH)
    with warnings.catch_warnings(record=True) as judged:
        warnings.simplefilter("always")
        for _ in range(3):
            block(X)
    assert [each.category for each in judged] == [ChunkWarning]


def test_a_module_without_operators_is_left_as_it_is():
    class Same(nn.Module):
        def forward(self, x):
            return x

    same = Same()
    eager_chunked(Net(same), BATCH)
    assert_bitwise_equal(same(x=X), X)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((None, BATCH), "model is None: give an nn.Module"),
        ((Net(Block()), "layers.*"), "config is 'layers.*': give a ChunkConfig"),
    ],
)
def test_another_type_is_refused_by_name(given, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        eager_chunked(*given)
