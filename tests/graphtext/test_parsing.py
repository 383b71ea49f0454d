"""A text read back is the graph that it was made from, and runs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer.graphtext import diff, parse, render
from pytest_gtrainer.graphtext.scopes import is_item
from tests.graphtext.same import assert_comes_back
from tests.graphtext.toy import at, small_graph, toy_graph

aten = torch.ops.aten
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype)


def test_layers():
    tokens = torch.arange(16).reshape(2, 8)
    assert_comes_back(toy_graph(6, {3: torch.tanh}), tokens, *[x(8, 8) for _ in range(7)])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int8]
)
def test_dtypes(dtype):
    value = torch.tensor([1, 2, 3]).to(dtype)
    assert_comes_back(
        small_graph(
            lambda v: (v.view(3, 1), v.to(torch.float32) if not dtype.is_complex else v.abs()),
            value,
        ),
        value,
    )


@pytest.mark.parametrize(
    "number", [float("inf"), -float("inf"), float("nan"), -0.0, 1e-45, 3, -7, True, 2**40]
)
def test_numbers(number):
    assert_comes_back(small_graph(lambda v: aten.mul.Scalar(v, number), x(3)), x(3))


def test_several_outputs_lists_of_nodes_and_keywords():
    def step(v):
        values, places = v.topk(2)
        parts = v.split([1, 3])
        return (
            torch.cat([values, parts[1], v], dim=0),
            places.to(torch.int32),
            torch.zeros_like(v, memory_format=torch.contiguous_format),
        )

    assert_comes_back(small_graph(step, x(4)), x(4))


def test_mutations_are_kept_in_order():
    def step(v, w):
        v.add_(1)
        total = v.sum()
        w.copy_(v)
        v.mul_(2)
        return total, w.clone(), v.clone()

    assert_comes_back(small_graph(step, x(4), x(4)), x(4), x(4))


def test_strides_and_memory_formats():
    def step(v):
        return (
            v.to(memory_format=torch.channels_last),
            v.permute(0, 2, 3, 1),
            v.transpose(0, 1).contiguous(),
        )

    assert_comes_back(small_graph(step, x(2, 3, 4, 5)), x(2, 3, 4, 5))


def test_constants_small_and_large():
    small, large = torch.tensor([[1.0, -0.0], [float("inf"), 2.5]]).t(), x(64)
    gm = make_fx(lambda v: v * small.sum() + large[:2] + torch.tensor(3))(x(2))
    assert_comes_back(gm, x(2))
    with pytest.raises(
        ValueError, match=r"is given by its digest only: give constants=graphtext\.constants"
    ):
        parse(render(gm))


def test_results_of_every_shape():
    for step in (
        lambda v: v + 1,
        lambda v: (v + 1,),
        lambda v: [v + 1, v],
        lambda v: {"a": v, "b": [v + 1, None]},
    ):
        assert_comes_back(fx.symbolic_trace(step), x(3))


def test_annotations_and_policies():
    with (
        fx.traceback.preserve_node_meta(),
        at("block"),
        fx.traceback.annotate({"stage": 1, "note": "a b"}),
    ):
        gm = small_graph(torch.tanh, x(3))
    node = gm.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    again = assert_comes_back(gm, x(3))
    assert "| must_recompute | custom(note='a b', stage=1) = aten.tanh" in render(gm)
    assert (
        again.graph.find_nodes(op="call_function", target=aten.tanh.default)[0].meta["recompute"]
        is CheckpointPolicy.MUST_RECOMPUTE
    )


MARKS = [
    {"recompute": CheckpointPolicy.MUST_SAVE},
    {"recompute": CheckpointPolicy.PREFER_RECOMPUTE},
    {"custom": {"stage": 1}},
    {"custom": {"stage": {"inner": {"a": [1, (2, None)]}, 3: {}}}},
    {"custom": {3: {"a": 1}}},
]


def marked(of: str, mark: dict[str, Any], source: dict[str, Any] | None = None) -> fx.GraphModule:
    """A graph of which one node has a mark, and what an item is taken from another one."""
    gm = small_graph(lambda v: (*torch.topk(v, 2)[:2], torch.tanh(v)), x(3))
    nodes = {node.op if node.op == "placeholder" else node.name: node for node in gm.graph.nodes}
    nodes[of].meta.update(mark)
    nodes["topk"].meta.update(source or {})
    return gm


@pytest.mark.parametrize("mark", MARKS, ids=str)
@pytest.mark.parametrize("of", ["placeholder", "topk", "getitem", "getitem_1", "tanh"])
def test_every_node_shows_its_marks(of, mark):
    """Also one output of several, which has no line unless it has a mark of its own."""
    gm = marked(of, mark)
    assert render(gm) != render(marked(of, {}))
    assert_comes_back(gm, x(3))


@pytest.mark.parametrize(
    ("mark", "source"),
    [
        ({"recompute": CheckpointPolicy.MUST_SAVE}, MARKS[1]),
        ({"custom": {"stage": 2}}, MARKS[2]),
        ({"custom": {"stage": 1, "other": 2}}, MARKS[2]),
        ({"autograd_backward": True}, {}),
    ],
    ids=str,
)
def test_an_output_whose_marks_are_not_its_sources_has_a_line(mark, source):
    gm = marked("getitem_1", mark, source)
    assert render(gm) != render(marked("getitem_1", {}, source))
    assert "operator.getitem(" in render(gm)
    assert_comes_back(gm, x(3))


@pytest.mark.parametrize("mark", MARKS[:4], ids=str)
def test_an_output_with_its_sources_marks_has_no_line(mark):
    assert "getitem" not in render(marked("getitem", mark, mark))


def test_values_of_nested_annotations_are_told():
    one, other = (marked("tanh", {"custom": {"a": {"b": value}}}) for value in (1, 2))
    assert render(one) != render(other)


@pytest.mark.parametrize(
    "tag",
    ["chunk(L.moe, 0)", "chunk(L.moe, split_boundary)", "chunk(L.moe, materialization, eager)"],
)
def test_regions_of_chunking(tag):
    text = f"""\
