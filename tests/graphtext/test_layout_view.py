"""The view ``layout``: which parameter sits at which byte of which collective."""

import ast
import difflib
import operator

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    BucketLayout,
    TrainConfig,
    assert_same_layout,
    bucket_layout,
    eager_bucket_layout,
)
from pytest_gtrainer._torch.fsdp2 import fully_shard
from pytest_gtrainer.graph.layout import LayoutDifference, Payload, Slot, UnreadLayout
from pytest_gtrainer.graphtext import TextError, lines_of, parse, render, render_layout, unfold
from pytest_gtrainer.references.graph import GraphRun
from tests.graphtext.toy import inner_graph, toy_graph

GATHER = """\
  with bucket(L):
    reshape: f32[6] = aten.reshape(P.L.w, [6])
    cat: f32[9] = aten.cat([reshape, P.L.norm.w])
    all_gather_into_tensor: f32[18] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)
    wait_tensor: f32[18] = _c10d_functional.wait_tensor(all_gather_into_tensor)
"""
FORWARD = f"for i in fwd.layers[0:3]:\n{GATHER}"
GRAPH = f"""\
fsdp = group(range(0, 2))
for i in P.layers[0:3]:
  P.L.w: f32[3, 2]
  P.L.norm.w: f32[3]
{FORWARD}
for i in bwd.layers[2::-1]:
  with bucket(L):
    neg: f32[18] = aten.neg(saved.bucket(L).wait_tensor)
    reduce_scatter_tensor: f32[9] = _c10d_functional.reduce_scatter_tensor(neg, "avg", 2, fsdp)
    wait_tensor: f32[9] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
    split_with_sizes: [f32[6], f32[3]] = aten.split_with_sizes(wait_tensor, [6, 3])
    view: f32[3, 2] = aten.view(split_with_sizes[0], [3, 2])
for i in out.layers[0:3]:
  L.w = bwd.bucket(L).view
  L.norm.w = bwd.bucket(L).split_with_sizes[1]
"""


def layout(text: str) -> str:
    """The text below its header, checked to be Python and to unfold to its records."""
    gm = parse(text)
    drawn = render(gm, "layout")
    ast.parse(drawn)
    assert unfold(drawn) == lines_of(gm, "layout")
    header = "# gtrainer graph v2\n# view: layout\n"
    assert drawn.startswith(header)
    return drawn.removeprefix(header)


def changes(before: str, after: str) -> list[str]:
    """Lines lost and gained, unfolded."""
    old, new = ([str(record) for record in unfold(layout(text))] for text in (before, after))
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def test_equal_layers_are_told_once():
    assert (
        layout(GRAPH)
        == """\
fsdp = group(range(0, 2))
for i in all_gather.layers[0:3]:  # x3
  payload(fsdp, f32, fwd, bytes=36)
  L.w: at(0, bytes=24)
  L.norm.w: at(24, bytes=12)
for i in reduce_scatter.layers[2::-1]:  # x3
  payload(fsdp, f32, bwd, op="avg", bytes=36)
  L.w: at(0, bytes=24)
  L.norm.w: at(24, bytes=12)
"""
    )
    assert (
        len(layout(GRAPH.replace("[0:3]", "[0:126]").replace("[2::-1]", "[125::-1]")).splitlines())
        == 9
    )


def test_swapped_members_change_their_own_lines():
    """D2: in one layer of three."""
    swapped = GATHER.replace("[reshape, P.L.norm.w]", "[P.L.norm.w, reshape]")
    alone, odd = (
        GRAPH.replace(
            FORWARD, f"for i in fwd.layers[0:2]:\n{GATHER}for i in fwd.layers[2]:\n{body}"
        )
        for body in (GATHER, swapped)
    )
    assert changes(GRAPH, alone) == []
    assert sorted(changes(GRAPH, odd)) == [
        "+ all_gather.layers[2] | L.norm.w: at(0, bytes=12)",
        "+ all_gather.layers[2] | L.w: at(12, bytes=24)",
        "- all_gather.layers[2] | L.norm.w: at(24, bytes=12)",
        "- all_gather.layers[2] | L.w: at(0, bytes=24)",
    ]
    assert "for i in all_gather.layers[0:2]:  # x2\n" in layout(odd)


@pytest.mark.parametrize("begin", [6, -3])
def test_slices_are_read_from_either_end(begin):
    """A slice from the end of a payload lies at the same place when counted from the front."""
    cut = "    split_with_sizes: [f32[6], f32[3]] = aten.split_with_sizes(wait_tensor, [6, 3])\n"
    first = "    first: f32[6] = aten.slice.Tensor(wait_tensor, 0, 0, 6)\n"
    rest = f"    rest: f32[3] = aten.slice.Tensor(wait_tensor, 0, {begin})\n"
    sliced = GRAPH.replace(cut, first + rest).replace("split_with_sizes[0]", "first")
    sliced = sliced.replace("split_with_sizes[1]", "rest")
    assert layout(sliced) == layout(GRAPH)


