"""Copy graphs of other tracers, with the metadata that ``graph.nodes`` names.

Each tracer says in its own way what an input is. Dynamo gives it a *source*,
``L['self']._modules['up']._parameters['weight']``, and gives modules stacks whose paths begin with
one. AOTAutograd and Inductor leave *descriptors* in ``meta["desc"]``, which count Dynamo's inputs.
``torch.export`` has a signature besides the graph.
"""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import fx, nn

from pytest_gtrainer._torch.foreign_graphs import (
    ExportedProgram,
    Input,
    described_input,
    described_output,
    source_of,
)
from pytest_gtrainer._torch.graph_modules import result_structure
from pytest_gtrainer._torch.values import OpOverload, OpOverloadPacket
from pytest_gtrainer.graph import join_path, split_path
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    arguments_given,
    direction,
    held,
    is_view,
    leaves_of,
    node_fqn,
    places_of,
    short_name,
    stack_path,
    value_of,
    walk,
)


class WithGraph(Protocol):  # a recorded pass, a traced step
    @property
    def gm(self) -> fx.GraphModule: ...


AnyGraph: TypeAlias = fx.GraphModule | fx.Graph | ExportedProgram | WithGraph
Names: TypeAlias = nn.Module | Mapping[str, str] | fx.GraphModule
"""Names for a graph's inputs: the model, FQNs by placeholder, or Dynamo's graph of the model."""


class GivenName(NamedTuple):
    """An input: its kind ("parameter", "buffer" or "input"), and its FQN or the argument's name."""

    kind: str
    fqn: str


_Given: TypeAlias = Mapping[str, GivenName] | Sequence[GivenName]
"""Names of inputs by placeholder, or by the index of Dynamo's inputs."""
_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ROOT = re.compile(rf"\b[LG]\[({_TEXT})\]")
_STEP = re.compile(rf"\.([^.\[(]+)|\[((?:{_TEXT}|[^\]'\"])*)\]")
_KEYS = re.compile(r"list\(dict\.keys\(.*?\)\)\[(\d+)\]")  # a key that is no text, by its place
_NO_NAMES = frozenset(
    {"_modules", "_parameters", "_buffers", "_orig_mod", "__closure__", "cell_contents", "__dict__"}
)


@functools.lru_cache(maxsize=1 << 14)
def path_of(source: str) -> tuple[str, tuple[str, ...]]:
    """Return the root of a source, and the names below it; the path of a module has no root.

    >>> path_of("L['self']._modules['layers']._modules['0'].up"), path_of("L['d']['a.b'].size()[0]")
    (('self', ('layers', '0', 'up')), ('d', ('a.b', 'size', '0')))
    """
    # ``eager_chunked`` replaces the forward of a module, and keeps the module's own.
    source = _KEYS.sub(r"\1", source.replace(".forward.run.__self__", ""))
    root = _ROOT.search(source)
    if root is None:
        return "", tuple(name for name in source.split(".") if name not in _NO_NAMES)
    names = []
    for attribute, key in _STEP.findall(source[root.end() :]):
        if attribute not in _NO_NAMES:
            names.append(attribute or _key(key))
    return _key(root[1]), tuple(names)


def _key(spelled: str) -> str:
    """Return the key of a dictionary, or the index of a list, without quotes."""
    try:
        return str(ast.literal_eval(spelled))
    except (ValueError, SyntaxError):
        return spelled


def named_source(source: str, value: Any = None, keeps_roots: bool = False) -> GivenName:
    """Return the input that a source of Dynamo names.

    Args:
        keeps_roots: the variable that holds a model is part of the FQN.

    >>> named_source("L['self']._modules['up']._parameters['weight']")
    GivenName(kind='parameter', fqn='up.weight')
    """
    root, steps = path_of(source)
    kind = "input"
    if "._parameters[" in source or isinstance(value, nn.Parameter):
        kind = "parameter"
    elif "._buffers[" in source or isinstance(value, nn.Buffer):
        kind = "buffer"
    if keeps_roots or not steps or (kind == "input" and root != "self"):
        return GivenName(kind, join_path([root, *steps]))
    return GivenName(kind, join_path(steps))


def holds_state(placeholder: fx.Node) -> bool:
    """Return whether an input is a tensor that the traced code held and no caller gave.

    Those are buffers and constants, and what Dynamo found in attributes of a model or in globals.
    Parameters are none: they stand for any numbers in each comparison.
    """
    kind = placeholder.meta.get("gt_input", {}).get("kind")
    return kind == "buffer" or bool(placeholder.meta.get("gt_held"))


