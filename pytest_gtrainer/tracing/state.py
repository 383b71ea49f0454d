"""The parameters and buffers of a model as one ordered list, and their exchange for traced ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.modules import buffers_of, parameters_of

Slot = tuple[dict[str, Any], str]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of this rank: a DTensor's local shard, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def managed_order(model: nn.Module) -> list[str]:
    """Parameters in the order in which FSDP2 manages them: modules depth first, children before own ones.

    As torch 2.13's ``_get_managed_modules``: a module or parameter registered twice counts where
    the walk comes to it first, under the name it has in ``named_parameters``.
    """
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    seen: set[nn.Module] = set()
    ordered: dict[str, None] = {}

    def walk(module: nn.Module) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                walk(child)
        ordered.update(dict.fromkeys(names[id(parameter)] for parameter in module.parameters(recurse=False)))

    walk(model)
    return list(ordered)


def rewrap(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``plain`` as the local shard of a DTensor like ``like``, or as it is."""
    if not isinstance(like, DTensor):
        return plain
    return DTensor.from_local(
        plain, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model's state in registration order: parameters first, then buffers.

    A tensor registered twice (tied) is listed once, under its first name.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    slots: dict[str, list[Slot]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """What ``model`` holds now, and every place that holds it."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        names: dict[int, str] = {id(t): n for n, t in [*buffers.items(), *parameters.items()]}
        slots: dict[str, list[Slot]] = {n: [] for n in [*parameters, *buffers]}
        for module in model.modules():
            for table in (parameters_of(module), buffers_of(module)):
                for key, tensor in table.items():
                    if tensor is not None:
                        slots[names[id(tensor)]].append((table, key))
        return cls(parameters, buffers, slots)

    @property
    def fqns(self) -> tuple[str, ...]:
        return (*self.parameters, *self.buffers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.parameters.values(), *self.buffers.values()]

    @property
    def trainable(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self.parameters.items() if parameter.requires_grad)

    def reassigned(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """FQNs whose slot no longer holds what ``exchanged`` put there: the model replaced it."""
        pairs = zip(self.fqns, tensors, strict=True)
        return [fqn for fqn, tensor in pairs if any(table.get(key) is not tensor for table, key in self.slots[fqn])]

    @contextmanager
    def exchanged(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the model use ``tensors``, in the order of ``fqns``; put its own back afterwards."""
        self._install(tensors)
        try:
            yield
        finally:
            self._install(self.tensors)

    def _install(self, tensors: Sequence[torch.Tensor]) -> None:
        for fqn, tensor in zip(self.fqns, tensors, strict=True):
            for table, key in self.slots[fqn]:
                table[key] = tensor