MERGED = """\
if fwd:
  with bucket(layers[0], layers[1]):
    reshape: f32[6] = aten.reshape(P.layers[0].w, [6])
    reshape_1: f32[6] = aten.reshape(P.layers[1].w, [6])
    cat: f32[18] = aten.cat([reshape, P.layers[0].norm.w, reshape_1, P.layers[1].norm.w])
    all_gather_into_tensor: f32[36] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)
    wait_tensor: f32[36] = _c10d_functional.wait_tensor(all_gather_into_tensor)
for i in fwd.layers[2:3]:
"""


def test_merged_buckets_are_of_no_layer():
    merged = GRAPH.replace("for i in fwd.layers[0:3]:\n", MERGED).partition("for i in bwd")[0]
    assert (
        layout(merged)
        == """\
fsdp = group(range(0, 2))
if all_gather:
  payload(fsdp, f32, fwd, bytes=72)
  layers[0].w: at(0, bytes=24)
  layers[0].norm.w: at(24, bytes=12)
  layers[1].w: at(36, bytes=24)
  layers[1].norm.w: at(60, bytes=12)
for i in all_gather.layers[2]:
  payload(fsdp, f32, fwd, bytes=36)
  L.w: at(0, bytes=24)
  L.norm.w: at(24, bytes=12)
"""
    )


def test_each_parameter_of_an_unbucketed_graph_has_a_payload():
    assert (
        layout("""\
fsdp = group(range(0, 2))
for i in P.layers[0:9]:
  P.L.a: f32[2]
  P.L.b: f32[2]
for i in fwd.layers[0:9]:
  with L:
    all_gather_into_tensor: f32[4] = _c10d_functional.all_gather_into_tensor(P.L.b, 2, fsdp)
    all_gather_into_tensor_1: f32[4] = _c10d_functional.all_gather_into_tensor(P.L.a, 2, fsdp)
    wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
""")
        == """\
fsdp = group(range(0, 2))
for i in all_gather.layers[0:9]:  # x9
  payload(fsdp, f32, fwd, bytes=8)
  L.b: at(0, bytes=8)
  payload(fsdp, f32, fwd, bytes=8)
  L.a: at(0, bytes=8)
"""
    )


def test_a_graph_without_sharded_parameters():
    assert render(toy_graph(), "layout") == "# gtrainer graph v2\n# view: layout\npayloads = []\n"


def test_a_view_is_no_graph():
    with pytest.raises(
        TextError, match="line 1: this is the layout view of a graph, a part of it: render the full"
    ):
        parse(render(toy_graph(), "layout"))


def test_a_graph_whose_groups_nobody_knows_is_refused():
    with pytest.raises(
        ValueError, match="process group 'fsdp' of the graph does not exist in this process"
    ):
        layout(GRAPH.replace("group(range(0, 2))", "group(None)"))
    elsewhere = parse(GRAPH)  # by another tracer, which writes no groups down
    del elsewhere.meta["gt_groups"]
    with pytest.raises(
        ValueError, match="process group 'fsdp' of the graph does not exist in this process"
    ):
        bucket_layout(elsewhere)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.mark.gt_world("fake", size=4, mesh={"dp": 2, "fsdp": 2}, rank=2)
def test_an_eager_model_has_the_layout_of_its_graph(gt_mesh):
    """But for order and directions: eager FSDP2 gathers one payload in both."""
    mesh, inputs, modules = gt_mesh["fsdp"], (torch.ones(3, 4),), ["layers.0", "layers.1", "head"]
    model = Net()
    for name in modules:
        fully_shard(model.get_submodule(name), mesh=mesh)
    model(*inputs).backward()
    text = render_layout(eager_bucket_layout(model), header={"test": "x"})
    assert (
        text
        == """\
# gtrainer graph v2
# view: layout
# test: x
fsdp = group(range(2, 4))
for i in all_gather.layers[0:2]:  # x2
  payload(fsdp, f32, bytes=40)
  L.weight: at(0, bytes=32)
  L.bias: at(32, bytes=8)
if all_gather:
  payload(fsdp, f32, bytes=40)
  head.weight: at(0, bytes=32)
  head.bias: at(32, bytes=8)
for i in reduce_scatter.layers[0:2]:  # x2
  payload(fsdp, f32, op="avg", bytes=40)
  L.weight: at(0, bytes=32)
  L.bias: at(32, bytes=8)
if reduce_scatter:
  payload(fsdp, f32, op="avg", bytes=40)
  head.weight: at(0, bytes=32)
  head.bias: at(32, bytes=8)
"""
    )
    config = TrainConfig(
        model=Net,
        step=lambda model, x: model(x),
        batch=lambda step, rank: inputs,
        bucket_plan=modules,
        mesh=mesh,
    )
    graph = render(GraphRun(config).traced.gm, "layout").replace(", fwd", "").replace(", bwd", "")
    assert sorted(map(str, unfold(graph))) == sorted(map(str, unfold(text)))


