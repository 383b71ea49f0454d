"""Load the model that a command names."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


class UsageError(ValueError):
    """A command cannot do what was asked; the message says what to give instead."""


def load_model(name: str) -> nn.Module:
    """Return the model of ``MODULE:FACTORY``, on the meta device if it can be built there.

    Raises:
        UsageError: there is no such module or factory, it needs arguments, fails, or makes
            something else than a module.
    """
    found = _find(name)
    if isinstance(found, nn.Module):
        return found
    try:
        with torch.device("meta"):  # names and shapes are enough, and cost no memory
            return _checked(found(), name)
    except (Exception, SystemExit):
        # Code that reads values cannot run there: it says so itself, or is right.
        return _build(found, name)


def build_model(name: str) -> nn.Module:
    """Return the model that the factory of ``MODULE:FACTORY`` builds, to run it.

    Raises:
        UsageError: as ``load_model``; or it is a model, and no factory that builds a new one.
    """
    found = _find(name)
    if isinstance(found, nn.Module):
        raise UsageError(
            f"{name} is a model: name a function or class that builds a new one at each call"
        )
    return _build(found, name)


def check_takes_mesh(name: str) -> None:
    """Refuse a ``MODULE:FUNCTION`` that cannot be called with a mesh.

    Raises:
        UsageError: there is no such function, or it takes other arguments.
    """
    found = _find(name)
    try:
        inspect.signature(found).bind(object())
    except TypeError as error:
        raise UsageError(
            f"--parallel={name} takes no mesh alone ({error}): name a function that returns the "
            "parallel model of a rank, def parallel(mesh)"
        ) from None


def _find(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(
            f"{name!r} is no MODULE:FACTORY: say model:Model for the Model of model.py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"{module_name} cannot be imported from {here}: {error}") from error
    except SystemExit as error:
        raise UsageError(
            f"importing {module_name} calls sys.exit({error.code!r}): a script needs "
            'if __name__ == "__main__"'
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}: name a class, function or model")
    return found


def _build(factory: Any, name: str) -> nn.Module:
    try:
        built = factory()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name}() fails, with {type(error).__name__}: {error}. Name a function without "
            "arguments that returns the model"
        ) from error
    return _checked(built, name)


def _checked(built: Any, name: str) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise UsageError(f"{name}() gives a {type(built).__name__}, not a torch.nn.Module")
    return built
