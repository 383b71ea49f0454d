"""What a pass is: a function that rewrites a graph in place, and what is due once it has.

A *rewrite* is ``(gm, example_inputs, *, options) -> changed``. ``graph_pass`` makes of it the pass that users call: it
lints and recompiles what was changed, and returns the GraphModule. A pipeline, a list of ``BoundPass``, does both once,
at its end.
"""

import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, ParamSpec

import torch
from torch import fx

from pytest_gtrainer._torch.passes import sort_as_inductor
from pytest_gtrainer.graph.nodes import direction, node_fqn, walked

P = ParamSpec("P")
Pass = Callable[..., Any]  # gives a GraphModule; of Inductor, it rewrites in place

REWRITE = "gt_rewrite"  # the attribute of a pass made by ``graph_pass`` that holds its rewrite
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def graph_pass(rewrite: Callable[P, bool]) -> Callable[P, fx.GraphModule]:
    """The pass of a rewrite: same name, options and documentation, but it leaves a graph that is fit to run."""

    @functools.wraps(rewrite)
    def run(*args: P.args, **kwargs: P.kwargs) -> fx.GraphModule:
        gm = args[0] if args else kwargs["gm"]
        if not isinstance(gm, fx.GraphModule):
            raise TypeError(
                f"{rewrite.__name__} was given a {type(gm).__name__}: expected a GraphModule"
            )
        if rewrite(*args, **kwargs):
            lint(gm.graph, rewrite.__name__)
            gm.recompile()
        return gm

    told = inspect.signature(rewrite).replace(return_annotation=fx.GraphModule)
    run.__dict__.update({REWRITE: rewrite, "__signature__": told})
    return run


def lint(graph: fx.Graph, by: str) -> None:
    """``Graph.lint``, whose RuntimeError says which bucket, module and parameter ``by`` left in the wrong order."""
    try:
        graph.lint()
    except RuntimeError:
        before: set[fx.Node] = set()
        for node in graph.nodes:
            if late := [operand for operand in node.all_input_nodes if operand not in before]:
                raise RuntimeError(
                    f"{by} left a graph out of order: {_told(node)} reads {_told(late[0])}, which comes after it"
                ) from None
            before.add(node)
        raise


def _told(node: fx.Node) -> str:
    """A node with its bucket or module, and the parameters that it is made from."""
    bucket = node.meta.get("fsdp_bucket")
    above = walked([node], lambda each: each.all_input_nodes)
    found = [each.meta["gt_input"] for each in sorted(above) if "gt_input" in each.meta]
    inputs = [f"{'input ' if each['kind'] == 'input' else ''}{each['fqn']}" for each in found]
    more = f" and {len(inputs) - 3} more" if len(inputs) > 3 else ""
    where = f"bucket {'+'.join(bucket['plan_fqns'])!r}" if bucket else node_fqn(node) or "no module"
    made_from = f", made from {', '.join(inputs[:3])}{more}" if inputs else ""
    return f"{node} ({direction(node)}, {where}{made_from})"


def options_of(a_pass: Pass) -> dict[str, Any]:
    """The options a pass takes, with their defaults; ``inspect.Parameter.empty`` where it has none."""
    parameters = list(inspect.signature(a_pass).parameters.values())[
        1 if takes_one(a_pass) else 2 :
    ]
    return {parameter.name: parameter.default for parameter in parameters}


def takes_one(a_pass: Callable[..., Any]) -> str:
    """What a pass with one argument takes: "graph", an ``fx.Graph``, as Inductor's do; "gm"; "" if there are more."""
    parameters = inspect.signature(a_pass).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    if (
        len([kind for kind in kinds if kind in _BY_PLACE]) != 1
        or inspect.Parameter.VAR_POSITIONAL in kinds
    ):
        return ""
    first = next(iter(parameters))
    takes_module = first.name in ("gm", "graph_module", "module") or "GraphModule" in str(
        first.annotation
    )
    return "gm" if takes_module and not re.search(r"\bGraph\b", str(first.annotation)) else "graph"


