"""The view ``schedule``: launches, waits, and the compute between them, at a glance."""

import ast
import dataclasses
import difflib
import re
import textwrap

import pytest
import torch
from torch import fx

from fixtures.models import llama3
from fixtures.training import llama3_training
from pytest_gtrainer.graphtext import TextError, lines_of, parse, render, unfold
from pytest_gtrainer.references.graph import rewrite, shard_traceably, trace_config
from pytest_gtrainer.report.timeline import timeline
from tests.graphtext.toy import inner_graph, small_graph, toy_graph

NORM = """\
  with L:
    relu: bf16[2, 8] = aten.relu(before)
    t: bf16[8, 2][1, 8] = aten.t(relu)
"""
EXP = """\
  with L:
    exp: bf16[2, 8] = aten.exp(relu)
"""
LAUNCH = """\
  with layers[i+1]:
    _to_copy: bf16[4, 8] = aten._to_copy(P.layers[i+1].w, dtype=bf16)
  with bucket(layers[i+1]):
    all_gather_into_tensor: bf16[8, 8] = _c10d_functional.all_gather_into_tensor(layers[i+1]._to_copy, 2, fsdp)
"""
WAIT = """\
  with bucket(L):
    wait_tensor: bf16[8, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor)
"""
PRODUCT = """\
  with L:
    mm: bf16[8, 2] = aten.mm(bucket(L).wait_tensor, t)
    t_1: bf16[2, 8][1, 2] = aten.t(mm)
    mul: bf16[2, 8] = aten.mul.Tensor(t_1, exp)
"""
PREFETCHED = f"""\
fsdp = group(range(0, 2))
for i in P.layers[0:8]:
  P.L.w: f32[4, 8]
if I:
  I.x: bf16[2, 8]
if fwd:
  with layers[0]:
    _to_copy: bf16[4, 8] = aten._to_copy(P.layers[0].w, dtype=bf16)
  with bucket(layers[0]):
    all_gather_into_tensor: bf16[8, 8] = _c10d_functional.all_gather_into_tensor(layers[0]._to_copy, 2, fsdp)
  with embed:
    sin: bf16[2, 8] = aten.sin(I.x)
for i in fwd.layers[0]:
{NORM.replace("before", "embed.sin")}{EXP}{LAUNCH}{WAIT}{PRODUCT}
for i in fwd.layers[1:7]:
{NORM.replace("before", "layers[i-1].mul")}{EXP}{LAUNCH}{WAIT}{PRODUCT}
for i in fwd.layers[7]:
{NORM.replace("before", "layers[i-1].mul")}{EXP}{WAIT}{PRODUCT}
if out:
  yield fwd.layers[7].mul
"""
LAYER_3 = f"""\
for i in fwd.layers[1:3]:
{NORM.replace("before", "layers[i-1].mul")}{EXP}{LAUNCH}{WAIT}{PRODUCT}
for i in fwd.layers[3]:
{NORM.replace("before", "layers[i-1].mul")}CHANGED{PRODUCT}
for i in fwd.layers[4:7]:
"""


def test_prefetching_at_a_glance():
    """E1: the next all-gather is launched before the wait of this one.

    Equal layers are shown once.
    """
    assert (
        schedule(PREFETCHED)
        == """\
fsdp = group(range(0, 2))
if fwd:
  launch(bucket(layers[0]).all_gather_into_tensor, fsdp, bf16[8, 8], bytes=128)
  compute(embed, sin, ops=1)
for i in fwd.layers[0:7]:  # x7
  compute(L, relu, exp, ops=2)
  launch(bucket(layers[i+1]).all_gather_into_tensor, fsdp, bf16[8, 8], bytes=128)
  wait(bucket(L).all_gather_into_tensor)
  compute(L, mm, mul, ops=2)
for i in fwd.layers[7]:
  compute(L, relu, exp, ops=2)
  wait(bucket(L).all_gather_into_tensor)
  compute(L, mm, mul, ops=2)
"""
    )


