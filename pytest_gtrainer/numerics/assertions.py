"""Bitwise equality as an assertion, and its twin: a control run that must differ.

A check that cannot fail proves nothing. Next to every ``assert_bitwise_equal`` stands an
``assert_bitwise_different`` on a run with one thing deliberately wrong.
"""

from __future__ import annotations

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.compare import Verdict, compare
from pytest_gtrainer.numerics.entries import Tensors


class VerdictError(AssertionError):
    """A comparison did not come out as it must.

    Attributes:
        verdict: what the comparison found.
        gt_origin: ``(step, rank)`` of the first difference, None where there is none; when
            several ranks report, the smallest one is the headline.
    """

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.message = message
        self.verdict = verdict
        self.gt_origin = verdict.origin

    def __reduce__(self) -> tuple[type[VerdictError], tuple[str, Verdict]]:
        return type(self), (self.message, self.verdict)


class BitwiseDifference(VerdictError):
    """Two sides are not equal bit for bit, or nobody could tell."""


class ControlFailed(VerdictError):
    """A control run that had to differ in bits did not, or was no fair comparison."""


def assert_bitwise_equal(actual: Tensors, expected: Tensors, *, what: str = "") -> Verdict:
    """Fail unless every tensor of both sides is equal bit for bit.

    Args:
        actual, expected: records, tensors, mappings, lists or modules; see ``compare``.
        what: what is compared, for the message: ``"graph against eager"``.

    Raises:
        BitwiseDifference: different, or unverified.
    """
    __tracebackhide__ = True
    verdict = compare(actual, expected)
    facts.emit("verdict", outcome=verdict.outcome, tensors=verdict.compared, what=what)
    facts.tell("comparison", actual=actual, expected=expected, verdict=verdict, what=what, must_differ=False)
    explanations = explained(verdict, expected)
    if verdict.outcome != "equal":
        raise BitwiseDifference(_titled(what, "\n".join([str(verdict), *explanations])), verdict)
    return verdict


def explained(verdict: Verdict, expected: Tensors) -> list[str]:
    """What watchers of comparisons that must be equal know about this one: with ``--gt-bisect``, which pass it was."""
    explanations: list[str] = []
    facts.tell("judged", verdict=verdict, expected=expected, explanations=explanations)
    return explanations


def assert_bitwise_different(actual: Tensors, expected: Tensors, *, what: str = "") -> Verdict:
    """Fail unless the two sides, of the same names, dtypes and shapes, differ in some bit.

    This is the control of an ``assert_bitwise_equal``: the same comparison on a run with
    one thing wrong on purpose. Names or shapes that do not match would make it pass for
    the wrong reason, and so fail it.

    Raises:
        ControlFailed: equal, unverified, or not comparable.
    """
    __tracebackhide__ = True
    verdict = compare(actual, expected)
    complaint = _complaint(verdict)
    outcome = "different, as it must" if complaint is None else f"{verdict.outcome}, control failed"
    facts.emit("verdict", outcome=outcome, tensors=verdict.compared, what=what)
    facts.tell("comparison", actual=actual, expected=expected, verdict=verdict, what=what, must_differ=True)
    if complaint is not None:
        raise ControlFailed(_titled(what, f"{complaint}\n{verdict}"), verdict)
    return verdict


def _complaint(verdict: Verdict) -> str | None:
    """What is wrong with a control run, or None."""
    if verdict.outcome == "equal":
        return "the control run is equal: this check cannot fail"
    if verdict.outcome == "unverified":
        return "the control run is unverified: it says nothing about this check"
    layouts = any(difference.kind != "bits" for difference in verdict.differences)
    if layouts or verdict.only_actual or verdict.only_expected or verdict.reasons:
        return "the control run must differ in bits alone: here the two sides are not comparable"
    return None


def _titled(what: str, message: str) -> str:
    return f"{what}\n{message}" if what else message
