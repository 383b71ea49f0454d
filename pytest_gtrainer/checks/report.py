"""Failures in words: the check, where the search stood, what came nearest and in what it differs."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gtrainer.checks.check import Check
from pytest_gtrainer.checks.errors import CheckFailure
from pytest_gtrainer.checks.subject import Subject

_MOST = 8
"""A failure shows so many nodes of a count."""


def not_found(check: Check, subject: Subject, at: int) -> CheckFailure:
    """A ``then`` without a match behind place ``at``."""
    return _failure(check, subject, _stood(at, subject), *_nearest(check, subject, at))


def other_next(check: Check, subject: Subject, place: int) -> CheckFailure:
    """A ``next`` whose node does not match."""
    if place == len(subject.schedule):
        return _failure(check, subject, "nothing follows the graph's output")
    said = _differing(check, subject, place)
    found = [p for p in range(len(subject.schedule)) if check.pattern.matches(subject.schedule[p], subject)]
    later = [f"a node that matches stands at\n{subject.line(p)}" for p in found[:1]]
    return _failure(check, subject, f"the next node does not match\n{said}", *later)


def not_same(check: Check, subject: Subject, at: int) -> CheckFailure:
    return _failure(check, subject, f"the last match is not such a node\n{_differing(check, subject, at)}")


def forbidden(check: Check, subject: Subject, after: int, place: int, end: int) -> CheckFailure:
    """A ``never`` that matches at ``place``, between the matches at ``after`` and ``end``."""
    upto = "the end" if end == len(subject.schedule) else f"the match at {end}"
    since = f"the match at {after}" if after >= 0 else "the start"
    return _failure(check, subject, f"it matches between {since} and {upto}\n{subject.line(place)}")


def other_count(check: Check, subject: Subject, found: Sequence[int]) -> CheckFailure:
    lines = [subject.line(place) for place in found[:_MOST]]
    if len(found) > _MOST:
        lines.append(f"and {len(found) - _MOST} more")
    told = "\n".join([f"the graph has {len(found)}", *lines])
    return _failure(check, subject, told, *_nearest(check, subject, -1, besides=found))


def _failure(check: Check, subject: Subject, *paragraphs: str) -> CheckFailure:
    used = [f"{name} is\n{_captured(name, subject)}" for name in check.pattern.captures_used(subject)]
    return CheckFailure("\n".join([str(check), *paragraphs, *used]))


def _captured(name: str, subject: Subject) -> str:
    return subject.line(subject.place[subject.captures[name]])


def _stood(at: int, subject: Subject) -> str:
    """Where the search began."""
    if at < 0:
        return "no node matches; the search began at the graph's first node"
    return f"no node matches behind the last match, which is\n{subject.line(at)}"


def _differing(check: Check, subject: Subject, place: int) -> str:
    """A node, and below it how it differs."""
    words = check.pattern.differences(subject.schedule[place], subject)
    return "\n".join([subject.line(place), *(f"        {line}" for line in words)])


def _nearest(check: Check, subject: Subject, at: int, besides: Sequence[int] = ()) -> list[str]:
    """The node of that operator that differs least; of equals the first behind the search's beginning."""
    pattern = check.pattern
    places = [p for p, node in enumerate(subject.schedule) if pattern.has_operator(node, subject) and p not in besides]
    if not places:
        return [] if besides else ["no node of the graph has that operator"]
    distance = {place: len(pattern.differences(subject.schedule[place], subject)) for place in places}
    best = min(places, key=lambda place: (distance[place], place <= at, place))
    if distance[best] == 0:
        return [f"a node that matches stands before that\n{subject.line(best)}"]
    return [f"the nearest is\n{_differing(check, subject, best)}"]
