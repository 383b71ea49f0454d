"""Raw bytes of every kind of tensor, elements for a person, distances in ULP."""

import itertools
import math
import struct

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.testing._internal.two_tensor import TwoTensor

from pytest_gtrainer.numerics.bits import (
    NoBytes,
    byte_view,
    count_differing,
    pattern,
    same_bytes,
    ulp_distance,
    value,
)
from tests.numerics.samples import ALL, FLOATS, FP8


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_bytes_of_every_dtype(dtype: torch.dtype):
    tensor = torch.tensor([1, 0, 1, 1]).to(dtype)
    assert byte_view(tensor).numel() == 4 * tensor.element_size()
    assert count_differing(tensor, torch.tensor([1, 1, 1, 1]).to(dtype)) == (1, 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,), (2, 3, 5)])
def test_bytes_of_every_shape(shape: tuple[int, ...]):
    assert byte_view(torch.zeros(shape)).shape == (4 * math.prod(shape),)


def test_contiguous_bytes_are_a_view_and_others_in_row_major_order():
    tensor = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert byte_view(tensor).data_ptr() == tensor.data_ptr()
    assert byte_view(tensor.t()).tolist() == [0, 3, 1, 4, 2, 5]


def test_lazy_conjugation_and_negation_are_carried_out():
    assert pattern(torch.tensor(1 + 2j).conj()) == "(0x3f800000, 0xc0000000)"
    assert pattern(torch.tensor(1 + 2j).conj().imag) == "0xc0000000"


@pytest.mark.parametrize("offset", range(9))
def test_equality_sees_every_byte_whatever_the_alignment(offset: int):
    a = torch.zeros(40, dtype=torch.uint8)[offset : offset + 21]
    for position in range(21):
        b = torch.zeros(40, dtype=torch.uint8)[8 - offset : 29 - offset]
        assert same_bytes(a, b)
        b[position] = 1
        assert not same_bytes(a, b)


@pytest.mark.parametrize("offsets", [(0, 3), (3, 0), (4, 2)], ids=str)
def test_equality_of_bytes_that_are_not_aligned_alike(offsets: tuple[int, int]):
    """A parameter against a view of a buffer: the wider word would fit one side alone."""
    a, b = (torch.zeros(40, dtype=torch.uint8)[offset : offset + 21] for offset in offsets)
    assert same_bytes(a, b), f"equal bytes from {offsets} on count as different"
    b[-1] += 1
    assert not same_bytes(a, b), f"the last byte is not looked at, from {offsets} on"


@pytest.mark.parametrize("lengths", [(8, 16), (16, 8), (7, 8), (8, 7), (0, 1)])
def test_byte_views_of_different_length_are_not_equal(lengths: tuple[int, int]):
    assert not same_bytes(*(torch.zeros(length, dtype=torch.uint8) for length in lengths))


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, device="meta"), "a meta tensor holds no values"),
        (_fake, "a fake tensor holds no values"),
        (
            lambda: torch.ones(2, 2).to_sparse(),
            "a torch.sparse_coo tensor of torch.float32 has no plain bytes",
        ),
        (
            lambda: TwoTensor(torch.ones(2), torch.ones(2)),
            "a TwoTensor wraps other tensors: compare its parts",
        ),
    ],
)
def test_tensors_without_bytes_say_so(make, why: str):
    with pytest.raises(NoBytes, match=why):
        byte_view(make())


@pytest.mark.parametrize(
    ("dtype", "bits", "text"),
    [
        (torch.bfloat16, "0xbf80", "-1"),
        (torch.float16, "0xbc00", "-1"),
        (torch.float32, "0xbf800000", "-1"),
        (torch.float64, "0xbff0000000000000", "-1"),
        (torch.float8_e4m3fn, "0xb8", "-1"),
        (torch.complex128, "(0xbff0000000000000, 0x0000000000000000)", "(-1+0j)"),
        (torch.int32, "0xffffffff", "-1"),
    ],
    ids=str,
)
def test_an_element_as_bits_and_value(dtype: torch.dtype, bits: str, text: str):
    element = torch.tensor(-1).to(dtype)
    assert (pattern(element), value(element)) == (bits, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8[:2]], ids=str)
