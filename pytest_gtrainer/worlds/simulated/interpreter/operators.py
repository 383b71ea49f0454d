"""What an operator of a graph is: a plain one, a random one, one that writes; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.interpreter import COMPILED_CODE, COMPILED_MODULES
from pytest_gtrainer._torch.operators import HigherOrderOperator, OpOverload, schema
from pytest_gtrainer.worlds.simulated import NoModel
from pytest_gtrainer.worlds.simulated.interpreter.binding import named_arguments
from pytest_gtrainer.worlds.simulated.interpreter.collective_calls import is_collective

_DRAWING = ("run_and_save_rng_state", "run_with_rng_state")


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values the operator writes to, by its schema."""
    if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
        return []
    named = named_arguments(node)
    written = [
        named[argument.name]
        for argument in schema(node.target).arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]
    found: list[fx.Node] = []
    fx.node.map_arg(written, found.append)
    return found


def is_random(node: fx.Node, root: torch.nn.Module) -> bool:
    """Whether the operator, or a graph that it calls, draws random numbers."""
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    if isinstance(node.target, HigherOrderOperator) and node.target.name() in _DRAWING:
        return True
    return any(is_random(inner, graph) for graph in graphs_called(node, root) for inner in graph.graph.nodes)


def has_collectives(gm: fx.GraphModule) -> bool:
    """Whether a node of the graph, or of graphs in it, communicates."""
    graphs = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(is_collective(node) for graph in graphs for node in graph.graph.nodes)


def graphs_called(node: fx.Node, root: torch.nn.Module) -> Iterator[fx.GraphModule]:
    """The graphs that a node calls: as a module, or as arguments of a higher-order operator."""
    called: list[Any] = []
    if node.op == "call_module":
        called.append(root.get_submodule(str(node.target)))
    for given in node.all_input_nodes:
        if given.op == "get_attr":
            called.append(attribute(root, str(given.target)))
    for module in called:
        if isinstance(module, fx.GraphModule):
            yield module


def attribute(root: torch.nn.Module, target: str) -> Any:
    """What a ``get_attr`` node stands for."""
    value: Any = root
    for name in target.split("."):
        value = getattr(value, name)
    return value


def check_callable(node: fx.Node, root: torch.nn.Module) -> None:
    """Refuse what is no operator that could be replayed rank by rank.

    Raises:
        NoModel: compiled code, or a module that is no graph.
    """
    called: Any = node.target
    if node.op == "call_module":
        called = root.get_submodule(str(node.target))
        if not isinstance(called, fx.GraphModule) and not _is_compiled(called):
            raise NoModel(f"{node.name} calls the module {node.target}, a {type(called).__name__}: trace into it")
    elif node.op == "call_method":
        raise NoModel(f"{node.name} calls the method {node.target!r}: trace to operators, with make_fx")
    if _is_compiled(called):
        raise NoModel(
            f"{node.name} calls code that Inductor compiled ({_called_name(called)}): "
            "a simulated world replays operators, so take the graph before it is compiled"
        )


def _is_compiled(called: Any) -> bool:
    if isinstance(called, HigherOrderOperator):
        return bool(called.name() == COMPILED_CODE)
    homes = (getattr(called, "__module__", None), type(called).__module__)
    return any(str(home).startswith(COMPILED_MODULES) for home in homes)


def _called_name(called: Any) -> str:
    return str(getattr(called, "__name__", None) or type(called).__name__)