def payload(name: str, ranks: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Payload:
    return Payload("all_gather", dtype, ranks, "", (Slot(name, 0, 2_500_000),), ("fwd", "bwd"))


def test_groups_without_a_process_group_are_named_by_the_mesh():
    """Ranks that lie along no dimension are distinguished by a number."""
    payloads = [
        payload("a", (0, 4)),
        payload("b", (0, 1, 2, 3)),
        payload("c", (0, 1)),
        payload("d", (2, 3)),
    ]
    text = render_layout(BucketLayout(tuple(payloads)), mesh={"dp": 2, "fsdp": 4})
    assert text.splitlines()[2:] == [
        "dp = group(range(0, 8, 4))",
        "fsdp = group(range(0, 4))",
        "group = group(range(0, 2))",
        "group_2 = group(range(2, 4))",
        "if all_gather:",
        *(
            line
            for name, group in zip("abcd", ("dp", "fsdp", "group", "group_2"), strict=True)
            for line in (
                f"  payload({group}, bf16, fwd, bwd, bytes=2_500_000)",
                f"  {name}: at(0, bytes=2_500_000)",
            )
        ),
    ]


TWO = """\
fsdp = group(range(0, 2))
if P:
  P.a: f32[4]
  P.b: f32[4]
if I:
  I.x: f32[4]
if fwd:
  with _:
{body}
if out:
{out}
"""


def two(*body: str, out: str = "yield 1") -> str:
    lines = "\n".join(f"    {line}" for line in body)
    return layout(TWO.format(body=lines, out="\n".join(f"  {line}" for line in out.splitlines())))


@pytest.mark.parametrize(
    ("made", "lost_at"),
    [
        ("mix: f32[4] = aten.mul.Tensor(P.a, P.b)", "mix (aten::mul.Tensor)"),
        ("mix: f32[4, 2] = aten.stack([P.a, P.b], 1)", "mix (aten::stack)"),
        ("mix: f32[12] = aten.cat([P.a, P.b, I.x])", "mix (aten::cat)"),
        ("mix: f32[8, 1] = aten.index_select(stack, 0, P.a)", "stack (aten::stack)"),
    ],
)
def test_a_gather_of_parameters_whose_order_is_lost_is_refused(made, lost_at):
    """D17: the message names collective, parameters and the node."""
    first = ["stack: f32[4, 2] = aten.stack([P.a, P.b], 1)"] if "stack," in made else []
    gather = (
        "all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(mix, 2, fsdp)"
    )
    with pytest.raises(UnreadLayout) as failure:
        two(*first, made, gather)
    words = (
        f"gathers a, b, and the place of each in it cannot be read: at node {lost_at} their "
        f"order is lost"
    )
    assert words in str(failure.value)


def test_collectives_of_activations_are_no_part_of_a_layout():
    """The twin: what a user's input goes into."""
    assert (
        two(
            "mul: f32[4] = aten.mul.Tensor(P.a, I.x)",
            "all_gather_into_tensor: f32[8] = _c10d_functional.all_gather_into_tensor(mul, 2, "
            "fsdp)",
            'all_reduce: f32[4] = _c10d_functional.all_reduce(mul, "sum", fsdp)',
            "wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)",
            out="loss = fwd._.wait_tensor",
        )
        == "payloads = []\n"
    )


def test_a_parameter_that_is_gathered_twice_in_one_direction_is_listed_twice():
    """Once in each direction is one payload, as FSDP2 gathers it; a second time in the forward is
    another.
    """
    gather = "{}: f32[8] = _c10d_functional.all_gather_into_tensor(P.a, 2, fsdp)"
    waits = [
        f"w{n}: f32[8] = _c10d_functional.wait_tensor({name})"
        for n, name in enumerate(("one", "other"))
    ]
    drawn = two(
        gather.format("one"),
        waits[0],
        gather.format("other"),
        waits[1],
        out="yield fwd._.w0\nyield fwd._.w1",
    )
    assert drawn.count("payload(fsdp, f32, fwd, bytes=16)") == 2, drawn


REDUCED = (
    'reduce_scatter_tensor: f32[9] = _c10d_functional.reduce_scatter_tensor(I.x, "avg", 2, fsdp)',
    "wait_tensor: f32[9] = _c10d_functional.wait_tensor(reduce_scatter_tensor)",
    "split_with_sizes: [f32[4], f32[1], f32[4]] = aten.split_with_sizes(wait_tensor, [4, 1, 4])",
)


def test_a_member_that_nobody_uses_keeps_its_place():
    drawn = two(*REDUCED, out="a = fwd._.split_with_sizes[0]\nb = fwd._.split_with_sizes[2]")
    assert "  a: at(0, bytes=16)\n  b: at(20, bytes=16)\n" in drawn


def test_members_that_are_joined_in_another_order_and_cut_again_keep_their_places():
    drawn = two(
        *REDUCED,
        "cat: f32[9] = aten.cat([split_with_sizes[2], split_with_sizes[0], split_with_sizes[1]])",
        "again: [f32[4], f32[4], f32[1]] = aten.split_with_sizes(cat, [4, 4, 1])",
        out="b = fwd._.again[0]\na = fwd._.again[1]",
    )
    assert "  a: at(0, bytes=16)\n  b: at(20, bytes=16)\n" in drawn


def test_a_member_that_goes_elsewhere_is_refused():
    """D17: half of the bucket is shown without a gradient."""
    sin = "sin: f32[4] = aten.add.Scalar(split_with_sizes[2], 1)", "mv: f32[4] = aten.mv(I.x, sin)"
    with pytest.raises(
        UnreadLayout, match=r"reduce_scatter_tensor gives a, .*at node mv \(aten::mv\)"
    ):
        two(*REDUCED, *sin, out="a = fwd._.split_with_sizes[0]\nb = fwd._.mv")


def test_gradients_that_are_only_all_reduced_are_told():
    """Gradients of DDP, each by itself or in torch's bucket of them."""
    assert (
        two(
            "cat: f32[8] = aten.cat([I.x, I.x])",
            'all_reduce: f32[8] = _c10d_functional.all_reduce(cat, "avg", fsdp)',
            "wait_tensor: f32[8] = _c10d_functional.wait_tensor(all_reduce)",
            "split: [f32[4], f32[4]] = aten.split.Tensor(wait_tensor, 4)",
            out="b = fwd._.split[0]\na = fwd._.split[1]",
        )
        == """\
fsdp = group(range(0, 2))
if all_reduce:
  payload(fsdp, f32, fwd, op="avg", bytes=32)
  b: at(0, bytes=16)
  a: at(16, bytes=16)
"""
    )


GATHERING = inner_graph(
    0,
    "all_gather_into_tensor: f32[8] = _c10d_functional.all_gather_into_tensor(A[0], 2, fsdp)",
    "wait_tensor: f32[8] = _c10d_functional.wait_tensor(all_gather_into_tensor)",
)
NESTED = f"""\
fsdp = group(range(0, 2))
{GATHERING}\
if P:
  P.w: f32[4]
if fwd:
  with moe:
    any: b8[()] = aten.any(P.w)
    cond: (f32[8],) = hop.cond(any, cond_graph_0, cond_graph_0, (P.w,))
if out:
  yield fwd.moe.cond[0]
"""


def test_what_a_graph_inside_the_graph_gathers_is_refused_and_not_left_out():
    with pytest.raises(
        UnreadLayout, match=r"cond \(cond\) of w runs a graph of its own, in which all_gather"
    ):
        bucket_layout(parse(NESTED))
    of_activations = NESTED.replace("P.w", "I.x").replace("if P:", "if I:")
    assert bucket_layout(parse(of_activations)).payloads == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("aten.select.int(rows, 0, 0)", "aten.select.int(rows, 0, 1)"),
        ("aten.slice.Tensor(rows, 1, 0, 4)", "aten.slice.Tensor(rows, 1, 4, 8)"),
        (
            "aten.slice.Tensor(wait_tensor, 0, 0, 16, 2)",
            "aten.slice.Tensor(wait_tensor, 0, 1, 16, 2)",
        ),
    ],
    ids=["select", "columns", "every other one"],
)
def test_gradients_that_are_picked_in_an_unknown_way_are_refused_and_none_is_lost(first, second):
    """D17: the twin takes them apart by rows."""
    text = f"""\
fsdp = group(range(0, 2))
if P:
  P.a: f32[16]
if bwd:
  with _:
    reduce_scatter_tensor: f32[16] = _c10d_functional.reduce_scatter_tensor(P.a, "avg", 2, fsdp)
    wait_tensor: f32[16] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
    rows: f32[2, 8] = aten.view(wait_tensor, [2, 8])
    one: f32[8] = {first}
    two: f32[8] = {second}
if out:
  a = bwd._.one
  b = bwd._.two
"""
    with pytest.raises(
        UnreadLayout, match=r"gives .*(a|b).*, and the place of each in it cannot be read"
    ):
        bucket_layout(parse(text))
    known = text.replace(first, "aten.slice.Tensor(wait_tensor, 0, 0, 8)")
    known = known.replace(second, "aten.slice.Tensor(wait_tensor, 0, 8, 16)")
    (payload,) = bucket_layout(parse(known)).payloads
    assert payload.slots == (Slot("a", 0, 32), Slot("b", 32, 32))


