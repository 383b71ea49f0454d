"""Trace a training step (forward, loss, backward) into one joint FX graph.

Its inputs are the local tensors of parameters, buffers and user inputs, in this order; its
outputs the loss and the gradients of the parameters that require one, in ``named_parameters`` order
(A1). Beside what ``graph.nodes`` names, ``meta["gt_input"]`` on placeholders is ``{"kind":
"parameter" | "buffer" | "input", "fqn": ...}``. On the output node, ``gt_outputs`` names the
outputs, ``gt_managed_order`` parameters as FSDP2 manages them, ``gt_tied`` parameters that several
modules hold, by the first.
"""

import copy
import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Placement

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import random_state, random_states_kept
from pytest_gtrainer._torch.tracing import (
    AutocastAround,
    GuardOnDataDependentSymNode,
    annotate,
    is_fixed,
    make_fx,
    marked_backward,
    new_extent,
    new_fake_mode,
    tracing_backward_metadata,
)
from pytest_gtrainer._torch.values import FakeTensor, FakeTensorMode, local_part, pytree
from pytest_gtrainer.facts import long_work
from pytest_gtrainer.graph.bucket_plan import managed_order_of, tied_parameters
from pytest_gtrainer.graph.nodes import (
    AFTERWARDS,
    BACKWARD,
    DYNAMIC_DIMS,
    GATHERS_ONCE,
    HANDED_ON,
    direction,
    refuse_fake,
)
from pytest_gtrainer.tracing.model import (
    KEY,
    LOSS_FQN,
    ModelState,
    annotate_module_fqns,
    attributes_kept,
    has_bytes,
    local,
    rewrap,
    same_bytes,
    tensor_text,
)
from pytest_gtrainer.tracing.refusals import (
    RefusingSecondCasts,
    RunMode,
    refuse_compiled_code,
    refuse_input,
    refuse_model,
    refusing_random_states,
    refusing_side_effects,
)
from pytest_gtrainer.tracing.sharding import reusing_gathers

Step = Callable[..., torch.Tensor]


class TwinInputs(Protocol):
    """What makes the inputs of a second trace from those of the first, ``ChunkConfig`` for one."""

    def twin_inputs(self, inputs: Sequence[Any], /) -> tuple[Any, ...]: ...


DynamicDims = Mapping[str, Sequence[tuple[int, int]]]


class FixedExtentError(ValueError):
    """A dimension that was to stay dynamic has one extent in the graph."""