# gtrainer graph v2
if A:
  A[0]: f32[2]
for i in fwd.layers[3]:
  with L.moe:
    sin: f32[2] | {tag} = aten.sin(A[0])
for i in out.layers[3]:
  yield fwd.L.moe.sin
"""
    assert render(parse(text)) == text


def test_nodes_without_a_module_stay_without():
    """Their heading follows from the operands; a pass must not take it for what the tracer said."""
    with fx.traceback.preserve_node_meta():

        def step(v):
            with at("block"):
                y = v + 1
            return y * 2

        gm = small_graph(step, x(3))
    assert (
        "with block:\n    add: f32[3] = aten.add.Tensor(A[0], 1)\n    mul: f32[3] | unowned"
        in render(gm)
    )
    assert_comes_back(gm, x(3))


def test_a_graph_without_any_module_says_so_once():
    gm = toy_graph(2)
    for node in gm.graph.nodes:
        node.meta.pop("custom", None)
    assert "owners = inferred" in render(gm)
    assert "unowned" not in render(gm)
    assert_comes_back(gm)


def test_modules_of_inputs_and_items_do_not_count():
    """They are not in the text, so no text could bring them back."""
    gm = small_graph(lambda v: v.split(2)[1], x(4))
    next(iter(gm.graph.nodes)).meta["gt_input"] = {"kind": "parameter", "fqn": "block.w"}
    for node in gm.graph.nodes:
        node.meta["custom"] = (
            {"module_fqn": "block"} if node.op == "placeholder" or is_item(node) else {}
        )
    assert "owners = inferred" in render(gm)
    assert_comes_back(gm, x(4))


def test_symbolic_shapes():
    gm = make_fx(lambda v, w: (v.reshape(-1) * 2, w[: v.shape[0] // 2]), tracing_mode="symbolic")(
        x(6, 5), x(8)
    )
    text = render(gm)
    assert "s0 = size(6)\ns1 = size(5)\ns2 = size(8)" in text
    assert "f32[s0*s1]" in text
    assert_comes_back(gm, x(6, 5), x(8))


def test_data_dependent_sizes():
    def step(v):
        picked = v[v > 0]
        count = (v > 1).sum().item()
        torch._check(count >= 0)
        return picked * 2, torch.zeros(count)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm = make_fx(step, tracing_mode="symbolic")(x(9))
    assert "f32[u0]" in render(gm)
    assert_comes_back(gm, x(9))


def test_branches():
    def step(v):
        return torch.cond(v.sum() > 0, lambda w: (w + 1, w * 2), lambda w: (w - 1, w / 2), (v,))

    gm = make_fx(step, tracing_mode="fake")(x(4))
    assert "def cond_graph_1():\n" in render(gm)
    assert_comes_back(gm, x(4))
    assert_comes_back(gm, -x(4).abs())


def test_flex_attention():
    def causal(b, h, q, kv):
        return q >= kv

    mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.zeros(1, 2, 128, 16)
        gm = make_fx(
            lambda q, k, v: flex_attention(q, k, v, block_mask=mask, score_mod=lambda s, *_: s * 2)
        )(q, q, q)
    assert "hop.flex_attention(" in render(gm)
    assert_comes_back(gm)


def test_modules_that_are_called_come_from_outside():
    class Calls(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = torch.nn.Sequential(torch.nn.Linear(3, 3))

        def forward(self, v):
            return self.seq(v).view(-1)

    gm = fx.symbolic_trace(Calls())
    assert_comes_back(gm, x(2, 3))
    with pytest.raises(
        ValueError, match=r"no text holds the module `seq.0`: give constants=\{'seq.0': module\}"
    ):
        parse(render(gm))


def test_names_that_look_like_something_else():
    """Values, modules and inputs called like words of the grammar."""
    graph = fx.Graph()
    source = graph.placeholder("v")
    source.meta["gt_input"] = {"kind": "parameter", "fqn": "P.L.0.fwd.w"}
    for fqn in ("L", "_", "bucket.saved", "layers.0.fwd", "i.3.L", "aten.add", "heads.en-de.2.x y"):
        node = graph.call_function(aten.add.Tensor, (source, 1))
        node.meta["custom"] = {"module_fqn": fqn}
        source = graph.call_function(aten.slice.Tensor, (node, 0, 0, 2))
        source.meta.update(custom={"module_fqn": fqn + ".slice"}, autograd_backward=True)
    graph.output((source,))
    assert_comes_back(fx.GraphModule({}, graph), x(3))


def test_process_groups_without_a_process_group():
    text = """\
