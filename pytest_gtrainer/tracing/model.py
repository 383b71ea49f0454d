"""Name a model's modules on traced nodes, and list and exchange its state."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from pytest_gtrainer._torch.tracing import annotate, without_annotation
from pytest_gtrainer._torch.values import (
    FakeTensor,
    buffers_of,
    is_traceable_wrapper_subclass,
    parameters_of,
)

KEY = "module_fqn"
LOSS_FQN = "loss"


class Attachment(ExitStack):
    """Hooks on a model; ``remove()`` takes them off, as leaving a ``with`` block does."""

    def __init__(self, undo: Iterable[Callable[[], object]]) -> None:
        super().__init__()
        for each in undo:
            self.callback(each)

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing."""
        self.close()


class _Scope:
    """The annotation of a module's nodes, from the start of its forward to the end; re-entrant."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        self._open: list[AbstractContextManager[None]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        # The root's own operators belong to no module, even where the step around it is the loss.
        context = annotate({KEY: self.fqn}) if self.fqn else without_annotation(KEY)
        context.__enter__()
        self._open.append(context)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def annotate_module_fqns(model: nn.Module) -> Attachment:
    """Mark each node traced in a submodule of ``model`` with the FQN of the innermost one.

    A module that is registered under two names has the first. A second call changes nothing; eager
    runs do not change.
    """
    handles = []
    for fqn, module in model.named_modules():
        scope = _Scope(fqn)
        handles += [
            module.register_forward_pre_hook(scope.before, prepend=True),
            module.register_forward_hook(scope.after, always_call=True),
        ]
    return Attachment(handle.remove for handle in handles)


def tensor_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape, ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def has_bytes(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose memory can be compared and put back."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    if is_traceable_wrapper_subclass(value):
        return False
    return not value.is_meta and value.layout is torch.strided


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two plain tensors of one shape and dtype bit for bit."""
    rows = []
    for each in (one, other):
        whole = each.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        # A slice of one element is contiguous, but bytes can be viewed in a copy of it alone.
        row = whole.clone(memory_format=torch.contiguous_format).reshape(-1)
        rows.append(row.view(torch.uint8))
    return torch.equal(*rows)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore on exit what modules hold: attributes, containers, and objects of plain classes.

    A forward may keep a cache or count its calls; in a trace it would keep tensors without values.
    """
    kept: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        _keep(vars(module), kept, _MOST_LEVELS)
    try:
        yield
    finally:
        for holder, before in kept.values():
            # Ranks that are threads may share a configuration, and read it now.
            if _is_as_before(holder, before):
                continue
            holder.clear()
            if isinstance(holder, list | deque):
                holder.extend(before)
            else:
                holder.update(before)


_MOST_LEVELS = 5  # as a dict of an object in a list, in a dict of a module


def _keep(value: Any, kept: dict[int, tuple[Any, Any]], levels: int) -> None:
    """Copy a container, and those that it holds, by the container's id."""
    if not levels or id(value) in kept:
        return
    if isinstance(value, dict | list | set | deque):
        # A plain copy, of whichever class: it is read, and nothing else.
        before = dict(value) if isinstance(value, dict) else list(value)
        kept[id(value)] = value, before
        for item in before.values() if isinstance(before, dict) else before:
            _keep(item, kept, levels - 1)
    elif isinstance(value, tuple):
        for item in value:
            _keep(item, kept, levels - 1)
    elif holds_as_object(value):
        _keep(vars(value), kept, levels)


def _is_as_before(holder: Any, before: Any) -> bool:
    if len(holder) != len(before):
        return False
    if isinstance(holder, set):
        return all(item in holder for item in before)
    if isinstance(holder, dict):
        return all(map(is_, holder.values(), before.values())) and list(holder) == list(before)
    return all(map(is_, holder, before))


def holds_as_object(value: Any) -> bool:
    """Return whether a value is an object of a plain class, which may hold tensors.

    Modules and objects of torch are none: they know by themselves what they hold.
    """
    kind = type(value)
    if isinstance(value, nn.Module) or kind.__module__.partition(".")[0] == "torch":
        return False
    return kind.__new__ is object.__new__ and hasattr(value, "__dict__")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of this rank: a DTensor's local shard, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rewrap(
    plain: torch.Tensor,
    like: torch.Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> torch.Tensor:
    """Make ``plain`` the local part of a DTensor like ``like``, on its or another mesh.

    If ``like`` is no DTensor, ``plain`` itself is returned.
    """
    if not isinstance(like, DTensor):
        return plain
    mesh, placements = mesh or like.device_mesh, placements or like.placements
    return DTensor.from_local(
        plain, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


Slot = tuple[dict[str, Any], str]


@dataclass(frozen=True, slots=True)
class ModelState:
    """The parameters and buffers of a model in registration order, by FQN.

    A tied tensor is there once, by its first name. ``slots`` are all places that hold a tensor,
    each a table of a module and the name in it.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    slots: dict[str, list[Slot]]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """Return the state that ``model`` holds now."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        names: dict[int, str] = {}
        slots: dict[str, list[Slot]] = {}
        for name, tensor in [*buffers.items(), *parameters.items()]:
            names[id(tensor)] = name
            slots[name] = []
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
        """Return the FQNs of tensors that the model has replaced since ``exchanged`` set them."""
        found = []
        for fqn, tensor in zip(self.fqns, tensors, strict=True):
            if any(table.get(key) is not tensor for table, key in self.slots[fqn]):
                found.append(fqn)
        return found

    @contextmanager
    def exchanged(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the model use ``tensors``, in the order of ``fqns``; put its own back afterwards."""
        with ExitStack() as stack:
            for fqn, tensor, own in zip(self.fqns, tensors, self.tensors, strict=True):
                for table, key in self.slots[fqn]:
                    stack.callback(table.__setitem__, key, own)
                    table[key] = tensor
            yield
