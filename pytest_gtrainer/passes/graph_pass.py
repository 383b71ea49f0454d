"""Define passes: functions that rewrite a graph in place, with bound options.

A *rewrite* is ``(gm, example_inputs, *, options) -> changed``. ``graph_pass`` makes of it the pass
that users call: it lints and recompiles what was changed, and returns the GraphModule. A pipeline,
a list of ``BoundPass``, does both once, at its end.
"""

import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec

import torch
from torch import fx, nn

from pytest_gtrainer._torch.passes import sort_as_inductor
from pytest_gtrainer._torch.values import writes_to
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.graph.collectives import find_early_read
from pytest_gtrainer.graph.foreign import refuse_without_output
from pytest_gtrainer.graph.nodes import direction, node_fqn, walk

P = ParamSpec("P")
Pass = Callable[..., Any]  # gives a GraphModule; of Inductor, it rewrites in place

REWRITE = "gt_rewrite"  # the attribute of a pass made by ``graph_pass`` that holds its rewrite


def graph_pass(rewrite: Callable[P, bool]) -> Callable[P, fx.GraphModule]:
    """Make the pass of a rewrite: it also lints and recompiles a graph that was changed."""

    @functools.wraps(rewrite)
    def run(*args: P.args, **kwargs: P.kwargs) -> fx.GraphModule:
        gm = args[0] if args else kwargs["gm"]
        if not isinstance(gm, fx.GraphModule):
            raise TypeError(
                f"{rewrite.__name__} was given a {type(gm).__name__}: expected a GraphModule"
            )
        refuse_without_output(gm.graph)
        if rewrite(*args, **kwargs):
            lint(gm.graph, rewrite.__name__)
            gm.recompile()
        return gm

    # The pass returns a graph where its rewrite returns a bool.
    signature = inspect.signature(rewrite).replace(return_annotation=fx.GraphModule)
    run.__dict__.update({REWRITE: rewrite, "__signature__": signature})
    return run


def lint(graph: fx.Graph, by: str) -> None:
    """Lint a graph after the pass ``by``, and name bucket, module and parameter of a wrong order.

    Raises:
        RuntimeError: the graph does not lint, or reads what a collective has not sent yet.
    """
    try:
        graph.lint()
    except RuntimeError:
        seen: set[fx.Node] = set()
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                if operand not in seen:
                    raise RuntimeError(
                        f"{by} left a graph out of order: {_describe(node)} reads "
                        f"{_describe(operand)}, which comes after it"
                    ) from None
            seen.add(node)
        raise  # something else is wrong with it
    check_waits(graph, by)


def check_waits(graph: fx.Graph, by: str) -> None:
    """Refuse a graph that reads what a collective has not sent yet.

    In eager runs of one process numbers may be right all the same.

    Raises:
        RuntimeError: it names the collective and its reader.
    """
    early = find_early_read(graph)
    if early is not None:
        launch, reader = early
        raise RuntimeError(
            f"{by} left a graph that does not wait: {_describe(reader)} reads "
            f"{_describe(launch)} before it is waited for"
        )


def _describe(node: fx.Node) -> str:
    """Return a node with its bucket or module, and the parameters that it is made from."""
    where = node_fqn(node) or "no module"
    bucket = node.meta.get("fsdp_bucket")
    if bucket:
        where = f"bucket {'+'.join(bucket['plan_fqns'])!r}"
    inputs = []
    for above in sorted(walk([node], lambda each: each.all_input_nodes)):
        given = above.meta.get("gt_input")
        if given is not None:
            inputs.append(f"input {given['fqn']}" if given["kind"] == "input" else given["fqn"])
    if inputs:
        where += f", made from {spell_some(inputs)}"
    return f"{node} ({direction(node)}, {where})"


def options_of(a_pass: Pass) -> dict[str, Any]:
    """Return the options of a pass with their defaults, ``Parameter.empty`` where there is none."""
    parameters = list(inspect.signature(a_pass).parameters.values())
    del parameters[: 1 if takes_one(a_pass) else 2]
    return {parameter.name: parameter.default for parameter in parameters}


