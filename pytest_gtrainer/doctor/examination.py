"""Look for what a topic needs in the torch, or pytest, that is installed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gtrainer.doctor.contract import MODULE, Call, CalledOnUs, Need, Topic

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one name.

    Attributes:
        problem: "missing", "changed: too many positional arguments", ...; empty if it is in order.
        users: functions of the topic; ``MODULE`` among them if the topic does not even import.
    """

    name: str
    problem: str
    users: frozenset[str]
    note: str = ""

    @property
    def stops_import(self) -> bool:
        """Whether the topic does not even import."""
        return self.problem.startswith("missing") and MODULE in self.users


_NOTHING: Any = object()


class Missing(Exception):
    """The first part of a dotted name that does not exist."""


def examine(topic: Topic) -> list[Finding]:
    """Every name of the topic, in its order."""
    return [_examined(need) for need in topic.needs] + [_examined_call(entry) for entry in topic.called]


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
        found = getattr(known, part, _NOTHING)
        if found is _NOTHING:
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


def _examined(need: Need) -> Finding:
    def finding(problem: str, note: str = "") -> Finding:
        return Finding(need.name, "" if need.optional else problem, frozenset(need.users), note or problem)

    try:
        found = find(need.path)
    except Missing as error:
        return finding("missing" if need.attribute is None else f"missing: no {error}")
    bound = True
    if need.attribute is not None:
        if not _has(found, need.attribute):
            return finding("missing")
        bound = not inspect.isclass(found)
        found = getattr(found, need.attribute, None)
        bound = bound or not inspect.isfunction(found)
    for call in need.calls:
        signature = _signature(found)
        objection = signature and call.objection(signature, bound=bound)
        if objection:
            return finding(f"changed: {objection}")
    return finding("")


def _signature(function: object) -> inspect.Signature | None:
    """None of what does not tell, as functions of C++ do not."""
    try:
        return inspect.signature(function) if callable(function) else None
    except (TypeError, ValueError):
        return None


def _has(owner: Any, name: str) -> bool:
    """Whether a module or a class has the attribute, its instances included, or a function sets it."""
    if inspect.isfunction(owner):
        return re.search(rf"\b{name}\b", _source(owner)) is not None
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    declared = any(name in vars(base).get("__annotations__", ()) for base in owner.__mro__)
    return declared or any(re.search(rf"\bself\.{name}\s*[:=]", _source(base)) for base in owner.__mro__)


def _source(thing: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    except (OSError, TypeError):  # written in C++
        return ""


# --- what is called on us ------------------------------------------------------------------------


def _examined_call(entry: CalledOnUs) -> Finding:
    class_name = entry.ours.partition(":")[2]
    name = f"{class_name}.{entry.method}, called by {entry.caller.replace(':', '.')}"

    def finding(problem: str, note: str = "") -> Finding:
        return Finding(name, problem, frozenset({entry.ours}), note or problem)

    try:
        caller = find(entry.caller)
    except Missing:
        return finding("missing: torch has no such function")
    calls = _calls(caller, entry.method)
    if calls is None:
        return finding("missing: torch does not call it there")
    if not calls:
        return finding("", "called on torch's own groups only")
    ours = _own_signature(entry)
    if ours is None:
        return finding(f"changed: {class_name} has no {entry.method} of its own")
    objections = [objection for call in calls if (objection := call.objection(ours, bound=False))]
    return finding(f"changed: torch's call does not fit ours: {objections[0]}" if objections else "")


def _calls(caller: Any, method: str) -> list[Call] | None:
    """The calls of ``anything.method(...)`` in a function of torch; None if there are none at all.

    One behind ``type(group) is ProcessGroup and`` is not on an object of ours, and is left out.
    """
    tree = ast.parse(_source(caller) or "0")
    found = [node for node in ast.walk(tree) if _is_call_of(node, method)]
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.BoolOp) and re.match(r"type\(\w+\) is ", ast.unparse(node.values[0]))
        for inner in ast.walk(node)
    }
    return [Call.of(node) for node in found if node not in guarded] if found else None  # type: ignore[arg-type]


def _is_call_of(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _own_signature(entry: CalledOnUs) -> inspect.Signature | None:
    """The signature of our method, read in the source: its module may not import here."""
    module, _, class_name = entry.ours.partition(":")
    tree = ast.parse(ROOT.parent.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == entry.method:
                    return _signature_of(inner.args)
    return None


def _signature_of(arguments: ast.arguments) -> inspect.Signature:
    by_position = [*arguments.posonlyargs, *arguments.args]
    required = len(by_position) - len(arguments.defaults)
    made = [
        inspect.Parameter(
            argument.arg,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if place < required else None,
        )
        for place, argument in enumerate(by_position)
    ]
    if arguments.vararg:
        made.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        empty = inspect.Parameter.empty
        made.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=default or empty))
    if arguments.kwarg:
        made.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(made)
