"""torch.compile, watched from outside.

- The log ``torch.__trace``, which ``TORCH_TRACE`` and tlparse read: each record has ``metadata``,
  and a ``payload`` that is text or JSON. ``chromium_event`` tells when a phase or a pass begins
  ("ph" is "B") and ends ("E"), in the thread and at the time at which it does; passes are named
  ``pass.<stage's passes>.<pass>``.
- ``torch.compile`` looks up ``torch._inductor.compile_fx.compile_fx`` when it compiles, and calls
  it with Dynamo's graph and the user's options; its ``inner_compile`` gets each graph behind the
  partitioner, with ``is_backward`` and ``is_inference``. It is the one name that is put in
  another's place, while a recorder is open: options are told nowhere else. ``config_patches`` reach
  the backward, which compiles later.
- ``torch._inductor.config``: the user's passes, ``joint_custom_pre_pass`` first among those of the
  joint graph. ``get_custom_graph_passes`` reads one such setting, a pass or several.
- ``CompileContext.current_compile_id()``, whose text is "0/1", None outside of Dynamo.
- ``ShapeEnv.guards``, each with ``expr``, and ``var_to_range``: the sizes that a compilation holds
  for.
- ``_recursive_post_grad_passes`` runs Inductor's passes on a forward or backward graph, under its
  fake mode, behind ``view_to_reshape``, as ``compile_fx_inner`` does before it generates code.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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
    """A pass of Inductor that changes nothing: ``see`` is shown each graph."""

    def __init__(self, name: str, see: Callable[[fx.GraphModule], None]) -> None:
        self.name, self.see = name, see

    def __call__(self, graph: fx.Graph) -> None:
        self.see(graph.owning_module)

    def uuid(self) -> str:
        return self.name


def current_compile_id() -> str:
    """Dynamo's id of the compilation that runs now; "-" where Inductor is called without Dynamo."""
    return str(CompileContext.current_compile_id() or "-")


def own_passes(setting: str) -> list[Any]:
    """The user's passes in a setting of Inductor, ``post_grad_custom_post_pass`` for one, as they
    hold now.
    """
    return [
        *filter(callable, get_custom_graph_passes(getattr(inductor_config, setting, None)))
    ]  # or it is a switch


@contextmanager
def heard_by(handler: logging.Handler) -> Iterator[None]:
    """Give the structured trace to a handler, and to nobody above it, whose captured logs it would
    fill.
    """
    propagates, TRACE_LOG.propagate = TRACE_LOG.propagate, False
    TRACE_LOG.addHandler(handler)
    try:
        yield
    finally:
        TRACE_LOG.removeHandler(handler)
        TRACE_LOG.propagate = propagates


@contextmanager
def instead_of_compile_fx(made: Callable[[CompileFx], CompileFx]) -> Iterator[None]:
    """While this is open, ``torch.compile`` calls what ``made`` gives for Inductor's own
    ``compile_fx``.
    """
    own = compile_fx_module.compile_fx
    ours = compile_fx_module.compile_fx = made(own)
    try:
        yield
    finally:
        if compile_fx_module.compile_fx is ours:  # else somebody else has taken the place since
            compile_fx_module.compile_fx = own


def with_first_joint_pass(patches: dict[str, Any] | None, first: CustomGraphPass) -> dict[str, Any]:
    """Options of a compile in which ``first`` runs before all other passes of the joint graph."""
    setting, patches = "joint_custom_pre_pass", dict(patches or {})
    own = patches.get(setting, getattr(inductor_config, setting))
    return {**patches, setting: [first, *get_custom_graph_passes(own)]}


@contextmanager
def fresh(*, caches: bool) -> Iterator[None]:
    """Dynamo as at the start of a process, before and after; without caches unless they are asked
    for.
    """
    with ExitStack() as stack:
        torch._dynamo.reset()
        counters.clear()
        stack.callback(counters.clear)
        stack.callback(torch._dynamo.reset)
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
    """Run Inductor's passes on a graph, call what they leave by operators of eager; ``given`` hears
    the inputs.
    """
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        compile_fx_module.view_to_reshape(gm)
        compile_fx_module._recursive_post_grad_passes(gm, is_inference=is_inference)

    def call(*inputs: Any) -> Any:
        given(list(inputs))
        return gm.forward(*inputs)

    return make_boxed_func(call)


def guards_allow(number: torch.SymInt, sizes: Mapping[Any, int]) -> bool:
    """Return whether a compilation holds for these sizes, by symbol: they are in their ranges, and
    no guard is false.
    """
    env = number.node.shape_env
    in_range = all(
        size in env.var_to_range[symbol]
        for symbol, size in sizes.items()
        if symbol in env.var_to_range
    )
    return in_range and not any(guard.expr.xreplace(sizes) == False for guard in env.guards)  # noqa: E712
