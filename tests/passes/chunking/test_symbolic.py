"""One symbolic trace instead of two static ones, and numbers for its symbols."""

import operator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from fixtures.chunking import Case, strict, train_chunked_graph, train_eager_chunked
from fixtures.models import chunkable
from fixtures.models.chunkable import DIM, net
from fixtures.models.flex import FlexBiased
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ChunkError,
    assert_bitwise_different,
    assert_bitwise_equal,
    chunk_pass,
    concretize_chunk_symbolic_shapes_pass,
    dense_flex_attention,
    trace_step,
)
from pytest_gtrainer._torch.chunking import symbols_of
from pytest_gtrainer.passes.chunking import twins
from pytest_gtrainer.tracing.step import FixedExtentError

aten = torch.ops.aten


def symbolic(model, config, inputs, step=ce_step):
    # FlexAttention compiles its scores, and traces at other extents would make more symbols
    torch.compiler.reset()
    return trace_step(model, step, inputs, dynamic_dims=config.dynamic_dims(inputs))


@pytest.mark.second_tier("attention", "moe", "flex")
@pytest.mark.parametrize(
    ("block", "config"),
    [
        (chunkable.Attention, strict("layers.*", num_chunks=4)),
        (chunkable.RunningMean, strict("layers.*")),
        (chunkable.MoEBlock, strict("layers.*.moe", "sequence")),
        (FlexBiased, strict("layers.*")),
    ],
    ids=["attention", "buffer", "moe by sequence", "flex attention"],
)
def test_a_symbolic_trace_is_its_own_twin(block, config):
    """H1: the same bits as eager chunking, and node for node the graph that two static
    traces give.
    """
    case = Case(model=net(block), config=config, steps=1)

    def by_symbols(traced, config):
        return chunk_pass(symbolic(case.new_model(), config, case.batch(0)).gm, config=config)

    with dense_flex_attention():
        actual, gm = train_chunked_graph(replace(case, rewrite=by_symbols))
        assert_bitwise_equal(actual, train_eager_chunked(case))
        other = train_eager_chunked(
            replace(case, config=replace(config, num_chunks=8 // config.num_chunks))
        )
        _, static = train_chunked_graph(case)
    assert_bitwise_different(actual, other, what="chunks of another extent")
    assert not leftover(gm)
    if block is not FlexBiased:  # a second compilation of its scores takes other ways
        assert [str(node.target) for node in gm.graph.nodes] == [
            str(node.target) for node in static.graph.nodes
        ]


@pytest.mark.second_tier
def test_nested_graphs_have_numbers():
    """H1: the graph of the scores reads a bias that has the batch."""
    config = strict("layers.*")
    with dense_flex_attention():
        gm = symbolic(net(FlexBiased)(), config, torch.randint(0, 40, (2, 6, 8)).unbind(0)).gm
    nested = [name for name, module in gm.named_children() if leftover(module)]
    assert len(nested) == 3
    made = concretize_chunk_symbolic_shapes_pass(gm)
    assert not leftover(made)
    assert {"sdpa_score0"} <= {*nested} <= {name for name, _ in made.named_children()}


def leftover(gm):
    """Symbols of inputs' extents that a graph refers to anywhere; those of data are born in it
    (H1).
    """
    nodes = [
        node
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    ]
    born = {symbol for node in nodes for symbol in node.meta.get("unbacked_bindings") or ()}
    found = {
        s for node in nodes for s in symbols_of([node.args, node.kwargs, node.meta.get("val")])
    }
    return found - born


def test_concretised_graphs_have_numbers_literals_and_strides():
    """H1, H2: a symbolic graph at the extents of its example is the static trace."""
    model, config = net(chunkable.plain_attention)(), strict("layers.*")
    inputs = torch.randint(0, 40, (2, 6, 8)).unbind(0)
    made = concretize_chunk_symbolic_shapes_pass(symbolic(model, config, inputs).gm)
    static = trace_step(model, ce_step, inputs).gm
    assert not leftover(made)
    assert_bitwise_equal(made(*model.parameters(), *inputs), static(*model.parameters(), *inputs))
    assert len(made.graph.nodes) == len(static.graph.nodes)
    for node, expected in zip(made.graph.nodes, static.graph.nodes, strict=True):
        if isinstance(expected.meta.get("val"), torch.Tensor):
            assert node.meta["val"].stride() == expected.meta["val"].stride()


@pytest.mark.second_tier
def test_the_extents_are_those_of_the_example_inputs():
    """H2: a graph that was traced at six rows is put at eight, and in chunks of four."""
    model, config = net(chunkable.plain_attention)(), strict("layers.*")
    six, eight = (torch.randint(0, 40, (2, batch, 8)).unbind(0) for batch in (6, 8))
    gm, given = symbolic(model, config, six).gm, [*model.parameters(), *eight]
    made, static = (
        concretize_chunk_symbolic_shapes_pass(gm, given),
        trace_step(model, ce_step, eight).gm,
    )
    for node, expected in zip(made.graph.nodes, static.graph.nodes, strict=True):
        assert getattr(node.meta.get("val"), "shape", None) == getattr(
            expected.meta.get("val"), "shape", None
        ), node
    parts = [
        node.meta["val"]
        for node in chunk_pass(gm, given, config=config).graph.nodes
        if "_chunk" in node.name
    ]
    assert {
        part.shape[0] for part in parts if isinstance(part, torch.Tensor) and part.ndim == 3
    } >= {4}
    assert not [part for part in parts if isinstance(part, torch.Tensor) and part.shape[:1] == (3,)]


def test_a_static_graph_is_left_alone():
    gm = trace_step(net(chunkable.Dense)(), ce_step, torch.randint(0, 40, (2, 6, 8)).unbind(0)).gm
    assert concretize_chunk_symbolic_shapes_pass(gm) is gm


def traced_under(check):
    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(DIM, DIM)

        def forward(self, x):
            check(x.shape[0])
            return self.w(x)

    return symbolic(
        net(Checking)(), strict("layers.*"), torch.randint(0, 40, (2, 6, 8)).unbind(0)
    ).gm


def test_a_guard_that_the_numbers_make_false():
    """H2: at six rows it is true, for a chunk of three it is not."""
    gm = traced_under(lambda batch: torch._check(batch % 2 == 0))
    concretize_chunk_symbolic_shapes_pass(gm)
    with pytest.raises(
        ChunkError, match=r"u0 = 3 .* Eq\(Mod\(u0, 2\), 0\), stated at .*test_symbolic\.py:\d+"
    ):
        chunk_pass(gm, config=strict("layers.*"))


@pytest.mark.second_tier("7")
@pytest.mark.parametrize("least", [2, 7])
def test_an_assertion_in_the_graph(least):
    """H2: it goes if it is true, and raises with its own message if not."""
    gm = traced_under(lambda batch: None)
    size = next(node for node in gm.graph.nodes if node.target is aten.sym_size.int)
    with gm.graph.inserting_after(size):
        fact = gm.graph.call_function(operator.ge, (size, least))
        fact.meta["val"] = size.meta["val"] >= least
    with gm.graph.inserting_after(fact):
        gm.graph.call_function(aten._assert_scalar.default, (fact, "enough rows"))
    if least == 2:
        assert not concretize_chunk_symbolic_shapes_pass(gm).graph.find_nodes(
            op="call_function", target=aten._assert_scalar.default
        )
    else:
        with pytest.raises(
            ChunkError, match=r"with u0 = 6 the assertion .*_assert_scalar.* is false: enough rows"
        ):
            concretize_chunk_symbolic_shapes_pass(gm)


@pytest.mark.second_tier("bounds1", "bounds3", "bounds5")
@pytest.mark.parametrize(
    ("bounds", "wrong"),
    [
        ({"min": 2, "max": 6}, ""),
        ({"min": 6}, ""),
        ({}, ""),
        ({"min": 2, "max": 5}, "6 is not within 2 and 5"),
        ({"min": 7}, "6 is not within 7 and None"),
        ({"max": 5}, "6 is not within None and 5"),
    ],
)
def test_a_range_in_the_graph(bounds, wrong):
    """H2: the smallest and the largest extent that it allows are allowed; either may be open."""
    gm = traced_under(lambda batch: None)
    size = next(node for node in gm.graph.nodes if node.target is aten.sym_size.int)
    with gm.graph.inserting_after(size):
        gm.graph.call_function(aten.sym_constrain_range.default, (size,), bounds)
    with pytest.raises(ChunkError, match=wrong) if wrong else nullcontext():
        concretize_chunk_symbolic_shapes_pass(gm)


def test_a_symbol_that_nothing_replaces():
    """H1: it raises, by node, where a value holds a symbol in a place that is not looked into."""
    gm = traced_under(lambda batch: None)
    (product, *_) = gm.graph.find_nodes(op="call_function", target=aten.addmm.default)
    product.meta["val"] = {"rows": product.meta["val"].shape[0]}
    with pytest.raises(ChunkError, match=r"addmm.* in layers\.0\.w still refers to u0 .* list"):
        concretize_chunk_symbolic_shapes_pass(gm)


def test_an_extent_that_does_not_divide():
    """G9."""
    gm = traced_under(lambda batch: None)
    with pytest.raises(
        ChunkError, match=r"layers\.\*, symbol u\d+: extent 6 .* does not divide into 4 chunks"
    ):
        chunk_pass(gm, config=strict("layers.*", num_chunks=4))


def test_a_dimension_that_nobody_named():
    """The graph knows its batch; nothing says which dimension is the sequence."""
    gm = traced_under(lambda batch: None)
    with pytest.raises(
        ChunkError, match="dynamic dimensions are batch: which of them is the sequence dimension"
    ):
        chunk_pass(gm, config=strict("layers.*.moe", "sequence"))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda x: x.view(6, 8 * DIM).view(6, 8, DIM), r"fixes the dynamic dimension batch to 6"),
        (
            lambda x: x * float(x.shape[0]),
            r"the number of a size that is not known at .*test_symbolic\.py:\d+",
        ),
    ],
    ids=["a fixed number in a view", "a decision of Python's"],
)
def test_extents_that_a_step_fixes(use, message):
    """G10: a specialised symbol is reported, not lost silently."""

    class Fixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(DIM, DIM)

        def forward(self, x):
            return use(self.w(x))

    with pytest.raises(FixedExtentError, match=message):
        symbolic(net(Fixing)(), strict("layers.*"), torch.randint(0, 40, (2, 6, 8)).unbind(0))


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        (torch.ones(2), False),
        (torch.tensor([1.0, 2.0]), True),
        (torch.ones(3), True),
        (torch.ones(2, dtype=torch.float64), True),
        (torch.ones(2, device="meta"), True),
        (1.0, False),
        (fx.GraphModule({}, fx.Graph()), False),
    ],
    ids=["equal", "a number", "shape", "dtype", "device", "no tensor", "a graph"],
)
def test_constants_differ_in_any_way(other, differ):
    """The other tensor on either side: on two devices nothing can be compared by torch itself."""
    for sides in ((torch.ones(2), other), (other, torch.ones(2))):
        assert twins._constants_differ(*sides) == differ