def takes_one(a_pass: Callable[..., Any]) -> str:
    """Return the argument of a pass that has only one; "" if there are more.

    "graph" is an ``fx.Graph``, which Inductor's passes take, and "gm" a GraphModule.
    """
    parameters = list(inspect.signature(a_pass).parameters.values())
    kinds = [parameter.kind for parameter in parameters]
    by_place = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    by_place += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if by_place != 1 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return ""
    annotation = str(parameters[0].annotation)
    if re.search(r"\bGraph\b", annotation):
        return "graph"
    if "GraphModule" in annotation or parameters[0].name in ("gm", "graph_module", "module"):
        return "gm"
    return "graph"


def as_pass(a_pass: Callable[..., Any]) -> Pass:
    """Adapt a pass of one argument to a pipeline, ``(gm, example_inputs, *, options) -> gm``."""
    takes = takes_one(a_pass)
    if not takes:
        return a_pass

    def run(gm: fx.GraphModule, example_inputs: object = None, **options: Any) -> Any:
        if takes == "gm":
            return a_pass(gm, **options)
        returned = a_pass(gm.graph, **options)
        if isinstance(returned, fx.Graph | fx.GraphModule) and returned is not gm.graph:
            raise TypeError(
                f"{getattr(a_pass, '__name__', type(a_pass).__name__)} returns another graph than "
                "it was given, which Inductor would drop: rewrite the graph in place, or take "
                "(gm, example_inputs)"
            )
        # Inductor sorts the graph after a pass, so its passes may leave nodes out of order.
        sort_as_inductor(gm.graph)
        return gm

    return run


_SMALL = 1 << 16  # bytes of a constant that are compared


class WrittenConstantError(RuntimeError):
    """A pass has written to a tensor that the graph before it shares."""


@contextmanager
def refusing_written_constants(gm: fx.GraphModule, by: str) -> Iterator[None]:
    """Refuse a write to a tensor that the graph has as an attribute.

    The graph before the pass shares the tensor, so no comparison of the two would show the write.

    Raises:
        WrittenConstantError: names the attribute, after the block.
    """
    constants: dict[str, torch.Tensor] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        with suppress(AttributeError):  # lint says so of an attribute that is missing
            value = operator.attrgetter(node.target)(gm)
            if isinstance(value, torch.Tensor):
                constants[node.target] = value
    before = {target: _marks_of(tensor) for target, tensor in constants.items()}
    try:
        yield
    except Exception as error:
        for target in _written(constants, before):
            error.add_note(f"it has written to the tensor {target}, which the given graph shares")
        raise
    for target in _written(constants, before):
        raise WrittenConstantError(
            f"{by} writes to the tensor {target} of the graph, which the graph before the "
            "pass shares: set another tensor as an attribute of another name, and let the node "
            "read that"
        )


def _marks_of(tensor: torch.Tensor) -> tuple[int | None, int, torch.Tensor | None]:
    """Return what a write changes: autograd's count, the address, and the bytes of a small one."""
    # Nobody counts writes to a tensor of inference mode, or through ``.data``.
    count = None if tensor.is_inference() else writes_to(tensor)
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if tensor.is_meta or tensor.is_quantized or not is_plain:
        return count, 0, None
    copy = tensor.detach().clone() if tensor.nbytes <= _SMALL else None
    return count, tensor.data_ptr(), copy