fsdp = group(range(0, 8))
if P:
  P.w: f32[4]
if fwd:
  with w:
    all_gather_into_tensor: f32[32] = _c10d_functional.all_gather_into_tensor(P.w, 8, fsdp)
    wait_tensor: f32[32] = _c10d_functional.wait_tensor(all_gather_into_tensor)
if out:
  yield fwd.w.wait_tensor
"""
    gm = parse(text)
    launch = gm.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )[0]
    assert launch.args[1:] == (8, "fsdp")
    assert render(gm) == "# gtrainer graph v2\n" + text
    assert (
        parse(text, groups={"fsdp": "17"})
        .graph.find_nodes(op="call_function", target=ALL_GATHER)[0]
        .args[2]
        == "17"
    )


@pytest.mark.gt_world("fake", size=8, mesh={"dp": 2, "fsdp": 4}, rank=5)
def test_process_groups_of_this_world(gt_mesh):
    """The group with the ranks that the text says, best one of that mesh dimension."""
    text = """\
fsdp = group(range(4, 8))
if A:
  A[0]: f32[4]
if fwd:
  with _:
    gathered: f32[16] = _c10d_functional.all_gather_into_tensor(A[0], 4, fsdp)
"""
    launch = parse(text).graph.find_nodes(op="call_function", target=ALL_GATHER)[0]
    assert launch.args[2] == gt_mesh.get_group("fsdp").group_name


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
@pytest.mark.parametrize("order", ["fsdp extra other", "other fsdp extra"])
def test_process_groups_of_the_same_ranks_stay_apart(gt_mesh, order):
    """All-gathers in an extra group, as for overlap, and a group that is given by its ranks
    alone.
    """
    groups = {
        "fsdp": gt_mesh.get_group(),
        "extra": dist.new_group([0, 1, 2, 3], group_desc="mesh_fsdp_extra"),
    }
    groups["other"] = dist.new_group([0, 1, 2, 3])
    graph = fx.Graph()
    value = graph.placeholder("v")
    for name in order.split():
        value = graph.call_function(ALL_GATHER, (value, 4, groups[name].group_name))
    graph.output((value,))
    assert_comes_back(fx.GraphModule({}, graph))


@pytest.mark.gt_world("fake", size=4)
def test_groups_outside_of_meshes_are_called_as_the_program_called_them(gt_world):
    """Also where the group is given by keyword; those without a name that Python could read are
    counted.
    """
    described = {"experts": [0, 2], "my group": [0, 3], "undefined": [0, 1]}
    names = [dist.new_group(ranks, group_desc=name).group_name for name, ranks in described.items()]
    graph = fx.Graph()
    value = graph.placeholder("v")
    for name in names:
        value = graph.call_function(ALL_GATHER, (value,), {"group_size": 2, "group_name": name})
    graph.call_function(ALL_GATHER, (value, 4, dist.group.WORLD.group_name))
    graph.output((value,))
    head = render(fx.GraphModule({}, graph)).split("\nif ")[0].splitlines()[1:]
    assert [line for line in head if "= group(" in line] == [
        "experts = group(range(0, 4, 2))",
        "group = group(range(0, 6, 3))",
        "group_2 = group(range(0, 2))",
        "world = group(range(0, 4))",
    ]


def test_a_group_that_this_process_lacks_keeps_its_symbol():
    text = "fsdp = group(range(0, 2))\nfsdp_2 = group(range(0, 2))\n"
    assert parse(text).meta["gt_groups"] == {"fsdp": (0, 1), "fsdp_2": (0, 1)}


@pytest.mark.parametrize(
    ("order", "is_shown"), [("a.w b.w s", False), ("b.w a.w s", True), ("s a.w b.w", True)]
)
def test_the_order_in_which_a_model_manages_its_parameters_comes_back(order, is_shown):
    """D2: buckets are packed in it; it is shown where it does not follow from the names, in any way
    that differs.
    """
    gm = parse("if P:\n  P.a.w: f32[2]\n  P.s: f32[2]\n  P.b.w: f32[2]\nif out:\n  yield P.s\n")
    gm.graph.output_node().meta["gt_managed_order"] = tuple(order.split())
    text = render(gm)
    assert (f"\nmanaged = {order.split()}\n" in text) == is_shown, text
    if is_shown:
        assert parse(text).graph.output_node().meta["gt_managed_order"] == tuple(order.split())
        assert diff(render(parse(text.replace("managed = [", "managed = ['x', "))), text), (
            "a golden sees the order"
        )


def test_what_a_person_writes():
    """Other indentation, comments, lines that go on; `like` in another spelling."""
    gm = parse("""
if I:
    I.x: f32[2, 4]      # the input
if fwd:
    with block:
        sin: f32[2, 4] = aten.sin(
            I.x,
        )
        add: f32[2, 4] = aten.add.Tensor( sin, 1.0, alpha = 2 )
if out:
    yield fwd.block.add
""")
    assert torch.equal(gm(x(2, 4))[0], torch.sin(x(2, 4)) + 2)
