"""Add the gradients of an activation in a trace in the order in which ``fully_shard`` adds them.

FSDP2 hands the inputs of a group's forward on by an autograd function, whose backward starts the
group's reduction. Gradients of an input therefore meet at that function first. If two layers each
read ``memory`` twice, eager FSDP2 adds ``(k1 + v1) + (k0 + v0)``, and a model without groups ``((k1
+ v1) + k0) + v0``. A trace under ``hand_on_inputs`` adds as FSDP2 does. The views that the function
leaves in the forward are erased from the graph.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pytest_gtrainer._torch.fsdp2 import collect_grad_tensors, replace_grad_tensors
from pytest_gtrainer._torch.tracing import annotate
from pytest_gtrainer.graph.nodes import HANDED_ON
from pytest_gtrainer.tracing.model import Attachment


class _HandOn(torch.autograd.Function):
    """Return the inputs; the backward gets the sum of all gradients of an input."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class _Group:
    """The hooks of one group.

    If it has several modules, only the one that runs first hands its inputs on, as in FSDP2.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._to_run: set[nn.Module] = set()

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._to_run:
            return None
        self._to_run.update(self.modules)
        if not torch.is_grad_enabled():
            return None
        tensors = collect_grad_tensors((args, kwargs))
        if not tensors:
            return None
        with annotate({HANDED_ON: True}):
            handed_on = _HandOn.apply(*tensors)
        return replace_grad_tensors((args, kwargs), iter(handed_on))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._to_run.discard(module)

    def reset(self, *_: Any) -> None:
        """Forget modules that have not run: FSDP2 does so at the end of the root's forward."""
        self._to_run.clear()


def hand_on_inputs(model: nn.Module, groups: Iterable[Sequence[nn.Module]]) -> Attachment:
    """Let a trace of ``model`` add gradients as ``fully_shard`` on each of ``groups`` does.

    Give the modules of each group that has parameters of its own; a group without any has no
    function in FSDP2, either.
    """
    handles = []
    for modules in groups:
        group = _Group(modules)
        for module in modules:
            handles += [
                module.register_forward_pre_hook(group.before, prepend=True, with_kwargs=True),
                module.register_forward_hook(group.after, always_call=True),
            ]
        handles.append(model.register_forward_pre_hook(group.reset, prepend=True))
    return Attachment(handle.remove for handle in handles)
