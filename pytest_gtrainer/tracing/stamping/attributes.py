"""State that a step changes: a call then depends on how many came before it, and nothing can be proven.

Looked at are attributes of modules, random numbers drawn outside of the graph, and what the step and the forwards close
over or name as globals. Attributes and random numbers are put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pytest_gtrainer.tracing.stamping.signature import TABLES, state_of
from pytest_gtrainer.tracing.stamping.verdict import Refused


@contextmanager
def unchanged_state(model: nn.Module, step: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``step`` of ``model`` is run several times.

    Raises:
        Refused: an attribute, a closure or a global was changed, or a random number drawn outside of the graph.
    """
    modules = list(model.named_modules())
    held = [_contents(module) for _, module in modules]
    before, drawn = _state(modules, step), (random.getstate(), torch.get_rng_state())
    try:
        yield
        changed = next((where for where, state in _state(modules, step).items() if before.get(where) != state), None)
        same = random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
    finally:
        for (_, module), contents in zip(modules, held, strict=True):
            _restore(module, contents)
        random.setstate(drawn[0])
        torch.set_rng_state(drawn[1])
    if changed is not None:
        raise Refused("", f"the step changes {changed}")
    if not same:
        raise Refused("", "the step draws random numbers that are not in its graph")


def _state(modules: list[tuple[str, nn.Module]], step: Callable[..., Any]) -> dict[str, Any]:
    found = {"what the step closes over or names": state_of(step)}
    for fqn, module in modules:
        own = {name: value for name, value in vars(module).items() if name not in TABLES}
        found |= {f"the attribute {'.'.join(filter(None, (fqn, n)))}": state_of(value) for n, value in own.items()}
        found[f"the attributes of {fqn or 'the model'}"] = sorted(own)
    for cls in {type(module) for _, module in modules}:
        held = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        found[f"what {cls.__qualname__} closes over or names"] = state_of(held)
    return found


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, and what is in those that are containers."""
    own = {name: value for name, value in vars(module).items() if name not in TABLES}
    return {name: (v, v.copy() if isinstance(v, dict | list | set) else None) for name, v in own.items()}


def _restore(module: nn.Module, held: dict[str, tuple[Any, Any]]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in TABLES and name not in held]:
        del own[name]
    for name, (value, content) in held.items():
        own[name] = value
        if content:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
