"""Peak memory by liveness, held against the storages that the graph's generated code keeps
alive.
"""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_offloading import offload_ops
from torch._higher_order_ops import scan, while_loop
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_peak_memory, graphtext, peak_memory, trace_step
from pytest_gtrainer._torch.passes import add_control_dependencies
from tests.passes.alive import Alive, differing, run


def views(x):
    """Only the last view keeps the product."""
    y = x @ x
    first, second = y.split([4, 12])
    z = second.t().reshape(2, -1)
    parts = first.unbind(0)
    return (z[0] * 2).sum() + parts[1].exp().sum()


def writes(x):
    y = torch.zeros(16, 16)
    y[2:4] = x[:2]
    y.add_(x).mul_(2)
    z = y.sin()
    torch.add(z, x, out=y)
    return y.cos() + z


def several_results(x):
    y, mean, _ = torch.ops.aten.native_layer_norm(x, [16], None, None, 1e-5)
    values, indices = torch.max(y, 0)
    return values * mean[0], indices


def unused(x):
    x.sin()
    y = torch.empty(64, 64)
    y.fill_(1)
    return x.cos()


def batched(x):
    """``_unsafe_view`` shows its operand, and its schema does not say so."""
    return torch.matmul(x.view(2, 8, 16), x[:, :3]).exp().sum()


def strided(x):
    """An expanded operand's copy is dense, ``empty_strided`` takes what its strides span."""
    y = x[:1].expand(16, 16).clone()
    z = torch.empty_strided((4, 4), (64, 2))
    return torch.unsafe_chunk(y + 1, 2)[1].sum() + z.copy_(y[:4, :4]).sum()


def complex_numbers(x):
    y = torch.view_as_complex(x.view(16, 8, 2))
    return torch.view_as_real(y * y).abs().sum() + torch.fft.fft(y).real.sum()


FUNCTIONS = [views, writes, several_results, unused, batched, strided, complex_numbers]


@pytest.mark.second_tier("batched", "complex_numbers", "unused")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_curve_is_that_of_the_storages(function):
    x = torch.randn(16, 16)
    gm = make_fx(function, tracing_mode="fake")(x)
    assert differing(gm, run(gm, [x])) == {}


@pytest.mark.second_tier
def test_a_tensor_that_is_kept_longer_shows():
    """The twin: the same operators, one of which stands later."""
    gm = make_fx(lambda x: (x.exp() @ x).sin() + x.exp().sum(), tracing_mode="fake")(
        torch.randn(16, 16)
    )
    found, x = run(gm, [torch.randn(16, 16)]), torch.randn(16, 16)
    late = copy.deepcopy(gm)
    exp = late.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    last = next(node for node in late.graph.nodes if node.name == "sin")
    with late.graph.inserting_after(last):
        again = late.graph.call_function(torch.ops.aten.sum.default, (exp,))
    again.meta["val"] = torch.empty((), device="meta")
    late.recompile()
    other = run(late, [x])
    assert differing(late, other) == {}
    assert other["sin"][0] == found["sin"][0] + 1024
    assert peak_memory(late).curve["sin"] == peak_memory(gm).curve["sin"] + 1024


def test_inputs_that_are_views_of_one_memory_hold_all_of_it():
    """Parameters of one flat buffer, for example: a view shows a part, and keeps the whole."""
    flat, graph = torch.empty(40, device="meta"), fx.Graph()
    for name, view in (("a", flat[:8]), ("b", flat[8:16])):
        graph.placeholder(name).meta.update(val=view, gt_input={"kind": "parameter", "fqn": name})
    total = graph.call_function(
        torch.ops.aten.add.Tensor, tuple(graph.find_nodes(op="placeholder"))
    )
    total.meta["val"] = torch.empty(8, device="meta")
    graph.output(total)
    found = peak_memory(fx.GraphModule({}, graph))
    assert (found.peak, found.by_kind["parameter"]) == (40 * 4 + 8 * 4, 40 * 4)
    # One memory has one name, that of the first input.
    assert [one.name for one in found.alive if one.kind == "parameter"] == ["a"]


