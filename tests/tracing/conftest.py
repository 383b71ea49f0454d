"""Small models and what tests of tracing look for in their graphs."""

import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.w = nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.w(x)) * self.scale


class Net(nn.Module):
    """Two blocks of one class, a parameterless module, a frozen parameter and a buffer that is
    updated.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(8, 4, bias=False)
        self.layers[0].w.bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.seen.add_(1)
        return self.head(x)


def step(model, x, y):
    return nn.functional.mse_loss(model(x), y)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


@pytest.fixture
def train_step():
    return step