def schedule(graph: fx.GraphModule | str) -> str:
    """The text below its header, checked to be Python and to unfold to its records."""
    gm = parse(graph) if isinstance(graph, str) else graph
    text = render(gm, "schedule")
    ast.parse(text)
    assert unfold(text) == lines_of(gm, "schedule")
    header = "# gtrainer graph v2\n# view: schedule\n"
    assert text.startswith(header)
    return text.removeprefix(header)


def changes(before: str, after: str) -> list[str]:
    """Lines lost and gained, unfolded."""
    old, new = ([str(record) for record in unfold(schedule(text))] for text in (before, after))
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def edited(text: str, *edits: tuple[str, str]) -> str:
    """The text with each edit made in the one place where it applies."""
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def layer_3(changed: str) -> str:
    """The graph with another order in layer 3."""
    return PREFETCHED.replace("for i in fwd.layers[1:7]:\n", LAYER_3.replace("CHANGED", changed))


def test_a_wait_that_moves_before_the_next_launch_changes_its_own_line():
    assert sorted(changes(layer_3(EXP + LAUNCH + WAIT), layer_3(EXP + WAIT + LAUNCH))) == [
        "+ fwd.layers[3] | wait(bucket(L).all_gather_into_tensor)",
        "- fwd.layers[3] | wait(bucket(L).all_gather_into_tensor)",
    ]


def test_another_way_to_write_the_same_changes_nothing():
    """The twin: also where other layers are distinguished, values renamed, or a view is added."""
    assert changes(PREFETCHED, layer_3(EXP + LAUNCH + WAIT)) == []
    view = "  with L:\n    view: bf16[2, 8] = aten.view(relu, [2, 8])\n"
    assert changes(PREFETCHED, layer_3(EXP + LAUNCH + WAIT + view)) == []
    gm = parse(PREFETCHED)
    for count, node in enumerate(gm.graph.nodes):
        node._rename(f"other_{1000 - count}")
    assert schedule(gm) == schedule(PREFETCHED)


def test_compute_that_moves_behind_a_wait_changes_the_two_stretches_beside_it():
    """Only layer 3 changes: nothing has a number that could drift."""
    assert sorted(changes(PREFETCHED, layer_3(LAUNCH + WAIT + EXP))) == [
        "+ fwd.layers[3] | compute(L, mm, exp, mul, ops=3)",
        "+ fwd.layers[3] | compute(L, relu, ops=1)",
        "- fwd.layers[3] | compute(L, mm, mul, ops=2)",
        "- fwd.layers[3] | compute(L, relu, exp, ops=2)",
    ]


TWO_PARAMETERS = """\
fsdp = group(range(0, 2))
for i in P.layers[0:2]:
  P.L.w: f32[3, 4]
  P.L.b: f32[2]
if fwd:
LAUNCHES
if out:
  yield 1
"""
PACKED = """\
  with {first}:
    _to_copy: bf16[3, 4] = aten._to_copy(P.{first}.w, dtype=bf16)
    _to_copy_1: bf16[2] = aten._to_copy(P.{first}.b, dtype=bf16)
  with {bucket}:
    reshape: bf16[12] = aten.reshape({first}._to_copy, [12])
    cat: bf16[14] = aten.cat([reshape, {first}._to_copy_1])
    all_gather_into_tensor: bf16[28] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)
    wait_tensor: bf16[28] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    view: bf16[2, 14] = aten.view(wait_tensor, [2, 14])
    split_with_sizes: [bf16[2, 12][14, 1], bf16[2, 2][14, 1]] = aten.split_with_sizes(view, [12, 2], 1)
    clone: bf16[2, 12] = aten.clone(split_with_sizes[0], memory_format=contiguous_format)
    clone_1: bf16[2, 2] = aten.clone(split_with_sizes[1], memory_format=contiguous_format)
"""


