"""Names in graphs of other tracers: without ``names=``, of two models, of odd keys, of dynamic
sizes.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from pytest_gtrainer import assert_graph, graphtext
from tests.graphtext.compiled import Block, renamed, stages


class Model(nn.Module):
    """``gain`` is the first parameter, and used last; ``bias`` is one of layer 0."""

    def __init__(self, gain: bool = False, bias: bool = False):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8)) if gain else None
        self.layers = nn.ModuleList([Block(bias=bias and i == 0) for i in range(2)])

    def forward(self, x):
        if self.gain is not None:
            x = x * self.gain
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    return stages(Model(), torch.randn(4, 8))


def test_without_names_an_input_is_named_after_its_first_use(graphs):
    text = graphtext.render(graphs["forward"])
    assert (
        "for i in A.layers[1]:\n  A.L.up.mm_mat2: f32[16, 8]\n"
        "  A.L.norm.native_layer_norm_weight: f32[16]\n" in text
    )
    assert " aten.mm(A.L.up.mm_self, t)\n" in text
    assert "A[" not in text
    assert "primals" not in graphtext.render(graphs["backward"])
    for which in ("forward", "backward"):
        text = graphtext.render(graphs[which])
        assert graphtext.render(graphtext.parse(text)) == text
        assert graphtext.render(renamed(graphs[which])) == text


@functools.cache
def changed_graphs(change: str) -> dict[str, fx.GraphModule]:
    return stages(Model(**{change: True}), torch.randn(4, 8))


@pytest.mark.parametrize("change", ["gain", "bias"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_without_names_another_parameter_changes_its_own_lines(graphs, which, change):
    """``gain`` comes first among the inputs, so that every other one has another place."""
    other = changed_graphs(change)
    lines = [
        {str(line) for line in graphtext.lines_of(graphtext.parse(graphtext.render(each[which])))}
        for each in (graphs, other)
    ]
    changed = lines[0] ^ lines[1]
    assert changed
    elsewhere = [line for line in changed if "layers[1]" in line and "layers[0]" not in line]
    assert not [line for line in elsewhere if "out" not in line.split(" | ")[0]], elsewhere


def test_without_names_the_order_of_inputs_moves_lines_and_changes_none(graphs):
    gm = copy.deepcopy(graphs["forward"])
    first, *_, last = gm.graph.find_nodes(op="placeholder")
    first.prepend(last)
    texts = [graphtext.render(each) for each in (graphs["forward"], gm)]
    lines = [sorted(map(str, graphtext.lines_of(graphtext.parse(text)))) for text in texts]
    assert lines[0] == lines[1]
    assert texts[0] != texts[1]


def test_inputs_of_one_first_use_are_counted():
    found = stages(lambda x, y, z: torch.cat([x * y, x * z]), *[torch.ones(2) for _ in range(3)])
    text = graphtext.render(found["forward"])
    assert "  A.mul_self: f32[2]\n  A.mul_other: f32[2]\n  A.mul_other_1: f32[2]\n" in text
    assert "mul_1: f32[2] = aten.mul.Tensor(A.mul_self, A.mul_other_1)" in text
    found = stages(
        lambda x, y, z: torch.cat([z, y, x]) * x.sum(), *[torch.ones(2) for _ in range(3)]
    )
    assert "aten.cat([A.cat_tensors, A.cat_tensors_1, A.cat_tensors_2])" in graphtext.render(
        found["forward"]
    )


def test_an_input_that_is_first_a_keyword_is_named_after_that():
    def attend(x, mask):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    text = graphtext.render(stages(attend, torch.ones(1, 2, 4, 8), torch.ones(4, 4))["forward"])
    assert "attn_mask: f32[4, 4]" in text
    assert "attn_mask=A." in text


def test_two_models_keep_the_variables_that_hold_them():
    def distance(model, teacher, x):
        return model(x) - teacher(x)

    found = stages(distance, nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(2, 8))
    for which, gm in found.items():
        text = graphtext.render(gm, names=None if which == "dynamo" else found["dynamo"])
        assert graphtext.render(graphtext.parse(text)) == text
        if which != "backward":
            assert "P.model.weight: f32[8, 8]\n" in text
            assert "P.teacher.weight: f32[8, 8]\n" in text
            assert '"#1"' not in text
            assert_graph(gm, "count 1 linear in teacher") if which == "dynamo" else None
    alone = stages(lambda model, x: model(x), nn.Linear(8, 8), torch.ones(2, 8))
    assert "P.weight: f32[8, 8]\n" in graphtext.render(alone["dynamo"])


ODD = {
    "it's": 'I.d["it\'s"]',
    "a b": 'I.d["a b"]',
    "a.b": 'I.d["a.b"]',
    'q"': r'I.d["q\""]',
    "back\\": r'I.d["back\\"]',
    (1, 2): 'I.d["(1, 2)"]',
    "class": 'I.d["class"]',
    3: "I.d[3]",
    "": 'I.d[""]',
}


def test_odd_keys_of_a_dictionary_have_one_spelling_that_is_read_back():
    def add(d):
        total = d["a"]["b"]
        for key in ODD:
            total = total + d[key]
        return total

    found = stages(add, {"a": {"b": torch.ones(2)}, **{key: torch.ones(2) for key in ODD}})
    text = graphtext.render(found["dynamo"])
    for spelled in ["I.d.a.b", *ODD.values()]:
        assert f"  {spelled}: f32[2]\n" in text
    assert graphtext.render(graphtext.parse(text)) == text
    assert graphtext.render(found["forward"], names=found["dynamo"]).count("I.d") == text.count(
        "I.d"
    )


def rows(x, y):
    return torch.cat([x, y.view(-1, x.size(1))]) * x.size(0)


@pytest.fixture(scope="module")
def dynamic() -> list[dict[str, fx.GraphModule]]:
    return [stages(rows, torch.ones(n, 8), torch.ones(n * 16), dynamic=True) for n in (6, 10)]


@pytest.mark.parametrize("which", ["dynamo", "forward"])
def test_dynamic_sizes_are_symbols_or_examples_as_the_user_says(dynamic, which):
    both, symbols, examples = (
        [graphtext.render(each[which], names=each["dynamo"], sizes=sizes) for each in dynamic]
        for sizes in ("both", "symbols", "examples")
    )
    assert both[0] == graphtext.render(dynamic[0][which], names=dynamic[0]["dynamo"])
    assert both[0] != both[1]
    assert "s1 = size(6)\n" in both[0]
    assert symbols[0] == symbols[1]
    assert "s0 = size()\n" in symbols[0]
    assert "f32[s1, s2]" in symbols[0]
    assert examples[0] != examples[1]
    assert "f32[6, 8]" in examples[0]
    assert "size(" not in examples[0].partition("if ")[0]
    for text, sizes in ((both[0], "both"), (symbols[0], "symbols"), (examples[0], "examples")):
        assert graphtext.render(graphtext.parse(text), sizes=sizes) == text


def test_a_size_that_a_view_takes_is_no_view(dynamic):
    assert "  A.view_size: int[s2]\n" in graphtext.render(dynamic[0]["forward"])


def test_another_way_to_tell_sizes_is_refused(dynamic):
    with pytest.raises(
        ValueError,
        match="sizes='hints': dynamic sizes are written as 'both', 'symbols', 'examples'",
    ):
        graphtext.render(dynamic[0]["dynamo"], sizes="hints")


@pytest.mark.parametrize("which", ["dynamo", "forward", "backward", "export"])
def test_checks_know_modules_of_every_source(graphs, which):
    gm = torch.export.export(Model(), (torch.randn(4, 8),)) if which == "export" else graphs[which]
    product = {"dynamo": "linear", "export": "aten.linear"}.get(which, "aten.mm")
    number = 4 if which == "backward" else 2
    assert_graph(gm, f"count {number} {product} in layers.1\nnever {product} in layers.1.norm")
    with pytest.raises(
        ValueError, match=r"lies in 'layer\.1', did you mean .?layers\.1"
    ) as failure:
        assert_graph(gm, f"never {product} in layer.1")
    hint = str(failure.value).rpartition("did you mean ")[2].rstrip("?").strip("`'")
    with pytest.raises(AssertionError):
        assert_graph(gm, f"never {product} in {hint}")