SCALED = """\
fsdp = group(range(0, 2))
if P:
  P.a: f32[4]
  P.b: f32[4]
if I:
  I.count: f32[()]
  I.mask: f32[8]
if bwd:
  with _:
    {reduced}
    wait_tensor: f32[8] = _c10d_functional.wait_tensor(reduced)
    {body}
if out:
  a = {a}
  b = {b}
"""
REDUCTIONS = {
    "reduce_scatter": 'reduced: f32[8] = _c10d_functional.reduce_scatter_tensor(I.mask, "sum", 2, '
    "fsdp)",
    "all_reduce": 'reduced: f32[8] = _c10d_functional.all_reduce(I.mask, "sum", fsdp)',
}
SPLIT = "split: [f32[4], f32[4]] = aten.split.Tensor(x, 4)"
IN_A_BUCKET = ("bwd._.split[0]", "bwd._.split[1]")


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize(
    ("body", "results"),
    [
        (("x: f32[8] = aten.div.Tensor(wait_tensor, I.count)", SPLIT), IN_A_BUCKET),
        (("x: f32[8] = aten.mul.Tensor(I.count, wait_tensor)", SPLIT), IN_A_BUCKET),
        (("x: f32[8] = aten.mul.Tensor(wait_tensor, I.mask)", SPLIT), IN_A_BUCKET),
        (
            (
                "zero: b8[8] = aten.eq.Tensor(I.mask, I.count)",
                "x: f32[8] = aten.where.self(zero, I.mask, wait_tensor)",
                SPLIT,
            ),
            IN_A_BUCKET,
        ),
        (
            (
                SPLIT.replace("(x", "(wait_tensor"),
                "one: f32[4] = aten.div.Tensor(split[0], I.count)",
                "two: f32[4] = aten.div.Tensor(split[1], I.count)",
            ),
            ("bwd._.one", "bwd._.two"),
        ),
        (
            (
                SPLIT.replace("(x", "(wait_tensor"),
                "each: [f32[4], f32[4]] = aten._foreach_div.Tensor([split[0], split[1]], I.count)",
            ),
            ("bwd._.each[0]", "bwd._.each[1]"),
        ),
        (
            (
                "one: f32[4] = aten.slice.Tensor(wait_tensor, 0, 0, 4)",
                "two: f32[4] = aten.slice.Tensor(wait_tensor, 0, 4)",
                "norm: f32[()] = aten.linalg_vector_norm(wait_tensor)",
                "low: f32[4] = aten.mul.Tensor(one, norm)",
            ),
            ("bwd._.low", "bwd._.two"),
        ),
        (
            (
                "one: f32[4] = aten.slice.Tensor(wait_tensor, 0, 0, 4)",
                "two: f32[4] = aten.slice.Tensor(wait_tensor, 0, 4)",
                "square: f32[8] = aten.pow.Tensor_Scalar(wait_tensor, 2)",
                "sum_1: f32[()] = aten.sum(square)",
            ),
            ("bwd._.one", "bwd._.two"),
        ),
    ],
    ids=[
        "divided",
        "factor-first",
        "masked",
        "where",
        "divided-apart",
        "foreach",
        "norm-of-bucket",
        "sum-of-squares",
    ],
)
def test_gradients_that_a_tensor_scales_or_a_norm_reads_are_members(kind, body, results):
    """D17: a token count, a loss scale, a clip coefficient; the bucket's norm beside its slices
    loses nobody.
    """
    text = SCALED.format(
        reduced=REDUCTIONS[kind], body="\n    ".join(body), a=results[0], b=results[1]
    )
    (payload,) = bucket_layout(parse(text)).payloads
    assert (payload.collective, payload.slots) == (kind, (Slot("a", 0, 16), Slot("b", 16, 16)))


