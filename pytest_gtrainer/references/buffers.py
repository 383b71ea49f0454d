"""Buffers that a step changes, such as running means and counters, by their elements behind it.

Ranks begin a step with the same buffers, whatever other ranks make of theirs. So the reference
begins the step of each data coordinate with the buffers that it had at first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.random_states import without_modes
from pytest_gtrainer._torch.values import buffers_of
from pytest_gtrainer._torch.wrapped_modules import name_without_wrappers
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.numerics.bits import held
from pytest_gtrainer.tracing.model import local


@dataclass(frozen=True, slots=True)
class Changed:
    """The elements of a buffer before and behind a step that changes it."""

    before: Tensor
    after: Tensor


class BuffersBefore:
    """Copies of the buffers of a model, as they are before a step."""

    def __init__(self, mode: ArithmeticMode, model: nn.Module) -> None:
        self._mode = mode
        self._model = model
        self._copies = {name: whole_of(each).clone() for name, each in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for fqn, buffer in self._model.named_buffers(remove_duplicate=False):
            if buffer.layout is torch.strided:
                yield name_without_wrappers(self._model, fqn), buffer

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._named()}

    def changed(self) -> dict[str, Changed]:
        """Return the buffers that are no longer as before, by FQN.

        Every rank must call this: buffers may be DTensors.
        """
        found = {}
        for name, buffer in self._named():
            now = whole_of(buffer)
            before = self._copies.get(name)
            if before is None:  # the step has registered it
                before = torch.zeros_like(now)
            if not self._is_touched(before, now):
                continue
            both = Changed(elements_of(self._mode, before), elements_of(self._mode, now))
            if not torch.equal(both.before, both.after):
                found[name] = both
        return found

    def _is_touched(self, before: Tensor, now: Tensor) -> bool:
        if self._mode.shadows.read(before) is not None or self._mode.shadows.read(now) is not None:
            return True
        return (before.shape, before.dtype) != (now.shape, now.dtype) or _differ(before, now)

    def put_back(self) -> None:
        """Put copies in the places of all buffers that are no longer as before.

        Autograd may have saved the buffers themselves, so nothing is written to them.
        """
        fresh: dict[int, Tensor] = {}
        for path, part in self._model.named_modules(remove_duplicate=False):
            table: dict[str, Any] = buffers_of(part)
            for key, buffer in table.items():
                name = name_without_wrappers(self._model, f"{path}.{key}" if path else key)
                before = self._copies.get(name)
                if before is None or isinstance(buffer, DTensor) or buffer is None:
                    continue
                if id(buffer) in fresh or self._is_touched(before, buffer):
                    # Modules that share a buffer share the copy.
                    table[key] = fresh.setdefault(id(buffer), before.clone())


class ParametersBefore:
    """Copies of this rank's numbers of all parameters of a model, as they are before a step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        with without_modes():
            self._copies = {name: own.clone() for name, own in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for fqn, parameter in self._model.named_parameters():
            yield name_without_wrappers(self._model, fqn), local(parameter.detach())

    def changed(self) -> set[str]:
        """Return the FQNs of the parameters that a step has changed, as an optimiser does."""
        found = set()
        for name, own in self._named():
            before = self._copies.get(name)
            # FSDP2 may leave parameters whole behind a step.
            if before is not None and before.shape == own.shape and _differ(before, own):
                found.add(name)
        return found


def _differ(before: Tensor, now: Tensor) -> bool:
    with without_modes():
        is_same = (before == now) | ((before != before) & (now != now))  # NaN is as before
        return not bool(is_same.all())


def whole_of(tensor: Tensor) -> Tensor:
    """Return a tensor without autograd, whole if it is sharded."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    # A hook or a step may get the result of a collective that is still under way.
    return held(found)


def lifted(mode: ArithmeticMode, tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, whole if it is sharded; also those of known numbers."""
    found = whole_of(tensor)
    value = mode.shadows.read(found)
    with without_modes():
        return mode.arithmetic.lift(found if value is None else value)


def elements_of(mode: ArithmeticMode, tensor: Tensor) -> Tensor:
    """Return the part of a tensor's elements that results are compared by."""
    elements = lifted(mode, tensor)
    with without_modes():
        return mode.arithmetic.compared(elements).clone()
