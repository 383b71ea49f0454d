"""Digests and comparisons of tensors on a GPU: the same strings and verdicts as of their copies on
the CPU.
"""

import pytest
import torch

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, compare, digest
from pytest_gtrainer.numerics.digest import ALGORITHMS

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes as a tensor, NaN payloads and negative zeros included."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_those_of_a_copy_on_the_cpu(cuda, dtype, algorithm):
    """Contiguous, with holes, transposed, empty, and larger than a leaf of 4 MiB."""
    large = some(dtype, 3 << 20)
    for tensor in (
        some(dtype, 7, 5),
        some(dtype, 8, 6)[::2, 1::2],
        some(dtype, 4, 9).T,
        some(dtype, 0),
        large,
    ):
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=cuda).copy_(
            tensor
        )
        assert digest(there, algorithm=algorithm) == digest(tensor, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_flipped_bit_shows(cuda, algorithm):
    """The twin that must differ: any one bit, first, last, or across the edge of a leaf."""
    tensor = some(torch.int32, 3 << 20).to(cuda)
    before = digest(tensor, algorithm=algorithm)
    for place in (0, (1 << 20) - 1, 1 << 20, -1):
        for bit in (0, 31):
            other = tensor.clone()
            other[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            assert digest(other, algorithm=algorithm) != before


def test_comparisons_find_the_element(cuda):
    """A verdict on GPU tensors names the element and both values."""
    expected = torch.arange(1000, dtype=torch.float32, device=cuda).reshape(10, 100)
    actual = expected.clone()
    actual[3, 7] = torch.nextafter(actual[3, 7], torch.tensor(torch.inf, device=cuda))
    assert_bitwise_equal({"w": expected.clone()}, {"w": expected})
    assert_bitwise_different({"w": actual}, {"w": expected})
    verdict = compare({"w": actual}, {"w": expected})
    assert (verdict.first.element, verdict.differing_elements) == ((3, 7), 1)


def test_the_cost_of_a_digest(cuda, record_property):
    """``mix128`` stays on the GPU: of 4 GiB sixteen bytes a leaf come to the host."""
    tensor = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device=cuda)
    took = {}
    for name, work in (
        ("sum", lambda: tensor.sum()),
        ("mix128", lambda: digest(tensor, algorithm="mix128")),
    ):
        work()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        took[name] = start.elapsed_time(end)
    record_property(
        "measured", f"4 GiB: mix128 takes {took['mix128'] / took['sum']:.0f} times a sum"
    )
    changed = tensor.clone()
    changed[-1] += 1
    assert digest(changed, algorithm="mix128") != digest(tensor, algorithm="mix128")
