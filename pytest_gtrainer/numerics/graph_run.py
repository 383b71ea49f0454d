"""Run a graph once, and return its results together with the state that it leaves behind.

A pass may change more than results: it may double a weight in place, write to a buffer, or draw
random numbers that nobody reads. So a comparison of two graphs looks at ``GraphRun.everything``,
not only at ``GraphRun.outputs``.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, fx
from torch.fx.immutable_collections import immutable_dict

from pytest_gtrainer._torch.random_states import GeneratorStates, random_state, random_states_kept
from pytest_gtrainer._torch.values import pytree, storage_id
from pytest_gtrainer.graph.nodes import AFTERWARDS, distinct
from pytest_gtrainer.numerics.bits import NoBytes, byte_view, same_bytes

K = TypeVar("K")

# Names of what is compared with the results, and is no value that was computed.
_STRUCTURE = "output structure "
_RANDOM_STATE = "random state of "


@dataclass(frozen=True, slots=True)
class GraphRun:
    """A run's results and the state that it left, by name.

    Attributes:
        outputs: the results. A plain number is a tensor here; None and other objects are left out.
        state: every input that is a tensor, attributes of the graph's module that the run wrote to,
            and the states of random generators, all as they are after the run.
    """

    outputs: dict[str, Tensor]
    state: dict[str, Tensor]

    @property
    def everything(self) -> dict[str, Tensor]:
        """Results first, then state."""
        return self.outputs | self.state


def run_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], start: GeneratorStates | None = None
) -> GraphRun:
    """Run ``gm`` on copies of ``inputs`` from the random states ``start``, by default those of now.

    The random states of this process and the attributes of ``gm`` are afterwards what they were
    before.
    """
    start, inputs = start or GeneratorStates.now(), copies(inputs)
    gm.recompile()  # else a pass that has not done so would be judged by the code from before it
    attributes = {name: (tensor, tensor.detach().clone()) for name, tensor in attributes_of(gm)}
    written: dict[str, Tensor] = {}
    # A joint graph holds its own backward: autograd would only keep activations alive.
    with random_states_kept(), torch.no_grad():
        start.put_back()
        try:
            outputs = _detached(gm(*inputs), attributes)
            random_states = random_state()
        finally:
            for name, (tensor, before) in attributes.items():
                if _differ(tensor, before):
                    written[f"attribute {name}{AFTERWARDS}"] = tensor.detach().clone()
                    tensor.detach().copy_(before)

    state = inputs_afterwards(gm, inputs) | written | random_states_afterwards(random_states)
    return GraphRun(named_outputs(outputs, gm), state)


def copies(values: Sequence[Any], *, keep_grad: bool = False) -> list[Any]:
    """Return copies of all tensors. What shares memory, also on several ranks, shares it again.

    A tensor that stands in several places is one object again. Else the whole storage of a tensor
    is copied, and once, so a graph that writes to one of two views changes the other.
    """
    made: dict[int, Tensor] = {}
    storages: dict[int, UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return type(value)(map(copied, value))
        if isinstance(value, Tensor) and id(value) not in made:
            tensor = value.detach()
            requires_grad = keep_grad and value.requires_grad
            made[id(value)] = _copy_of(tensor, storages).requires_grad_(requires_grad)
        return made.get(id(value), value)

    return [copied(value) for value in values]


def _copy_of(tensor: Tensor, storages: dict[int, UntypedStorage]) -> Tensor:
    # ``set_`` knows no conjugates and no scales of quantised numbers.
    is_plain = not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    if not has_storage(tensor) or not is_plain:
        return tensor.clone()
    storage = storage_id(tensor)
    if storage not in storages:
        storages[storage] = tensor.untyped_storage().clone()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return tensor.new_empty(0).set_(storages[storage], *place)


def named_outputs(outputs: Any, gm: fx.GraphModule | None = None) -> dict[str, Tensor]:
    """Return results by the names in ``meta["gt_outputs"]`` of a graph, or as ``output 0``,
    ``output 1``, ...

    The last entry has the structure of the results in its name, and their number as its value:
    graphs that return ``(a, (b,))`` and ``(a, b)`` have entries of different names. A dict counts
    by its keys, in whichever order they are.
    """
    leaves = pytree.tree_leaves(outputs)
    names: Sequence[str] = (gm and gm.graph.output_node().meta.get("gt_outputs")) or ()
    outputs = _in_order_of_keys(outputs)
    if len(names) != len(leaves):
        leaves = pytree.tree_leaves(outputs)
        names = [f"output {at}" for at in range(len(leaves))]
    found: dict[str, Tensor] = {}
    for name, leaf in zip(distinct(names), leaves, strict=True):
        if isinstance(leaf, bool | int | float | complex):
            # A Python number has 64 bits, whatever the default dtype.
            wide = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
            leaf = torch.tensor(leaf, dtype=wide)
        if isinstance(leaf, Tensor):
            found[name] = leaf

    found[f"{_STRUCTURE}{_structure(outputs)}"] = torch.tensor(len(leaves))
    return found


def _in_order_of_keys(outputs: Any) -> Any:
    """Sort dicts by key, at any depth.

    >>> _in_order_of_keys(([{"b": 1, "a": {2: 3, 1: 4}}], 5))
    ([{'a': {1: 4, 2: 3}, 'b': 1}], 5)
    """

    def is_dict(value: Any) -> bool:
        return type(value) in (dict, immutable_dict)  # an output node of fx has the second

    def sort(value: Any) -> Any:
        if not is_dict(value):
            return value
        return {key: _in_order_of_keys(value[key]) for key in sorted(value, key=repr)}

    return pytree.tree_map(sort, outputs, is_leaf=is_dict)


def _structure(outputs: Any) -> str:
    """Spell results with ``*`` for each tensor. A list of results is a tuple: passes return one for
    the other.

    >>> _structure([torch.ones(1), [2, None], {"a": "text"}])
    "(*, ['int', None], {'a': 'text'})"
    """
    if type(outputs) is list:
        outputs = tuple(outputs)

    return str(pytree.tree_map(_spell_leaf, outputs)).replace("'*'", "*")


_COMPARED_BY_REPR = (
    *(str, bytes, range, slice, type(None), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _spell_leaf(leaf: Any) -> Any:
    """Return what a result is compared by beside numbers: a constant itself, functions by name."""
    if isinstance(leaf, Tensor):
        return "*"
    if isinstance(leaf, _COMPARED_BY_REPR):
        return leaf
    return leaf.__qualname__ if inspect.isroutine(leaf) else type(leaf).__name__


def spell_values(values: Any) -> str:
    """Spell Python values in tuples, lists and dicts, with ``*`` for each tensor and module.

    >>> spell_values([1.5, {"b": torch.ones(1), "a": "text"}])
    "[1.5, 'text', '*'] in TreeSpec(list, None, [*,\\n  TreeSpec(dict, ['a', 'b'], [*,\\n    *])])"
    """
    leaves, structure = pytree.tree_flatten(_in_order_of_keys(values))
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.nn.Module):
            leaves[place] = "*"
        elif not isinstance(leaf, bool | int | float | complex):
            leaves[place] = _spell_leaf(leaf)
    return f"{leaves} in {structure}"


def input_names(gm: fx.GraphModule) -> list[str]:
    """Return a name for each graph input: the FQN of state, else ``input`` and its place or name.

    No name occurs twice.
    """
    names: list[str] = []
    for at, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = node.meta.get("gt_input", {"kind": "input", "fqn": node.target})
        name = str(source["fqn"])
        if source["kind"] not in ("parameter", "buffer"):
            name = f"input {name}"
        if name in names:
            name += f" (input {at})"
        names.append(name)
    return names


def inputs_afterwards(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Return the inputs that are tensors, by name, as the graph left them."""
    named = zip(input_names(gm), inputs, strict=True)
    return {f"{name}{AFTERWARDS}": value for name, value in named if isinstance(value, Tensor)}


