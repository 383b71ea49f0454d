"""Look for what a topic needs in the torch, or pytest, that is installed."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gtrainer.doctor.contract import MODULE, CalledOnUs, Need, Topic

ROOT = Path(__file__).parents[1]


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
    """What ``module.name`` or ``module:name`` stands for; of an object that is no module, class or function itself.

    Raises:
        Missing: there is no such name.
    """
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


# --- what is called on us ------------------------------------------------------------------------


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
