"""Graphs inside the graph, of other tracers: their inputs are named as what the call gives them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as config
from functorch.experimental import control_flow
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import graphtext
from tests.graphtext.compiled import renamed, stages

Activation = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.up(x))


@torch.compiler.nested_compile_region
def region(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


class Base(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(activation) for _ in range(3))


class Checkpointed(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Conditional(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: self.layers[0](x), lambda x: self.layers[1](x) * 2, (x,)
        )


class Regions(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = region(layer, x)
        return x


class Flexible(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2))
        self.activation = activation
        self.mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 16, 16, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def score(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
            return self.activation(score) + self.bias[h]

        heads = x.view(1, 2, 16, -1)
        return flex_attention(heads, heads, heads, score_mod=score, block_mask=self.mask)


MODELS = {
    "checkpoint": Checkpointed,
    "cond": Conditional,
    "invoke_subgraph": Regions,
    "flex_attention": Flexible,
}
SOURCES = [
    ("checkpoint", "dynamo"),
    ("cond", "dynamo"),
    ("cond", "forward"),
    ("cond", "export"),
    ("invoke_subgraph", "dynamo"),
    ("invoke_subgraph", "forward"),
    ("invoke_subgraph", "backward"),
    ("flex_attention", "dynamo"),
    ("flex_attention", "forward"),
    ("flex_attention", "backward"),
]
_INLINING = ("inline_single_use_invoke_subgraph",)
_made: dict[Any, dict[str, Any]] = {}


def text_of(
    operator: str,
    which: str,
    *,
    activation: Activation = torch.relu,
    rows: int = 64,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any], Any] = lambda gm: gm,
) -> str:
    torch.manual_seed(0)
    model, x = MODELS[operator](activation).to(dtype), torch.randn(rows, 8, dtype=dtype)
    key = (operator, activation, rows, dtype, which == "export")
    if which == "export":
        if key not in _made:
            _made[key] = {"export": torch.export.export(model, (x,))}
        return graphtext.render(_made[key]["export"])
    if key not in _made:
        with config.patch({name: False for name in _INLINING if hasattr(config, name)}):
            _made[key] = stages(model, x)
    graphs = _made[key]
    return graphtext.render(
        change(graphs[which]), names=None if which == "dynamo" else graphs["dynamo"]
    )


@pytest.mark.second_tier("cond-export", "flex_attention-dynamo")
@pytest.mark.parametrize(("operator", "which"), SOURCES)
def test_a_body_renders_and_is_read_back(operator, which):
    text = text_of(operator, which)
    assert "_graph_0():\n" in text
    assert "l_self" not in text.lower()
    assert "arg0_1" not in text
    assert graphtext.render(graphtext.parse(text, allow=["flex_lib"])) == text


@pytest.mark.second_tier(
    "flex_attention-",
    "checkpoint-dynamo-dtype",
    "checkpoint-dynamo-shape",
    "cond-export",
    "cond-dynamo-dtype",
    "invoke_subgraph-dynamo-dtype",
    "invoke_subgraph-dynamo-shape",
)
@pytest.mark.parametrize(
    "change",
    [{"activation": torch.tanh}, {"rows": 128}, {"dtype": torch.float64}],
    ids=["operator", "shape", "dtype"],
)
@pytest.mark.parametrize(("operator", "which"), SOURCES)
def test_what_a_body_computes_changes_its_text(operator, which, change):
    bodies = [
        text.partition("\nif ")[0]
        for text in (text_of(operator, which), text_of(operator, which, **change))
    ]
    if operator == "flex_attention" and "rows" in change:  # a score has no shape
        bodies = [text_of(operator, which), text_of(operator, which, **change)]
    assert bodies[0] != bodies[1]


@pytest.mark.parametrize(("operator", "which"), [pair for pair in SOURCES if pair[1] != "export"])
def test_names_of_nodes_in_a_body_do_not(operator, which):
    assert text_of(operator, which, change=renamed) == text_of(operator, which)


def body_of(text: str, number: int) -> str:
    return text.partition(f"_graph_{number}():\n")[2].partition("\ndef ")[0].partition("\nif ")[0]


def test_inputs_of_a_body_have_the_names_of_what_is_passed():
    second = body_of(text_of("checkpoint", "dynamo"), 1)
    assert "    P.L.up.weight: f32[8, 8]\n" in second
    assert "    I.tag_activation_checkpoint: f32[64, 8]\n" in second
    for which in ("dynamo", "forward", "export"):
        first = body_of(text_of("cond", which), 0)
        assert "    I.x: f32[64, 8]\n" in first
        assert "    P.L.up.weight: f32[8, 8]\n" in first
    for which in ("dynamo", "forward"):
        score = body_of(text_of("flex_attention", which), 0)
        assert "    I.score: f32[()]\n" in score
        assert "    P.bias: f32[2]\n" in score


def test_a_body_that_layers_share_has_what_their_names_have_in_common():
    shared = body_of(text_of("invoke_subgraph", "dynamo"), 1)
    assert "    P.up.weight: f32[8, 8]\n" in shared


def doubled(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.while_loop(
        lambda n, x: n < 3, lambda n, x: (n + 1, x * weight), (torch.zeros((), dtype=int), x)
    )[1]


def summed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return scan(lambda total, row: (total + row * weight, row.clone()), torch.zeros(8), x)[0]


def mapped(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return control_flow.map(lambda row, weight: row * weight, x, weight)


@pytest.mark.second_tier("summed")
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            doubled,
            [
                "I.while_loop.carried[0]: i64[()]",
                "I.while_loop.carried[1]: f32[4, 8]",
                "I.weight: f32[8]",
            ],
        ),
        (summed, ["I.scan.carried[0]: f32[8]", "I.scan.each[0]: f32[8]", "I.weight: f32[8]"]),
        (mapped, ["I.map_impl.each[0]: f32[8]", "I.weight: f32[8]"]),
    ],
)
def test_inputs_of_a_loops_body_are_named_after_the_loop(function: Any, names: list[str]):
    """An input that the body does not change has the name of the value given."""
    text = graphtext.render(stages(function, torch.ones(8), torch.ones(4, 8))["dynamo"])
    assert "A[" not in text
    for name in names:
        assert name in text, text
