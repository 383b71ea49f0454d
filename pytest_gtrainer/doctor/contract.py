"""A topic's contract, read in its source (names that it imports or spells out, and how it calls them), and examined."""

import ast
import contextlib
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

MODULE = ""  # the user of what runs while the topic is imported: without it the topic does not import


@dataclass(slots=True)
class Need:
    """One name of torch or pytest."""

    path: str  # dotted, ``torch.fx.traceback.annotate``; of an attribute the owner, as ``ATTRIBUTES`` writes it
    attribute: str | None = None  # of the owner; None for a name with a path of its own
    users: set[str] = field(default_factory=set)  # functions and classes of the topic; ``MODULE`` is itself
    calls: list[ast.Call] = field(default_factory=list)
    optional: bool = False  # whether the topic does without it

    @property
    def name(self) -> str:
        return self.path if self.attribute is None else f"{self.path.replace(':', '.')}.{self.attribute}"


class CalledOnUs(NamedTuple):
    """A method of ours that a function of the host calls: ``caller`` and ``ours`` are ``module:name``."""

    ours: str
    method: str
    caller: str


@dataclass(frozen=True, slots=True)
class Topic:
    """A file of private names."""

    module: str  # its dotted name
    title: str
    needs: list[Need]  # in the order of the source, imports first
    called: list[CalledOnUs]
    unowned: set[str]  # private attributes that are neither imported nor in ``ATTRIBUTES``
    unused: set[str]  # entries of ``ATTRIBUTES`` that the source does not use

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2].strip("_")


def read_topic(file: Path, module: str, hosts: tuple[str, ...]) -> Topic:
    """Read a topic's source, importing nothing; ``hosts`` are the packages that are meant, ``("torch",)``."""
    tree = ast.parse(file.read_text())
    named = ((name, value) for name, value in _assignments(tree) if name in ("ATTRIBUTES", "CALLED_ON_US"))
    tables = {name: ast.literal_eval(value) for name, value in named}
    reader = _Reader(hosts, tables.get("ATTRIBUTES", {}), tree)
    on_us = tables.get("CALLED_ON_US", {}).items()
    callers = ((ours, caller, methods) for ours, by_caller in on_us for caller, methods in by_caller.items())
    called = [CalledOnUs(ours, method, caller) for ours, caller, methods in callers for method in methods]
    title = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
    needs = sorted(reader.needs.values(), key=lambda need: need.attribute is not None)
    unowned = {name for name in reader.unresolved if is_private(name)}
    return Topic(module, title, needs, called, unowned, reader.owners.keys() - {name for _, name in reader.needs})


def is_private(name: str) -> bool:
    """Whether a dotted name has a part with an underscore in front."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """Of an import: the name that it binds, what that stands for, and what is looked up."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            path = f"{node.module}.{alias.name}"
            yield alias.asname or alias.name, path, path
        else:
            bound = alias.name.partition(".")[0]
            yield (alias.asname, alias.name, alias.name) if alias.asname else (bound, bound, alias.name)