def test_what_only_packs_and_unpacks_a_payload_is_not_compute():
    """Casts of parameters, copies into the payload and copies out of it count as tensors."""
    graph = TWO_PARAMETERS.replace(
        "LAUNCHES", PACKED.format(first="layers[0]", bucket="bucket(layers[0])")
    )
    one_of_two = edited(
        graph,
        (
            "_to_copy_1: bf16[2] = aten._to_copy(P.layers[0].b, dtype=bf16)",
            "frexp: (bf16[2], i32[2]) = aten.frexp.Tensor(P.layers[0].b)",
        ),
        ("layers[0]._to_copy_1", "layers[0].frexp[0]"),
    )
    assert (
        schedule(graph)
        == schedule(one_of_two)
        == """\
fsdp = group(range(0, 2))
if fwd:
  launch(bucket(layers[0]).all_gather_into_tensor, fsdp, bf16[28], bytes=56, tensors=2)
  wait(bucket(layers[0]).all_gather_into_tensor)
"""
    )


def test_packing_that_stands_elsewhere_is_compute():
    between = "  with embed:\n    zeros: f32[2] = aten.zeros([2])\n  with bucket(layers[0]):\n"
    packed = PACKED.format(first="layers[0]", bucket="bucket(layers[0])")
    apart = packed.replace("    all_gather", between + "    all_gather")
    assert (
        schedule(TWO_PARAMETERS.replace("LAUNCHES", apart))
        == """\
fsdp = group(range(0, 2))
for i in fwd.layers[0]:
  compute(L, _to_copy*2, ops=2)
  compute(bucket(L), cat, ops=1)
if fwd:
  compute(embed, zeros, ops=1)
  launch(bucket(layers[0]).all_gather_into_tensor, fsdp, bf16[28], bytes=56)
  wait(bucket(layers[0]).all_gather_into_tensor)
"""
    )


def test_merged_buckets_change_the_lines_of_their_collectives():
    one, two = (PACKED.format(first=f"layers[{n}]", bucket=f"bucket(layers[{n}])") for n in (0, 1))
    merged = """\
  with bucket(layers[0], layers[1]):
    reshape: f32[12] = aten.reshape(P.layers[0].w, [12])
    reshape_1: f32[12] = aten.reshape(P.layers[1].w, [12])
    cat: f32[28] = aten.cat([reshape, P.layers[0].b, reshape_1, P.layers[1].b])
    all_gather_into_tensor: f32[56] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)
    wait_tensor: f32[56] = _c10d_functional.wait_tensor(all_gather_into_tensor)
"""
    assert sorted(
        changes(*(TWO_PARAMETERS.replace("LAUNCHES", text) for text in (one + two, merged)))
    ) == [
        "+ fwd | launch(bucket(layers[0], layers[1]).all_gather_into_tensor, fsdp, f32[56], "
        "bytes=224, tensors=4)",
        "+ fwd | wait(bucket(layers[0], layers[1]).all_gather_into_tensor)",
        "- fwd | launch(bucket(layers[0]).all_gather_into_tensor, fsdp, bf16[28], bytes=56, "
        "tensors=2)",
        "- fwd | launch(bucket(layers[1]).all_gather_into_tensor, fsdp, bf16[28], bytes=56, "
        "tensors=2)",
        "- fwd | wait(bucket(layers[0]).all_gather_into_tensor)",
        "- fwd | wait(bucket(layers[1]).all_gather_into_tensor)",
    ]


def test_a_bucket_of_many_modules_is_known_by_its_first():
    text = PACKED.format(
        first="layers[0]", bucket="bucket(layers[0].norm, layers[0].attention, layers[0].moe)"
    )
    assert "wait(bucket(layers[0].norm, ...).all_gather_into_tensor)\n" in schedule(
        TWO_PARAMETERS.replace("LAUNCHES", text)
    )


