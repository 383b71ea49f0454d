"""The examples in the docstrings are true, and nothing under numerics imports pytest."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

from pytest_gtrainer import numerics

MODULES = [f"{numerics.__name__}.{module.name}" for module in pkgutil.iter_modules(numerics.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_numerics_does_not_import_pytest():
    imports = "; ".join(f"import {name}" for name in MODULES)
    probe = f"import sys; {imports}; sys.exit('pytest' in sys.modules or '_pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
