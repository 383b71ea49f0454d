"""Copy graphs of other tracers, with the metadata that ``graph.nodes`` names.

Each tracer says in its own way what an input is. Dynamo gives it a *source*,
``L['self']._modules['up']._parameters['weight']``, and gives modules stacks whose paths begin with
one. AOTAutograd and Inductor leave *descriptors* in ``meta["desc"]``, which count Dynamo's inputs.
``torch.export`` has a signature beside the graph.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile, zip_longest
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
from pytest_gtrainer._torch.values import OpOverload, OpOverloadPacket, schema
from pytest_gtrainer.graph import joined, parts_of
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    direction,
    held,
    is_view,
    leaves_of,
    node_fqn,
    short_name,
    walked,
)


class WithGraph(Protocol):  # a recorded pass, a traced step
    @property
    def gm(self) -> fx.GraphModule: ...


AnyGraph: TypeAlias = fx.GraphModule | fx.Graph | ExportedProgram | WithGraph
Names: TypeAlias = nn.Module | Mapping[str, str] | fx.GraphModule
"""Names for the inputs of a graph: the model, FQNs by the name of the placeholder, or Dynamo's
graph of the model.
"""


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
        return GivenName(kind, joined([root, *steps]))
    return GivenName(kind, joined(steps))


def adopted(graph: AnyGraph, names: Names | None = None) -> fx.GraphModule:
    """Return a graph of ours as it is, and a copy of any other one with our metadata.

    Args:
        names: what the inputs are where the graph does not say it. Of a model the parameters come
            first, then the buffers.

    Raises:
        TypeError: ``graph`` is no graph.
        ValueError: the graph has a cycle, or ``names`` do not fit its inputs.
    """
    graph = graph if isinstance(graph, fx.GraphModule) else getattr(graph, "gm", graph)
    if isinstance(graph, ExportedProgram):
        return _adopted_program(graph)
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
        if getattr(_value_of(result), "shape", None) not in _shapes_of(parameter):
            return
        count += 1
    if count:
        names = (*(f"output_{place}" for place in range(first)), *trained)
        output.meta |= {"gt_outputs": names, "gt_parameters": tuple(trained)}


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
    for spec in signature.input_specs:
        name = spec.arg.name
        given[name] = GivenName(kinds.get(spec.kind.name, "input"), spec.target or name)
    copied = _Adoption(program.graph_module, given).run()
    # A number in the code, ``torch.tensor([1.0])``, is an input of the graph; no caller gives it.
    constants = {
        spec.arg.name: program.constants.get(spec.target)
        for spec in signature.input_specs
        if spec.kind.name == "CONSTANT_TENSOR"
    }
    for node in copied.graph.find_nodes(op="placeholder"):
        if constants.get(node.name) is not None:
            node.meta["gt_constant"] = constants[node.name]

    results = [(spec.kind.name, spec.target) for spec in signature.output_specs]
    trained = tuple(target for kind, target in results if kind == "GRADIENT_TO_PARAMETER")
    output = copied.graph.output_node()
    output.meta |= {"gt_outputs": _result_names(results), "gt_parameters": trained}
    output.meta["gt_structure"] = program.call_spec.out_spec

    loss = output
    kept = []  # results of the forward
    for result, (kind, _) in zip(output.args[0], results, strict=True):
        if kind == "LOSS_OUTPUT":
            loss = result
        if isinstance(result, fx.Node) and "GRADIENT" not in kind:
            kept.append(result)
    forward = walked(kept, lambda node: node.all_input_nodes)
    nodes = list(copied.graph.nodes)
    for node in nodes[nodes.index(loss) + 1 : -1]:
        if node not in forward:
            node.meta["autograd_backward"] = True
    return copied


def _result_names(results: Sequence[tuple[str, str | None]]) -> tuple[str, ...]:
    """Return names of a program's results, by kind and target, as AOTAutograd names them."""
    names = []
    for place, (kind, target) in enumerate(results):
        if kind == "LOSS_OUTPUT":
            names.append("loss")
        elif kind in ("USER_OUTPUT", "TOKEN"):
            word = "output" if kind == "USER_OUTPUT" else "token"
            names.append(f"{word}_{results[:place].count(results[place])}")
        elif kind.startswith("GRADIENT"):
            names.append(str(target))
        else:
            names.append(f"updated.{target}")
    return tuple(names)