def test_the_backward_reduces_and_names_what_the_forward_launched():
    """The payload of a reduce-scatter is what goes in; ``saved`` as in the full text."""
    assert (
        schedule("""\
fsdp = group(range(0, 4))
if I:
  I.x: f32[8]
  I.y: f32[4, 1]
if fwd:
  with head:
    all_reduce: f32[8] = _c10d_functional.all_reduce(I.x, "sum", fsdp)
if bwd:
  with head:
    wait_tensor: f32[8] = _c10d_functional.wait_tensor(saved.head.all_reduce)
    neg: f32[8] = aten.neg(wait_tensor)
    split: [f32[4], f32[4]] = aten.split.Tensor(neg, 4)
  with bucket(head):
    reshape: f32[4, 1] = aten.reshape(head.split[0], [4, 1])
    reshape_1: f32[4, 1] = aten.reshape(head.split[1], [4, 1])
    cat: f32[4, 3] = aten.cat([reshape, reshape_1, I.y], 1)
    reduce_scatter_tensor: f32[3] = _c10d_functional.reduce_scatter_tensor(cat, "avg", 4, fsdp)
    wait_tensor: f32[3] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
  with head:
    all_reduce: f32[4] = _c10d_functional.all_reduce(split[1], "sum", fsdp)
if out:
  yield bwd.bucket(head).wait_tensor
""")
        == """\
fsdp = group(range(0, 4))
if fwd:
  launch(head.all_reduce, fsdp, f32[8], op="sum", bytes=32)
if bwd:
  wait(saved.head.all_reduce)
  compute(head, neg, ops=1)
  launch(bucket(head).reduce_scatter_tensor, fsdp, f32[4, 3], op="avg", bytes=48, tensors=3)
  wait(bucket(head).reduce_scatter_tensor)
  launch(head.all_reduce, fsdp, f32[4], op="sum", bytes=16)
"""
    )


def test_experts_exchange_rows_of_data_dependent_number():
    """All-to-all: the wait for the device comes first among the operators, sizes are symbols of the
    layer.
    """
    assert (
        schedule("""\
ep = group(range(0, 2))
if I:
  I.rows: bf16[8, 4]
  I.counts: i64[2]
if fwd:
  with layers[0].moe:
    relu: bf16[8, 4] = aten.relu(I.rows)
    select: i64[()] = aten.select.int(I.counts, 0, 0)
    _local_scalar_dense: int[u0] = aten._local_scalar_dense(select)
    ge: bool[u0 >= 0] = operator.ge(_local_scalar_dense, 0)
    _assert_scalar: _ = aten._assert_scalar(ge, "u0 >= 0")
    all_to_all_single: bf16[u0, 4] = _c10d_functional.all_to_all_single(relu, [_local_scalar_dense, 1], [4, 4], ep)
    wait_tensor: bf16[u0, 4] = _c10d_functional.wait_tensor(all_to_all_single)
if out:
  yield fwd.layers[0].moe.wait_tensor
""")
        == """\
ep = group(range(0, 2))
for i in fwd.layers[0]:
  compute(L.moe, _local_scalar_dense, relu, ops=2)
  launch(L.moe.all_to_all_single, ep, bf16[L.u0, 4], bytes=8*L.u0)
  wait(L.moe.all_to_all_single)
"""
    )


def test_a_stretch_names_its_weightiest_operators_and_counts_all():
    def step(x):
        y = (x.t() @ x).exp().sin().cos().sin().tanh().sigmoid()
        return y.view(-1).reshape(1, 9), x.shape[0] + 1

    assert (
        schedule(small_graph(step, torch.zeros(3, 3)))
        == """\
if fwd:
  compute(_, mm, sin*2, exp, cos, tanh, ..., ops=7)
"""
    )


INTO_A_BUFFER = """\
fsdp = group(range(0, 2))
if P:
  P.w: f32[4]
if fwd:
  with _:
    empty: f32[8] = aten.empty.memory_format([8], device=device("cpu"), pin_memory=False)
    all_gather_into_tensor_out: f32[8] = _c10d_functional.all_gather_into_tensor_out(P.w, 2, fsdp, out=empty)
    wait_tensor: f32[8] = _c10d_functional.wait_tensor(all_gather_into_tensor_out)
if out:
  yield fwd._.wait_tensor
"""