def _is_held(source: str) -> bool:
    """Return whether a source of Dynamo is a global, or an attribute of an object.

    >>> _is_held("G['SCALE']"), _is_held("L['self'].scale"), _is_held("L['batch']['x.y']")
    (True, True, False)
    """
    root = _ROOT.match(source)
    steps = _STEP.findall(source[root.end() :]) if root is not None else []
    return source.startswith("G[") or any(attribute for attribute, _ in steps)


def refuse_without_output(graph: fx.Graph) -> None:
    """Raises: ValueError: the graph has no output node, so that nothing of it is a result."""
    if not graph.find_nodes(op="output"):
        raise ValueError("the graph has no output node: end it with graph.output(result)")


def adopt(graph: AnyGraph, names: Names | None = None) -> fx.GraphModule:
    """Return a graph of ours as it is, and a copy of any other one with our metadata.

    Args:
        names: what the inputs are where the graph does not say it. Of a model the parameters come
            first, then the buffers.

    Raises:
        TypeError: ``graph`` is no graph.
        ValueError: the graph has a cycle or no end, or ``names`` do not fit its inputs.
    """
    graph = graph if isinstance(graph, fx.GraphModule) else getattr(graph, "gm", graph)
    if isinstance(graph, ExportedProgram):
        return _adopted_program(graph)
    nodes = getattr(graph, "graph", graph)
    if isinstance(nodes, fx.Graph):
        refuse_without_output(nodes)
    if isinstance(graph, fx.Graph):
        graph = fx.GraphModule(graph.owning_module or nn.Module(), graph)
    elif not isinstance(graph, fx.GraphModule):
        wrong = f"{graph!r} is of type {type(graph).__name__}, not a graph"
        raise TypeError(f"{wrong}: give a GraphModule, an fx.Graph, or an ExportedProgram")
    elif names is None and not is_foreign(graph):
        return graph

    roots = _roots(graph)
    if isinstance(names, fx.GraphModule):
        roots |= _roots(names)
    # Parameters of two models in two variables may have one FQN without the variable.
    keeps_roots = len(roots) > 1
    copied = _Adoption(graph, _given(graph, names, keeps_roots), keeps_roots).run()
    if isinstance(names, nn.Module):
        _name_gradients(copied.graph.output_node(), names)
    return copied


def _name_gradients(output: fx.Node, model: nn.Module) -> None:
    """Name the last results after the trained parameters, if each can be the gradient of one.

    A parameter may have no gradient; that one is None among the results.
    """
    trained = {fqn: tensor for fqn, tensor in model.named_parameters() if tensor.requires_grad}
    results = output.args[0] if isinstance(output.args[0], list | tuple) else ()
    first = len(results) - len(trained)
    if "gt_outputs" in output.meta or first < 0:
        return
    count = 0
    for result, parameter in zip(results[first:], trained.values(), strict=True):
        if result is None:
            continue
        if not isinstance(result, fx.Node) or direction(result) != BACKWARD:
            return
        if getattr(value_of(result), "shape", None) not in _shapes_of(parameter):
            return
        count += 1

    if count:
        outputs = [f"output_{place}" for place in range(first)]
        output.meta["gt_outputs"] = (*outputs, *trained)
        output.meta["gt_parameters"] = tuple(trained)


def _shapes_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.Size]:
    """Return the shape of the whole tensor, and that of this rank's shard."""
    return tensor.shape, getattr(tensor, "to_local", lambda: tensor)().shape


