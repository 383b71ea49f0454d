"""What numbers depend on besides the code that computes them."""

from __future__ import annotations

import pytest

from pytest_gtrainer import devices, extensions
from pytest_gtrainer.marker import spec_of


def environment_of(item: pytest.Item) -> dict[str, str | int]:
    """The environment of a test: torch, device, the CPU's instruction set as torch uses it, threads.

    The device is that of the test's ranks; without ranks, torch's default device.
    """
    import torch

    return {
        "torch": str(torch.__version__),
        "device": _device_name(_device_kind(item)),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **extensions.environment(item.config),
    }


def _device_kind(item: pytest.Item) -> str:
    spec = spec_of(item)
    if spec is not None and spec.kind == "ranks":
        return devices.resolve(item.config).kind
    import torch

    return str(torch.get_default_device().type)


def _device_name(kind: str) -> str:
    """The kind, and of a GPU its model: other models add in other orders."""
    if kind != "cuda":
        return kind
    import torch

    return f"cuda {torch.cuda.get_device_name()}"
