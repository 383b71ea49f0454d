"""The table of the README holds: a rule that a pass of torchtitan breaks fails here, no other does."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import adapters

from pytest_gtrainer.conformance.judging import RULES, cases_of, judge

PASSES = ("deduplicate", "reassign", "canonicalize", "remat", "policy_default", "offload_all")


def cases():
    for name in PASSES:
        for case in cases_of(getattr(adapters, name)):
            marks = list(case.marks)
            if case.id == "generated":  # half a minute of CPU time; it asks three other rules again
                marks.append(pytest.mark.long)
            yield pytest.param(name, *case.values, id=f"{name}-{case.id}", marks=marks)


@pytest.mark.parametrize(("name", "rule"), list(cases()))
def test_a_pass_of_torchtitan(name, rule, request):
    judge(RULES[rule], getattr(adapters, name), request)
