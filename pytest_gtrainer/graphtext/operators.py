"""Operators and process groups by name, both ways: what the text writes for them, and what a name
in it stands for.

An operator is spelled ``aten.add.Tensor``, ``operator.add``, ``hop.flex_attention``, and found in
torch's registries only, never by evaluating a text. Since a parsed graph can be run, operators that
touch files or run code which the graph does not show are refused. A process group is a symbol,
``fsdp = group(range(0, 8))``, as its name drifts.
"""

import functools
import itertools
import keyword
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch import graph_text
from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, OpOverloadPacket, schema
from pytest_gtrainer.graph.collectives import group_of, hides, launches
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.sections import spell

_FLOATING = frozenset({"_c10d_functional", "_c10d_functional_autograd", "bucketing", "symm_mem"})


@dataclass(frozen=True, slots=True)
class Operator:
    """A node's target."""

    text: str  # its full spelling
    short: str  # what its values are named after
    group_arguments: frozenset[int | str] = (
        frozenset()
    )  # positions and names of those that name process groups
    floats: bool = False  # it communicates, or packs for it: its lines stand among other layers'
    launches: bool = False  # it starts a collective, a send or a receive


def operator_of(node: fx.Node) -> Operator:
    """The operator of a node that computes something."""
    if node.op == "call_function":
        return function_of(node.target)
    path = str(node.target)
    text = f"module.{spell(path)}" if node.op == "call_module" else f"method.{word(path)}"
    return Operator(text, word(path.rpartition(".")[2]))


@functools.lru_cache(maxsize=1 << 12)
def function_of(target: Callable[..., Any]) -> Operator:
    """The operator that a ``call_function`` calls."""
    if isinstance(target, OpOverload):
        told = schema(target)
        namespace, _, name = told.name.partition("::")
        names = enumerate(argument.name for argument in told.arguments)
        places = [place for place, argument in names if argument in ("group_name", "process_group")]
        text = ".".join(word(part) for part in (namespace, name, told.overload_name) if part)
        groups: frozenset[int | str] = frozenset([*places, "group_name"] if places else ())
        return Operator(
            text, name, groups, floats=namespace in _FLOATING, launches=launches(target)
        )
    if isinstance(target, HigherOrderOperator):
        return Operator(f"hop.{word(target.name())}", target.name())
    home = target.__module__ if hasattr(target, "__module__") else ""
    name = getattr(target, "__name__", type(target).__name__)
    # `operator.add` is really `_operator.add`
    path = [*(home or "").removeprefix("_").split("."), name]
    return Operator(".".join(word(part) for part in path if part), word(name))


@functools.lru_cache(maxsize=1 << 12)
def word(text: str) -> str:
    """A name that Python accepts: keywords get an escape, other characters become ``_``."""
    if keyword.iskeyword(text):
        return f"{text}__kw"
    if text.isidentifier():
        return text
    likeness = "".join(c if c.isalnum() else "_" for c in text)
    return likeness if likeness.isidentifier() else f"_{likeness}"


NAMESPACES = frozenset(
    {"aten", "prims", "_c10d_functional", "_c10d_functional_autograd", "bucketing", "fsdp"}
)
"""Namespaces whose operators compute and communicate, and do nothing else."""

FORBIDDEN = frozenset({"aten.from_file"})  # operators of these namespaces that touch files

HIGHER_ORDER = frozenset(
    {
        "cond",
        "while_loop",
        "scan",
        "associative_scan",
        "map_impl",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "tag_activation_checkpoint",
        "auto_functionalized",
        "auto_functionalized_v2",
        "with_effects",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "graphsafe_run_with_rng_state",
        "out_dtype",
        "autograd_function_apply",
    }
)
"""Higher-order operators that run nothing but the bodies and operators which they are given."""

_OPERATOR = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "neg",
    "pos",
    "abs",
    "getitem",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
    "xor",
    "not_",
    "invert",
    "lshift",
    "rshift",
    "matmul",
    "is_",
    "is_not",
    "iadd",
    "isub",
    "imul",
    "itruediv",
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATOR},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "sqrt", "trunc")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in (
            "sym_int",
            "sym_float",
            "sym_max",
            "sym_min",
            "sym_not",
            "sym_ite",
            "sym_sum",
            "_check",
            "tensor",
        )
    },
    **graph_text.FUNCTIONS_OF_DYNAMO,
    "builtins.max": max,
    "builtins.min": min,
    "builtins.round": round,
}
"""Plain functions that a text may call."""


class UnknownOperator(LookupError):
    """A name that is no operator, or one that a text may not call; the message says which."""


