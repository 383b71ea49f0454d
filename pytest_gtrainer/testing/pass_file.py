"""Read pass files: the passes, the world, and what is expected. This module does not import torch.

A *directive* is a comment line of a graph file like ``# name: value``. Any other comment is for the
reader. A comment that looks like a directive and is none is an error, since a misspelled check
would check nothing. These are comments of one word and a colon, and those that would be a directive
with a colon or without a mark.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.proofs.proof import KINDS
from pytest_gtrainer.worlds.spec import MARKER, SpecError, WorldSpec, make_spec

SUFFIX = ".fxgraph"
ONCE = ("world", "mesh", "golden", "values", "result", "again", "raises")
OFTEN = ("passes", "check")
# Fields of the header of a golden, which may be copied into a pass file.
_OF_HEADER = ("test", "torch", "remake", "view", "groups")
_OF_READER = ("note", "todo", "fixme", "example")
_KINDS_OF_CHECK = ("then", "next", "same", "never", "count", "start")
# Directives with one word. ``values``: results bit for bit as before, or equal in a kind for any
# numbers. ``result``: the graph as it was. ``again``: a second run changes nothing.
_WORDS = {
    "values": ("same", *KINDS),
    "result": ("unchanged",),
    "again": ("unchanged",),
}
_COMMENT = re.compile(
    r"\s*#(?P<marks>\W*)(?P<name>[A-Za-z_-]+)(?P<sign>\s*[:=;]?)\s*(?P<value>.*?)\s*"
)
# A comment that goes on with the directive in the line above, wherever it begins.
_CONTINUES = re.compile(r"\s*#\s*(?:[;,+&|]|->|and\s+\w+_pass\b).*")
_LIKE_CHECK = ("checks", "expect", "expects", "assert", "ensure")
_BEHIND_CODE = re.compile(
    rf"\s*[^#\s].*#\s*(?P<name>{'|'.join((*ONCE, *OFTEN, *_KINDS_OF_CHECK))})\s*:"
)
# Values by which a directive is recognised that lacks its colon.
_VALUES = {
    **{name: re.compile("|".join(map(re.escape, words))) for name, words in _WORDS.items()},
    "golden": re.compile(r"\w+"),
    "world": re.compile(r"fake\b.*"),
    "mesh": re.compile(r"\w+=\d+.*"),
    "passes": re.compile(r"\w+_pass\b.*"),
    "raises": re.compile(r"\w+(Error|Exception)(: .*)?"),
}
_WORLD = re.compile(r"fake,? (?P<size>\d+)(?: ranks)?(?:, rank (?P<rank>\d+))?")
_DIMENSION = re.compile(r"(?P<name>\w+)=(?P<extent>\d+)")


class PassFileError(ValueError):
    """A pass file that cannot be read or expects nothing; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Directive:
    """``# name: value`` at ``place``, a file and a line."""

    name: str
    value: str
    place: str


@dataclass(frozen=True, slots=True)
class PassCall:
    """A pass by name, and its options."""

    name: str
    options: Mapping[str, Any]
    place: str


@dataclass(frozen=True, slots=True)
class PassFile:
    """The content of a pass file.

    Attributes:
        file: its path as messages show it.
        text: all of it.
        passes: to be run in this order.
        world: the fake world they run in, None for none.
        golden: the view of the golden to compare with, None for none.
        raises: words of the error that the last pass raises, None if it must not raise.
        values: "same", a kind of equal, or "" for no comparison of values.
        result, again: whether these are asked for, see the table in ``docs/graph-checks.md``.
        checks: the ``# check:`` lines.
    """

    file: str
    text: str
    passes: tuple[PassCall, ...]
    world: WorldSpec | None
    golden: str | None
    raises: str | None
    values: str
    result: bool
    again: bool
    checks: tuple[Directive, ...]


def pass_files(folder: str | os.PathLike[str]) -> list[Any]:
    """Return the pass files below a folder as parameters of a test, with the markers of their
    worlds::

        @pytest.mark.parametrize("path", pass_files(Path(__file__).parent / "graphs"))
        def test_pass_file(path, gt_golden):
            run_pass_file(path, golden=gt_golden)

    A parameter's id is its path in the folder, ``joint.two_layers``. A file that cannot be read
    is a parameter too, so that its test fails and the others run.

    Raises:
        PassFileError: there is none.
    """
    root, marker = Path(folder), getattr(pytest.mark, MARKER)
    found = []
    for path in _files_below(root):
        try:
            world = read_pass_file(path).world
        except PassFileError:
            world = None  # the test of the file reports the error
        marks = []
        if world:
            mesh = dict(world.mesh)
            marks.append(marker(world.kind, size=world.size, mesh=mesh, rank=world.rank))
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found.append(pytest.param(path, id=name, marks=marks))
    if not found:
        raise PassFileError(f"there is no *{SUFFIX} file below {root}")
    return found


