"""A check: what is done with a pattern, and where it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from pytest_gtrainer.checks.errors import CheckError
from pytest_gtrainer.checks.predicates import IsOperator, Predicate
from pytest_gtrainer.checks.subject import Subject

KINDS = ("then", "next", "same", "never", "count", "start")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a node must be, operator first, and the name under which a match is captured."""

    predicates: tuple[Predicate, ...] = ()
    name: str | None = None

    def check(self, subject: Subject) -> None:
        """Raises ``CheckError`` if no node can fit."""
        for predicate in self.predicates:
            predicate.check(subject)

    def differences(self, node: fx.Node, subject: Subject) -> list[str]:
        """How a node differs, in words; of another operator that alone is told."""
        found = []
        for predicate in self.predicates:
            words = predicate.difference(node, subject)
            if words is not None:
                found.append(words)
                if isinstance(predicate, IsOperator):
                    break
        return found

    def matches(self, node: fx.Node, subject: Subject) -> bool:
        return all(predicate.difference(node, subject) is None for predicate in self.predicates)

    def has_operator(self, node: fx.Node, subject: Subject) -> bool:
        """Whether the node's operator is the one that is asked for, if any is."""
        return all(p.difference(node, subject) is None for p in self.predicates if isinstance(p, IsOperator))

    def captures_used(self, subject: Subject) -> Iterable[str]:
        """The captured names that the pattern speaks of."""
        words = dict.fromkeys(word for predicate in self.predicates for word in predicate.names())
        return [word for word in words if word in subject.captures]


@dataclass(frozen=True, slots=True)
class Check:
    """What is asked of a graph.

    Attributes:
        kind: one of ``KINDS``; number: of a ``count``.
        text: as written; place: file and line.
    """

    kind: str
    pattern: Pattern
    text: str
    place: str
    number: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "start":
            if self.pattern != Pattern():
                raise CheckError("`start` stands alone: it sends the search back to the first node")
        elif not self.pattern.predicates:
            raise CheckError(f"this `{self.kind}` says nothing of the node, so it checks nothing")
        if self.pattern.name and self.kind in ("never", "count"):
            raise CheckError(f"`{self.kind}` finds no one node that could be called {self.pattern.name!r}")

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"
