"""Names of operators and process groups in graph text, written and read.

An operator is spelled ``aten.add.Tensor``, ``operator.add``, ``hop.flex_attention``. It is found in
torch's registries only, never by evaluating a text. Since a parsed graph can be run, operators that
touch files or run code which the graph does not show are refused.

A process group is a symbol, ``fsdp = group(range(0, 8))``: its name in torch depends on how many
groups the process has made before.
"""

import functools
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
from pytest_gtrainer.graph.nodes import graphs_in
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.sections import spell

_MOVABLE = frozenset({"_c10d_functional", "_c10d_functional_autograd", "bucketing", "symm_mem"})


@dataclass(frozen=True, slots=True)
class Operator:
    """A node's target."""

    text: str  # its full spelling
    short: str  # the name of its values
    # positions and names of the arguments that name process groups
    group_arguments: frozenset[int | str] = frozenset()
    # It communicates, or packs for it: its line may stand in the section of another layer.
    is_movable: bool = False
    # It starts a collective, a send or a receive.
    launches: bool = False


def operator_of(node: fx.Node) -> Operator:
    """Return the operator of a node that computes something."""
    if node.op == "call_function":
        return function_of(node.target)
    path = str(node.target)
    text = f"method.{word(path)}"
    if node.op == "call_module":
        text = f"module.{spell(path)}"
    return Operator(text, word(path.rpartition(".")[2]))


@functools.lru_cache(maxsize=1 << 12)
def function_of(target: Callable[..., Any]) -> Operator:
    """Return the operator that a ``call_function`` calls."""
    if isinstance(target, OpOverload):
        found = schema(target)
        namespace, _, name = found.name.partition("::")
        path = filter(None, (namespace, name, found.overload_name))
        groups: set[int | str] = set()
        for place, argument in enumerate(found.arguments):
            if argument.name in ("group_name", "process_group"):
                groups |= {place, "group_name"}
        return Operator(
            ".".join(map(word, path)),
            name,
            frozenset(groups),
            namespace in _MOVABLE,
            launches(target),
        )

    if isinstance(target, HigherOrderOperator):
        return Operator(f"hop.{word(target.name())}", target.name())
    name = getattr(target, "__name__", type(target).__name__)
    # The home of ``operator.add`` is the module ``_operator``.
    home = (getattr(target, "__module__", "") or "").removeprefix("_")
    parts = filter(None, (*home.split("."), name))
    return Operator(".".join(map(word, parts)), word(name))


@functools.lru_cache(maxsize=1 << 12)
def word(text: str) -> str:
    """Return a name that Python accepts: keywords get an escape, other characters become ``_``."""
    if keyword.iskeyword(text):
        return f"{text}__kw"
    if text.isidentifier():
        return text
    likeness = "".join(c if c.isalnum() else "_" for c in text)
    if not likeness.isidentifier():
        likeness = f"_{likeness}"
    return likeness


NAMESPACES = frozenset(
    {"aten", "prims", "_c10d_functional", "_c10d_functional_autograd", "bucketing", "fsdp"}
)
"""Namespaces whose operators compute and communicate, and do nothing else."""

FORBIDDEN = frozenset({"aten.from_file"})
"""Operators of these namespaces that touch files."""

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


def _name_of(spelled: str) -> str:
    """Return the name of an operator; ``word`` has marked keywords in it by ``__kw``."""
    return ".".join(part.removesuffix("__kw") for part in spelled.split("."))


def operator_named(spelled: str, allow: Iterable[str] = ()) -> Callable[..., Any]:
    """Return the operator of a name that a text may call; ``allow`` adds namespaces.

    Raises:
        UnknownOperator: there is no such operator, or no text may call it; the message says which.
    """
    name = _name_of(spelled)
    if name in FUNCTIONS:
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
            f"`{name}` is no operator: expected one like `aten.add.Tensor`, `operator.add` or "
            "`hop.cond`"
        )

    if space == "torch" and (found := _torch_function(name)) is not None:
        return found
    if space in ("operator", "math", "torch", "builtins"):
        raise UnknownOperator(
            f"`{name}` is not one of the functions that a text may call{nearest(name, FUNCTIONS)}"
        )

    if space not in NAMESPACES.union(allow):
        raise UnknownOperator(
            f"the namespace of `{name}` is not allowed{nearest(space, NAMESPACES)}: if its "
            f"operators are safe to run, give allow=[{space!r}]"
        )

    packet, _, overload = rest.partition(".")
    if f"{space}.{packet}" in FORBIDDEN:
        raise UnknownOperator(f"{space}.{packet} touches files: no text may call it")
    if (found := graph_text.operator_overload(space, packet, overload)) is None:
        raise UnknownOperator(f"torch has no operator `{name}`{_alternatives(space, packet)}")
    return found


