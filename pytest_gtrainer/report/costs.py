"""What a node is taken to cost: a roofline of floating-point operations and bytes, and a line for what is sent.

Nothing is measured. The figures order schedules of one graph; they predict no machine. Known to be coarse:
every node is a kernel of its own (no fusion), a view costs nothing, a graph inside the graph costs the bytes of
its operands and results, two collectives in different groups do not share a link.

- compute: ``max(flops / flops_per_second, bytes / bytes_per_second) + overhead``, bytes being those of all tensors
  that go in and come out. Operations are counted by torch's own formulas (``torch.utils.flop_counter``), which know
  products, convolutions and attention, on shapes alone; all other operators count as bytes.
- collective of n ranks: ``latency + wire / link``, where a rank puts on the wire ``(n-1)/n`` of the larger side of an
  all-gather, reduce-scatter or all-to-all, and twice that of an all-reduce, as rings do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from pytest_gtrainer.graphtext.operators import operator_of
from pytest_gtrainer.graphtext.schedule_view import is_free, payload_of

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates of an imagined accelerator; the defaults are round figures of one of 2023.

    Attributes:
        flops_per_second: of products, as reached, not as advertised.
        bytes_per_second: of a rank's memory.
        overhead: seconds a kernel takes at least.
        link: bytes per second that a rank puts on the wire in a collective.
        latency: seconds a collective takes at least.
    """

    flops_per_second: float = 400e12
    bytes_per_second: float = 2e12
    overhead: float = 4e-6
    link: float = 50e9
    latency: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second", "link"):
            if not getattr(self, name) > 0:
                raise ValueError(f"a cost model's {name} is a rate above 0, not {getattr(self, name)!r}")

    def __str__(self) -> str:
        return (
            f"{self.flops_per_second:.3g} flop/s, memory {self.bytes_per_second:.3g} B/s, link {self.link:.3g} B/s, "
            f"{self.overhead * 1e6:g} µs a kernel, {self.latency * 1e6:g} µs a collective"
        )

    def compute_seconds(self, node: fx.Node) -> float:
        """How long a node computes; 0 for views and the arithmetic of sizes."""
        if is_free(node):
            return 0.0
        moved = sum(_nbytes(part) for part in (*_operands(node), *_tensors(node.meta.get("val"))))
        return max(flops_of(node) / self.flops_per_second, moved / self.bytes_per_second) + self.overhead

    def collective_seconds(self, launch: fx.Node, ranks: int) -> float:
        """How long a collective of so many ranks communicates."""
        trips = 2 if operator_of(launch).short.startswith("all_reduce") else 1
        wire = trips * sum(_nbytes(tensor) for tensor in payload_of(launch)) * (ranks - 1) / max(ranks, 1)
        return self.latency + wire / self.link


def flops_of(node: fx.Node) -> float:
    """Floating-point operations by torch's formula for the operator; 0 where it has none."""
    formula = _formula(node.target)
    if formula is None:
        return 0.0
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
        return float(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except (TypeError, ValueError, AssertionError, AttributeError):  # sizes that are not known numbers
        return 0.0


def _formula(target: Any) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = flop_registry.get(getattr(target, "overloadpacket", target))
    if found is None and getattr(target, "__name__", "").startswith(_CPU_ATTENTION + ".default"):
        return _cpu_attention
    return found


def _cpu_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _operands(node: fx.Node) -> Iterable[torch.Tensor]:
    for operand in node.all_input_nodes:
        yield from _tensors(operand.meta.get("val"))


def _tensors(value: Any) -> list[torch.Tensor]:
    found = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    elements = tensor.numel()
    return elements * tensor.element_size() if type(elements) is int else 0  # a size that only the run knows
