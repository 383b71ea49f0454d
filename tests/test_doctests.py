"""The examples in docstrings are specifications: all of them run, and they are true."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
from types import ModuleType

import pytest
import torch

import fixtures
import pytest_gtrainer


def wrong_examples(module: ModuleType) -> str:
    """What doctest has to say of a module; nothing where every example is true."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        doctest.testmod(module, extraglobs={**vars(module), "torch": torch})
    return said.getvalue()


@pytest.mark.parametrize("package", [pytest_gtrainer, fixtures], ids=lambda package: package.__name__)
def test_examples(package):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [package] + [importlib.import_module(module.name) for module in found]
    wrong = "".join(map(wrong_examples, modules))
    if wrong:
        pytest.fail(wrong, pytrace=False)


def test_a_wrong_example_would_fail():
    """The twin: the check reads examples."""
    module = ModuleType("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n"
    assert "Expected:\n    3\nGot:\n    2" in wrong_examples(module)