def as_pass(a_pass: Callable[..., Any]) -> Pass:
    """The pass as a pipeline calls it, ``(gm, example_inputs, *, options) -> gm``; of Inductor's passes, too."""
    takes = takes_one(a_pass)
    if not takes:
        return a_pass

    def run(gm: fx.GraphModule, example_inputs: object = None, **options: Any) -> Any:
        if takes == "gm":
            return a_pass(gm, **options)
        returned = a_pass(gm.graph, **options)
        if isinstance(returned, fx.Graph | fx.GraphModule) and returned is not gm.graph:
            raise TypeError(
                f"{getattr(a_pass, '__name__', type(a_pass).__name__)} returns another graph than it was given, which "
                "Inductor would drop: rewrite the graph in place, or take (gm, example_inputs)"
            )
        sort_as_inductor(gm.graph)  # behind its passes, which need not
        return gm

    return run


def returned(result: object) -> fx.GraphModule:
    """The graph that a pass gives; a backend of torch.compile may give the graph's ``forward``."""
    result = getattr(result, "__self__", result)
    if not isinstance(result, fx.GraphModule):
        kind = "None: is `return gm` missing?" if result is None else f"a {type(result).__name__}"
        raise TypeError(f"a pass returns a GraphModule, this one returned {kind}")
    return result


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclasses.dataclass(frozen=True, slots=True)
class BoundPass:
    """A pass and the options it will be called with; made by ``bind_options``, and equal if name and options are."""

    name: str
    spelled: tuple[tuple[str, str], ...]  # the options in a form that is the same in every process
    function: Pass = dataclasses.field(compare=False, repr=False)
    options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    # module and name of a function, or of the class of an object with a ``uuid()``; "" where these do not tell the code
    home: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of name and options: the same in every process and on every machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.spelled)})"


def bind_options(a_pass: Pass, **options: Any) -> BoundPass:
    """Return ``a_pass`` with its options, which are checked and copied now.

    A pass may also have one argument: a function ``gm -> gm``, or a pass of Inductor, which rewrites an ``fx.Graph`` in
    place; see ``takes_one``. If it has a ``uuid()``, that is part of its identity.

    Raises:
        TypeError: the pass has no such option, an option is missing, or it has no stable spelling.
    """
    if isinstance(a_pass, functools.partial) and not a_pass.args:
        with suppress(TypeError):  # an option without a fingerprint stays the partial's own
            return bind_options(a_pass.func, **{**a_pass.keywords, **options})
    name = getattr(getattr(a_pass, "func", a_pass), "__name__", type(a_pass).__name__)
    known = options_of(a_pass)
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"{name} has no option {', '.join(unknown)}; its options are {', '.join(known) or 'none'}"
        )
    needed = [option for option, default in known.items() if default is inspect.Parameter.empty]
    if lacking := [option for option in needed if option not in options]:
        raise TypeError(f"{name} needs the option {', '.join(lacking)}")
    spelled = tuple(
        (option, _spell(options[option], f"{name}({option}=...)")) for option in sorted(options)
    )
    if (identity := getattr(a_pass, "uuid", lambda: None)()) is not None:
        spelled += (("uuid", repr(identity)),)
    code = a_pass if inspect.isfunction(a_pass) else type(a_pass) if identity is not None else None
    home = (
        f"{code.__module__}:{code.__qualname__}"
        if code is not None and "<" not in code.__qualname__
        else ""
    )
    return BoundPass(name, spelled, as_pass(a_pass), copy.deepcopy(options), home)


def all_bound(passes: Iterable[BoundPass | Pass]) -> list[BoundPass]:
    """The passes, those without options bound as they are."""
    passes = list(passes)
    for index, each in enumerate(passes):
        if not callable(each) and not isinstance(each, BoundPass):
            raise TypeError(
                f"pass {index} of the list is {each!r}: give a function gm -> gm, or bind_options(...)"
            )
    return [each if isinstance(each, BoundPass) else bind_options(each) for each in passes]


def _spell(value: Any, where: str) -> str:
    """A text that tells equal options from others, in every process: no addresses, no order of a set."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.compare
        )
        return f"{type(value).__name__}({', '.join(f'{name}={_spell(v, where)}' for name, v in fields)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_spell(k, where)}: {_spell(value[k], where)}' for k in sorted(value, key=repr))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(_spell(item, where) for item in value))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_spell(item, where) for item in value)}]"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    wrong = f"{where} is a {type(value).__name__}, which has no fingerprint"
    raise TypeError(
        f"{wrong}: options are plain values, containers and dataclasses of these, and functions of modules"
    )
