"""Trace a training step (forward, loss, backward) into one joint FX graph.

Its inputs are the local tensors of parameters, buffers and user inputs, in this order. Its outputs
are the loss and the gradients of the parameters that require one, in ``named_parameters`` order.
Metadata, besides what ``graph.nodes`` names:

- ``gt_input`` of a placeholder is ``{"kind": "parameter" | "buffer" | "input", "fqn": ...}``.
- On the output node, ``gt_outputs`` names the outputs, ``gt_managed_order`` the parameters as FSDP2
  manages them, and ``gt_tied`` the parameters that several modules hold, by the first.
"""

import copy
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
from pytest_gtrainer._torch.values import (
    FakeTensor,
    FakeTensorMode,
    local_part,
    pytree,
    strides_that_count,
)
from pytest_gtrainer.environment import collector_off
from pytest_gtrainer.facts import check_switches, counted, long_work
from pytest_gtrainer.graph.bucket_plan import managed_order_of, tied_parameters
from pytest_gtrainer.graph.nodes import (
    AFTERWARDS,
    BACKWARD,
    DYNAMIC_DIMS,
    GATHERS_ONCE,
    HANDED_ON,
    direction,
    graphs_in,
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
    refuse_operators,
    refuse_reentrant,
    refuse_unknown_tensors,
    refusing_random_states,
    refusing_side_effects,
)
from pytest_gtrainer.tracing.sharding import reusing_gathers

Step = Callable[..., torch.Tensor]


