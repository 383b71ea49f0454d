"""A pass file as read: the passes, the world, and what is expected. No torch here."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pytest_gtrainer.testing.directives import Directive, PassFileError, directives_of
from pytest_gtrainer.worlds.spec import MARKER, SpecError, WorldSpec, make_spec

SUFFIX = ".fxgraph"
_WORLD = re.compile(r"fake,? (?P<size>\d+)(?: ranks)?(?:, rank (?P<rank>\d+))?")
_DIMENSION = re.compile(r"(?P<name>\w+)=(?P<extent>\d+)")
_WORDS = {"values": "same", "result": "unchanged", "again": "unchanged"}
"""Directives with one word: results bit for bit as before; the graph as it was; a second run changes nothing."""


@dataclass(frozen=True, slots=True)
class PassCall:
    """A pass by name, and its options."""

    name: str
    options: Mapping[str, Any]
    place: str


@dataclass(frozen=True, slots=True)
class PassFile:
    """What a pass file says.

    Attributes:
        file: its path as messages show it; text: all of it.
        passes: to be run in this order.
        world: the fake world they run in, None for none.
        golden: the view of the golden to compare with, None for none.
        raises: what the error of the last pass says, None if it must not raise.
        values, result, again: whether these are asked for, see the table in ``docs/graph-checks.md``.
        checks: the ``# check:`` lines.
    """

    file: str
    text: str
    passes: tuple[PassCall, ...]
    world: WorldSpec | None
    golden: str | None
    raises: str | None
    values: bool
    result: bool
    again: bool
    checks: tuple[Directive, ...]


def pass_files(folder: str | os.PathLike[str]) -> list[Any]:
    """The pass files below a folder as parameters of a test, each with its world's marker::

        @pytest.mark.parametrize("path", pass_files(Path(__file__).parent / "graphs"))
        def test_pass_file(path, gt_golden):
            run_pass_file(path, golden=gt_golden)

    A parameter's id is its path in the folder, ``joint.two_layers``. A file that cannot be read
    is a parameter too, so that its test fails and the others run.

    Raises:
        PassFileError: there is none.
    """
    root = Path(folder)
    paths = sorted(root.rglob(f"*{SUFFIX}"))
    if not paths:
        raise PassFileError(f"there is no *{SUFFIX} file below {root}")
    return [pytest.param(path, id=_id(path.relative_to(root)), marks=_marks(path)) for path in paths]


def _id(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def _marks(path: Path) -> list[pytest.MarkDecorator]:
    try:
        world = read_pass_file(path).world
    except PassFileError:
        return []  # told by the test
    if world is None:
        return []
    return [getattr(pytest.mark, MARKER)(world.kind, size=world.size, mesh=dict(world.mesh), rank=world.rank)]


def read_pass_file(path: str | os.PathLike[str]) -> PassFile:
    """Read and check a pass file.

    Raises:
        PassFileError: in one sentence, with file and line.
    """
    file = _shown(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PassFileError(f"{file} cannot be read: {error}") from None
    directives = directives_of(text, file)
    once = {directive.name: directive for directive in directives}
    passes = tuple(call for directive in directives if directive.name == "passes" for call in _calls(directive))
    if not passes:
        raise PassFileError(f"{file} names no pass: add a line like `# passes: canonicalize_graph_pass`")
    words = {name: _word(once.get(name)) for name in _WORDS}
    checks = tuple(directive for directive in directives if directive.name == "check")
    raises = _value(once.get("raises"))
    judged = bool(checks or raises or words["result"])
    return PassFile(
        file=file,
        text=text,
        passes=passes,
        world=_world(once.get("world"), once.get("mesh")),
        golden=_value(once.get("golden")) or (None if judged else "full"),
        raises=raises,
        checks=checks,
        **words,
    )


def _shown(path: str | os.PathLike[str]) -> str:
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative


def _value(directive: Directive | None) -> str | None:
    if directive is not None and not directive.value:
        raise PassFileError(f"{directive.place}: `# {directive.name}:` says nothing")
    return directive.value if directive else None


def _word(directive: Directive | None) -> bool:
    if directive is None:
        return False
    expected = _WORDS[directive.name]
    if directive.value != expected:
        raise PassFileError(f"{directive.place}: expected `# {directive.name}: {expected}`, found {directive.value!r}")
    return True


def _world(world: Directive | None, mesh: Directive | None) -> WorldSpec | None:
    if world is None and mesh is None:
        return None
    if world is None:
        assert mesh is not None
        raise PassFileError(f"{mesh.place}: a mesh needs its world, such as `# world: fake 8`")
    found = _WORLD.fullmatch(world.value)
    if found is None:
        raise PassFileError(f"{world.place}: expected a world like `fake 8` or `fake 8, rank 3`, found {world.value!r}")
    extents = {"mesh": _mesh(mesh)} if mesh else {}
    try:
        return make_spec("fake", size=int(found["size"]), rank=int(found["rank"] or 0), **extents)
    except SpecError as error:
        raise PassFileError(f"{world.place}: {error}") from None


def _mesh(directive: Directive) -> dict[str, int]:
    found = [_DIMENSION.fullmatch(part.strip()) for part in directive.value.split(",")]
    if not all(found):
        raise PassFileError(f"{directive.place}: expected a mesh like `fsdp=4, tp=2`, found {directive.value!r}")
    return {match["name"]: int(match["extent"]) for match in found if match}


def _calls(directive: Directive) -> Iterable[PassCall]:
    """``a; b(option=[1, 2])``: names, and options as literals of Python. Nothing is evaluated."""
    try:
        statements = ast.parse(directive.value).body
    except SyntaxError as error:
        raise PassFileError(f"{directive.place}: {error.msg}: {directive.value}") from None
    for statement in statements:
        yield _call(statement, directive.place)


def _call(statement: ast.stmt, place: str) -> PassCall:
    called = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(called, ast.Name):
        return PassCall(called.id, MappingProxyType({}), place)
    if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name) or called.args:
        raise PassFileError(f"{place}: expected passes like `a_pass; b_pass(option=2)`, found {ast.unparse(statement)}")
    options = {}
    for keyword in called.keywords:
        try:
            options[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            told = f"{keyword.arg or '**'}={ast.unparse(keyword.value)}"
            raise PassFileError(f"{place}: an option is a literal of Python, and {told} is not") from None
    return PassCall(called.func.id, MappingProxyType(options), place)