def _adopted_program(program: ExportedProgram) -> fx.GraphModule:
    """Return the graph of an exported program, its inputs and results named by its signature.

    A program with a loss has its backward after it; those nodes get the mark of the backward.
    """
    signature = program.graph_signature
    kinds = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "buffer"}
    given = {}
    # A number in the code, ``torch.tensor([1.0])``, is an input of the graph; no caller gives it.
    constants = {}
    for spec in signature.input_specs:
        name, kind = spec.arg.name, spec.kind.name
        given[name] = GivenName(kinds.get(kind, "input"), spec.target or name)
        if kind == "CONSTANT_TENSOR" and program.constants.get(spec.target) is not None:
            constants[name] = program.constants[spec.target]

    copied = _Adoption(program.graph_module, given).run()
    for node in copied.graph.find_nodes(op="placeholder"):
        if node.name in constants:
            node.meta["gt_constant"] = constants[node.name]

    results = []
    trained = []
    for spec in signature.output_specs:
        results.append((spec.kind.name, spec.target))
        if spec.kind.name == "GRADIENT_TO_PARAMETER":
            trained.append(spec.target)
    output = copied.graph.output_node()
    output.meta |= {"gt_outputs": _result_names(results), "gt_parameters": tuple(trained)}
    output.meta["gt_structure"] = program.call_spec.out_spec

    loss = output
    kept = []  # results of the forward
    for result, (kind, _) in zip(output.args[0], results, strict=True):
        if kind == "LOSS_OUTPUT":
            loss = result
        if isinstance(result, fx.Node) and "GRADIENT" not in kind:
            kept.append(result)

    # What updates a buffer may stand after the loss; it is part of the forward.
    forward = walk(kept, lambda node: node.all_input_nodes)
    nodes = list(copied.graph.nodes)
    for node in nodes[nodes.index(loss) + 1 : -1]:
        if node not in forward:
            node.meta["autograd_backward"] = True
    return copied


def _result_names(results: Sequence[tuple[str, str | None]]) -> tuple[str, ...]:
    """Return names of a program's results, by kind and target, as AOTAutograd names them."""
    words = {"USER_OUTPUT": "output", "TOKEN": "token"}
    names = []
    for place, (kind, target) in enumerate(results):
        if kind == "LOSS_OUTPUT":
            names.append("loss")
        elif kind in words:
            names.append(f"{words[kind]}_{results[:place].count(results[place])}")
        elif kind.startswith("GRADIENT"):
            names.append(str(target))
        else:
            names.append(f"updated.{target}")
    return tuple(names)


def _roots(gm: fx.GraphModule) -> set[str]:
    """Return the variables that hold the models of a graph."""
    roots = set()
    for node in gm.graph.nodes:
        path = source_of(node) if node.op == "placeholder" else stack_path(node)
        if path is None:
            continue
        # The source of another input names a variable, too, but no model.
        if node.op != "placeholder" or "._parameters[" in path or "._buffers[" in path:
            roots.add(path_of(path)[0])
    return roots - {""}


def is_foreign(gm: fx.GraphModule) -> bool:
    """Return whether another tracer left names or values in a graph that has none of ours."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if "gt_input" in node.meta:  # our tracer's, or a parser's
                return False
            if source_of(node) is not None or "desc" in node.meta:
                return True
        elif path_of(stack_path(node))[0]:
            return True
        if "example_value" in node.meta:
            return True
    return False


def _given(gm: fx.GraphModule, names: Names | None, keeps_roots: bool) -> _Given:
    """Return the names of inputs that the argument ``names`` of ``adopt`` stands for."""
    if names is None:
        return {}
    if isinstance(names, fx.GraphModule):
        return inputs_of(names, keeps_roots)
    placeholders = gm.graph.find_nodes(op="placeholder")
    if isinstance(names, Mapping):
        known = {str(node.target) for node in placeholders}
        for name in names:
            if name not in known:
                raise ValueError(
                    f"names has {name!r}, which is no input of the graph; "
                    f"these are {', '.join(sorted(known))}"
                )
        return {name: GivenName("input", fqn) for name, fqn in names.items()}

    # Tracers lift the parameters first, then the buffers, each in the model's order.
    state = [(GivenName("parameter", fqn), tensor) for fqn, tensor in names.named_parameters()]
    state += [(GivenName("buffer", fqn), tensor) for fqn, tensor in names.named_buffers()]
    if len(state) > len(placeholders):
        raise ValueError(
            f"the model has {len(state)} parameters and buffers, the graph {len(placeholders)} "
            "inputs: give a mapping"
        )

    given = {}
    for (name, tensor), node in zip(state, placeholders, strict=False):
        shape = getattr(value_of(node), "shape", None)
        if shape not in (None, *_shapes_of(tensor)):
            raise ValueError(
                f"input {node.target} has shape {list(shape)}, {name.fqn} of the model "
                f"{list(tensor.shape)}: the inputs do not begin with the model's parameters and "
                "buffers; give a mapping"
            )
        given[str(node.target)] = name

    for place, node in enumerate(placeholders[len(state) :]):
        given[str(node.target)] = GivenName("input", str(place))
    return given


def inputs_of(dynamo: fx.GraphModule, keeps_roots: bool) -> list[GivenName]:
    """Return the inputs of a Dynamo graph, in the order that AOTAutograd's descriptors count."""
    found = []
    for node in dynamo.graph.find_nodes(op="placeholder"):
        source = source_of(node)
        if "gt_input" in node.meta:
            found.append(GivenName(**node.meta["gt_input"]))
        elif source:
            found.append(named_source(source, value_of(node), keeps_roots))
        else:
            found.append(GivenName("input", str(node.target)))
    return found


