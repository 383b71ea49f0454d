"""Read pass files: the passes, the world, and what is expected. This module does not import torch.

A *directive* is a comment line of a graph file like ``# name: value``. Any other comment is for the
reader. A comment that looks like a directive and is none is an error, since a misspelled check
would check nothing. These are comments of one word and a colon, and those that would be a directive
with a colon or without a mark.
"""

import ast
import contextlib
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
from pytest_gtrainer.worlds import MARKER, SpecError
from pytest_gtrainer.worlds.spec import WorldSpec, make_spec

SUFFIX = ".fxgraph"
ONCE = ("world", "mesh", "golden", "values", "result", "again", "raises")
OFTEN = ("passes", "check")
# Fields of the header of a golden, which may be copied into a pass file.
_OF_HEADER = ("test", "torch", "remake", "view", "groups")
_OF_READER = ("note", "todo", "fixme", "example")
# Those of ``checks.predicates``, which imports torch; a test compares them.
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
    root = Path(folder)
    marker = getattr(pytest.mark, MARKER)
    found = []
    for path in _files_below(root):
        world = None
        with contextlib.suppress(PassFileError):  # the test of the file reports the error
            world = read_pass_file(path).world
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
            # A link that leads upwards would be followed for ever.
            if os.path.realpath(os.path.join(folder, name)) in above:
                folders.remove(name)
        for name in names:
            if name.lower().endswith(SUFFIX):
                found.append(Path(folder, name))
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
    texts = {name: directive.value for name, directive in once.items()}
    golden = _golden(once, bool(checks))
    return PassFile(
        file,
        text,
        tuple(passes),
        world=_world(once.get("world"), once.get("mesh")),
        golden=golden,
        raises=texts.get("raises"),
        values=texts.get("values", ""),
        result="result" in texts,
        again="again" in texts,
        checks=checks,
    )


def _golden(once: Mapping[str, Directive], has_checks: bool) -> str | None:
    """Return the view of the golden that a file is compared with, None for none."""
    expects_more = has_checks or "raises" in once or "result" in once
    view = once["golden"].value if "golden" in once else None
    if view is None:
        # A file that expects nothing else has a golden.
        return None if expects_more else "full"
    if view != "none":
        return view
    if not expects_more and "values" not in once:
        raise PassFileError(f"{once['golden'].place}: without a golden the file expects nothing")
    return None


def directives_of(text: str, file: str) -> list[Directive]:
    """Return the directives of a text, in order; raise for what is almost one, or one too many.

    >>> [check] = directives_of("# D4: offsets.\\n# check: then mm\\nif P:\\n", "x")
    >>> check.name, check.value
    ('check', 'then mm')
    """
    found: list[Directive] = []
    above = ""
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{file}:{number}"
        behind = _BEHIND_CODE.match(line)
        if behind is not None:
            spelling = f"{behind['name']}:"
            if behind["name"] in _KINDS_OF_CHECK:
                spelling = f"check: {behind['name']} …"
            raise PassFileError(
                f"{place}: {line.strip()}\n`# {spelling}` stands on a line of its own"
            )
        comment = _COMMENT.fullmatch(line)
        if comment is not None and _has_form(comment) and comment["name"] in (*ONCE, *OFTEN):
            name = comment["name"]
            for earlier in found:
                if earlier.name == name and name in ONCE:
                    raise PassFileError(
                        f"{place}: there is a `# {name}:` at {earlier.place} already"
                    )
            found.append(Directive(name, comment["value"], place))
        else:
            if found and found[-1].place == f"{file}:{number - 1}":
                is_indented = _indentation(line) > _indentation(above)
                if _CONTINUES.fullmatch(line) or (line.strip(" \t#") and is_indented):
                    raise PassFileError(
                        f"{place}: {line.strip()}\na directive is one line: write this after `# "
                        f"{found[-1].name}:` in the line above, or an empty line before a comment"
                    )
            if comment is not None:
                _refuse_mistaken(comment, place)
        above = line
    return found


