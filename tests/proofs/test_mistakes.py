"""Nothing is missed: each planted mistake that changes values is found in its kind.

The long test prints the table: ``-m long -rP``.
"""

import time

import pytest
import torch

from pytest_gtrainer.numerics.bits import byte_view, same_bytes
from tests.passes import test_mutants as mutants
from tests.proofs.mistakes import CASES, MUTANTS, NO_VALUES, PLANTED, numbers_of, prove_case

# Of the mistakes in one large graph, FSDP beside tensor parallelism, one of each kind: of a sum that
# is left out, of a place in a payload, and of a rounding. Bits show the others (test_twenty_mistakes).
ONE_OF_EACH_KIND = (
    "gradient_of_a_norm_not_summed",
    "two_gradients_exchanged",
    "gradients_added_in_bf16",
)


def tier_of(case):
    if case.seconds >= 7 and case.name not in ONE_OF_EACH_KIND:
        return pytest.mark.long
    return pytest.mark.second_tier if case.seconds >= 1 else ()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=tier_of(case), id=str(case)) for case in CASES]
)
def test_a_mistake_is_found_in_its_kind(case):
    proof = prove_case(case)
    assert proof.kind == case.kind, str(proof)


def test_every_mutant_is_judged_or_changes_no_value():
    judged = {case.name for case in MUTANTS if not case.is_right}
    assert not judged & NO_VALUES.keys()
    assert judged | NO_VALUES.keys() == mutants.MUTANTS.keys()


def are_equal(one, other):
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return same_bytes(byte_view(one.contiguous()), byte_view(other.contiguous()))


def are_close(one, other):
    """Return what ``assert_close`` says, with the tolerances that it has by default."""
    if one.dtype.itemsize == 1 and one.dtype.is_floating_point and one.dtype == other.dtype:
        one, other = one.float(), other.float()  # it knows no tolerance of eight bits
    try:
        torch.testing.assert_close(one, other)
    except AssertionError:
        return False
    return True


def on_numbers(case):
    """Return whether bits are equal in the smallest world, and whether numbers are close."""
    with pytest.MonkeyPatch.context() as patch:
        actual, expected = numbers_of(case, patch)
    found = []
    for check in (are_equal, are_close):
        is_same = actual.keys() == expected.keys()
        found.append(is_same and all(check(actual[key], expected[key]) for key in expected))
    return found


def row_of(case):
    begun = time.process_time()
    proof = prove_case(case)
    seconds = time.process_time() - begun
    bits, close = on_numbers(case)
    ranks = torch.Size(case.few.values()).numel()
    cells = [
        f"{case.of}: {case.name.replace('_', ' ')}",
        proof.kind if proof.kind == case.kind else f"**{proof.kind}**",
        f"{seconds:.1f}",
        f"{'equal' if bits else 'different'} ({ranks})",
        "pass" if close else "fail",
    ]
    return f"| {' | '.join(cells)} |", proof.kind == case.kind


@pytest.mark.long
def test_the_table_of_mistakes():
    """Numbers are random ones, in a world of two ranks along each dimension of the mesh."""
    print("| mistake | proof | CPU s | bits (ranks) | assert_close |\n|---|---|---|---|---|")
    found = []
    for case in CASES + PLANTED:
        row, is_found = row_of(case)
        print(row, flush=True)
        found.append(is_found)
    assert all(found)
