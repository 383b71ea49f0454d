"""Graphs of Dynamo and AOTAutograd, of one call of a compiled function."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd


class Block(nn.Module):
    """``scaled`` by a buffer."""

    def __init__(self, *, bias: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=bias)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.ones(8) if scaled else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.norm(self.up(x))))
        return x + (y if self.scale is None else y * self.scale)


def stages(
    function: Callable[..., Any], *args: Any, dynamic: bool | None = None
) -> dict[str, fx.GraphModule]:
    """``dynamo``, ``forward`` and, if the result has a gradient, ``backward``."""
    found: dict[str, fx.GraphModule] = {}

    def keep(which: str) -> Callable[..., Any]:
        def compiler(gm: fx.GraphModule, inputs: object) -> fx.GraphModule:
            found[which] = gm
            return gm

        return compiler

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found["dynamo"] = copy.deepcopy(gm)
        return aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))(gm, inputs)

    torch.compiler.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    if result.requires_grad:
        result.sum().backward()
    return found


def renamed(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy in which all nodes have other names, bodies included."""
    gm = copy.deepcopy(gm)
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.name = f"n_{node.name}"
    return gm
