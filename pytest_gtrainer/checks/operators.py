"""Operators as checks name them: ``mm``, ``aten.mm``, ``aten.add.Tensor``, ``_c10d_functional.*``, ``output``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

from pytest_gtrainer._torch.graph_text import higher_order_operators, operator_names
from pytest_gtrainer.checks.errors import CheckError
from pytest_gtrainer.graphtext.errors import nearest
from pytest_gtrainer.graphtext.operators import operator_of

OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class OperatorPattern:
    """The name of an operator: its last word alone, or its path, with or without the overload."""

    text: str

    def matches(self, node: fx.Node) -> bool:
        if node.op == "output" or self.text == OUTPUT:
            return node.op == self.text
        found = operator_of(node)
        return _fits(self.text, found.text.split("."), found.short)

    def check(self, used: Sequence[fx.Node]) -> None:
        """Raises ``CheckError`` if neither the graph nor torch has such an operator."""
        if self.text == OUTPUT or any(self.matches(node) for node in used):
            return
        if not _is_known(self.text):
            last = self.text.removesuffix(".default").rpartition(".")[2]
            hint = nearest(last, {name for _, name, _ in _registered()})
            raise CheckError(f"no operator is called {self.text!r}{hint}")


def _fits(pattern: str, path: Sequence[str], name: str) -> bool:
    """Whether a pattern names an operator: one word is its name, more are the beginning of its path.

    >>> path = ["aten", "add", "Tensor"]
    >>> [_fits(text, path, "add") for text in ("add", "aten.add", "aten.add.Tensor", "aten.*", "Tensor", "aten.a")]
    [True, True, True, True, False, False]
    >>> _fits("aten.mm.default", ["aten", "mm"], "mm"), _fits("aten.add.default", path, "add")
    (True, False)
    """
    parts = pattern.split(".")
    if len(parts) == 1:
        return fnmatchcase(name, pattern)
    if len(parts) > len(path) and parts[-1] == "default":
        parts.pop()
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def _is_known(pattern: str) -> bool:
    home, _, name = pattern.rpartition(".")
    if any(_fits(pattern, path, path[1]) for path in _registered()):
        return True
    if home in ("", "operator") and hasattr(operator, name):
        return True
    if home in ("", "method") and hasattr(torch.Tensor, name):
        return True
    if home.startswith("torch"):
        return _attribute_exists(pattern)
    return any(_fits(pattern, ("hop", known), known) for known in higher_order_operators())


def _attribute_exists(path: str) -> bool:
    found: object = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part, None)
    return found is not None


def _registered() -> list[tuple[str, str, str]]:
    """Namespace, name and overload of every operator of the dispatcher."""
    found = []
    for spelled in operator_names():
        namespace, _, rest = spelled.partition("::")
        name, _, overload = rest.partition(".")
        found.append((namespace, name, overload or "default"))
    return found