def random_states_afterwards(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return states of generators, by their names among what a graph leaves."""
    return {f"{_RANDOM_STATE}{name}{AFTERWARDS}": state for name, state in states.items()}


def attributes_of(gm: fx.GraphModule) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors of a module that a run may write to.

    These are parameters, buffers, and tensors that a ``get_attr`` node reads.
    """
    found = dict(gm.named_parameters())
    found.update(gm.named_buffers())
    for node in gm.graph.find_nodes(op="get_attr"):
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor):
            found.setdefault(str(node.target), value)
    return found.items()


def _differ(tensor: Tensor, before: Tensor) -> bool:
    try:
        return not same_bytes(byte_view(tensor), byte_view(before))
    except NoBytes:
        return False


def _detached(outputs: Any, attributes: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """Copy results that share memory with an attribute of the module.

    The attributes are put back before anybody reads a result.
    """
    places = set()
    for tensor, _ in attributes.values():
        if has_storage(tensor):
            places.add(tensor.untyped_storage().data_ptr())

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not has_storage(leaf):
            return leaf
        if leaf.untyped_storage().data_ptr() in places:
            return leaf.clone()
        return leaf

    return pytree.tree_map(copied, outputs)


def has_storage(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and tensor.layout is torch.strided
    )


def only_nan(outputs: Mapping[str, Tensor]) -> list[str]:
    """Return the names of results whose every element is NaN: they cannot show a difference."""
    found = []
    for name, tensor in outputs.items():
        if _can_be_nan(tensor) and tensor.numel() and bool(tensor.isnan().all()):
            found.append(name)
    return found


def all_nan(outputs: Mapping[str, Tensor]) -> bool:
    """Return whether every element of every floating-point result is NaN; False if there is no such
    element.
    """
    floating = [name for name, tensor in outputs.items() if _can_be_nan(tensor) and tensor.numel()]
    return floating != [] and only_nan(outputs) == floating


def why_nothing_shows(results: Mapping[str, Tensor]) -> str:
    """Return why equal results prove nothing, or an empty string if some element could differ.

    The structure of results, and random states, are no elements.
    """
    nan = only_nan(results)
    if nan:
        return f"{', '.join(nan)}: nothing but NaN"
    for name, tensor in results.items():
        if tensor.numel() and not name.startswith((_STRUCTURE, _RANDOM_STATE)):
            return ""
    return "no result has an element"


def with_one_nan(values: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Replace every NaN by the same one: which NaN an operator gives depends on its kernel's vector
    width.

    Signs of zeros and all other bits stay as they are.
    """
    made: dict[K, Tensor] = {}
    for name, tensor in values.items():
        if _can_be_nan(tensor) and bool(tensor.isnan().any()):
            tensor = tensor.detach().clone()
            # The other part of a complex number may be finite, and shows a difference.
            parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            parts[parts.isnan()] = torch.nan
        made[name] = tensor
    return made


def _can_be_nan(tensor: Tensor) -> bool:
    has_values = has_storage(tensor) and type(tensor).__name__ != "FakeTensor"
    return has_values and tensor.dtype in CAN_BE_EXTREME


CAN_BE_EXTREME = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
)
"""Dtypes whose NaNs are looked for, and whose inputs get extreme values. Not float8 and below:
torch has no isnan.
"""