def test_a_buffer_for_the_result_is_no_payload_of_its_own():
    """The twin writes to a buffer that torch allocates: both move the same, in the schedule and in
    the timeline.
    """
    functional = INTO_A_BUFFER.replace("_out(", "(").replace(", out=empty", "").replace("_out", "")
    assert "launch(_.all_gather_into_tensor_out, fsdp, f32[8], bytes=32)\n" in schedule(
        INTO_A_BUFFER
    )
    assert "launch(_.all_gather_into_tensor, fsdp, f32[8], bytes=32)\n" in schedule(functional)
    seconds = [timeline(parse(text)).total("collective") for text in (INTO_A_BUFFER, functional)]
    assert seconds[0] == seconds[1] > 0


def test_a_timeline_of_a_group_that_nobody_knows_is_refused():
    with pytest.raises(
        ValueError, match=r"cannot say when all_gather_into_tensor_out .* group fsdp"
    ):
        timeline(parse(INTO_A_BUFFER.replace("group(range(0, 2))", "group(None)")))


def test_who_reads_a_collective_without_a_wait_is_held_by_it():
    """Operators of symmetric memory are such: they return when they are done."""
    gm = parse(INTO_A_BUFFER.replace("_c10d_functional.wait_tensor(", "aten.sin("))
    measured = timeline(gm)
    assert measured.exposed > 0
    assert [span.kind for span in measured.spans][-2:] == ["exposed", "compute"]


