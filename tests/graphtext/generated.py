"""Graphs drawn at random: operators, scopes, directions, buckets, mutations, several outputs,
constants, devices, memory formats, branches, symbolic sizes.
"""

import operator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
FQNS = (
    "",
    "norm",
    "layers.0.attention.wq",
    "layers.1.attention.wq",
    "layers.1",
    "layers.2.moe.experts.1",
    "L",
    "a-b.c",
)
POLICIES = (None, None, None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)
NUMBERS = (1, -3, 0.5, -0.0, float("inf"), 1e-30, True)


def _unary(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    target = draw(
        st.sampled_from(
            [
                aten.sin.default,
                aten.neg.default,
                aten.relu.default,
                aten.t.default,
                aten.abs_.default,
            ]
        )
    )
    return graph.call_function(target, (draw(st.sampled_from(pool)),))


def _binary(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    one = draw(st.sampled_from(pool))
    other = draw(st.one_of(st.just(one), st.sampled_from(NUMBERS)))
    target = aten.mul.Tensor if isinstance(other, fx.Node) else aten.mul.Scalar
    return graph.call_function(target, (one, other))


def _cast(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    dtype = draw(st.sampled_from(DTYPES[:3]))
    keywords = {"dtype": dtype} | draw(
        st.sampled_from([{}, {"memory_format": torch.contiguous_format}])
    )
    return graph.call_function(aten._to_copy.default, (draw(st.sampled_from(pool)),), keywords)


def _several(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    parts = graph.call_function(aten.split.Tensor, (draw(st.sampled_from(pool)), 2))
    _mark(draw, parts)
    return graph.call_function(
        torch.ops.aten.cat.default, ([_item(graph, parts, 1), _item(graph, parts, 0)],)
    )


def _eight_bits(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    small = graph.call_function(
        aten._to_copy.default, (draw(st.sampled_from(pool)),), {"dtype": DTYPES[3]}
    )
    _mark(draw, small)
    return graph.call_function(aten._to_copy.default, (small,), {"dtype": torch.float32})


def _channels_last(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    image = graph.call_function(aten.reshape.default, (draw(st.sampled_from(pool)), [1, 4, 2, 2]))
    turned = graph.call_function(
        aten.clone.default, (image,), {"memory_format": torch.channels_last}
    )
    return graph.call_function(aten.reshape.default, (turned, [4, 4]))


def _constant(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    """Small ones are shown by their values, large ones by a digest."""
    value = draw(
        st.sampled_from(
            [torch.tensor(-0.0), torch.arange(4), torch.full((4, 4), 0.1), torch.ones(4, 1) > 0]
        )
    )
    module, name = graph.owning_module, f"constant_{len(graph.nodes)}"
    assert module is not None
    module.register_buffer(name, value.clone())
    return graph.call_function(aten.add.Tensor, (draw(st.sampled_from(pool)), graph.get_attr(name)))


def _elsewhere(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    """A value on another device, of which nothing comes back."""
    away = graph.call_function(aten._to_copy.default, (pool[-1],), {"device": torch.device("meta")})
    _mark(draw, away)
    return graph.call_function(aten.zeros_like.default, (away,), {"device": torch.device("cpu")})


def _sized(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    """An extent as an operand, symbolic where sizes are."""
    value = draw(st.sampled_from(pool))
    extent = graph.call_function(aten.sym_size.int, (value, 0))
    return graph.call_function(aten.reshape.default, (value, [extent, -1]))


def _branch(draw: Any, graph: fx.Graph, pool: list[fx.Node]) -> fx.Node:
    value, module = draw(st.sampled_from(pool)), graph.owning_module
    assert module is not None
    total = graph.call_function(aten.sum.default, (value,))
    positive = graph.call_function(aten.gt.Scalar, (total, draw(st.sampled_from([0, 0.5]))))
    names = [f"body_{len(graph.nodes)}_{target.__name__.replace('.', '_')}" for target in BODIES]
    for name, target in zip(names, BODIES, strict=True):
        setattr(module, name, _body(target))
    operands = (positive, *(graph.get_attr(name) for name in names), (value,))
    return _item(graph, graph.call_function(torch.ops.higher_order.cond, operands), 0)


BODIES = (aten.neg.default, aten.sin.default)


def _body(target: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("v"),)),))
    return fx.GraphModule({}, graph)


STEPS = (
    _unary,
    _unary,
    _binary,
    _binary,
    _cast,
    _several,
    _eight_bits,
    _channels_last,
    _constant,
    _elsewhere,
    _sized,
    _branch,
)


def _item(graph: fx.Graph, node: fx.Node, place: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, place))
    item.meta = dict(node.meta)
    return item


def _mark(draw: Any, node: fx.Node) -> None:
    """Module, direction, bucket, policy, annotations."""
    fqn, backward = draw(st.sampled_from(FQNS)), draw(st.booleans())
    if backward:
        node.meta["autograd_backward"] = True
    if draw(st.integers(0, 5)) == 0:
        roots = draw(st.lists(st.sampled_from(FQNS[1:]), min_size=1, max_size=2, unique=True))
        node.meta["fsdp_bucket"] = {
            "plan_fqns": roots,
            "direction": draw(st.sampled_from(["fwd", "bwd"])),
        }
        if draw(st.booleans()):
            return
    custom = {"module_fqn": fqn} if fqn else {}
    custom |= draw(
        st.sampled_from([{}, {}, {"stage": 1}, {"note": "x y", "parts": [1, "a", None]}])
    )
    if custom:
        node.meta["custom"] = custom
    policy = draw(st.sampled_from(POLICIES))
    if policy is not None:
        node.meta["recompute"] = policy


@st.composite
def graphs(draw: st.DrawFn, steps: int = 12) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph that runs, and inputs for it."""
    gm = fx.GraphModule({}, fx.Graph())
    graph, pool, inputs = gm.graph, [], []
    for place in range(draw(st.integers(1, 3))):
        node = graph.placeholder(f"v{place}")
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["parameter", "buffer", "input"]))
            node.meta["gt_input"] = {
                "kind": kind,
                "fqn": draw(st.sampled_from(["0", "1.tokens", "layers.0.w", "L.w", "a-b.2"])),
            }
        pool.append(node)
        inputs.append(
            torch.linspace(-2, 2, 16).reshape(4, 4).to(draw(st.sampled_from(DTYPES[:3]))) + place
        )
    for _ in range(draw(st.integers(1, steps))):
        node = draw(st.sampled_from(STEPS))(draw, graph, pool)
        _mark(draw, node)
        pool.append(node)
    results = draw(st.lists(st.sampled_from([*pool, None]), min_size=1, max_size=3))
    graph.output(draw(st.sampled_from([tuple, list, lambda r: r[0], lambda r: {"a": r}]))(results))
    gm.recompile()
    _add_values(
        gm, inputs, draw(st.sampled_from(["real", "real", "real", "fake", "symbolic", "symbolic"]))
    )
    return gm, inputs


def _add_values(gm: fx.GraphModule, inputs: list[torch.Tensor], kind: str) -> None:
    """The value of every node: a real one, which is the quickest to make, or as a tracer has it."""
    if kind == "real":
        _Values(gm).run(*[value.clone() for value in inputs])  # one may be changed in place
        return
    env = ShapeEnv() if kind == "symbolic" else None
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=env) as mode:
        _Values(gm).run(*[mode.from_tensor(value) for value in inputs])


class _Values(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = value
        return value
