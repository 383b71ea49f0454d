"""Define what a proof says: which kind of equal, where the next stronger kind fails, and why."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from pytest_gtrainer import facts
from pytest_gtrainer.facts import FailedCheck, counted

Kind = Literal[
    "identical", "other kernels", "reordered", "rounds elsewhere", "another function", "unknown"
]
MOST_NODES = 500
"""Largest graph for which a failed comparison makes a proof by itself: a second or two."""

KINDS: tuple[Kind, ...] = ("identical", "other kernels", "reordered", "rounds elsewhere")
"""Kinds of equal, the strongest first."""

_SAYS: dict[str, str] = {
    "identical": "the same bits for any numbers: the same kernels on the same values, added in "
    "the same order",
    "other kernels": "the same operations in the same order, by kernels that are called with other "
    "shapes or strides",
    "reordered": "the same function, rounded at the same places, with additions in another order",
    "rounds elsewhere": "the same function, rounded at other places",
    "another function": "the results differ, and no rounding explains it",
    "unknown": "nothing is proven",
}


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first result in which two programs differ, and where.

    Attributes:
        result: the name of the result, or of what the program leaves.
        rank: in a world, the first rank on which it differs.
        element: the first element that differs; None if shapes or dtypes do.
        differing, numel: how many elements of the result differ.
        says: what differs, if it is not elements.
    """

    result: str
    rank: int | None = None
    element: tuple[int, ...] | None = None
    differing: int = 0
    numel: int = 0
    says: str = ""

    def __str__(self) -> str:
        where = self.result
        if self.rank is not None:
            where += f", rank {self.rank}"
        if self.element is None:
            return f"{where}: {self.says}"
        if self.element:  # a scalar has no place
            where += f", element {list(self.element)}"
        return f"{where} ({self.differing} of {self.numel} differ)"


class Unchecked(str):
    """An assumption about operators, inputs or results that no run has looked at."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """The kind of equal that two programs are; ``str(proof)`` says it in three lines.

    Attributes:
        kind: the strongest that holds; "another function" if none does, "unknown" if that is open.
        compared: how many results were compared, on all ranks.
        first: the first result that differs in the next stronger kind; None if there is none.
        origin: where that begins: the first value of the actual program that the expected one
            never makes, though it makes all that it is computed from.
        factor: the one factor between the actual and the expected result, if it is a fraction with
            small numerator and denominator.
        assumes: what the proof takes for granted.
        reason: why nothing is known.
        repairs: what makes the results of parallel ranks equal, such as "a sum over 'tp'".
        seconds: time spent on each kind; it does not count in comparisons.
    """

    kind: Kind
    compared: int = 0
    first: FirstDifference | None = None
    origin: str = ""
    factor: Fraction | None = None
    assumes: tuple[str, ...] = ()
    reason: str = ""
    repairs: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.reason or _SAYS[self.kind]}"]
        if self.kind in KINDS:
            lines[0] += f" ({counted(self.compared, 'result')})"
        if self.first is not None:
            first = f"first {self.first}"
            if self.kind in KINDS:
                first = f"not {KINDS[max(0, KINDS.index(self.kind) - 1)]}: {first}"
            elif self.kind == "unknown":
                first = f"not {KINDS[-1]}: {first}"
            lines.append(f"  {first}")

        if self.factor is not None:
            lines.append(f"  {self.factor} times what is expected")
        if self.repairs:
            lines.append(f"  equal after {' or after '.join(self.repairs)}")
        if self.origin:
            lines.append(f"  begins at {self.origin}")
        for each in self.assumes:
            lines.append(f"  assumed: {each}")
        return "\n".join(lines)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The lines of ``assumes`` about what no run has looked at: the summary shows them."""
        return tuple(each for each in self.assumes if isinstance(each, Unchecked))

    def is_at_least(self, kind: str) -> bool:
        """Return whether this is ``kind`` of equal, or a stronger one."""
        return self.kind in KINDS and KINDS.index(self.kind) <= KINDS.index(kind)


class AnotherFunction(FailedCheck):
    """Two programs are not equal in the kind that was asked for; ``proof`` says in which."""

    __module__ = "pytest_gtrainer"

    def __init__(self, message: str, proof: Proof) -> None:
        super().__init__(message)
        self.proof = proof


def kind_in_words(prove_it: Callable[[], Any], *, nodes: int, call: str) -> str:
    """Return one line on the kind of equal; for more than ``MOST_NODES`` nodes, how to prove it.

    An error of the proof becomes a part of the line, because the caller is about to report the
    comparison that failed.

    Args:
        prove_it: returns a ``Proof``, or another object with a ``kind`` and lines of text.
        nodes: number of nodes of the graph, on all ranks that run.
        call: the Python call that makes the proof, for the line.
    """
    if nodes > MOST_NODES:
        return offer_proof(call)
    try:
        proof = prove_it()
    except Exception as error:
        return f"in exact arithmetic: unknown, {type(error).__name__}: {error}".partition("\n")[0]
    facts.emit("kind", outcome=proof.kind)
    first, *others = str(proof).splitlines()
    begins = next((line.strip() for line in others if "begins at" in line), "")
    return f"in exact arithmetic: {first}{'; ' if begins else ''}{begins}"


def offer_proof(call: str) -> str:
    """Return the line that a message has in place of a proof that would take too long."""
    return f"rounding or a bug? {call} says which kind of equal"