def test_values_that_a_pass_copied_are_no_memory():
    """A recomputed node, and a copy, have the value of the node that they were copied from."""
    gm = make_fx(lambda x: (x.exp().view(-1).sin(), x.cos()), tracing_mode="fake")(
        torch.randn(16, 16)
    )
    exp, view = (
        next(node for node in gm.graph.nodes if node.name == name) for name in ("exp", "view")
    )
    with gm.graph.inserting_before(gm.graph.output_node()):
        again = gm.graph.node_copy(exp)
        copied = gm.graph.call_function(torch.ops.aten.clone.default, (again,))
        copied.meta = dict(exp.meta)
        shown = gm.graph.node_copy(view, lambda node: copied if node is exp else node)
    output = gm.graph.output_node()
    output.args = ((*output.args[0], shown),)
    gm.recompile()
    assert differing(gm, run(gm, [torch.randn(16, 16)])) == {}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(16, 64),
            nn.LayerNorm(64),
            nn.Linear(64, 16, bias=False),
        )
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return torch.nn.functional.relu_(self.down(self.norm(self.up(x)).sigmoid())) * self.scale


@pytest.fixture(scope="module")
def graphs():
    """Dynamo's graph, and AOTAutograd's two, each with the inputs that it was called with."""
    found = {}

    def keep(which):
        def compiler(gm, inputs):
            def call(*real):
                found[which] = (
                    gm,
                    [each.detach() if isinstance(each, torch.Tensor) else each for each in real],
                )
                return gm(*real)

            return make_boxed_func(call)

        return compiler

    def backend(gm, inputs):
        compiled = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))(
            gm, inputs
        )

        def call(*real):
            found["dynamo"] = gm, [each.detach() for each in real]
            return compiled(*real)

        return call

    torch.compiler.reset()
    torch.compile(Model(), backend=backend)(torch.randn(8, 16, requires_grad=True)).sum().backward()
    return found


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_graphs_of_aotautograd(graphs, which):
    gm, inputs = graphs[which]
    assert differing(gm, run(gm, inputs)) == {}


def test_a_graph_of_dynamo(graphs):
    """Its operators are torch's functions, which torch takes apart: the peaks are compared."""
    gm, inputs = graphs["dynamo"]
    mode = Alive(inputs)
    with torch.no_grad(), mode:
        gm(*inputs)
    estimate = peak_memory(gm)
    # a layer norm's means and deviations are inside of torch's function
    assert estimate.peak <= max(nbytes for _, nbytes in mode.ran) <= 1.05 * estimate.peak
    assert {one.name: one.kind for one in estimate.alive if one.name == "up.weight"} == {
        "up.weight": "parameter"
    }


def test_an_exported_program_and_a_bare_graph():
    program = torch.export.export(Model(), (torch.randn(8, 16),)).run_decompositions()
    estimate = peak_memory(program)
    assert estimate.by_kind["parameter"] == 4 * (16 * 64 * 2 + 64 * 3)
    assert estimate.by_kind["buffer"] == 64
    assert peak_memory(program.graph, names={"x": "x"}).peak == estimate.peak


def test_a_graph_inside_adds_what_it_makes():
    x = torch.randn(16, 16)
    inner = make_fx(lambda x: (x @ x).exp().sum(), tracing_mode="fake")(x)
    graph = fx.Graph()
    given = graph.placeholder("x")
    called = graph.call_module("inner", (given,))
    graph.output(graph.call_function(torch.ops.aten.neg.default, (called,)))
    gm = fx.GraphModule({"inner": inner}, graph)
    fake = next(iter(inner.graph.nodes)).meta["val"]
    for node, value in zip(gm.graph.nodes, (fake, fake.sum(), fake.sum()), strict=False):
        node.meta["val"] = value
    mode = Alive([x])
    with torch.no_grad(), mode:
        gm(x)
    estimate = peak_memory(gm)
    assert estimate.peak == max(nbytes for _, nbytes in mode.ran)
    assert estimate.at == "inner"
    assert "in inner" in str(estimate)


def test_what_a_graph_inside_shows_of_its_operand_keeps_that_alive():
    x = torch.randn(16, 16)
    inner = make_fx(lambda y: y.view(-1), tracing_mode="fake")(x)
    graph = fx.Graph()
    given = graph.placeholder("x")
    exp = graph.call_function(torch.ops.aten.exp.default, (given,))
    shown = graph.call_module("inner", (exp,))
    graph.output((shown, graph.call_function(torch.ops.aten.cos.default, (given,))))
    gm = fx.GraphModule({"inner": inner}, graph)
    for node in list(gm.graph.nodes)[:-1]:
        node.meta["val"] = torch.empty(256 if node.op == "call_module" else (16, 16), device="meta")
    mode = Alive([x])
    with torch.no_grad(), mode:
        gm(x)
    assert [nbytes for _, nbytes in mode.ran] == [2048, 2048, 3072]
    assert list(peak_memory(gm).curve.values()) == [2048, 2048, 3072, 3072]


