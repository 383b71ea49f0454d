"""``test_fusion.py`` without pytest-gtrainer: the same three tests, by torch alone."""

import re
from pathlib import Path

import pytest
import torch
from serve.fusion import FuseNormAndQuant
from serve.model import Model
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

GOLDEN = Path(__file__).parent / "by_hand"


def copied(graph):
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return fx.GraphModule(graph.owning_module, copy)


class Watched(CustomGraphPass):
    """Stands around the pass, and keeps its graph before and after."""

    def __init__(self, watched):
        self.watched = watched
        self.before = self.after = None

    def __call__(self, graph):
        self.before = copied(graph)
        self.watched(graph)
        self.after = copied(graph)

    def uuid(self):
        return None  # no cache


@pytest.fixture
def watched(tokens):
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.mark_dynamic(tokens, 0)
    watched = Watched(FuseNormAndQuant())
    options = {"post_grad_custom_post_pass": watched}
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(Model(), options=options)
        compiled(tokens)
        compiled(tokens[:32])
    yield watched
    torch._dynamo.reset()
    counters.clear()


def test_the_graph_is_whole_and_compiled_once(watched):
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]


def operators(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def text(gm):
    """One line a node: what it calls, on what, and its dtype and shape; names by position."""
    names = {node: f"%{place}" for place, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda each: names[each])
        value = node.meta.get("val")
        kind = (
            f"{value.dtype} {[str(extent) for extent in value.shape]}"
            if isinstance(value, torch.Tensor)
            else "_"
        )
        lines.append(f"{names[node]}: {kind} = {node.op} {node.target} {arguments}")
    return re.sub(r"s\d+", "s", "\n".join(lines)) + "\n"


def check(name, gm, request):
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("update_by_hand"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(gm))
    assert text(gm) == path.read_text()


def test_every_norm_is_fused(watched, request):
    calls = operators(watched.after)
    assert calls.count(torch.ops.serve.rms_norm_static_quant.default) == 3
    assert calls.count(torch.ops.aten.rsqrt.default) == 0
    check("before", watched.before, request)
    check("after", watched.after, request)


def inputs(gm, size, seed):
    """Random numbers for what the graph takes; some tokens are nearly nothing, else eps is rounded
    away.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            made.append(size)
            continue
        shape = [size if isinstance(extent, torch.SymInt) else extent for extent in value.shape]
        drawn = torch.randn(shape, generator=generator)
        if value.dim() == 2 and isinstance(value.shape[0], torch.SymInt):
            drawn[1::4] *= 1e-3
        made.append(drawn.to(value.dtype))
    return made


def bits(tensors):
    return [
        tensor.contiguous().view(torch.uint8)
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    ]


@pytest.mark.parametrize("size", [64, 128, 65])
def test_the_pass_changes_no_bit(watched, size):
    outputs = []
    for seed in (0, 1):
        given = inputs(watched.before, size, seed)
        before, after = bits(watched.before(*given)), bits(watched.after(*given))
        assert len(before) == len(after)
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(one, other), (
                f"output {place} differs in {(one != other).sum()} bytes"
            )
        outputs.append(before)
    assert not all(map(torch.equal, *outputs)), "outputs do not depend on the inputs"