def _files_below(root: Path) -> list[Path]:
    """Return the pass files below a folder, also those in folders that are links, in order."""
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        above = {os.path.realpath(path) for path in Path(folder, "_").parents}
        for name in list(folders):
            if os.path.realpath(os.path.join(folder, name)) in above:  # a link that leads upwards
                folders.remove(name)
        found += [Path(folder, name) for name in names if name.lower().endswith(SUFFIX)]
    return sorted(found)


def read_pass_file(path: str | os.PathLike[str]) -> PassFile:
    """Read and check a pass file.

    Raises:
        PassFileError: it cannot be read, or is wrong; the message names file and line.
    """
    relative = os.path.relpath(path)
    file = os.fspath(path) if relative.startswith("..") else relative
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PassFileError(f"{file} cannot be read: {error}") from None
    directives = directives_of(text, file)
    once = {directive.name: directive for directive in directives if directive.name in ONCE}
    for name in ("golden", "raises"):
        if name in once and not once[name].value:
            raise PassFileError(f"{once[name].place}: `# {name}:` says nothing")
    # Words of less than four letters are in the message of nearly any error.
    if "raises" in once and not re.search(r"[^\W\d_]{4}", once["raises"].value):
        raise PassFileError(
            f"{once['raises'].place}: {once['raises'].value!r} may be in any message: write the "
            "class of the error, or words of its message"
        )
    for name, words in _WORDS.items():
        if name in once and once[name].value not in words:
            expected = " or ".join(f"`# {name}: {word}`" for word in words)
            raise PassFileError(
                f"{once[name].place}: expected {expected}, found {once[name].value!r}"
            )
    passes: list[PassCall] = []
    for directive in directives:
        if directive.name == "passes":
            passes += _calls(directive)
    if not passes:
        raise PassFileError(
            f"{file} names no pass: add a line like `# passes: canonicalize_graph_pass`"
        )
    checks = tuple(directive for directive in directives if directive.name == "check")
    values = {name: directive.value for name, directive in once.items()}
    says_enough = checks or "raises" in values or "result" in values
    golden = values.get("golden", None if says_enough else "full")
    return PassFile(
        file,
        text,
        tuple(passes),
        world=_world(once.get("world"), once.get("mesh")),
        golden=golden,
        raises=values.get("raises"),
        values=values.get("values", ""),
        result="result" in once,
        again="again" in once,
        checks=checks,
    )


def directives_of(text: str, file: str) -> list[Directive]:
    """Return the directives of a text, in order; raise for what is almost one, or one too many.

    >>> [check] = directives_of("# D4: offsets.\\n# check: then mm\\nif P:\\n", "x")
    >>> check.name, check.value
    ('check', 'then mm')
    """
    found: list[Directive] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        place = f"{file}:{number}"
        behind = _BEHIND_CODE.match(line)
        if behind is not None:
            is_check = behind["name"] in _KINDS_OF_CHECK
            spelling = _check_meant(behind["name"], "…") if is_check else f"{behind['name']}:"
            raise PassFileError(
                f"{place}: {line.strip()}\n`# {spelling}` stands on a line of its own"
            )
        match = _COMMENT.fullmatch(line)
        is_directive = match is not None and _is_directive(match)
        if not is_directive and found and found[-1].place == f"{file}:{number - 1}":
            above = lines[number - 2]
            is_indented = _indentation(line) > _indentation(above)
            if _CONTINUES.fullmatch(line) or (line.strip(" \t#") and is_indented):
                raise PassFileError(
                    f"{place}: {line.strip()}\na directive is one line: write this behind "
                    f"`# {found[-1].name}:` in the line above, or an empty line before a comment"
                )
        if match is None:
            continue
        name, value = match["name"], match["value"]
        if match["marks"].strip() or match["sign"].strip() != ":":
            spelling = _meant(match)
            if spelling:
                raise PassFileError(
                    f"{place}: {line.strip()}\nthis is only a comment: write `# {spelling}`"
                )
        elif name in ONCE or name in OFTEN:
            first = [each.place for each in found if each.name == name and name in ONCE]
            if first:
                raise PassFileError(f"{place}: there is a `# {name}:` at {first[0]} already")
            found.append(Directive(name, value, place))
        elif spelling := _check_meant(name, value):
            raise PassFileError(
                f"{place}: {line.strip()}\nthis is no directive: write `# {spelling}`"
            )
        elif name not in _OF_HEADER and name.lower() not in _OF_READER:
            once = [f"{each}: {_WORDS[each][0]}" if each in _WORDS else each for each in ONCE]
            known = [*OFTEN, *once]
            hint = nearest(name.lower(), (*ONCE, *OFTEN)) or f"; there are {', '.join(known)}"
            raise PassFileError(f"{place}: there is no directive `# {name}:`{hint}")
    return found


def _is_directive(comment: re.Match[str]) -> bool:
    is_marked = bool(comment["marks"].strip()) or comment["sign"].strip() != ":"
    return not is_marked and comment["name"] in (*ONCE, *OFTEN)


