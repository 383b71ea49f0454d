"""Graphs of other tracers, read as ours are: Dynamo's, AOTAutograd's, Inductor's, ``torch.export``'s.

Each says in its own way what an input is, and where a node belongs:

- Dynamo: the *source* of an input, ``L['self']._modules['up']._parameters['weight']``, and stacks of modules whose
  paths begin with such a source; values stand in ``meta["example_value"]``;
- AOTAutograd and Inductor: *descriptors* in ``meta["desc"]``, which count Dynamo's inputs;
- ``torch.export``: a signature beside the graph.

``adopted`` gives a copy with the metadata that ``graph.nodes`` names. The graph itself is only read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import fx, nn

from pytest_gtrainer._torch.foreign_graphs import (
    ExportedProgram,
    Gradient,
    Input,
    MutatedInput,
    Output,
    Saved,
    described_input,
    described_output,
    source_of,
)
from pytest_gtrainer._torch.values import OpOverloadPacket
from pytest_gtrainer.graph.nodes import node_fqn

AnyGraph: TypeAlias = fx.GraphModule | fx.Graph | ExportedProgram
Names: TypeAlias = nn.Module | Mapping[str, str] | fx.GraphModule
"""What the inputs of a graph are: the model, FQNs by the name of the placeholder, or Dynamo's graph of the model."""


class GivenName(NamedTuple):
    """What an input is: "parameter", "buffer" or "input", and its FQN or the argument's name."""

    kind: str
    fqn: str


_ROOT = re.compile(r"^[LG]\['([^']*)'\]")
_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_NO_NAMES = frozenset({"_modules", "_parameters", "_buffers", "_orig_mod", "__closure__", "cell_contents", "__dict__"})


def path_of(source: str) -> tuple[str, list[str]]:
    """The root of a source, and the names below it.

    >>> path_of("L['self']._modules['layers']._modules['0'].up")
    ('self', ['layers', '0', 'up'])
    >>> path_of("layers.0.up")
    ('', ['layers', '0', 'up'])
    """
    root = _ROOT.match(source)
    rest = source[root.end() :] if root else f".{source}"
    steps = [next(filter(None, step), "") for step in _STEP.findall(rest)]
    return (root[1] if root else ""), [step for step in steps if step not in _NO_NAMES]


def named_source(source: str, value: Any = None) -> GivenName:
    """What a source of Dynamo names; ``value`` is the input's, for one that is a parameter by an attribute.

    >>> named_source("L['self']._modules['up']._parameters['weight']")
    GivenName(kind='parameter', fqn='up.weight')
    >>> named_source("L['batch']['mask']")
    GivenName(kind='input', fqn='batch.mask')
    """
    root, steps = path_of(source)
    if "._parameters[" in source or isinstance(value, nn.Parameter):
        return GivenName("parameter", ".".join(steps) or root)
    if "._buffers[" in source or isinstance(value, nn.Buffer):
        return GivenName("buffer", ".".join(steps) or root)
    return GivenName("input", ".".join(steps if root == "self" and steps else [root, *steps]))


def adopted(graph: AnyGraph, names: Names | None = None) -> fx.GraphModule:
    """The graph as the rest of the package reads it: itself if it is ours, else a copy with our metadata.

    Args:
        names: what the inputs are, where the graph does not say it. Of a model, the parameters and then the buffers
            are the first inputs, in this order.

    Raises:
        ValueError: ``names`` do not fit the inputs; the graph has a cycle.
        TypeError: this is no graph.
    """
    if isinstance(graph, ExportedProgram):
        return _Adoption(graph.graph_module, _of_signature(graph)).run()
    if isinstance(graph, fx.Graph):
        graph = fx.GraphModule(graph.owning_module or nn.Module(), graph)
        return _Adoption(graph, _given(graph, names)).run()
    if not isinstance(graph, fx.GraphModule):
        raise TypeError(
            f"{graph!r} is of type {type(graph).__name__}, not a graph: give a GraphModule, an fx.Graph, or an "
            "ExportedProgram"
        )
    if names is None and not is_foreign(graph):
        return graph
    return _Adoption(graph, _given(graph, names)).run()