class TwinTraceError(ValueError):
    """The step can be traced on its inputs, but not on those of its twin."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A training step as a graph, with what is needed to run it on the live model.

    Attributes:
        gm: the joint graph, ``(*state, *inputs) -> (loss, *gradients)``.
        example_inputs: fake tensors of the graph's inputs.
        parameter_fqns, buffer_fqns: names of the state, in the order of the graph's inputs.
        trainable_fqns: parameters that require a gradient, in the order of the outputs.
        input_spec: pytree of the user's inputs.
        gradient_placements: of each that is a DTensor, the placements of its gradient, which may
            differ from its own (tensor parallelism leaves partial sums). None for a plain one, or
            without a gradient.
        rank: the rank that a sharded model was traced as; None without sharded parameters.
        twin: the same step's graph on other inputs, if it was asked for.
        mode: which modules were in eval mode, their classes and hooks, and autocast: a replay in
            another is refused.
        handed_over: behind ``trace_once``, "from another rank", or "traced here" and for whom or
            why.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    parameter_fqns: tuple[str, ...]
    buffer_fqns: tuple[str, ...]
    trainable_fqns: tuple[str, ...]
    input_spec: pytree.TreeSpec
    gradient_placements: tuple[tuple[Placement, ...] | None, ...] = ()
    rank: int | None = None
    twin: fx.GraphModule | None = None
    handed_over: str = ""
    mode: RunMode = field(default_factory=RunMode)

    @property
    def state_fqns(self) -> tuple[str, ...]:
        """Parameters, then buffers, in registration order."""
        return (*self.parameter_fqns, *self.buffer_fqns)

    @property
    def num_static_inputs(self) -> int:
        """Return how many of the graph's inputs are state: the same tensors at every step."""
        return len(self.state_fqns)

    def with_graph(self, gm: fx.GraphModule) -> "TracedStep":
        """The same step with a rewritten graph, which has no twin."""
        return replace(self, gm=gm, twin=None)

    def replay(self, model: nn.Module, *inputs: Any) -> torch.Tensor:
        """Run the step on ``model``: return the loss, add the gradients to ``.grad``.

        Gradients come as tensors of the parameter's own kind (DTensor for a DTensor, as autograd
        would place it), None is skipped, and an existing ``.grad`` is added to. Runs without
        autograd.

        Raises:
            ValueError: the model's state, mode (train, eval, autocast), classes or hooks, or the
                structure, shapes, dtypes, strides, device types or scalars of ``inputs``, are not
                the traced ones, the graph gives a gradient of another shape or dtype, the model is
                wrapped (DDP, ``fully_shard``, ``torch.compile``) or has hooks on parameters, this
                is another rank, or a fake world, which moves no data, and the graph has
                collectives.
        """
        state = ModelState.of(model)
        loss, *gradients = self._run(model, state, inputs)
        with torch.no_grad():
            add_gradients(state, self.trainable_fqns, gradients, self.gradient_placements)
        return loss

    def results(self, model: nn.Module, *inputs: Any) -> dict[str, torch.Tensor]:
        """Run the step on ``model`` and return all that it computes and leaves behind (this rank's
        part), by name.

        First ``loss``, then each ``gradient of FQN``, in the order in which the graph makes them,
        so the first that differs is next to a mistake. Then what the step has changed:
        ``norm.running_mean afterwards``, ``input 0 afterwards``, ``random state of torch.cpu
        afterwards``. The model, its ``.grad``, the inputs and the random states stay as they are.
        The results before and after a pass show whether it changed any bit.

        Raises:
            ValueError: as ``replay``.
        """
        state = ModelState.of(model)
        given = [local(value) for value in [*state.tensors, *pytree.tree_leaves(inputs)]]
        kept = []
        for name, value in zip(self._input_names(), given, strict=False):
            if has_bytes(value):
                kept.append((name, value.detach(), value.detach().clone()))
        left = {}
        with random_states_kept(), torch.no_grad():
            states = random_state()
            try:
                loss, *gradients = self._run(model, state, inputs)
            except BaseException:  # it may have written to a buffer before
                for _, value, before in kept:
                    if not same_bytes(value, before):
                        value.copy_(before)
                raise
            for name, now in random_state().items():
                if not torch.equal(now, states.get(name, now)):
                    left[f"random state of {name}{AFTERWARDS}"] = now
            changed = [each for each in kept if not same_bytes(*each[1:])]
            if changed:  # a result may be a view of what is put back
                loss, *gradients = (None if t is None else t.clone() for t in (loss, *gradients))
            left |= {f"{name}{AFTERWARDS}": value.clone() for name, value, _ in changed}
            for _, value, before in changed:
                value.copy_(before)
        named = list(zip(self.trainable_fqns, gradients, strict=True))
        if (graph := getattr(self.gm, "graph", None)) is not None:
            places = {node: place for place, node in enumerate(graph.nodes)}
            made = [places.get(node, 0) for node in graph.output_node().args[0][1:]]
            named = [named[nth] for nth in sorted(range(len(named)), key=made.__getitem__)]
        of_parameters = {f"gradient of {fqn}": given for fqn, given in named if given is not None}
        return {"loss": loss} | of_parameters | left

    def _input_names(self) -> list[str]:
        inputs = [f"input {index}" for index in range(self.input_spec.num_leaves)]
        return [*self.state_fqns, *inputs]

    def _run(
        self, model: nn.Module, state: ModelState, inputs: tuple[Any, ...]
    ) -> list[torch.Tensor]:
        """The loss, then gradients in the order of ``trainable_fqns``."""
        if self.rank is not None and dist.is_initialized() and dist.get_rank() != self.rank:
            raise ValueError(
                f"the step was traced as rank {self.rank} and this is rank {dist.get_rank()}: a graph holds the group "
                "names and pads of its rank, so trace on every rank"
            )
        refuse_fake(self.gm, "the traced step")
        refuse_model(model)
        leaves, _ = flatten_inputs(inputs)
        flat = [*map(local, state.tensors), *leaves]
        self._check(state, inputs, flat)
        mode = RunMode.of(model, flat)
        self.mode.refuse_other(mode)
        facts.notify("replay", gm=self.gm, inputs=flat)
        with torch.no_grad(), mode.without_autocast():
            results = self.gm(*flat)
        if not isinstance(results, list | tuple) or len(results) != 1 + len(self.trainable_fqns):
            returned = (
                len(results)
                if isinstance(results, list | tuple)
                else f"a {type(results).__name__}, not 1"
            )
            raise ValueError(
                f"the graph returns {returned} results, the step has {1 + len(self.trainable_fqns)}, loss and "
                "gradients: did a pass drop or add outputs?"
            )
        return list(results)

    def _check(self, state: ModelState, inputs: tuple[Any, ...], flat: list[Any]) -> None:
        """What the graph has baked in: the state, the structure, shapes and dtypes, scalars among
        the inputs.
        """
        if state.fqns != self.state_fqns:
            missing = sorted(set(self.state_fqns) - set(state.fqns))
            extra = sorted(set(state.fqns) - set(self.state_fqns))
            raise ValueError(
                "the model is not the traced one: "
                + (
                    f"missing {missing}, unexpected {extra}"
                    if missing or extra
                    else "its state is in another order"
                )
            )
        if state.trainable != self.trainable_fqns:
            changed = sorted(set(state.trainable) ^ set(self.trainable_fqns))
            raise ValueError(
                f"requires_grad has changed since the trace: {', '.join(changed)}; trace again"
            )
        spec = pytree.tree_structure(inputs)
        if spec != self.input_spec:
            unpack = len(inputs) == 1 and pytree.tree_structure(inputs[0]) == self.input_spec
            hint = ": unpack the tuple, (model, *inputs)" if unpack else ""
            raise ValueError(
                f"inputs are structured as {spec}, the step was traced with {self.input_spec}{hint}"
            )
        named = zip(self._input_names(), flat, self.example_inputs, strict=True)
        for name, value, traced in named:
            ours, theirs = _describe(value), _describe(traced)
            if ours != theirs:
                raise ValueError(
                    f"{name} is {ours}, the step was traced with {theirs}: trace again"
                )