def calls(inner, count):
    """Make a graph: an exp of the input, ``inner`` of that, and ``count`` nodes of one element."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    exp = graph.call_function(torch.ops.aten.exp.default, (x,))
    called = graph.call_module("inner", (exp,))
    for node in (x, exp, called):
        node.meta["val"] = torch.empty(16, 16, device="meta")
    for _ in range(count):
        zeros = graph.call_function(torch.ops.aten.zeros.default, ([1],))
        zeros.meta["val"] = torch.empty(1, device="meta")
    graph.output(called)
    return fx.GraphModule({"inner": inner}, graph)


@pytest.mark.parametrize("count", [0, 9])
def test_a_long_graph_inside_keeps_its_operands_no_longer(count):
    """Its places are not those of the graph around it, which may be shorter or longer."""

    def inside(y):
        return y.view(-1)[:64].sin().sin().sin().sin() + y.view(-1)[:64]

    gm = calls(make_fx(inside, tracing_mode="fake")(torch.randn(16, 16)), count)
    x = torch.randn(16, 16)
    mode = Alive([x])
    with torch.no_grad(), mode:
        gm(x)
    curve = list(peak_memory(gm).curve.values())
    assert max(curve) == max(nbytes for _, nbytes in mode.ran) == 2048 + 2 * 256
    assert curve == [2048, 2048 + 2 * 256, *[1024 + 256 + 4] * count, 1024 + 256]


SCATTERED = """
fsdp = group(range(0, 2))
if I:
  I[0]: f32[16, 16]
if fwd:
  with a:
    sin: f32[16, 16] = aten.sin(I[0])
    scattered: f32[8, 16] = _c10d_functional.reduce_scatter_tensor(sin, "sum", 2, fsdp)
    cos: f32[16, 16] = aten.cos(I[0])
    waited: f32[8, 16] = _c10d_functional.wait_tensor(scattered)
if out:
  out[0] = fwd.a.waited
  out[1] = fwd.a.cos