def is_foreign(gm: fx.GraphModule) -> bool:
    """Whether another tracer left its names or values in the graph, and ours, or a parser, none."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if "gt_input" in node.meta:
                return False
            if source_of(node) is not None or "desc" in node.meta:
                return True
        if "example_value" in node.meta or (node.op != "placeholder" and _ROOT.match(_stack_path(node))):
            return True
    return False


def _stack_path(node: fx.Node) -> str:
    """Of the innermost module that the tracer of the node was in; "" if it says none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _given(gm: fx.GraphModule, names: Names | None) -> dict[str, GivenName] | Sequence[GivenName]:
    """By placeholder, or by index of Dynamo's inputs, what somebody says the inputs are."""
    if names is None:
        return {}
    if isinstance(names, fx.GraphModule):
        return inputs_of(names)
    placeholders = gm.graph.find_nodes(op="placeholder")
    if isinstance(names, Mapping):
        known = {str(node.target) for node in placeholders}
        unknown = [name for name in names if name not in known]
        if unknown:
            listed = ", ".join(sorted(known))
            raise ValueError(f"names has {unknown[0]!r}, which is no input of the graph; these are {listed}")
        return {name: GivenName("input", fqn) for name, fqn in names.items()}
    state = [
        *((GivenName("parameter", fqn), tensor) for fqn, tensor in names.named_parameters()),
        *((GivenName("buffer", fqn), tensor) for fqn, tensor in names.named_buffers()),
    ]
    if len(state) > len(placeholders):
        raise ValueError(
            f"the model has {len(state)} parameters and buffers, the graph {len(placeholders)} inputs: give a mapping"
        )
    given = {}
    for (name, tensor), node in zip(state, placeholders, strict=False):
        shape = getattr(_value_of(node), "shape", None)
        if shape is not None and tuple(shape) != tuple(tensor.shape):
            raise ValueError(
                f"input {node.target} has shape {list(shape)}, {name.fqn} of the model {list(tensor.shape)}: the "
                "inputs do not begin with the model's parameters and buffers; give a mapping"
            )
        given[str(node.target)] = name
    return given


def inputs_of(dynamo: fx.GraphModule) -> list[GivenName]:
    """What the inputs of a graph of Dynamo are, in order: what descriptors of AOTAutograd count."""
    found = []
    for node in dynamo.graph.find_nodes(op="placeholder"):
        source, told = source_of(node), node.meta.get("gt_input")
        if told is not None:
            found.append(GivenName(told["kind"], told["fqn"]))
        else:
            found.append(named_source(source, _value_of(node)) if source else GivenName("input", str(node.target)))
    return found


def _of_signature(program: ExportedProgram) -> dict[str, GivenName]:
    signature = program.graph_signature
    return {
        **{name: GivenName("input", name) for name in signature.user_inputs if isinstance(name, str)},
        **{name: GivenName("parameter", fqn) for name, fqn in signature.inputs_to_parameters.items()},
        **{name: GivenName("buffer", fqn) for name, fqn in signature.inputs_to_buffers.items()},
        **{name: GivenName("buffer", fqn) for name, fqn in signature.inputs_to_lifted_tensor_constants.items()},
    }


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


