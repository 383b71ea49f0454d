"""torch.compile, watched from outside.

Most is read from the log ``torch.__trace``, which ``TORCH_TRACE`` and tlparse read, too. Each
record has ``metadata``, and a ``payload`` that is text or JSON. An event ``chromium_event`` is
logged where a phase or a pass begins ("ph" is "B") and ends ("E"), in its thread; passes are named
``pass.<passes of the stage>.<pass>``.

The options of a compilation are in no log. While a recorder is open, a function of its own stands
in the place of Inductor's ``compile_fx``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.utils import counters, detect_fake_mode
    from torch._functorch import config as functorch_config
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._guards import CompileContext
    from torch._inductor import compile_fx as compile_fx_module
    from torch._inductor import config as inductor_config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
    from torch._inductor.virtualized import V

ATTRIBUTES = {
    "torch._inductor.compile_fx": (
        "compile_fx",
        "compile_fx_inner",
        "view_to_reshape",
        "_recursive_post_grad_passes",
    ),
    "torch._guards:CompileContext": ("current_compile_id",),
    "torch._dynamo": ("reset",),
    "torch._inductor.config": ("patch",),
    "torch._functorch.config": ("patch",),
    "torch._dynamo.config": ("patch",),
    "torch._inductor.virtualized:V": ("set_fake_mode",),
}

__all__ = ["CustomGraphPass", "Unsupported"]

compile_fx_inner = compile_fx_module.compile_fx_inner

COMPILED_GRAPH = "dynamo_output_graph"
EVENT = "chromium_event"
CODE = "inductor_output_code"
BREAK = "dynamo_graph_break_reason"
RECOMPILE = "recompile_reasons"
JOINT_PASSES = "_recursive_joint_graph_passes"
POST_GRAD_PASSES = "_recursive_post_grad_passes"
TRACE_LOG = logging.getLogger("torch.__trace")

CompileFx = Callable[..., Any]


class Watching(CustomGraphPass):
    """A pass of Inductor that changes nothing, and calls ``see`` with each graph."""

    def __init__(self, name: str, see: Callable[[fx.GraphModule], None]) -> None:
        self.name, self.see = name, see

    def __call__(self, graph: fx.Graph) -> None:
        self.see(graph.owning_module)

    def uuid(self) -> str:
        return self.name


def current_compile_id() -> str:
    """Return Dynamo's id of the compilation, such as "0/1"; "-" for Inductor without Dynamo."""
    return str(CompileContext.current_compile_id() or "-")


def own_passes(setting: str) -> list[Any]:
    """Return the user's passes in a setting of Inductor such as ``post_grad_custom_post_pass``."""
    # The setting may be a switch instead of passes.
    given = get_custom_graph_passes(getattr(inductor_config, setting, None))
    return [each for each in given if callable(each)]


@contextmanager
def heard_by(handler: logging.Handler) -> Iterator[None]:
    """Give the structured trace to a handler alone."""
    # Handlers of parents would capture it: pytest's would fill the log of a failed test.
    propagates, TRACE_LOG.propagate = TRACE_LOG.propagate, False
    TRACE_LOG.addHandler(handler)
    try:
        yield
    finally:
        TRACE_LOG.removeHandler(handler)
        TRACE_LOG.propagate = propagates


@contextmanager
def instead_of_compile_fx(made: Callable[[CompileFx], CompileFx]) -> Iterator[None]:
    """Let ``torch.compile`` call ``made(compile_fx)`` in the place of Inductor's ``compile_fx``.

    It is called with Dynamo's graph and the user's options. Its ``inner_compile`` gets each graph
    after the partitioner, with ``is_backward`` and ``is_inference``.
    """
    # ``torch.compile`` looks the name up each time that it compiles.
    own = compile_fx_module.compile_fx
    ours = compile_fx_module.compile_fx = made(own)
    try:
        yield
    finally:
        # Somebody else may have replaced it since.
        if compile_fx_module.compile_fx is ours:
            compile_fx_module.compile_fx = own


def with_first_joint_pass(patches: dict[str, Any] | None, first: CustomGraphPass) -> dict[str, Any]:
    """Return options with which ``first`` runs before all other passes of the joint graph.

    These are ``config_patches``, which also reach the backward, which compiles later.
    """
    setting, patches = "joint_custom_pre_pass", dict(patches or {})
    own = patches.get(setting, getattr(inductor_config, setting))
    return {**patches, setting: [first, *get_custom_graph_passes(own)]}


@contextmanager
def fresh(*, caches: bool) -> Iterator[None]:
    """Reset Dynamo before and after; compile without caches of graphs unless ``caches``."""
    with ExitStack() as stack:
        torch._dynamo.reset()
        counters.clear()
        stack.callback(counters.clear)
        stack.callback(torch._dynamo.reset)
        # A compilation that fails would run eager code, and look like one that worked.
        stack.enter_context(dynamo_config.patch(suppress_errors=False))
        if not caches:
            stack.enter_context(
                inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)
            )
            stack.enter_context(
                functorch_config.patch(
                    enable_autograd_cache=False, enable_remote_autograd_cache=False
                )
            )
            pgo = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
            stack.enter_context(dynamo_config.patch(pgo))
        yield


def with_kernels_of_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    is_inference: bool,
    given: Callable[[list[Any]], None],
) -> Callable[..., Any]:
    """Run Inductor's passes on a graph; return a function that runs the result by eager operators.

    ``given`` is called with the inputs of each run.
    """
    # As ``compile_fx_inner`` does before it generates code.
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        compile_fx_module.view_to_reshape(gm)
        compile_fx_module._recursive_post_grad_passes(gm, is_inference=is_inference)

    def call(*inputs: Any) -> Any:
        given(list(inputs))
        return gm.forward(*inputs)

    return make_boxed_func(call)


def guards_allow(number: torch.SymInt, sizes: Mapping[Any, int]) -> bool:
    """Return whether a compilation holds for these sizes of symbols.

    It does if all are in their ranges and no guard is false.
    """
    env = number.node.shape_env
    for symbol, size in sizes.items():
        if symbol in env.var_to_range and size not in env.var_to_range[symbol]:
            return False
    return not any(guard.expr.xreplace(sizes) == sympy.false for guard in env.guards)
