"""What a pass is: a function that rewrites a graph in place, and what is due once it has.

A *rewrite* is ``(gm, example_inputs, *, options) -> changed``. ``graph_pass`` makes of it the pass
that users call: it lints and recompiles what was changed, and returns the GraphModule. A
pipeline runs the rewrites and does both once, at its end.

A pipeline is a list of passes with their options, ``BoundPass``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ParamSpec

import torch
from torch import fx

from pytest_gtrainer.graph.nodes import direction, node_fqn

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
            lint(gm.graph, rewrite.__name__)
            gm.recompile()
        return gm

    told = inspect.signature(rewrite).replace(return_annotation=fx.GraphModule)
    run.__dict__.update({_REWRITE: rewrite, "__signature__": told})
    return run


def lint(graph: fx.Graph, by: str) -> None:
    """``Graph.lint`` whose error says which bucket, module and parameter stand in the wrong order.

    Args:
        by: who left the graph so.

    Raises:
        RuntimeError: a node is used before it is defined, or whatever else torch finds.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        before: set[fx.Node] = set()
        for node in graph.nodes:
            if late := [operand for operand in node.all_input_nodes if operand not in before]:
                raise RuntimeError(
                    f"{by} left a graph out of order: {_told(node)} reads {_told(late[0])}, which stands behind it"
                ) from error
            before.add(node)
        raise


def _told(node: fx.Node) -> str:
    """A node with its bucket or module, and the parameters that it is made from."""
    bucket, above, todo = node.meta.get("fsdp_bucket"), {node}, [node]
    while todo:
        operands = [operand for operand in todo.pop().all_input_nodes if operand not in above]
        above.update(operands)
        todo += operands
    inputs = [above_it.meta["gt_input"]["fqn"] for above_it in sorted(above) if "gt_input" in above_it.meta]
    more = f" and {len(inputs) - 3} more" if len(inputs) > 3 else ""
    where = f"bucket {'+'.join(bucket['plan_fqns'])!r}" if bucket else node_fqn(node) or "no module"
    made_from = f", made from {', '.join(inputs[:3])}{more}" if inputs else ""
    return f"{node} ({direction(node)}, {where}{made_from})"


def rewrite_of(a_pass: Pass) -> Rewrite | None:
    """The rewrite of a pass made by ``graph_pass``; None for any other function."""
    found: Rewrite | None = getattr(a_pass, _REWRITE, None)
    return found


def options_of(a_pass: Pass) -> dict[str, Any]:
    """The options a pass takes, with their defaults; ``inspect.Parameter.empty`` where it has none."""
    parameters = list(inspect.signature(a_pass).parameters.values())[2:]
    return {parameter.name: parameter.default for parameter in parameters}


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclasses.dataclass(frozen=True, slots=True)
class BoundPass:
    """A pass and the options it will be called with; made by ``bind_options``.

    Two are equal, and have the same hash, if name and options are: ``spelled`` are the options in a
    form that is the same in every process.
    """

    name: str
    spelled: tuple[tuple[str, str], ...]
    function: Pass = dataclasses.field(compare=False, repr=False)
    options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of name and options: the same in every process and on every machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.spelled)})"


def bind_options(a_pass: Pass, **options: Any) -> BoundPass:
    """The pass with its options, which are checked and copied now (M3).

    Raises:
        TypeError: the pass has no such option, lacks one, or an option has no stable spelling.
    """
    name = getattr(a_pass, "__name__", type(a_pass).__name__)
    known = options_of(a_pass)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{name} has no option {', '.join(unknown)}; its options are {', '.join(known) or 'none'}")
    lacking = [option for option, default in known.items() if default is inspect.Parameter.empty]
    lacking = [option for option in lacking if option not in options]
    if lacking:
        raise TypeError(f"{name} needs the option {', '.join(lacking)}")
    spelled = tuple((option, _spell(options[option], f"{name}({option}=...)")) for option in sorted(options))
    return BoundPass(name, spelled, a_pass, copy.deepcopy(options))


def _spell(value: Any, where: str) -> str:
    """A text that tells equal options from others, in every process: no addresses, no order of a set.

    >>> _spell(["layers.0", {"b", "a"}, torch.bfloat16], "")
    "['layers.0', {'a', 'b'}, torch.bfloat16]"
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare)
        return f"{type(value).__name__}({', '.join(f'{name}={_spell(v, where)}' for name, v in fields)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_spell(k, where)}: {_spell(value[k], where)}' for k in sorted(value, key=repr))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(_spell(item, where) for item in value))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_spell(item, where) for item in value)}]"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(
        f"{where} is a {type(value).__name__}, which has no fingerprint: options are plain values, containers and "
        "dataclasses of these, and functions of modules"
    )
