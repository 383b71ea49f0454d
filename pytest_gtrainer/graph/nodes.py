"""Read nodes of a graph: where a node belongs, and what it does besides computing its value.

Graph trainers write these keys into ``node.meta``:

- ``custom["module_fqn"]``, else ``nn_module_stack``: the node's module.
- ``autograd_backward``: True on nodes of the backward. Nothing else decides a node's direction.
- ``custom["gt_part"]``: "reduce" on what reduces a parameter's gradient in a pipeline stage.
- ``custom`` with the ``KEYS`` of chunked regions.

On the output node:

- ``gt_gathers_once``: True if a parameter is gathered once however often it is read.
- ``gt_dynamic_dims``: by name a dynamic dimension's symbol and its extent in the example.
- ``gt_stage_outputs``: the number of a stage's outputs, and that of gradients of its inputs.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer._torch.passes import WAITS
from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, schema

FORWARD, BACKWARD = "fwd", "bwd"
AFTERWARDS = " afterwards"
"""Ends the names of what a graph leaves: ``layers.0.weight afterwards``, ``random state of
torch.cpu afterwards``.
"""

GATHERS_ONCE = "gt_gathers_once"
DYNAMIC_DIMS = "gt_dynamic_dims"
STAGE_OUTPUTS = "gt_stage_outputs"
PART, REDUCE = "gt_part", "reduce"
HANDED_ON = "gt_handed_on"

CHUNK_ID, REGION_FQN = "chunk_id", "chunked_region_fqn"
ROLE, PRODUCER = "chunked_region_role", "chunked_region_producer"
KEYS = (CHUNK_ID, REGION_FQN, ROLE, PRODUCER)
SPLIT_BOUNDARY, BODY, MATERIALIZATION = "split_boundary", "body", "materialization"
EAGER, GRAPH = "eager", "graph"

COMMUNICATING = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d",
    "c10d_functional",
    "symm_mem",
    "_dtensor",
)
_OF_TORCHS_BUCKET = "bucketing_custom_sources"
"""Key of ``meta`` that ``torch._inductor.fx_passes.bucketing`` sets on every node that it makes."""
_DRAWING = ("run_and_save_rng_state", "run_with_rng_state")
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name[0] == "i" and hasattr(operator, f"__{name[1:]}__")
)
"""``operator.iadd`` and its family."""
_WRITING = {setattr, delattr, operator.setitem, operator.delitem, *_IN_PLACE}
"""Python's operators that write to their first operand, as graphs of Dynamo have them."""


def direction(node: fx.Node) -> str:
    """Return "bwd" for nodes the backward made, else "fwd".

    Nodes of torch's bucketing have no mark; their direction is that of what the bucket serves.
    """
    if node.meta.get("autograd_backward"):
        return BACKWARD
    if _OF_TORCHS_BUCKET in node.meta:
        return _direction_of_bucket(node)
    return FORWARD


def _direction_of_bucket(node: fx.Node) -> str:
    """Return the direction of the nodes that use torch's bucket, else of those that go into it."""
    for neighbours in (operator.attrgetter("users"), operator.attrgetter("all_input_nodes")):
        bucket = walk([node], neighbours, lambda one: _OF_TORCHS_BUCKET in one.meta)
        directions = set()
        for member in bucket:
            for other in neighbours(member):
                if other not in bucket and other.op not in ("placeholder", "output", "get_attr"):
                    directions.add(direction(other))
        # A bucket that serves both directions is launched in the forward.
        if directions:
            return BACKWARD if directions == {BACKWARD} else FORWARD
    return FORWARD


def node_fqn(node: fx.Node) -> str:
    """Return the FQN of the module that a node belongs to; "" if none is known.

    ``custom`` decides, else the innermost module of ``nn_module_stack``.
    """
    fqn = (node.meta.get("custom") or {}).get("module_fqn")
    return str(fqn or stack_path(node))


def stack_path(node: fx.Node) -> str:
    """Return the path of the innermost module that a node was traced in; "" if none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return str(list(stack.values())[-1][0])


def is_parameter(placeholder: fx.Node) -> bool:
    """Return whether an input is a parameter, or nobody says what it is."""
    return bool(placeholder.meta.get("gt_input", {"kind": "parameter"})["kind"] == "parameter")


def distinct(names: Iterable[str]) -> list[str]:
    """Return names of results, each that has occurred before with its place after it: a model may
    have a parameter "loss".

    >>> distinct(["loss", "weight", "loss"])
    ['loss', 'weight', 'loss (output 2)']
    """
    found: list[str] = []
    for at, name in enumerate(names):
        found.append(f"{name} (output {at})" if name in found else name)
    return found


def input_fqn(placeholder: fx.Node) -> str:
    """Return the FQN of a graph's input; the name of the placeholder if it has none."""
    return str(placeholder.meta.get("gt_input", {}).get("fqn", placeholder.target))


