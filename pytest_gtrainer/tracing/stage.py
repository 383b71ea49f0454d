"""Trace one stage of a pipeline: its forward and its backward as one graph.

A *tangent* is the gradient of an output, which comes back from the next stage; tangents are inputs
of the graph. The graph, of local tensors, is ``(*state, *inputs, *tangents) -> (*outputs,
*gradients of inputs, *of parameters)``. Its metadata is that of ``trace_step``, with inputs
``tangent0``, outputs ``output0`` and ``gradient_of_input0``, and what ``graph.nodes`` says of
stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Placement

from pytest_gtrainer._torch.tracing import annotate
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.nodes import STAGE_OUTPUTS
from pytest_gtrainer.tracing.model import KEY, LOSS_FQN, ModelState, annotate_module_fqns
from pytest_gtrainer.tracing.refusals import refuse_model
from pytest_gtrainer.tracing.sharding import accumulating_gradients
from pytest_gtrainer.tracing.step import Tracing, flatten_inputs, mode_of, rank_of


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage as a graph.

    Attributes:
        gm: the graph, ``(*state, *inputs, *tangents) -> (*outputs, *gradients of inputs, *of
            parameters)``.
        example_inputs: fake tensors of the graph's inputs.
        parameter_fqns, buffer_fqns: names of the state, in the order of the graph's inputs.
        trainable_fqns: parameters that require a gradient, in the order of the results.
        input_spec, output_spec: pytrees of the stage's inputs and outputs.
        differentiated: indices of the input leaves whose gradients the graph gives.
        tangents: indices of the output leaves that take a tangent.
        gradient_placements, rank: as for ``TracedStep``.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    parameter_fqns: tuple[str, ...]
    buffer_fqns: tuple[str, ...]
    trainable_fqns: tuple[str, ...]
    input_spec: pytree.TreeSpec
    output_spec: pytree.TreeSpec
    differentiated: tuple[int, ...]
    tangents: tuple[int, ...]
    gradient_placements: tuple[tuple[Placement, ...] | None, ...] = ()
    rank: int | None = None
    twin: None = None

    def with_graph(self, gm: fx.GraphModule) -> "TracedStage":
        """Return the same stage with a rewritten graph."""
        return replace(self, gm=gm)


def trace_stage(
    module: nn.Module,
    inputs: Sequence[Any],
    *,
    step: Callable[..., Any] | None = None,
    reuse_gathers: bool = True,
) -> TracedStage:
    """Trace a stage of a pipeline, forward and backward, into one graph, on fake tensors.

    Parameters that ``data_parallel`` has sharded reduce their gradients after the cast to the
    reduce dtype, so that microbatches can be added in between, as FSDP2 adds them;
    ``split_stage_graph`` cuts the graph there.

    Args:
        module: the stage, with parameters plain or by ``data_parallel``.
        inputs: pytrees of tensors, real, fake or meta, and plain Python scalars. The graph gives
            the gradient of each tensor that requires one: that of activations ``[microbatch, ...,
            width]``, and not that of tokens.
        step: ``step(module, *inputs)`` gives the outputs, a tensor or a pytree of tensors; by
            default those of the module itself. For the last stage it computes the loss, a scalar,
            from labels that are an input.
        reuse_gathers: as for ``trace_step``.

    Raises:
        TypeError: an input leaf is neither a tensor nor a plain scalar, or an output is no plain
            tensor.
        ValueError: there are no inputs; nothing requires a gradient, or no output depends on what
            does; or ``trace_step`` would refuse the stage, too (wrapped modules, hooks on
            parameters and inputs, ``backward`` in the step).
    """
    check_switches(reuse_gathers=reuse_gathers)
    if isinstance(inputs, torch.Tensor):
        raise TypeError(
            "inputs is a tensor: give a sequence of the stage's inputs, (tensor,) for one"
        )
    refuse_model(module, step)
    flat, spec = flatten_inputs(tuple(inputs), may_have_history=True)
    if not any(isinstance(leaf, torch.Tensor) for leaf in flat):
        raise ValueError(
            f"the stage {type(module).__name__} has no inputs: give example tensors of what a "
            "microbatch hands to it, torch.empty(2, 16, 64, requires_grad=True) for activations"
        )
    state = ModelState.of(module)
    differentiated = []
    for index, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            differentiated.append(index)
    if not differentiated and not state.trainable:
        raise ValueError(
            "neither a parameter nor an input of the stage requires a gradient: there is no "
            "backward"
        )
    tracing = _StageTracing(
        module,
        step or _call_module,
        state,
        mode_of([*state.tensors, *flat]),
        reuse_gathers,
        spec=spec,
        differentiated=tuple(differentiated),
    )
    with accumulating_gradients():
        gm, fakes = tracing.run([*flat, *tracing.tangents_of(flat)], spec)
    # Both forwards, that on fake tensors and the traced one, have found the same.
    [(output_spec, tangents)] = set(tracing.found)
    return TracedStage(
        gm,
        fakes,
        tuple(state.parameters),
        tuple(state.buffers),
        state.trainable,
        spec,
        output_spec,
        tuple(differentiated),
        tangents,
        tuple(tracing.gradient_placements),
        rank_of(state),
    )


def _call_module(module: nn.Module, *inputs: Any) -> Any:
    return module(*inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageTracing(Tracing):
    """Traces of one stage.

    Attributes:
        spec: the pytree of its inputs.
        differentiated: indices of the input leaves whose gradients the graph gives.
        found: by each forward, the pytree of the outputs and the indices of those that take a
            tangent.
    """

    spec: pytree.TreeSpec
    differentiated: tuple[int, ...]
    found: list[tuple[pytree.TreeSpec, tuple[int, ...]]] = field(default_factory=list)

    def tangents_of(self, flat: list[Any]) -> list[torch.Tensor]:
        """Return fake tangents of the outputs, by a forward on fake tensors."""
        fakes = self.fakes_of(flat)
        # Sizes that data decides are symbols of this forward alone.
        discarded = self.mode.shape_env.ignore_fresh_unbacked_symbols()
        with annotate_module_fqns(self.model), self.mode, discarded, self._entered(fakes):
            outputs, _ = self._run_forward(fakes)
            return [torch.empty_like(output) for output in outputs if output.requires_grad]

    def _run_forward(self, flat: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs, and the inputs whose gradients are wanted."""
        first = len(self.state.fqns)
        inputs = list(flat[first : first + self.spec.num_leaves])
        for index in self.differentiated:
            inputs[index] = inputs[index].detach().requires_grad_()
        with annotate({KEY: LOSS_FQN}):
            result = self.step(self.model, *pytree.tree_unflatten(inputs, self.spec))
        outputs, spec = pytree.tree_flatten(result)
        tangents = []
        for index, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):
                raise TypeError(
                    f"output {index} of the stage is a {type(output).__name__}: stages hand plain "
                    "tensors to each other, of a DTensor its to_local()"
                )
            if output.requires_grad:
                tangents.append(index)
        if not tangents:
            raise ValueError(
                "no output of the stage depends on a parameter or an input that requires a "
                "gradient: is it under no_grad?"
            )
        self.found.append((spec, tuple(tangents)))
        return outputs, [inputs[index] for index in self.differentiated]

    def _joint(self, spec: pytree.TreeSpec, *flat: Any) -> tuple[torch.Tensor | None, ...]:
        """Run the stage forward and backward: the function that is traced."""
        with self._entered(flat) as tensors:
            outputs, inputs = self._run_forward(flat)
            wanted = [*inputs, *(tensor for tensor in tensors if tensor.requires_grad)]
            differentiable = [output for output in outputs if output.requires_grad]
            values = [output.detach() for output in outputs]
            tangents = flat[len(flat) - len(differentiable) :]
            return *values, *self._gradients(differentiable, wanted, tangents)

    def _name(self, gm: fx.GraphModule, num_inputs: int) -> None:
        spec, tangents = self.found[-1]
        names = [str(index) for index in range(self.spec.num_leaves)]
        names += [f"tangent{index}" for index in tangents]
        self._name_inputs(gm, names)
        results = [f"output{index}" for index in range(spec.num_leaves)]
        results += [f"gradient_of_input{index}" for index in self.differentiated]
        meta = gm.graph.output_node().meta
        meta["gt_outputs"] = (*results, *self.state.trainable)
        meta[STAGE_OUTPUTS] = (spec.num_leaves, len(self.differentiated))
