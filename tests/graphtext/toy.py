"""A toy model of equal layers, traced without any of our tracing."""

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

Activation = Callable[[Tensor], Tensor]


def toy_graph(layers: int = 4, activations: dict[int, Activation] | None = None) -> fx.GraphModule:
    """An embedding, ``layers`` blocks of matmul, activation and residual add, and a head."""
    changed = activations or {}

    def forward(tokens: Tensor, *weights: Tensor) -> Tensor:
        with at("embed"):
            x = tokens.float() @ weights[0]
        for layer in range(layers):
            with at(f"layers.{layer}.mlp"):
                h = changed.get(layer, torch.relu)(x @ weights[layer + 1])
            with at(f"layers.{layer}"):
                x = x + h
        with at("head"):
            return x.sum()

    with preserve_node_meta():
        weights = [torch.zeros(8, 8) for _ in range(layers + 1)]
        gm = make_fx(forward, tracing_mode="fake")(torch.zeros(2, 8, dtype=torch.int64), *weights)
    name_inputs(
        gm, ["tokens"], ["embed.weight", *(f"layers.{layer}.mlp.weight" for layer in range(layers))]
    )
    return gm


def at(fqn: str):
    """Code of the module ``fqn``."""
    return annotate({"module_fqn": fqn})


def name_inputs(gm: fx.GraphModule, inputs: list[str], parameters: list[str]) -> None:
    """Say what the placeholders are, as a tracer does."""
    kinds = [("input", name) for name in inputs] + [("parameter", name) for name in parameters]
    for (kind, name), node in zip(kinds, gm.graph.find_nodes(op="placeholder"), strict=True):
        node.meta["gt_input"] = {"kind": kind, "fqn": name}


def small_graph(function: Callable[..., object], *inputs: object) -> fx.GraphModule:
    """A function traced on fake tensors."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def line_of(text: str, name: str) -> str:
    """The line that defines ``name``, without its indent."""
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(f"{name}:"))


def inner_graph(number: int, *lines: str) -> str:
    """The text of a graph inside a graph: of one input, ``A[0]``; it returns what its last line
    makes.
    """
    group = "  fsdp = group(range(0, 2))\n" if "fsdp" in lines[0] else ""
    body = "".join(f"      {line}\n" for line in lines)
    result = lines[-1].partition(":")[0]
    return (
        f"def cond_graph_{number}():\n{group}  if A:\n    A[0]: f32[4]\n"
        f"  if fwd:\n    with _:\n{body}  if out:\n    yield fwd._.{result}\n"
    )


if __name__ == "__main__":
    from pytest_gtrainer.graphtext import render

    print(render(toy_graph()), end="")
