"""Predicates of a pattern, each of which says in words how a node differs; patterns, and checks made of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import EllipsisType

import torch
from torch import fx

from pytest_gtrainer.checks.arguments import OperatorPattern
from pytest_gtrainer.checks.subject import CheckError, Predicate, Subject, is_called, is_within
from pytest_gtrainer.graph.nodes import spell_dtype, walked
from pytest_gtrainer.graphtext.scopes import users_of

Extent = int | None | EllipsisType  # an extent, None for any one, ``...`` for any number of them


@dataclass(frozen=True, slots=True)
class InModule(Predicate):
    """The module is, or lies in, the one that a component-wise pattern names."""

    fqn: str

    def check(self, subject: Subject) -> None:
        subject.check_module(self.fqn)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        owners, _, is_bucket = subject.scope(node)
        if is_bucket:
            return f"it belongs to the bucket {_told(owners)}, expected the module {self.fqn}"
        is_there = owners and is_within(owners[0], self.fqn)
        return None if is_there else f"its module is {_told(owners)}, expected {self.fqn}"


@dataclass(frozen=True, slots=True)
class InBucket(Predicate):
    """The node belongs to the bucket of just these modules, in this order; none given: to any."""

    fqns: tuple[str, ...]

    def check(self, subject: Subject) -> None:
        for fqn in self.fqns:
            subject.check_module(fqn)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        owners, _, is_bucket = subject.scope(node)
        if not is_bucket:
            return f"it belongs to no bucket but to {_told(owners)}, expected {self}"
        if not self.fqns or (
            len(owners) == len(self.fqns) and all(map(is_called, owners, self.fqns))
        ):
            return None
        return f"its bucket is {_told(owners)}, expected {_told(self.fqns)}"

    def __str__(self) -> str:
        return f"the bucket {_told(self.fqns)}" if self.fqns else "one"


_DIRECTIONS = {"fwd": ("fwd", "forward"), "bwd": ("bwd", "backward")}


def nearest_direction(text: object) -> str:
    """
    >>> nearest_direction("Backward"), nearest_direction("up")
    (', did you mean `bwd`?', '')
    """
    for direction, words in _DIRECTIONS.items():
        if str(text).lower().startswith(words):
            return f", did you mean `{direction}`?"
    return ""


@dataclass(frozen=True, slots=True)
class InDirection(Predicate):
    direction: str

    def check(self, subject: Subject) -> None:
        if self.direction not in ("fwd", "bwd"):
            raise CheckError(
                f"a direction is fwd or bwd, not {self.direction!r}{nearest_direction(self.direction)}"
            )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        found = subject.direction(node)
        return (
            None
            if found == self.direction
            else f"its direction is {found or 'none'}, expected {self.direction}"
        )


@dataclass(frozen=True, slots=True)
class HasType(Predicate):
    """Dtype, shape and strides, as far as they are said."""

    dtype: torch.dtype | None = None
    shape: tuple[Extent, ...] | None = None
    strides: tuple[Extent, ...] | None = None

    def check(self, subject: Subject) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise CheckError(
                f"dtype= takes a dtype of torch, such as torch.bfloat16, not {self.dtype!r}"
            )
        for what, extents in (("shape", self.shape), ("strides", self.strides)):
            for extent in extents or ():
                is_size = type(extent) is int and extent >= 0
                if not is_size and extent is not None and extent is not ...:
                    raise CheckError(
                        f"an extent of a {what} is a whole number, `_` (None) or `...`, not {extent!r}"
                    )
            if extents is not None and extents.count(...) > 1:
                raise CheckError("a shape has one `...` at most")
        shape, strides = self.shape, self.strides
        is_exact = shape is not None and strides is not None and ... not in (*shape, *strides)
        if is_exact and len(shape or ()) != len(strides or ()):
            raise CheckError(
                f"a shape of {len(shape or ())} dimensions has as many strides, not {len(strides or ())}"
            )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            kind = "not known" if value is None else f"of type {type(value).__name__}"
            return f"its value is {kind}, expected one tensor"
        if self.dtype is not None and value.dtype is not self.dtype:
            return f"its dtype is {spell_dtype(value.dtype)}, expected {spell_dtype(self.dtype)}"
        layout = (
            ("shape is", tuple(value.shape), self.shape),
            ("strides are", value.stride(), self.strides),
        )
        for what, found, wanted in layout:
            if wanted is not None and not _extents_fit(found, wanted):
                return f"its {what} {_extents(found)}, expected {_extents(wanted)}"
        return None


@dataclass(frozen=True, slots=True)
class ComesFrom(Predicate):
    """A captured node or a graph input is among the node's ancestors, over any number of steps."""

    name: str

    def check(self, subject: Subject) -> None:
        subject.check_name(self.name)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        ancestors = walked(node.all_input_nodes, attrgetter("all_input_nodes"))
        if any(subject.is_named(source, self.name) for source in ancestors):
            return None
        return f"{self.name} is not among its ancestors"

    def names(self) -> Iterable[str]:
        return [self.name]