def test_neighbours_never_look_the_same(dtype: torch.dtype):
    width = torch.iinfo(_integer(dtype))
    start = max(width.max // 2, 1)
    neighbours = torch.arange(start, start + 50).to(_integer(dtype)).view(dtype)
    assert len({value(neighbour) for neighbour in neighbours}) == 50


def _integer(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulp_counts_the_numbers_in_between(dtype: torch.dtype):
    one = torch.tensor(1.0, dtype=dtype)
    above = one + torch.finfo(dtype).eps
    tiny = torch.tensor([1, 0]).to(_integer(dtype)).view(dtype)[0]
    assert ulp_distance(one, one) == 0
    assert ulp_distance(one, above) == ulp_distance(above, one) == 1
    assert ulp_distance(one, above + torch.finfo(dtype).eps) == 2
    assert ulp_distance(tiny, -tiny) == 2
    assert ulp_distance(torch.tensor(0.0, dtype=dtype), torch.tensor(-0.0, dtype=dtype)) == 0


def test_ulp_of_float32_agrees_with_nextafter():
    x = torch.tensor(-0.3)
    for count in range(1, 5):
        x = torch.nextafter(x, torch.tensor(1.0))
        assert ulp_distance(torch.tensor(-0.3), x) == count


def test_the_neighbour_of_the_largest_number_is_infinity():
    largest = torch.tensor(torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert ulp_distance(largest, torch.tensor(math.inf, dtype=torch.bfloat16)) == 1


def test_ulp_of_fp8():
    assert ulp_distance(*torch.tensor([1.0, 1.125]).to(torch.float8_e4m3fn)) == 1


@pytest.mark.parametrize("dtype", [*FP8, torch.float8_e8m0fnu], ids=str)
def test_ulp_of_every_fp8_format_counts_its_numbers(dtype: torch.dtype):
    """All 256 patterns: neighbours in order of size are 1 apart, NaN is nowhere."""
    patterns = torch.arange(256).to(torch.uint8).view(dtype)
    numbers = patterns[~patterns.to(torch.float64).isnan()]
    ordered = numbers[numbers.to(torch.float64).argsort(stable=True)]
    distances = [ulp_distance(a, b) for a, b in itertools.pairwise(ordered)]
    zeros = int((ordered.to(torch.float64) == 0).sum())
    assert distances.count(0) == max(zeros - 1, 0)
    assert set(distances) <= {0, 1}
    nan = patterns[patterns.to(torch.float64).isnan()][0]
    assert ulp_distance(nan, ordered[0]) is None


@pytest.mark.parametrize("size", [1, 5, 11])
def test_counting_by_pieces_is_counting(monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr("pytest_gtrainer.numerics.bits._PIECE", 4)
    a, b = torch.zeros(size), torch.zeros(size)
    assert count_differing(a, b) == (0, -1)
    b[[0, -1]] = -0.0
    assert count_differing(a, b) == (len({0, size - 1}), 0)
    b[0] = 0.0
    # the number of differing elements and the place of the first are counted over all pieces
    assert count_differing(a, b) == ((1, size - 1) if size > 1 else (0, -1))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor(math.nan), torch.tensor(0.0)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)),
        (torch.tensor(1), torch.tensor(2)),
        (torch.tensor(1j), torch.tensor(2j)),
    ],
)
def test_ulp_where_it_means_nothing(a: torch.Tensor, b: torch.Tensor):
    assert ulp_distance(a, b) is None
    assert ulp_distance(b, a) is None


def test_pattern_agrees_with_struct():
    for number in (0.1, -2.5e-310, math.pi):
        packed = struct.pack(">d", number).hex()
        assert pattern(torch.tensor(number, dtype=torch.float64)) == f"0x{packed}"


@pytest.mark.gt_world("fake", size=4, mesh={"dp": 4})
def test_a_result_that_is_waited_for_lazily_is_taken_when_it_is_there(gt_mesh):
    """Functional collectives return such results outside a graph; fake ranks add nothing."""
    mine = torch.arange(4.0)
    later = all_reduce(mine, "sum", gt_mesh)
    assert type(later) is AsyncCollectiveTensor
    assert same_bytes(byte_view(later), byte_view(mine))
