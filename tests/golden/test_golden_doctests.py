"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from pytest_gtrainer import golden

MODULES = [f"{golden.__name__}.{module.name}" for module in pkgutil.iter_modules(golden.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