def test_without_values_constants_differ_by_their_layout():
    on_meta = torch.ones(2, device="meta")
    assert not twins._constants_differ(on_meta, torch.zeros(2, device="meta"))
    assert twins._constants_differ(on_meta, torch.ones(2, 1, device="meta"))


def test_of_two_dynamic_dimensions_the_one_of_the_chunks_is_cut():
    """The other keeps the extent of its example in the graph of one chunk, too."""
    model, ids = net(chunkable.Dense)(), torch.randint(0, 40, (2, 6, 8)).unbind(0)
    dims = {"batch": [(0, 0), (1, 0)], "sequence": [(0, 1), (1, 1)]}
    gm = trace_step(model, ce_step, ids, dynamic_dims=dims).gm
    for config, extents in (
        (strict("layers.*"), (3, 8)),
        (strict("layers.*.moe", "sequence"), (6, 4)),
    ):
        shapes = []
        for twin in twins.symbolic_twins(gm, None, config):
            assert not leftover(twin)
            given = [node for node in twin.graph.nodes if node.op == "placeholder"]
            shapes.append(tuple(given[-1].meta["val"].shape))
        assert shapes == [(6, 8), extents]


@pytest.mark.parametrize(
    ("sizes", "others", "differ"),
    [([2, 2], [2, 2], False), ([2, 2], [1, 1], True), ([2, 2], [2], True), ([2], [2, 2], True)],
    ids=str,
)
def test_nodes_differ_in_the_numbers_that_they_read_and_in_how_many(sizes, others, differ):
    """A split along the chunk dimension has as many sizes as its extent gives."""
    sides = []
    for own in (sizes, others):
        graph = fx.Graph()
        split = graph.call_function(
            torch.ops.aten.split_with_sizes.default, (graph.placeholder("x"), own)
        )
        graph.output((split,))
        sides += [fx.GraphModule(nn.Module(), graph), split]
    assert twins._differ(*sides) == differ
