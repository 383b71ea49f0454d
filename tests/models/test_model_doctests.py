"""The examples in the models' docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from fixtures import models

MODULES = [f"{models.__name__}.{module.name}" for module in pkgutil.iter_modules(models.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
