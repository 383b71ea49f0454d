"""Run checks on a graph, and describe in words why one fails.

As in FileCheck, a ``then`` takes the first node that matches after the last match, and does not
come back to it. So all ``then`` and ``next`` together walk over the schedule once. Each ``never``
walks over the nodes between its two matches, and each ``count`` over all nodes.
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
_MOST = 8  # a failed ``count`` shows so many nodes


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
    """Run checks one by one; ``finish`` judges those that wait for the end."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._schedule = subject, subject.schedule
        self._at = -1  # place of the last match in the schedule
        self._waiting: list[Check] = []  # each `never` since the last match
        self._last: Check | None = None
        self._says_something = False  # of the checks since the last `start`

    def run(self, check: Check) -> None:
        """Run a check.

        Raises:
            CheckFailure: the graph is not as the check says.
            CheckError: the check cannot match, cannot fail, or cannot be decided.
        """
        if check.kind == "start":
            self._refuse_what_always_holds()
        self._last = check
        try:
            self._says_something |= check.kind != "start" and not check.holds_of_every_graph
            is_negative = check.kind == "never" or check.number == 0
            check.pattern.check(self._subject, is_negative=is_negative)
            match check.kind:
                case "then":
                    self._run_then(check)
                case "next":
                    self._run_next(check)
                case "same":
                    self._run_same(check)
                case "never":
                    self._waiting.append(check)
                case "count":
                    self._run_count(check)
                case "start":
                    self._end_waiting(len(self._schedule))
                    self._at = -1
        except CheckError as error:
            raise CheckError(f"{check}\n{error}") from None

    def finish(self) -> None:
        """Judge every `never` that no match has ended.

        Raises:
            CheckError: there was no check, or none after a `start`.
        """
        if self._last is None:
            raise CheckError(
                "there is no check, so nothing was checked: add one, such as "
                "`then aten.mm in layers.0`"
            )
        if self._last.kind == "start":
            raise CheckError(
                f"{self._last}\nnothing is checked after this `start`: remove it or add a check"
            )
        self._refuse_what_always_holds()
        self._end_waiting(len(self._schedule))

    def _refuse_what_always_holds(self) -> None:
        # A `start` in front of all checks is none of them.
        has_checked = self._last is not None and self._last.kind != "start"
        if has_checked and not self._says_something:
            raise CheckError(
                f"{self._last}\nany graph has such nodes, so nothing was checked: say of a node "
                "which one it is, such as `then aten.mm in layers.0`"
            )
        self._says_something = False

    def _end_waiting(self, end: int) -> None:
        """Judge each waiting `never` of the nodes between the last match and ``end``."""
        if self._waiting and self._at == len(self._schedule) - 1:
            raise CheckError(
                f"{self._waiting[0]}\n"
                "nothing follows the graph's output, so this `never` cannot fail"
            )
        for check in self._waiting:
            for place in range(self._at + 1, end):
                found = self._decide(check, place)
                if isinstance(found, Unknown):
                    raise CheckError(f"{check}\n{self._undecided(place, found)}")
                if found:
                    since = f"the match at {self._at}" if self._at >= 0 else "the start"
                    until = "the end" if end == len(self._schedule) else f"the match at {end}"
                    line = self._subject.line(place)
                    raise self._failure(check, f"it matches between {since} and {until}\n{line}")
        self._waiting.clear()

    def _matches(self, check: Check, place: int) -> bool:
        return check.pattern.mismatch(self._schedule[place], self._subject) is None

    def _decide(self, check: Check, place: int) -> bool | Unknown:
        """Return whether a node matches, for a check that holds only if that is certain."""
        node = self._schedule[place]
        found = check.pattern.mismatch(node, self._subject)
        if isinstance(found, Unknown):
            return found
        # A `never` fails for this node, whatever it calls; a leaf that is asked for counts as one.
        if found is None and (check.kind == "never" or node in self._subject.leaves):
            return True
        return check.pattern.may_fit_inside(node, self._subject) or found is None

    def _undecided(self, place: int, why: Unknown) -> str:
        line = self._subject.line(place)
        return f"nobody can say whether this node matches\n{line}\n        {why}"

    def _arrive(self, check: Check, place: int) -> None:
        self._at = place
        if check.pattern.name:
            self._subject.captures[check.pattern.name] = self._schedule[place]

    def _run_then(self, check: Check) -> None:
        for place in range(self._at + 1, len(self._schedule)):
            if self._matches(check, place):
                self._end_waiting(place)
                self._arrive(check, place)
                return
        where = "no node matches; the search began at the graph's first node"
        if self._at >= 0:
            line = self._subject.line(self._at)
            where = f"no node matches after the last match, which is\n{line}"
        raise self._failure(check, where, *self._nearest(check, self._at))

    def _run_next(self, check: Check) -> None:
        if self._waiting:
            raise CheckError(
                "between a match and its next node there is nothing, so "
                f"`{self._waiting[0]}` cannot fail"
            )
        place = self._at + 1
        if place == len(self._schedule):
            raise self._failure(check, "nothing follows the graph's output")
        if self._matches(check, place):
            self._arrive(check, place)
            return
        paragraphs = [f"the next node does not match\n{self._differing(check, place)}"]
        for other in range(len(self._schedule)):
            if self._matches(check, other):
                paragraphs.append(f"a node that matches is at\n{self._subject.line(other)}")
                break
        raise self._failure(check, *paragraphs)

    def _run_same(self, check: Check) -> None:
        if self._at < 0:
            raise CheckError(
                "`same` speaks of the last match, and there is none yet: "
                "begin with `then` or `next`"
            )
        if not self._matches(check, self._at):
            differing = self._differing(check, self._at)
            raise self._failure(check, f"the last match is not such a node\n{differing}")
        self._arrive(check, self._at)

    def _run_count(self, check: Check) -> None:
        found = []
        for place in range(len(self._schedule)):
            decided = self._decide(check, place)
            if isinstance(decided, Unknown):
                raise CheckError(self._undecided(place, decided))
            if decided:
                found.append(place)
        if len(found) != check.number:
            lines = [f"the graph has {len(found)}"]
            lines += [self._subject.line(place) for place in found[:_MOST]]
            if len(found) > _MOST:
                lines.append(f"and {len(found) - _MOST} more")
            nearest = self._nearest(check, -1, besides=found)
            raise self._failure(check, "\n".join(lines), *nearest)

    def _failure(self, check: Check, *paragraphs: str) -> CheckFailure:
        """Return the error of a check: what is wrong, then the captures that it names."""
        lines = [str(check), *paragraphs]
        names: list[str] = []
        for predicate in check.pattern.predicates:
            names += predicate.names()
        for name in dict.fromkeys(names):
            if name in self._subject.captures:
                place = self._subject.place[self._subject.captures[name]]
                lines.append(f"{name} is\n{self._subject.line(place)}")
        return CheckFailure("\n".join(lines))

    def _differing(self, check: Check, place: int) -> str:
        """Return the line of a node, and below it how the node differs from the pattern."""
        lines = [self._subject.line(place)]
        for words in check.pattern.differences(self._schedule[place], self._subject):
            lines.append(f"        {words}")
        return "\n".join(lines)

    def _nearest(self, check: Check, at: int, besides: Sequence[int] = ()) -> list[str]:
        """Return a paragraph about the node of the same operator that differs least.

        Of nodes that differ as little, the first one after the beginning of the search is shown.
        """
        pattern, subject = check.pattern, self._subject
        candidates = []
        for place, node in enumerate(self._schedule):
            if pattern.has_operator(node) and place not in besides:
                distance = len(pattern.differences(node, subject))
                candidates.append((distance, place <= at, place))
        if candidates:
            distance, _, best = min(candidates)
            if distance == 0:
                return [f"a node that matches is before that\n{subject.line(best)}"]
            return [f"the nearest is\n{self._differing(check, best)}"]

        if besides:
            return []
        for node in self._schedule:
            why = pattern.may_fit_inside(node, subject)
            if why is None:
                continue
            if node in subject.leaves:
                return [f"no node of the graph has that operator; {why}"]
            return ["no node of the graph, but one in a graph that it calls, has that operator"]
        return ["no node of the graph has that operator"]
