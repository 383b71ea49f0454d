"""Tracing: metadata of the backward, annotations, fake modes.

- ``torch.fx.traceback.annotate`` puts keys into ``node.meta["custom"]`` of nodes traced inside.
- ``torch.fx.traceback.current_meta`` is the dict it edits (only read and restored here), and
  ``_set_autograd_backward`` marks nodes traced inside as the backward's.
- ``torch.compiler._patch_engine_backward`` makes nodes traced in the backward carry
  ``meta["autograd_backward"]`` and the ``seq_nr`` of their forward node; it requires
  ``torch.compiler._non_strict_tracing_context``.
- operators that compile what they run (FlexAttention) make an extent that has changed since the
  last call symbolic, unless ``torch._dynamo.config.automatic_dynamic_shapes`` is off;
- ``FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)`` allows unbacked sizes
  (``.tolist()`` of a fake tensor) and keeps all others static;
- an extent that is an unbacked symbol can be traced symbolically, if the symbol is not still
  pending when the graph's inputs are tracked: ``ShapeEnv.ignore_fresh_unbacked_symbols``. Equal
  extents stay apart, and no example value decides a branch; ``ShapeEnv.simplify`` tells whether an
  extent was fixed during the trace.
- ``DeviceMesh._concatenate`` makes one mesh of two that share the calling rank alone and were cut
  out of one root; and ``_StridedShard(0, split_factor=n)`` is how FSDP2 places a parameter whose
  dim 0 the model shards n times already.
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
    """Static but for data-dependent sizes; with ``real_inputs`` operators may read real tensors,
    and none runs.
    """
    return FakeTensorMode(
        allow_fallback_kernels=not real_inputs,
        allow_non_fake_inputs=real_inputs,
        shape_env=ShapeEnv(),
        static_shapes=True,
    )


def new_extent(mode: FakeTensorMode) -> torch.SymInt:
    """An extent that may be any number from two on: what is broadcast over one is another operator."""
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        extent = mode.shape_env.create_unbacked_symint()
    torch._check(extent >= 2)
    return extent


def is_fixed(extent: torch.SymInt) -> bool:
    """Return whether the trace has decided on one number."""
    return bool(extent.node.shape_env.simplify(extent.node.expr).is_number)


@contextmanager
def tracing_backward_metadata() -> Iterator[None]:
    """Nodes of the backward are marked, and autograd stays on this thread."""
    with ExitStack() as stack:
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(_non_strict_tracing_context())
        stack.enter_context(_patch_engine_backward())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:  # a trace is a function of its arguments, not of earlier calls
            stack.enter_context(dynamo.config.patch(automatic_dynamic_shapes=False))
        yield


def concatenated(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """One mesh of the dimensions of both; a RuntimeError if they share other ranks than this one,
    or have two roots.
    """
    return DeviceMesh._concatenate([outer, inner])


def shard_of_shards(parts: int) -> Placement:
    """How FSDP2 places dim 0 over its own mesh where the model's meshes cut it into ``parts``
    already.
    """
    return _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)


def marked_backward() -> AbstractContextManager[None]:
    """Nodes traced inside carry ``meta["autograd_backward"]``."""
    return fx_traceback._set_autograd_backward()


def current_annotation(key: str) -> Any:
    """Return what ``annotate`` says for ``key`` at this point of the trace, None if nothing."""
    return (fx_traceback.current_meta.get("custom") or {}).get(key)


@dataclass(frozen=True, slots=True)
class AutocastAround:
    """How many blocks of ``torch.autocast`` are open around a trace, and whether they keep casts.

    ``make_fx`` turns the cache of casts off, and a block inside the trace turns it on or off again.
    """

    depth: int = field(default_factory=lambda: _autocast_depth())
    keeps_casts: bool = field(default_factory=torch.is_autocast_cache_enabled)

    def eager_keeps_casts(self) -> bool:
        """Return whether eager code would keep a cast at this point of the trace."""
        depth = _autocast_depth()
        if depth == self.depth:
            return depth > 0 and self.keeps_casts
        return torch.is_autocast_cache_enabled()


def _autocast_depth() -> int:
    """Count the open blocks, also inside an operator, where autocast is off."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


@contextmanager
def without_annotation(key: str) -> Iterator[None]:
    """Nodes traced inside do not carry ``custom[key]``; an inner ``annotate`` still works."""
    custom = fx_traceback.current_meta.get("custom")
    if not custom or key not in custom:
        yield
        return
    fx_traceback.current_meta["custom"] = {k: v for k, v in custom.items() if k != key}
    try:
        yield
    finally:
        fx_traceback.current_meta["custom"] = custom