def test_an_all_reduced_count_is_no_gradient():
    """The twin: what gradients are divided by has a place of its own in no payload."""
    body = (
        'count: f32[()] = _c10d_functional.all_reduce(I.count, "sum", fsdp)',
        "waited: f32[()] = _c10d_functional.wait_tensor(count)",
        "x: f32[8] = aten.div.Tensor(wait_tensor, waited)",
        SPLIT,
    )
    text = SCALED.format(
        reduced=REDUCTIONS["all_reduce"],
        body="\n    ".join(body),
        a=IN_A_BUCKET[0],
        b=IN_A_BUCKET[1],
    )
    (payload,) = bucket_layout(parse(text)).payloads
    assert payload.parameters == ("a", "b")
    of_one = (
        SCALED.replace("[8]", "[1]")
        .replace("f32[4]", "f32[1]")
        .format(
            reduced=REDUCTIONS["all_reduce"].replace("[8]", "[1]"),
            body="\n    ".join(body[:2] + ("x: f32[1] = aten.div.Tensor(wait_tensor, waited)",)),
            a="bwd._.x",
            b="None",
        )
    )
    (payload,) = bucket_layout(parse(of_one)).payloads
    assert payload.slots == (Slot("a", 0, 4),)


def test_a_member_behind_an_operator_that_picks_is_still_refused_beside_a_norm():
    body = (
        SPLIT.replace("(x", "(wait_tensor"),
        "norm: f32[()] = aten.linalg_vector_norm(wait_tensor)",
        "two: f32[4] = aten.take(wait_tensor, I.count)",
    )
    text = SCALED.format(
        reduced=REDUCTIONS["reduce_scatter"],
        body="\n    ".join(body),
        a="bwd._.split[0]",
        b="bwd._.two",
    )
    with pytest.raises(
        UnreadLayout, match=r"reduced gives a, and .* cannot be read: at node two \(aten::take\)"
    ):
        bucket_layout(parse(text))


