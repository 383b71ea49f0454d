"""Checks as a text, the search that runs them, and its failures in words.

A ``then`` takes the first node that matches behind the last match, and does not come back to it, as
FileCheck does. So the cost is one walk over the schedule for a run of checks, and one for each
``count`` and ``start``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from pytest_gtrainer import facts
from pytest_gtrainer.checks.predicates import Check
from pytest_gtrainer.checks.subject import CheckError, CheckFailure, Subject, Unknown
from pytest_gtrainer.checks.syntax import parse_check
from pytest_gtrainer.graph.foreign import AnyGraph, Names

__tracebackhide__ = True  # of every function here: a failure points at the check
_MOST = 8  # a failure shows so many nodes of a count


@facts.check
def assert_graph(
    gm: AnyGraph,
    checks: str,
    *,
    before: AnyGraph | None = None,
    mesh: Mapping[str, int] | None = None,
    names: Names | None = None,
) -> None:
    """Check a graph by ``checks``, one in each line::

        assert_graph(gm, '''
            then all_gather_into_tensor in bucket(layers.0) as g
            next wait_tensor(g)
            never reduce_scatter_tensor in fwd
        ''')

    Args:
        gm: a graph of any tracer, as ``graphtext.render`` takes it.
        before: the graph that a pass was given: modules that the pass has emptied may be named.
        mesh: dimensions and extents over all ranks, outermost first, which name the process groups.
        names: what the inputs are, if the graph does not say it, as for ``graphtext.render``.

    Raises:
        CheckFailure: the graph is not as a check says.
        CheckError: a check cannot be read, cannot match or cannot fail, or there is none.
    """
    file = facts.caller_of_check().f_code.co_filename
    if not os.path.relpath(file).startswith(".."):
        file = os.path.relpath(file)
    found: list[Check] = []
    for number, line in enumerate(checks.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            found.append(parse_check(line, f"{file}, line {number} of the checks"))
    run_checks(Subject(gm, before=before, mesh=mesh, names=names), found)


def run_checks(subject: Subject, checks: Iterable[Check]) -> None:
    """Check a graph; raises as ``assert_graph``."""
    matcher = Matcher(subject)
    for check in checks:
        matcher.run(check)
    matcher.finish()


class Matcher:
    """Runs checks one by one; ``finish`` judges what waits for the end."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._schedule = subject, subject.schedule
        self._at = -1  # the last match's place in the schedule
        self._waiting: list[Check] = []
        self._last: Check | None = None

    def run(self, check: Check) -> None:
        self._last = check
        try:
            is_negative = check.kind == "never" or check.number == 0
            check.pattern.check(self._subject, is_negative=is_negative)
            (self._waiting.append if check.kind == "never" else getattr(self, f"_{check.kind}"))(
                check
            )
        except CheckError as error:
            raise CheckError(f"{check}\n{error}") from None

    def finish(self) -> None:
        """Judge every `never` that no match has ended; a CheckError if nothing was checked."""
        if self._last is None:
            raise CheckError(
                "there is no check, so nothing was checked: add one, such as `then aten.mm in layers.0`"
            )
        if self._last.kind == "start":
            raise CheckError(
                f"{self._last}\nnothing is checked after this `start`: remove it or add a check"
            )
        self._end_waiting(len(self._schedule))

    def _end_waiting(self, end: int) -> None:
        """No node from behind the last match up to ``end`` may match a waiting `never`."""
        if self._waiting and self._at == len(self._schedule) - 1:
            raise CheckError(
                f"{self._waiting[0]}\nnothing follows the graph's output, so this `never` cannot fail"
            )
        for check in self._waiting:
            for place in range(self._at + 1, end):
                found = self._judge(check, place)
                if isinstance(found, Unknown):
                    raise CheckError(f"{check}\n{self._undecided(place, found)}")
                if found:
                    since = f"the match at {self._at}" if self._at >= 0 else "the start"
                    upto = "the end" if end == len(self._schedule) else f"the match at {end}"
                    told = f"it matches between {since} and {upto}\n{self._subject.line(place)}"
                    raise self._failure(check, told)
        self._waiting.clear()

    def _matches(self, check: Check, place: int) -> bool:
        return check.pattern.mismatch(self._schedule[place], self._subject) is None

    def _judge(self, check: Check, place: int) -> bool | Unknown:
        """Return whether a node matches, or why nobody can say, for a check that needs to know."""
        node = self._schedule[place]
        found = check.pattern.mismatch(node, self._subject)
        if isinstance(found, Unknown):
            return found
        if found is None and (check.kind == "never" or node in self._subject.leaves):
            return True
        return check.pattern.may_fit_inside(node, self._subject) or found is None

    def _undecided(self, place: int, why: Unknown) -> str:
        return (
            f"nobody can say whether this node matches\n{self._subject.line(place)}\n        {why}"
        )

    def _arrive(self, check: Check, place: int) -> None:
        self._at = place
        if check.pattern.name:
            self._subject.captures[check.pattern.name] = self._schedule[place]

    def _then(self, check: Check) -> None:
        for place in range(self._at + 1, len(self._schedule)):
            if self._matches(check, place):
                self._end_waiting(place)
                return self._arrive(check, place)
        stood = "no node matches; the search began at the graph's first node"
        if self._at >= 0:
            stood = (
                f"no node matches after the last match, which is\n{self._subject.line(self._at)}"
            )
        raise self._failure(check, stood, *self._nearest(check, self._at))

    def _next(self, check: Check) -> None:
        if self._waiting:
            raise CheckError(
                f"between a match and its next node there is nothing, so `{self._waiting[0]}` cannot fail"
            )
        if (place := self._at + 1) == len(self._schedule):
            raise self._failure(check, "nothing follows the graph's output")
        if not self._matches(check, place):
            later = next((p for p in range(len(self._schedule)) if self._matches(check, p)), None)
            told = (
                [] if later is None else [f"a node that matches is at\n{self._subject.line(later)}"]
            )
            raise self._failure(
                check, f"the next node does not match\n{self._differing(check, place)}", *told
            )
        self._arrive(check, place)

    def _same(self, check: Check) -> None:
        if self._at < 0:
            raise CheckError(
                "`same` speaks of the last match, and there is none yet: begin with `then` or `next`"
            )
        if not self._matches(check, self._at):
            raise self._failure(
                check, f"the last match is not such a node\n{self._differing(check, self._at)}"
            )
        self._arrive(check, self._at)

    def _count(self, check: Check) -> None:
        found = []
        for place in range(len(self._schedule)):
            judged = self._judge(check, place)
            if isinstance(judged, Unknown):
                raise CheckError(self._undecided(place, judged))
            if judged:
                found.append(place)
        if len(found) != check.number:
            lines = [self._subject.line(place) for place in found[:_MOST]]
            lines += [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
            told = "\n".join([f"the graph has {len(found)}", *lines])
            raise self._failure(check, told, *self._nearest(check, -1, besides=found))

    def _start(self, check: Check) -> None:
        self._end_waiting(len(self._schedule))
        self._at = -1

    def _failure(self, check: Check, *paragraphs: str) -> CheckFailure:
        subject, known = self._subject, self._subject.captures
        words = dict.fromkeys(
            word for predicate in check.pattern.predicates for word in predicate.names()
        )
        used = [
            f"{word} is\n{subject.line(subject.place[known[word]])}"
            for word in words
            if word in known
        ]
        return CheckFailure("\n".join([str(check), *paragraphs, *used]))

    def _differing(self, check: Check, place: int) -> str:
        """A node, and below it how it differs."""
        words = check.pattern.differences(self._schedule[place], self._subject)
        return "\n".join([self._subject.line(place), *(f"        {line}" for line in words)])

    def _nearest(self, check: Check, at: int, besides: Sequence[int] = ()) -> list[str]:
        """The node of that operator that differs least; of equals the first behind the search's
        beginning.
        """
        pattern, subject = check.pattern, self._subject
        places = [
            p
            for p, node in enumerate(self._schedule)
            if pattern.has_operator(node) and p not in besides
        ]
        if not places and besides:
            return []
        if not places:
            for node in self._schedule:
                why = pattern.may_fit_inside(node, subject)
                if why is not None and node in subject.leaves:
                    return [f"no node of the graph has that operator; {why}"]
                if why is not None:
                    where = "graph, but one in a graph that it calls,"
                    return [f"no node of the {where} has that operator"]
            return ["no node of the graph has that operator"]
        distances = [
            (len(pattern.differences(self._schedule[place], subject)), place <= at, place)
            for place in places
        ]
        distance, _, best = min(distances)
        if distance == 0:
            return [f"a node that matches is before that\n{subject.line(best)}"]
        return [f"the nearest is\n{self._differing(check, best)}"]
