"""Fingerprints of parts add up to that of the whole tensor, whatever the layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_gtrainer.over_time.fingerprints import MODULUS, fingerprint, fingerprints_of_rows

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@st.composite
def cut_tensors(draw):
    """A tensor, and offsets and parts of a grid of cuts through it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    seed, dtype = draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES))
    numbers = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed))
    parts = [((0,) * len(shape), numbers.to(dtype))]
    for dim, size in enumerate(shape):
        cut = draw(st.integers(0, size))
        halves = []
        for offsets, part in parts:
            moved = (*offsets[:dim], cut, *offsets[dim + 1 :])
            halves.append((offsets, part.narrow(dim, 0, cut)))
            halves.append((moved, part.narrow(dim, cut, size - cut)))
        parts = halves
    return numbers.to(dtype), parts


@given(cut_tensors())
def test_parts_add_up(case):
    """Z1: any grid of blocks, empty ones included."""
    whole, parts = case
    total = sum(int(fingerprint(part, offsets, whole.shape)) for offsets, part in parts)
    assert (total - int(fingerprint(whole))) % 2**64 == 0


def test_parts_of_a_tensor_larger_than_a_piece():
    whole = torch.arange(600_000, dtype=torch.int32).view(1000, 600)
    rows = fingerprint(whole[:333], (0, 0), whole.shape)
    rows = rows + fingerprint(whole[333:], (333, 0), whole.shape)
    columns = fingerprint(whole[:, :7], (0, 0), whole.shape)
    columns = columns + fingerprint(whole[:, 7:], (0, 7), whole.shape)
    assert rows == columns == fingerprint(whole)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (torch.tensor([2.0, 1.0, 0.0]), "places"),
        (torch.tensor([1.0, 2.0, -0.0]), "the sign of zero"),
        (torch.tensor([1.0, 2.0, float("nan")]), "a NaN"),
    ],
)
def test_what_a_fingerprint_sees(other, why):
    assert fingerprint(other) != fingerprint(torch.tensor([1.0, 2.0, 0.0])), why


def test_rows_do_not_depend_on_the_batch():
    batch = torch.randn(4, 3, 2)
    rows = fingerprints_of_rows(batch)
    assert torch.equal(fingerprints_of_rows(batch[2:]), rows[2:])
    assert len(set(rows.tolist())) == 4


@pytest.mark.parametrize("width", [1, 7, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 19) + 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.float64])
def test_a_row_has_the_fingerprint_of_the_tensor_that_it_is(width, dtype):
    """Weights are made in pieces of 2^18 words; a long row has several."""
    rows = torch.arange(2 * width).view(2, width).remainder(251).to(dtype)
    found = fingerprints_of_rows(rows)
    assert found.tolist() == [int(fingerprint(row)) for row in rows]
    if width > 1 << 18:
        words = rows.clone()
        words[:, [0, 1 << 18]] = rows[:, [1 << 18, 0]]
        assert not torch.equal(words, rows)
        assert all(found != fingerprints_of_rows(words))


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.uint8, 0x979EBFB3D2604B72),
        (torch.int8, 0x979EBFB3D2604B72),
        (torch.bool, 0xE170BDFA6D7394EA),
        (torch.bfloat16, 0x45F6F46AA5FD1CA0),
        (torch.float16, 0x300A92B33B33E500),
        (torch.int32, 0x76F68638B4929C72),
        (torch.float32, 0xF46AA5FD1CA00000),
        (torch.float64, 0xD8F4A8CF08DC0000),
        (torch.int64, 0x69636497759D857E),
        (torch.complex64, 0x7770E221E0080000),
    ],
)
def test_a_fingerprint_is_what_it_was_in_earlier_versions(dtype, number):
    """Records of both are compared."""
    given = [253, 0, 1, 100] if dtype == torch.uint8 else [-3, 0, 1, 100]
    tensor = torch.tensor(given).to(dtype)
    assert int(fingerprint(tensor)) % MODULUS == number
    assert int(fingerprints_of_rows(tensor[None])[0]) % MODULUS == number


def test_a_fingerprint_of_several_pieces_is_what_it_was():
    tensor = torch.arange(2**18 + 3, dtype=torch.uint8)
    assert int(fingerprint(tensor)) % MODULUS == 0x8EF1D7D423877AF0