def is_collective(node: fx.Node) -> bool:
    """Return whether the operator communicates, or waits for one that does."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COMMUNICATING


def refuse_fake(gm: fx.GraphModule, what: str) -> None:
    """Raise ValueError in a fake world if the graph has a collective: no data moves there."""
    if not dist.is_initialized() or dist.get_backend() != "fake":
        return
    # ``gm`` may be the ``run`` of an interpreter.
    graph = getattr(getattr(gm, "__self__", gm), "graph", None)
    # A function without a graph may call anything, so it is refused as well.
    found: Any = "no graph to look into"
    if graph is not None:
        found = next(filter(is_collective, graph.nodes), None)
    if found is not None:
        raise ValueError(
            f"{what} has {found}, and a fake world moves no data, so no run in it means anything: "
            'use gt_world("ranks"), or simulate_graph'
        )


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a functional collective, or for several."""
    return waits(node.target)


def waits(target: object) -> bool:
    """Return whether an operator waits for a functional collective, or for several."""
    return any(target is wait for wait in WAITS)


class Call(NamedTuple):
    """A call of an operator that is no node yet."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_random(node: fx.Node | Call) -> bool:
    """Return whether the node draws from a random generator."""
    if not draws(node.target):
        return False
    # Torch tags attention as random even where its dropout is off.
    return isinstance(node.target, HigherOrderOperator) or argument_of(node, "dropout_p") != 0.0


def draws(target: object) -> bool:
    """Return whether an operator draws random numbers, if no argument switches that off."""
    if isinstance(target, HigherOrderOperator):
        return target.name() in _DRAWING
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def parameter(target: object, name: str) -> tuple[int, str] | None:
    """Return place and name of a parameter of an operator; None if it has none of that name."""
    if isinstance(target, OpOverload):
        for place, argument in enumerate(schema(target).arguments):
            if argument.name == name:
                return place, name
    return None


def argument_of(node: fx.Node | Call, *names: str) -> Any:
    """Return the first argument that has one of these names, or its default; None without one."""
    for argument, given in arguments_given(node):
        if argument.name in names:
            return argument.default_value if given is None else given
    return None


def arguments_given(node: fx.Node | Call) -> Iterator[tuple[Any, Any]]:
    """Yield each declared argument of an operator, and what the node gives for it, or None."""
    for place, argument in enumerate(schema(node.target).arguments):
        if place < len(node.args):
            yield argument, node.args[place]
        else:
            yield argument, node.kwargs.get(argument.name)


def named_arguments(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with the schema's defaults."""
    named = {}
    for place, (name, default) in enumerate(_arguments_of(operator)):
        named[name] = args[place] if place < len(args) else kwargs.get(name, default)
    return named


@cache  # the schema makes new objects each time that it is asked
def _arguments_of(operator: Any) -> tuple[tuple[str, Any], ...]:
    """Return the names of an operator's arguments, with their defaults."""
    return tuple((each.name, each.default_value) for each in schema(operator).arguments)


def leaves_of(argument: Any) -> list[Any]:
    """Return what is in lists, tuples, dicts and slices of arguments, at any depth."""
    found: list[Any] = []
    fx.node.map_aggregate(argument, found.append)
    return found


def tensors_in(*arguments: Any) -> list[Tensor]:
    """Return the tensors among the leaves of arguments, in their order."""
    return [leaf for leaf in leaves_of(arguments) if isinstance(leaf, Tensor)]


def places_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Return the place of each node in an order."""
    return {node: place for place, node in enumerate(nodes)}


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node; None if it has none.

    Graphs of Dynamo have it as ``example_value`` until AOTAutograd makes a ``val``.
    """
    return node.meta.get("val", node.meta.get("example_value"))


def short_name(node: fx.Node) -> str:
    """Return the operator's name without namespace and overload, or the function's name."""
    if isinstance(node.target, OpOverload):
        return str(schema(node.target).name).partition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def held(gm: Any, path: str) -> Any:
    """Return what a graph's module holds under a dotted name; None if it holds nothing there."""
    for step in path.split("."):
        gm = getattr(gm, step, None)
    return gm


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """Return the graphs inside a graph that a node is given, by the operands that hold them."""
    found = {}
    for operand in node.all_input_nodes:
        body = held(gm, str(operand.target)) if operand.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            found[operand] = body
    return found


