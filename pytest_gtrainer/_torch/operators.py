"""Operators: their class, their schema.

``OpOverload._schema`` is the dispatcher's schema: ``name``, ``arguments`` (each with ``name``, ``is_write``,
``alias_info``, ``default_value``), ``returns``, ``is_mutable``.
"""

from __future__ import annotations

from typing import Any

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._ops import HigherOrderOperator, OpOverload


__all__ = ["HigherOrderOperator", "OpOverload", "schema"]

ATTRIBUTES = {"torch._ops:OpOverload": ("_schema",)}


def schema(operator: OpOverload) -> Any:
    """The dispatcher's schema of an operator."""
    return operator._schema
