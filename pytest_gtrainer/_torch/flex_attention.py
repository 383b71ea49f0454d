"""FlexAttention by its dense formula on the CPU, forward and backward.

- ``_validate_device`` refuses CPU tensors that require a gradient. The operator below it has a
  dense backward, which runs where autograd calls it.
- ``_TorchCompileInductorWrapper`` gives the graphs of ``torch.compile`` to Inductor, which has no
  backward of FlexAttention for the CPU.
- ``_compile_submod`` gives the regions of ``regional_inductor`` to Inductor: a trainer that traces
  for itself compiles FlexAttention so.
- ``_apply_kernel_options`` refuses maxima of scores on the CPU. The operator returns them.
- ``_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG`` lets ``flex_attention`` call its operator without
  Dynamo, which lifts what a score function captures: what it captures has no gradient then.
- ``create_fw_bw_graph`` traces the backward of a score function. Ranks on threads do not trace, and
  a dispatch mode would see fake tensors.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention

from pytest_gtrainer._torch import private_names

with private_names():
    from torch import _TorchCompileInductorWrapper
    from torch._ops import HigherOrderOperator
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.passes import regional_inductor

    # Its package has a function of the same name.
    operator = importlib.import_module("torch._higher_order_ops.flex_attention")

ATTRIBUTES = {
    "torch._C": ("_len_torch_dispatch_stack",),
    "torch.nn.attention.flex_attention": (
        "_validate_device",
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "_apply_kernel_options",
    ),
    "torch.fx.passes.regional_inductor": ("_compile_submod",),
    "torch._higher_order_ops.flex_attention": ("create_fw_bw_graph",),
    "torch:_TorchCompileInductorWrapper": ("__call__",),
}


class _CallsOperator:
    """The check whether ``flex_attention`` calls its operator itself, without Dynamo, untraced.

    True on threads other than the main one, where ranks of a simulated world run, and inside a
    dispatch mode, which Dynamo does not enter, unless that traces.
    """

    def __bool__(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return True
        return bool(torch._C._len_torch_dispatch_stack()) and get_proxy_mode() is None


_calls_operator = _CallsOperator()


def _accept(query: Tensor, key: Tensor, value: Tensor) -> None:
    pass


def _calls_flex_attention(gm: fx.GraphModule) -> bool:
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and "flex_attention" in str(node.target):
            return True
    return False


def _without_inductor(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_keep(
        wrapper: Any, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Any:
        if _calls_flex_attention(gm):
            return gm
        return compile_graph(wrapper, gm, inputs, **options)

    return compile_or_keep


def _without_compiled_regions(compile_regions: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_keep(gm: fx.GraphModule, prefix: str) -> Any:
        for node in gm.graph.find_nodes(op="call_module"):
            region = gm.get_submodule(node.target)
            if node.target.startswith(prefix) and _calls_flex_attention(region):
                # Only names with the prefix are compiled.
                gm.delete_submodule(node.target)
                node.target = f"kept{node.target}"
                gm.add_submodule(node.target, region)
        return compile_regions(gm, prefix)

    return compile_or_keep


def _with_maxima(apply: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def options(
        query: Tensor, key: Tensor, value: Tensor, lse: bool, options: Any, aux: Any = None
    ) -> dict[str, Any]:
        wants_maxima = aux is not None and aux.max_scores
        accepted = aux._replace(max_scores=False) if wants_maxima else aux
        applied = apply(query, key, value, lse, options, accepted)
        applied["OUTPUT_MAX"] = wants_maxima
        return applied

    return options


def _without_tracing(trace: Callable[..., Any]) -> Callable[..., Any]:
    def derive(score: Callable[..., Tensor], examples: Any, buffers: Sequence[Any]) -> Any:
        if not _calls_operator:
            return trace(score, examples, buffers)
        for cell in getattr(score, "__closure__", None) or ():
            captured = cell.cell_contents
            if isinstance(captured, Tensor) and captured.requires_grad:
                raise NotImplementedError(
                    "a score function captures a tensor that requires a gradient, which it does "
                    "not get here, in a simulated world or a proof: take real ranks, or detach it"
                )
        return score, _backward_of(score, len(examples) - 1, buffers)

    return derive


def _backward_of(
    score: Callable[..., Tensor], indices: int, buffers: Sequence[Any]
) -> Callable[..., list[Tensor | None]]:
    """Return the backward of a score function, for the score and for buffers that have one."""
    trained = []
    for place, buffer in enumerate(buffers):
        if isinstance(buffer, Tensor) and buffer.requires_grad:
            trained.append(place)

    def backward(value: Tensor, *others: Any) -> list[Tensor | None]:
        given = list(others[indices + 1 :])

        def changed(value: Tensor, *new: Tensor) -> Tensor:
            for place, tensor in zip(trained, new, strict=True):
                given[place] = tensor
            return score(value, *others[:indices], *given)

        _, pull_back = torch.func.vjp(changed, value, *(given[place] for place in trained))
        of_value, *of_buffers = pull_back(others[indices])
        gradients: list[Tensor | None] = [None] * (1 + indices + len(buffers))
        gradients[0] = of_value
        for place, gradient in zip(trained, of_buffers, strict=True):
            gradients[1 + indices + place] = gradient
        return gradients

    return backward


@contextmanager
def dense_on_cpu() -> Iterator[None]:
    """Compute FlexAttention by its dense formula inside, also its backward."""
    inductor = _TorchCompileInductorWrapper.__call__
    replacements = [
        (flex_attention, "_validate_device", _accept),
        (flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", _calls_operator),
        (
            flex_attention,
            "_apply_kernel_options",
            _with_maxima(flex_attention._apply_kernel_options),
        ),
        (
            regional_inductor,
            "_compile_submod",
            _without_compiled_regions(regional_inductor._compile_submod),
        ),
        (operator, "create_fw_bw_graph", _without_tracing(operator.create_fw_bw_graph)),
        (_TorchCompileInductorWrapper, "__call__", _without_inductor(inductor)),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(patch.object(owner, name, replacement))
        yield