class _Reader(ast.NodeVisitor):
    """Walks the source of a topic and gathers what it needs of the hosts."""

    def __init__(self, hosts: tuple[str, ...], attributes: dict[str, tuple[str, ...]], tree: ast.Module) -> None:
        self._hosts = hosts
        self.needs: dict[tuple[str, str | None], Need] = {}
        self.owners: dict[str, list[str]] = {}  # classes, by attribute
        for owner, names in attributes.items():
            for name in names:
                self.owners.setdefault(name, []).append(owner)
        self.unresolved: set[str] = set()
        self._bound: dict[str, str] = {}
        self._user = MODULE
        self._optional = False
        for node in ast.walk(tree):  # what the names of the file stand for, wherever they are bound
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._bound |= {bound: path for bound, path, _ in imported_names(node) if self._is_host(path)}
        for name, value in _assignments(tree):
            if (path := self._path(value)) is not None and name not in self._bound:
                self._bound[name] = path
        self.visit(tree)
        # a function that calls another one of the file uses what that one uses
        blocks = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        uses = {each.name: {inner.id for inner in ast.walk(each) if isinstance(inner, ast.Name)} for each in blocks}
        for need in self.needs.values():
            before = -1
            while before != len(need.users):
                before = len(need.users)
                need.users |= {name for name, inner in uses.items() if inner & (need.users - {MODULE})}

    def _is_host(self, path: str) -> bool:
        return path.partition(".")[0] in self._hosts

    def _path(self, node: ast.AST) -> str | None:
        """The dotted name that an expression spells out, None if it is something else."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def _need(self, path: str, attribute: str | None = None) -> Need:
        need = self.needs.setdefault((path, attribute), Need(path, attribute, optional=self._optional))
        need.users.add(self._user)
        need.optional = need.optional and self._optional
        return need

    def _attribute(self, name: str) -> list[Need]:
        return [self._need(owner, name) for owner in self.owners.get(name, ())]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        outside = self._user
        for base in getattr(node, "bases", ()):
            self.visit(base)
        self._user = self._user or node.name
        for inner in (*node.body, *node.decorator_list):
            self.visit(inner)
        self._user = outside

    visit_ClassDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        absent = re.compile("ImportError|AttributeError")
        catching = [each for each in node.handlers if absent.search(ast.unparse(each.type or ast.Constant("")))]
        caught = not all(any(isinstance(inner, ast.Raise) for inner in ast.walk(each)) for each in catching)
        before, self._optional = self._optional, self._optional or caught
        for statement in node.body:
            self.visit(statement)
        self._optional = before
        for inner in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(inner)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for _, _, path in imported_names(node):
            if self._is_host(path):
                self._need(path)

    visit_ImportFrom = visit_Import

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self._bound:
            self._need(self._bound[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (path := self._path(node)) is not None:
            self._need(path)
            for part in path.split(".")[1:]:
                self._attribute(part)
            return
        self.visit(node.value)
        is_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not self._attribute(node.attr) and not is_ours:
            self.unresolved.add(node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        if (path := self._path(node.func)) is not None:
            self._need(path).calls.append(node)
        if isinstance(node.func, ast.Attribute):
            for need in self._attribute(node.func.attr):
                need.calls.append(node)
        self.generic_visit(node)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What became of one name."""

    name: str
    problem: str  # "missing", "changed: too many positional arguments", ...; empty if it is in order
    users: frozenset[str]  # functions of the topic; ``MODULE`` among them if the topic does not even import
    note: str = ""

    @property
    def stops_import(self) -> bool:
        """Whether the topic does not even import."""
        return self.problem.startswith("missing") and MODULE in self.users


_NOTHING: Any = object()


class Missing(Exception):
    """The first part of a dotted name that does not exist."""


def examine(topic: Topic) -> list[Diagnosis]:
    """Every name of the topic, in its order."""
    return [*map(diagnose, topic.needs), *map(diagnose_call, topic.called)]


def find(path: str) -> Any:
    """What ``module.name`` or ``module:name`` stands for; of an object that is no module, class or function itself."""
    parts = path.replace(":", ".").split(".")
    try:
        found = importlib.import_module(parts[0])
    except ImportError:
        raise Missing(parts[0]) from None
    for place, part in enumerate(parts[1:], start=1):
        if not (inspect.ismodule(found) or callable(found)):
            return found  # its attributes are in ATTRIBUTES, by class
        known: Any = found
        if (found := getattr(known, part, _NOTHING)) is _NOTHING:
            dotted = ".".join(parts[: place + 1])
            if not inspect.ismodule(known) or not hasattr(known, "__path__"):
                raise Missing(dotted)
            try:
                importlib.import_module(dotted)
            except Exception as error:  # whatever a module that we have not met does
                absent = isinstance(error, ModuleNotFoundError) and error.name == dotted
                raise Missing(dotted if absent else f"{dotted}: {error}") from None
            found = sys.modules[dotted]
    return found


