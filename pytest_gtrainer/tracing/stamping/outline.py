"""The outline of a step: what runs around the layers is alike for all of them, forward and backward.

In a *thin* model every layer of a run is a placeholder: it makes empty tensors as its layer returned them in the cut
trace, which read all that the layer was given; in the backward, from all gradients that came, empty ones for all that
wanted one. What it was called with and what was in force around it (autocast, no_grad) stands on its nodes. The thin
model is traced with all its layers and cut; the cut one, stamped, must be the whole one, node by node.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from pytest_gtrainer._torch.stamping import foreign_modes, saved_tensor_hooks, version_of
from pytest_gtrainer._torch.tracing import annotate
from pytest_gtrainer._torch.values import (
    SYMBOLIC,
    buffers_of,
    is_traceable_wrapper_subclass,
    modules_of,
    parameters_of,
    pytree,
    storage_id,
)
from pytest_gtrainer.tracing.stamping.copying import stamp
from pytest_gtrainer.tracing.stamping.runs import Names, StampedLayers
from pytest_gtrainer.tracing.stamping.signature import PLAIN, constant, signature_of
from pytest_gtrainer.tracing.stamping.units import Units
from pytest_gtrainer.tracing.stamping.verdict import Refused, first_difference


@dataclass(frozen=True, slots=True)
class _Like:
    """What an empty tensor must have to stand for another."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Like":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self, token: torch.Tensor) -> torch.Tensor:
        return token.new_empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Given:
    """The tensor that a layer returns is the one of this number that it was given."""

    index: int


Returned = tuple[list[Any], pytree.TreeSpec]
"""What a layer returned: leaves are plain values, new tensors as ``_Like``, or ``_Given``."""
Calls = dict[tuple[StampedLayers, int], dict[Any, Returned]]
"""By run and layer of its unit: what the layers return, by what they are called with."""


@contextmanager
def recorded_calls(names: Names) -> Iterator[Calls]:
    """What the layers of runs are called with inside, and what they return; Refused what cannot be looked into."""
    calls: Calls = {}
    with ExitStack() as stack:
        for layer, slot in names.slots.items():
            before, after = _recorder(slot[0].container, calls.setdefault(slot, {}))
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(after, with_kwargs=True, prepend=True).remove)
        yield calls