class _Adoption:
    """Copies one graph, or a graph inside a graph, with our metadata.

    Args:
        given: names of inputs by placeholder, or of Dynamo's inputs in their order.
        keeps_roots: FQNs begin with the variable that holds the model.
        is_backward: all nodes belong to the backward.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        given: _Given,
        keeps_roots: bool = False,
        is_backward: bool = False,
    ) -> None:
        self.gm, self.keeps_roots, self.is_backward = gm, keeps_roots, is_backward
        self.given = given if isinstance(given, Mapping) else {}
        self.dynamo = [] if isinstance(given, Mapping) else list(given)
        self.behind_tangents: set[fx.Node] = set()

    def run(self) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in sorted_nodes(self.gm.graph.nodes):
            copied = copies[node] = graph.node_copy(node, copies.__getitem__)
            copied.meta = dict(node.meta)
            self._mark(node, copied)

        _name_by_use(graph)
        made = fx.GraphModule(self.gm, graph)
        for name, body in self._bodies(graph).items():
            home, _, last = name.rpartition(".")
            setattr(made.get_submodule(home), last, body)
        made.meta = dict(self.gm.meta)
        output = made.graph.output_node()
        self._name_outputs(output)
        structure = result_structure(self.gm.graph)
        if structure is not None and "gt_outputs" not in output.meta:
            output.meta["gt_structure"] = structure
        return made

    def _bodies(self, graph: fx.Graph) -> dict[str, fx.GraphModule]:
        """Return copies of the graphs inside the graph, by attribute.

        Their inputs are named as what every call of them gives.
        """
        calls: dict[str, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        for call in graph.nodes:
            for holder in filter(self._is_graph, call.all_input_nodes):
                calls[str(holder.target)].append((holder, call))
        made = {}
        for name, users in calls.items():
            body = held(self.gm, name)
            is_backward = all(direction(call) == BACKWARD for _, call in users)
            given = _agreed([self._given_to(body, holder, call) for holder, call in users])
            made[name] = _Adoption(body, given, self.keeps_roots, is_backward).run()
        return made

    def _given_to(
        self, body: fx.GraphModule, holder: fx.Node, call: fx.Node
    ) -> dict[str, GivenName]:
        """Return what a call gives to the inputs of a graph, by placeholder.

        Args:
            holder: the operand of ``call`` that holds ``body``.
        """
        inputs = [str(node.target) for node in body.graph.find_nodes(op="placeholder")]
        name, given = short_name(call), leaves_of(call.args)
        # Inputs that the operator makes itself; they come first.
        own: list[GivenName | None] = []
        if name in _CARRYING:
            groups = [argument for argument in call.args if isinstance(argument, list | tuple)]
            roles = _CARRYING[name]
            for role, carried in zip(roles, groups, strict=False):
                for number in range(len(carried)):
                    own.append(GivenName("input", f"{name}.{role}.{number}"))
            given = leaves_of(groups[len(roles) :])
        elif name.startswith("flex_attention") and len(call.args) > 1:
            # The call has the buffers of the score function, then those of the mask function.
            is_mask = any(isinstance(each, tuple) and holder in each for each in call.args)
            given = leaves_of(call.args[-1 if is_mask else -2])
            own += [GivenName("input", name) for name in _OF_A_SCORE[is_mask:]]
            if len(inputs) - len(own) - len(given) == 1:
                own.append(GivenName("input", "gradient"))
        else:
            # The operands follow the last graph; the name of a subgraph stands among them.
            first = 0
            for place, operand in enumerate(given):
                if self._is_graph(operand):
                    first = place + 1
            given = [operand for operand in given[first:] if not isinstance(operand, str)]

        names = [*own, *map(_operand_name, given)]
        if len(names) != len(inputs):
            return {}
        return {place: name for place, name in zip(inputs, names, strict=True) if name is not None}

    def _is_graph(self, operand: Any) -> bool:
        is_held = isinstance(operand, fx.Node) and operand.op == "get_attr"
        return is_held and isinstance(held(self.gm, str(operand.target)), fx.GraphModule)

    def _mark(self, node: fx.Node, copied: fx.Node) -> None:
        """Write our metadata on the copy of a node."""
        meta = copied.meta
        # Dynamo calls collectives and custom operators by their packet.
        if isinstance(node.target, OpOverloadPacket) and len(node.target.overloads()) == 1:
            copied.target = getattr(node.target, node.target.overloads()[0])
        if "val" not in meta and "example_value" in meta:
            meta["val"] = meta["example_value"]
        custom = meta.get("custom") or {}
        path = stack_path(node)
        if path and "module_fqn" not in custom:
            root, steps = path_of(path)
            if self.keeps_roots and root:
                steps = (root, *steps)
            if steps:
                meta["custom"] = {**custom, "module_fqn": join_path(steps)}
            for stack in ("nn_module_stack", "fwd_nn_module_stack"):
                meta.pop(stack, None)

        if node.op == "placeholder":
            self._name_input(node, copied)
        elif self.is_backward or not self.behind_tangents.isdisjoint(node.all_input_nodes):
            # The backward of an autograd.Function has no mark of autograd.
            self.behind_tangents.add(node)
            meta["autograd_backward"] = True
        elif is_view(node.target) and BACKWARD in map(direction, copied.all_input_nodes):
            # What takes the local tensors of gradients has none, either.
            meta["autograd_backward"] = True

    def _name_input(self, node: fx.Node, copied: fx.Node) -> None:
        described = described_input(node)
        if described is not None and described.is_tangent:
            self.behind_tangents.add(node)
        if "gt_input" in node.meta:
            return
        name = self.given.get(str(node.target))
        source = source_of(node)
        if name is None and described is not None:
            name = self._name_of(described)
        elif name is None and source is not None:
            name = named_source(source, value_of(node), self.keeps_roots)
            copied.meta["gt_held"] = name.kind != "parameter" and _is_held(source)
        elif name is None and node.meta.get("original_aten") is not None:
            name = GivenName("input", _saved_name(copied))

        if name is not None:
            copied.meta["gt_input"] = name._asdict()

    def _name_of(self, described: Input) -> GivenName | None:
        """Return the name of an input that AOTAutograd describes, by Dynamo's names."""
        if described.fqn is not None:
            return GivenName(described.kind, described.fqn)
        if described.index is None or described.index >= len(self.dynamo):
            return None
        name = self.dynamo[described.index]
        return name._replace(fqn=f"{name.fqn}{described.suffix}")

    def _name_outputs(self, output: fx.Node) -> None:
        """Name the results, if AOTAutograd describes every one."""
        descriptors, results = output.meta.get("desc"), output.args[0]
        are_lists = isinstance(descriptors, list | tuple) and isinstance(results, list | tuple)
        if "gt_outputs" in output.meta or not are_lists:
            return
        names, parameters = list[str](), list[str]()
        place = 0  # among Dynamo's inputs, whose order gradients have
        for descriptor, result in zip(descriptors, results, strict=False):
            if descriptor is None and result is None and place < len(self.dynamo):
                names.append(self.dynamo[place].fqn)  # an input without a gradient
                place += 1
                continue
            described = described_output(descriptor)
            if described is None:
                return
            kind, source = described.kind, described.of
            name = None
            if source is not None:
                name = self._name_of(source)
            if kind == "kept" and isinstance(result, fx.Node):
                names.append(_saved_name(result))
            elif source is not None and name is not None:
                fqn = f"{name.fqn}{described.suffix}"
                if kind == "gradient":
                    place = (source.index or 0) + 1
                else:
                    fqn = f"updated.{fqn}"
                names.append(fqn)
                if name.kind == "parameter":
                    parameters.append(name.fqn)
            elif kind == "output":
                names.append(f"output_{described.place}{described.suffix}")
            else:
                return

        if len(names) == len(results):
            output.meta["gt_outputs"] = tuple(names)
            output.meta["gt_parameters"] = tuple(parameters)