@pytest.mark.parametrize(
    "two",
    ["aten.take(wait_tensor, I.count)", "aten.index_select(wait_tensor, 0, I.count)"],
    ids=["take", "index"],
)
def test_a_lone_slice_is_no_padding_beside_another_reader(two):
    """D17: the member that leaves otherwise was lost, and the slice had the bytes of both."""
    body = ("one: f32[4] = aten.slice.Tensor(wait_tensor, 0, 0, 4)", f"two: f32[4] = {two}")
    given = {"reduced": REDUCTIONS["reduce_scatter"], "a": "bwd._.one"}
    with pytest.raises(UnreadLayout, match=r"reduced gives a, and .* cannot be read: at node two"):
        bucket_layout(parse(SCALED.format(body="\n    ".join(body), b="bwd._.two", **given)))
    norm = "norm: f32[()] = aten.linalg_vector_norm(wait_tensor)"
    (payload,) = bucket_layout(
        parse(SCALED.format(body="\n    ".join([body[0], norm]), b="None", **given))
    ).payloads
    assert payload.slots == (Slot("a", 0, 32),)  # with its padding


def test_a_parameter_that_is_scaled_before_its_gather_is_a_member():
    drawn = two(
        "amax: f32[()] = aten.amax(I.x)",
        "scaled: f32[4] = aten.div.Tensor(P.a, amax)",
        "cat: f32[8] = aten.cat([P.b, scaled])",
        "all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)",
        "wait_tensor: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor)",
    )
    assert "  b: at(0, bytes=16)\n  a: at(16, bytes=16)\n" in drawn


def test_a_gradient_that_a_bucket_holds_twice_has_both_places():
    text = SCALED.format(
        reduced=REDUCTIONS["reduce_scatter"],
        body="\n    ".join(
            [
                "twice: f32[16] = aten.cat([wait_tensor, wait_tensor])",
                "two: f32[8] = aten.slice.Tensor(twice, 0, 8)",
            ]
        ),
        a="bwd._.two",
        b="None",
    )
    (payload,) = bucket_layout(parse(text)).payloads
    assert payload.slots == (Slot("a", 0, 32),)


def test_a_bucket_of_which_nothing_is_left_in_order_is_refused():
    """D17: no part of it has a place, so it was no bucket of gradients."""
    given = {"reduced": REDUCTIONS["reduce_scatter"], "a": "bwd._.two", "b": "None"}
    with pytest.raises(
        UnreadLayout, match=r"gives a, .* cannot be read: at node two \(aten::index_select\)"
    ):
        bucket_layout(
            parse(
                SCALED.format(
                    body="two: f32[4] = aten.index_select(wait_tensor, 0, I.count)", **given
                )
            )
        )


COALESCED = (
    "shards: [f32[2], f32[2]] = _c10d_functional.reduce_scatter_tensor_coalesced([I.x, I.x], "
    '"avg", 2, fsdp)',
    "w0: f32[2] = _c10d_functional.wait_tensor(shards[0])",
    "w1: f32[2] = _c10d_functional.wait_tensor(shards[1])",
)
REPLICATED = (
    'sums: [f32[2], f32[2]] = _c10d_functional.all_reduce_coalesced([w1, w0], "sum", fsdp)',
    "v0: f32[2] = _c10d_functional.wait_tensor(sums[0])",
    "v1: f32[2] = _c10d_functional.wait_tensor(sums[1])",
)


def members(*body: str, out: str) -> list[tuple[str, list[str]]]:
    """Each payload's collective, with the parameters in it."""
    lines = "\n".join(f"    {line}" for line in body)
    gm = parse(TWO.format(body=lines, out="\n".join(f"  {line}" for line in out.splitlines())))
    return [(payload.collective, [*payload.parameters]) for payload in bucket_layout(gm).payloads]


def test_each_tensor_of_a_coalesced_collective_is_a_payload():
    gathers = (
        "gathered: [f32[8], f32[8]] = _c10d_functional.all_gather_into_tensor_coalesced([P.b, "
        "P.a], 2, fsdp)"
    )
    waits = [f"w{n}: f32[8] = _c10d_functional.wait_tensor(gathered[{n}])" for n in (0, 1)]
    listed = members(gathers, *waits, out="yield fwd._.w0\nyield fwd._.w1")
    assert listed == [("all_gather", ["b"]), ("all_gather", ["a"])]
    listed = members(*COALESCED, out="a = fwd._.w1\nb = fwd._.w0")
    assert listed == [("reduce_scatter", ["b"]), ("reduce_scatter", ["a"])]


