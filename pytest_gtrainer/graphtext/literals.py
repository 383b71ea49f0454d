"""Spelling of literals, words of torch, and constant tensors in graph text."""

import ctypes
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

from pytest_gtrainer._torch.values import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    is_traceable_wrapper_subclass,
)
from pytest_gtrainer.graph.nodes import DTYPES, spell_dtype
from pytest_gtrainer.graphtext.operators import function_of, spell_ranks

_SMALL = 8  # constant tensors of at most so many elements show their values, larger ones a digest
PLAIN = (type(None), bool, int, float, str, complex)
SPELLINGS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((*PLAIN, range), repr),
    torch.dtype: spell_dtype,
    **dict.fromkeys(
        (torch.layout, torch.memory_format), lambda value: str(value).removeprefix("torch.")
    ),
    torch.device: lambda value: f'device("{value.type}")',
}
"""The spelling of constants by type; instances of a subclass are objects."""
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
TORCH_WORDS = {
    SPELLINGS[type(one)](one): one for one in vars(torch).values() if isinstance(one, _NAMED)
}
DTYPE_OF = {word: value for word, value in TORCH_WORDS.items() if isinstance(value, torch.dtype)}
CONSTANTS: dict[str, object] = {
    **TORCH_WORDS,
    "inf": float("inf"),
    "nan": float("nan"),
    "infj": complex(0, float("inf")),
    "nanj": complex(0, float("nan")),
}
"""The constants that bare words stand for, where no value of the graph has that name."""


def spell_literal(value: Any) -> str | None:
    """Return the spelling of a constant that depends on nothing else; None if it has none."""
    if type(value) in SPELLINGS:
        return SPELLINGS[type(value)](value)
    if isinstance(value, OpOverload | HigherOrderOperator):
        return function_of(value).text
    return None


def held_as(value: Any) -> str:
    """Return the layout or the placements of a value, which its type does not show.

    Returns "" of strided tensors, and of values that are no tensors.

    >>> held_as(torch.eye(2).to_sparse())
    'sparse_coo f32[2, 2]'
    """
    if isinstance(value, tuple | list):
        found = list(map(held_as, value))
        if not any(found):
            return ""
        return "; ".join(found)  # also of the others, so that places can be counted

    if not isinstance(value, torch.Tensor):
        return ""
    if is_traceable_wrapper_subclass(value):
        if not (placements := getattr(value, "placements", None)):
            return type(value).__name__
        mesh = value.device_mesh
        names = mesh.mesh_dim_names or range(mesh.ndim)
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
        ranks = spell_ranks(mesh.mesh.flatten().tolist())
        return f"{', '.join(map(repr, placements))} over {sizes} of {ranks}"

    if value.layout is torch.strided:
        return ""
    shape = ", ".join(map(str, value.shape))
    return f"{SPELLINGS[torch.layout](value.layout)} {spell_dtype(value.dtype)}[{shape}]"


def tensor_content(value: torch.Tensor) -> str:
    """Return the elements of a constant, or their digest; "None" of a fake tensor.

    Names of constants are not used, because the tracer numbers them in the order of the trace.
    """
    if isinstance(value, FakeTensor) or value.is_meta:
        return "None"
    if value.numel() <= _SMALL and value.dtype in DTYPES and not held_as(value):
        # A tensor without elements may still have many rows: shape [1000, 0].
        rows = math.prod(filter(None, value.shape))
        if value.numel() == 0 and rows > _SMALL:
            return "[]"
        return repr(value.tolist())
    return repr("sha256:" + hashlib.sha256(_content(value)).hexdigest()[:16])


def _content(value: torch.Tensor) -> bytes:
    """Return the bytes of a tensor.

    Those of a quantised tensor include scales and zero points; a wrapper has its inner tensors.
    """
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inner = [type(value).__name__, held_as(value), repr(context)]
        for name in names:
            # A DTensor also has its mesh here, which is no tensor; ``held_as`` shows it.
            part = getattr(value, name)
            inner.append(name)
            if isinstance(part, torch.Tensor):
                inner[-1] += f"={_content(part).hex()}"
        return "; ".join(inner).encode()

    if value.is_quantized:
        return repr(_quantisation(value)).encode() + _content(value.int_repr())
    if value.layout is not torch.strided:
        return f"{held_as(value)} {_content(value.to_dense()).hex()}".encode()
    content = bytes_of(value)
    # ``numpy()`` would need NumPy, which torch does not require.
    return ctypes.string_at(content.data_ptr(), content.numel())


def _quantisation(value: torch.Tensor) -> tuple[object, ...]:
    """Return scheme, scales and zero points of a quantised tensor."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return str(value.qscheme()), value.q_scale(), value.q_zero_point()
    scales, zero_points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return str(value.qscheme()), value.q_per_channel_axis(), scales.tolist(), zero_points.tolist()


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements of a tensor, in their order, whatever its strides."""
    dense = value.detach()
    if value.layout is not torch.strided:
        dense = dense.to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
