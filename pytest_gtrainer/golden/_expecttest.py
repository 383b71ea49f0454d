"""What is relied on of expecttest, the library of inline expectations.

Relied on: the classes and functions of expecttest reach ``assert_expected_inline(actual, expect,
skip=0, *, pos=None, expect_filters=None, …)`` by that name in the module, and where
``EXPECTTEST_ACCEPT`` is not set it raises AssertionError if the texts differ;
``PositionInfo(filename, lineno)`` is a place in a source file; ``replace_many(filters, text)``
filters; ``replace_string_literal(source, first_line, last_line, text)`` gives the source with
its first triple-quoted literal reading as the text. Versions before 0.3 have not all of these.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType, TracebackType
from typing import Any

ACCEPT_VARIABLE = "EXPECTTEST_ACCEPT"
_NEEDED = ("assert_expected_inline", "PositionInfo", "replace_many", "replace_string_literal")

# Told of every expectation (file, line, expected, obtained); returns whether a different text is accepted.
Recorder = Callable[[str, int, str, str], bool]
# The pytest sessions of this process, the innermost last, each with its recorder if it accepts.
_sessions: list[Recorder | None] = []


def module() -> ModuleType | None:
    """The module, if it is installed and is not too old."""
    try:
        found = importlib.import_module("expecttest")
    except ImportError:
        return None
    return found if all(hasattr(found, name) for name in _NEEDED) else None


def prepare() -> None:
    """Let the library ask the recorder of the running session, for the rest of the process.

    To be called before anyone imports its function by name; without a recorder the function
    does as ever.
    """
    library: Any = module()
    if library is not None and not hasattr(library.assert_expected_inline, "__wrapped__"):
        library.assert_expected_inline = _asking_the_recorder(library, library.assert_expected_inline)


def enter(recorder: Recorder | None) -> None:
    """A session begins."""
    _sessions.append(recorder)


def leave(recorder: Recorder | None) -> None:
    """The innermost session of that recorder ends."""
    if recorder in _sessions:
        del _sessions[len(_sessions) - 1 - _sessions[::-1].index(recorder)]


def _asking_the_recorder(library: ModuleType, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def assert_expected_inline(
        actual: str, expect: str, skip: int = 0, *, pos: Any = None, expect_filters: Any = None, **others: Any
    ) -> None:
        __tracebackhide__ = True
        recorder = _sessions[-1] if _sessions else None
        if recorder is None:
            original(actual, expect, skip + 1, pos=pos, expect_filters=expect_filters, **others)
            return
        if pos is None:
            caller = sys._getframe(1 + skip)
            pos = library.PositionInfo(caller.f_code.co_filename, caller.f_lineno)
        if expect_filters is not None:
            actual = library.replace_many(expect_filters, actual)
        try:
            with _without_accept_variable():
                original(actual, expect, pos=pos, **others)
        except AssertionError:
            accepted = isinstance(actual, str) and recorder(pos.filename, pos.lineno, expect, actual)
            if not accepted:
                raise
        else:
            recorder(pos.filename, pos.lineno, expect, expect)

    return assert_expected_inline


@contextmanager
def _without_accept_variable() -> Iterator[None]:
    """Keep the library from writing files by itself."""
    value = os.environ.pop(ACCEPT_VARIABLE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[ACCEPT_VARIABLE] = value


def is_mismatch(error: BaseException) -> bool:
    """Whether this is the failure of an inline expectation."""
    library = sys.modules.get("expecttest")
    if library is None or not isinstance(error, AssertionError):
        return False
    return any(
        frame.f_code.co_name == "assert_expected_inline" and frame.f_code.co_filename == library.__file__
        for frame in _frames(error.__traceback__)
    )


def _frames(entry: TracebackType | None) -> Iterator[FrameType]:
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next


def spell(literal: str, text: str) -> str | None:
    r'''A literal that reads as ``text``, in the style of another; None if the library writes none.

    >>> print(spell('r"""one"""', "a'b"), spell("'one'", "a'b"), spell("'one'", chr(0)))
    r"""a'b""" """a'b""" None
    '''
    library: Any = module()
    for template in (literal, '""""""'):
        try:
            spelled, _ = library.replace_string_literal(template, 1, template.count("\n") + 1, text)
        except AssertionError:  # not printable ASCII
            return None
        if ast.literal_eval(f"({spelled})") == text:
            return str(spelled)
    return None