def add_gradients(
    state: ModelState,
    fqns: Sequence[str],
    gradients: Sequence[torch.Tensor | None],
    placements: Sequence[tuple[Placement, ...] | None],
) -> None:
    """Add local gradients to the ``.grad`` of a model's parameters, as autograd would."""
    for fqn, gradient, placed in zip(
        fqns, gradients, placements or (None,) * len(gradients), strict=True
    ):
        if gradient is None:
            continue
        parameter = state.parameters[fqn]
        alike = placed is None or placed == getattr(parameter, "placements", placed)
        like, existing = (local(parameter) if alike else gradient), parameter.grad
        kind = tensor_text(like if existing is None else local(existing))
        dtype = (
            gradient.dtype if existing is None else existing.dtype
        )  # torch checks that of a new one
        if gradient.shape != like.shape or gradient.dtype != dtype:
            raise ValueError(
                f"the graph gives {fqn} a gradient of {tensor_text(gradient)}, and its .grad is {kind}: "
                "did a pass change its shape or dtype?"
            )
        if existing is not None:
            if placed not in (None, getattr(existing, "placements", None)):
                existing.add_(rewrap(gradient, parameter, placements=placed))
            else:
                local(existing).add_(gradient)
        elif gradient.layout is torch.sparse_coo:
            parameter.grad = gradient.clone()
        else:  # as autograd would: in memory of its own, in the parameter's strides
            own = torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)
            parameter.grad = rewrap(own, parameter, placements=placed)


