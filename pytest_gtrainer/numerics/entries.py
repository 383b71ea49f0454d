"""The named tensors of whatever a person wants digested or compared.

A tensor has the empty name, the elements of a list or tuple are ``[0]``, ``[1]``, a
mapping gives its keys and a module its parameters and buffers, in order, tied weights
under each of their names and non-persistent buffers too. Containers nest: ``state[0].step``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from pytest_gtrainer.numerics.names import normalised
from pytest_gtrainer.numerics.record import Key, Record

Tensors: TypeAlias = "Tensor | nn.Module | Record | Mapping[str, Any] | list[Any] | tuple[Any, ...]"

OUTSIDE_A_RUN = ""


def entries(value: Tensors) -> dict[Key, Tensor]:
    """Every tensor in ``value`` by its key; the phase is empty outside a ``Record``.

    ``None`` in a container (a parameter without gradient) is no entry.

    Raises:
        TypeError: something that is not a tensor, naming where.
        ValueError: two tensors of one name after wrapper prefixes are gone.
    """
    if isinstance(value, Record):
        return dict(value.items())
    found: dict[Key, Tensor] = {}
    for name, tensor in _named(value, ""):
        key = Key(0, 0, OUTSIDE_A_RUN, normalised(name))
        if key in found:
            raise ValueError(f"two tensors are named {key.name!r}")
        found[key] = tensor
    return found


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from _of_module(value, name)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, _joined(name, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _named(part, f"{name}[{index}]")
    elif value is not None or not name:
        where = f" at {name!r}" if name else ""
        raise TypeError(f"expected tensors, got {type(value).__name__}{where}")


def _of_module(module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in module.named_parameters(remove_duplicate=False):
        yield _joined(name, key), tensor
    for key, tensor in module.named_buffers(remove_duplicate=False):
        yield _joined(name, key), tensor


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
