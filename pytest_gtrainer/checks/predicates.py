"""Predicates of a pattern, each of which says in words how a node differs; patterns, and checks
made of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import fx

from pytest_gtrainer._torch.values import OpOverload, pytree, schema
from pytest_gtrainer.checks.arguments import OUTPUT, OperatorPattern
from pytest_gtrainer.checks.subject import (
    CheckError,
    Predicate,
    Subject,
    Unknown,
    is_called,
    is_within,
)
from pytest_gtrainer.graph.nodes import BACKWARD, spell_dtype
from pytest_gtrainer.graphtext.operators import operator_of
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

    def check_exists(self, subject: Subject) -> None:
        """Raise ``CheckError`` if there is no such bucket: then no node would ever belong to it."""
        if not self.fqns or any(map(self._is_of, subject.buckets)):
            return
        known = "; ".join(f"bucket({', '.join(owners)})" for owners in subject.buckets)
        raise CheckError(
            f"no bucket is {', '.join(self.fqns)}, in this order; there is {known or 'no bucket'}"
        )

    def _is_of(self, owners: Sequence[str]) -> bool:
        return len(owners) == len(self.fqns) and all(map(is_called, owners, self.fqns))

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        owners, _, is_bucket = subject.scope(node)
        if not is_bucket:
            return f"it belongs to no bucket but to {_told(owners)}, expected {self}"
        if not self.fqns or self._is_of(owners):
            return None
        return f"its bucket is {_told(owners)}, expected {_told(self.fqns)}"

    def __str__(self) -> str:
        return f"the bucket {_told(self.fqns)}" if self.fqns else "one"


@dataclass(frozen=True, slots=True)
class InDirection(Predicate):
    direction: str

    def check_exists(self, subject: Subject) -> None:
        """Raise ``CheckError`` if the graph has no node of this direction."""
        if self.direction not in subject.directions:
            name = "backward" if self.direction == BACKWARD else "forward"
            raise CheckError(
                f"the graph has no {name}, so no node is in {self.direction}: check the graph of "
                f"the whole step, or leave out `in {self.direction}`"
            )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        found = subject.direction(node)
        if found == self.direction:
            return None
        words = f"its direction is {found or 'none'}, expected {self.direction}"
        return words if found in ("fwd", "bwd", "") else Unknown(words)


@dataclass(frozen=True, slots=True)
class HasType(Predicate):
    """Dtype, shape and strides, as far as they are said."""

    dtype: torch.dtype | None = None
    shape: tuple[Extent, ...] | None = None
    strides: tuple[Extent, ...] | None = None

    def check(self, subject: Subject) -> None:
        shape, strides = self.shape, self.strides
        is_exact = shape is not None and strides is not None and ... not in (*shape, *strides)
        if is_exact and len(shape or ()) != len(strides or ()):
            raise CheckError(
                f"a shape of {len(shape or ())} dimensions has as many strides, not {len(strides or ())}"
            )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            return self._difference(value)
        if value is None:
            unknown = "its value is not known, expected one tensor"
            return unknown if _gives_no_tensor(node) else Unknown(unknown)
        words = f"its value is of type {type(value).__name__}, expected one tensor"
        # `topk -> f32` is no type of topk, but a reader would say that it fits
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        differences = [self._difference(tensor) for tensor in tensors]
        may_fit = any(one is None or isinstance(one, Unknown) for one in differences)
        return Unknown(words) if may_fit else words

    def _difference(self, value: torch.Tensor) -> str | None:
        if self.dtype is not None and value.dtype is not self.dtype:
            return f"its dtype is {spell_dtype(value.dtype)}, expected {spell_dtype(self.dtype)}"
        unknown: str | None = None
        for what, wanted in (("shape is", self.shape), ("strides are", self.strides)):
            if wanted is None:
                continue
            found = tuple(value.shape) if what == "shape is" else value.stride()
            fits = _extents_fit(found, wanted)
            words = f"its {what} {_extents(found)}, expected {_extents(wanted)}"
            if fits is False:
                return words
            if fits is None and unknown is None:
                unknown = Unknown(words)
        return unknown


def _gives_no_tensor(node: fx.Node) -> bool:
    """Return whether a node without a value has none because its operator returns no tensor."""
    if not isinstance(node.target, OpOverload):
        return node.op == "output"
    return not any("Tensor" in str(result.type) for result in schema(node.target).returns)


@dataclass(frozen=True, slots=True)
class ComesFrom(Predicate):
    """A captured node or a graph input is among the node's ancestors, over any number of steps."""

    name: str

    def check(self, subject: Subject) -> None:
        subject.check_name(self.name)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        if self._is_named(subject.sources_of(node), subject):
            return None
        words = f"{self.name} is not among its ancestors"
        if self._is_named(subject.sources_of(node, anywhere=True), subject):
            return Unknown(f"{words}, but it goes into what a method or function wrote before")
        return words

    def _is_named(self, sources: Iterable[fx.Node], subject: Subject) -> bool:
        return any(subject.is_named(source, self.name) for source in sources)

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
        words = f"it is used by {found}, expected {'only ' if self.only else ''}{self.user.text}"
        # What a user calls reads the value where no check looks.
        may_fit = any(self.user.may_run_in(user, subject) for user in users)
        return Unknown(words) if may_fit and captured is None and not self.only else words

    def names(self) -> Iterable[str]:
        return [self.user.text]


