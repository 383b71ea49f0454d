"""Compare in the parent what ranks only sent: goldens, inline expectations, control runs.

A test without ranks raises where such a check fails, and pytest decides by the test's marks what
that means. On ranks nothing was raised: an *objection* is the failure that the test would have
raised. ``conclude`` is the only code that changes the outcome of a report after its ranks gave it,
and follows the rule of pytest's xfail.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pytest_gtrainer._pytest_private import active_xfail
from pytest_gtrainer.worlds import ranks_text

# The plugins that compare what the ranks have sent with their reports, and the attribute it is in.
JUDGES = {"gtrainer-goldens": "gt_goldens", "gtrainer-inline": "gt_inline"}

Claims = Mapping[int, Sequence[Any]]  # by rank, in the order in which the test made them


class Xfail(NamedTuple):
    """The xfail mark that holds for a test: its reason, and the objections that it expects."""

    reason: str
    kinds: Sequence[str]
    # Regular expressions that a text must match, with their flags.
    patterns: Sequence[tuple[str, int]] = ()


class Objection(NamedTuple):
    """A failed check: its text, and its kind, which is a key of ``_errors`` or "left behind"."""

    kind: str
    text: str


def _errors() -> dict[str, type[BaseException]]:
    """Return what each kind of check raises in a test without ranks."""
    from pytest_gtrainer.golden.check import GoldenMismatch
    from pytest_gtrainer.numerics.compare import ControlFailed

    return {
        "gtrainer-goldens": GoldenMismatch,
        "gtrainer-inline": AssertionError,
        "control": ControlFailed,
    }


def xfail_of(item: pytest.Item) -> Xfail | None:
    """Return the xfail mark that holds for a test of this process; a rank sends it with reports.

    The parent cannot evaluate the mark: a condition may depend on the rank, and a test may add the
    mark while it runs.
    """
    mark = active_xfail(item)
    if mark is None:
        return None
    reason, raises = mark
    if raises is None:
        return Xfail(reason, list(_errors()))
    patterns = []
    if isinstance(raises, pytest.RaisesExc):
        if raises.check is not None:
            return Xfail(reason, [])  # looks at the exception itself, and there is none
        if raises.match is not None:
            patterns.append((raises.match.pattern, raises.match.flags))
        raises = raises.expected_exceptions or BaseException
    if not isinstance(raises, type | tuple):
        return Xfail(reason, [])  # RaisesGroup: no check raises a group
    kinds = [kind for kind, error in _errors().items() if issubclass(error, raises)]
    return Xfail(reason, kinds, patterns)


def objections_of(
    item: pytest.Item,
    claims: Mapping[str, Claims],
    ended_early: Iterable[int],
    report: pytest.TestReport,
) -> list[Objection]:
    """Compare what the ranks claim with goldens and with each other.

    Args:
        claims: by the attribute of the reports that carries them.
        ended_early: the ranks that skipped, or failed as expected. They may not have reached every
            check.
        report: gets the facts of the comparison.
    """
    found = []
    early = set(ended_early)
    for text in controls_that_never_differ(claims["gt_facts"], early):
        found.append(Objection("control", text))
    for plugin, attribute in JUDGES.items():
        judge = getattr(item.config.pluginmanager.getplugin(plugin), "judge_ranks", None)
        if judge is None:
            continue
        text = judge(item, as_if_to_the_end(claims[attribute], early), report)
        if text is not None:
            found.append(Objection(plugin, text))
    return found


def as_if_to_the_end(claims: Claims, early: set[int]) -> dict[int, list[Any]]:
    """Add to the claims of each rank that ended early those that the others made after it.

    >>> as_if_to_the_end({0: ["a", "b"], 1: ["a"], 2: []}, {1})
    {0: ['a', 'b'], 1: ['a', 'b'], 2: []}
    """
    completed = {rank: list(own) for rank, own in claims.items()}
    if early:
        longest = max(claims.values(), key=len, default=[])
        for rank in early & completed.keys():
            completed[rank] += longest[len(completed[rank]) :]
    return completed


def controls_that_never_differ(
    facts: Mapping[int, Iterable[Mapping[str, Any]]], early: Iterable[int] = ()
) -> Iterator[str]:
    """Name each control run that is equal on all ranks that made it.

    The n-th control of one name is the same control on all ranks, whatever else a rank makes in
    between. A rank that ended ``early`` may not have reached a control, so one that it has not made
    is not judged.
    """
    made: dict[tuple[str, int], dict[int, bool]] = {}
    counts = Counter[tuple[int, str]]()
    for rank, sent in facts.items():
        for fact in sent:
            if fact["kind"] == "control":
                counts[rank, fact["what"]] += 1
                nth = counts[rank, fact["what"]]
                made.setdefault((fact["what"], nth), {})[rank] = fact["equal"]
    for (what, _), equal_on in made.items():
        if not all(equal_on.values()) or not equal_on.keys() >= set(early):
            continue
        where = "on all ranks"
        if len(equal_on) < len(facts):
            where = (
                f"on {ranks_text(equal_on)}, and no other rank made a control of this name (`what`)"
            )
        name = f"{what}: " if what else ""
        wrong = f"the control run is equal {where}: this check cannot fail"
        yield f"{name}{wrong}; the mistake changes no bit here"


def are_expected(objections: Iterable[Objection], xfail: Xfail | None) -> bool:
    """Return whether the mark expects all of these."""
    if xfail is None:
        return False
    for objection in objections:
        is_like = all(
            re.search(pattern, objection.text, flags) for pattern, flags in xfail.patterns
        )
        if objection.kind not in xfail.kinds or not is_like:
            return False
    return True


def conclude(
    report: pytest.TestReport, objections: Sequence[Objection], xfail: Xfail | None = None
) -> None:
    """Change the outcome of a report to what pytest gives a test that raises ``objections``.

    A report that failed must not keep ``wasxfail``: pytest would print a failure, and neither count
    it for the exit status nor write it to the JUnit file.
    """
    if not objections:
        return
    report.longrepr = "\n\n".join(objection.text for objection in objections)
    vars(report).pop("wasxfail", None)
    if xfail is not None and are_expected(objections, xfail):
        report.outcome = "skipped"
        report.wasxfail = xfail.reason
    else:
        report.outcome = "failed"