"""


@pytest.mark.second_tier("launch", "both")
@pytest.mark.parametrize("inside", ["launch", "wait", "both"])
def test_a_collective_holds_its_operand_if_it_or_its_wait_is_in_a_graph_inside(inside):
    """A control dependency runs a graph of one operator, which changes no memory."""
    gm = graphtext.parse(SCATTERED)
    expected = dict(peak_memory(gm).curve)
    assert list(expected.values()) == [2048, 2560, 3584, 2560, 2560]
    sin, scattered, cos, waited = list(gm.graph.nodes)[1:-1]
    after = {scattered: sin, waited: cos}
    if inside != "both":
        del after[waited if inside == "launch" else scattered]
    add_control_dependencies(gm.graph, after)
    gm.recompile()
    curve = peak_memory(gm).curve
    assert {name: curve[name] for name in expected} == expected


def test_a_collective_holds_what_the_graph_inside_that_launched_it_made():
    """The wait stands in another graph inside, in which cos comes first."""
    gm = graphtext.parse(SCATTERED)
    sin, scattered, cos, waited = list(gm.graph.nodes)[1:-1]
    launching, waiting, graph = fx.Graph(), fx.Graph(), fx.Graph()
    x = launching.placeholder("x")
    first = launching.node_copy(sin, lambda _: x)
    launching.output(launching.node_copy(scattered, lambda _: first))
    operands = {scattered: waiting.placeholder("scattered"), cos.args[0]: waiting.placeholder("x")}
    other = waiting.node_copy(cos, operands.__getitem__)
    waiting.output((waiting.node_copy(waited, operands.__getitem__), other))

    x = graph.node_copy(cos.args[0])
    launch = graph.call_module("launching", (x,))
    graph.node_copy(cos, lambda _: x)
    wait = graph.call_module("waiting", (launch, x))
    graph.output(wait)
    launch.meta["val"], wait.meta["val"] = scattered.meta["val"], (waited.meta["val"],)
    modules = {
        "launching": fx.GraphModule({}, launching),
        "waiting": fx.GraphModule({}, waiting),
    }
    curve = peak_memory(fx.GraphModule(modules, graph)).curve
    # KiB: the input 1, sin 1, the shard 1/2, cos 1 each time.
    assert list(curve.values()) == [2560, 3584, 3584, 2560]


def traced_before_dispatch(function, *inputs):
    return make_fx(function, pre_dispatch=True, tracing_mode="fake")(*inputs)


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x: x.contiguous(memory_format=torch.channels_last), True),
        (lambda x: x.to(memory_format=torch.channels_last), True),
        (lambda x: x.to(torch.float32, copy=True), True),
        (lambda x: x.to(x, copy=True), True),
        (lambda x: x.to(torch.float64), True),
        (lambda x: x.contiguous(), False),
        (lambda x: x.to(torch.float32), False),
        (lambda x: x.reshape(-1), False),
        (lambda x: x.movedim(0, -1), False),
        (lambda x: x.flatten(1), False),
    ],
)
def test_operators_that_torch_decomposes_are_views_only_if_they_copy_nothing(function, copies):
    x = torch.randn(2, 2, 4, 4)
    gm = traced_before_dispatch(lambda x: function(x).sin(), x)
    made = function(x).nbytes
    assert peak_memory(gm).peak == x.nbytes + (1 + copies) * made


def test_a_loop_holds_what_the_iteration_before_has_made():
    def loop(x):
        def is_open(count, y):
            return count < 3

        def step(count, y):
            return count + 1, y.sin()

        return while_loop(is_open, step, (torch.tensor(0), x))

    x = torch.randn(1024)
    gm = make_fx(loop, tracing_mode="fake")(x)
    counts = 4 * 8 + 1  # a constant and its copy, two counts, and a bool
    assert peak_memory(gm).peak == 3 * x.nbytes + counts


def test_a_scan_holds_its_stacked_results_and_the_carry_before():
    def summed(x):
        return scan(lambda carry, row: (carry + row, carry.sin()), x[0], x)

    x = torch.randn(4, 1024)
    gm = make_fx(summed, tracing_mode="fake")(x)
    row = x[0].nbytes
    # The input, the results, the last carry, and the carry and the row of an iteration.
    assert peak_memory(gm).peak >= x.nbytes + 4 * row + 3 * row


def test_of_two_branches_the_larger_one_counts():
    def step(p, x):
        return torch.cond(p, lambda x: (x.sin() @ x.cos()).sum(), lambda x: x.sum(), (x,))

    x = torch.randn(16, 16)
    gm = make_fx(step, tracing_mode="fake")(torch.tensor(True), x)
    estimate = peak_memory(gm)
    assert estimate.peak == 1 + 1024 + 3 * 1024
    assert estimate.at == "cond"


REDUCED = """
fsdp = group(range(0, 2))
if P:
  P.w: f32[1024]
if B:
  B.scale: f32[4]
if I:
  I.state.w.exp_avg: f32[8]
if fwd:
  with w:
    sin: f32[1024] = aten.sin(P.w)
  with a:
    cos: f32[1024] = aten.cos(P.w)
if bwd:
  with a:
    reduce_scatter: f32[512] = _c10d_functional.reduce_scatter_tensor(fwd.w.sin, "sum", 2, fsdp)
    exp: f32[1024] = aten.exp(P.w)
    mul: f32[1024] = aten.mul.Tensor(exp, fwd.a.cos)
    wait_tensor: f32[512] = _c10d_functional.wait_tensor(reduce_scatter)
if out:
  w = bwd.a.wait_tensor
  other = bwd.a.mul
"""


INSIDE_FORWARD = """
if I:
  I.x: f32[4]
if fwd:
  with a:
    sin: f32[4] = aten.sin(I.x)
    cos: f32[4] = aten.cos(sin)
if out:
  total = fwd.a.cos
"""


def test_a_collective_holds_its_operand_until_the_wait_and_kinds_are_told_apart():
    estimate = peak_memory(graphtext.parse(REDUCED))
    inputs = 4096 + 16 + 32
    assert dict(estimate.curve) == {
        "sin": inputs + 4096,
        "cos": inputs + 8192,
        "reduce_scatter": inputs + 10240,
        "exp": inputs + 14336,
        "mul": inputs + 18432,
        "wait_tensor": inputs + 6144,
        "output": inputs + 6144,
    }
    assert (estimate.at, estimate.module) == ("mul", "a")
    kinds = {
        one.name or one.node.name: one.kind
        for one in peak_memory(graphtext.parse(INSIDE_FORWARD)).alive
    }
    assert kinds == {"x": "input", "sin": "temporary", "total": "output"}
    assert estimate.by_kind == {
        "saved": 8192,
        "parameter": 4096,
        "temporary": 4096,
        "output": 4096,
        "gradient": 2048,
        "optimizer": 32,
        "buffer": 16,
    }


COALESCED = """
fsdp = group(range(0, 2))
if P:
  P.w: f32[1024]