@dataclass(frozen=True, slots=True)
class UsedBy(Predicate):
    """An operator, or a captured node, is among the users; with ``only``, every user is such a one."""

    user: OperatorPattern
    only: bool = False

    def check(self, subject: Subject) -> None:
        if self.user.text not in subject.captures:
            self.user.check(subject)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        users = list(users_of(node))
        captured = subject.captures.get(self.user.text)
        fits = [
            user is captured if captured is not None else self.user.matches(user) for user in users
        ]
        if any(fits) and (all(fits) or not self.only):
            return None
        found = ", ".join(dict.fromkeys(subject.name_of(user) for user in users)) or "nothing"
        return f"it is used by {found}, expected {'only ' if self.only else ''}{self.user.text}"

    def names(self) -> Iterable[str]:
        return [self.user.text]


@dataclass(frozen=True, slots=True)
class Where(Predicate):
    """A condition in Python."""

    condition: Callable[[fx.Node], object]

    def check(self, subject: Subject) -> None:
        if not callable(self.condition):
            raise CheckError(f"where= takes a function of a node, not {self.condition!r}")

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        name = getattr(self.condition, "__name__", "the condition")
        return None if self.condition(node) else f"{name} does not hold of it"


def _told(fqns: Sequence[str]) -> str:
    """Modules in a message: the root has a name, and so has none at all."""
    return ", ".join(fqn or "the root" for fqn in fqns) or "none"


def _extents_fit(found: Sequence[object], wanted: Sequence[Extent]) -> bool:
    """
    >>> _extents_fit((2, 3, 4), (2, ..., None)), _extents_fit((2,), (2, None)), _extents_fit((), (...,))
    (True, False, True)
    """
    if ... in wanted and len(found) >= len(wanted) - 1:  # any number of them in its place
        gap = list(wanted).index(...)
        wanted = [*wanted[:gap], *[None] * (len(found) - len(wanted) + 1), *wanted[gap + 1 :]]
    if len(found) != len(wanted):
        return False
    pairs = zip(
        found, wanted, strict=True
    )  # a symbolic extent fits `_` only: comparing it would add a guard
    return all(want is None or (type(extent) is int and extent == want) for extent, want in pairs)


def _extents(extents: Sequence[object]) -> str:
    told = ["_" if e is None else "..." if e is ... else str(e) for e in extents]
    return f"[{', '.join(told) or '()'}]"


_ONCE: dict[tuple[type[Predicate], ...], str] = {
    (InDirection,): "a direction (fwd, bwd)",
    (InModule, InBucket): "a module or bucket",
    (HasType,): "a dtype or shape",
}
"""What a node has one of: said twice, it is a contradiction or says nothing more."""

KINDS = ("then", "next", "same", "never", "count", "start")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a node must be, operator first, and the name under which a match is captured."""

    predicates: tuple[Predicate, ...] = ()
    name: str | None = None

    def check(self, subject: Subject) -> None:
        """Raises ``CheckError`` if no node can fit."""
        for kinds, what in _ONCE.items():
            said = [predicate for predicate in self.predicates if isinstance(predicate, kinds)]
            if len(said) > 1:
                raise CheckError(f"{what} is said {len(said)} times of one node; say it once")
        for predicate in self.predicates:
            predicate.check(subject)

    def differences(self, node: fx.Node, subject: Subject) -> list[str]:
        """How a node differs, in words; of another operator that alone is told."""
        asked = self.predicates if self.has_operator(node) else self.predicates[:1]
        return [
            words
            for predicate in asked
            if (words := predicate.difference(node, subject)) is not None
        ]

    def matches(self, node: fx.Node, subject: Subject) -> bool:
        return all(predicate.difference(node, subject) is None for predicate in self.predicates)

    def has_operator(self, node: fx.Node) -> bool:
        """Whether the node's operator is the one that is asked for, if any is."""
        return all(p.matches(node) for p in self.predicates if isinstance(p, OperatorPattern))


@dataclass(frozen=True, slots=True)
class Check:
    """What is asked of a graph."""

    kind: str  # one of ``KINDS``
    pattern: Pattern
    text: str  # as written
    place: str  # file and line
    number: int | None = None  # of a ``count``

    def __post_init__(self) -> None:
        if self.kind == "start":
            if self.pattern != Pattern():
                raise CheckError("`start` stands alone: it sends the search back to the first node")
        elif not self.pattern.predicates:
            raise CheckError(f"this `{self.kind}` says nothing of the node, so it checks nothing")
        if self.pattern.name and self.kind in ("never", "count"):
            raise CheckError(
                f"`{self.kind}` finds no one node that could be called {self.pattern.name!r}"
            )

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"