class _Adoption:
    """One graph, or a body of it."""

    def __init__(self, gm: fx.GraphModule, given: Mapping[str, GivenName] | Sequence[GivenName]) -> None:
        self.gm = gm
        self.given = given if isinstance(given, Mapping) else {}
        self.dynamo = [] if isinstance(given, Mapping) else list(given)
        self.behind_tangents: set[fx.Node] = set()

    def run(self) -> fx.GraphModule:
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        attributes: dict[str, Any] = {}
        for node in _sorted(self.gm.graph.nodes):
            copied = known[node] = graph.node_copy(node, known.__getitem__)
            copied.meta = dict(node.meta)
            self._mark(node, copied)
            if node.op == "get_attr" and isinstance(found := _attribute(self.gm, str(node.target)), fx.GraphModule):
                attributes[str(node.target)] = _Adoption(found, {}).run() if is_foreign(found) else found
        made = fx.GraphModule(self.gm, graph)
        for name, body in attributes.items():
            home, _, last = name.rpartition(".")
            setattr(made.get_submodule(home), last, body)
        made.meta = dict(self.gm.meta)
        self._name_outputs(made.graph.output_node())
        return made

    def _mark(self, node: fx.Node, copied: fx.Node) -> None:
        meta = copied.meta
        if isinstance(node.target, OpOverloadPacket) and len(overloads := node.target.overloads()) == 1:
            copied.target = getattr(node.target, overloads[0])  # as Dynamo calls collectives and custom operators
        if "val" not in meta and "example_value" in meta:
            meta["val"] = meta["example_value"]
        custom = meta.get("custom") or {}
        if "module_fqn" not in custom and (path := _stack_path(node)):
            _, steps = path_of(path)
            if steps:
                meta["custom"] = {**custom, "module_fqn": ".".join(steps)}
            for stack in ("nn_module_stack", "fwd_nn_module_stack"):
                meta.pop(stack, None)
        if node.op == "placeholder":
            self._name_input(node, copied)
        elif any(source in self.behind_tangents for source in node.all_input_nodes):
            self.behind_tangents.add(node)
            meta["autograd_backward"] = True  # an autograd.Function's backward has no mark

    def _name_input(self, node: fx.Node, copied: fx.Node) -> None:
        described = described_input(node)
        if described is not None and described.is_tangent:
            self.behind_tangents.add(node)
        if "gt_input" in node.meta:
            return
        if (name := self.given.get(str(node.target))) is None:
            if described is not None:
                name = self._name_of(described)
            elif (source := source_of(node)) is not None:
                name = named_source(source, _value_of(node))
            elif "original_aten" in node.meta:
                name = GivenName("input", _saved_name(copied))
        if name is not None:
            copied.meta["gt_input"] = {"kind": name.kind, "fqn": name.fqn}

    def _name_of(self, described: Input) -> GivenName | None:
        if described.fqn is not None:
            return GivenName(described.kind, described.fqn)
        if described.index is None:
            return None
        if described.index >= len(self.dynamo):
            return None
        name = self.dynamo[described.index]
        return name._replace(fqn=f"{name.fqn}{described.suffix}") if described.suffix else name

    def _name_outputs(self, output: fx.Node) -> None:
        """Names of results, if descriptors tell every one."""
        descriptors = output.meta.get("desc")
        leaves = output.args[0]
        if "gt_outputs" in output.meta or not all(isinstance(each, list | tuple) for each in (descriptors, leaves)):
            return
        told = []
        for place, (descriptor, leaf) in enumerate(zip(descriptors, leaves, strict=False)):
            # the results of a backward are in the order of the inputs
            if descriptor is None and leaf is None and place < len(self.dynamo):
                told.append(self.dynamo[place].fqn)
                continue
            described = described_output(descriptor)
            if isinstance(described, Saved) and isinstance(leaf, fx.Node):
                told.append(_saved_name(leaf))
            elif isinstance(described, Gradient | MutatedInput) and (name := self._name_of(described.of)) is not None:
                told.append(name.fqn if isinstance(described, Gradient) else f"updated.{name.fqn}")
            elif isinstance(described, Output):
                told.append(f"output_{described.index}")
            else:
                return
        if len(told) == len(leaves):
            output.meta["gt_outputs"] = tuple(told)


def _saved_name(node: fx.Node) -> str:
    """The name of a value that the forward keeps, the same in both graphs: of the input that it is, or its operator."""
    if (told := node.meta.get("gt_input")) is not None:
        fqn = str(told["fqn"])
        return fqn if fqn.startswith("kept.") else f"kept.{fqn}"
    operator = getattr(node.meta.get("original_aten"), "__name__", node.name).split(".")[0]
    return ".".join(filter(None, ("kept", node_fqn(node), operator)))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


def _sorted(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes behind their operands, else in the graph's order: Inductor's passes may leave a graph unsorted."""
    ordered: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        late = []
        for node in waiting:
            if all(source in ordered for source in node.all_input_nodes):
                ordered[node] = None
            else:
                late.append(node)
        if len(late) == len(waiting):
            raise ValueError(f"the graph has a cycle, in which {late[0].name} is")
        waiting = late
    return list(ordered)