def _recorder(container: str, calls: dict[Any, Returned]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks of a layer: the last in front of its forward, and the first behind it."""
    under_way: list[tuple[list[Any], Any]] = []

    def told(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        leaves, key = _called_with(container, args, kwargs)
        return leaves, (key, [(id(leaf), version_of(leaf)) if torch.is_tensor(leaf) else id(leaf) for leaf in leaves])

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        under_way.append(told(args, kwargs))

    def after(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves, state = under_way.pop()
        if told(args, kwargs)[1] != state:
            raise Refused(container, f"a {type(layer).__name__} changes what it is given")
        tensors = list(filter(torch.is_tensor, leaves))
        memory = {storage_id(tensor) for tensor in tensors}
        given = {id(tensor): _Given(index) for index, tensor in enumerate(tensors)}
        returned, spec = pytree.tree_flatten(output)
        for leaf in returned:
            _check_leaf(container, leaf, "returns")
            if torch.is_tensor(leaf) and id(leaf) not in given and storage_id(leaf) in memory:
                raise Refused(container, f"a {type(layer).__name__} returns a view of what it is given")
        results = [given.get(id(leaf)) or _Like.of(leaf) if torch.is_tensor(leaf) else leaf for leaf in returned]
        calls.setdefault(state[0], (results, spec))

    return before, after


def _called_with(container: str, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments; and what two calls must share to be alike."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        _check_leaf(container, leaf, "is called with")
    first: dict[int, int] = {}  # one tensor given twice is not two
    same = tuple(first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves) if torch.is_tensor(leaf))
    told = tuple(_Like.of(leaf) if torch.is_tensor(leaf) else constant(leaf) for leaf in leaves)
    return leaves, (str(spec), told, same)


def _check_leaf(container: str, leaf: Any, does: str) -> None:
    if not torch.is_tensor(leaf):
        if type(leaf) not in PLAIN:
            raise Refused(container, f"a layer {does} a {type(leaf).__name__}, whose state cannot be seen")
    elif is_traceable_wrapper_subclass(leaf):
        raise Refused(container, f"a layer {does} a {type(leaf).__name__}")
    elif any(isinstance(extent, SYMBOLIC) for extent in (*leaf.shape, *leaf.stride())):
        raise Refused(container, f"a layer {does} a tensor whose size depends on data")


def in_force() -> Any:
    """What changes how operators behave, beside their arguments."""
    if (hooks := saved_tensor_hooks()) is not None:  # of a checkpoint made anew for every call
        names = [getattr(hook, "__qualname__", "") for hook in hooks]
        known = all(name.startswith("_checkpoint_hook.") for name in names)
        hooks = names if known else signature_of(hooks)
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return grad, autocast, hooks, str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled()


def check_outline(names: Names, calls: Calls, trace: Callable[[], fx.GraphModule]) -> None:
    """The code around the layers of a model treats all units of a run alike and can be seen, or it is Refused."""
    with thin(names, calls):
        with names.cut():
            small = trace()
        whole = trace()
    trainable = whole.graph.output_node().meta["gt_outputs"][1:]
    of_the_model = ("gt_outputs", "gt_managed_order", "gt_tied")  # on the output: names, written when all is made
    stamped = stamp(Units(small.graph, names), trainable)
    if (found := first_difference(whole.graph, stamped, of_the_model)) is not None:
        raise Refused("", f"the model's own code is not alike for all layers: {found}")


@contextmanager
def thin(names: Names, calls: Calls) -> Iterator[None]:
    """The model with placeholders for the layers of its runs, of whose tensors each has one that wants a gradient."""
    with ExitStack() as stack:
        for layer, slot in names.slots.items():
            tickets = [each for each in layer.parameters() if each.requires_grad][:1]
            own = parameters_of(layer)
            for table in (own, buffers_of(layer), modules_of(layer)):
                stack.enter_context(patch.dict(table, clear=True))
            own.update((f"ticket{index}", ticket) for index, ticket in enumerate(tickets))
            attributes = vars(layer)
            stack.callback(attributes.update, {key: attributes[key] for key in ("forward",) if key in attributes})
            stack.callback(attributes.pop, "forward")
            attributes["forward"] = _placeholder(slot[0].container, calls.get(slot, {}), own)
        yield


def _placeholder(container: str, calls: dict[Any, Returned], own: dict[str, Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, key = _called_with(container, args, kwargs)
        if key not in calls:
            raise Refused(container, f"the layers are not all called alike: one with {key[1]}")
        if foreign := foreign_modes():
            raise Refused(container, f"the layers are called under {foreign[0]}")
        returned, spec = calls[key]
        if not (given := list(filter(torch.is_tensor, leaves))):
            raise Refused(container, "a layer is called without a tensor")
        made = [leaf for leaf in returned if isinstance(leaf, _Like)]
        needs = any(like.wants_gradient for like in made) and not any(tensor.requires_grad for tensor in given)
        with annotate({"called": repr((key, in_force()))}):
            tensors = iter(_Placeholder.apply(made, len(given), *given, *(own.values() if needs else ())))
        results = [
            next(tensors) if isinstance(leaf, _Like) else given[leaf.index] if isinstance(leaf, _Given) else leaf
            for leaf in returned
        ]
        return pytree.tree_unflatten(results, spec)

    return forward


class _Placeholder(torch.autograd.Function):
    """New tensors that read all ``given`` ones; gradients likewise."""

    @staticmethod
    def forward(ctx: Any, made: list[_Like], count: int, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.given = [_Like.of(tensor) for tensor in given[:count]]
        ctx.set_materialize_grads(False)
        token = torch.stack([tensor.new_empty((), dtype=torch.float32) for tensor in given[:count]])
        results = tuple(like.empty(token) for like in made)
        ctx.mark_non_differentiable(*(t for t, like in zip(results, made, strict=True) if not like.wants_gradient))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        if not (arrived := [gradient for gradient in gradients if gradient is not None]):
            return None, None, *(None for _ in wanted)
        token = torch.stack([gradient.new_empty((), dtype=torch.float32) for gradient in arrived])
        made = [like.empty(token) if want else None for like, want in zip(ctx.given, wanted, strict=False)]
        return None, None, *made, *(None for _ in wanted[len(made) :])
