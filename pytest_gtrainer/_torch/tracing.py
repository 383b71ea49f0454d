"""Tracing: metadata of the backward, annotations, fake modes, placements.

``torch.fx.traceback`` keeps a dict that each traced node copies into its ``meta``. ``annotate``
puts keys into ``meta["custom"]``; it is the one writer of that dict outside this module.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.modes import autocast_depth

with private_names():
    from torch.compiler import _non_strict_tracing_context, _patch_engine_backward
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.fx import traceback as fx_traceback
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
    from torch.fx.traceback import annotate

from pytest_gtrainer._torch.values import FakeTensorMode

ATTRIBUTES = {
    "torch": ("_check",),
    "torch.fx.traceback": ("_set_autograd_backward",),
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": (
        "create_unbacked_symint",
        "ignore_fresh_unbacked_symbols",
        "simplify",
    ),
    "torch.distributed.device_mesh:DeviceMesh": ("_concatenate",),
}

__all__ = ["GuardOnDataDependentSymNode", "annotate", "make_fx"]


def new_fake_mode(real_inputs: bool = False) -> FakeTensorMode:
    """Return a fake mode in which all sizes are static but those that depend on data.

    With ``real_inputs`` operators may read real tensors, and no kernel runs as a fallback.
    """
    # A shape environment allows unbacked sizes, as ``.tolist()`` of a fake tensor makes them.
    return FakeTensorMode(
        allow_fallback_kernels=not real_inputs,
        allow_non_fake_inputs=real_inputs,
        shape_env=ShapeEnv(),
        static_shapes=True,
    )


def new_extent(mode: FakeTensorMode) -> torch.SymInt:
    """Return an extent that may be any number from two on."""
    # An unbacked symbol: equal extents stay apart, and no example decides a branch. It must not be
    # pending when the graph's inputs are tracked.
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        extent = mode.shape_env.create_unbacked_symint()
    # An extent of one is broadcast, by other operators.
    torch._check(extent >= 2)
    return extent


def is_fixed(extent: torch.SymInt) -> bool:
    """Return whether the trace has decided on one number."""
    return bool(extent.node.shape_env.simplify(extent.node.expr).is_number)


@contextmanager
def tracing_backward_metadata() -> Iterator[None]:
    """Mark nodes of the backward, and keep autograd on this thread.

    A node traced in the backward has ``meta["autograd_backward"]``, and the ``seq_nr`` of the node
    of the forward that it belongs to.
    """
    with ExitStack() as stack:
        stack.enter_context(fx_traceback.preserve_node_meta())
        # ``_patch_engine_backward`` requires it.
        stack.enter_context(_non_strict_tracing_context())
        stack.enter_context(_patch_engine_backward())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            # Operators that compile (FlexAttention) would make an extent symbolic that has changed
            # since an earlier call.
            stack.enter_context(dynamo.config.patch(automatic_dynamic_shapes=False))
        yield


def concatenated(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the dimensions of both.

    Raises RuntimeError if they share other ranks than this one, or were cut out of two roots.
    """
    return DeviceMesh._concatenate([outer, inner])


def shard_of_shards(parts: int) -> Placement:
    """Return FSDP2's placement of a dim 0 that the model's meshes cut into ``parts`` already."""
    return _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)


def marked_backward() -> AbstractContextManager[None]:
    """Mark nodes that are traced inside by ``meta["autograd_backward"]``."""
    return fx_traceback._set_autograd_backward()


def current_annotation(key: str) -> Any:
    """Return the annotation for ``key`` at this point of the trace; None without one."""
    return (fx_traceback.current_meta.get("custom") or {}).get(key)


@dataclass(frozen=True, slots=True)
class AutocastAround:
    """The number of ``torch.autocast`` blocks around a trace, and whether they keep casts.

    ``make_fx`` turns the cache of casts off, and a block inside the trace turns it on or off again.
    """

    depth: int = field(default_factory=autocast_depth)
    keeps_casts: bool = field(default_factory=torch.is_autocast_cache_enabled)

    def eager_keeps_casts(self) -> bool:
        """Return whether eager code would keep a cast at this point of the trace."""
        depth = autocast_depth()
        if depth == self.depth:
            return depth > 0 and self.keeps_casts
        return torch.is_autocast_cache_enabled()


@contextmanager
def without_annotation(key: str) -> Iterator[None]:
    """Leave ``custom[key]`` out of nodes traced inside; an inner ``annotate`` still works."""
    custom = fx_traceback.current_meta.get("custom")
    if not custom or key not in custom:
        yield
        return
    fx_traceback.current_meta["custom"] = {k: v for k, v in custom.items() if k != key}
    try:
        yield
    finally:
        fx_traceback.current_meta["custom"] = custom
