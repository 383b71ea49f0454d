"""The outline of a step: what runs around the layers is alike for all of them, forward and backward.

In a *thin* model every layer of a run is a placeholder: it makes empty tensors as its layer returned them in the cut
trace, which read all that the layer was given; in the backward, from all gradients that came, empty ones for all that
wanted one. What it was called with and what was in force around it (autocast, no_grad) stands on its nodes. The thin
model is traced with all its layers and cut; the cut one, stamped, must be the whole one, node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pytest_gtrainer._torch.stamping import SYMBOLIC, foreign_modes, saved_tensor_hooks, version_of
from pytest_gtrainer._torch.tracing import annotate
from pytest_gtrainer._torch.values import (
    buffers_of,
    is_traceable_wrapper_subclass,
    modules_of,
    parameters_of,
    pytree,
    storage_id,
)
from pytest_gtrainer.tracing.stamping.copying import stamp
from pytest_gtrainer.tracing.stamping.runs import Names, cut
from pytest_gtrainer.tracing.stamping.signature import PLAIN, constant, signature_of
from pytest_gtrainer.tracing.stamping.units import Units
from pytest_gtrainer.tracing.stamping.verdict import Refused, first_difference

Slot = tuple[int, int]
"""A run by number, and a layer of its unit."""


@dataclass(frozen=True, slots=True)
class _Like:
    """What an empty tensor must have to stand for another."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Like:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self, token: torch.Tensor) -> torch.Tensor:
        return token.new_empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Returned:
    """What a layer returned: leaves are plain values, new tensors, or the number of a tensor that it was given."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec


Calls = dict[Slot, dict[Any, _Returned]]


@contextmanager
def recorded_calls(names: Names) -> Iterator[Calls]:
    """What the layers of runs are called with inside, and what they return.

    Raises:
        Refused: inside, a layer writes to what it is given, or takes or returns what cannot be looked into.
    """
    calls: Calls = {}
    with ExitStack() as stack:
        for layer, slot in names.slots.items():
            recorder = _Recorder(names.runs[slot[0]].container, calls.setdefault(slot, {}))
            for handle in (
                layer.register_forward_pre_hook(recorder.before, with_kwargs=True),
                layer.register_forward_hook(recorder.after, with_kwargs=True, prepend=True),
            ):
                stack.callback(handle.remove)
        yield calls


class _Recorder:
    """Hooks of a layer: the first in front of its forward and the first behind it."""

    def __init__(self, container: str, calls: dict[Any, _Returned]) -> None:
        self.container, self.calls = container, calls
        self.open: list[tuple[Any, list[Any], list[int]]] = []

    def before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, _, key = called_with(self.container, args, kwargs)
        self.open.append((key, leaves, [version_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]))

    def after(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        key, leaves, versions = self.open.pop()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        now, _, its_key = called_with(self.container, args, kwargs)
        if [*map(version_of, tensors)] != versions or its_key != key or [*map(id, now)] != [*map(id, leaves)]:
            raise Refused(self.container, f"a {type(layer).__name__} changes what it is given")
        returned, spec = pytree.tree_flatten(output)
        memory = {storage_id(tensor) for tensor in tensors}
        given = {id(tensor): index for index, tensor in enumerate(tensors)}
        told: list[Any] = []
        for leaf in returned:
            _plain(self.container, leaf, "returns")
            if not isinstance(leaf, torch.Tensor):
                told.append(leaf)
            elif id(leaf) in given:
                told.append(_Given(given[id(leaf)]))
            elif storage_id(leaf) in memory:
                raise Refused(self.container, f"a {type(layer).__name__} returns a view of what it is given")
            else:
                told.append(_Like.of(leaf))
        self.calls.setdefault(key, _Returned(tuple(told), spec))


@dataclass(frozen=True, slots=True)
class _Given:
    index: int


def called_with(container: str, args: Any, kwargs: Any) -> tuple[list[Any], pytree.TreeSpec, Any]:
    """The leaves of a call's arguments and their structure; and what two calls must share to be alike."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    plain = [_plain(container, leaf, "is called with") for leaf in leaves]
    first: dict[int, int] = {}  # one tensor given twice is not two
    same = [first.setdefault(id(leaf), index) for index, leaf in enumerate(plain) if isinstance(leaf, torch.Tensor)]
    told = tuple(_Like.of(leaf) if isinstance(leaf, torch.Tensor) else constant(leaf) for leaf in plain)
    return leaves, spec, (str(spec), told, tuple(same))