def _told(fqns: Sequence[str]) -> str:
    """Modules in a message: the root has a name, and so has none at all."""
    return ", ".join(fqn or "the root" for fqn in fqns) or "none"


def _extents_fit(found: Sequence[object], wanted: Sequence[Extent]) -> bool | None:
    """Return whether extents fit; None if that depends on a symbol: to compare it would add a
    guard.

    >>> _extents_fit((2, 3, 4), (2, ..., None)), _extents_fit((2,), (2, None)), _extents_fit((), (...,))
    (True, False, True)
    """
    if ... in wanted and len(found) >= len(wanted) - 1:  # any number of them in its place
        gap = list(wanted).index(...)
        wanted = [*wanted[:gap], *[None] * (len(found) - len(wanted) + 1), *wanted[gap + 1 :]]
    if len(found) != len(wanted):
        return False
    asked = [(extent, want) for extent, want in zip(found, wanted, strict=True) if want is not None]
    if any(type(extent) is int and extent != want for extent, want in asked):
        return False
    return True if all(type(extent) is int for extent, _ in asked) else None


def _extents(extents: Sequence[object]) -> str:
    told = ["_" if e is None else "..." if e is ... else str(e) for e in extents]
    return f"[{', '.join(told) or '()'}]"


_ONCE: dict[tuple[type[Predicate], ...], str] = {
    (InDirection,): "a direction (fwd, bwd)",
    (InModule, InBucket): "a module or bucket",
    (HasType,): "a dtype or shape",
}
"""What a node has one of: said twice, it is a contradiction or says nothing more."""

_OF_A_VALUE = (InDirection, InModule, InBucket, HasType, UsedBy)
_OF_A_NODE_INSIDE = (OperatorPattern, HasType)
"""What can be said of a node in a graph that another one calls; names mean values of the outer one.
"""

KINDS = ("then", "next", "same", "never", "count", "start")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a node must be, operator first, and the name under which a match is captured."""

    predicates: tuple[Predicate, ...] = ()
    name: str | None = None

    def check(self, subject: Subject, *, is_negative: bool) -> None:
        """Raise ``CheckError`` if no node can fit; of a negative check none may even be missing."""
        for kinds, what in _ONCE.items():
            said = [predicate for predicate in self.predicates if isinstance(predicate, kinds)]
            if len(said) > 1:
                raise CheckError(f"{what} is said {len(said)} times of one node; say it once")
        for predicate in self.predicates:
            predicate.check(subject)
            if predicate == OperatorPattern(OUTPUT):
                others = [one for one in self.predicates if isinstance(one, _OF_A_VALUE)]
                if others:
                    wrong = "the output has no module, direction, type or users"
                    raise CheckError(f"{wrong}, so no node can match")
            if is_negative and isinstance(predicate, InBucket | InDirection):
                predicate.check_exists(subject)

    def differences(self, node: fx.Node, subject: Subject) -> list[str]:
        """How a node differs, in words; of another operator that alone is told."""
        asked = self.predicates if self.has_operator(node) else self.predicates[:1]
        return [
            words
            for predicate in asked
            if (words := predicate.difference(node, subject)) is not None
        ]

    def mismatch(self, node: fx.Node, subject: Subject) -> str | None:
        """Return how a node differs, in words; `Unknown` if it may fit, None if it fits."""
        unknown: str | None = None
        for predicate in self.predicates:
            found = predicate.difference(node, subject)
            if found is not None and not isinstance(found, Unknown):
                return found
            unknown = unknown or found
        return unknown

    def may_fit_inside(self, node: fx.Node, subject: Subject) -> Unknown | None:
        """Return why a graph or leaf that ``node`` calls may have a node that fits.

        Operator, type and direction decide it: the nodes inside have the direction of their call.
        """
        operators = []
        for predicate in self.predicates:
            if isinstance(predicate, OperatorPattern):
                operators.append(predicate)
            elif isinstance(predicate, InDirection):
                difference = predicate.difference(node, subject)
                if difference is not None and not isinstance(difference, Unknown):
                    return None
        local = Pattern(tuple(p for p in self.predicates if isinstance(p, _OF_A_NODE_INSIDE)))
        for inner in subject.inside(node):
            found = local.mismatch(inner, subject)
            if found is None or isinstance(found, Unknown):
                what = operator_of(inner).text
                return Unknown(f"it calls a graph that has {what}: check that graph by itself")
        leaf = subject.leaf_in(node)
        if leaf is None or any(operator.names_leaf(subject) for operator in operators):
            return None
        return Unknown(
            f"the graph does not show what the leaf {subject.leaves[leaf]} calls: trace into it, or "
            "check for the leaf itself by this path"
        )

    def has_operator(self, node: fx.Node) -> bool:
        """Return whether the node's operator is the one that is asked for, if any is."""
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
