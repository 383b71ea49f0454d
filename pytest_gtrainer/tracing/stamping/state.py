"""Python state that a step changes: a call then depends on how many came before it, and nothing can be proven.

Looked at is what can be reached from the modules, their classes, and the step: attributes, containers, objects, what
functions close over, globals that they name. All of it is put back. What cannot be seen: state behind functions of
torch or of extensions in C, and files.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_gtrainer.tracing.stamping.signature import TABLES
from pytest_gtrainer.tracing.stamping.verdict import Refused

NO_STATE = (int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, types.ModuleType)


@dataclass(frozen=True, slots=True)
class _Held:
    """What ``target`` holds, and what it held: a container, or names of an object (``put`` writes one)."""

    where: str
    target: Any
    content: Any
    put: Callable[[Any, str, Any], None] | None = None

    def now(self) -> Any:
        if self.put is None:
            return self.target.copy()
        held = vars(self.target) if isinstance(self.target, type) else self.target  # not through descriptors
        read = getattr if isinstance(held, types.CellType) else lambda of, name, default: of.get(name, default)
        return {name: read(held, name, None) for name in self.content}

    def change(self) -> str | None:
        now, before = self.now(), self.content
        if isinstance(now, dict):
            names = [name for name in {**before, **now} if (name in now) != (name in before)]
            names += [name for name in now if name in before and not _same(now[name], before[name])]
            return f"{self.where}{names[0]}" if names else None
        return None if len(now) == len(before) and all(map(_same, now, before)) else self.where

    def restore(self) -> None:
        if self.put is not None:
            for name, value in self.content.items():
                if not _same(self.now()[name], value):
                    self.put(self.target, name, value)
        elif self.change() is not None:
            self.target.clear()
            (self.target.extend if isinstance(self.target, list | deque) else self.target.update)(self.content)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


@contextmanager
def unchanged_state(model: nn.Module, step: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``step`` of ``model`` is run several times; afterwards all that can be seen is as it was.

    Raises:
        Refused: something was changed, or a random number drawn outside of the graph.
    """
    held, drawn = list(_watched(model, step)), (random.getstate(), torch.get_rng_state())
    try:
        yield
        changed = next(filter(None, (each.change() for each in held)), None)
        same = random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
    finally:
        for each in held:
            each.restore()
        random.setstate(drawn[0])
        torch.set_rng_state(drawn[1])
    if changed is not None:
        raise Refused("", f"the step changes {changed}")
    if not same:
        raise Refused("", "the step draws random numbers that are not in its graph")


def _watched(model: nn.Module, step: Callable[..., Any]) -> Iterator[_Held]:
    """Everything that holds something and can be reached."""
    of_modules = [(f"the attribute {fqn}.".replace(" .", " "), module) for fqn, module in model.named_modules()]
    todo = deque([*of_modules, ("what the step holds or names: ", step)])
    seen: set[int] = set()
    while todo:
        where, value = todo.popleft()
        if value is None or isinstance(value, NO_STATE) or id(value) in seen:
            continue
        seen.add(id(value))
        for held, inner in _looked_into(where, value):
            if held is not None:
                yield held
            todo += inner


def _looked_into(where: str, value: Any) -> Iterator[tuple[_Held | None, list[tuple[str, Any]]]]:
    if isinstance(value, dict | list | set | deque):
        items = [*value.values()] if isinstance(value, dict) else [*value]
        yield _Held(where, value, value.copy()), [(where, item) for item in items]
    elif isinstance(value, tuple | frozenset):
        yield None, [(where, item) for item in value]
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            content: dict[str, Any] = {}
            with suppress(ValueError):  # a cell that is not filled yet
                content["cell_contents"] = cell.cell_contents
            yield _Held(where, cell, content, setattr), [(where, each) for each in content.values()]
        home = str(value.__globals__.get("__name__"))
        if not _is_foreign(home):
            named = {n: value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__}
            own = [each for each in named.values() if not isinstance(each, type)]
            yield _Held(f"the global {home}.", value.__globals__, named, dict.__setitem__), [(where, e) for e in own]
        yield None, [(where, each) for each in (value.__defaults__, value.__kwdefaults__)]
    elif isinstance(value, types.MethodType):
        yield None, [(where, value.__func__), (where, value.__self__)]
    elif isinstance(value, type):
        if not _is_foreign(value.__module__):
            named = {name: held for name, held in vars(value).items() if not name.startswith("__")}
            yield (
                _Held(f"the attribute of the class {value.__qualname__}.", value, named, setattr),
                [(where, held) for held in named.values()],
            )
    elif hasattr(value, "__dict__") and (isinstance(value, nn.Module) or not _is_foreign(type(value).__module__)):
        own, cls = vars(value), type(value)
        of_values = [(where + name, held) for name, held in own.items() if name not in TABLES]
        yield _Held(where, own, dict(own)), [*of_values, (f"what the class {cls.__qualname__} names: ", cls)]


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "pytest_gtrainer", "builtins")
