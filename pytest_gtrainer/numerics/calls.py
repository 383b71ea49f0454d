"""Keep what each operator and collective of an eager function gives, with the line that called it.

``operators`` digests outputs at their place in a model. Here outputs are kept, so that a part of
them can be compared: one row of a batch. No model is needed: a call is named by its line.
"""

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pytest_gtrainer
from pytest_gtrainer import facts
from pytest_gtrainer._torch.autograd import TorchDispatchMode
from pytest_gtrainer._torch.values import OpOverload
from pytest_gtrainer.graph.nodes import leaves_of, tensors_in, written_parameters
from pytest_gtrainer.numerics.bits import NoBytes, copied, is_dtensor
from pytest_gtrainer.numerics.digest import digest
from pytest_gtrainer.numerics.operators import computes

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(pytest_gtrainer.__file__).parent), "<")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator or collective.

    Attributes:
        what: the operator, as ``aten.mm.default``, or the collective in words.
        line: the innermost line of the user's code, as "model.py:31 in forward".
        outputs: copies of the tensors that it returned or wrote.
        numbers: the numbers among its arguments.
    """

    what: str
    line: str
    outputs: list[Tensor]
    is_collective: bool = False
    numbers: tuple[int | float, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {self.line}"


@dataclass(slots=True)
class Calls:
    """The calls of this thread in a block, in their order.

    Without ``outputs`` none is kept, and only ``has_communicated`` is known. With ``views``
    operators that only show memory count, too.
    """

    outputs: bool = True
    views: bool = False
    calls: list[Call] = field(default_factory=list)
    has_communicated: bool = False

    def add(
        self,
        what: str,
        outputs: Any,
        *,
        is_collective: bool = False,
        numbers: tuple[int | float, ...] = (),
    ) -> None:
        """Keep a call with copies of its outputs, unless one of them has no bytes."""
        if not self.outputs:
            return
        try:
            copies = [copied(tensor) for tensor in tensors_in(outputs)]
        except NoBytes:
            return
        if copies:
            self.calls.append(Call(what, line_of_user(), copies, is_collective, numbers))


@dataclass(slots=True)
class DigestedCalls(Calls):
    """Calls of which only digests are kept: operator, line, and the digest of its outputs."""

    digested: list[tuple[str, str, str]] = field(default_factory=list)

    def add(
        self,
        what: str,
        outputs: Any,
        *,
        is_collective: bool = False,
        numbers: tuple[int | float, ...] = (),
    ) -> None:
        """Keep the digest of a call, unless it has no outputs with bytes."""
        tensors = tensors_in(outputs)
        try:
            self.digested.append((what, line_of_user(), digest(tensors)))
        # No tensor at all, or one without bytes; an observed test must not fail by that.
        except (TypeError, ValueError, RuntimeError):
            return


@contextmanager
def kept_calls(
    *, outputs: bool = True, views: bool = False, into: Calls | None = None
) -> Iterator[Calls]:
    """Keep every call that this thread makes in the block: see ``Calls``.

    ``into`` is where they are kept, in a way of its own.
    """
    calls, thread = into or Calls(outputs, views), threading.get_ident()

    # Ranks on threads carry collectives out in Python, where no mode sees them.
    def received(what: str, outputs: list[Tensor]) -> None:
        if threading.get_ident() == thread:
            calls.has_communicated = True
            calls.add(what, outputs, is_collective=True)

    with facts.watching({"received": received}), _CallsMode(calls):
        yield calls


class _CallsMode(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A DTensor calls operators on its local parts, and collectives: these come here again.
        if any(is_dtensor(each) for each in tensors_in(args, kwargs)):
            return NotImplemented
        output = func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            self._add_collective(func, output)
        elif gives_values(func) or (self._calls.views and func.is_view):
            # An operator of the user's may write to its arguments and return nothing.
            written = []
            for place, name in written_parameters(func):
                written.append(kwargs.get(name, args[place] if place < len(args) else None))
            self._calls.add(str(func), [output, *written], numbers=numbers_in(args, kwargs))
        return output

    def _add_collective(self, func: OpOverload, output: Any) -> None:
        self._calls.has_communicated = True
        if func.namespace == "c10d":
            # Its outputs are not complete before the work that it returns along with them.
            for part in output if isinstance(output, list | tuple) else [output]:
                if isinstance(part, torch.ScriptObject) and hasattr(part, "wait"):
                    part.wait()
            self._calls.add(str(func), output, is_collective=True)
        elif "wait_tensor" in str(func):
            self._calls.add(str(func), output, is_collective=True)


def gives_values(operator: OpOverload) -> bool:
    """Return whether an operator computes: not a view, a copy, or memory without values."""
    if operator.namespace not in ("aten", "prims"):
        return True  # the user's
    # ``contiguous`` copies at some sizes and not at others.
    return computes(operator) and not str(operator).startswith(("aten.clone.", "aten.copy_."))


def numbers_in(*arguments: Any) -> tuple[int | float, ...]:
    """Return the numbers among arguments, in their order."""
    return tuple(leaf for leaf in leaves_of(arguments) if type(leaf) in (int, float))


def line_of_user() -> str:
    """Return the innermost line that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS):
            return f"{Path(name).name}:{line} in {frame.f_code.co_name}"
    return "no line of Python"
