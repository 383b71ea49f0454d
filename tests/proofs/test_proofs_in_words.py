"""The lines of a proof, each of its parts by a table."""

from fractions import Fraction

import pytest

from pytest_gtrainer.proofs.proof import FirstDifference, Proof, Unchecked

FIRST = FirstDifference("loss", 0, (1, 2), 3, 8)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (FIRST, "loss, rank 0, element [1, 2] (3 of 8 differ)"),
        (FirstDifference("loss", 3, (1,), 1, 8), "loss, rank 3, element [1] (1 of 8 differ)"),
        (FirstDifference("loss", None, (0,), 1, 8), "loss, element [0] (1 of 8 differ)"),
        (FirstDifference("loss", 0, (), 1, 1), "loss, rank 0 (1 of 1 differ)"),
        (FirstDifference("w", 0, says="other shapes"), "w, rank 0: other shapes"),
    ],
)
def test_the_first_difference_has_its_rank_and_element(first, words):
    assert str(first) == words


@pytest.mark.parametrize(
    ("proof", "lines"),
    [
        (Proof("identical", 1), ["identical: the same bits for any numbers", "(1 result)"]),
        (Proof("reordered", 2, FIRST), ["(2 results)", "  not other kernels: first loss, rank 0"]),
        (Proof("other kernels", 2, FIRST), ["  not identical: first loss, rank 0"]),
        (Proof("another function", 2, FIRST), ["another function: ", "  first loss, rank 0"]),
        (
            Proof("unknown", reason="it draws", first=FIRST),
            ["unknown: it draws", "  not rounds el"],
        ),
        (
            Proof("another function", factor=Fraction(2, 3), repairs=("a sum over 'tp'",)),
            ["  2/3 times what is expected", "  equal after a sum over 'tp'"],
        ),
        (
            Proof("another function", repairs=("a sum over 'tp'", "a mean over 'dp'")),
            ["  equal after a sum over 'tp' or after a mean over 'dp'"],
        ),
        (
            Proof("identical", origin="node a", assumes=("b", Unchecked("c"))),
            ["  begins at node a", "  assumed: b", "  assumed: c"],
        ),
    ],
)
def test_each_part_of_a_proof_is_a_line(proof, lines):
    text, place = f"{proof}\n", 0
    for line in lines:
        assert line in text[place:], (line, text)
        place = text.index(line, place) + len(line)
    assert proof.unchecked == tuple(each for each in proof.assumes if each == "c")


def test_which_kinds_are_at_least_others():
    kinds = "identical", "other kernels", "reordered", "rounds elsewhere"
    for place, kind in enumerate(kinds):
        found = [Proof(kind).is_at_least(other) for other in kinds]
        assert found == [other >= place for other in range(4)]
        assert not Proof("another function").is_at_least(kind)
        assert not Proof("unknown").is_at_least(kind)