def targets_named(spelled: str) -> list[Callable[..., Any]]:
    """Return the operators that a name has in this process; an empty list if it has none.

    They are for questions: a text may not call all of them. A method, or a function of torch,
    stands for all overloads of the operator of its name in ``aten``.
    """
    name = _name_of(spelled)
    space, _, rest = name.partition(".")
    if space == "operator" and hasattr(operator, rest):
        return [getattr(operator, rest)]
    if space in ("method", "torch"):
        packet = getattr(torch.ops.aten, rest.rpartition(".")[2], None)
        if not isinstance(packet, OpOverloadPacket):
            return []
        return [getattr(packet, overload) for overload in packet.overloads()]

    # Inductor registers operators of ``prims`` only when it is imported.
    if space == "prims":
        graph_text.register_prims_of_inductor()
    try:
        return [operator_named(name, [space])]
    except UnknownOperator:
        return []


def _torch_function(name: str) -> Callable[..., Any] | None:
    """Return the function of ``torch`` that graphs of Dynamo call by this name.

    Returns None unless it is an operator, or a function of ``torch.nn.functional``.
    """
    home, _, last = name.rpartition(".")
    if home != "torch.nn.functional" and (f"aten.{last}" in FORBIDDEN or not is_operator(last)):
        return None
    found = getattr(graph_text.PLAIN_FUNCTIONS.get(home), last, None)
    # ``torch.nn.functional`` has names of other modules as well, as ``torch.nn.functional.Tensor``.
    if callable(found) and function_of(found).text == name:
        return found
    return None


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
        # Operators of Python that write nowhere and return no view. Dynamo calls ``__eq__``.
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__pow__"),
        *("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__rfloordiv__", "__rmod__"),
        *("__rpow__", "__matmul__", "__rmatmul__", "__rand__", "__ror__", "__rxor__"),
        *("__neg__", "__pos__", "__abs__", "__invert__"),
    }
)
"""Methods of a tensor, or of a DTensor, that only call operators of other names."""


def is_method(name: str) -> bool:
    """Return whether a text may call the method ``name`` of a tensor: those that are operators."""
    return name in _METHODS or is_operator(name)


def is_operator(name: str) -> bool:
    """Return whether ``aten`` has an operator of that name."""
    return any(found.partition(".")[0] == f"aten::{name}" for found in graph_text.operator_names())


def _alternatives(space: str, packet: str) -> str:
    """Return the overloads of a known operator, or the operator nearest to an unknown one."""
    overloads, packets = [], set()
    for registered in graph_text.operator_names():
        name = registered.replace("::", ".", 1)
        # The default overload has no name: ``aten.mm``.
        if f"{name}.".startswith(f"{space}.{packet}."):
            overloads.append(name)
        elif name.startswith(f"{space}."):
            packets.add(".".join(name.split(".")[:2]))
    if overloads:
        return f": it has {', '.join(sorted(overloads))}"
    return nearest(f"{space}.{packet}", packets)


_MESH = "mesh_"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as the text shows it."""

    symbol: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.symbol} = group({spell_ranks(self.ranks)})"


def spell_ranks(ranks: Sequence[int] | None) -> str:
    """Spell ranks, as a range where they are one.

    >>> spell_ranks([0, 2, 4]), spell_ranks([0, 1, 4]), spell_ranks(None)
    ('range(0, 6, 2)', '[0, 1, 4]', 'None')
    """
    if ranks is None:
        return "None"
    if len(ranks) > 1 and (step := ranks[1] - ranks[0]) > 0:
        found = range(ranks[0], ranks[0] + step * len(ranks), step)
        if list(found) == list(ranks):
            return repr(found)
    return repr(list(ranks))


def mesh_dimension(ranks: Sequence[int], mesh: Mapping[str, int]) -> str | None:
    """Return the dimension of a mesh over all ranks along which these ranks lie; None for none.

    ``mesh`` has extents by dimension, outermost first.
    """
    # Ranks are numbered in row-major order, so the innermost dimension has stride 1.
    stride = math.prod(mesh.values())
    for name, extent in mesh.items():
        stride //= extent
        if not ranks or ranks[0] // stride % extent:
            continue
        along = range(ranks[0], ranks[0] + extent * stride, stride)
        if list(along) == list(ranks):
            return name
    return None


def groups_of(gm: fx.GraphModule, mesh: Mapping[str, int]) -> dict[str, Group]:
    """Return the groups that a graph's collectives name, in order of first use."""
    # The groups of the text that the graph was parsed from.
    parsed: Mapping[str, tuple[int, ...] | None] = gm.meta.get("gt_groups", {})
    groups: dict[str, Group] = {}
    taken: set[str] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not function_of(node.target).group_arguments:
            continue
        name = group_of(node)
        if name is None or name in groups:
            continue
        found = graph_text.resolve_group(name)
        ranks = parsed.get(name)
        if found is not None:
            symbol, ranks = _role(found, mesh), found.ranks
        elif name in parsed:
            symbol = word(name)
        else:
            symbol = "group"
        groups[name] = Group(_unused(symbol, taken), ranks)

    return groups


