"""Which operators give the same bits compiled by Inductor as in eager: the table of
docs/compile.md.

    python -m benchmarks.compiled_operators [operator ...]

Each is compiled alone, on seeded normal numbers. "decomposition": the graph that Inductor leaves,
run with kernels of eager, differs already. "code generation": it does not, and the generated code
does. It takes a compiler and minutes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_gtrainer import assert_compiled_bitwise
from pytest_gtrainer.numerics.compare import BitwiseDifference

W = (256,)
X = (64, 256)
IMAGE = (4, 16, 20, 20)
CHANNELS = (16,)
LABELS = torch.arange(64) * 7 % 256

# by name a function, and the shape of each of its inputs
OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [X, (128, 256), (128,)]),
    "bmm": (torch.bmm, [(4, 32, 64), (4, 64, 16)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(4, 32, 64), (4, 64, 16)]),
    "sdpa": (F.scaled_dot_product_attention, [(2, 4, 32, 16)] * 3),
    "conv2d": (F.conv2d, [IMAGE, (8, 16, 3, 3)]),
    "embedding": (lambda table: F.embedding(LABELS, table), [(256, 64)]),
    "add, mul (one each)": (lambda a, b: (a + b, a * b), [X, X]),
    "a * b + c": (lambda a, b, c: a * b + c, [X, X, X]),
    "relu": (F.relu, [X]),
    "gelu": (F.gelu, [X]),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), [X]),
    "silu": (F.silu, [X]),
    "sigmoid": (torch.sigmoid, [X]),
    "tanh": (torch.tanh, [X]),
    "exp": (torch.exp, [X]),
    "rsqrt of abs": (lambda x: torch.rsqrt(x.abs()), [X]),
    "softmax": (lambda x: F.softmax(x, -1), [X]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [X]),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), [X]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, W, w, b), [X, W, W]),
    "rms_norm": (lambda x, w: F.rms_norm(x, W, w, 1e-6), [X, W]),
    "batch_norm, training": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [IMAGE, CHANNELS, CHANNELS],
    ),
    "batch_norm, inference": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v.abs(), w, b, False),
        [IMAGE, CHANNELS, CHANNELS, CHANNELS, CHANNELS],
    ),
    "sum of rows": (lambda x: x.sum(-1), [X]),
    "sum of all": (lambda x: x.sum(), [X]),
    "mean of rows": (lambda x: x.mean(-1), [X]),
    "cumsum": (lambda x: x.cumsum(-1), [X]),
    "amax": (lambda x: x.amax(-1), [X]),
    "dropout": (lambda x: F.dropout(x, 0.5), [X]),
}


def outcome(function: Callable[..., Any], inputs: list[Tensor]) -> str:
    """What broke equality, "equal" if nothing did."""
    try:
        return assert_compiled_bitwise(function, *inputs).outcome
    except BitwiseDifference as difference:
        return (
            "decomposition"
            if "decomposition" in str(difference).splitlines()[0]
            else "code generation"
        )


def main() -> int:
    print(
        f"torch {re.sub(r'[+].*', '', torch.__version__)}, CPU\n\n| operator | fp32 | bf16 |\n|---|---|---|"
    )
    for name in sys.argv[1:] or OPERATORS:
        function, shapes = OPERATORS[name]
        told = []
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            told.append(
                outcome(
                    function,
                    [torch.randn(shape, generator=generator).to(dtype) for shape in shapes],
                )
            )
        print(f"| {name} | {' | '.join(told)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
