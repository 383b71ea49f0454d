"""Graphs and graph modules: copies that cost little.

- ``_LazyGraphModule`` generates its code when it is first run, however often ``recompile`` is
  called.
- ``Graph._tracer_cls`` and ``Graph._codegen`` go with a graph's calling convention, and so into its
  copies.
- ``Graph._codegen`` of a graph that torch.export made is a ``_PyTreeCodeGen``, whose
  ``pytree_info.out_spec`` is the structure of what the generated code returns; ``TreeSpec`` has
  ``type``, ``context``, ``children()``, ``is_leaf()``.
- ``Graph.graph_copy`` copies all nodes but the output, with shallow copies of their metadata.
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
    """A graph without nodes, of the same tracer."""
    return fx.Graph(tracer_cls=like._tracer_cls)


def finished(graph: fx.Graph, like: fx.GraphModule, attributes: dict[str, Any]) -> fx.GraphModule:
    """The graph, whose ``get_attr`` nodes name ``attributes``, as a module like ``like``."""
    graph.set_codegen(like.graph._codegen)
    graph.lint()
    return lazy_module(attributes, graph, like.meta, like.shape_env)


def lazy_module(
    attributes: Any, graph: fx.Graph, meta: dict[str, Any], shape_env: Any
) -> fx.GraphModule:
    """A graph as a module without code until somebody asks; ``attributes`` are named, or a module
    that has them.
    """
    made: fx.GraphModule = _LazyGraphModule(attributes, graph)
    made.meta, made.shape_env = dict(meta), shape_env
    return made


def copied_lazily(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in nodes of its own, without code until somebody asks; values of their
    ``meta`` are shared.
    """
    old = gm.graph
    new = empty_graph(old)
    output = new.output(new.graph_copy(old, {}))
    output.meta = copy.copy(old.output_node().meta)
    new.set_codegen(copy.deepcopy(old._codegen))
    return lazy_module(gm, new, gm.meta, gm.shape_env)


def compiled(gm: fx.GraphModule) -> fx.GraphModule:
    """An ordinary GraphModule of the graph, with its code."""
    done = fx.GraphModule(gm, gm.graph)
    done.meta, done.shape_env = gm.meta, gm.shape_env
    return done


def result_structure(graph: fx.Graph) -> Any:
    """Return the pytree structure of what the code of a graph returns; None if it returns what its
    output node says.
    """
    codegen = graph._codegen
    return codegen.pytree_info.out_spec if isinstance(codegen, _PyTreeCodeGen) else None
