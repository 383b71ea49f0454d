"""Module FQNs on graph nodes: ``node.meta["custom"]["module_fqn"]`` (A2)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from pytest_gtrainer._torch.tracing import annotate, without_annotation

KEY = "module_fqn"
LOSS_FQN = "loss"


class FqnAnnotation:
    """What ``annotate_module_fqns`` put on a model; ``remove()`` takes it off, as leaving a ``with`` block does."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> FqnAnnotation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class _Scope:
    """Enters a context when a module's forward starts and leaves it when it ends; re-entrant."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        self._open: list[AbstractContextManager[None]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        # the root's own operators belong to no module, even where the step around it is the loss
        context = annotate({KEY: self.fqn}) if self.fqn else without_annotation(KEY)
        context.__enter__()
        self._open.append(context)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def annotate_module_fqns(model: nn.Module) -> FqnAnnotation:
    """Stamp every node traced inside a submodule's forward with the submodule's FQN.

    Each named submodule except the root gets its own FQN, two instances of one class and
    parameterless modules included; the innermost wins. A module registered under two names
    has the first. Annotating twice is harmless. Eager runs are unaffected.
    """
    handles = []
    for fqn, module in model.named_modules():
        scope = _Scope(fqn)
        handles.append(module.register_forward_pre_hook(scope.before, prepend=True))
        handles.append(module.register_forward_hook(scope.after, always_call=True))
    return FqnAnnotation(handles)


def module_fqn(meta: dict[str, Any]) -> str:
    """The FQN in a node's ``meta``, "" if it has none."""
    custom = meta.get("custom")
    return custom.get(KEY, "") if custom else ""