class TwinInputs(Protocol):
    """An object that makes the inputs of a second trace from those of the first: ``ChunkConfig``,
    for example.
    """

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
        handed_over: after ``trace_once``, "from another rank", or "traced here" and for whom or
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
        """Return the same step with a rewritten graph, which has no twin."""
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
        """Run the step on ``model``; return all that it computes and changes on this rank, by name.

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
        changed = {}
        results: list[torch.Tensor | None] = []
        with random_states_kept(), torch.no_grad():
            random_before = random_state()
            try:
                results += self._run(model, state, inputs)
                for name, now in random_state().items():
                    if not torch.equal(now, random_before.get(name, now)):
                        changed[f"random state of {name}{AFTERWARDS}"] = now
            finally:  # a step that raises may have written to a buffer before
                written = [each for each in kept if not same_bytes(*each[1:])]
                if written:  # a result may be a view of what is put back
                    results = [None if each is None else each.clone() for each in results]
                for name, value, _ in written:
                    changed[f"{name}{AFTERWARDS}"] = value.clone()
                for _, value, before in written:
                    value.copy_(before)

        found = {"loss": results[0]}
        for index in self._order_of_gradients():
            gradient = results[1 + index]
            if gradient is not None:
                found[f"gradient of {self.trainable_fqns[index]}"] = gradient
        return found | changed

    def _order_of_gradients(self) -> list[int]:
        """Return the indices of the gradients in the order in which the graph computes them."""
        indices = list(range(len(self.trainable_fqns)))
        graph = getattr(self.gm, "graph", None)
        if graph is None:  # a compiled function does not show its order
            return indices
        places = {node: place for place, node in enumerate(graph.nodes)}
        _, *gradients = graph.output_node().args[0]
        return sorted(indices, key=lambda index: places.get(gradients[index], 0))

    def _input_names(self) -> list[str]:
        inputs = [f"input {index}" for index in range(self.input_spec.num_leaves)]
        return [*self.state_fqns, *inputs]

    def _run(
        self, model: nn.Module, state: ModelState, inputs: tuple[Any, ...]
    ) -> list[torch.Tensor]:
        """Run the graph; return the loss, then gradients in the order of ``trainable_fqns``."""
        if self.rank is not None and dist.is_initialized() and dist.get_rank() != self.rank:
            raise ValueError(
                f"the step was traced as rank {self.rank} and this is rank {dist.get_rank()}: "
                "a graph holds the group names and pads of its rank, so trace on every rank"
            )
        refuse_fake(self.gm, "the traced step")
        refuse_model(model)
        leaves, _ = flatten_inputs(inputs)
        flat = [*map(local, state.tensors), *leaves]
        self._check(state, inputs, flat)
        mode = RunMode.of(model, flat)
        self.mode.refuse_other(mode)
        facts.notify("replay", gm=self.gm, inputs=flat)
        run = self.gm
        if isinstance(run, fx.GraphModule):
            # Not a call of the module: hooks of all modules are in the graph, and would run twice.
            run = run.forward
        with torch.no_grad(), mode.without_autocast():
            results = run(*flat)
        expected = 1 + len(self.trainable_fqns)
        if not isinstance(results, list | tuple):
            returned = f"a {type(results).__name__}, not {expected}"
        elif len(results) != expected:
            returned = str(len(results))
        else:
            return list(results)
        raise ValueError(
            f"the graph returns {returned} results, the step has {expected}, loss and gradients: "
            "did a pass drop or add outputs?"
        )

    def _check(self, state: ModelState, inputs: tuple[Any, ...], flat: list[Any]) -> None:
        """Check what the graph has baked in: the state, and the structure, shapes, dtypes and
        scalars of the inputs.
        """
        if state.fqns != self.state_fqns:
            missing = sorted(set(self.state_fqns) - set(state.fqns))
            extra = sorted(set(state.fqns) - set(self.state_fqns))
            differs = "its state is in another order"
            if missing or extra:
                differs = f"missing {missing}, unexpected {extra}"
            raise ValueError(f"the model is not the traced one: {differs}")
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
        for name, value, traced in zip(self._input_names(), flat, self.example_inputs, strict=True):
            now, then = _describe(value), _describe(traced)
            if now != then:
                raise ValueError(f"{name} is {now}, the step was traced with {then}: trace again")


def add_gradients(
    state: ModelState,
    fqns: Sequence[str],
    gradients: Sequence[torch.Tensor | None],
    placements: Sequence[tuple[Placement, ...] | None],
) -> None:
    """Add local gradients to the ``.grad`` of a model's parameters, as autograd would."""
    placements = placements or (None,) * len(gradients)
    for fqn, gradient, placed in zip(fqns, gradients, placements, strict=True):
        if gradient is None:
            continue
        parameter, existing = state.parameters[fqn], state.parameters[fqn].grad
        like = gradient
        if placed is None or placed == getattr(parameter, "placements", placed):
            like = local(parameter)
        # torch checks the dtype of a new .grad.
        has_dtype = existing is None or gradient.dtype == existing.dtype
        if gradient.shape != like.shape or not has_dtype:
            kind = tensor_text(like if existing is None else local(existing))
            raise ValueError(
                f"the graph gives {fqn} a gradient of {tensor_text(gradient)}, and its .grad is "
                f"{kind}: did a pass change its shape or dtype?"
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
    """Describe an input as far as a graph may have baked it in: a tensor, all but its values."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = tensor_text(value)
    if value.layout is not torch.strided:
        text += f" of layout {value.layout}"
    elif not value.is_contiguous():
        text += f" with strides {list(strides_that_count(value))}"
    if value.device.type != "cpu":
        text += f" on {value.device.type}"
    return text


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
    does not change. ``step`` ends with the loss; with microbatches, with the sum of their losses.
    What a graph would lose is refused, see ``Raises``.

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
    check_switches(reuse_gathers=reuse_gathers)
    if isinstance(inputs, torch.Tensor):
        raise TypeError(
            "inputs is a tensor: give a sequence of the step's inputs, (tensor,) for one"
        )
    refuse_model(model, step)
    flat_inputs, spec = flatten_inputs(tuple(inputs))
    state = ModelState.of(model)
    if not state.trainable:
        raise ValueError(
            "no parameter of the model requires a gradient, so there is no backward to trace: "
            "call requires_grad_() on what is to be trained"
        )
    tracing = Tracing(model, step, state, mode_of([*state.tensors, *flat_inputs]), reuse_gathers)
    _check_places(dynamic_dims or {}, flat_inputs)
    gm, fakes = tracing.run(flat_inputs, spec, dynamic_dims or {})
    mode = RunMode.of(model, fakes)
    placements = tuple(tracing.gradient_placements)  # before those of the twin
    if twin_inputs is None and chunk is not None:
        twin_inputs = chunk.twin_inputs(inputs)
    twin = None if twin_inputs is None else tracing.run_twin(tuple(twin_inputs), spec)
    names = tuple(state.parameters), tuple(state.buffers), state.trainable
    return TracedStep(gm, fakes, *names, spec, placements, rank_of(state), twin, mode=mode)


def _check_places(dynamic_dims: DynamicDims, flat_inputs: Sequence[Any]) -> None:
    """Raise a ValueError unless each place of a dynamic dimension is one of an input."""
    facts.check_type(dynamic_dims, Mapping, "dynamic_dims", 'places by name, {"batch": [(0, 0)]}')
    for name, places in dynamic_dims.items():
        is_known = bool(places)
        for place in places:
            facts.check_type(place, tuple, f"a place of dynamic_dims[{name!r}]", "(input, dim)")
            leaf, dim = place
            has_leaf = leaf in range(len(flat_inputs))
            ranks = range(getattr(flat_inputs[leaf], "ndim", 0)) if has_leaf else ()
            is_known = is_known and dim in ranks
        if not is_known:
            raise ValueError(
                f"dynamic_dims[{name!r}] is {places}: give places of inputs, (leaf, dimension), "
                f"each counted from 0; there are {counted(len(flat_inputs), 'input')}"
            )


def mode_of(tensors: Sequence[Any]) -> FakeTensorMode:
    """Return the mode of the first fake tensor; without any, a new mode."""
    for tensor in tensors:
        plain = local_part(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(plain, FakeTensor):
            return plain.fake_mode
    return new_fake_mode()


def rank_of(state: ModelState) -> int | None:
    """Return the rank that a sharded model is traced as; None without sharded parameters."""
    if any(isinstance(tensor, DTensor) for tensor in state.tensors):
        return dist.get_rank()
    return None


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
        """Trace the joint graph; return it and fake tensors of its inputs, of the given extents."""
        fakes = self.fakes_of(flat_inputs)
        inputs = fakes[len(self.state.fqns) :]
        described = [_describe(fake) for fake in inputs]
        extents = {name: new_extent(self.mode) for name in dynamic_dims}
        with (
            collector_off(),
            annotate_module_fqns(self.model),
            tracing_backward_metadata(),
            # Anomaly mode would ask each gradient whether it is NaN, and fake tensors cannot say.
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
            self.mode,
            long_work(f"tracing a step of {type(self.model).__name__}"),
        ):
            symbolic = self._symbolic(fakes, dynamic_dims, extents)
            try:
                gm = make_fx(partial(self._joint, spec))(*symbolic)
            except GuardOnDataDependentSymNode as error:
                if not extents:
                    raise ValueError(
                        f"the step decides in Python by the value of a tensor{_place(error)}, and "
                        "a graph holds one course of it: use torch.where, or draw and decide "
                        "outside of the step (nn.init.trunc_normal_ is such a decision)"
                    ) from error
                raise FixedExtentError(
                    f"the step asks for the number of a size that is not known{_place(error)}: "
                    f"{str(error).splitlines()[0]} Keep Python's decisions off dynamic extents, or "
                    "trace a static twin (chunk=) instead"
                ) from error
            except RuntimeError as error:
                refuse_compiled_code(error, _place(error))
                raise
            except AssertionError as error:
                refuse_unknown_tensors(error, _place(error))
                raise
        refuse_operators(gm)
        for index, (fake, before) in enumerate(zip(inputs, described, strict=True)):
            if _describe(fake) != before:
                raise ValueError(
                    f"the step changes input {index} in place from {before} to {_describe(fake)} "
                    "(t_(), resize_(), ...), and a replay would do so to the caller's tensor: "
                    "use the form that returns a tensor, as t()"
                )
        fixed = [f"{name} to {int(extent)}" for name, extent in extents.items() if is_fixed(extent)]
        if fixed:
            raise FixedExtentError(
                f"the step fixes the dynamic dimension {', '.join(fixed)}: take extents from "
                "x.shape[i], or write -1 in a view, and name every input that has the dimension in "
                "dynamic_dims"
            )
        _erase_handed_on(gm)
        _inherit_metadata(gm)
        self._name(gm, len(flat_inputs))
        if dynamic_dims:
            traced_extents = {}
            for name, places in dynamic_dims.items():
                leaf, dim = places[0]
                traced_extents[name] = extents[name], flat_inputs[leaf].shape[dim]
            gm.graph.output_node().meta[DYNAMIC_DIMS] = traced_extents
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
                f"the step cannot be traced on its twin's inputs ({described}){_place(error)}: "
                f"{error}\n"
                "Take extents from x.shape[i], or write -1 in a view, where the model has a fixed "
                "number"
            ) from error
        return gm

    def fakes_of(self, flat_inputs: list[Any]) -> list[Any]:
        """Return the state and the inputs as fake tensors, and scalars as they are."""
        device = "cpu"
        for tensor in self.state.tensors:
            if isinstance(tensor, DTensor):
                device = tensor.device_mesh.device_type
        values = [*map(local, self.state.tensors), *flat_inputs]
        return [self._fake(value, device) for value in values]

    def _fake(self, value: Any, device: str) -> Any:
        """Return a fake tensor of this mode, that of a meta tensor on ``device``; a scalar as it
        is.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, FakeTensor):
            return value.detach()  # one that is given twice stands for two inputs
        if value.is_meta:
            with self.mode:
                return torch.empty_strided(
                    value.size(), value.stride(), dtype=value.dtype, device=device
                )
        return self.mode.from_tensor(value.detach(), static_shapes=True)

    def _symbolic(
        self, fakes: list[Any], dynamic_dims: DynamicDims, extents: Mapping[str, torch.SymInt]
    ) -> list[Any]:
        """Return the fake inputs with symbols for the extents of dynamic dimensions, contiguous."""
        shapes: dict[int, list[Any]] = {}
        for name, places in dynamic_dims.items():
            for leaf, dim in places:
                index = len(self.state.fqns) + leaf
                shape = shapes.setdefault(index, list(fakes[index].shape))
                shape[dim] = extents[name]
        symbolic = list(fakes)
        for index, shape in shapes.items():
            fake = fakes[index]
            if not fake.is_contiguous():
                raise ValueError(
                    f"input {index - len(self.state.fqns)} has a dynamic dimension and strides "
                    f"{fake.stride()}: give its contiguous()"
                )
            with self.mode:
                symbolic[index] = torch.empty(shape, dtype=fake.dtype, device=fake.device)
        return symbolic

    @contextmanager
    def _entered(self, flat: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
        """Let the model use a graph's state, the first of ``flat``, inside.

        Yields the tensors of the state, which require a gradient if the model's own do.
        """
        state = self.state
        tensors = []
        for tensor, own in zip(flat[: len(state.fqns)], state.tensors, strict=True):
            with torch.no_grad():
                if isinstance(own, DTensor):
                    tensor = rewrap(tensor, own)
                else:  # the input itself must not become a leaf that requires a gradient
                    tensor = tensor.view_as(tensor)
            tensors.append(tensor.requires_grad_(own.requires_grad))
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
        """Return local gradients of ``wanted``, the last of which are the trainable parameters."""
        refuse_reentrant(outputs)
        gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        self.gradient_placements.clear()
        for gradient in gradients[len(gradients) - len(self.state.trainable) :]:
            placements = gradient.placements if isinstance(gradient, DTensor) else None
            self.gradient_placements.append(placements)
        with marked_backward(), torch.no_grad():
            return [None if gradient is None else local(gradient) for gradient in gradients]

    def _joint(self, spec: pytree.TreeSpec, *flat: Any) -> tuple[torch.Tensor | None, ...]:
        """Run the step on local tensors; return loss and local gradients, None without a gradient.

        This is the function that is traced.
        """
        inputs = pytree.tree_unflatten(list(flat[len(self.state.fqns) :]), spec)
        with self._entered(flat) as tensors:
            with annotate({KEY: LOSS_FQN}):
                loss = self.step(self.model, *inputs)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    found = type(loss).__name__
                    if isinstance(loss, torch.Tensor):
                        found = str(tuple(loss.shape))
                    raise ValueError(f"the step must return a scalar loss, it returned {found}")
                if not loss.requires_grad:
                    raise ValueError(
                        "the loss does not depend on a parameter that requires a gradient: "
                        "is the step under no_grad?"
                    )
                _refuse_partial(loss)
                value = local(loss.detach())
            with marked_backward(), annotate({KEY: LOSS_FQN}):
                seed = torch.ones_like(loss)
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            return value, *self._gradients([loss], wanted, [seed])

    def _name(self, gm: fx.GraphModule, num_inputs: int) -> None:
        """Name inputs and results in their metadata."""
        self._name_inputs(gm, [str(index) for index in range(num_inputs)])
        gm.graph.output_node().meta["gt_outputs"] = ("loss", *self.state.trainable)

    def _name_inputs(self, gm: fx.GraphModule, inputs: Sequence[str]) -> None:
        """Name the state and the inputs, and note what a reader of the graph asks of the model."""
        names = [("parameter", fqn) for fqn in self.state.parameters]
        names += [("buffer", fqn) for fqn in self.state.buffers]
        names += [("input", name) for name in inputs]
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, (kind, fqn) in zip(placeholders, names, strict=True):
            node.meta["gt_input"] = {"kind": kind, "fqn": fqn}
        output = gm.graph.output_node()
        output.meta["gt_managed_order"] = tuple(managed_order_of(self.model))
        output.meta["gt_tied"] = tied_parameters(self.model)
        output.meta[GATHERS_ONCE] = self.reuse_gathers


def _refuse_partial(loss: torch.Tensor) -> None:
    """Refuse a loss of which each rank has a term: the graph would return that of this rank."""
    if isinstance(loss, DTensor) and any(each.is_partial() for each in loss.placements):
        raise ValueError(
            f"the step returns a loss that ranks have not reduced, a DTensor of placements "
            f"{loss.placements}: return loss.full_tensor()"
        )


def _place(error: BaseException) -> str:
    """Return where the user's code raised, " at FILE:LINE"; "" if it did not.

    That is the innermost frame that is neither torch's nor ours.
    """
    folders = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
    # Not ``torchtitan``, which may lie beside torch.
    others = (*(folder + os.sep for folder in folders), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f" at {frame.filename}:{frame.lineno}"
    return ""


def flatten_inputs(
    inputs: tuple[Any, ...], *, may_have_history: bool = False
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the tree of a step's inputs; refuse what a trace cannot take.

    ``may_have_history`` allows inputs that require a gradient.
    """
    paths, spec = pytree.tree_flatten_with_path(inputs)
    for path, leaf in paths:
        where = "inputs" + pytree.keystr(path)
        if isinstance(leaf, nn.Module):
            raise TypeError(
                f"{where} is a module ({type(leaf).__name__}): "
                "pass the model as the first argument only"
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
    """Erase the views of ``groups.hand_on_inputs``, which has fixed the order of gradient sums."""
    handed_on = [node for node in gm.graph.nodes if HANDED_ON in (node.meta.get("custom") or {})]
    for node in handed_on:
        node.replace_all_uses_with(node.all_input_nodes[0])
        gm.graph.erase_node(node)
    if handed_on:
        gm.recompile()


def _inherit_metadata(gm: fx.GraphModule) -> None:
    """Give backward nodes the ``custom`` metadata of the first forward node of their ``seq_nr``."""
    graphs = graphs_in(gm)
    forward: dict[int, dict[str, Any]] = {}
    backward = []
    for module in graphs:
        for node in module.graph.nodes:
            if "seq_nr" not in node.meta:
                continue
            if direction(node) != BACKWARD:
                forward.setdefault(node.meta["seq_nr"], node.meta.get("custom") or {})
            elif not node.meta.get("is_gradient_acc"):
                backward.append(node)
    for node in backward:
        inherited = forward.get(node.meta["seq_nr"])
        if inherited:
            node.meta["custom"] = {**node.meta.get("custom", {}), **copy.deepcopy(inherited)}
    _inherit_from_callers(graphs)


def _inherit_from_callers(graphs: Sequence[fx.GraphModule]) -> None:
    """Give nodes of nested graphs without ``custom`` that of the node which names their graph."""
    for module in graphs:  # outer graphs come first
        for caller in module.graph.find_nodes(op="get_attr"):
            nested = getattr(module, str(caller.target), None)
            custom = caller.meta.get("custom")
            if not custom or not isinstance(nested, fx.GraphModule):
                continue
            for node in nested.graph.nodes:
                if not node.meta.get("custom"):
                    node.meta["custom"] = copy.deepcopy(custom)
