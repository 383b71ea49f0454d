"""The search: where it stands, what it has captured, which `never` still waits for its end.

A ``then`` takes the first node that matches behind the last match, and does not come back to it,
as FileCheck does. So the cost is one walk over the schedule for a run of checks, and one for
each ``count`` and ``start``.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_gtrainer.checks import report
from pytest_gtrainer.checks.check import Check
from pytest_gtrainer.checks.errors import CheckError
from pytest_gtrainer.checks.subject import Subject


def run_checks(subject: Subject, checks: Iterable[Check]) -> None:
    """Check a graph.

    Raises:
        CheckFailure: the graph is not as a check says.
        CheckError: a check cannot match or cannot fail, or there is none.
    """
    __tracebackhide__ = True
    matcher = Matcher(subject)
    for check in checks:
        matcher.run(check)
    matcher.finish()


class Matcher:
    """Runs checks one by one; ``finish`` judges what waits for the end."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._at = -1  # the last match's place in the schedule
        self._waiting: list[Check] = []
        self._last: Check | None = None

    def run(self, check: Check) -> None:
        __tracebackhide__ = True
        self._last = check
        try:
            check.pattern.check(self._subject)
            steps = {
                "then": self._then,
                "next": self._next,
                "same": self._same,
                "never": self._waiting.append,
                "count": self._count,
                "start": self._start,
            }
            steps[check.kind](check)
        except CheckError as error:
            raise CheckError(f"{check}\n{error}") from None

    def finish(self) -> None:
        """Judge every `never` that no match has ended.

        Raises:
            CheckError: nothing was checked.
        """
        __tracebackhide__ = True
        if self._last is None:
            raise CheckError("there is no check, so nothing was checked: add one, such as `then aten.mm in layers.0`")
        if self._last.kind == "start":
            raise CheckError(f"{self._last}\nnothing is checked after this `start`: remove it or add a check")
        self._end_waiting()

    def _end_waiting(self) -> None:
        __tracebackhide__ = True
        if self._waiting and self._at == len(self._subject.schedule) - 1:
            raise CheckError(f"{self._waiting[0]}\nnothing follows the graph's output, so this `never` cannot fail")
        self._judge_waiting(len(self._subject.schedule))

    def _judge_waiting(self, end: int) -> None:
        """No node from behind the last match up to ``end`` may match a waiting `never`."""
        __tracebackhide__ = True
        for check in self._waiting:
            for place in range(self._at + 1, end):
                if self._matches(check, place):
                    raise report.forbidden(check, self._subject, self._at, place, end)
        self._waiting.clear()

    def _matches(self, check: Check, place: int) -> bool:
        return check.pattern.matches(self._subject.schedule[place], self._subject)

    def _arrive(self, check: Check, place: int) -> None:
        self._at = place
        self._capture(check)

    def _capture(self, check: Check) -> None:
        if check.pattern.name:
            self._subject.captures[check.pattern.name] = self._subject.schedule[self._at]

    # -- kinds of checks

    def _then(self, check: Check) -> None:
        __tracebackhide__ = True
        for place in range(self._at + 1, len(self._subject.schedule)):
            if self._matches(check, place):
                self._judge_waiting(place)
                return self._arrive(check, place)
        raise report.not_found(check, self._subject, self._at)

    def _next(self, check: Check) -> None:
        __tracebackhide__ = True
        if self._waiting:
            raise CheckError(f"between a match and its next node there is nothing, so `{self._waiting[0]}` cannot fail")
        place = self._at + 1
        if place == len(self._subject.schedule) or not self._matches(check, place):
            raise report.other_next(check, self._subject, place)
        self._arrive(check, place)

    def _same(self, check: Check) -> None:
        __tracebackhide__ = True
        if self._at < 0:
            raise CheckError("`same` speaks of the last match, and there is none yet: begin with `then` or `next`")
        if not self._matches(check, self._at):
            raise report.not_same(check, self._subject, self._at)
        self._capture(check)

    def _count(self, check: Check) -> None:
        __tracebackhide__ = True
        found = [place for place in range(len(self._subject.schedule)) if self._matches(check, place)]
        if len(found) != check.number:
            raise report.other_count(check, self._subject, found)

    def _start(self, check: Check) -> None:
        __tracebackhide__ = True
        self._end_waiting()
        self._at = -1
