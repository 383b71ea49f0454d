"""Graphs and graph modules: copies that cost little.

A ``_LazyGraphModule`` generates its code when it is first run, however often ``recompile`` is
called: most graphs between passes are never run.
"""

import copy
from typing import Any

from torch import fx

from pytest_gtrainer._torch import private_names

with private_names():
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.graph import _PyTreeCodeGen

ATTRIBUTES = {
    "torch.fx:Graph": ("_tracer_cls", "_codegen"),
    "torch.fx.graph:_PyTreeCodeGen": ("pytree_info",),
}


def empty_graph(like: fx.Graph) -> fx.Graph:
    """Return a graph without nodes, of the same tracer."""
    return fx.Graph(tracer_cls=like._tracer_cls)


def finished(graph: fx.Graph, like: fx.GraphModule, attributes: dict[str, Any]) -> fx.GraphModule:
    """Lint a graph, and return it as a module like ``like`` that holds ``attributes``."""
    # The calling convention of the graph.
    graph.set_codegen(like.graph._codegen)
    graph.lint()
    return lazy_module(attributes, graph, like.meta, like.shape_env)


def lazy_module(
    attributes: Any, graph: fx.Graph, meta: dict[str, Any], shape_env: Any
) -> fx.GraphModule:
    """Return a graph as a module that generates its code when it is first run.

    ``attributes`` is a dict of what the graph's ``get_attr`` nodes name, or a module that has it.
    """
    made: fx.GraphModule = _LazyGraphModule(attributes, graph)
    made.meta, made.shape_env = dict(meta), shape_env
    return made


def copied_lazily(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that generates its code when it is first run; values of ``meta`` are shared."""
    old = gm.graph
    new = empty_graph(old)
    # ``graph_copy`` copies all nodes but the output, with shallow copies of their metadata.
    output = new.output(new.graph_copy(old, {}))
    output.meta = copy.copy(old.output_node().meta)
    new.set_codegen(copy.deepcopy(old._codegen))
    return lazy_module(gm, new, gm.meta, gm.shape_env)


def compiled(gm: fx.GraphModule) -> fx.GraphModule:
    """Return an ordinary GraphModule of the graph, with its code."""
    done = fx.GraphModule(gm, gm.graph)
    done.meta, done.shape_env = gm.meta, gm.shape_env
    return done


def result_structure(graph: fx.Graph) -> Any:
    """Return the pytree structure of a graph's result; None if its output node has the result."""
    codegen = graph._codegen
    # A graph of torch.export.
    return codegen.pytree_info.out_spec if isinstance(codegen, _PyTreeCodeGen) else None
