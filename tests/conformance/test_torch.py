"""The statements of docs/conformance.md about torch's own passes hold: a rule that is broken there
fails here, and all others hold.
"""

import pytest

from fixtures import torch_passes
from pytest_gtrainer.conformance.judging import RULES, cases_of, judge
from tests.conformance.conftest import WITH_ALL_MODELS

pytestmark = pytest.mark.second_tier

QUICK = ("remat", "no_ops", "partitioner")
LONG = ("default", "custom_ops", "ddp_concat", "ddp_coalesced", "manual", "overlap")


def cases():
    for name in (*QUICK, *LONG):
        for case in cases_of(getattr(torch_passes, name)):
            marks = [*case.marks, *[pytest.mark.long] * (name in LONG or case.id == "process")]
            yield pytest.param(name, *case.values, id=f"{name}-{case.id}", marks=marks)


@pytest.mark.parametrize(("name", "rule"), cases())
def test_a_pass_of_torch(name, rule, request):
    judge(RULES[rule], getattr(torch_passes, name), request)


@WITH_ALL_MODELS
@pytest.mark.gt_world("fake", size=4, rank=1)
@pytest.mark.parametrize("name", QUICK)
def test_all_generated_models(name, request):
    judge(RULES["generated"], getattr(torch_passes, name), request)
