"""Goldens that any program would have passed: the summary counts them as idle."""

import pytest

VALUES = """
import pytest, torch
import torch.distributed as dist
from pytest_gtrainer import digest

def summed():
    x = torch.ones(2)
    dist.all_reduce(x)
    return x

@pytest.mark.gt_world("{}", size=2)
def test_it(gt_golden):
    gt_golden.check({})
"""


@pytest.mark.parametrize("kind", ["fake", "simulated"])
@pytest.mark.parametrize(
    ("value", "has_values"),
    [
        ("summed().tolist()", True),
        ('{"steps": 1, "losses": [summed().sum().item()]}', True),
        ("{'weights': digest(summed())}", True),
        ("digest(summed(), algorithm='mix128')", True),
        ("{'all_gathers': 3, 'names': ['a'], 'is_fused': True}", False),  # counts of a structure
        ("'all_reduce: 1'", False),
    ],
)
def test_values_where_no_data_moves(run_here, kind, value, has_values):
    """V6"""
    source = VALUES.format(kind, value)
    for _ in range(2):  # created, then equal
        result = run_here(source, "--gt-create-goldens")
        result.assert_outcomes(passed=1)
        words = f"idle      1 values compared in a {kind} world*, where collectives move no data"
        if has_values:
            result.stdout.fnmatch_lines([words])
        else:
            result.stdout.no_fnmatch_line("idle *")


EMPTY = """
from pytest_gtrainer.graph.layout import BucketLayout
from pytest_gtrainer.graphtext import parse

GRAPH = '''
if I:
  I.x: f32[2]
if out:
  yield I.x
'''

def test_it(gt_golden):
    gt_golden.check({})
"""


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("''", "no text is in it"),
        ("' \\n\\n'", "no text is in it"),
        ("BucketLayout(())", "no payload is in it"),
        ("parse(GRAPH), view='layout'", "no payload is in it"),
        ("parse(GRAPH), view='schedule'", "no launch, wait or operator is in it"),
        ("[None, {'a': ''}]", "no value is in it"),
        ("parse(GRAPH)", None),  # it says what is returned
        ("'.'", None),
        ("[None, 0]", None),
    ],
)
def test_there_is_nothing_in_it(run_here, check, words):
    """V6"""
    for _ in range(2):
        result = run_here(EMPTY.replace("{}", check), "--gt-create-goldens")
        result.assert_outcomes(passed=1)
        if words is None:
            result.stdout.no_fnmatch_line("idle *")
        else:
            result.stdout.fnmatch_lines([f"idle      1 golden/test_it/test_it*: {words}: other *"])


UNCHECKED = """
import pytest
from pytest_gtrainer import GoldenMismatch

def test_forgets(gt_golden):
    pass

class TestOfAClass:
    def test_forgets(self, gt_golden):
        [gt_golden.check(part) for part in ()]

def test_checks(gt_golden):
    gt_golden.check("a")

def test_is_refused(gt_golden):
    with pytest.raises(TypeError):
        gt_golden.check(object())

def test_fails(gt_golden):
    assert False

@pytest.mark.xfail
def test_is_expected_to_fail(gt_golden):
    assert False

def test_is_skipped(gt_golden):
    pytest.skip()

@pytest.fixture
def check(gt_golden):
    return gt_golden.check

def test_has_a_fixture_that_could(check):
    pass

def test_of_ranks(gt_ranks):
    pass

@pytest.mark.parametrize("case", ["checks", "raises", "[", "raises, too"])
def test_checks_in_some_cases(case, gt_golden):
    if case == "checks":
        gt_golden.check("a")

@pytest.mark.parametrize("case", ["a", "b"])
def test_forgets_in_all_cases(case, gt_golden):
    pass

@pytest.mark.parametrize("case", ["fails", "forgets"])
def test_checks_in_the_case_that_fails(case, gt_golden):
    if case == "fails":
        gt_golden.check("a")
        assert False
"""


def test_the_fixture_of_a_test_that_checks_nothing(run_here):
    """V6"""
    result = run_here(UNCHECKED, "--gt-create-goldens")
    result.assert_outcomes(passed=13, failed=2, skipped=1, xfailed=1)
    (idle,) = [line for line in result.outlines if line.startswith("idle ")]
    assert idle == (
        "idle      1 test_it.py::TestOfAClass::test_forgets asks for gt_golden and checks nothing, "
        "1 test_it.py::test_forgets asks for gt_golden and checks nothing, "
        "2 test_it.py::test_forgets_in_all_cases asks for gt_golden and checks nothing"
    )
