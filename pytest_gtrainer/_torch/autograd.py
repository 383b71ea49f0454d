"""Autograd: the number of each node, the start of a backward, hooks and guards of gradients.

Autograd numbers its nodes in the order of the forward. A ``TorchDispatchMode`` sees every operator
below autograd, also those of the backward; the numbers relate an operator of the backward to the
one of the forward that it belongs to.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.values import HigherOrderOperator, pytree

with private_names():
    from torch._C import _current_graph_task_id
    from torch.autograd import _engine_run_backward, _get_sequence_nr
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _get_current_dispatch_mode,
        _pop_mode_temporarily,
    )

ATTRIBUTES = {
    "torch._C:_FunctionBase": (
        "_sequence_nr",
        "register_prehook",
        "register_hook",
        "next_functions",
    ),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch.autograd": ("_engine_run_backward",),
    "torch:Tensor": ("_backward_hooks", "_post_accumulate_grad_hooks", "_make_wrapper_subclass"),
}

__all__ = [
    "TorchDispatchMode",
    "in_backward",
    "last_made_node",
    "watching_backward",
    "watching_roots",
]


class GuardedGradient(torch.Tensor):
    """A ``.grad`` that nobody may use: reading its value or adding to it raises.

    It has no memory. ``AccumulateGrad`` adds to a ``.grad`` in place, so an addition reaches its
    ``__torch_dispatch__``.
    """

    message: str

    @staticmethod
    def __new__(cls, owner: torch.Tensor, message: str) -> "GuardedGradient":
        """Return a gradient that ``owner`` accepts: of its shape, strides, device and dtype."""
        kind: dict[str, Any] = {
            "dtype": getattr(owner, "grad_dtype", None) or owner.dtype,
            "device": owner.device,
        }
        made = torch.Tensor._make_wrapper_subclass(cls, owner.shape, strides=owner.stride(), **kind)
        made.message = message
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise for every use in Python."""
        cls._raise(args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise for every use by autograd."""
        cls._raise(args, kwargs)

    @classmethod
    def _raise(cls, args: Any, kwargs: Any) -> None:
        guarded = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is cls]
        raise ValueError(guarded[0].message)


def method_of_hook(tensor: torch.Tensor) -> str:
    """Return the name of the method that has registered a hook on ``tensor``; "" without one.

    Hooks that DDP registers in C++, on the tensor's ``AccumulateGrad`` node, cannot be read.
    """
    if tensor._backward_hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if tensor._post_accumulate_grad_hooks else ""


def hooks_of(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that Python code has registered on a tensor."""
    registered = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [hook for hooks in registered for hook in (hooks or {}).values()]


def dispatch_below(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Hand a call on from the ``__torch_dispatch__`` of a mode to the mode below, unchanged."""
    # The tables of a DeviceMesh are read with all other modes off.
    if isinstance(func, HigherOrderOperator) or _get_current_dispatch_mode() is None:
        return func(*args, **kwargs)
    # A call of the operator would leave out an optional tensor that is undefined.
    with _pop_mode_temporarily() as mode:
        return mode.__torch_dispatch__(func, types, args, kwargs)


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return bool(_current_graph_task_id() != -1)


def last_made_node() -> int:
    """Return the number of the autograd node that was made last.

    Inside an operator of the forward it is the node of this operator.
    """
    return int(_get_sequence_nr()) - 1


@contextmanager
def watching_backward(begin: Callable[[int], None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``begin(number)`` before each autograd node computes, and ``end()`` after it.

    The engine adds gradients between nodes.
    """

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as hooks:
            for node in _nodes(outputs):
                number = node._sequence_nr()
                hooks.callback(node.register_prehook(lambda _, number=number: begin(number)).remove)
                hooks.callback(node.register_hook(lambda *_: end()).remove)
            return _engine_run_backward(outputs, *args, **kwargs)

    # ``backward`` looks the function up in one module, ``grad`` in the other.
    with (
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", run),
        mock.patch.object(torch.autograd, "_engine_run_backward", run),
    ):
        yield


@contextmanager
def watching_roots(
    begin: Callable[[list[torch.Tensor]], None], end: Callable[[], None]
) -> Iterator[None]:
    """Call ``begin`` with the tensors that each ``backward`` starts from, and ``end()`` when it has
    returned, with all gradients reduced. A backward inside of another one is a part of that.
    """

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return _engine_run_backward(outputs, *args, **kwargs)
        begin(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
        result = _engine_run_backward(outputs, *args, **kwargs)
        end()
        return result

    with mock.patch.object(torch.autograd, "_engine_run_backward", run):
        yield


def _nodes(outputs: Any) -> Iterator[Any]:
    """Yield the autograd nodes that a backward from ``outputs`` may run."""
    tensors = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    stack = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [parent for parent, _ in node.next_functions]
        yield node