def test_gradients_are_followed_through_a_second_coalesced_collective():
    """Hybrid sharding does this: the reduce-scatters were left out."""
    listed = members(*COALESCED, *REPLICATED, out="a = fwd._.v0\nb = fwd._.v1")
    assert listed == [
        (kind, [fqn])
        for kind, fqns in (("reduce_scatter", "ba"), ("all_reduce", "ab"))
        for fqn in fqns
    ]


def test_members_of_two_dtypes_are_as_wide_as_the_widest():
    """``cat`` casts a bf16 tensor beside an fp32 one."""
    drawn = two(
        "half: bf16[4] = aten._to_copy(P.b, dtype=bf16)",
        "cat: f32[8] = aten.cat([half, P.a])",
        "all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)",
        "wait_tensor: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor)",
    )
    assert "  b: at(0, bytes=16)\n  a: at(16, bytes=16)\n" in drawn


SUM = (
    'sum_a: f32[4] = _c10d_functional.all_reduce(I.x, "avg", fsdp)',
    "a: f32[4] = _c10d_functional.wait_tensor(sum_a)",
)


@pytest.mark.parametrize(
    "moved",
    [
        "flip(a, [0])",
        "roll(a, [1], [0])",
        "take(a, I.at)",
        "gather(a, 0, I.at)",
        "index.Tensor(a, [I.at])",
    ],
)
def test_a_whole_gradient_whose_elements_are_moved_is_refused(moved):
    """It was left out, or kept its place. The twin changes signs, which moves none."""
    text = TWO.replace("I.x: f32[4]", "I.at: i64[4]\n  I.x: f32[4]")
    body = "".join(f"    {line}\n" for line in SUM) + "    moved: f32[4] = aten."
    with pytest.raises(
        UnreadLayout, match=r"sum_a gives a, .*: at node moved \(aten::[\w.]+\) their order is lost"
    ):
        layout(text.format(body=body + moved, out="  a = fwd._.moved"))
    assert "a: at(0, bytes=16)" in layout(
        text.format(body=body + "neg(a)", out="  a = fwd._.moved")
    )


def test_a_row_of_a_gradient_is_refused():
    """D17: which Python takes, as in a graph of Dynamo."""
    body = "".join(f"    {line}\n" for line in SUM)
    with pytest.raises(
        UnreadLayout,
        match=r"sum_a gives a, .*: at node getitem \(.*getitem.*\) their order is lost",
    ):
        layout(TWO.format(body=body, out="  a = fwd._.a[0]"))


SCATTERED = (
    'rs: f32[4, 4] = _c10d_functional.reduce_scatter_tensor(I.x, "avg", 2, fsdp)',
    "last: f32[4, 4] = _c10d_functional.wait_tensor(rs)",
)


def of_several_results(before: tuple[str, ...], target, arguments, *items: int):
    """A graph whose gradient ``a`` is a result of an operator that text may not call, taken by
    ``items``.
    """
    gm = parse(TWO.format(body="\n".join(f"    {line}" for line in before), out="  a = fwd._.last"))
    last = next(node for node in gm.graph.nodes if node.name == "last")
    with gm.graph.inserting_after(last):
        value = gm.graph.call_function(target, arguments(last))
    value.meta = {**last.meta, "val": ([last.meta["val"]], [last.meta["val"]])}
    for item in items:
        with gm.graph.inserting_after(value):
            taken = gm.graph.call_function(operator.getitem, (value, item))
        taken.meta = {**last.meta, "val": value.meta["val"][item]}
        value = taken
    last.replace_all_uses_with(value, delete_user_cb=lambda user: user.op == "output")
    return gm


@pytest.mark.parametrize("item", [0, 1])
@pytest.mark.parametrize(
    "last", [("last: f32[4] = aten.neg(I.x)",), SCATTERED], ids=["first", "after another"]
)
def test_a_collective_in_place_that_gives_a_gradient_is_refused(item, last):
    """D17: it gives a list and what to wait for; nothing says over which ranks it goes."""
    target = torch.ops.c10d.allreduce_.default
    gm = of_several_results(last, target, lambda node: ([node], None, None, None), item, 0)
    with pytest.raises(
        UnreadLayout, match=r"gives a, .*: c10d::allreduce_ is no collective that a layout knows"
    ):
        bucket_layout(gm)


def test_a_gradient_that_goes_through_products_of_a_gather_is_refused():
    """Async tensor parallelism does this: its operator takes a tensor and a list and gives two of
    them.
    """
    fused = torch.ops.symm_mem.fused_all_gather_matmul.default
    gm = of_several_results(SCATTERED, fused, lambda node: (node, [node], 0, "fsdp"), 1, 0)
    with pytest.raises(
        UnreadLayout,
        match=r"gives a, .*: symm_mem::fused_all_gather_matmul is no collective that a",
    ):
        bucket_layout(gm)


