"""The test that is made of an adapter: a case a rule, each in the world that it needs."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gtrainer.conformance.adapter import Adapter
from pytest_gtrainer.conformance.rules import RULES, judge
from pytest_gtrainer.worlds.spec import MARKER


def bucketing(function: Callable[..., Any], **adapter: Any) -> Callable[..., None]:
    """A test of all rules for passes that bucket the collectives of a joint graph; keywords as of ``Adapter``."""
    return test_of(Adapter(function, "bucketing", **adapter))


def any_pass(function: Callable[..., Any], **adapter: Any) -> Callable[..., None]:
    """A test of the rules that hold for every pass; keywords as of ``Adapter``."""
    return test_of(Adapter(function, "any", **adapter))


def test_of(adapter: Adapter) -> Callable[..., None]:
    """A test function with a case a rule, each in the world that it needs."""

    @pytest.mark.parametrize("rule", cases_of(adapter))
    def test_rule(rule: str, request: pytest.FixtureRequest) -> None:
        __tracebackhide__ = True
        judge(RULES[rule], adapter, request)

    return test_rule


def cases_of(adapter: Adapter) -> list[Any]:
    """The rules that a pass of its kind is held to, as parameters with their marks.

    Raises:
        ValueError: the adapter names a rule that there is not.
    """
    for pattern in (*adapter.not_claimed, *adapter.broken):
        if not fnmatch.filter(RULES, pattern):
            raise ValueError(f"there is no rule {pattern!r}; there are {', '.join(RULES)}")
    cases = []
    for rule in [each for each in RULES.values() if adapter.kind in each.kinds]:
        known = [why for pattern, why in adapter.broken.items() if fnmatch.fnmatch(rule.id, pattern)]
        marks = [pytest.mark.xfail(reason=why, strict=True, raises=AssertionError) for why in known]
        marks.append(getattr(pytest.mark, MARKER)(rule.world[0], **rule.world[1]))
        cases.append(pytest.param(rule.id, id=rule.id, marks=marks))
    return cases