def _roots(gm: fx.GraphModule) -> set[str]:
    """Return the variables that hold the models of a graph."""
    roots = set()
    for node in gm.graph.nodes:
        path = source_of(node) if node.op == "placeholder" else _stack_path(node)
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
        elif path_of(_stack_path(node))[0]:
            return True
        if "example_value" in node.meta:
            return True
    return False


def _stack_path(node: fx.Node) -> str:
    """Return the path of the innermost module that the node was traced in; "" if none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _given(gm: fx.GraphModule, names: Names | None, keeps_roots: bool) -> _Given:
    """Return the names of inputs that the argument ``names`` of ``adopted`` stands for."""
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

    state = [(GivenName("parameter", fqn), tensor) for fqn, tensor in names.named_parameters()]
    state += [(GivenName("buffer", fqn), tensor) for fqn, tensor in names.named_buffers()]
    if len(state) > len(placeholders):
        raise ValueError(
            f"the model has {len(state)} parameters and buffers, the graph {len(placeholders)} "
            "inputs: give a mapping"
        )
    given = {}
    for (name, tensor), node in zip(state, placeholders, strict=False):
        shape = getattr(_value_of(node), "shape", None)
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
    """Return the inputs of a graph of Dynamo, in the order that descriptors of AOTAutograd count."""
    found = []
    for node in dynamo.graph.find_nodes(op="placeholder"):
        source = source_of(node)
        if "gt_input" in node.meta:
            found.append(GivenName(**node.meta["gt_input"]))
        elif source:
            found.append(named_source(source, _value_of(node), keeps_roots))
        else:
            found.append(GivenName("input", str(node.target)))
    return found


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


class _Adoption:
    """One graph, or a body of it."""

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
        known: dict[fx.Node, fx.Node] = {}
        for node in sorted_nodes(self.gm.graph.nodes):
            copied = known[node] = graph.node_copy(node, known.__getitem__)
            copied.meta = dict(node.meta)
            self._mark(node, copied)
        _name_by_use(graph)
        bodies = self._bodies(graph)
        made = fx.GraphModule(self.gm, graph)
        for name, body in bodies.items():
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
        """Graphs inside the graph by their attribute, their inputs named as what every call of them
        gives.
        """
        calls: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
        for call in graph.nodes:
            for holder in filter(self._is_graph, call.all_input_nodes):
                calls.setdefault(str(holder.target), []).append((holder, call))
        made = {}
        for name, users in calls.items():
            body, is_backward = (
                held(self.gm, name),
                all(direction(call) == BACKWARD for _, call in users),
            )
            given = _agreed([self._given_to(body, *user) for user in users])
            made[name] = _Adoption(body, given, self.keeps_roots, is_backward).run()
        return made

    def _given_to(
        self, body: fx.GraphModule, holder: fx.Node, call: fx.Node
    ) -> dict[str, GivenName]:
        """Return what a call of a graph gives to its inputs: what stands behind the graphs that the
        call names.
        """
        inputs = [str(node.target) for node in body.graph.find_nodes(op="placeholder")]
        name, given = short_name(call), leaves_of(call.args)
        own: list[GivenName] = []
        if name in _CARRYING:
            groups = [argument for argument in call.args if isinstance(argument, list | tuple)]
            for role in _CARRYING[name]:
                own += [GivenName("input", f"{name}.{role}.{n}") for n in range(len(groups.pop(0)))]
            given = leaves_of(groups)
        elif name.startswith("flex_attention") and len(call.args) > 1:
            scores, masks = (leaves_of(buffers) for buffers in call.args[-2:])
            is_mask = any(
                isinstance(argument, tuple) and holder in argument for argument in call.args
            )
            given = masks if is_mask else scores
            own = [GivenName("input", name) for name in _OF_A_SCORE[is_mask:]]
            own += [GivenName("input", "gradient")] * (len(inputs) - len(own) - len(given) == 1)
        else:
            last = max(
                (place for place, one in enumerate(given) if self._is_graph(one)), default=-1
            )
            given = [one for one in given[last + 1 :] if not isinstance(one, str)]
        names = [*own, *map(_operand_name, given)]
        pairs = zip(inputs, names, strict=True) if len(names) == len(inputs) else ()
        return {name: told for name, told in pairs if told is not None}

    def _is_graph(self, operand: Any) -> bool:
        is_held = isinstance(operand, fx.Node) and operand.op == "get_attr"
        return is_held and isinstance(held(self.gm, str(operand.target)), fx.GraphModule)

    def _mark(self, node: fx.Node, copied: fx.Node) -> None:
        meta = copied.meta
        if (
            isinstance(node.target, OpOverloadPacket)
            and len(overloads := node.target.overloads()) == 1
        ):
            copied.target = getattr(
                node.target, overloads[0]
            )  # as Dynamo calls collectives and custom operators
        if "val" not in meta and "example_value" in meta:
            meta["val"] = meta["example_value"]
        custom = meta.get("custom") or {}
        if "module_fqn" not in custom and (path := _stack_path(node)):
            root, steps = path_of(path)
            if steps := (root, *steps) if self.keeps_roots and root else steps:
                meta["custom"] = {**custom, "module_fqn": joined(steps)}
            for stack in ("nn_module_stack", "fwd_nn_module_stack"):
                meta.pop(stack, None)
        if node.op == "placeholder":
            self._name_input(node, copied)
        elif self.is_backward or any(
            source in self.behind_tangents for source in node.all_input_nodes
        ):
            self.behind_tangents.add(node)
            meta["autograd_backward"] = True  # an autograd.Function's backward has no mark
        elif is_view(node.target) and any(
            direction(source) == BACKWARD for source in copied.all_input_nodes
        ):
            meta["autograd_backward"] = True  # nor what takes local tensors of gradients

    def _name_input(self, node: fx.Node, copied: fx.Node) -> None:
        if (described := described_input(node)) is not None and described.is_tangent:
            self.behind_tangents.add(node)
        if "gt_input" in node.meta:
            return
        if (name := self.given.get(str(node.target))) is None:
            if described is not None:
                name = self._name_of(described)
            elif (source := source_of(node)) is not None:
                name = named_source(source, _value_of(node), self.keeps_roots)
            elif node.meta.get("original_aten") is not None:
                name = GivenName("input", _saved_name(copied))
        if name is not None:
            copied.meta["gt_input"] = name._asdict()

    def _name_of(self, described: Input) -> GivenName | None:
        if described.fqn is not None:
            return GivenName(described.kind, described.fqn)
        if described.index is None or described.index >= len(self.dynamo):
            return None
        name = self.dynamo[described.index]
        return name._replace(fqn=f"{name.fqn}{described.suffix}") if described.suffix else name

    def _name_outputs(self, output: fx.Node) -> None:
        """Names of results, if descriptors tell every one."""
        descriptors = output.meta.get("desc")
        leaves = output.args[0]
        if "gt_outputs" in output.meta or not all(
            isinstance(each, list | tuple) for each in (descriptors, leaves)
        ):
            return
        told, parameters = list[str](), list[str]()
        place = 0  # gradients are in the order of the inputs
        for descriptor, leaf in zip(descriptors, leaves, strict=False):
            if descriptor is None and leaf is None and place < len(self.dynamo):
                told.append(self.dynamo[place].fqn)
                place += 1
                continue
            if (described := described_output(descriptor)) is None:
                return
            kind, of = described.kind, described.of
            if kind == "kept" and isinstance(leaf, fx.Node):
                told.append(_saved_name(leaf))
            elif of is not None and (name := self._name_of(of)) is not None:
                told.append(
                    f"{'' if kind == 'gradient' else 'updated.'}{name.fqn}{described.suffix}"
                )
                place = (of.index or 0) + 1 if kind == "gradient" else place
                parameters += [name.fqn] if name.kind == "parameter" else []
            elif kind == "output":
                told.append(f"output_{described.place}{described.suffix}")
            else:
                return
        if len(told) == len(leaves):
            output.meta["gt_outputs"], output.meta["gt_parameters"] = tuple(told), tuple(parameters)


def _saved_name(node: fx.Node) -> str:
    """The name of a value that the forward keeps, the same in both graphs: of the input that it is,
    or its operator.
    """
    fqn = _told_name(node) or _value_name(node)
    return fqn if fqn.startswith("kept.") else f"kept.{fqn}"


def _told_name(node: fx.Node) -> str:
    """Return what an input is called, and "" for what is none."""
    told = node.meta.get("gt_input")
    return str(told["fqn"]) if told is not None else str(node.meta.get("gt_argument", ""))


def _value_name(node: fx.Node) -> str:
    """A computed value by its module and operator, as the tracer saw it."""
    while node.target is getitem and node.meta.get("original_aten") is None:
        node = node.all_input_nodes[0]
    operator = getattr(node.meta.get("original_aten"), "__name__", None) or short_name(node)
    return ".".join(filter(None, (node_fqn(node), operator.split(".")[0])))


def _name_by_use(graph: fx.Graph) -> None:
    """Name inputs of which nobody says what they are by their first use behind views:
    ``layers.0.up.addmm_mat2``.
    """
    inputs = graph.find_nodes(op="placeholder")
    if not any("desc" in node.meta for node in inputs):
        return
    place = {node: place for place, node in enumerate(graph.nodes)}
    first: dict[fx.Node | None, list[tuple[fx.Node, fx.Node]]] = {}
    for node in (each for each in inputs if not _told_name(each)):
        value, user = node, min(node.users, key=place.__getitem__, default=None)
        while (
            user
            and user.users
            and value in user.args[:1]
            and (is_view(user.target) or user.target is torch.ops.aten._to_copy.default)
        ):
            value, user = user, min(user.users, key=place.__getitem__)
        first.setdefault(user, []).append((value, node))
    seen: Counter[str] = Counter()
    for user in sorted(first, key=lambda user: len(place) if user is None else place[user]):
        order = {value: at for at, value in enumerate(user.all_input_nodes if user else ())}
        for value, node in sorted(first[user], key=lambda pair: order.get(pair[0], 0)):
            name = _use(value, user)
            seen[name] += 1
            node.meta["gt_argument"] = f"{name}_{seen[name] - 1}" if seen[name] > 1 else name


def _use(value: fx.Node, user: fx.Node | None) -> str:
    """``layers.0.up.addmm_mat2``: the argument of an operator, in its module."""
    if user is None or user.op == "output":
        return "result" if user else "unused"
    names = (
        [argument.name for argument in schema(user.target).arguments]
        if isinstance(user.target, OpOverload)
        else []
    )
    given = [*zip_longest(names[: len(user.args)], user.args), *user.kwargs.items()]
    at = next(
        name or at
        for at, (name, each) in enumerate(given)
        if any(leaf is value for leaf in leaves_of(each))
    )
    return ".".join(filter(None, (node_fqn(user), f"{short_name(user)}_{at}")))


_OF_A_SCORE = (
    "score",
    "b",
    "h",
    "q_idx",
    "kv_idx",
)  # inputs of flex attention's functions; a mask has no score
_CARRYING = {"while_loop": ("carried",), "scan": ("carried", "each"), "map_impl": ("each",)}
"""What loops give to their graphs, another value each time; behind it they give what stays."""


def _operand_name(operand: Any) -> GivenName | None:
    if (
        not isinstance(operand, fx.Node)
        or "gt_argument" in operand.meta
        or operand.op == "get_attr"
    ):
        return None
    if (told := operand.meta.get("gt_input")) is not None:
        return GivenName(**told)
    return None if operand.op == "placeholder" else GivenName("input", _value_name(operand))


def _agreed(calls: Sequence[Mapping[str, GivenName]]) -> dict[str, GivenName]:
    """Return what all calls of a graph say of its inputs; of layers that share one, the end that
    their FQNs have in common.
    """
    agreed = {}
    for name in set(calls[0]).intersection(*calls):
        kinds, fqns = zip(*(call[name] for call in calls), strict=True)
        ends = zip(*(parts_of(fqn)[::-1] for fqn in fqns), strict=False)
        common = [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, ends)]
        if common and len({*kinds}) == 1:
            agreed[name] = GivenName(kinds[0], ".".join(common[::-1]))
    return agreed


def sorted_nodes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes behind their operands, else in the graph's order: Inductor's passes may leave a graph
    unsorted.
    """
    ordered: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        for node in waiting:
            if all(source in ordered for source in node.all_input_nodes):
                ordered[node] = None
        if len(late := [node for node in waiting if node not in ordered]) == len(waiting):
            raise ValueError(f"the graph has a cycle, in which {late[0].name} is")
        waiting = late
    return list(ordered)
