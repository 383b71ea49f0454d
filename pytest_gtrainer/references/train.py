"""The training loop that both sides share, and what it records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pytest_gtrainer.numerics.determinism import random_state
from pytest_gtrainer.numerics.digest import tell_weights
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.config import TrainConfig


class TensorSink(Protocol):
    """What a training run tells its tensors to: a ``Record``, or something that keeps less."""

    def add(self, step: int, rank: int, phase: str, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of a step and rank; ``phase`` is one of ``numerics.record.PHASES``."""
        ...


def train(
    config: TrainConfig,
    model: nn.Module,
    compute_gradients: Callable[..., torch.Tensor],
    side: str,
    recorder: TensorSink | None = None,
) -> Record:
    """Train ``model`` and record loss, gradients, weights, optimiser state and buffers of every step.

    ``compute_gradients(*inputs)`` returns the loss and fills ``.grad``. With a ``recorder`` the record that
    is returned stays empty. ``GT_WEIGHT_HASH=1`` prints a line with a digest of the weights after every step.

    Raises:
        ValueError: under a fake process group, whose collectives move no data (W1).
    """
    if dist.get_backend() == "fake":
        raise ValueError('a fake world moves no data, so training in it means nothing: use gt_world("ranks")')
    rank, world = dist.get_rank(), dist.get_world_size()
    empty = Record(world_size=world, rank=rank, meta={"side": side})
    record: TensorSink = empty if recorder is None else recorder
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = config.optimizer(parameters)
    for step in range(config.steps):
        optimizer.zero_grad()
        if config.record_rng:
            record_random_states(record, step, rank)
        loss = compute_gradients(*config.batch(step, rank))
        record.add(step, rank, "loss", "loss", local_tensor(loss))
        record_gradients(record, step, rank, "gradient", model.named_parameters())
        if config.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, config.max_norm)
            record_gradients(record, step, rank, "clipped", model.named_parameters())
        optimizer.step()
        record_state(record, step, rank, model.named_parameters(), optimizer, model.named_buffers())
        tell_weights(step, rank, side, ((name, local_tensor(value)) for name, value in model.named_parameters()))
    return empty


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without autograd."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def record_random_states(record: TensorSink, step: int, rank: int) -> None:
    """What the process draws from next, a state for each generator."""
    for name, state in random_state().items():
        record.add(step, rank, "rng", name, state)


Named = Iterable[tuple[str, torch.Tensor]]


def record_gradients(record: TensorSink, step: int, rank: int, phase: str, parameters: Named) -> None:
    """The gradients of those parameters that have one."""
    for name, parameter in parameters:
        if parameter.grad is not None:
            record.add(step, rank, phase, name, local_tensor(parameter.grad))


def record_state(
    record: TensorSink, step: int, rank: int, parameters: Named, optimizer: torch.optim.Optimizer, buffers: Named
) -> None:
    """Weights, what the optimiser keeps of each, and buffers."""
    for name, parameter in parameters:
        record.add(step, rank, "weight", name, local_tensor(parameter))
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                record.add(step, rank, "optimizer", f"{name}.{key}", local_tensor(value))
    for name, buffer in buffers:
        record.add(step, rank, "buffer", name, local_tensor(buffer))