if fwd:
  with w:
    sin: f32[1024] = aten.sin(P.w)
    cos: f32[1024] = aten.cos(P.w)
    gathered: [f32[2048], f32[2048]] = _c10d_functional.all_gather_into_tensor_coalesced([sin, cos], 2, fsdp)
    exp: f32[1024] = aten.exp(P.w)
    first: f32[2048] = _c10d_functional.wait_tensor(gathered[0])
    second: f32[2048] = _c10d_functional.wait_tensor(gathered[1])
if out:
  out[0] = fwd.w.first
  out[1] = fwd.w.second
"""


def test_a_coalesced_collective_holds_every_operand_until_its_last_wait():
    """KiB: the parameter and two operands of 4, two results of 8. The first wait lets go of none of
    them.
    """
    curve = {
        name: nbytes // 1024
        for name, nbytes in peak_memory(graphtext.parse(COALESCED)).curve.items()
    }
    found = {name: curve[name] for name in ("sin", "cos", "gathered", "exp", "first", "second")}
    assert found == {"sin": 8, "cos": 12, "gathered": 28, "exp": 32, "first": 28, "second": 20}


SENT = """
fsdp = group(range(0, 2))
if P:
  P.w: f32[1024]
if fwd:
  with w:
    sin: f32[1024] = aten.sin(P.w)
    sent: {} = _c10d_functional.{}, fsdp)
    exp: f32[256] = aten.exp(P.w[:256])
    got: {} = _c10d_functional.wait_tensor(sent)
if out:
  yield fwd.w.got
  yield fwd.w.exp
"""
COLLECTIVES = {
    "all_gather_into_tensor": ("f32[2048]", "all_gather_into_tensor(sin, 2", 4),
    "reduce_scatter_tensor": ("f32[512]", 'reduce_scatter_tensor(sin, "sum", 2', 4),
    "all_to_all_single": ("f32[1024]", "all_to_all_single(sin, [512, 512], [512, 512]", 4),
    "all_reduce": ("f32[1024]", 'all_reduce(sin, "sum"', 0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_another_rank_may_still_read_is_held_until_the_wait(name):
    """KiB of the operand beside the parameter, the result and what else is computed."""
    given, call, held = COLLECTIVES[name]
    text = SENT.format(given, call, given).replace("P.w[:256]", "P.w").replace("[256]", "[1024]")
    curve = peak_memory(graphtext.parse(text)).curve
    result = int(given[4:-1]) // 256
    assert curve["exp"] // 1024 == 4 + held + result + 4


def test_what_stays_below_the_bound_passes_and_one_byte_more_does_not():
    gm = graphtext.parse(REDUCED)
    peak = assert_peak_memory(gm, at_most="1 GiB").peak
    assert_peak_memory(gm, at_most=peak)
    with pytest.raises(AssertionError) as failure:
        assert_peak_memory(gm, at_most=peak - 1)
    message = str(failure.value)
    assert (
        "holds 22.05 KiB (22,576 bytes) at once, at_most is 22.05 KiB (22,575 bytes): 1 too many"
        in message
    )
    assert "the peak is at mul (aten.mul.Tensor in a), node 5 of 7" in message
    assert len([line for line in message.splitlines() if "float32[" in line]) == 5
    assert "print(peak_memory(gm)" in message


def test_a_control_that_the_bound_allows_proves_nothing():
    """With few tokens all policies have one peak."""
    gm, larger = graphtext.parse(REDUCED), graphtext.parse(COALESCED)
    peak = peak_memory(gm).peak
    assert peak < peak_memory(larger).peak
    assert assert_peak_memory(gm, at_most=peak, control=larger).peak == peak
    with pytest.raises(AssertionError, match=r"the control holds 22\.05 KiB .* cannot fail"):
        assert_peak_memory(gm, at_most=peak, control=gm)


@pytest.mark.parametrize(
    "at_most", [0, -1, True, 1.5, "12 parsecs", "GiB", "0 MiB", "1.5 GB", None]
)
def test_a_bound_that_is_no_size_is_refused(at_most):
    with pytest.raises(
        ValueError,
        match=r"at_most is a number of bytes above 0, or a text of one of B, KiB, .*; not",
    ):
        assert_peak_memory(graphtext.parse(REDUCED), at_most=at_most)


def test_a_graph_without_values_says_how_to_get_them():
    gm = fx.symbolic_trace(Model())
    with pytest.raises(
        ValueError, match=r"x \(x\) has no value in its .*tracing_mode=\"fake\".*FakeTensorProp"
    ):
        peak_memory(gm)
    with pytest.raises(ValueError, match="the graph holds no tensors"):
        peak_memory(fx.symbolic_trace(lambda: 3))
    with pytest.raises(TypeError, match="3 is of type int, not a graph"):
        peak_memory(3)


ROUTED = """
if I:
  I[0]: b8[8]
  I[1]: f32[8, 4]
