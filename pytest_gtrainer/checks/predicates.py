"""Define what a node must be: predicates, patterns made of them, and checks made of patterns.

A predicate says in words how a node differs from it, as failures quote it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import fx

from pytest_gtrainer._torch.values import OpOverload, pytree, schema
from pytest_gtrainer.checks.arguments import OUTPUT, REST, CallPattern, OperatorPattern
from pytest_gtrainer.checks.subject import (
    CheckError,
    Predicate,
    Subject,
    Unknown,
    is_called,
    is_within,
    worst_of,
)
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, spell_dtype, value_of
from pytest_gtrainer.graphtext.operators import operator_of
from pytest_gtrainer.graphtext.scopes import users_of

Extent = int | None | EllipsisType  # an extent, None for any one, ``...`` for any number of them


@dataclass(frozen=True, slots=True)
class InModule(Predicate):
    """The node belongs to a module, or to one inside it: ``layers.0``, ``layers.*``."""

    fqn: str

    def check(self, subject: Subject) -> None:
        subject.check_module(self.fqn)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        owners, _, is_bucket = subject.scope(node)
        # A bucket's collective serves several modules, so it belongs to none of them.
        if is_bucket:
            return (
                f"it belongs to the bucket {_modules_text(owners)}, expected the module {self.fqn}"
            )
        if owners and is_within(owners[0], self.fqn):
            return None
        return f"its module is {_modules_text(owners)}, expected {self.fqn}"


@dataclass(frozen=True, slots=True)
class InBucket(Predicate):
    """The node belongs to the bucket of just these modules, in this order; without any, to one."""

    fqns: tuple[str, ...]

    def check(self, subject: Subject) -> None:
        for fqn in self.fqns:
            subject.check_module(fqn)

    def check_exists(self, subject: Subject) -> None:
        """Raise ``CheckError`` if the graph has no such bucket."""
        if not self.fqns or any(map(self._is_of, subject.buckets)):
            return
        buckets = [f"bucket({', '.join(owners)})" for owners in subject.buckets]
        known = "; ".join(buckets) or "no bucket"
        raise CheckError(f"no bucket is {', '.join(self.fqns)}, in this order; there is {known}")

    def _is_of(self, owners: Sequence[str]) -> bool:
        return len(owners) == len(self.fqns) and all(map(is_called, owners, self.fqns))

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        owners, _, is_bucket = subject.scope(node)
        if not is_bucket:
            return f"it belongs to no bucket but to {_modules_text(owners)}, expected {self}"
        if not self.fqns or self._is_of(owners):
            return None
        return f"its bucket is {_modules_text(owners)}, expected {_modules_text(self.fqns)}"

    def __str__(self) -> str:
        if not self.fqns:
            return "one"
        return f"the bucket {_modules_text(self.fqns)}"


@dataclass(frozen=True, slots=True)
class InDirection(Predicate):
    """The node belongs to the forward ("fwd") or to the backward ("bwd")."""

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
        # Else the node's bucket and its own mark disagree.
        return words if found in (FORWARD, BACKWARD, "") else Unknown(words)


@dataclass(frozen=True, slots=True)
class HasType(Predicate):
    """The value is one tensor of this dtype, shape and strides, as far as they are given."""

    dtype: torch.dtype | None = None
    shape: tuple[Extent, ...] | None = None
    strides: tuple[Extent, ...] | None = None

    def check(self, subject: Subject) -> None:
        """Raise ``CheckError`` for strides of another number of dimensions than the shape."""
        if self.shape is None or self.strides is None or ... in (*self.shape, *self.strides):
            return
        if len(self.shape) != len(self.strides):
            raise CheckError(
                f"a shape of {len(self.shape)} dimensions has as many strides, "
                f"not {len(self.strides)}"
            )

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            return self._difference(value)
        if value is None:
            unknown = "its value is not known, expected one tensor"
            return unknown if _gives_no_tensor(node) else Unknown(unknown)
        words = f"its value is of type {type(value).__name__}, expected one tensor"
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                difference = self._difference(leaf)
                if difference is None or isinstance(difference, Unknown):
                    # ``topk -> f32`` is no type of topk, but a reader would say that it fits.
                    return Unknown(words)
        return words

    def _difference(self, value: torch.Tensor) -> str | None:
        if self.dtype is not None and value.dtype is not self.dtype:
            return f"its dtype is {spell_dtype(value.dtype)}, expected {spell_dtype(self.dtype)}"
        of_shape = _extents_difference("shape is", value.shape, self.shape)
        of_strides = _extents_difference("strides are", value.stride(), self.strides)
        return worst_of([of_shape, of_strides])


def _gives_no_tensor(node: fx.Node) -> bool:
    """Return whether a node without a value has none because its operator returns no tensor."""
    if not isinstance(node.target, OpOverload):
        return node.op == "output"
    return not any("Tensor" in str(result.type) for result in schema(node.target).returns)


@dataclass(frozen=True, slots=True)
class ComesFrom(Predicate):
    """The node is computed from a captured node or a graph input, over any number of steps."""

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
    """An operator or a captured node uses the node; with ``only``, nothing else does."""

    user: OperatorPattern
    only: bool = False

    def check(self, subject: Subject) -> None:
        if self.user.text not in subject.captures:
            self.user.check(subject)

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        users = list(users_of(node))
        captured = subject.captures.get(self.user.text)
        if captured is not None:
            fitting = [user for user in users if user is captured]
        else:
            fitting = [user for user in users if self.user.matches(user)]
        if fitting and (len(fitting) == len(users) or not self.only):
            return None
        found = ", ".join(dict.fromkeys(subject.name_of(user) for user in users)) or "nothing"
        wanted = f"only {self.user.text}" if self.only else self.user.text
        words = f"it is used by {found}, expected {wanted}"
        if captured is not None or self.only:
            return words
        # What a user calls reads the value where no check looks.
        may_fit = any(self.user.may_run_in(user, subject) for user in users)
        return Unknown(words) if may_fit else words

    def names(self) -> Iterable[str]:
        return [self.user.text]


def _modules_text(fqns: Sequence[str]) -> str:
    """Return modules as a message shows them: the root has no name of its own."""
    return ", ".join(fqn or "the root" for fqn in fqns) or "none"


def _extents_difference(
    what: str, found: Sequence[object], wanted: Sequence[Extent] | None
) -> str | None:
    """Return how extents differ, in words; ``Unknown`` if that depends on a symbol."""
    if wanted is None:
        return None
    fits = _extents_fit(found, wanted)
    if fits:
        return None
    words = f"its {what} {_extents_text(found)}, expected {_extents_text(wanted)}"
    return Unknown(words) if fits is None else words


def _extents_fit(found: Sequence[object], wanted: Sequence[Extent]) -> bool | None:
    """Return whether extents fit; None if that depends on a symbol.

    A symbol is not compared: that would add a guard to the graph's shape environment.

    >>> _extents_fit((2, 3, 4), (2, ..., None)), _extents_fit((2,), (2, None))
    (True, False)
    >>> _extents_fit((), (...,))
    True
    """
    if ... in wanted and len(found) >= len(wanted) - 1:
        gap = list(wanted).index(...)
        any_extents = [None] * (len(found) - len(wanted) + 1)
        wanted = [*wanted[:gap], *any_extents, *wanted[gap + 1 :]]
    if len(found) != len(wanted):
        return False
    fits: bool | None = True
    for extent, want in zip(found, wanted, strict=True):
        if want is None:
            continue
        if type(extent) is not int:
            fits = None
        elif extent != want:
            return False
    return fits


def _extents_text(extents: Sequence[object]) -> str:
    words = []
    for extent in extents:
        if extent is None:
            words.append("_")
        elif extent is ...:
            words.append("...")
        else:
            words.append(str(extent))
    return f"[{', '.join(words) or '()'}]"


_ONCE: dict[tuple[type[Predicate], ...], str] = {
    (InDirection,): "a direction (fwd, bwd)",
    (InModule, InBucket): "a module or bucket",
    (HasType,): "a dtype or shape",
}
"""Predicates that a pattern has at most once: twice is a contradiction, or says nothing more."""

_NOT_OF_OUTPUT = (InDirection, InModule, InBucket, HasType, UsedBy)
"""Predicates that never hold for the output node."""
_OF_INNER_NODE = (OperatorPattern, HasType)
"""Predicates that hold inside a graph which a node calls; names mean values of the outer graph."""

KINDS = ("then", "next", "same", "never", "count", "start")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The predicates of a node, operator first, and the name under which a match is captured."""

    predicates: tuple[Predicate, ...] = ()
    name: str | None = None

    def check(self, subject: Subject, *, is_negative: bool) -> None:
        """Raise ``CheckError`` if no node can fit.

        A negative check may also not name a direction or bucket that the graph does not have.
        """
        for kinds, what in _ONCE.items():
            count = sum(isinstance(predicate, kinds) for predicate in self.predicates)
            if count > 1:
                raise CheckError(f"{what} is said {count} times of one node; say it once")
        for predicate in self.predicates:
            predicate.check(subject)
            if is_negative and isinstance(predicate, InBucket | InDirection):
                predicate.check_exists(subject)
        is_output = OperatorPattern(OUTPUT) in self.predicates
        if is_output and any(isinstance(one, _NOT_OF_OUTPUT) for one in self.predicates):
            raise CheckError(
                "the output has no module, direction, type or users, so no node can match"
            )

    def differences(self, node: fx.Node, subject: Subject) -> list[str]:
        """Return how a node differs, in words; of a node of another operator only that."""
        predicates = self.predicates if self.has_operator(node) else self.predicates[:1]
        differences = [predicate.difference(node, subject) for predicate in predicates]
        return [words for words in differences if words is not None]

    def mismatch(self, node: fx.Node, subject: Subject) -> str | None:
        """Return how a node differs, in words; `Unknown` if it may fit, None if it fits."""
        return worst_of(predicate.difference(node, subject) for predicate in self.predicates)

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
        of_inner = Pattern(tuple(p for p in self.predicates if isinstance(p, _OF_INNER_NODE)))
        for inner in subject.inside(node):
            found = of_inner.mismatch(inner, subject)
            if found is None or isinstance(found, Unknown):
                what = operator_of(inner).text
                return Unknown(f"it calls a graph that has {what}: check that graph by itself")
        leaf = subject.leaf_in(node)
        if leaf is None or any(operator.names_leaf(subject) for operator in operators):
            return None
        return Unknown(
            f"the graph does not show what the leaf {subject.leaves[leaf]} calls: "
            "trace into it, or check for the leaf itself by this path"
        )

    def has_operator(self, node: fx.Node) -> bool:
        """Return whether the node's operator is the one that is asked for, if any is."""
        return all(p.matches(node) for p in self.predicates if isinstance(p, OperatorPattern))


@dataclass(frozen=True, slots=True)
class Check:
    """One line of checks.

    Attributes:
        kind: one of ``KINDS``.
        text: the line as written.
        place: its file and line.
        number: how many nodes a ``count`` expects.
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
            raise CheckError(
                f"`{self.kind}` finds no one node that could be called {self.pattern.name!r}"
            )

    @property
    def holds_of_every_graph(self) -> bool:
        """True if this asks for any node, or for the output, which each graph has.

        ``next output`` says that nothing lies before it, so this is not one of them.
        """
        if self.kind == "never":
            return False
        operators = set()
        for predicate in self.pattern.predicates:
            operator: Predicate = predicate
            if isinstance(predicate, CallPattern):
                if predicate.arguments != (REST,) or predicate.keywords:
                    return False
                operator = predicate.operator
            if not isinstance(operator, OperatorPattern):
                return False
            operators.add(operator.text.strip("*?"))
        if operators == {OUTPUT}:
            return self.kind in ("then", "same") or self.number == 1
        return operators == {""} and self.kind != "count"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"