def _describe(value: Any) -> str:
    """Return what a graph may have baked in of an input: of a tensor all but its values."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = tensor_text(value)
    if value.layout is not torch.strided:
        text += f" of layout {value.layout}"
    elif not value.is_contiguous():  # strides of dimensions of one element decide nothing
        strides = zip(value.shape, value.stride(), strict=True)
        text += f" with strides {[stride if extent > 1 else 1 for extent, stride in strides]}"
    return text if value.device.type == "cpu" else f"{text} on {value.device.type}"


def trace_step(
    model: nn.Module,
    step: Step,
    inputs: Sequence[Any],
    *,
    reuse_gathers: bool = True,
    chunk: TwinInputs | None = None,
    twin_inputs: Sequence[Any] | None = None,
    dynamic_dims: DynamicDims | None = None,
) -> TracedStep:
    """Trace ``step(model, *inputs) -> loss`` with its backward into one graph, on fake tensors.

    Nothing is computed. State and inputs may be real, fake or meta, on the mesh's device. The model
    does not change. ``step`` ends with the loss, of all microbatches their sum. What a graph would
    lose is refused, see ``Raises``.

    Args:
        model: the module, with parameters plain or by ``data_parallel``.
        step: computes the scalar loss; code outside of the model's forward is the "loss".
        inputs: pytrees of tensors and plain Python scalars; scalars are baked in.
        reuse_gathers: gather a parameter once however often it is read; off only to reproduce
            graphs of other tracers.
        chunk: trace the step a second time, on ``chunk.twin_inputs(inputs)``, as
            ``TracedStep.twin``.
        twin_inputs: these inputs by hand, where ``chunk`` cannot know them.
        dynamic_dims: see ``ChunkConfig.dynamic_dims``: by name the places, (leaf of inputs,
            dimension), of a symbol.

    Raises:
        TypeError: an input leaf is a module, or neither a tensor nor a plain scalar.
        ValueError: the loss is not a scalar, or no parameter requires a gradient. The model or a
            submodule is wrapped (DDP, ``fully_shard``, ``torch.compile``), or a parameter has a
            hook. The step calls ``backward`` or an optimiser, uses ``.grad``, replaces state, or
            sets a random state. An input has a hook or is computed from parameters.
        TwinTraceError: the second trace fails.
        FixedExtentError: the step decides on the extent of a dynamic dimension.
    """
    if isinstance(inputs, torch.Tensor):
        raise TypeError(
            "inputs is a tensor: give a sequence of the step's inputs, (tensor,) for one"
        )
    refuse_model(model, step)
    (flat_inputs, spec), state = flatten_inputs(tuple(inputs)), ModelState.of(model)
    if not state.trainable:
        wrong = "no parameter of the model requires a gradient, so there is no backward to trace"
        raise ValueError(f"{wrong}: call requires_grad_() on what is to be trained")
    tracing = Tracing(model, step, state, mode_of([*state.tensors, *flat_inputs]), reuse_gathers)
    gm, fakes = tracing.run(flat_inputs, spec, dynamic_dims or {})
    mode = RunMode.of(model, fakes)
    placements = tuple(tracing.gradient_placements)  # before those of the twin
    if twin_inputs is None and chunk is not None:
        twin_inputs = chunk.twin_inputs(inputs)
    twin = None if twin_inputs is None else tracing.run_twin(tuple(twin_inputs), spec)
    names = tuple(state.parameters), tuple(state.buffers), state.trainable
    return TracedStep(gm, fakes, *names, spec, placements, rank_of(state), twin, mode=mode)


def mode_of(tensors: Sequence[Any]) -> FakeTensorMode:
    """The mode of those of them that are fake, else a new one."""
    plain = (local_part(t) if isinstance(t, DTensor) else t for t in tensors)
    return next((t.fake_mode for t in plain if isinstance(t, FakeTensor)), None) or new_fake_mode()


def rank_of(state: ModelState) -> int | None:
    """The rank that a sharded model is traced as; None without sharded parameters."""
    return dist.get_rank() if any(isinstance(tensor, DTensor) for tensor in state.tensors) else None


@dataclass(frozen=True, slots=True)
class Tracing:
    """Traces of one step of one model, in one fake mode."""

    model: nn.Module
    step: Step
    state: ModelState
    mode: FakeTensorMode
    reuse_gathers: bool
    gradient_placements: list[tuple[Placement, ...] | None] = field(default_factory=list)
    autocast: AutocastAround = field(default_factory=AutocastAround)

    def run(
        self,
        flat_inputs: list[Any],
        spec: pytree.TreeSpec,
        dynamic_dims: DynamicDims = MappingProxyType({}),
    ) -> tuple[fx.GraphModule, list[Any]]:
        """The joint graph, and fake tensors of its inputs, of the given extents."""
        fakes = self.fakes_of(flat_inputs)
        shown = list(map(_describe, fakes))
        extents = {name: new_extent(self.mode) for name in dynamic_dims}
        work = f"tracing a step of {type(self.model).__name__}"
        with (
            collector_off(),
            annotate_module_fqns(self.model),
            tracing_backward_metadata(),
            self.mode,
            long_work(work),
        ):
            try:
                gm = make_fx(partial(self._joint, spec))(
                    *self._symbolic(fakes, dynamic_dims, extents)
                )
            except GuardOnDataDependentSymNode as error:
                if not extents:
                    raise ValueError(
                        f"the step decides in Python by the value of a tensor{_place(error)}, and a graph "
                        "holds one course of it: use torch.where, or draw and decide outside of the step "
                        "(nn.init.trunc_normal_ is such a decision)"
                    ) from error
                raise FixedExtentError(
                    f"the step asks for the number of a size that is not known{_place(error)}: "
                    f"{str(error).splitlines()[0]} Keep Python's decisions off dynamic extents, or trace a static "
                    "twin (chunk=) instead"
                ) from error
            except RuntimeError as error:
                refuse_compiled_code(error, _place(error))
                raise
        for index, fake in enumerate(fakes[len(self.state.fqns) :], -len(flat_inputs)):
            if _describe(fake) != shown[index]:
                raise ValueError(
                    f"the step changes input {index + len(flat_inputs)} in place from {shown[index]} to "
                    f"{_describe(fake)} (t_(), resize_(), ...), and a replay would do so to the caller's "
                    "tensor: use the form that returns a tensor, as t()"
                )
        fixed = [f"{name} to {int(extent)}" for name, extent in extents.items() if is_fixed(extent)]
        if fixed:
            raise FixedExtentError(
                f"the step fixes the dynamic dimension {', '.join(fixed)}: take extents from x.shape[i], or write -1 "
                "in a view, and name every input that has the dimension in dynamic_dims"
            )
        _erase_handed_on(gm)
        _inherit_metadata(gm)
        self._name(gm, len(flat_inputs))
        if dynamic_dims:
            places = {name: places[0] for name, places in dynamic_dims.items()}
            gm.graph.output_node().meta[DYNAMIC_DIMS] = {
                name: (extents[name], flat_inputs[leaf].shape[dim])
                for name, (leaf, dim) in places.items()
            }
        return gm, fakes

    def run_twin(self, inputs: tuple[Any, ...], spec: pytree.TreeSpec) -> fx.GraphModule:
        """Trace the step on the twin's inputs; raise ``TwinTraceError`` where that fails."""
        flat, twin_spec = flatten_inputs(inputs)
        if twin_spec != spec:
            raise TwinTraceError(
                f"the twin's inputs are structured as {twin_spec}, the step's as {spec}"
            )
        try:
            gm, _ = self.run(flat, spec)
        except Exception as error:
            described = ", ".join(_describe(value) for value in flat)
            raise TwinTraceError(
                f"the step cannot be traced on its twin's inputs ({described}){_place(error)}: {error}\n"
                "Take extents from x.shape[i], or write -1 in a view, where the model has a fixed number"
            ) from error
        return gm

    def fakes_of(self, flat_inputs: list[Any]) -> list[Any]:
        """Return the state and the inputs as fake tensors, and scalars as they are."""
        values = [*map(local, self.state.tensors), *flat_inputs]
        mesh = next((t.device_mesh for t in self.state.tensors if isinstance(t, DTensor)), None)
        device = torch.device(mesh.device_type if mesh is not None else "cpu")
        return [
            self._fake(value, device) if isinstance(value, torch.Tensor) else value
            for value in values
        ]

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor of this mode; of a meta tensor on the given device."""
        if isinstance(tensor, FakeTensor):
            return tensor.detach()  # one that is given twice stands for two inputs
        if tensor.is_meta:
            with self.mode:
                return torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
                )
        return self.mode.from_tensor(tensor.detach(), static_shapes=True)

    def _symbolic(
        self, fakes: list[Any], dynamic_dims: DynamicDims, extents: Mapping[str, torch.SymInt]
    ) -> list[Any]:
        """The fake inputs with symbols for the extents of dynamic dimensions, contiguous."""
        num_state = len(self.state.fqns)
        shapes: dict[int, list[Any]] = {}
        for name, places in dynamic_dims.items():
            for leaf, dim in places:
                shapes.setdefault(num_state + leaf, list(fakes[num_state + leaf].shape))[dim] = (
                    extents[name]
                )
        symbolic = list(fakes)
        for index, shape in shapes.items():
            if not fakes[index].is_contiguous():
                raise ValueError(
                    f"input {index - num_state} has a dynamic dimension and strides {fakes[index].stride()}: "
                    "give its contiguous()"
                )
            with self.mode:
                symbolic[index] = torch.empty(
                    shape, dtype=fakes[index].dtype, device=fakes[index].device
                )
        return symbolic

    @contextmanager
    def _entered(self, flat: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
        """The model on a graph's state, the first of ``flat``, with gradients where its own tensors
        have them.
        """
        state = self.state
        with torch.no_grad():
            # a view where nothing wraps the input: the input itself must not become a leaf that
            # requires grad
            pairs = zip(flat[: len(state.fqns)], state.tensors, strict=True)
            tensors = [
                rewrap(t, own) if isinstance(own, DTensor) else t.view_as(t) for t, own in pairs
            ]
        for tensor, own in zip(tensors, state.tensors, strict=True):
            tensor.requires_grad_(own.requires_grad)
        with (
            attributes_kept(self.model),
            state.exchanged(tensors),
            reusing_gathers() if self.reuse_gathers else nullcontext(),
            refusing_side_effects(self.model, state, tensors),
            refusing_random_states(),
            RefusingSecondCasts(dict(zip(state.fqns, tensors, strict=True)), self.autocast),
        ):
            yield tensors

    def _gradients(
        self,
        outputs: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Local gradients of the state that requires one, the last of ``wanted``, behind those of
        the rest.
        """
        gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        of_state = gradients[len(gradients) - len(self.state.trainable) :]
        self.gradient_placements[:] = [
            each.placements if isinstance(each, DTensor) else None for each in of_state
        ]
        with marked_backward(), torch.no_grad():
            return [None if gradient is None else local(gradient) for gradient in gradients]

    def _joint(self, spec: pytree.TreeSpec, *flat: Any) -> tuple[torch.Tensor | None, ...]:
        """The function to trace: local tensors in, loss and local gradients out, None without a
        gradient.
        """
        inputs = pytree.tree_unflatten(list(flat[len(self.state.fqns) :]), spec)
        with self._entered(flat) as tensors:
            with annotate({KEY: LOSS_FQN}):
                loss = self.step(self.model, *inputs)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    shown = (
                        tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                    )
                    raise ValueError(f"the step must return a scalar loss, it returned {shown}")
                if not loss.requires_grad:
                    raise ValueError(
                        "the loss does not depend on a parameter that requires a gradient: is the step under no_grad?"
                    )
                value = local(loss.detach())
            with marked_backward(), annotate({KEY: LOSS_FQN}):
                seed = torch.ones_like(loss)
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            return value, *self._gradients([loss], wanted, [seed])

    def _name(self, gm: fx.GraphModule, num_inputs: int) -> None:
        """Note what inputs and results are."""
        self._name_inputs(gm, [("input", str(index)) for index in range(num_inputs)])
        output = gm.graph.output_node()
        output.meta["gt_outputs"] = ("loss", *self.state.trainable)

    def _name_inputs(self, gm: fx.GraphModule, rest: list[tuple[str, str]]) -> None:
        """Note what inputs are, the state and ``rest``, and what a graph's reader asks of the
        model.
        """
        names = [("parameter", fqn) for fqn in self.state.parameters] + [
            ("buffer", fqn) for fqn in self.state.buffers
        ]
        for node, (kind, fqn) in zip(
            gm.graph.find_nodes(op="placeholder"), [*names, *rest], strict=True
        ):
            node.meta["gt_input"] = {"kind": kind, "fqn": fqn}
        output = gm.graph.output_node()
        output.meta["gt_managed_order"] = tuple(managed_order_of(self.model))
        output.meta["gt_tied"] = tied_parameters(self.model)
        output.meta[GATHERS_ONCE] = self.reuse_gathers


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside: a trace makes many objects that stay, and each collection
    visits them all.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _place(error: BaseException) -> str:
    """Return where the user's code raised: the innermost frame that is neither torch's nor ours."""
    ours = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), "<")
    frames = (
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    )
    return next((f" at {frame.filename}:{frame.lineno}" for frame in reversed([*frames])), "")