def graphs_called(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a node calls: a module, or arguments of a higher-order operator."""
    found = list(bodies_of(gm, node).values())
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        return [module, *found] if isinstance(module, fx.GraphModule) else found
    return found


def is_view(target: object) -> bool:
    """Return whether an operator's result shares its operand's memory, and nothing is written."""
    return isinstance(target, OpOverload) and (
        target.is_view or target is torch.ops.aten._unsafe_view.default
    )


def graphs_in(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph and all graphs inside it."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def mutates(node: fx.Node) -> bool:
    """Return whether the operator writes to an operand."""
    return bool(written_operands(node))


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that the node's operator writes to."""
    written: list[fx.Node] = []
    if isinstance(node.target, OpOverload):
        if not schema(node.target).is_mutable:
            return written  # as most: to look at each argument costs more
        for argument, given in arguments_given(node):
            if argument.is_write:
                fx.node.map_arg(given, written.append)
    elif node.op == "call_function" and node.target in _WRITING:
        first = node.args[0]
        if isinstance(first, fx.Node):
            value = value_of(first)
            # ``x += 1`` of a number makes another number.
            if value is None or isinstance(value, torch.Tensor):
                written.append(first)

    return written


def written_parameters(target: object) -> list[tuple[int, str]]:
    """Return place and name of each parameter that an operator writes to.

    One that is given by keyword only, as ``out=``, has a place that no argument has.
    """
    if not isinstance(target, OpOverload):
        return [(0, "")] if target in _WRITING else []
    found: list[tuple[int, str]] = []
    for place, argument in enumerate(schema(target).arguments):
        if argument.is_write:
            found.append((sys.maxsize if argument.kwarg_only else place, argument.name))
    return found


def returns_an_operand(node: fx.Node) -> bool:
    """Return whether the result is the operand that is written to, as of ``add_`` and ``+=``."""
    if isinstance(node.target, OpOverload):
        return any(result.is_write for result in schema(node.target).returns)
    return node.target in _IN_PLACE


def walk(
    starts: Iterable[fx.Node],
    onward: Callable[[fx.Node], Iterable[fx.Node]],
    is_of_it: Callable[[fx.Node], bool] = lambda node: True,
) -> set[fx.Node]:
    """Return the starts and what ``onward`` leads to, step by step, while ``is_of_it`` holds."""
    found: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in found and is_of_it(node):
            found.add(node)
            todo += onward(node)
    return found


def storage_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view, an item, a wait or an operator in place shows."""
    while True:
        if is_view(node.target) or node.target is operator.getitem or is_wait(node):
            operands = node.all_input_nodes
        else:
            operands = written_operands(node) if returns_an_operand(node) else []
        if not operands:
            return node
        node = operands[0]


def writes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes whose memory is written to, each with its writers in graph order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in written_operands(node):
            found.setdefault(storage_of(operand), []).append(node)
    return found


def has_effect(node: fx.Node) -> bool:
    """Return whether a node without readers must stay.

    It writes, communicates, draws random numbers or asserts, or it is unknown what it does.
    """
    if node.op in ("placeholder", "output", "call_module", "call_method"):
        return True
    if node.op == "get_attr":
        return False
    if isinstance(node.target, OpOverload):
        return is_random(node) or is_collective(node) or bool(node.is_impure(impure_random=False))
    # Python's operators on sizes and tuples have none, but x += y and x.grad = y write.
    is_plain = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
    return not is_plain or node.target in _WRITING or bool(node.is_impure())


def annotation(fqn: str, role: str, producer: str, chunk_id: int | None = None) -> dict[str, Any]:
    """Return the keys of a node in a chunked region; a boundary has no ``chunk_id``."""
    keys: dict[str, Any] = {REGION_FQN: fqn, ROLE: role, PRODUCER: producer}
    if chunk_id is None:
        return keys
    return {CHUNK_ID: chunk_id, **keys}


@dataclass(frozen=True, slots=True)
class ChunkAnnotation:
    """The keys of a node in a chunked region, read back: module, role, producer, and chunk."""

    fqn: str
    role: str
    producer: str
    chunk_id: int | None

    def words(self) -> list[str]:
        """Return all but the module in the words of a graph text: the chunk of a body, or the role.

        >>> ChunkAnnotation("layers.0", BODY, GRAPH, 1).words()
        ['1']
        >>> ChunkAnnotation("layers.0", SPLIT_BOUNDARY, EAGER, None).words()
        ['split_boundary', 'eager']
        """
        words = [self.role if self.chunk_id is None else str(self.chunk_id)]
        if self.producer != GRAPH:
            words.append(self.producer)
        return words


def chunk_annotation(custom: Mapping[Any, Any]) -> ChunkAnnotation | None:
    """Return what ``annotation`` wrote among a node's annotations; None if it wrote nothing."""
    found = ChunkAnnotation(
        custom.get(REGION_FQN, ""),
        custom.get(ROLE, ""),
        custom.get(PRODUCER, ""),
        custom.get(CHUNK_ID),
    )
    is_ours = (
        found.fqn
        and found.role in (SPLIT_BOUNDARY, BODY, MATERIALIZATION)
        and found.producer in (EAGER, GRAPH)
        # Bodies have the number of their chunk, and nothing else has one.
        and (found.role == BODY) == (found.chunk_id is not None)
    )
    return found if is_ours else None


DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.complex32: "c32",
}
"""Dtypes with a short name; the others (``float8_e4m3fn``) have torch's."""


def spell_dtype(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, as ``bf16``; torch's name if it has none."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")