def _plain(container: str, leaf: Any, does: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        if is_traceable_wrapper_subclass(leaf):
            raise Refused(container, f"a layer {does} a {type(leaf).__name__}")
        if any(isinstance(extent, SYMBOLIC) for extent in (*leaf.shape, *leaf.stride())):
            raise Refused(container, f"a layer {does} a tensor whose size depends on data")
    elif type(leaf) not in PLAIN:
        raise Refused(container, f"a layer {does} a {type(leaf).__name__}, whose state cannot be seen")
    return leaf


def in_force() -> Any:
    """What changes how operators behave, beside their arguments."""
    hooks = saved_tensor_hooks()
    if hooks is not None:  # of a checkpoint made anew for every call
        names = [getattr(hook, "__qualname__", "") for hook in hooks]
        known = all(name.startswith("_checkpoint_hook.") for name in names)
        hooks = names if known else signature_of(hooks)
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return grad, autocast, hooks, str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled()


def check_outline(model: nn.Module, names: Names, calls: Calls, trace: Callable[[], fx.GraphModule]) -> None:
    """The code around the layers of ``model`` treats all units of a run alike.

    Raises:
        Refused: it does not, or what it does cannot be seen.
    """
    with thin(names, calls):
        with cut(model, names.runs):
            small = trace()
        whole = trace()
    trainable = whole.graph.output_node().meta["gt_outputs"][1:]
    of_the_model = ("gt_outputs", "gt_managed_order", "gt_tied")  # on the output: names, written when all is made
    found = first_difference(whole.graph, stamp(Units(small.graph, names), trainable), of_the_model)
    if found is not None:
        raise Refused("", f"the model's own code is not alike for all layers: {found}")


@contextmanager
def thin(names: Names, calls: Calls) -> Iterator[None]:
    """The model with placeholders for the layers of its runs, of whose tensors each has one that wants a gradient."""
    with ExitStack() as stack:
        for layer, slot in names.slots.items():
            own, tables = vars(layer), (parameters_of(layer), buffers_of(layer), modules_of(layer))
            before = {"forward": own["forward"]} if "forward" in own else {}
            tickets = [each for each in layer.parameters() if each.requires_grad][:1]
            own["forward"] = _placeholder(names.runs[slot[0]].container, calls.get(slot, {}), tables[0])
            stack.callback(own.update, before)
            stack.callback(own.pop, "forward")
            for table in tables:
                stack.callback(table.update, dict(table))
                stack.callback(table.clear)
                table.clear()
            tables[0].update((f"ticket{index}", ticket) for index, ticket in enumerate(tickets))
        yield


def _placeholder(container: str, calls: dict[Any, _Returned], own: dict[str, Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, _, key = called_with(container, args, kwargs)
        if key not in calls:
            raise Refused(container, f"the layers are not all called alike: one with {key[1]}")
        foreign = foreign_modes()
        if foreign:
            raise Refused(container, f"the layers are called under {foreign[0]}")
        known, given = calls[key], [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in known.leaves if isinstance(leaf, _Like)]
        needs = any(like.wants_gradient for like in made) and not any(tensor.requires_grad for tensor in given)
        if not given:
            raise Refused(container, "a layer is called without a tensor")
        tickets = list(own.values()) if needs else []
        with annotate({"called": repr((key, in_force()))}):
            tensors = iter(_Placeholder.apply(made, len(given), *given, *tickets))
        results = [
            next(tensors) if isinstance(leaf, _Like) else given[leaf.index] if isinstance(leaf, _Given) else leaf
            for leaf in known.leaves
        ]
        return pytree.tree_unflatten(results, known.spec)

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
        arrived = [gradient for gradient in gradients if gradient is not None]
        if not arrived:
            return None, None, *(None for _ in wanted)
        token = torch.stack([gradient.new_empty((), dtype=torch.float32) for gradient in arrived])
        made = [like.empty(token) if want else None for like, want in zip(ctx.given, wanted, strict=False)]
        return None, None, *made, *(None for _ in wanted[len(made) :])
