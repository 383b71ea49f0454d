"""Fingerprints: equal for equal expressions in every process, different for all others."""

import os
import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_gtrainer.arithmetic import hashing

words = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(words, unique=True, min_size=2, max_size=50))
def test_scramble_is_one_to_one_and_keeps_only_zero(numbers):
    made = hashing.scramble(torch.tensor(numbers)).tolist()
    assert len(set(made)) == len(numbers)
    assert [at for at, each in enumerate(made) if each == 0] == [
        at for at, each in enumerate(numbers) if each == 0
    ]


@given(words, words, words)
def test_mix_depends_on_the_order_unless_it_commutes(seed, left, right):
    a, b = torch.tensor(left), torch.tensor(right)
    assert hashing.mix(seed, [a, b], commutes=True) == hashing.mix(seed, [b, a], commutes=True)
    if left != right:
        assert hashing.mix(seed, [a, b]) != hashing.mix(seed, [b, a])
        assert hashing.mix(seed, [a, a], commutes=True) != hashing.mix(seed, [a, b], commutes=True)


def test_fold_depends_on_order_count_and_every_element():
    rows = torch.arange(1, 7).view(2, 3)
    whole = [
        hashing.fold(rows, [1]),
        hashing.fold(rows.flip(1), [1]),
        hashing.fold(rows[:, :2], [1]),
    ]
    assert not bool((whole[0] == whole[1]).any())
    assert not bool((whole[0] == whole[2]).any())
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    assert hashing.fold(zeros, [1])[0] != hashing.fold(zeros[:, :2], [1])[0], "zeros count, too"
    for place in range(3):
        other = rows.clone()
        other[1, place] += 1
        same = hashing.fold(other, [1]) == whole[0]
        assert same.tolist() == [True, False]


def test_fold_over_dims_of_any_place():
    cube = torch.randint(0, 100, (2, 3, 4))
    assert torch.equal(hashing.fold(cube, [0, 2]), hashing.fold(cube.transpose(0, 1), [1, 2]))
    assert hashing.fold(torch.tensor(3), []).shape == ()
    assert hashing.fold(torch.zeros(2, 0, dtype=torch.int64), [1]).shape == (2,)


def test_names_have_the_same_hash_in_every_process():
    code = "from pytest_gtrainer.arithmetic import hashing; print(hashing.of_name('add', (1, 2.5)))"
    # The seed of strings' own hashes is another one here, unless it was set to 1.
    environ = {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert run.stdout == f"{hashing.of_name('add', (1, 2.5))}\n"
