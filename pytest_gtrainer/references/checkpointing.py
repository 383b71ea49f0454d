"""Activation checkpointing of a model's layers by ``torch.utils.checkpoint``, alike on both sides of a comparison."""

from __future__ import annotations

import functools

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer.graph.bucket_plan import layer_of
from pytest_gtrainer.graph.nodes import BACKWARD, direction, is_random, node_fqn
from pytest_gtrainer.numerics.determinism import ActivationCheckpointConfig


class CannotRestore(ValueError):
    """A graph would have to put random states back, which no operator of it does."""


def checkpoint_layers(model: nn.Module, config: ActivationCheckpointConfig) -> nn.Module:
    """Let the backward recompute every layer (``layers.0``, ...) of ``model``, in place, before anything shards it.

    Names stay, and what hooks a layer's call (``fully_shard``, annotations) is outside of what is recomputed.

    Raises:
        ValueError: the model has no layers.
    """
    layers = [module for fqn, module in model.named_modules() if fqn and layer_of(fqn) == fqn]
    if not layers:
        outermost = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"the model has no layers such as layers.0 to checkpoint; its outermost are {outermost}")
    for layer in layers:
        recomputed = functools.partial(checkpoint, layer.forward, **config.arguments())
        layer.forward = functools.update_wrapper(recomputed, layer.forward)  # its signature is read: eager_chunked
    return model


def check_random_states(gm: fx.GraphModule, config: ActivationCheckpointConfig | None) -> None:
    """What a checkpoint puts back before it recomputes, a graph cannot: then the backward may not draw.

    Raises:
        CannotRestore: it does, although ``preserve_rng_state`` is asked for.
    """
    if config is None or not config.preserve_rng_state:
        return
    for node in gm.graph.nodes:
        if direction(node) == BACKWARD and is_random(node):
            raise CannotRestore(
                f"{node.target} in the backward of {node_fqn(node)} would draw other random numbers than the forward "
                "did: a graph has no operator that restores their state, so ask for preserve_rng_state=False, on both "
                "sides, or train without dropout"
            )
