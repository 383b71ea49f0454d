"""Read ``--gt-model module:function``: graphs of a user's model, on which passes are judged.

The function is called in the world that is up, so it may make a mesh and shard its model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_gtrainer._torch.foreign_graphs import ExportedProgram
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.attack.oracles import RAISED, load_named
from pytest_gtrainer.compiling.record import CompileRecord
from pytest_gtrainer.compiling.recorder import gt_compile
from pytest_gtrainer.graph.bucket_plan import BucketPlan
from pytest_gtrainer.graph.foreign import adopt
from pytest_gtrainer.graph.nodes import input_fqn
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.passes.collectives import reduce_scatter_before_all_reduce_pass
from pytest_gtrainer.references.config import TrainConfig, new_model
from pytest_gtrainer.references.graph import shard_traceably, trace_config
from pytest_gtrainer.tracing.step import TracedStep, trace_step

MakeModel = Callable[[], Any]

_MAY_RETURN = (
    "return (model, inputs) or (model, inputs, step), a TrainConfig, a graph with traced values, "
    "a record of gt_compile, or a dict of graphs by name"
)


class ModelError(ValueError):
    """A model cannot be used; the message says why, and what its function may return."""


@dataclass(frozen=True, slots=True)
class OwnGraph:
    """One graph of a user's model.

    Attributes:
        gm: the graph.
        plan: its bucket plan; empty if the function gives none.
        is_step: it was traced here, so it is a joint graph whose inputs and results have names.
    """

    gm: fx.GraphModule
    plan: BucketPlan = ()
    is_step: bool = False


def load_model(path: str) -> MakeModel:
    """Return the function that ``module:function`` names.

    Raises:
        ValueError: there is no such module or function, or it is a module, not a function that
            makes one.
    """
    found = load_named(path, "--gt-model", "my_models:tiny")
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(
            f"--gt-model={path} is of type {type(found).__name__}, not a function without "
            f"arguments: {_MAY_RETURN}"
        )
    return found


def graphs_of(make: MakeModel, what: str, *, as_traced: bool = False) -> dict[str, OwnGraph]:
    """Call a user's function and return the graphs of its model, by name; "" for a single one.

    Args:
        make: returns what ``ModelError`` lists.
        what: the option and its value, for messages.
        as_traced: leave a step that is traced here as it is; else it is made canonical, as it is
            where the passes of a pipeline get it.

    Raises:
        ModelError: the function raises, its model cannot be traced, or it returns something else.
    """
    try:
        made = make()
        found = _read(made, as_traced)
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from None
    except RAISED as error:
        words = str(error).strip().partition("\n")[0]
        raise ModelError(f"{what}: no graph: {type(error).__name__}: {words}") from error
    for name, own in found.items():
        _refuse_inputs_without_sizes(own.gm, f"{what}, graph {name}" if name else what)
    return found


def _read(made: Any, as_traced: bool) -> dict[str, OwnGraph]:
    """Return the graphs of what a function has made."""
    if isinstance(made, CompileRecord):
        return _stages(made)
    if isinstance(made, TrainConfig):
        step = trace_config(made, shard_traceably(new_model(made), made))
        return {"": _as_own(step, as_traced, made)}
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        return _trace(made, as_traced)
    if isinstance(made, Mapping):
        found = {}
        for name, each in made.items():
            for part, own in _read(each, as_traced).items():
                found[f"{name}.{part}" if part else str(name)] = own
        if not found:
            raise ModelError(f"it returns an empty dict: {_MAY_RETURN}")
        return found
    if isinstance(made, TracedStep):
        return {"": _as_own(made, as_traced)}
    is_graph = isinstance(made, fx.GraphModule | fx.Graph | ExportedProgram)
    if is_graph or isinstance(getattr(made, "gm", None), fx.GraphModule):
        return {"": OwnGraph(adopt(made))}
    if isinstance(made, nn.Module):
        raise ModelError(
            "it returns a model without inputs, and nobody knows their shapes: return "
            "(model, inputs), or (model, inputs, step) with step(model, *inputs) -> loss"
        )
    raise ModelError(f"it returns {type(made).__name__}: {_MAY_RETURN}")


def _trace(made: Sequence[Any], as_traced: bool) -> dict[str, OwnGraph]:
    """Return the joint graph of a model and its inputs; of a compiled model what is recorded."""
    if len(made) not in (2, 3):
        raise ModelError(f"it returns a model and {len(made) - 1} other values: {_MAY_RETURN}")
    model, inputs = made[0], made[1]
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    step = made[2] if len(made) == 3 else loss_of_all
    # ``torch.compile`` of a module is a module that holds it.
    if not hasattr(model, "_orig_mod"):
        return {"": _as_own(trace_step(model, step, inputs), as_traced)}
    with gt_compile() as record:
        loss = step(model, *inputs)
        if loss.requires_grad:
            loss.backward()
    return _stages(record)


def loss_of_all(model: nn.Module, *inputs: Any) -> Tensor:
    """Return a scalar that depends on each floating-point number that a model returns.

    Args:
        model: the model.
        inputs: of its forward.
    """
    results = []
    for leaf in pytree.tree_leaves(model(*inputs)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            results.append(leaf)
    if not results:
        raise ModelError(
            "the model returns no floating-point tensor, so there is no loss: return "
            "(model, inputs, step) with step(model, *inputs) -> loss"
        )
    if len(results) == 1 and results[0].ndim == 0:
        return results[0]
    # A plain sum would have gradients of one, which hide what a pass does to them.
    squares = [result.float().square().mean() for result in results]
    return torch.stack(squares).sum()


def _as_own(step: TracedStep, as_traced: bool, config: TrainConfig | None = None) -> OwnGraph:
    plan: BucketPlan = () if config is None else config.bucket_plan
    gm = step.gm
    if not as_traced:
        gm = canonicalize_graph_pass(gm)
        if config is not None and config.hybrid:
            # DTensor traces the all-reduce between replicas first; FSDP2 reduce-scatters first.
            gm = reduce_scatter_before_all_reduce_pass(gm)
    return OwnGraph(gm, plan, is_step=True)


def _stages(record: CompileRecord) -> dict[str, OwnGraph]:
    """Return the joint graphs of a recorded compilation, by their place if there are several."""
    found = {}
    for compiled in record:
        if "joint" in compiled.stages:
            name = f"{compiled.place}.joint" if len(record) > 1 else "joint"
            found[name] = OwnGraph(adopt(compiled.stages["joint"]))
    if not found:
        raise ModelError(
            "torch.compile made no graph: call the compiled function inside of gt_compile, and "
            "look at record.breaks"
        )
    return found


def _refuse_inputs_without_sizes(gm: fx.GraphModule, what: str) -> None:
    """Refuse a graph whose inputs nobody can make up."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if value is None:
            raise ModelError(
                f"{what}: input {input_fqn(node)} has no traced value (meta['val']): trace the "
                "graph on fake tensors, as make_fx does, or return (model, inputs)"
            )
        sizes: Sequence[Any] = ("none",)
        if isinstance(value, Tensor):
            sizes = (*value.shape, *value.stride())
        if not all(type(size) is int for size in sizes):
            raise ModelError(
                f"{what}: input {input_fqn(node)} is {value}, no tensor of known sizes: trace the "
                "model without dynamic dimensions"
            )
