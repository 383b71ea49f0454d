"""Replacing the string literals of calls in a source file, all at once; nothing else of it changes.

An *edit* says which literal by the line that the call begins at and by what the literal reads as,
so an edit that was made for another state of the file finds no literal. All literals are found
before one is replaced, and replaced from the bottom up: no replacement moves the place of another.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_LINE_END = re.compile(r"\r\n|\r|\n")
# (literal, text) to a literal in the same style that reads as the text; None if there is none
Speller = Callable[[str, str], str | None]


class EditError(Exception):
    """An edit that cannot be made, or a file that cannot be edited; the message lacks which."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A call's literal and the text that it shall read as."""

    line: int
    old: str
    new: str


def rewritten(source: bytes, edits: Iterable[Edit], spell: Speller) -> tuple[bytes, dict[Edit, str]]:
    """The source after all edits that can be made, and why each of the others cannot.

    Encoding, line ends and byte-order mark stay as they are.

    Raises:
        EditError: the source is not Python, or more than the literals would change.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise EditError(f"is not Python source ({error})") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    literals: dict[ast.Constant, Edit] = {}
    refused = {}
    for edit in edits:
        try:
            literal = find_literal(calls, edit.line, edit.old)
            if literal in literals:
                raise EditError("another expectation has the only literal there that reads as the old text")
            literals[literal] = edit
        except EditError as error:
            refused[edit] = str(error)
    lines = [0, *(found.end() for found in _LINE_END.finditer(text))]
    replacements = []
    for literal, edit in literals.items():
        replacement = _replacement(text, _span(text, lines, literal), edit, spell)
        if replacement is None:
            refused[edit] = "the obtained text has characters that an inline expectation cannot hold"
        else:
            literal.value = edit.new
            replacements.append(replacement)
    return _replaced(text, tree, replacements).encode(encoding), refused


@dataclass(frozen=True, slots=True)
class _Replacement:
    start: int
    end: int
    spelled: str


def _replacement(text: str, span: tuple[int, int], edit: Edit, spell: Speller) -> _Replacement | None:
    start, end = span
    spelled = spell(_LINE_END.sub("\n", text[start:end]), edit.new)
    if spelled is None:
        return None
    line_end = _LINE_END.search(text)
    return _Replacement(start, end, spelled.replace("\n", line_end[0] if line_end else "\n"))


def find_literal(calls: Iterable[ast.Call], line: int, value: str) -> ast.Constant:
    """The last literal that reads as ``value`` among the arguments of the call at ``line``.

    The call is the outermost of those that begin last, on that line or before it, and have one;
    ``calls`` are in the order of ``ast.walk``, outer before inner.

    >>> call = ast.parse("same(f('a', 'b'), 'b')", mode="eval").body
    >>> find_literal([call, call.args[0]], 1, "b").col_offset
    18
    """
    found = [
        (call, literals)
        for call in calls
        if call.lineno <= line <= (call.end_lineno or 0) and (literals := _literals(call, value))
    ]
    if not found:
        raise EditError("there is no string literal that reads as the old expectation in the call there")
    last = max(call.lineno for call, _ in found)
    (outermost, literals), *others = ((call, those) for call, those in found if call.lineno == last)
    if not all(_contains(outermost, call) for call, _ in others):
        raise EditError("two calls there have the same expectation: put them on lines of their own")
    return max(literals, key=lambda literal: (literal.lineno, literal.col_offset))


def _literals(call: ast.Call, value: str) -> list[ast.Constant]:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    # the type first: under -bb to compare bytes with a string is an error
    return [
        node
        for node in arguments
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value == value
    ]


def _contains(outer: ast.Call, inner: ast.Call) -> bool:
    begins = outer.lineno, outer.col_offset
    ends = outer.end_lineno or 0, outer.end_col_offset or 0
    return begins <= (inner.lineno, inner.col_offset) and (inner.end_lineno or 0, inner.end_col_offset or 0) <= ends


def _span(text: str, starts: list[int], node: ast.Constant) -> tuple[int, int]:
    """Where a node stands in the text, whose lines start there; its columns count bytes of UTF-8."""

    def place(line: int, column: int) -> int:
        start = starts[line - 1]
        return start + len(text[start : start + column].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)


def _replaced(text: str, tree: ast.AST, replacements: list[_Replacement]) -> str:
    """``tree`` has the new values already: the new text must read as it."""
    for one in sorted(replacements, key=lambda one: one.start, reverse=True):
        text = text[: one.start] + one.spelled + text[one.end :]
    try:
        is_the_same = _without_prefixes(ast.parse(text)) == _without_prefixes(tree)
    except SyntaxError:
        is_the_same = False
    if not is_the_same:
        raise EditError("cannot be edited without changing more than its expectations")
    return text


def _without_prefixes(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.kind = None  # the u of u"…"
    return ast.dump(tree)
