"""The signature of a layer: equal for two layers that do the same with the same arguments.

It holds class, code, attributes, hooks, wrapped forwards, and the shapes of parameters and buffers, of all modules
below. A class that is made for one module (``data_parallel``, parametrizations) is taken by what it holds. An object
that cannot be looked into is equal to itself alone: two layers that each have one differ.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.values import buffers_of, is_traceable_wrapper_subclass, modules_of, parameters_of
from pytest_gtrainer.tracing.model import local

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device, torch.layout)
TABLES = ("_parameters", "_buffers", "_modules")
DEPTH = 12
"""How deep containers and closures are looked into; what lies deeper is equal to itself alone."""


def signature(layer: nn.Module) -> Any:
    """What makes ``layer`` do what it does, as nested tuples; attributes by name, so that a difference has a path."""
    own: dict[int, Any] = {}
    for path, module in layer.named_modules():
        own[id(module)] = ("own module", path)
        tensors = {**parameters_of(module), **buffers_of(module)}
        own.update({id(t): ("own tensor", path, name) for name, t in tensors.items() if t is not None})
    return _Signer(own).module(layer)


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
        attributes = tuple(
            ("." + name, tuple((number[key], self.value(hook)) for key, hook in held.items()))
            if "_hooks" in name and isinstance(held, dict)
            else ("." + name, self.value(held))
            for name, held in vars(module).items()
            if name not in TABLES and "state_dict" not in name
        )
        tensors = (parameters_of(module), buffers_of(module))
        return (
            self.type(type(module)),
            *attributes,
            *(("." + name, tensor_signature(tensor)) for table in tensors for name, tensor in table.items()),
            *(("." + name, child and self.module(child)) for name, child in modules_of(module).items()),
        )

    def value(self, value: Any, depth: int = 0) -> Any:
        if type(value) in PLAIN:
            return constant(value)
        if id(value) in self.own:
            return self.own[id(value)]
        if depth > DEPTH:
            return "object", id(value)
        within = functools.partial(self.value, depth=depth + 1)
        if type(value) in (list, tuple, torch.Size) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return id(type(value)), *map(within, value)
        if type(value) in (set, frozenset):
            return id(type(value)), *sorted(map(repr, map(within, value)))
        if type(value) in (dict, OrderedDict):
            return id(type(value)), *((within(key), within(item)) for key, item in value.items())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return id(type(value)), *((f.name, within(getattr(value, f.name))) for f in dataclasses.fields(value))
        if isinstance(value, DeviceMesh):
            return "mesh", value
        if isinstance(value, type):
            return self.type(value, depth + 1)
        return self._callable(value, within)

    def _callable(self, value: Any, within: Any) -> Any:
        """Functions by their code and what they close over; what is no function is equal to itself alone."""
        if isinstance(value, types.FunctionType):
            try:
                closed = tuple(within(cell.cell_contents) for cell in value.__closure__ or ())
            except ValueError:  # a cell that is not filled yet
                return "object", id(value)
            given = within(value.__defaults__), within(value.__kwdefaults__), within(vars(value))
            return "function", value.__code__, id(value.__globals__), closed, given
        if isinstance(value, types.MethodType):
            return "method", within(value.__func__), within(value.__self__)
        if type(value) in (functools.partial, functools.partialmethod):
            return id(type(value)), within(value.func), within(value.args), within(value.keywords)
        if isinstance(value, property):
            return "property", within(value.fget), within(value.fset), within(value.fdel)
        if isinstance(value, staticmethod | classmethod):
            return id(type(value)), within(value.__func__)
        return "object", id(value)

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


def tensor_signature(tensor: torch.Tensor | None) -> Any:
    """All that a trace can see of a parameter or buffer."""
    if tensor is None:
        return None
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
        return "object", id(tensor)  # of what it holds inside
    placed = (tensor.placements, tensor.device_mesh, tuple(local(tensor).shape)) if isinstance(tensor, DTensor) else ()
    kind = type(tensor), tensor.dtype, str(tensor.device), tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), *kind, *placed


def signature_of(value: Any) -> Any:
    """That of any value."""
    return _Signer({}).value(value)