COPY_IN = (
    "empty: f32[16] = aten.empty.memory_format([16])",
    "copy_in: (f32[8], f32[16]) = fsdp.all_gather_copy_in([P.b, P.a], empty, [4, 4], 8, 0)",
)


@pytest.mark.parametrize("part", [0, 1])
def test_of_a_buffer_for_all_ranks_the_part_of_this_one_is_read(part):
    """FSDP2's own operator gives this rank's part first; the rest of the buffer is unknown."""
    gather = f"g: f32[32] = _c10d_functional.all_gather_into_tensor(copy_in[{part}], 2, fsdp)"
    lines = (*COPY_IN, gather, "w: f32[32] = _c10d_functional.wait_tensor(g)")
    if part == 0:
        assert members(*lines, out="yield fwd._.w") == [("all_gather", ["b", "a"])]
    else:
        with pytest.raises(
            UnreadLayout, match=r"g gathers a, b, .* at node copy_in \(fsdp::all_gather_copy_in\)"
        ):
            members(*lines, out="yield fwd._.w")


def test_where_nobody_says_what_an_input_is_computed_values_are_activations():
    """The twin is refused: the tracer says that both are parameters."""
    body = """\
    mul: f32[4] = aten.mul.Tensor(P.a, P.b)
    g: f32[8] = _c10d_functional.all_gather_into_tensor(mul, 2, fsdp)"""
    gm = parse(TWO.format(body=body, out="  yield fwd._.g"))
    with pytest.raises(UnreadLayout, match="gathers a, b"):
        bucket_layout(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        del node.meta["gt_input"]
    assert bucket_layout(gm).payloads == ()


def test_a_graph_that_is_not_sorted_is_refused_with_the_way_out():
    gm = parse(GRAPH)
    cat, gather = (
        next(node for node in gm.graph.nodes if name in node.name) for name in ("cat", "all_gather")
    )
    cat.prepend(gather)
    with pytest.raises(
        ValueError, match=r"not sorted: all_gather\w+ uses cat before .*stable_topological_sort"
    ):
        bucket_layout(gm)


def gathered_with(*members: str, width: int) -> str:
    """A graph that gathers a bucket of these members."""
    return TWO.format(
        body=f"""\
    zeros: f32[2] = aten.zeros([2])
    cat: f32[{width}] = aten.cat([{", ".join(members)}])
    gather: f32[{2 * width}] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)
    wait_tensor: f32[{2 * width}] = _c10d_functional.wait_tensor(gather)""",
        out="  yield fwd._.wait_tensor",
    )


def reduced_with(width: int) -> str:
    """A graph that reduces two gradients in a payload of ``width`` elements."""
    widths = [4, 4, width - 8] if width > 8 else [4, 4]
    parts = ", ".join(f"f32[{one}]" for one in widths)
    return TWO.format(
        body=f"""\
    expand: f32[{2 * width}] = aten.repeat(I.x, [{width // 2}])
    rs: f32[{width}] = _c10d_functional.reduce_scatter_tensor(expand, "avg", 2, fsdp)
    wait_tensor: f32[{width}] = _c10d_functional.wait_tensor(rs)
    split: [{parts}] = aten.split_with_sizes(wait_tensor, {widths})""",
        out="  a = fwd._.split[0]\n  b = fwd._.split[1]",
    )


@pytest.mark.parametrize(
    ("one", "other", "padding"),
    [
        (gathered_with("P.a", "P.b", "zeros", width=10), gathered_with("P.a", "P.b", width=8), 8),
        (gathered_with("P.a", "zeros", "zeros", width=8), gathered_with("P.a", width=4), 16),
        (reduced_with(12), reduced_with(8), 16),
    ],
    ids=["behind all", "twice", "of a reduction"],
)
def test_bytes_of_no_parameter_count(one, other, padding):
    """A payload with zeros at its end is another one than that without, also in the text."""
    filled, plain = (bucket_layout(parse(text)) for text in (one, other))
    with pytest.raises(
        LayoutDifference, match=f"{padding} bytes belong to no parameter, expected 0"
    ):
        assert_same_layout(filled, plain)
    with pytest.raises(
        LayoutDifference, match=f"0 bytes belong to no parameter, expected {padding}"
    ):
        assert_same_layout(plain, filled)
    assert_same_layout(filled, filled)
    assert layout(one) != layout(other)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "text", [gathered_with("P.a", "P.b", width=8), reduced_with(8)], ids=["gather", "reduction"]
)
def test_a_size_that_is_not_the_groups_is_refused(text, size):
    wrong = text.replace(", 2, fsdp", f", {size}, fsdp")
    with pytest.raises(UnreadLayout, match=f"says group_size={size}, and its group has 2 ranks"):
        bucket_layout(parse(wrong))