def operator_named(spelled: str, allow: Iterable[str] = ()) -> Callable[..., Any]:
    """The operator of a name, or UnknownOperator; ``__kw`` marks a keyword in it, ``allow`` adds
    namespaces.
    """
    if (name := ".".join(part.removesuffix("__kw") for part in spelled.split("."))) in FUNCTIONS:
        return FUNCTIONS[name]
    if name == "torch.distributed.tensor._api.from_local":
        from torch.distributed.tensor import DTensor

        return DTensor.from_local
    space, _, rest = name.partition(".")
    if space == "hop":
        known = {word(key): found for key, found in graph_text.higher_order_operators().items()}
        if rest not in known:
            raise UnknownOperator(
                f"torch has no higher-order operator `{rest}`{nearest(rest, known)}"
            )
        if rest not in HIGHER_ORDER:
            raise UnknownOperator(
                f"hop.{rest} may run code that the graph does not show: no text may call it"
            )
        return known[rest]
    if not rest:
        raise UnknownOperator(
            f"`{name}` is no operator: expected one like `aten.add.Tensor`, `operator.add` or `hop.cond`"
        )
    if space == "torch" and (found := _torch_function(name)) is not None:
        return found
    if space in ("operator", "math", "torch", "builtins"):
        raise UnknownOperator(
            f"`{name}` is not one of the functions that a text may call{nearest(name, FUNCTIONS)}"
        )
    if space not in NAMESPACES.union(allow):
        advice = f"if its operators are safe to run, give allow=[{space!r}]"
        raise UnknownOperator(
            f"the namespace of `{name}` is not allowed{nearest(space, NAMESPACES)}: {advice}"
        )
    packet, _, overload = rest.partition(".")
    if f"{space}.{packet}" in FORBIDDEN:
        raise UnknownOperator(f"{space}.{packet} touches files: no text may call it")
    if (found := graph_text.operator_overload(space, packet, overload)) is None:
        raise UnknownOperator(f"torch has no operator `{name}`{_alternatives(space, packet)}")
    return found


def targets_named(spelled: str) -> list[Callable[..., Any]]:
    """Return what a name in a text stands for in this process, nothing if that is not known. Not to
    be called.

    A method, or a function of torch, stands for all overloads of the operator of its name in
    ``aten``.
    """
    name = ".".join(part.removesuffix("__kw") for part in spelled.split("."))
    space, _, rest = name.partition(".")
    if space == "operator" and hasattr(operator, rest):
        return [getattr(operator, rest)]
    if space in ("method", "torch"):
        packet = getattr(torch.ops.aten, rest.rpartition(".")[2], None)
        if not isinstance(packet, OpOverloadPacket):
            return []
        return [getattr(packet, overload) for overload in packet.overloads()]
    if space == "prims":
        graph_text.register_prims_of_inductor()
    try:
        return [operator_named(name, [space])]
    except UnknownOperator:
        return []


def _torch_function(name: str) -> Callable[..., Any] | None:
    """A function of ``torch``, as Dynamo's graphs call it, that is an operator or made of
    operators; else None.
    """
    home, _, last = name.rpartition(".")
    if home != "torch.nn.functional" and (f"aten.{last}" in FORBIDDEN or not is_operator(last)):
        return None
    found = getattr(graph_text.PLAIN_FUNCTIONS.get(home), last, None)
    return found if callable(found) and function_of(found).text == name else None


_METHODS = frozenset(
    {
        "bfloat16",
        "bool",
        "byte",
        "char",
        "cpu",
        "cuda",
        "double",
        "element_size",
        "float",
        "half",
        "int",
        "long",
        "ndimension",
        "nelement",
        "short",
        "redistribute",
        "to_local",
    }
)
"""Methods of a tensor, or of a DTensor, that only call operators of other names."""


def is_method(name: str) -> bool:
    """Return whether a text may call the method ``name`` of a tensor: those that are operators."""
    return name in _METHODS or is_operator(name)


def is_operator(name: str) -> bool:
    """Return whether ``aten`` has an operator of that name."""
    return any(
        found == f"aten::{name}" or found.startswith(f"aten::{name}.")
        for found in graph_text.operator_names()
    )


def _alternatives(space: str, packet: str) -> str:
    """The overloads of a known operator, or the operator that looks most like an unknown one."""
    names = [
        name.partition("::")[2]
        for name in graph_text.operator_names()
        if name.startswith(f"{space}::")
    ]
    if overloads := sorted(name for name in names if name.partition(".")[0] == packet):
        return f": it has {', '.join(f'{space}.{name}' for name in overloads)}"
    return nearest(f"{space}.{packet}", {f"{space}.{name.partition('.')[0]}" for name in names})