def _written(
    constants: Mapping[str, torch.Tensor],
    before: Mapping[str, tuple[int | None, int, torch.Tensor | None]],
) -> list[str]:
    """Return the names of the tensors that were written to."""
    found = []
    for target, tensor in constants.items():
        count, address, copy = _marks_of(tensor)
        old_count, old_address, old_copy = before[target]
        is_same = (count, address) == (old_count, old_address)
        if is_same and copy is not None and old_copy is not None:
            is_same = torch.equal(_bytes_of(copy), _bytes_of(old_copy))
        if not is_same:
            found.append(target)
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def returned(result: object) -> fx.GraphModule:
    """Return the graph of a pass's result, which may be its ``forward``, as of torch's backends."""
    result = getattr(result, "__self__", result)
    if not isinstance(result, fx.GraphModule):
        kind = f"a {type(result).__name__}"
        if result is None:
            kind = "None: is `return gm` missing?"
        raise TypeError(f"a pass returns a GraphModule, this one returned {kind}")
    return result


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclasses.dataclass(frozen=True, slots=True)
class BoundPass:
    """A pass and the options it will be called with; made by ``bind_options``.

    Two are equal if name and options are.

    Attributes:
        spelled: the options as text that is the same in every process.
        home: module and name of a function, or of the class of an object with a ``uuid()``; "" if
            these do not identify the code.
    """

    name: str
    spelled: tuple[tuple[str, str], ...]
    function: Pass = dataclasses.field(compare=False, repr=False)
    options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    home: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of name and options, the same in every process."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.spelled)})"


def bind_options(a_pass: Pass, **options: Any) -> BoundPass:
    """Return ``a_pass`` with its options, which are checked and copied now.

    A pass may also have one argument: a function ``gm -> gm``, or a pass of Inductor, which
    rewrites an ``fx.Graph`` in place; see ``takes_one``. If it has a ``uuid()``, that is part of
    its identity.

    Raises:
        TypeError: the pass has no such option, an option is missing, or it has no stable spelling.
    """
    if isinstance(a_pass, functools.partial) and not a_pass.args:
        with suppress(TypeError):  # an option without a fingerprint stays the partial's own
            return bind_options(a_pass.func, **{**a_pass.keywords, **options})
    name = getattr(getattr(a_pass, "func", a_pass), "__name__", type(a_pass).__name__)
    known = options_of(a_pass)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(
            f"{name} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(known) or 'none'}"
        )
    missing = []
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in options:
            missing.append(option)
    if missing:
        raise TypeError(f"{name} needs the option {', '.join(missing)}")
    spelled = [(key, _spell(options[key], f"{name}({key}=...)")) for key in sorted(options)]
    identity = getattr(a_pass, "uuid", lambda: None)()
    if identity is not None:
        spelled.append(("uuid", repr(identity)))
    home = ""
    code: Any = a_pass
    if identity is not None and not inspect.isfunction(a_pass):
        code = type(a_pass)
    identifies = identity is not None or inspect.isfunction(a_pass)
    if identifies and "<" not in code.__qualname__:  # a local function's name says too little
        home = f"{code.__module__}:{code.__qualname__}"
    # Copied, so that a list that is changed later does not change the pass or its fingerprint.
    return BoundPass(name, tuple(spelled), as_pass(a_pass), copy.deepcopy(options), home)


def all_bound(passes: Iterable[BoundPass | Pass]) -> list[BoundPass]:
    """Return the passes of a list, with those that are plain functions bound without options."""
    bound = []
    for index, each in enumerate(passes):
        if isinstance(each, BoundPass):
            bound.append(each)
        elif callable(each):
            bound.append(bind_options(each))
        else:
            raise TypeError(
                f"pass {index} of the list is {each!r}: give a function gm -> gm, or "
                "bind_options(...)"
            )
    return bound


def _spell(value: Any, where: str) -> str:
    """Return a text of an option, equal for equal values in every process.

    It holds no address, and no order of a set.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = []
        for field in dataclasses.fields(value):
            if field.compare:
                fields.append(f"{field.name}={_spell(getattr(value, field.name), where)}")
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, Mapping):
        items = []
        for key in sorted(value, key=repr):
            items.append(f"{_spell(key, where)}: {_spell(value[key], where)}")
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(_spell(item, where) for item in value))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_spell(item, where) for item in value)}]"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(
        f"{where} is a {type(value).__name__}, which has no fingerprint: options are plain values, "
        "containers and dataclasses of these, and functions of modules"
    )
