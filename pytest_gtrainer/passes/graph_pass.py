"""What a pass is: a function that rewrites a graph in place, and what is due once it has.

A *rewrite* is ``(gm, example_inputs, *, options) -> changed``. ``graph_pass`` makes of it the pass
that users call: it lints and recompiles what was changed, and returns the GraphModule. A
pipeline runs the rewrites and does both once, at its end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from torch import fx

P = ParamSpec("P")
Pass = Callable[..., fx.GraphModule]
Rewrite = Callable[..., bool]

_REWRITE = "gt_rewrite"


def graph_pass(rewrite: Callable[P, bool]) -> Callable[P, fx.GraphModule]:
    """The pass of a rewrite: same name, options and documentation, but it leaves a graph that is fit to run."""

    @functools.wraps(rewrite)
    def run(*args: P.args, **kwargs: P.kwargs) -> fx.GraphModule:
        gm = args[0] if args else kwargs["gm"]
        if not isinstance(gm, fx.GraphModule):
            raise TypeError(f"{rewrite.__name__} was given a {type(gm).__name__}: expected a GraphModule")
        if rewrite(*args, **kwargs):
            gm.graph.lint()
            gm.recompile()
        return gm

    told = inspect.signature(rewrite).replace(return_annotation=fx.GraphModule)
    run.__dict__.update({_REWRITE: rewrite, "__signature__": told})
    return run


def rewrite_of(a_pass: Pass) -> Rewrite | None:
    """The rewrite of a pass made by ``graph_pass``; None for any other function."""
    found: Rewrite | None = getattr(a_pass, _REWRITE, None)
    return found


def options_of(a_pass: Pass) -> dict[str, Any]:
    """The options a pass takes, with their defaults; ``inspect.Parameter.empty`` where it has none."""
    parameters = list(inspect.signature(a_pass).parameters.values())[2:]
    return {parameter.name: parameter.default for parameter in parameters}
