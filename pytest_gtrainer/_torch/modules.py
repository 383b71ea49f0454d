"""Modules: the tables that hold their own parameters and buffers.

A class may hide a parameter behind a property, so ``getattr`` does not give what the module holds; writing to
the table does not run ``__setattr__``.
"""

from __future__ import annotations

import torch
from torch import nn

ATTRIBUTES = {"torch.nn:Module": ("_parameters", "_buffers")}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name: its table, not a copy."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name: its table, not a copy."""
    return module._buffers