_MESH = "mesh_"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as the text shows it."""

    symbol: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.symbol} = group({spell_ranks(self.ranks)})"


def spell_ranks(ranks: Sequence[int] | None) -> str:
    """Ranks as a range where they are one."""
    if ranks is not None and len(ranks) > 1 and (step := ranks[1] - ranks[0]) > 0:
        found = range(ranks[0], ranks[0] + step * len(ranks), step)
        if list(found) == list(ranks):
            return repr(found)
    return repr(None if ranks is None else list(ranks))


def mesh_dimension(ranks: Sequence[int], mesh: Mapping[str, int]) -> str | None:
    """The dimension of a mesh over all ranks, outermost first, along which these ranks lie."""
    stride = math.prod(mesh.values())
    for name, extent in mesh.items():
        stride //= extent
        first = ranks[0] // stride % extent if ranks else 0
        if first == 0 and list(ranks) == [ranks[0] + place * stride for place in range(extent)]:
            return name
    return None


def groups_of(gm: fx.GraphModule, mesh: Mapping[str, int]) -> dict[str, Group]:
    """The groups that a graph's collectives name, in order of first use."""
    told: Mapping[str, tuple[int, ...] | None] = gm.meta.get(
        "gt_groups", {}
    )  # what the text said that it came from
    groups: dict[str, Group] = {}
    taken: set[str] = set()
    for node in gm.graph.nodes:
        has_group = node.op == "call_function" and function_of(node.target).group_arguments
        if has_group and (name := group_of(node)) is not None and name not in groups:
            found = graph_text.resolve_group(name)
            role = word(name) if found is None and name in told else _role(found, mesh)
            groups[name] = Group(_unused(role, taken), found.ranks if found else told.get(name))
    return groups


class UntoldGroup(ValueError):
    """A collective whose process group or reduction the text of its graph cannot tell: two of them
    look alike.
    """


def refuse_untold(gm: fx.GraphModule) -> None:
    """Raise UntoldGroup if a text would not tell in which ranks a collective communicates, graphs
    inside included.
    """
    for module in (module for module in gm.modules() if isinstance(module, fx.GraphModule)):
        groups = groups_of(module, {})
        for node in module.graph.nodes:
            if node.op != "call_function" or not function_of(node.target).launches:
                continue
            where, name = f"{node.name} ({function_of(node.target).text})", group_of(node)
            if hides(node):
                raise UntoldGroup(
                    f"{where} is a collective in place: its graph holds group and reduction as objects that no text "
                    "can tell, so a golden would accept others; trace torch.distributed._functional_collectives instead"
                )
            if name is not None and groups[name].ranks is None:
                raise UntoldGroup(
                    f"{where} communicates in process group {name!r}, which does not exist in this process, so a "
                    "golden would say group(None) and accept any ranks: check it in the world of its trace. If that is "
                    "this one, a table of groups has outlived the world of an earlier test: empty it with its world"
                )


def names_of_groups(
    told: Mapping[str, tuple[int, ...] | None], given: Mapping[str, str]
) -> dict[str, str]:
    """For each symbol of a text a group of its ranks in this process, best one of that name; else
    the symbol itself.
    """
    names = {symbol: given[symbol] for symbol in told if symbol in given}
    for any_name in (False, True):
        for symbol, ranks in told.items():
            for name, group in graph_text.named_groups().items() if symbol not in names else ():
                is_named = (
                    any_name or group.description == _MESH + symbol or symbol == _role(group, {})
                )
                if is_named and group.ranks == ranks and name not in names.values():
                    names[symbol] = name
                    break
    return {symbol: names.get(symbol, symbol) for symbol in told}


def groups_of_ranks(
    needed: Iterable[tuple[int, ...]], mesh: Mapping[str, int], known: Mapping[tuple[int, ...], str]
) -> dict[tuple[int, ...], Group]:
    """Groups that are known by their ranks alone, in order of first use; some may have a symbol
    already.
    """
    groups: dict[tuple[int, ...], Group] = {}
    taken = set(known.values())
    for ranks in dict.fromkeys(needed):
        if (
            symbol := known.get(ranks)
        ) is None:  # as the mesh that made a group of these ranks called it, else any
            alike = [group for group in graph_text.named_groups().values() if group.ranks == ranks]
            found = sorted(alike, key=lambda group: (not _is_of_mesh(group), group.description))
            symbol = _unused(
                _role(found[0] if found else graph_text.ResolvedGroup(ranks, ""), mesh), taken
            )
        groups[ranks] = Group(symbol, ranks)
    return groups


def _is_of_mesh(group: graph_text.ResolvedGroup) -> bool:
    return group.description.startswith(_MESH) and group.description != "mesh_default"


def _role(found: graph_text.ResolvedGroup | None, mesh: Mapping[str, int]) -> str:
    if found is None:
        return "group"
    if _is_of_mesh(found):
        return word(found.description.removeprefix(_MESH))
    if (dimension := mesh_dimension(found.ranks, mesh)) is not None:
        return word(dimension)
    unsaid = {"default_pg": "world", "undefined": "group"}
    return unsaid.get(
        found.description, found.description if found.description.isidentifier() else "group"
    )


def _unused(symbol: str, taken: set[str]) -> str:
    name = next(
        n
        for count in itertools.count(1)
        if (n := f"{symbol}_{count}" if count > 1 else symbol) not in taken
    )
    taken.add(name)
    return name