def flatten_inputs(
    inputs: tuple[Any, ...], *, may_have_history: bool = False
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the tree of a step's inputs; refuse what a trace cannot take as an
    input.
    """
    paths, spec = pytree.tree_flatten_with_path(inputs)
    for path, leaf in paths:
        where = "inputs" + pytree.keystr(path)
        if isinstance(leaf, nn.Module):
            raise TypeError(
                f"{where} is a module ({type(leaf).__name__}): pass the model as the first argument only"
            )
        if isinstance(leaf, DTensor):
            raise TypeError(
                f"{where} is a DTensor: pass the local tensor, and make a DTensor of it in the step"
            )
        if not isinstance(leaf, torch.Tensor | int | float | bool | complex | None):
            raise TypeError(
                f"{where} is a {type(leaf).__name__}: inputs are tensors or plain Python scalars"
            )
        if isinstance(leaf, torch.Tensor):
            refuse_input(leaf, where, may_have_history=may_have_history)
    return [leaf for _, leaf in paths], spec


def _erase_handed_on(gm: fx.GraphModule) -> None:
    """Erase the views by which ``groups.hand_on_inputs`` hands inputs on: only the order of
    gradient sums is wanted.
    """
    handed_on = [node for node in gm.graph.nodes if HANDED_ON in (node.meta.get("custom") or {})]
    for node in handed_on:
        node.replace_all_uses_with(node.all_input_nodes[0])
        gm.graph.erase_node(node)
    if handed_on:
        gm.recompile()


def _inherit_metadata(gm: fx.GraphModule) -> None:
    """Copy ``custom`` to backward nodes: of the first forward node of their ``seq_nr``, or of
    a nested graph's.
    """
    modules = [
        module for module in gm.modules() if isinstance(module, fx.GraphModule)
    ]  # outer ones first
    nodes = [node for module in modules for node in module.graph.nodes if "seq_nr" in node.meta]
    first: dict[int, dict[str, Any]] = {}
    for node in nodes:
        if direction(node) != BACKWARD:
            first.setdefault(node.meta["seq_nr"], node.meta.get("custom") or {})
    for node in nodes:
        inherits = direction(node) == BACKWARD and not node.meta.get("is_gradient_acc")
        if inherits and (inherited := first.get(node.meta["seq_nr"])):
            node.meta["custom"] = {**node.meta.get("custom", {}), **copy.deepcopy(inherited)}
    for module in modules:
        for caller in module.graph.find_nodes(op="get_attr"):
            nested = getattr(module, str(caller.target), None)
            if isinstance(nested, fx.GraphModule) and caller.meta.get("custom"):
                for node in nested.graph.nodes:
                    if not node.meta.get("custom"):
                        node.meta["custom"] = copy.deepcopy(caller.meta["custom"])
