"""Whether a text is all that it takes to make its graph again: asked before a text becomes a golden."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import fx

from pytest_gtrainer._torch.operators import OpOverload
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.graphtext.digested import constants
from pytest_gtrainer.graphtext.errors import TextError
from pytest_gtrainer.graphtext.operators import operator_text
from pytest_gtrainer.graphtext.parsing import parse
from pytest_gtrainer.graphtext.registry import UnknownOperator, is_method, operator_named
from pytest_gtrainer.graphtext.rendering import render


def unfaithful(gm: fx.GraphModule, text: str, *, mesh: Mapping[str, int] | None = None) -> str | None:
    """Where ``text``, the full view of ``gm``, would be read back as another graph; None if nowhere.

    A graph that calls what no text may call (a function of Python, a lambda) cannot be read back at all;
    its text is only compared, and nothing is said of it.
    """
    namespaces = _namespaces(gm)
    if namespaces is None:
        return None
    try:
        reread = render(parse(text, constants=constants(gm), allow=namespaces), mesh=mesh)
    except TextError as error:
        return f"{error}\n  text:  {_shown(text.splitlines()[error.line - 1])}"
    told, again = header.body(text).splitlines(), header.body(reread).splitlines()
    first = len(text.splitlines()) - len(told) + 1
    for number, (one, other) in enumerate(zip_longest(told, again), start=first):
        if one != other:
            return f"line {number}\n  text:  {_shown(one)}\n  again: {_shown(other)}"
    return None


def _shown(line: str | None) -> str:
    return "(ends here)" if line is None else line.strip()


def _namespaces(gm: fx.GraphModule) -> set[str] | None:
    """The namespaces of the operators that a graph calls, bodies included; None if it calls anything else."""
    targets = {node.target for node in _calls(gm) if node.op == "call_function"}
    namespaces = {target.namespace for target in targets if isinstance(target, OpOverload)}
    methods = {str(node.target) for node in _calls(gm) if node.op == "call_method"}
    are_known = all(_is_known(target, namespaces) for target in targets) and all(map(is_method, methods))
    return namespaces if are_known else None


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _is_known(target: Callable[..., Any] | str, namespaces: set[str]) -> bool:
    try:
        return operator_named(operator_text(target), namespaces) is target  # type: ignore[arg-type]
    except UnknownOperator:
        return False
