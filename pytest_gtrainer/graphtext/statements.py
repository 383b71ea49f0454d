"""One record's text taken apart, without torch: operator, operands, type, tags.

What a text refers to is replaced by a *hole*, so that what remains, the *template*, holds literals
only and is the same wherever the statement stands. Canonical text is expected, as ``render`` writes
it; what has another form has no parts.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from pytest_gtrainer.graphtext.references import Reference, reference

HOLE, SYMBOL = "\0", "\1"
"""Stand in a template for a reference, and for the symbol of a size."""

_STRING = r'"(?:[^"\\]|\\.)*+"|\'(?:[^\'\\]|\\.)*+\''
_LINKS = rf"(?:\.\w++|\[(?:\d++|i[+-]\d++|{_STRING})\])*+"
# only where a string may hide what `partition` looks for, as it is slow
_COMPUTED = re.compile(
    rf"(?P<name>\w+): (?P<kind>(?:[^\"' ]++| (?!= )|{_STRING})*+) = "
    rf"(?P<operator>[^\s(\"]++(?:\"[^\"]*+\"[^\s(\"]*+)*+)\((?P<arguments>.*)\)"
)
_REFERENCES = re.compile(
    rf"(?P<string>{_STRING})|\bsym\((?P<size>[^()]*+(?:\([^()]*+\)[^()]*+)*+)\)"
    rf"|(?<![\w.])(?P<chain>(?:(?:(?:saved|fwd|bwd)\.)?bucket\([^()\"]*+(?:\"[^\"]*+\"[^()\"]*+)*+\)|[^\W\d]\w*+)"
    rf"{_LINKS})(?![\w(=])"
)
_NAMES = re.compile(rf"(?:{_STRING})|(?<![\w.])(?P<name>[^\W\d]\w*+{_LINKS})(?![\w\[(])")
_SYMBOL = re.compile(r"(?:.*\.)?[a-z]+\d+")
_LITERALS = frozenset({"None", "True", "False"})


class Statement(NamedTuple):
    """``mm: bf16[2, L.u0] | must_save = aten.mm(x, L.y[1], alpha=2)``, taken apart.

    Attributes:
        type: with a hole for each symbol; those are in ``symbols``.
        arguments: with a hole for each reference and symbol; those are in ``references`` and ``sizes``.
    """

    name: str
    type: str
    symbols: tuple[str, ...]
    tags: str
    operator: str
    arguments: str
    references: tuple[Reference, ...]
    sizes: tuple[str, ...]


@functools.lru_cache(maxsize=1 << 17)
def statement(text: str) -> Statement | None:
    """A computed value's line; None if it is none.

    >>> statement("mm: bf16[2] | must_save = aten.mm(x, L.y[1], 1e-05, dtype=f32)")[3:6]
    ('must_save', 'aten.mm', '\\x00, \\x00[1], 1e-05, dtype=\\x00')
    """
    name, _, rest = text.partition(": ")
    kind, _, call = rest.partition(" = ")
    operator, parenthesis, arguments = call.partition("(")
    if "'" in kind or '"' in kind or '"' in operator:
        if (found := _COMPUTED.fullmatch(text)) is None:
            return None
        name, kind, operator, arguments = found.groups()
    elif parenthesis and call.endswith(")") and name.isidentifier() and operator and " " not in operator:
        arguments = arguments[:-1]
    else:
        return None
    typed, _, tags = kind.partition(" | ")
    kind, symbols = type_parts(typed)
    arguments, references, sizes = argument_parts(arguments)
    return Statement(name, kind, symbols, tags, operator, arguments, references, sizes)


@functools.lru_cache(maxsize=1 << 16)
def type_parts(text: str) -> tuple[str, tuple[str, ...]]:
    """A type with holes for its symbols, and the symbols.

    >>> type_parts("bf16[L.u0 + L.u1, 64]")
    ('bf16[\\x01 + \\x01, 64]', ('L.u0', 'L.u1'))
    >>> type_parts("float8_e4m3fn[4, 4][1, 4] @ cuda")
    ('float8_e4m3fn[4, 4][1, 4] @ cuda', ())
    """
    symbols: list[str] = []

    def cut(found: re.Match[str]) -> str:
        if found["name"] is None or not _SYMBOL.fullmatch(found["name"]):
            return found[0]
        symbols.append(found["name"])
        return SYMBOL

    return _NAMES.sub(cut, text), tuple(symbols)


Arguments = tuple[str, tuple[Reference, ...], tuple[str, ...]]


@functools.lru_cache(maxsize=1 << 17)
def argument_parts(text: str) -> Arguments:
    """Arguments with holes; the references and the symbols of sizes that stood there. Items stay.

    >>> arguments, references, sizes = argument_parts("[bucket(L).view[0], x], sym(L.u0 + 1), 'a.b', dtype=bf16")
    >>> arguments, [each.name for each in references], sizes
    ("[\\x00[0], \\x00], sym(\\x01 + 1), 'a.b', dtype=\\x00", ['view', 'x', 'bf16'], ('L.u0',))
    """
    if "'" in text or '"' in text:
        return _all_arguments(text)
    templates: list[str] = []
    references: list[Reference] = []
    sizes: tuple[str, ...] = ()
    for piece in text.split(", "):
        if piece.isidentifier() and piece not in _LITERALS:  # most are: an operand of the same module
            templates.append(HOLE)
            references.append(Reference(None, "", piece, ""))
            continue
        known = _one_argument(piece)
        if known is None:
            return _all_arguments(text)
        templates.append(known[0])
        references += known[1]
        sizes += known[2]
    return ", ".join(templates), tuple(references), sizes


@functools.lru_cache(maxsize=1 << 16)
def _one_argument(text: str) -> Arguments | None:
    """What stands between two commas: a reference and a literal come again and again. None in parentheses."""
    return _all_arguments(text) if text.count("(") == text.count(")") else None


def _all_arguments(text: str) -> Arguments:
    references: list[Reference] = []
    sizes: list[str] = []
    pieces = _REFERENCES.split(text)  # what is between, a string, a size, a chain; and so on
    template = pieces[::4]
    for place in range(len(pieces) // 4):
        _, string, size, chain = pieces[4 * place : 4 * place + 4]
        if size is not None:
            spelled, symbols = type_parts(size)
            sizes.extend(symbols)
            template[place] += f"sym({spelled})"
        elif string is not None or chain in _LITERALS:
            template[place] += chain if string is None else string
        else:
            known = reference(chain)
            references.append(known)
            template[place] += HOLE + known.items
    return "".join(template), tuple(references), tuple(sizes)
