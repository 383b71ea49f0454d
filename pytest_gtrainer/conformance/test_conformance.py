"""The test of ``pytest --pyargs pytest_gtrainer.conformance --gt-pass module:name``."""

import os
import sys
from dataclasses import replace

import pytest

from pytest_gtrainer import extensions, options
from pytest_gtrainer.attack.models import load_model
from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.conformance.judging import adapter_at, cases_of, judge_case


def given(config: pytest.Config) -> Adapter:
    """Return the adapter that ``--gt-pass module:name`` names, with the models of ``--gt-model``.

    A function is adapted by its signature. Raises UsageError if there is no such pass or model, or
    if it is an adapter of another kind than ``--gt-kind``.
    """
    path, kind = options.get(config, "pass"), options.get(config, "kind")
    if path is None:
        raise pytest.UsageError(
            "pytest_gtrainer.conformance judges a pass: give --gt-pass=my_package.passes:my_pass"
        )
    # As ``python -m pytest`` does, and the command ``pytest`` does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        adapter = adapter_at(path, kind)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise pytest.UsageError(f"--gt-pass={path}: {error}") from None
    if kind not in (None, adapter.kind):
        raise pytest.UsageError(f"--gt-kind={kind}: {path} is an adapter of kind {adapter.kind!r}")
    models = options.get(config, "model")
    try:
        known = extensions.models()
        for model in models:
            # Names of hooks have no colon.
            if model not in known:
                load_model(model)
        return replace(adapter, models=(*adapter.models, *models))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case for each rule."""
    metafunc.parametrize("rule", cases_of(given(metafunc.config)))


@pytest.fixture(scope="module")
def adapter(pytestconfig: pytest.Config) -> Adapter:
    """Return the pass that the command line names."""
    return given(pytestconfig)


def test_rule(rule: str, adapter: Adapter, request: pytest.FixtureRequest) -> None:
    """Judge one rule."""
    __tracebackhide__ = True
    judge_case(rule, adapter, request)
