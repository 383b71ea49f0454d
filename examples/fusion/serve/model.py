"""A few layers whose activations are quantised to fp8 by a scale that is known beforehand."""

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Tokens over their root mean square, computed in fp32: bf16[tokens, width]."""
    wide = x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) * weight


def static_quant(x: Tensor, scale: Tensor) -> Tensor:
    """fp8 of what is in units of ``scale``, an fp32 scalar."""
    return (x.to(torch.float32) / scale).clamp(-LARGEST, LARGEST).to(FP8)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.up = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        quantised = static_quant(rms_norm(x, self.norm, EPS), self.scale)
        return x + torch.relu(self.up((quantised.to(torch.float32) * self.scale).to(x.dtype)))


class Model(nn.Module):
    """bf16[tokens, width] in and out."""

    def __init__(self, n_layers: int = 3, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