if fwd:
  with _:
    nonzero: i64[u0, 1] = aten.nonzero(I[0])
    view: i64[u0] = aten.view(nonzero, [-1])
    index: f32[u0, 4] = aten.index_select(I[1], 0, view)
if out:
  out[0] = index
"""


def test_sizes_that_only_the_run_knows_are_given_by_their_symbols():
    gm = graphtext.parse(ROUTED)
    with pytest.raises(
        ValueError,
        match=r"how much memory nonzero .* takes is known only when .*sizes=\{'u0': 128\}",
    ):
        peak_memory(gm)
    assert peak_memory(gm, sizes={"u0": 3}).peak == 8 + 128 + 3 * 8 + 3 * 16


X = torch.ones(1024)  # 4 KiB
INDICES = torch.arange(16)[None]


@pytest.mark.parametrize(
    ("function", "given", "says"),
    [
        (lambda x: x.to_sparse().to_dense(), (X,), r"_to_sparse \(aten._to_sparse.default\) is "),
        (lambda x: x.to_dense(), (X.to_sparse(),), r"x_1 \(x_1\) is "),
        (lambda x: torch.cat([x, x]), (X.to_sparse(),), "sparse"),
        (lambda x: x.view(32, 32).to_sparse_csr().values(), (X,), "_to_sparse_csr"),
        (lambda i, v: torch.sparse_coo_tensor(i, v, (99,)), (INDICES, X[:16]), "_sparse_coo"),
    ],
)
@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_refused_by_name(function, given, says, mode):
    """A trace on real tensors has None in its place, which would count as no bytes."""
    if mode == "real" and "csr" in says:
        pytest.skip("make_fx cannot trace it")
    gm = make_fx(function, tracing_mode=mode)(*given)
    with pytest.raises(ValueError, match=f"{says}.*known only when the graph runs"):
        assert_peak_memory(gm, at_most="1 GiB")


def keeps_what_set_shows(x):
    y = x.new_empty(10).set_(x.exp())
    return y.cos() + y.sin()


@pytest.mark.parametrize(
    ("function", "peak"),
    [
        (lambda x: x.new_empty(10).resize_(100_000).sum(), 4096 + 40 + 400_000),
        (lambda x: x.new_empty(10).resize_(5).sum(), 4096 + 40 + 4),
        (lambda x: x.new_empty(10).resize_as_(x).sum(), 4096 + 40 + 4096),
        (keeps_what_set_shows, 4096 + 40 + 4 * 4096 - 4096),
        (lambda x: torch.add(x, 1, out=x.new_empty(0)), 4096 + 4096),
        (lambda x: torch.max(x, 0, out=(x.new_empty(0), x.new_empty(0).long())), 4096 + 4 + 8),
        (lambda x: torch.ops.inductor.resize_storage_bytes_(x.sin(), 9000), 4096 + 4096 + 9000),
    ],
)
def test_what_a_tensor_is_resized_to_counts(function, peak):
    """The smaller memory is there until it is copied."""
    assert peak_memory(make_fx(function, tracing_mode="fake")(X)).peak == peak


def test_the_first_name_of_what_has_grown_shows_it():
    gm = make_fx(lambda x: x.new_empty(10).resize_(100_000).sum())(X)
    _, empty, resized, total, _ = gm.graph.nodes
    total.args = (empty,)
    assert resized.users == {}
    assert peak_memory(gm).curve[total.name] == 4096 + 400_000 + 4


def test_sizes_with_an_example_take_it():
    found = []

    def backend(gm, inputs):
        found.append(gm)
        return gm

    torch.compiler.reset()
    torch.compile(lambda x: (x * 2).sin(), backend=backend, dynamic=True)(torch.randn(32, 4))
    (gm,) = found
    assert peak_memory(gm).peak == 3 * 512


def test_sizes_that_are_given_win_over_those_of_the_trace():
    """Three tensors of rows of 16 bytes, 32 rows when they were traced, and one of 4 bytes."""

    def step(model, x):
        return (x * 2).sin().sum() * model.weight.sum()

    traced = trace_step(
        nn.Linear(1, 1, bias=False), step, (torch.ones(32, 4),), dynamic_dims={"rows": [(0, 0)]}
    )
    (symbol,) = {
        str(extent)
        for node in traced.gm.graph.find_nodes(op="placeholder")
        for extent in node.meta["val"].shape
        if isinstance(extent, torch.SymInt)
    }
    assert [peak_memory(traced.gm, sizes={symbol: rows}).peak - 4 for rows in (2, 64)] == [
        3 * 2 * 16,
        3 * 64 * 16,
    ]
    assert peak_memory(traced.gm).peak - 4 == 3 * 32 * 16


def test_operands_of_a_collective_that_nobody_waits_for_are_held_to_the_end():
    """KiB: the parameter and two operands of 4, two results of 8; nobody waits for the second."""
    gm = graphtext.parse(COALESCED)
    second = next(node for node in gm.graph.nodes if node.name == "second")
    second.replace_all_uses_with(second.args[0])
    gm.graph.erase_node(second)
    assert {name: nbytes // 1024 for name, nbytes in peak_memory(gm).curve.items()}["output"] == 28


def test_a_result_without_a_value_is_refused_and_one_that_is_no_tensor_is_not():
    gm = graphtext.parse(REDUCED)
    sin = next(node for node in gm.graph.nodes if node.name == "sin")
    with gm.graph.inserting_after(sin):
        gm.graph.call_function(torch.ops.aten._assert_scalar.default, (True, "never"))
    before = peak_memory(graphtext.parse(REDUCED)).peak
    assert peak_memory(gm).peak == before
    del sin.meta["val"]
    with pytest.raises(ValueError, match=r"sin \(.*\) has no value in its"):
        peak_memory(gm)


def back(x):
    # Tensor.to asks for a build of torch with CUDA; the operator below it does not.
    return torch.ops.aten._to_copy.default(x, device=torch.device("cuda"))


def offloads(x, w):
    """The second product is away while the others are computed; both devices hold tensors."""
    first = x @ w
    away = (first @ w).to("cpu")
    host = away.exp() + torch.ones(16, 16)
    rest = (first.sin() + first.cos()) * first
    return rest + back(away) @ w, host.sum()


def keeps(x, w):
    """The same without a trip to the CPU."""
    first = x @ w
    away = first @ w
    rest = (first.sin() + first.cos()) * first
    return rest + away @ w


def offloads_in_a_branch(x, w):
    def away(x):
        return back((x @ w).to("cpu").exp())

    return torch.cond(x.shape[0] > 2, away, lambda x: x.sin(), (x,)), w.cpu()


def traced_on_cuda(function):
    with FakeTensorMode():
        x, w = torch.empty(16, 16, device="cuda"), torch.empty(16, 16, device="cuda")
        return make_fx(function)(x, w)


@pytest.mark.parametrize("function", [offloads, keeps, offloads_in_a_branch])
def test_the_bytes_of_all_devices_are_those_of_the_graph(function):
    """All devices together hold at a node the bytes that the graph holds there."""
    gm = traced_on_cuda(function)
    devices = peak_memory(gm).by_device
    curves = [peak_memory(gm, device=device).curve for device in devices]
    for graph in gm.modules():
        for node in graph.graph.nodes:
            tensor = node.meta.get("val")
            if isinstance(tensor, torch.Tensor):
                node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride())
    whole = peak_memory(gm)
    assert list(whole.by_device) == ["cpu"]
    for name, nbytes in whole.curve.items():
        assert sum(curve[name] for curve in curves) == nbytes
    assert [max(curve.values()) for curve in curves] == list(devices.values())


def test_what_is_away_on_the_cpu_is_not_in_the_memory_of_the_accelerator():
    away = peak_memory(traced_on_cuda(offloads))
    kept = peak_memory(traced_on_cuda(keeps))
    assert (kept.device, kept.by_device) == ("cuda:0", {"cuda:0": 7 * 1024})
    assert (away.device, away.by_device) == ("cuda:0", {"cuda:0": 6 * 1024, "cpu": 4 * 1024})
    assert "on cuda:0; the peaks of others: 4.00 KiB on cpu\n" in str(away)
    assert "peaks of others" not in str(kept)


def test_a_bound_holds_for_one_device_and_its_control_for_the_same():
    away, kept = traced_on_cuda(offloads), traced_on_cuda(keeps)
    assert_peak_memory(away, at_most="6 KiB", control=kept)
    assert_peak_memory(away, at_most="4 KiB", device="cpu")
    with pytest.raises(AssertionError, match="1,024 too many"):
        assert_peak_memory(away, at_most="3 KiB", device="cpu")
    # The control holds nothing there, so it says nothing about the bound.
    with pytest.raises(ValueError, match=r"device='cpu' names 0 devices .* tensors on cuda:0"):
        assert_peak_memory(away, at_most="4 KiB", device="cpu", control=kept)


def test_a_control_is_measured_on_the_device_of_the_graph_that_nobody_named():
    """Without that it would be measured on its accelerator."""
    with FakeTensorMode():
        gm = make_fx(lambda x: x.exp())(torch.empty(16, 16))
    assert peak_memory(gm).device == "cpu"
    control = traced_on_cuda(offloads)
    assert_peak_memory(gm, at_most="3 KiB", control=control)
    with pytest.raises(AssertionError, match=r"the control holds 4\.00 KiB"):
        assert_peak_memory(gm, at_most="4 KiB", control=control)


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_of_several_accelerators_that_counts_which_holds_most(sizes):
    graph = fx.Graph()
    with FakeTensorMode():
        for index, size in enumerate(sizes):
            node = graph.placeholder(f"x{index}")
            node.meta["val"] = torch.empty(size, device=f"cuda:{index}")
        node = graph.placeholder("host")
        node.meta["val"] = torch.empty(64)
    graph.output(graph.find_nodes(op="placeholder"))
    peak = peak_memory(graph)
    assert (peak.device, peak.peak) == (f"cuda:{sizes.index(8)}", 32)


def test_a_device_is_named_as_torch_names_it():
    gm = traced_on_cuda(offloads)
    assert peak_memory(gm, device="cuda").peak == peak_memory(gm, device="cuda:0").peak
    with pytest.raises(ValueError, match=r"device='cuda:1' names 0 devices .* cuda:0, cpu: name"):
        peak_memory(gm, device="cuda:1")
    graph = fx.Graph()
    for index in range(2):
        node = graph.placeholder(f"x{index}")
        with FakeTensorMode():
            node.meta["val"] = torch.empty(4, device=f"cuda:{index}")
    graph.output(graph.find_nodes(op="placeholder"))
    with pytest.raises(ValueError, match=r"device='cuda' names 2 devices"):
        peak_memory(graph, device="cuda")


def test_torchs_offload_holds_both_until_its_wait():
    """KiB on the accelerator: x, its copy of 1 until the wait, and what comes back."""

    def step(x):
        y = x.exp()
        away = offload_ops.wait_tensor(offload_ops.offload(y), y)
        z = x.sin()
        near = offload_ops.reload(away, x.device)
        return z + offload_ops.wait_tensor(near, away)

    with FakeTensorMode():
        gm = make_fx(step)(torch.empty(16, 16, device="cuda"))
    on_gpu, on_host = peak_memory(gm).curve, peak_memory(gm, device="cpu").curve
    kib = {name: (on_gpu[name] // 1024, on_host[name] // 1024) for name in on_gpu}
    assert kib == {
        "exp": (2, 0),
        "offload": (2, 1),
        "wait_tensor": (2, 1),
        "sin": (2, 1),
        "reload": (3, 1),
        "wait_tensor_1": (3, 1),
        "add": (4, 0),
        "output": (2, 0),
    }


def test_a_tensor_on_meta_counts_on_every_device():
    gm = traced_on_cuda(offloads)
    before = peak_memory(gm).by_device
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.empty(16, 16, device="meta")
    inputs = 2 * 16 * 16 * 4
    assert before["cpu"] + inputs == peak_memory(gm, device="cpu").peak
    assert peak_memory(gm).by_device == {"cuda:0": before["cuda:0"], "cpu": before["cpu"] + inputs}
