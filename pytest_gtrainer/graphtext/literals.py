"""How constants are spelled: by a word of torch, by a literal, or by a digest. These tables are read both ways.

``constants`` gives what a text tells by a digest or a path only, for ``parse`` beside the text.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx

from pytest_gtrainer._torch.values import FakeTensor, HigherOrderOperator, OpOverload, pytree
from pytest_gtrainer.graphtext.operators import operator_text

_T = TypeVar("_T")

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8", torch.bool: "b8",
    torch.complex128: "c128", torch.complex64: "c64", torch.complex32: "c32",
}  # fmt: skip
"""Dtypes with a short name; the others (``float8_e4m3fn``) have torch's."""


def _named(kind: type[_T]) -> dict[str, _T]:
    return {name: value for name, value in vars(torch).items() if isinstance(value, kind)}


_LONG = {str(dtype).removeprefix("torch."): dtype for dtype in _named(torch.dtype).values()}
DTYPE_OF: dict[str, torch.dtype] = {word: dtype for word, dtype in _LONG.items() if dtype not in DTYPES}
DTYPE_OF |= {word: dtype for dtype, word in DTYPES.items()}

LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in _named(torch.layout).values()}
FORMATS = {str(form).removeprefix("torch."): form for form in _named(torch.memory_format).values()}
CONSTANTS: dict[str, object] = {**DTYPE_OF, **LAYOUTS, **FORMATS, "inf": float("inf"), "nan": float("nan")}
CONSTANTS |= {"infj": complex(0, float("inf")), "nanj": complex(0, float("nan"))}
"""What a bare word that is no value of the graph stands for."""


def spell_dtype(dtype: torch.dtype) -> str:
    """``bf16``; a dtype without a short name has torch's.

    >>> spell_dtype(torch.bfloat16), spell_dtype(torch.float8_e5m2)
    ('bf16', 'float8_e5m2')
    """
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


_SMALL = 8
"""Constant tensors of at most so many elements show their values, larger ones a digest."""
PLAIN = (type(None), bool, int, float, str, complex)


def spell_literal(value: Any) -> str | None:
    """A constant that depends on nothing else; None if it has no spelling.

    >>> spell_literal(torch.bfloat16), spell_literal(-0.0), spell_literal(torch.device("cuda", 1))
    ('bf16', '-0.0', 'device("cuda")')
    """
    spell = SPELLINGS.get(type(value))
    if spell is not None:
        return spell(value)
    return operator_text(value) if isinstance(value, OpOverload | HigherOrderOperator) else None


def _last_word(value: torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


SPELLINGS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((*PLAIN, range), repr),
    torch.dtype: spell_dtype,
    torch.layout: _last_word,
    torch.memory_format: _last_word,
    torch.device: lambda value: f'device("{value.type}")',
}
"""How constants of a type are spelled; none of these types has subclasses that are spelled alike."""


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


def other_constant(value: Any) -> str:
    """A constant of a type without a spelling, by its digest.

    >>> other_constant(frozenset([3])) == other_constant(frozenset([4]))
    False
    """
    name, digest = type(value).__name__, object_digest(value)
    return f"const({name!r})" if digest == name else f"const({name!r}, {digest!r})"


def object_digest(value: Any) -> str:
    """The digest of an object's ``repr``; the name of its type where that is an address."""
    shown = repr(value)
    return type(value).__name__ if " at 0x" in shown else hashlib.sha256(shown.encode()).hexdigest()[:12]


def digest_of(value: Any) -> str | None:
    """The digest by which a text tells a tensor or an object; None if it tells the value itself."""
    if isinstance(value, torch.Tensor):
        told = tensor_content(value)
        return told.strip("'") if told.startswith("'sha256:") else None
    if spell_literal(value) is not None or isinstance(value, slice | torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    return object_digest(value)


def constants(gm: fx.GraphModule) -> dict[str, Any]:
    """Large constants and objects without a spelling by their digest, called modules by their path.

    Bodies included. ``parse(render(gm), constants=constants(gm))`` is the graph again.
    """
    found: dict[str, Any] = {}
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_module":
                    found[str(node.target)] = module.get_submodule(str(node.target))
                found |= {digest: value for value in _values(module, node) if (digest := digest_of(value))}
    return found


def _values(gm: fx.GraphModule, node: fx.Node) -> Iterator[Any]:
    """The constants that a node names or holds."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(gm)
        if not isinstance(value, fx.GraphModule):
            yield value
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        if not isinstance(leaf, fx.Node):
            yield leaf
