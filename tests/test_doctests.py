"""The examples in docstrings are specifications: all of them run, and they are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import fixtures
import pytest_gtrainer


def modules_of(package):
    return [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


@pytest.mark.parametrize("name", modules_of(pytest_gtrainer) + modules_of(fixtures))
def test_examples(name):
    module = importlib.import_module(name)
    globs = {**vars(module), "torch": torch}
    assert doctest.testmod(module, extraglobs=globs).failed == 0


def test_a_wrong_example_would_fail():
    """The twin: the check reads examples."""
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(example, out=lambda text: None).failed == 1
