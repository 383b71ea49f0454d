"""How constants are spelled: by a word of torch, by a literal, or by a digest. These tables are read both ways.

``constants`` gives what a text tells by a digest or a path only, for ``parse`` beside the text.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.values import FakeTensor, HigherOrderOperator, OpOverload, pytree
from pytest_gtrainer.graph.dtypes import DTYPES, spell_dtype
from pytest_gtrainer.graphtext.operators import function_of


def _last_word(value: torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


_TORCH = vars(torch).values()
DTYPE_OF = {spell_dtype(value): value for value in _TORCH if isinstance(value, torch.dtype)}
CONSTANTS: dict[str, object] = {
    **DTYPE_OF,
    **{_last_word(value): value for value in _TORCH if isinstance(value, torch.layout | torch.memory_format)},
    "inf": float("inf"), "nan": float("nan"), "infj": complex(0, float("inf")), "nanj": complex(0, float("nan")),
}  # fmt: skip
"""What a bare word that is no value of the graph stands for."""


_SMALL = 8
"""Constant tensors of at most so many elements show their values, larger ones a digest."""
PLAIN = (type(None), bool, int, float, str, complex)
SPELLINGS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((*PLAIN, range), repr),
    torch.dtype: spell_dtype,
    torch.layout: _last_word,
    torch.memory_format: _last_word,
    torch.device: lambda value: f'device("{value.type}")',
}
"""How constants of a type are spelled; none of these types has subclasses that are spelled alike."""


def spell_literal(value: Any) -> str | None:
    """A constant that depends on nothing else; None if it has no spelling.

    >>> spell_literal(torch.bfloat16), spell_literal(-0.0), spell_literal(torch.device("cuda", 1))
    ('bf16', '-0.0', 'device("cuda")')
    """
    if (spell := SPELLINGS.get(type(value))) is not None:
        return spell(value)
    return function_of(value).text if isinstance(value, OpOverload | HigherOrderOperator) else None


def tensor_content(value: torch.Tensor) -> str:
    """What a constant holds: by content, not by name, as the tracer's numbering of constants drifts."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return "None"
    if value.numel() <= _SMALL and value.dtype in DTYPES:
        return repr(value.tolist())
    content = bytes_of(value)
    memory = ctypes.string_at(content.data_ptr(), content.numel())  # `numpy()` would need NumPy
    return repr("sha256:" + hashlib.sha256(memory).hexdigest()[:16])


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, element by element, whatever its strides."""
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def object_digest(value: Any) -> str:
    """The digest of an object's ``repr``; the name of its type where that is an address."""
    shown = repr(value)
    return type(value).__name__ if " at 0x" in shown else hashlib.sha256(shown.encode()).hexdigest()[:12]


def other_constant(value: Any) -> str:
    """A constant of a type without a spelling, by its digest.

    >>> other_constant(frozenset([3])) == other_constant(frozenset([4]))
    False
    """
    name, digest = type(value).__name__, object_digest(value)
    return f"const({name!r})" if digest == name else f"const({name!r}, {digest!r})"


def constants(gm: fx.GraphModule) -> dict[str, Any]:
    """Large constants and objects without a spelling by their digest, called modules by their path.

    Bodies included. ``parse(render(gm), constants=constants(gm))`` is the graph again.
    """
    found: dict[str, Any] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_module":
                found[str(node.target)] = module.get_submodule(str(node.target))
            held = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
            for value in [held, *pytree.tree_leaves((node.args, node.kwargs))]:
                if isinstance(value, torch.Tensor):
                    told = tensor_content(value).strip("'")
                    if told.startswith("sha256:"):
                        found[told] = value
                elif spell_literal(value) is None and not isinstance(value, _TOLD):
                    found[object_digest(value)] = value
    return found


_TOLD = (fx.Node, fx.GraphModule, slice, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What has no spelling of its own and is told in full."""
