"""The signature of a layer: equal for two layers that do the same with the same arguments.

It holds class, code, attributes, hooks, wrapped forwards, and the shapes of parameters and buffers, of all modules
below. A class that is made for one module (``data_parallel``, parametrizations) is taken by what it holds. An object
that cannot be looked into is equal to itself alone: two layers that each have one differ.
"""

import dataclasses
import functools
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.values import buffers_of, is_traceable_wrapper_subclass, modules_of, parameters_of
from pytest_gtrainer.tracing.model import local

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device, torch.layout)
TABLES = ("_parameters", "_buffers", "_modules")
INSIDE: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    **dict.fromkeys((functools.partial, functools.partialmethod), ("func", "args", "keywords")),
    property: ("fget", "fset", "fdel"),
    **dict.fromkeys((staticmethod, classmethod), ("__func__",)),
}
"""What makes these objects do what they do."""
DEPTH = 12  # how deep containers and closures are looked into; what lies deeper is equal to itself alone


def signature(layer: nn.Module) -> Any:
    """What makes ``layer`` do what it does, as nested tuples; attributes by name, so that a difference has a path."""
    own: dict[int, Any] = {}
    for path, module in layer.named_modules():
        own[id(module)] = ("own module", path)
        tensors = {**parameters_of(module), **buffers_of(module)}
        own.update({id(t): ("own tensor", path, name) for name, t in tensors.items() if t is not None})
    return _Signer(own).module(layer)


def signature_of(value: Any) -> Any:
    """That of any value."""
    return _Signer({}).value(value)


def difference(one: Any, other: Any, path: str = "") -> str:
    """Where two signatures differ first: ``attention.window``."""
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            if mine != theirs:
                named = isinstance(mine, tuple) and len(mine) == 2 and isinstance(mine[0], str) and mine[0][:1] == "."
                return difference(mine, theirs, path + mine[0] if named and mine[0] == theirs[0] else path)
    return path.lstrip(".") or "its class or its hooks"


def constant(value: Any) -> Any:
    """A plain value with its type: 1, 1.0 and True are three."""
    return type(value).__name__, repr(value)


class _Signer:
    """Signatures of values below one layer; ``own`` are the modules and tensors of the layer, by where they are."""

    def __init__(self, own: dict[int, Any]) -> None:
        self.own = own

    def module(self, module: nn.Module) -> Any:
        hooks = [key for table, held in vars(module).items() if "_hooks" in table and held for key in held]
        number = {key: index for index, key in enumerate(sorted(set(hooks)))}  # counted over the whole process
        return (
            self.type(type(module)),
            *(
                ("." + name, tuple((number[key], self.value(hook)) for key, hook in held.items()))
                if "_hooks" in name and isinstance(held, dict)
                else ("." + name, self.value(held))
                for name, held in vars(module).items()
                if name not in TABLES and "state_dict" not in name
            ),
            *(("." + name, _tensor(each)) for name, each in {**parameters_of(module), **buffers_of(module)}.items()),
            *(("." + name, child and self.module(child)) for name, child in modules_of(module).items()),
        )

    def value(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return constant(value)
        if id(value) in self.own:
            return self.own[id(value)]
        if isinstance(value, DeviceMesh | types.CodeType):
            return kind.__name__, value
        if isinstance(value, type):
            return self.type(value, depth + 1)
        parts = _parts(value) if depth <= DEPTH else None
        if parts is None:
            return "object", id(value)
        told = [self.value(part, depth + 1) for part in parts]
        return id(kind), *(sorted(map(repr, told)) if kind in (set, frozenset) else told)

    def type(self, cls: type, depth: int = 0) -> Any:
        """A class that its module holds is itself; one that was made on the way is what it holds."""
        found: Any = sys.modules.get(cls.__module__)
        for name in cls.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is cls or depth > DEPTH or not issubclass(cls, nn.Module):
            return "class", id(cls)
        if "<locals>" in cls.__qualname__ and not any(isinstance(held, property) for held in vars(cls).values()):
            return "class", id(cls)  # of a function: one object for all its instances
        skipped = ("__dict__", "__weakref__", "__doc__")
        held = tuple((name, self.value(item, depth + 1)) for name, item in vars(cls).items() if name not in skipped)
        return "made", cls.__qualname__, tuple(self.type(base, depth + 1) for base in cls.__bases__), held


def _parts(value: Any) -> Iterable[Any] | None:
    """What a container, function or dataclass holds; None of what cannot be looked into."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, torch.Size) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return list(value)
    if kind in (dict, OrderedDict):
        return itertools.chain.from_iterable(value.items())
    if dataclasses.is_dataclass(value):
        return itertools.chain.from_iterable((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, types.FunctionType):
        try:
            closed = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # a cell that is not filled yet
            return None
        given = value.__defaults__, value.__kwdefaults__, vars(value)
        return value.__code__, id(value.__globals__), closed, *given
    return [getattr(value, name) for name in INSIDE[kind]] if kind in INSIDE else None


def _tensor(tensor: torch.Tensor | None) -> Any:
    """All that a trace can see of a parameter or buffer."""
    if tensor is None:
        return None
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
        return "object", id(tensor)  # of what it holds inside
    placed = (tensor.placements, tensor.device_mesh, tuple(local(tensor).shape)) if isinstance(tensor, DTensor) else ()
    kind = type(tensor), tensor.dtype, str(tensor.device), tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), *kind, *placed
