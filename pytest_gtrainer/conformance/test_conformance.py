"""What ``pytest --pyargs pytest_gtrainer.conformance --gt-pass module:name`` runs."""

from __future__ import annotations

import pytest

from pytest_gtrainer.conformance.adapter import Adapter, given
from pytest_gtrainer.conformance.cases import cases_of
from pytest_gtrainer.conformance.rules import RULES, judge


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case a rule."""
    metafunc.parametrize("rule", cases_of(given(metafunc.config)))


@pytest.fixture(scope="module")
def adapter(pytestconfig: pytest.Config) -> Adapter:
    """The pass that the command line names."""
    return given(pytestconfig)


def test_rule(rule: str, adapter: Adapter, request: pytest.FixtureRequest) -> None:
    """Each rule once."""
    __tracebackhide__ = True
    judge(RULES[rule], adapter, request)