def test_collectives_in_place_hide_their_group_and_are_refused_by_name():
    gm = small_graph(lambda x: x.relu(), torch.zeros(4))
    (relu,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    relu.target, relu.args = torch.ops.c10d.broadcast_.default, ([relu.args[0]], None, 0, 0)
    with pytest.raises(
        ValueError, match=r"c10d\.broadcast_, a collective in place: .* trace .*_collectives"
    ):
        render(gm, "schedule")


def test_packing_operators_of_torch_are_no_collectives():
    """They name a group, too: for the rank."""
    with torch.library._scoped_library("bucketing", "FRAGMENT") as library:
        library.define("pack_for_a_test(Tensor x, str group_name) -> Tensor")
        gm = small_graph(torch.sin, torch.zeros(3))
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        node.target, node.args = torch.ops.bucketing.pack_for_a_test.default, (*node.args, "0")
        assert "  compute(_, pack_for_a_test, ops=1)\n" in schedule(gm)


def test_a_graph_without_collectives():
    assert (
        schedule(toy_graph(9))
        == """\
if fwd:
  compute(embed, mm, _to_copy, ops=2)
for i in fwd.layers[0:9]:  # x9
  compute(L, mm, relu, add, ops=3)
if fwd:
  compute(head, sum, ops=1)
"""
    )


def test_outermost_modules_have_stretches_of_their_own():
    assert (
        schedule("""\
if I:
  I.x: f32[2]
if fwd:
  with norm:
    sin: f32[2] = aten.sin(I.x)
  with head.first:
    cos: f32[2] = aten.cos(norm.sin)
  with head.second:
    exp: f32[2] = aten.exp(head.first.cos)
if out:
  yield fwd.head.second.exp
""")
        == """\
if fwd:
  compute(norm, sin, ops=1)
  compute(head, cos, exp, ops=2)
"""
    )


def test_a_layer_of_many_collectives_is_told_by_what_it_lacks():
    names = ["all_reduce", "all_reduce_1", "all_reduce_2", "all_reduce_3", "all_reduce_4"]
    launches = [
        f'    {name}: f32[2] = _c10d_functional.all_reduce(P.L.w, "sum", tp)\n' for name in names
    ]
    waits = [
        f"    wait{name[10:]}: f32[2] = _c10d_functional.wait_tensor({name})\n" for name in names
    ]
    body = "".join(["  with L:\n    neg: f32[2] = aten.neg(P.L.w)\n", *launches, *waits])
    odd = body.replace(waits[3], "")
    text = "tp = group(range(0, 2))\nfor i in P.layers[0:4]:\n  P.L.w: f32[2]\n"
    assert schedule(
        f"{text}for i in fwd.layers[0:3]:\n{body}for i in fwd.layers[3]:\n{odd}"
    ).endswith("""\
for i in fwd.layers[3]:  # as fwd.layers[0], but for
  like(fwd.layers[0])
  drop(wait(L.all_reduce_3))
""")


def test_a_graph_without_metadata():
    gm = toy_graph(2)
    for node in gm.graph.nodes:
        node.meta.clear()
    assert schedule(gm) == "if fwd:\n  compute(_, mm*3, relu*2, add*2, _to_copy, sum, ops=9)\n"


def test_a_graph_that_computes_nothing():
    assert schedule(small_graph(lambda x: x.view(-1), torch.zeros(3))) == "schedule = []\n"


REDUCING = (
    'all_reduce: f32[4] = _c10d_functional.all_reduce(A[0], "sum", fsdp)',
    "wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)",
)
BRANCHES = f"""\
fsdp = group(range(0, 2))
{inner_graph(0, *REDUCING)}\
{inner_graph(1, "sin: f32[4] = aten.sin(A[0])")}\
{inner_graph(2, *REDUCING)}\
if A:
  A[0]: f32[4]
if fwd:
  with moe:
    any: b8[()] = aten.any(A[0])
    cond: (f32[4],) = hop.cond(any, cond_graph_0, cond_graph_1, (A[0],))
    cond_1: (f32[4],) = hop.cond(any, cond_graph_2, cond_graph_1, (A[0],))
    cond_2: (f32[4],) = hop.cond(any, cond_graph_1, cond_graph_1, (A[0],))
    all_gather_into_tensor_coalesced: [f32[8], f32[8]] = \
_c10d_functional.all_gather_into_tensor_coalesced([cond_1[0], cond_2[0]], 2, fsdp)
    wait_tensor: f32[8] = _c10d_functional.wait_tensor(all_gather_into_tensor_coalesced[0])
    wait_tensor_1: f32[8] = _c10d_functional.wait_tensor(all_gather_into_tensor_coalesced[1])
if out:
  yield fwd.moe.wait_tensor
"""


def test_a_graph_inside_the_graph_is_told_if_it_communicates():
    """Equal ones once; one that does not is an operator as any other; results of one collective are
    one wait.
    """
    assert (
        schedule(BRANCHES)
        == """\
fsdp = group(range(0, 2))
def cond_graph_0():
  fsdp = group(range(0, 2))
  if fwd:
    launch(_.all_reduce, fsdp, f32[4], op="sum", bytes=16)
    wait(_.all_reduce)
if fwd:
  compute(moe, any, ops=1)
  call(moe, cond, cond_graph_0)
  call(moe, cond, cond_graph_0)
  compute(moe, cond, ops=1)
  launch(moe.all_gather_into_tensor_coalesced, fsdp, f32[16], bytes=64, tensors=2)
  wait(moe.all_gather_into_tensor_coalesced)
"""
    )


INSIDE_OF_A_BRANCH = f"""\
def cond_graph_0():
{textwrap.indent(inner_graph(0, *REDUCING), "  ")}\
{textwrap.indent(inner_graph(1, "sin: f32[4] = aten.sin(A[0])"), "  ")}\
  if A:
    A[0]: f32[4]
  if fwd:
    any: b8[()] = aten.any(A[0])
    cond: (f32[4],) = hop.cond(any, cond_graph_0, cond_graph_1, (A[0],))
  if out:
    yield cond[0]
{inner_graph(1, "sin: f32[4] = aten.sin(A[0])")}\
if A:
  A[0]: f32[4]
if fwd:
  with moe:
    any: b8[()] = aten.any(A[0])
    cond: (f32[4],) = hop.cond(any, cond_graph_0, cond_graph_1, (A[0],))
if out:
  yield fwd.moe.cond[0]
"""


def test_a_graph_that_only_calls_one_that_communicates_is_told_too():
    """D17: what is launched two graphs deep is not left out."""
    text = schedule(INSIDE_OF_A_BRANCH)
    assert "  call(moe, cond, cond_graph_0)\n" in text
    assert "    launch(_.all_reduce, " in text
    assert "launch" not in schedule(
        INSIDE_OF_A_BRANCH.replace(REDUCING[0], "all_reduce: f32[4] = aten.neg(A[0])").replace(
            REDUCING[1], "wait_tensor: f32[4] = aten.cos(all_reduce)"
        )
    )


def test_a_launch_of_tensors_of_several_dtypes_counts_the_bytes_of_each():
    text = schedule("""\
fsdp = group(range(0, 2))
if I:
  I.x: bf16[4]
  I.y: f32[2]
if fwd:
  both: [bf16[8], f32[4]] = _c10d_functional.all_gather_into_tensor_coalesced([I.x, I.y], 2, fsdp)
  wait_tensor: f32[4] = _c10d_functional.wait_tensor(both[1])
if out:
  yield wait_tensor
""")
    assert "all_gather_into_tensor_coalesced, fsdp, bf16[8], f32[4], bytes=32, tensors=2)\n" in text


COALESCED = """\
s0 = size(16)
fsdp = group(range(0, 8))
if I:
  I.x: f32[s0, 4]
if fwd:
  nonzero: i64[u0, 2] = aten.nonzero(I.x)
  all_reduce_coalesced: [f32[s0, 4], f32[s0, 4]] = _c10d_functional.all_reduce_coalesced([I.x, I.x], "sum", fsdp)
  all_reduce_coalesced_1: [i64[u0, 2], i64[u0, 2]] = \
_c10d_functional.all_reduce_coalesced([nonzero, nonzero], "sum", fsdp)
if out:
  yield all_reduce_coalesced[0]
  yield all_reduce_coalesced_1[0]
"""


def test_the_size_of_several_tensors_keeps_its_symbols():
    """And puts no guard on them."""
    gm = parse(COALESCED)
    lines = [line.strip() for line in render(gm, "schedule").splitlines() if "launch(" in line]
    assert [line.partition("fsdp, ")[2] for line in lines] == [
        'f32[8*s0], op="sum", bytes=32*s0, tensors=2)',
        'i64[4*u0], op="sum", bytes=32*u0, tensors=2)',
    ]
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert x.meta["val"].fake_mode.shape_env.guards == []


def test_a_view_is_no_graph():
    with pytest.raises(TextError) as error:
        parse(render(toy_graph(), "schedule"))
    assert str(error.value) == (
        "line 1: this is the schedule view of a graph, a part of it: render the full view to "
        "parse it"
    )
    with pytest.raises(ValueError, match="view 'brief': this version has full, schedule, layout"):
        render(toy_graph(), "brief")


def bucketed_llama3(mesh, monkeypatch, layers: int) -> fx.GraphModule:
    monkeypatch.setitem(
        llama3.FLAVORS, "this", dataclasses.replace(llama3.FLAVORS["debug"], n_layers=layers)
    )
    config = llama3_training(mesh, "bf16_fp32", "this")
    return rewrite(trace_config(config, shard_traceably(config.model(), config)), config).gm


@pytest.mark.gt_world("fake", size=8, mesh={"fsdp": 8})
@pytest.mark.parametrize("layers", [4, pytest.param(126, marks=pytest.mark.long)])
def test_a_bucketed_model_of_any_depth_needs_at_most_sixty_lines(gt_mesh, monkeypatch, layers):
    """E1, E2: forward and backward show their prefetching in one loop each."""
    text = schedule(bucketed_llama3(gt_mesh, monkeypatch, layers))
    assert len(text.splitlines()) <= 60
    assert events(text, f"fwd.layers[0:{layers - 1}]") == [
        "launch(bucket(layers[i+1]).all_gather_into_tensor",
        "wait(bucket(L).all_gather_into_tensor)",
    ]
    assert events(text, f"bwd.layers[{layers - 2}::-1]") == [
        "launch(bucket(L).reduce_scatter_tensor",
        "wait(bucket(layers[i+1]).reduce_scatter_tensor)",
    ]


def events(text: str, section: str) -> list[str]:
    """Launches and waits of a section, by name."""
    (body,) = [
        body for body in re.split(r"\n(?=\S)", text) if body.startswith(f"for i in {section}:")
    ]
    return [
        line.strip().partition(", ")[0]
        for line in body.splitlines()
        if line.startswith(("  launch", "  wait"))
    ]