def _has_form(comment: re.Match[str]) -> bool:
    """Return whether a comment has the form ``# name: value``."""
    return not comment["marks"].strip() and comment["sign"].strip() == ":"


def _refuse_mistaken(comment: re.Match[str], place: str) -> None:
    """Raise ``PassFileError`` for a comment that looks like a directive and is none."""
    name, line = comment["name"], comment[0].strip()
    if not _has_form(comment):
        spelling = _meant(comment)
        if spelling:
            raise PassFileError(f"{place}: {line}\nthis is only a comment: write `# {spelling}`")
        return
    spelling = _check_meant(name, comment["value"])
    if spelling:
        raise PassFileError(f"{place}: {line}\nthis is no directive: write `# {spelling}`")
    if name in _OF_HEADER or name.lower() in _OF_READER:
        return
    hint = nearest(name.lower(), (*ONCE, *OFTEN))
    if not hint:
        known: list[str] = [*OFTEN]
        for each in ONCE:
            known.append(f"{each}: {_WORDS[each][0]}" if each in _WORDS else each)
        hint = f"; there are {', '.join(known)}"
    raise PassFileError(f"{place}: there is no directive `# {name}:`{hint}")


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
        if has_colon or name not in _KINDS_OF_CHECK or _is_check(f"{name} {words}"):
            return check
        return None
    if has_colon and name in (*ONCE, *OFTEN):
        return f"{name}: {value}"
    if name in _VALUES and _VALUES[name].fullmatch(words):
        return f"{name}: {value}"
    return None


def _check_meant(name: str, value: str) -> str | None:
    """Return the check that a name and a value look like, if any.

    >>> _check_meant("never", "mm"), _check_meant("CHECK-NEXT", "mm")
    ('check: never mm', 'check: next mm')
    >>> _check_meant("check", "then mm")
    'check: then mm'
    """
    first, _, rest = name.lower().partition("-")
    if first == "check":
        if value.partition(" ")[0] in _KINDS_OF_CHECK:
            return f"check: {value}"
        kind = rest if rest in _KINDS_OF_CHECK else "then"
        return f"check: {kind} {value or 'aten.mm'}"
    if first in _KINDS_OF_CHECK:
        return f"check: {first} {value}".rstrip()
    return None


def _is_check(text: str) -> bool:
    """Return whether a text can be read as a check."""
    from pytest_gtrainer.checks.syntax import CheckError, parse_check  # imports torch

    try:
        parse_check(text, "")
    except CheckError:
        return False
    return True


def _world(world: Directive | None, mesh: Directive | None) -> WorldSpec | None:
    """Return the world that the directives describe; None without any."""
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
    given: dict[str, Any] = {"size": int(found["size"]), "rank": int(found["rank"] or 0)}
    if mesh is not None:
        given["mesh"] = {}
        for text in mesh.value.split(","):
            part = _DIMENSION.fullmatch(text.strip())
            if part is None:
                raise PassFileError(
                    f"{mesh.place}: expected a mesh like `fsdp=4, tp=2`, found {mesh.value!r}"
                )
            if part["name"] in given["mesh"]:
                raise PassFileError(
                    f"{mesh.place}: the mesh has {part['name']!r} twice, name each dimension once: "
                    f"{mesh.value!r}"
                )
            given["mesh"][part["name"]] = int(part["extent"])
    try:
        return make_spec("fake", **given)
    except SpecError as error:
        raise PassFileError(f"{world.place}: {error}") from None


def _calls(directive: Directive) -> Iterator[PassCall]:
    """Yield the passes of ``a; b(option=[1, 2])``. Options are literals: nothing is evaluated."""
    place = directive.place
    if "#" in directive.value:  # the rest would be a comment of Python
        raise PassFileError(f"{place}: a directive has no comment after it: {directive.value}")
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
            raise PassFileError(
                f"{place}: expected passes like `a_pass; b_pass(option=2)`, found "
                f"{ast.unparse(statement)}"
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
