"""The search, and its failures in words: the check, where the search stood, what came nearest and how it differs.

A ``then`` takes the first node that matches behind the last match, and does not come back to it,
as FileCheck does. So the cost is one walk over the schedule for a run of checks, and one for
each ``count`` and ``start``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gtrainer.checks.predicates import Check
from pytest_gtrainer.checks.subject import CheckError, CheckFailure, Subject

_MOST = 8
"""A failure shows so many nodes of a count."""


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
        self._schedule = subject.schedule
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
        if self._waiting and self._at == len(self._schedule) - 1:
            raise CheckError(f"{self._waiting[0]}\nnothing follows the graph's output, so this `never` cannot fail")
        self._judge_waiting(len(self._schedule))

    def _judge_waiting(self, end: int) -> None:
        """No node from behind the last match up to ``end`` may match a waiting `never`."""
        __tracebackhide__ = True
        for check in self._waiting:
            for place in range(self._at + 1, end):
                if self._matches(check, place):
                    since = f"the match at {self._at}" if self._at >= 0 else "the start"
                    upto = "the end" if end == len(self._schedule) else f"the match at {end}"
                    told = f"it matches between {since} and {upto}\n{self._subject.line(place)}"
                    raise self._failure(check, told)
        self._waiting.clear()

    def _matches(self, check: Check, place: int) -> bool:
        return check.pattern.matches(self._schedule[place], self._subject)

    def _arrive(self, check: Check, place: int) -> None:
        self._at = place
        if check.pattern.name:
            self._subject.captures[check.pattern.name] = self._schedule[place]

    # -- kinds of checks

    def _then(self, check: Check) -> None:
        __tracebackhide__ = True
        for place in range(self._at + 1, len(self._schedule)):
            if self._matches(check, place):
                self._judge_waiting(place)
                return self._arrive(check, place)
        stood = "no node matches; the search began at the graph's first node"
        if self._at >= 0:
            stood = f"no node matches behind the last match, which is\n{self._subject.line(self._at)}"
        raise self._failure(check, stood, *self._nearest(check, self._at))

    def _next(self, check: Check) -> None:
        __tracebackhide__ = True
        if self._waiting:
            raise CheckError(f"between a match and its next node there is nothing, so `{self._waiting[0]}` cannot fail")
        place = self._at + 1
        if place == len(self._schedule):
            raise self._failure(check, "nothing follows the graph's output")
        if not self._matches(check, place):
            later = next((p for p in range(len(self._schedule)) if self._matches(check, p)), None)
            told = [] if later is None else [f"a node that matches stands at\n{self._subject.line(later)}"]
            raise self._failure(check, f"the next node does not match\n{self._differing(check, place)}", *told)
        self._arrive(check, place)

    def _same(self, check: Check) -> None:
        __tracebackhide__ = True
        if self._at < 0:
            raise CheckError("`same` speaks of the last match, and there is none yet: begin with `then` or `next`")
        if not self._matches(check, self._at):
            raise self._failure(check, f"the last match is not such a node\n{self._differing(check, self._at)}")
        self._arrive(check, self._at)

    def _count(self, check: Check) -> None:
        __tracebackhide__ = True
        found = [place for place in range(len(self._schedule)) if self._matches(check, place)]
        if len(found) != check.number:
            lines = [self._subject.line(place) for place in found[:_MOST]]
            lines += [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
            told = "\n".join([f"the graph has {len(found)}", *lines])
            raise self._failure(check, told, *self._nearest(check, -1, besides=found))

    def _start(self, check: Check) -> None:
        __tracebackhide__ = True
        self._end_waiting()
        self._at = -1

    # -- failures

    def _failure(self, check: Check, *paragraphs: str) -> CheckFailure:
        subject = self._subject
        places = {name: subject.place[subject.captures[name]] for name in check.pattern.captures_used(subject)}
        used = [f"{name} is\n{subject.line(place)}" for name, place in places.items()]
        return CheckFailure("\n".join([str(check), *paragraphs, *used]))

    def _differing(self, check: Check, place: int) -> str:
        """A node, and below it how it differs."""
        words = check.pattern.differences(self._schedule[place], self._subject)
        return "\n".join([self._subject.line(place), *(f"        {line}" for line in words)])

    def _nearest(self, check: Check, at: int, besides: Sequence[int] = ()) -> list[str]:
        """The node of that operator that differs least; of equals the first behind the search's beginning."""
        pattern, subject = check.pattern, self._subject
        places = [
            p for p, node in enumerate(self._schedule) if pattern.has_operator(node, subject) and p not in besides
        ]
        if not places:
            return [] if besides else ["no node of the graph has that operator"]
        distance = {place: len(pattern.differences(self._schedule[place], subject)) for place in places}
        best = min(places, key=lambda place: (distance[place], place <= at, place))
        if distance[best] == 0:
            return [f"a node that matches stands before that\n{subject.line(best)}"]
        return [f"the nearest is\n{self._differing(check, best)}"]
