"""What a node is to the interpreter: what it takes, whether it communicates, writes or draws; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.passes import COMPILED_CODE, COMPILED_MODULES
from pytest_gtrainer._torch.values import HigherOrderOperator, schema
from pytest_gtrainer.graph.nodes import is_collective, is_random, node_fqn
from pytest_gtrainer.worlds.simulated import NoModel

Binder = Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]]
GROUP = "group_name"
_PASSED_THROUGH = ("wait_tensor", "_wrap_tensor_autograd")
_WRITTEN = {"all_gather_into_tensor_out": "out", "reduce_scatter_tensor_out": "out", "all_reduce_": "input",
            "broadcast_": "input", "all_reduce_coalesced_": "inputs"}  # fmt: skip


def input_name(node: fx.Node) -> str:
    """What a placeholder stands for: "parameter layers.0.wq.weight" where the tracer said so."""
    known = node.meta.get("gt_input")
    return f"{known['kind']} {known['fqn']}" if known else f"input {node.name}"


def described(node: fx.Node) -> str:
    """A node by its name, operator and module."""
    fqn = node_fqn(node)
    return f"{node.name} ({node.target}{f', {fqn}' if fqn else ''})"


def short_name(node: fx.Node) -> str:
    """The operator's name without its namespace and overload."""
    target: Any = node.target
    return str(schema(target).name).rpartition("::")[2]


# --- arguments


def binder(node: fx.Node) -> Binder:
    """A function from the values of ``node.all_input_nodes`` to arguments and keywords."""
    numbers = {given: index for index, given in enumerate(node.all_input_nodes)}
    template, kwargs = list(node.args), dict(node.kwargs)
    places = [(place, numbers[arg]) for place, arg in enumerate(template) if isinstance(arg, fx.Node)]
    nested: list[fx.Node] = []
    fx.node.map_arg(([arg for arg in template if not isinstance(arg, fx.Node)], kwargs), nested.append)
    if nested:
        return lambda values: fx.node.map_arg((node.args, kwargs), lambda given: values[numbers[given]])

    def bind(values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Faster, for arguments that are nodes themselves: most."""
        filled = template.copy()
        for place, index in places:
            filled[place] = values[index]
        return filled, kwargs

    return bind


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by the names in its schema."""
    named = {argument.name: given for argument, given in zip(schema(node.target).arguments, node.args, strict=False)}
    return {**named, **node.kwargs}


def group_name(node: fx.Node) -> str:
    """The group of a collective.

    Raises:
        NoModel: it is no name.
    """
    name = named_arguments(node)[GROUP]
    if not isinstance(name, str):
        raise NoModel(f"{node.target} ({node.name}) takes its group from the graph: trace with groups by name")
    return name


def attribute(root: torch.nn.Module, target: str) -> Any:
    """What a ``get_attr`` node stands for."""
    value: Any = root
    for name in target.split("."):
        value = getattr(value, name)
    return value


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


# --- effects


def has_collectives(gm: fx.GraphModule) -> bool:
    """Whether a node of the graph, or of graphs in it, communicates."""
    graphs = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(is_collective(node) for graph in graphs for node in graph.graph.nodes)


def source_of(node: fx.Node) -> fx.Node:
    """The node whose value this one has: what a wait waits for, else itself."""
    while passes_through(node):
        node = node.all_input_nodes[0]
    return node


def passes_through(node: fx.Node) -> bool:
    """Whether a collective's operator gives its argument back: a wait."""
    return is_collective(node) and short_name(node) in _PASSED_THROUGH


def is_reduction(node: fx.Node) -> bool:
    """Whether a collective adds what the members give."""
    return is_collective(node) and short_name(node).startswith(("reduce_scatter_tensor", "all_reduce"))


def written_argument(node: fx.Node) -> str | None:
    """Name of the argument that an in-place collective writes its result to."""
    return _WRITTEN.get(short_name(node))


def draws(node: fx.Node, root: torch.nn.Module) -> bool:
    """Whether the operator, or a graph that it calls, draws random numbers."""
    return is_random(node) or any(draws(inner, gm) for gm in graphs_called(node, root) for inner in gm.graph.nodes)


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
        name = getattr(called, "__name__", None) or type(called).__name__
        raise NoModel(
            f"{node.name} calls code that Inductor compiled ({name}): "
            "a simulated world replays operators, so take the graph before it is compiled"
        )


def _is_compiled(called: Any) -> bool:
    if isinstance(called, HigherOrderOperator):
        return bool(called.name() == COMPILED_CODE)
    homes = (getattr(called, "__module__", None), type(called).__module__)
    return any(str(home).startswith(COMPILED_MODULES) for home in homes)
