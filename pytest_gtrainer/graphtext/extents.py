"""Types and arguments whose sizes name several symbols, spelled so that the symbols' numbers do not count.

The terms of ``u0 + u1`` are sorted by the symbols' names. Were another order of the schedule to swap
the two names, the same size would be spelled otherwise; so the terms are sorted again here, by what the
symbols stand for.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence

from pytest_gtrainer.graphtext.statements import HOLE, SYMBOL

_COMMUTATIVE = {"Max", "Min"}
_OTHER_SIGN = {"+": "-", "-": "+"}


def canonical(text: str, meanings: Sequence[str]) -> str:
    """``text`` with the meanings in place of its symbols, terms and factors sorted.

    >>> canonical("f32[\\1 + \\1, 2]", ["b", "a"]) == canonical("f32[\\1 + \\1, 2]", ["a", "b"])
    True
    >>> canonical("f32[-2*\\1 + \\1]", ["b", "a"]) == canonical("f32[\\1 - 2*\\1]", ["a", "b"])
    True
    >>> canonical("f32[\\1 - \\1]", ["b", "a"]) == canonical("f32[\\1 - \\1]", ["a", "b"])
    False
    """
    tree = _parsed(text)
    if tree is None:
        return "\n".join([text, *meanings])
    return _spell(tree, meanings)


@functools.lru_cache(maxsize=1 << 12)
def _parsed(text: str) -> ast.expr | None:
    """The syntax tree, symbols numbered in the order in which they stand."""
    pieces = text.replace(HOLE, "_hole").split(SYMBOL)
    numbered = "".join(f"{piece}_symbol{place}" for place, piece in enumerate(pieces[:-1])) + pieces[-1]
    try:
        return ast.parse(f"_({numbered})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _spell(node: ast.AST, meanings: Sequence[str]) -> str:
    if isinstance(node, ast.Name) and node.id.startswith("_symbol"):
        return meanings[int(node.id.removeprefix("_symbol"))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return f"sum({', '.join(sorted(_terms(node, '+', meanings)))})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(_factors(node), meanings)
    inner = [_spell(child, meanings) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _COMMUTATIVE:
        inner[1:] = sorted(inner[1:])
    return f"{type(node).__name__}{_plain(node)}({', '.join(inner)})"


def _plain(node: ast.AST) -> str:
    """What a node says beside its children."""
    told = [value for _, value in ast.iter_fields(node) if not isinstance(value, ast.AST | list)]
    return repr(told) if told else ""


def _terms(node: ast.expr, sign: str, meanings: Sequence[str]) -> list[str]:
    """Signed terms; ``-2*u0 + u1`` has those of ``u1 - 2*u0``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        right = sign if isinstance(node.op, ast.Add) else _OTHER_SIGN[sign]
        return [*_terms(node.left, sign, meanings), *_terms(node.right, right, meanings)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _terms(node.operand, _OTHER_SIGN[sign], meanings)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        first, *rest = _factors(node)
        if isinstance(first, ast.UnaryOp) and isinstance(first.op, ast.USub):
            sign, first = _OTHER_SIGN[sign], first.operand
        return [sign + _product([first, *rest], meanings)]
    return [sign + _spell(node, meanings)]


def _factors(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return [node]
    return [*_factors(node.left), *_factors(node.right)]


def _product(factors: Sequence[ast.expr], meanings: Sequence[str]) -> str:
    return f"product({', '.join(sorted(_spell(factor, meanings) for factor in factors))})"
