"""Tests of hypothesis on ranks: every rank draws the same examples, however a test sets its
seed.
"""

import pytest

from tests.worlds.conftest import Suite

pytestmark = pytest.mark.second_tier

SUITE = """
import pytest
import torch.distributed as dist
from hypothesis import given, seed, settings, strategies as st

pytestmark = pytest.mark.gt_world("ranks", size=2)
NUMBERS = st.integers(0, 10**9)
DRAWN = []

def agree(value):
    # Not at each example: a collective there would hide that one rank draws more examples.
    DRAWN.append(value)

@pytest.fixture(autouse=True)
def compared():
    DRAWN.clear()
    yield
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, list(DRAWN))
    assert len(of_ranks[0]) >= 5
    assert of_ranks[0] == of_ranks[1]

FIVE = {"max_examples": 5}

@given(NUMBERS)
def test_plain(number): agree(number)

@settings(**FIVE)
@given(NUMBERS, st.data())
def test_data(number, data): agree((number, data.draw(NUMBERS)))

@settings(derandomize=False, **FIVE)
@given(NUMBERS)
def test_random(number): agree(number)

@seed(7)
@given(NUMBERS)
def test_seeded(number): agree(number)

settings.register_profile("mine", derandomize=False, max_examples=6)
settings.load_profile("mine")

@given(NUMBERS)
def test_own_profile(number): agree(number)
"""
NAMES = ["test_plain", "test_data", "test_random", "test_seeded", "test_own_profile"]


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE.replace("def compared():", "def compared(request):"))
    return module_suite.run()


@pytest.mark.parametrize("name", NAMES)
def test_ranks_draw_the_same_examples(run, name):
    assert run.outcome(name) == "passed", run.text(name)


DIFFERS = """
import random

@pytest.mark.parametrize("rank_dependent", [True])
@settings(max_examples=5)
@given(st.data())
def test_differs(rank_dependent, data):
    agree(data.draw(st.integers(0, 10 + dist.get_rank())) + 100 * dist.get_rank())
"""


def test_a_strategy_that_depends_on_the_rank_is_seen(suite):
    """The twin: the comparison of the suite fails where ranks do draw other examples."""
    suite.write("test_it.py", SUITE + DIFFERS)
    run = suite.run("-k", "test_differs")
    assert "assert of_ranks[0] == of_ranks[1]" in run.text("test_differs[True]")


FAILS = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

pytestmark = pytest.mark.gt_world("ranks", size=2, timeout=60)

@given(st.integers(0, 1000))
def test_fails_on_all(number):
    dist.all_reduce(torch.ones(number % 7 + 1))
    assert number < 50

@given(st.integers(0, 1000))
def test_fails_on_one(number):
    dist.all_reduce(torch.ones(number % 7 + 1))
    assert number < 50 or dist.get_rank() == 0

@given(st.integers(0, 1000))
def test_fails_on_one_without_collectives(number):
    assert number < 50 or dist.get_rank() == 1

def test_without_hypothesis():
    assert dist.get_rank() == 0
"""
SENTENCE = "Ranks run the same examples until one fails."


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    suite = Suite(tmp_path_factory.mktemp("failing") / "suite")
    suite.write("test_it.py", FAILS)
    return suite.run()


@pytest.mark.parametrize("name", ["test_fails_on_one", "test_fails_on_one_without_collectives"])
def test_examples_that_may_differ_behind_a_failure_of_some_ranks_are_explained(failing, name):
    assert failing.outcome(name) == "failed"
    assert SENTENCE in failing.text(name)


@pytest.mark.parametrize("name", ["test_fails_on_all", "test_without_hypothesis"])
def test_a_failure_of_all_ranks_or_of_another_test_is_not(failing, name):
    """The twin: the smallest example is found on all ranks."""
    assert failing.outcome(name) == "failed"
    assert SENTENCE not in failing.text(name)
