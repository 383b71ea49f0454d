"""Debug models, a batch that fits all of them, and one step's results by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.models import deepseek_v3, llama3

FAMILIES = {
    "llama3": (llama3.Llama3, llama3.FLAVORS),
    "deepseek_v3": (deepseek_v3.DeepSeekV3, deepseek_v3.FLAVORS),
}
Batch = tuple[Tensor, Tensor]


def build(flavor: str, seed: int = 0, **changes: Any) -> nn.Module:
    """An initialised model; ``flavor`` is "llama3/debug", "deepseek_v3/debug_odd" and so on."""
    family, _, size = flavor.partition("/")
    model, flavors = FAMILIES[family]
    built = model(replace(flavors[size], **changes))
    built.init_weights(seed)
    return built


def run_step(model: nn.Module, step: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    """The loss, under "loss", and every gradient by the parameter's name."""
    loss = step(model, *batch)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: parameter.grad for name, parameter in model.named_parameters()},
    }


@pytest.fixture(name="build")
def _build() -> Callable[..., nn.Module]:
    return build


@pytest.fixture(name="run_step")
def _run_step() -> Callable[..., dict[str, Tensor]]:
    return run_step


@pytest.fixture
def batch() -> Batch:
    """Tokens and labels ``[8, 16]`` int64, within the smallest vocabulary."""
    generator = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(0, 136, (2, 8, 16), generator=generator)
    return tokens, labels