def _saved_name(node: fx.Node) -> str:
    """Return the name of a value that the forward keeps, the same in both graphs.

    It is that of the input that the value is, or of its operator.
    """
    fqn = _name_of_input(node) or _name_of_value(node)
    # What the backward takes may have that name already.
    return f"kept.{fqn.removeprefix('kept.')}"


def _name_of_input(node: fx.Node) -> str:
    """Return the name of an input; "" for any other node, or if none is known."""
    known = node.meta.get("gt_input") or {"fqn": node.meta.get("gt_argument", "")}
    return str(known["fqn"])


def _name_of_value(node: fx.Node) -> str:
    """Return the module and the operator of a computed value, as the tracer saw it."""
    while node.target is getitem and node.meta.get("original_aten") is None:
        node = node.all_input_nodes[0]
    operator = getattr(node.meta.get("original_aten"), "__name__", None) or short_name(node)
    return ".".join(filter(None, (node_fqn(node), operator.split(".")[0])))


def _name_by_use(graph: fx.Graph) -> None:
    """Name each input without a name by its first use after views: ``layers.0.up.addmm_mat2``."""
    inputs = graph.find_nodes(op="placeholder")
    if not any("desc" in node.meta for node in inputs):
        return
    order = places_of(graph.nodes)
    by_first_user: dict[fx.Node | None, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for node in inputs:
        if _name_of_input(node):
            continue
        value = node
        user = min(node.users, key=order.__getitem__, default=None)
        while user is not None and user.users and value in user.args[:1]:
            if not is_view(user.target) and user.target is not torch.ops.aten._to_copy.default:
                break
            value, user = user, min(user.users, key=order.__getitem__)
        by_first_user[user].append((value, node))

    # Equal names are numbered in the order of their uses, which does not depend on the order in
    # which a partitioner lists what it saves.
    seen: Counter[str] = Counter()
    for user in sorted(by_first_user, key=lambda user: order.get(user, len(order))):
        places = places_of(user.all_input_nodes if user is not None else ())
        for value, node in sorted(by_first_user[user], key=lambda pair: places.get(pair[0], 0)):
            name = _use(value, user)
            seen[name] += 1
            if seen[name] == 1:
                node.meta["gt_argument"] = name
            else:
                node.meta["gt_argument"] = f"{name}_{seen[name] - 1}"


def _use(value: fx.Node, user: fx.Node | None) -> str:
    """Return the argument that a value is, in its module: ``layers.0.up.addmm_mat2``."""
    if user is None:
        return "unused"
    if user.op == "output":
        return "result"
    given: list[tuple[Any, Any]] = [*enumerate(user.args), *user.kwargs.items()]
    if isinstance(user.target, OpOverload):
        given = [(argument.name, operand) for argument, operand in arguments_given(user)]
    name = next(
        name for name, operand in given if any(each is value for each in leaves_of(operand))
    )
    return ".".join(filter(None, (node_fqn(user), f"{short_name(user)}_{name}")))


# Inputs of flex attention's functions; that of a mask has no score.
_OF_A_SCORE = ("score", "b", "h", "q_idx", "kv_idx")
_CARRYING = {"while_loop": ("carried",), "scan": ("carried", "each"), "map_impl": ("each",)}
"""The groups of operands that a loop gives to its graph, another value each time.

The operands after them stay the same.
"""


def _operand_name(operand: Any) -> GivenName | None:
    """Return the name of what a call gives to a graph; None if it has none."""
    if not isinstance(operand, fx.Node) or operand.op == "get_attr":
        return None
    if "gt_input" in operand.meta and "gt_argument" not in operand.meta:
        return GivenName(**operand.meta["gt_input"])
    if operand.op == "placeholder" or "gt_argument" in operand.meta:
        return None
    return GivenName("input", _name_of_value(operand))


def _agreed(calls: Sequence[Mapping[str, GivenName]]) -> dict[str, GivenName]:
    """Return what all calls of a graph say of its inputs.

    Layers that share a graph agree in the end that their FQNs have in common.
    """
    agreed = {}
    for name in set(calls[0]).intersection(*calls):
        kinds = {call[name].kind for call in calls}
        if len(kinds) > 1:
            continue
        paths = [split_path(call[name].fqn)[::-1] for call in calls]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.insert(0, parts[0])
        if common:
            agreed[name] = GivenName(kinds.pop(), ".".join(common))

    return agreed


def sorted_nodes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return nodes after their operands, else in the graph's order.

    Inductor's passes may leave a graph unsorted.
    """
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
