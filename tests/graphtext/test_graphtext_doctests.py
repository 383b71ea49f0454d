"""The examples in the docstrings are true; reading a text needs neither torch nor pytest."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

from pytest_gtrainer import graphtext

MODULES = [f"{graphtext.__name__}.{module.name}" for module in pkgutil.iter_modules(graphtext.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(("modules", "heavy"), [
    (["pytest_gtrainer.graphtext", "pytest_gtrainer.graphtext.header"], "torch"),
    (MODULES, "_pytest"),
])  # fmt: skip
def test_what_is_not_imported(modules: list[str], heavy: str):
    probe = f"import sys, {', '.join(modules)}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