class HiddenGroup(ValueError):
    """A text does not show the ranks, or the reduction, of a collective of its graph."""


def refuse_hidden_groups(gm: fx.GraphModule) -> None:
    """Check that a text shows the ranks and the reduction of every collective, bodies included.

    Raises:
        HiddenGroup: another group or reduction would have the same text.
    """
    for module in graphs_in(gm):
        groups = groups_of(module, {})
        for node in module.graph.nodes:
            if node.op != "call_function" or not function_of(node.target).launches:
                continue
            where, name = f"{node.name} ({function_of(node.target).text})", group_of(node)
            if hides(node):
                raise HiddenGroup(
                    f"{where} is a collective in place: its graph holds group and reduction as "
                    "objects that no text can show, so a golden would accept others; trace "
                    "torch.distributed._functional_collectives instead"
                )

            if name is not None and groups[name].ranks is None:
                raise HiddenGroup(
                    f"{where} communicates in process group {name!r}, which does not exist in this "
                    "process, so a golden would say group(None) and accept any ranks: check it in "
                    "the world of its trace. If that is this one, a table of groups has outlived "
                    "the world of an earlier test: empty it with its world"
                )


def names_of_groups(
    ranks_of: Mapping[str, tuple[int, ...] | None], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the name of a process group for each symbol of a text.

    It is the ``given`` one, else that of a group of this process with the ranks of the text,
    preferably one with this symbol. Without such a group it is the symbol itself.
    """
    names = {symbol: given[symbol] for symbol in ranks_of if symbol in given}
    # First the groups with the symbol as their role, so that others do not take these away.
    for any_name in (False, True):
        for symbol, ranks in ranks_of.items():
            if symbol in names:
                continue
            for name, group in graph_text.named_groups().items():
                is_named = any_name or symbol == _role(group, {})
                if is_named and group.ranks == ranks and name not in names.values():
                    names[symbol] = name
                    break
    return {symbol: names.get(symbol, symbol) for symbol in ranks_of}


def groups_of_ranks(
    needed: Iterable[tuple[int, ...]], mesh: Mapping[str, int], known: Mapping[tuple[int, ...], str]
) -> dict[tuple[int, ...], Group]:
    """Return a group for each tuple of ranks, in order of first use.

    ``known`` has symbols by ranks. Any other symbol is that of a group of these ranks in this
    process, of a mesh if there is one, else the dimension of ``mesh``.
    """
    groups: dict[tuple[int, ...], Group] = {}
    taken = set(known.values())
    for ranks in dict.fromkeys(needed):
        if ranks in known:
            groups[ranks] = Group(known[ranks], ranks)
            continue
        alike = [group for group in graph_text.named_groups().values() if group.ranks == ranks]
        # A mesh names its groups; other groups of these ranks may have any description.
        found = min(
            alike,
            key=lambda group: (not _is_of_mesh(group), group.description),
            default=graph_text.ResolvedGroup(ranks, ""),
        )
        groups[ranks] = Group(_unused(_role(found, mesh), taken), ranks)

    return groups


def _is_of_mesh(group: graph_text.ResolvedGroup) -> bool:
    return group.description.startswith(_MESH) and group.description != "mesh_default"


def _role(group: graph_text.ResolvedGroup, mesh: Mapping[str, int]) -> str:
    """Return the symbol of a group: the dimension of a mesh, or the description of its maker."""
    if _is_of_mesh(group):
        return word(group.description.removeprefix(_MESH))
    if (dimension := mesh_dimension(group.ranks, mesh)) is not None:
        return word(dimension)
    # Torch's words for the world, and for a group without a description.
    role = {"default_pg": "world", "undefined": "group"}.get(group.description, group.description)
    if role.isidentifier():
        return role
    return "group"


def _unused(symbol: str, taken: set[str]) -> str:
    name, count = symbol, 1
    while name in taken:
        count += 1
        name = f"{symbol}_{count}"
    taken.add(name)
    return name