def diagnose(need: Need) -> Diagnosis:
    """Whether a name is there, and takes the calls that the topic makes."""

    def told(problem: str) -> Diagnosis:
        return Diagnosis(need.name, "" if need.optional else problem, frozenset(need.users), problem)

    try:
        found = find(need.path)
    except Missing as error:
        return told("missing" if need.attribute is None else f"missing: no {error}")
    bound = True
    if need.attribute is not None:
        if not _has(found, need.attribute):
            return told("missing")
        static = isinstance(inspect.getattr_static(found, need.attribute, None), staticmethod)
        bound = static or not inspect.isclass(found)
        found = getattr(found, need.attribute, None)
        bound = bound or not inspect.isfunction(found)
    try:
        signature = inspect.signature(found) if need.calls and callable(found) else None
    except (TypeError, ValueError):  # functions of C++ do not tell
        signature = None
    refusals = (signature and objection(call, signature, bound=bound) for call in need.calls)
    return told(next((f"changed: {refusal}" for refusal in refusals if refusal), ""))


def objection(call: ast.Call, signature: inspect.Signature, *, bound: bool) -> str | None:
    """Why a function refuses a call's arguments, if it does; one that is not ``bound`` takes the instance first."""
    given = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    by_name = {keyword.arg: keyword for keyword in call.keywords if keyword.arg is not None}
    has_more = len(given) < len(call.args) or len(by_name) < len(call.keywords)  # by `*` or `**`
    bind = signature.bind_partial if has_more else signature.bind
    try:
        bind(*([] if bound else [None]), *given, **by_name)
    except TypeError as error:
        return str(error)
    return None


def _has(owner: Any, name: str) -> bool:
    """Whether a module or a class has the attribute, its instances included, or a function sets it."""
    if inspect.isfunction(owner):
        return re.search(rf"\b{name}\b", _source(owner)) is not None
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    declared = any(name in vars(base).get("__annotations__", ()) for base in owner.__mro__)
    methods = (inspect.unwrap(each) for base in owner.__mro__ for each in vars(base).values() if callable(each))
    naming = (each for each in methods if inspect.isfunction(each) and name in each.__code__.co_names)
    return declared or any(re.search(rf"\bself\.{name}\s*[:=]", _source(method)) for method in naming)


def _source(thing: Any) -> str:
    with contextlib.suppress(OSError, TypeError):  # written in C++
        return textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    return ""


def diagnose_call(entry: CalledOnUs) -> Diagnosis:
    """Whether a function of torch still calls a method of ours, as the method takes it."""
    class_name = entry.ours.partition(":")[2]
    name = f"{class_name}.{entry.method}, called by {entry.caller.replace(':', '.')}"

    def told(problem: str, note: str = "") -> Diagnosis:
        return Diagnosis(name, problem, frozenset({entry.ours}), note or problem)

    try:
        caller = find(entry.caller)
    except Missing:
        return told("missing: torch has no such function")
    tree = ast.parse(_source(caller) or "0")
    found = {node for node in ast.walk(tree) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Attribute) and node.func.attr == entry.method}  # fmt: skip
    if not found:
        return told("missing: torch does not call it there")
    for node in ast.walk(tree):  # what stands behind `type(group) is ProcessGroup and` is called on no object of ours
        if isinstance(node, ast.BoolOp) and re.match(r"type\(\w+\) is ", ast.unparse(node.values[0])):
            found -= set(ast.walk(node))
    if not found:
        return told("", "called on torch's own groups only")
    if (ours := _own_signature(entry)) is None:
        return told(f"changed: {class_name} has no {entry.method} of its own")
    refusals = (objection(node, ours, bound=False) for node in sorted(found, key=lambda node: node.lineno))
    return told(next((f"changed: torch's call does not fit ours: {refusal}" for refusal in refusals if refusal), ""))


def _own_signature(entry: CalledOnUs) -> inspect.Signature | None:
    """The signature of our method, read in the source: its module may not import here."""
    module, _, class_name = entry.ours.partition(":")
    tree = ast.parse(ROOT.parent.joinpath(*module.split(".")).with_suffix(".py").read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name]
    for node in classes[0].body if classes else ():
        if isinstance(node, ast.FunctionDef) and node.name == entry.method:
            arguments = node.args  # as those of a lambda, which leaves annotations out; what defaults are is no matter
            arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
            arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
            likeness = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
            return inspect.signature(eval(compile(likeness, module, "eval")))
    return None
