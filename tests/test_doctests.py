"""The examples in docstrings are specifications: all of them run, and they are true."""

import contextlib
import doctest
import importlib
import io
import pkgutil
from types import FunctionType, ModuleType

import pytest
import torch

import fixtures
import pytest_gtrainer
from fixtures import longer_examples

pytestmark = pytest.mark.second_tier


def wrong_examples(module: ModuleType, home: ModuleType | None = None) -> str:
    """Return doctest's complaints about a module; empty where every example is true. Examples use
    the names of ``home``.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        doctest.testmod(module, extraglobs={**vars(home or module), "torch": torch})
    return said.getvalue()


@pytest.mark.parametrize(
    "package", [pytest_gtrainer, fixtures], ids=lambda package: package.__name__
)
def test_examples(package):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [package] + [importlib.import_module(module.name) for module in found]
    wrong = "".join(wrong_examples(module) for module in modules if module is not longer_examples)
    if wrong:
        pytest.fail(wrong, pytrace=False)


def wrong_longer_example(function: FunctionType) -> str:
    """The same of one function of ``longer_examples``."""
    home = importlib.import_module((function.__doc__ or "").partition("\n")[0])
    alone = ModuleType(function.__name__)
    alone.__doc__ = function.__doc__
    return wrong_examples(alone, home)


def test_longer_examples():
    functions = [each for each in vars(longer_examples).values() if isinstance(each, FunctionType)]
    assert functions
    wrong = "".join(map(wrong_longer_example, functions))
    if wrong:
        pytest.fail(wrong, pytrace=False)


def test_a_wrong_example_would_fail():
    """The twin: the check reads examples."""
    module = ModuleType("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n"
    assert "Expected:\n    3\nGot:\n    2" in wrong_examples(module)

    def of_a_function():
        """pytest_gtrainer.worlds

        >>> ranks_text([0])
        'rank 1'
        """

    assert "Expected:\n    'rank 1'\nGot:\n    'rank 0'" in wrong_longer_example(of_a_function)
