"""Fail a test that has caught the exception of a failed check.

``contextlib.suppress``, an ``except``, or the end of a thread would hide it. The rule of what
counts is in ``facts``: every ``FailedCheck``, and every exception that leaves a ``facts.check``.

A check that fails inside ``pytest.raises`` or ``assertRaises`` is expected to. An exception that
the test raises from a failed check, or while handling it, stands for it: a block or a mark that
expects the one expects the other. What a mark makes of a hidden failure is left to pytest: it is
raised where the phase ends.
"""

import mmap
import os
import unittest
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from pytest_gtrainer import facts
from pytest_gtrainer._pytest_private import (
    active_xfail,
    caught_by,
    caught_by_unittest,
    open_expectations,
)

_ADVICE = (
    "The test has caught this exception. A check that fails counts all the same, unless "
    "pytest.raises expects it. To look at a difference without a verdict: compare(actual, expected)"
)
_ENDS_THE_RUN = (KeyboardInterrupt, pytest.exit.Exception)
_IN_CHILD = (
    "a check failed in a process that the test forked, unless pytest.raises expects it there: {}"
)
_LONGEST = 4096
_NUMBER = 8  # bytes
_SKIPS = (pytest.skip.Exception, unittest.SkipTest)


class FailedChecks:
    """The checks that failed in a phase of a test, and after ``clear`` in the next one."""

    def __init__(self) -> None:
        self._noted: list[tuple[Exception, list[object]]] = []
        # A process that the test forks shares this memory. It is all that it leaves: its exit
        # status is the test's to read, and os._exit runs no code of ours. It holds the number of
        # the phase that forked, then a text: a process may outlive its phase.
        self._in_child = mmap.mmap(-1, _NUMBER + _LONGEST)
        self._phase = 1
        self._pid = os.getpid()

    def note(self, error: Exception) -> None:
        if isinstance(error, _SKIPS):
            return
        if os.getpid() != self._pid:
            # The first counts, as without a fork.
            if not self._has_failed_in_child() and not open_expectations():
                said = f"{type(error).__name__}: {error}"
                text = said.encode("utf-8", "backslashreplace")[:_LONGEST]
                self._in_child[:] = self._own_number() + text.ljust(_LONGEST, b"\0")
            return
        # The first that nobody waits for decides. Do not search memory again for each of a hundred
        # generated examples.
        for other, expectations in self._noted:
            if other is error or (not expectations and other.__traceback__ is not None):
                return
        self._noted.append((error, open_expectations()))

    def clear(self) -> None:
        self._noted = []
        self._phase += 1

    def _own_number(self) -> bytes:
        return self._phase.to_bytes(_NUMBER)

    def _has_failed_in_child(self) -> bool:
        return self._in_child[:_NUMBER] == self._own_number()

    def forget(self, error: BaseException) -> None:
        """Leave out an error, and all that it comes from: they are not hidden."""
        reported = list(chain_of(error))
        self._noted = [
            noted for noted in self._noted if not any(noted[0] is each for each in reported)
        ]

    def raise_hidden(self) -> None:
        """Raise the first check that has failed and that nobody has expected, if there is one."""
        __tracebackhide__ = True
        for error, expectations in self._noted:
            if error.__traceback__ is not None and not any(map(self._is_expected, expectations)):
                error.add_note(_ADVICE)
                raise error
        if self._has_failed_in_child():
            text = self._in_child[_NUMBER:].rstrip(b"\0").decode(errors="replace")
            pytest.fail(_IN_CHILD.format(text), pytrace=False)

    def _is_expected(self, expectation: object) -> bool:
        """Return whether a block has caught a failed check.

        Any one will do: of checks that fail in several threads, a block catches the first. A block
        that has caught something else waits for something else.
        """
        caught = caught_by(expectation)
        if caught is None:
            return False
        noted = [error for error, _ in self._noted]
        return any(each is error for each in chain_of(caught) for error in noted)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that it was raised from, or while handling, or that it groups."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is other for other in seen):
            yield each
            seen.append(each)
            waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


@contextmanager
def raised_at_the_end(failed: FailedChecks, item: pytest.Item | None = None) -> Iterator[None]:
    """Raise the first hidden failure of the block at its end, unless the block fails by itself."""
    __tracebackhide__ = True
    try:
        with facts.failing_checks(failed.note):
            yield
    except _ENDS_THE_RUN:
        raise
    except _SKIPS:
        failed.raise_hidden()
        raise
    except BaseException as error:
        failed.forget(error)
        # A mark may expect this error, but not the hidden one.
        if isinstance(error, pytest.xfail.Exception) or (
            item is not None and active_xfail(item) is not None
        ):
            failed.raise_hidden()
        raise
    else:
        for caught in caught_by_unittest(item):
            if not isinstance(caught, (*_SKIPS, pytest.xfail.Exception)):
                failed.forget(caught)
        failed.raise_hidden()
    finally:
        failed.clear()  # exceptions keep frames, and these keep what the test has made


class SwallowedChecks:
    """The plugin: raises hidden checks at the end of the phases of tests that are functions.

    A doctest, for one, expects exceptions by their text.
    """

    def __init__(self) -> None:
        self._failed = FailedChecks()

    def _phase(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        if not isinstance(item, pytest.Function):
            return (yield)
        with raised_at_the_end(self._failed, item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Do not raise again what the report of a subtest shows; one that skips shows no check."""
        hides = (*_SKIPS, pytest.xfail.Exception)
        if call.excinfo is not None and not isinstance(call.excinfo.value, hides):
            self._failed.forget(call.excinfo.value)
        return (yield)
