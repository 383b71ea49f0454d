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
from collections.abc import Iterable
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")


class EditError(Exception):
    """An edit that cannot be made, or a file that cannot be edited; the message lacks which."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A call's literal and the text that it shall read as."""

    line: int
    old: str
    new: str


def rewritten(source: bytes, edits: Iterable[Edit]) -> tuple[bytes, dict[Edit, str]]:
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

    utf8 = text.encode()  # what the columns of a syntax tree count
    starts = [0, *(found.end() for found in _LINE_END.finditer(utf8))]
    line_end = _LINE_END.search(utf8)
    replacements = []
    for literal, edit in literals.items():
        start = starts[literal.lineno - 1] + literal.col_offset
        end = starts[(literal.end_lineno or 0) - 1] + (literal.end_col_offset or 0)
        spelled = spell(_LINE_END.sub(b"\n", utf8[start:end]).decode(), edit.new)
        if spelled is None:
            refused[edit] = "the obtained text has characters that an inline expectation cannot hold"
        else:
            literal.value = edit.new
            replacements.append((start, end, spelled.encode().replace(b"\n", line_end[0] if line_end else b"\n")))
    for start, end, new in sorted(replacements, reverse=True):
        utf8 = utf8[:start] + new + utf8[end:]
    try:
        is_as_meant = _dumped(ast.parse(utf8.decode())) == _dumped(tree)
    except SyntaxError:
        is_as_meant = False
    if not is_as_meant:
        raise EditError("cannot be edited without changing more than its expectations")
    return utf8.decode().encode(encoding), refused


def _dumped(tree: ast.AST) -> str:
    """A tree as text, without the prefix of literals like u"…"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.kind = None
    return ast.dump(tree)


def find_literal(calls: Iterable[ast.Call], line: int, value: str) -> ast.Constant:
    """The last literal that reads as ``value`` among the arguments of the call at ``line``.

    The call is the outermost of those that begin last, on that line or before it, and have one;
    ``calls`` are in the order of ``ast.walk``, outer before inner.

    >>> call = ast.parse("same(f('a', 'b'), 'b')", mode="eval").body
    >>> find_literal([call, call.args[0]], 1, "b").col_offset
    18
    """
    found = []
    for call in calls:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        literals = [node for node in arguments if isinstance(node, ast.Constant)]
        # the type first: under -bb to compare bytes with a string is an error
        literals = [node for node in literals if isinstance(node.value, str) and node.value == value]
        if literals and call.lineno <= line <= (call.end_lineno or 0):
            found.append((call, max(literals, key=lambda node: (node.lineno, node.col_offset))))
    if not found:
        raise EditError("there is no string literal that reads as the old expectation in the call there")
    last = max(call.lineno for call, _ in found)
    (outermost, literal), *others = ((call, literal) for call, literal in found if call.lineno == last)
    inside = set(ast.walk(outermost))
    if any(call not in inside for call, _ in others):
        raise EditError("two calls there have the same expectation: put them on lines of their own")
    return literal


def spell(literal: str, text: str) -> str | None:
    r'''A literal that reads as ``text``, in the style of another; None if expecttest writes none.

    >>> print(spell('r"""one"""', "a'b"), spell("'one'", "a'b"), spell("'one'", chr(0)))
    r"""a'b""" """a'b""" None
    '''
    from expecttest import replace_string_literal

    for template in (literal, '""""""'):
        try:
            spelled, _ = replace_string_literal(template, 1, template.count("\n") + 1, text)
        except AssertionError:  # not printable ASCII
            return None
        if ast.literal_eval(f"({spelled})") == text:
            return str(spelled)
    return None
