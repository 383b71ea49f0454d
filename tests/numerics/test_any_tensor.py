"""Bytes of each kind of tensor are compared, hashed and recorded.

Views of one element, narrow dtypes and quantised tensors are among them.
"""

import warnings
from collections.abc import Callable

import pytest
import torch

from pytest_gtrainer import Record, assert_run_to_run, compare, digest
from pytest_gtrainer.numerics.bits import NoBytes
from pytest_gtrainer.numerics.run_to_run import PRESSURES

W = torch.arange(12.0).reshape(3, 4) + 1
Z = torch.complex(W, -W)

VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "one element of a column": lambda: W[:1, 0],
    "the last element of a column": lambda: W[-1:, 3],
    "one row of one column": lambda: W[1:2, 1:2],
    "one element with a stride of 0": lambda: W[0, 0].expand(1),
    "a repeated element": lambda: W[0, :1].expand(3),
    "a column": lambda: W[:, 1],
    "a transposed matrix": lambda: W.t(),
    "without dimensions": lambda: W[2, 3],
    "none at all": lambda: W[:0, 0],
    "the real part": lambda: Z.real,
    "the imaginary part": lambda: Z.imag,
    "the imaginary part of one": lambda: Z[:1, 0].imag,
    "the imaginary part of a conjugate, which is negated later": lambda: Z.conj().imag,
    "a conjugate": lambda: Z.conj(),
    "a conjugate of one element": lambda: Z[:1, 0].conj(),
    "one negated later": lambda: torch.ops.aten._neg_view(W)[:1, 0],
    "one complex128 of a column": lambda: Z.to(torch.complex128)[:1, 1],
    "one bfloat16 at an odd offset": lambda: W.to(torch.bfloat16)[1:2, 1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_digest_of_its_copy(view: str):
    """L1"""
    made = VIEWS[view]()
    copy = torch.empty(made.shape, dtype=made.dtype).copy_(made)
    for algorithm in ("xxh3_128", "sha256", "mix128"):
        assert digest(made, algorithm=algorithm) == digest(copy, algorithm=algorithm)
    record = Record()
    record.add(0, 0, "weight", "w", made)
    sides = [record[0, 0, "weight", "w"], torch.ones(1)], [copy, torch.ones(1)]
    assert compare(*sides).outcome == "equal"


@pytest.mark.parametrize("view", [name for name in VIEWS if name != "none at all"])
def test_a_view_that_differs_is_different(view: str):
    """L1: with its first element."""
    made = VIEWS[view]()
    zeros = torch.zeros(100, dtype=made.dtype).as_strided(made.shape, made.stride())
    assert digest(zeros) != digest(made)
    first = compare({"w": made}, {"w": zeros}).first
    assert first is not None
    assert (first.kind, first.element) == ("bits", (0,) * made.dim())


NARROW = [
    *(f"uint{width}" for width in range(1, 8)),
    *(f"int{width}" for width in range(1, 8)),
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "float4_e2m1fn_x2",
    "float8_e8m0fnu",
    "complex32",
    "uint16",
    "quint8",
    "qint32",
    "quint4x2",
]


def narrow(dtype: str, spoiled: int | None = None) -> torch.Tensor:
    """Four rows and four columns, one byte of which has another bit."""
    raw = torch.arange(16, dtype=torch.uint8) + 64
    if spoiled is not None:
        raw[spoiled] ^= 1
    return raw.view(getattr(torch, dtype)).view(4, -1)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_one_bit_of_a_narrow_dtype(dtype: str, transposed: bool):
    """L1, L4: if torch can neither copy nor print an element of a dtype, its bits are shown."""
    plain, spoiled = (narrow(dtype, which) for which in (None, 13))
    if transposed:
        plain, spoiled = plain.t(), spoiled.t()
    size = plain.element_size()
    row, column = 3, 1 // size
    assert compare([narrow(dtype)], [narrow(dtype)]).outcome == "equal"
    first = compare([spoiled], [plain]).first
    assert first is not None
    assert (first.kind, first.elements) == ("bits", 1)
    assert first.element == ((column, row) if transposed else (row, column))
    assert first.actual_bits != first.expected_bits
    assert "\n".join(first.sides())
    assert digest(plain) != digest(spoiled)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_record_keeps_a_narrow_dtype(dtype: str, tmp_path):
    """L2: in memory and on disk."""
    records = []
    for spoiled in (None, 13):
        record = Record()
        record.add(0, 0, "weight", "w", narrow(dtype, spoiled))
        record.save(tmp_path / "record")
        records.append(Record.load(tmp_path / "record"))
        assert compare(record, records[-1]).outcome == "equal"
    assert compare(*records).outcome == "different"


def test_a_run_may_return_a_narrow_dtype():
    """L5"""
    assert_run_to_run(lambda: narrow("uint4"), runs=2, pressures=PRESSURES[:1])


def per_tensor(scale: float = 0.5, zero: int = 3, first: float = 1.0) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is going to move
        return torch.quantize_per_tensor(torch.tensor([first, 2.0]), scale, zero, torch.quint8)


def per_channel(scale: float = 0.5, zero: int = 3, axis: int = 0) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales, zeros = torch.tensor([scale, 0.25]), torch.tensor([zero, 4])
        return torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, axis, torch.qint8)


@pytest.mark.parametrize(
    ("spoiled", "good", "name"),
    [
        (per_tensor(first=1.5), per_tensor(), "w.int_repr"),
        (per_tensor(scale=0.25, first=0.5), per_tensor(), "w.q_scale"),
        (per_tensor(zero=4, first=0.5), per_tensor(), "w.q_zero_point"),
        (per_channel(scale=0.125), per_channel(), "w.q_per_channel_scales"),
        (per_channel(zero=2), per_channel(), "w.q_per_channel_zero_points"),
        (per_channel(axis=1), per_channel(), "w.q_per_channel_axis"),
    ],
)
def test_quantised_tensors_differ_by_integers_scales_and_zero_points(spoiled, good, name: str):
    """L1: what each number stands for is in the scales, so these are compared too."""
    assert compare({"w": good}, {"w": good.clone()}).outcome == "equal"
    found = compare({"w": spoiled}, {"w": good})
    assert name in [difference.key.name for difference in found.differences]
    assert digest(spoiled) != digest(good)
    assert digest(good) == digest(good.clone())
    record, other = Record(), Record()
    record.add(0, 0, "weight", "w", spoiled)
    other.add(0, 0, "weight", "w", good)
    assert name in [difference.key.name for difference in compare(record, other).differences]


def test_per_tensor_and_per_channel_are_different():
    """L1"""
    verdict = compare({"w": per_tensor()}, {"w": per_channel()})
    assert verdict.outcome == "different"
    assert "w.q_scale" in [key.name for key in verdict.only_actual]


def test_memory_that_was_freed_is_not_read():
    """L3: FSDP resizes the storage of an unsharded parameter to 0; a read ended the process."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    verdict = compare({"w": freed, "b": W}, {"w": torch.ones(4), "b": W.clone()})
    assert (verdict.outcome, verdict.compared) == ("unverified", 1)
    assert "was freed" in verdict.reasons[0]
    with pytest.raises(NoBytes, match="was freed"):
        digest(freed)
    assert compare([torch.ones(0), W], [torch.ones(0), W.clone()]).outcome == "equal"
