"""Define the graph that is checked, what names in checks stand for, and the errors of checks."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import fx

from pytest_gtrainer._torch.graph_text import is_kernel_call
from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload
from pytest_gtrainer.facts import FailedCheck
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopt
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    direction,
    graphs_called,
    held,
    mutates,
    short_name,
    storage_of,
    walk,
    writes,
)
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.operators import groups_of, operator_of
from pytest_gtrainer.graphtext.rendering import lines_of
from pytest_gtrainer.graphtext.scopes import is_computed, is_item, scopes_of
from pytest_gtrainer.graphtext.sections import Scope


class CheckError(ValueError):
    """A check that cannot be read, cannot match, cannot fail or cannot be decided.

    The message says where the check stands, and the way out.
    """

    __module__ = "pytest_gtrainer"


class CheckFailure(FailedCheck):
    """A graph is not as a check says.

    The message quotes the check, the node where the search stood, and the nearest node.
    """

    __module__ = "pytest_gtrainer"


class Unknown(str):
    """A difference that nobody can decide: the graph does not say enough about a node.

    Such a node does not match. A ``never`` or ``count`` that meets one is an error, since it may
    match.
    """

    __slots__ = ()


def worst_of(differences: Iterable[str | None]) -> str | None:
    """Return the first difference that is certain, else the first that nobody can decide.

    >>> worst_of([None, Unknown("its shape depends on a symbol"), "its dtype is f32"])
    'its dtype is f32'
    """
    unknown: str | None = None
    for difference in differences:
        if difference is not None and not isinstance(difference, Unknown):
            return difference
        unknown = unknown or difference
    return unknown


def is_within(fqn: str, pattern: str) -> bool:
    """Return whether a module is the one that a component-wise pattern names, or lies in it.

    >>> [is_within("layers.1.wq", pattern) for pattern in ("layers.1", "layers.*", "*.1.wq")]
    [True, True, True]
    >>> [is_within("layers.1.wq", pattern) for pattern in ("layers.10", "wq", "")]
    [False, False, False]
    """
    wanted, path = pattern.split("."), fqn.split(".")
    return len(wanted) <= len(path) and all(map(fnmatchcase, path, wanted))


def is_called(fqn: str, pattern: str) -> bool:
    """Return whether a pattern names this module or input, and not only one around it.

    >>> is_called("layers.1", "layers.*"), is_called("layers.1.wq", "layers.*")
    (True, False)
    """
    return fqn == pattern or (fqn.count(".") == pattern.count(".") and is_within(fqn, pattern))


class Subject:
    """A graph under check, and what has been captured from it.

    Attributes:
        schedule: the computed nodes in order, then the output.
        place: by node its index in the schedule.
        captures: matched nodes, by the names that checks have given them.
        groups: process groups, by their names in the graph.
        has_items: the graph takes outputs of tuples by ``getitem``.
        buckets: the modules of each bucket, in the order of the graph, which a message keeps; the
            values are not used.
        directions: "fwd" and "bwd", if the graph has nodes of them.
        leaves: nodes that call a module or function which the tracer did not look into, with its
            name. Such are the leaf modules of a tracer of FX, and functions under ``fx.wrap``.
    """

    def __init__(
        self,
        gm: AnyGraph,
        *,
        before: AnyGraph | None = None,
        mesh: Mapping[str, int] | None = None,
        names: Names | None = None,
    ) -> None:
        """Read what the graph has; the arguments are those of ``assert_graph``.

        Modules, buckets and directions of the graph ``before`` a pass are known, too.
        """
        gm = adopt(gm, names)
        self._gm, self._mesh = gm, mesh
        nodes = list(gm.graph.nodes)
        self.schedule = [node for node in nodes if is_computed(node) or node.op == "output"]
        self.place = {node: place for place, node in enumerate(self.schedule)}
        self.captures: dict[str, fx.Node] = {}
        self.groups = groups_of(gm, mesh or {})
        self.has_items = any(map(is_item, nodes))

        self._scopes = scopes_of(nodes)
        scopes = list(self._scopes.of.values())
        if before is not None:
            scopes += scopes_of(adopt(before, names).graph.nodes).of.values()
        self._modules = {fqn for scope in scopes for fqn in scope.owners}
        self.buckets = {scope.owners: None for scope in scopes if scope.is_bucket}
        directions = {scope.space for scope in scopes}
        directions.update(direction(node) for node in self.schedule)
        self.directions = directions & {FORWARD, BACKWARD}

        self.leaves: dict[fx.Node, str] = {}
        for node in self.schedule:
            self._note_leaf(gm, node)
        self._inside: dict[fx.Node, list[fx.Node]] = {}
        self._writes = writes(gm.graph)
        self._writing_anywhere = []
        for node in self.schedule:
            if node in self.leaves or _writes_without_schema(node):
                self._writing_anywhere.append(node)
        self._lines: list[str] = []

    def inside(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes of the graphs that a node calls, and of those that these call.

        They are not in the schedule: no check is about them.
        """
        if node not in self._inside:
            self._inside[node] = []
            self._add_nodes_inside(self._gm, node, self._inside[node])
        return self._inside[node]

    def _add_nodes_inside(self, gm: fx.GraphModule, node: fx.Node, found: list[fx.Node]) -> None:
        for body in graphs_called(gm, node):
            for inner in body.graph.nodes:
                if is_computed(inner):
                    self._note_leaf(body, inner)
                    found.append(inner)
                    self._add_nodes_inside(body, inner, found)

    def _note_leaf(self, gm: fx.GraphModule, node: fx.Node) -> None:
        if node.op == "call_module":
            module = held(gm, str(node.target))
            if not isinstance(module, fx.GraphModule):
                self.leaves[node] = f"module.{node.target} ({type(module).__name__})"
        elif node.op == "call_function" and not _is_of_torch_or_python(node.target):
            owner = getattr(node.target, "__self__", None)
            of_class = f" ({owner.__name__})" if isinstance(owner, type) else ""
            self.leaves[node] = operator_of(node).text + of_class

    def leaf_in(self, node: fx.Node) -> fx.Node | None:
        """Return ``node`` if it is a leaf, else the first leaf in the graphs that it calls."""
        for inner in (node, *self.inside(node)):
            if inner in self.leaves:
                return inner
        return None

    def sources_of(self, node: fx.Node, *, anywhere: bool = False) -> set[fx.Node]:
        """Return the nodes from which a node is computed, over any number of steps.

        What was written into the memory of an operand before the node reads it counts, too.

        Args:
            anywhere: count also what a leaf, a method, a function or a kernel wrote before. No
                schema says which memory these write to, so it may be that of an operand.
        """

        def read_by(reader: fx.Node) -> list[fx.Node]:
            found = list(reader.all_input_nodes)
            for operand in reader.all_input_nodes:
                found += self._writes.get(storage_of(operand), ())
            if anywhere:
                found += self._writing_anywhere
            return [source for source in found if source < reader]

        return walk(read_by(node), read_by)

    def scope(self, node: fx.Node) -> Scope:
        """Return the module or bucket of a node; the output has no owners and no space."""
        return self._scopes.of.get(node, Scope((), ""))

    def direction(self, node: fx.Node) -> str:
        """Return "fwd", "bwd" or "", or a sentence if the node's bucket and its mark disagree."""
        of_bucket, of_mark = self.scope(node).space, direction(node)
        if of_bucket in ("", of_mark):
            return of_bucket
        return f"{of_bucket} by its bucket and {of_mark} by its mark"

    def check_module(self, pattern: str) -> None:
        """Raise ``CheckError`` if no node, constant or parameter lies in the module."""
        if any(is_within(fqn, pattern) for fqn in self._modules):
            return
        depth = pattern.count(".") + 1
        parents = {".".join(fqn.split(".")[:depth]) for fqn in self._modules}
        raise CheckError(f"nothing in the graph lies in {pattern!r}{nearest(pattern, parents)}")

    def inputs_called(self, name: str) -> list[fx.Node]:
        """Return the graph inputs of a name or pattern.

        A name is an FQN, or one with its space: ``P.layers.0.w``, ``A.0``.
        """
        return [node for node in self._scopes.inputs if self._is_input_called(node, name)]

    def _is_input_called(self, node: fx.Node, name: str) -> bool:
        source = self._scopes.inputs[node]
        return is_called(source.fqn, name) or is_called(f"{source.space}.{source.fqn}", name)

    def is_named(self, node: fx.Node, name: str) -> bool:
        """Return whether a name stands for this node: a capture's, or a graph input's."""
        if name in self.captures:
            return self.captures[name] is node
        return node.op == "placeholder" and self._is_input_called(node, name)

    def check_name(self, name: str) -> None:
        """Raise ``CheckError`` if a name stands for no value."""
        if name in self.captures or self.inputs_called(name):
            return
        words = [*self.captures]
        words += [group.symbol for group in self.groups.values()]
        inputs = [source.fqn for source in self._scopes.inputs.values()]
        others = f" (captures and groups are {', '.join(words)})" if words else ""
        hint = nearest(name, words + inputs)
        if not hint:
            hint = f": of any operator {name} write `{name}(_)`, or capture one with `as {name}`"
        raise CheckError(f"{name!r} is neither a captured node nor a graph input{others}{hint}")

    def name_of(self, node: fx.Node) -> str:
        """Return a node as a message names it.

        An input is ``P.norm.weight``, a captured node has its name, others are ``split[0] at 7``.
        """
        if node.op == "placeholder":
            source = self._scopes.inputs[node]
            return f"{source.space}.{source.fqn}"
        item = ""
        while is_item(node):
            node, item = node.args[0], f"[{node.args[1]}]{item}"
        for name, capture in self.captures.items():
            if capture is node:
                return name + item
        if node.op == "output":
            return "output"
        if node not in self.place:
            return str(node.target)
        return f"{operator_of(node).short}{item} at {self.place[node]}"

    def line(self, place: int) -> str:
        """Return a node of the schedule as a message shows it: its place and its line of text."""
        if not self._lines:  # a graph is rendered for its first message only
            for line in lines_of(self._gm, mesh=self._mesh):
                if line.section.partition(".")[0] in (FORWARD, BACKWARD):
                    self._lines.append(str(line))  # in the order of the schedule
            self._lines.append("output")
        return f"{place:>6}  {self._lines[place]}"


def _is_of_torch_or_python(function: object) -> bool:
    """Return whether a function is an operator, or torch's or Python's own."""
    if isinstance(function, OpOverload | HigherOrderOperator):
        return True
    # ``apply`` of an autograd function is a method of torch, bound to the class of a user.
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        function = owner
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "builtins", "math", "operator", "_operator")


def _writes_without_schema(node: fx.Node) -> bool:
    """Return whether a method, a function or a kernel writes, by torch's conventions for names."""
    if isinstance(node.target, OpOverload):
        return False
    name = short_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in node.kwargs or is_kernel_call(node.target) or mutates(node)


class Predicate:
    """One thing that a node must be."""

    __slots__ = ()

    def check(self, subject: Subject) -> None:
        """Raise ``CheckError`` if no node of any graph like this one can fit."""

    def difference(self, node: fx.Node, subject: Subject) -> str | None:
        """Return how a node differs: ``its dtype is f32, expected bf16``.

        Returns:
            None if the node fits, an `Unknown` if it may fit.
        """
        raise NotImplementedError

    def names(self) -> Iterable[str]:
        """Return the words of the predicate that may be names of captures."""
        return ()