def _indentation(line: str) -> int:
    """Return how many spaces stand before a comment and its text; 0 for a line of the graph.

    >>> _indentation("# check: then mm"), _indentation("#   -> bf16"), _indentation("## a title")
    (1, 3, 0)
    """
    spaces = re.match(r"(\s*)#(\s*)", line.expandtabs())
    return len(spaces[1]) + len(spaces[2]) if spaces else 0


def _meant(comment: re.Match[str]) -> str | None:
    """Return the directive that a comment without the form ``# name: value`` looks like, if any."""
    name, value = comment["name"].lower(), comment["value"]
    has_colon = comment["sign"].strip() == ":"
    words = value.rstrip(".!`")  # a sentence for the reader may end with a check
    if name in _LIKE_CHECK and _is_check(words):
        return f"check: {words}"
    check = _check_meant(name, value)
    if check:
        # `# then descend into the layers` is for the reader, `# never relu` can be read as a check.
        is_meant = has_colon or name not in _KINDS_OF_CHECK or _is_check(f"{name} {words}")
        return check if is_meant else None
    if has_colon and name in (*ONCE, *OFTEN):
        return f"{name}: {value}"
    is_value = name in _VALUES and _VALUES[name].fullmatch(words)
    return f"{name}: {value}" if is_value else None


def _check_meant(name: str, value: str) -> str | None:
    """Return the check that a name and a value look like, if any.

    >>> _check_meant("never", "mm"), _check_meant("CHECK-NEXT", "mm")
    ('check: never mm', 'check: next mm')
    >>> _check_meant("check", "then mm")
    'check: then mm'
    """
    first, _, rest = name.lower().partition("-")
    if first == "check":
        kind = rest if rest in _KINDS_OF_CHECK else "then"
        is_whole = value.partition(" ")[0] in _KINDS_OF_CHECK
        return f"check: {value}" if is_whole else f"check: {kind} {value or 'aten.mm'}"
    return f"check: {first} {value}".rstrip() if first in _KINDS_OF_CHECK else None


def _is_check(text: str) -> bool:
    from pytest_gtrainer.checks.syntax import CheckError, parse_check  # imports torch

    try:
        parse_check(text, "")
    except CheckError:
        return False
    return True


def _world(world: Directive | None, mesh: Directive | None) -> WorldSpec | None:
    if world is None:
        if mesh is not None:
            raise PassFileError(f"{mesh.place}: a mesh needs its world, such as `# world: fake 8`")
        return None
    found = _WORLD.fullmatch(world.value)
    if found is None:
        raise PassFileError(
            f"{world.place}: expected a world like `fake 8` or `fake 8, rank 3`, found "
            f"{world.value!r}"
        )
    extents = {}
    if mesh is not None:
        parts = [_DIMENSION.fullmatch(part.strip()) for part in mesh.value.split(",")]
        if not all(parts):
            raise PassFileError(
                f"{mesh.place}: expected a mesh like `fsdp=4, tp=2`, found {mesh.value!r}"
            )
        extents["mesh"] = {part["name"]: int(part["extent"]) for part in parts if part}
    try:
        return make_spec("fake", size=int(found["size"]), rank=int(found["rank"] or 0), **extents)
    except SpecError as error:
        raise PassFileError(f"{world.place}: {error}") from None


def _calls(directive: Directive) -> Iterator[PassCall]:
    """Yield the passes of ``a; b(option=[1, 2])``. Options are literals: nothing is evaluated."""
    place = directive.place
    if "#" in directive.value:  # the rest would be a comment of Python
        raise PassFileError(f"{place}: a directive has no comment behind it: {directive.value}")
    if not directive.value or directive.value.endswith(";"):
        raise PassFileError(f"{place}: a pass is missing at the end: {directive.value}")
    try:
        statements = ast.parse(directive.value).body
    except SyntaxError as error:
        raise PassFileError(f"{place}: {error.msg}: {directive.value}") from None
    for statement in statements:
        called = statement.value if isinstance(statement, ast.Expr) else None
        keywords: list[ast.keyword] = []
        if isinstance(called, ast.Call) and not called.args:
            keywords, called = called.keywords, called.func
        if not isinstance(called, ast.Name):
            written = ast.unparse(statement)
            raise PassFileError(
                f"{place}: expected passes like `a_pass; b_pass(option=2)`, found {written}"
            )
        options = {}
        for keyword in keywords:
            value = ast.unparse(keyword.value)
            if keyword.arg is None:
                raise PassFileError(
                    f"{place}: write each option with its name, `n=2`, and not as **{value}"
                )
            try:
                options[keyword.arg] = ast.literal_eval(keyword.value)
            except (ValueError, TypeError):
                raise PassFileError(
                    f"{place}: an option is a literal of Python, and {keyword.arg}={value} is not"
                ) from None
        yield PassCall(called.id, MappingProxyType(options), place)
