"""Read the text of a check: ``then aten.mm(g, _) -> bf16[64, _] in fwd layers.0 as m``.

::

    check   = "then" node | "next" node | "same" node | "never" node | "count" NUMBER node | "start"
    node    = [operator ["(" arguments ")"]] {clause}
    clause  = "in" ["fwd" | "bwd"] [module | "bucket" "(" [module {"," module}] ")"]
            | "->" [dtype] ["[" extents "]" ["[" extents "]"]]
            | "from" name
            | "used" ["only"] "by" (operator | name)
            | "as" name
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from pytest_gtrainer.checks.arguments import (
    REST,
    Argument,
    CallPattern,
    List,
    Name,
    OperatorPattern,
)
from pytest_gtrainer.checks.predicates import (
    KINDS,
    Check,
    ComesFrom,
    Extent,
    HasType,
    InBucket,
    InDirection,
    InModule,
    Pattern,
    UsedBy,
)
from pytest_gtrainer.checks.subject import CheckError, Predicate
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import DTYPE_OF

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string> "[^"]*" | '[^']*')
    | (?P<number> -?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|inf\b|nan\b))
    | (?P<mark>   -> | \.\.\. | [()\[\],=])
    | (?P<word>   [A-Za-z_*](?:-(?!>)|[\w*])* (?:\.(?:-(?!>)|[\w*])+)*)
    )""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """A part of the text of a check.

    Attributes:
        kind: "word", "number", "string", "mark", or "end" after the last one.
        text: a string is without its quotes.
    """

    kind: str
    text: str


END = Token("end", "")


_SEPARATORS = {
    ";": "write one check a line",
    ",": "clauses have no comma between them",
    "/": "write dots in the path of a module, `layers.0.wq`",
    "[": "write dots, in the path of a module `layers.0.wq`, after `from` also `A.1`",
    ".": "write dots in the path of a module, `layers.0.wq`",
    ":": "write dots in the path of an operator, `aten.mm.default`",
}
"""Advice for what people write where a check has something else, or nothing."""


def _advice(text: str) -> str:
    return f": {_SEPARATORS[text]}" if text in _SEPARATORS else ""


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a text, with ``END`` after them.

    Raises:
        CheckError: a character that no check has.

    >>> [token.text for token in tokens_of("aten.mm(g, ...) -> f32[2] in layers.*")]
    ['aten.mm', '(', 'g', ',', '...', ')', '->', 'f32', '[', '2', ']', 'in', 'layers.*', '']
    """
    found: list[Token] = []
    text = text.rstrip()
    end = 0
    for match in _TOKEN.finditer(text):
        if match.start() != end:
            break
        kind, end = str(match.lastgroup), match.end()
        token = match[kind][1:-1] if kind == "string" else match[kind]
        found.append(Token(kind, token))
    if end < len(text):
        mark = text[end:].lstrip()[:1]
        raise CheckError(f"{mark!r} at column {end + 1} is not part of a check{_advice(mark)}")
    return [*found, END]


CLAUSES = ("in", "->", "from", "used", "as")
_T = TypeVar("_T")


def parse_check(text: str, place: str) -> Check:
    """Read a check from its text, which stands at ``place``, a file and a line.

    Raises:
        CheckError: says the place, and what was expected.
    """
    try:
        reader = _Grammar(tokens_of(text))
        kind = reader.word(f"one of {', '.join(KINDS)}")
        if kind not in KINDS:
            raise CheckError(
                f"a check begins with {', '.join(KINDS)}, not {kind!r}{nearest(kind, KINDS)}"
            )
        number = reader.whole_number("how many") if kind == "count" else None
        return Check(kind, reader.pattern(), text.strip(), place, number)
    except CheckError as error:
        raise CheckError(f"{place}: {text.strip()}\n{error}") from None


class _Grammar:
    """Read tokens by recursive descent, with one method for each rule of the grammar."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._next
        if token is not END:
            self._at += 1
        return token

    def _accept(self, text: str) -> bool:
        """Take the next token if it is this mark or word; return whether it is."""
        if self._next.text != text or self._next.kind not in ("mark", "word"):
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise CheckError(f"expected {text!r}, found {self._spell_next()}")

    def _spell_next(self) -> str:
        return "the end" if self._next is END else repr(self._next.text)

    def word(self, what: str) -> str:
        """Take a word or string; ``what`` says in an error what was expected."""
        if self._next.kind not in ("word", "string"):
            raise CheckError(f"expected {what}, found {self._spell_next()}")
        return self._take().text

    def whole_number(self, what: str) -> int:
        if self._next.kind != "number" or not self._next.text.isdecimal():
            raise CheckError(f"expected {what}, a whole number, found {self._spell_next()}")
        return int(self._take().text)

    def pattern(self) -> Pattern:
        predicates: list[Predicate] = []
        name: str | None = None
        if self._next is not END and self._next.text not in CLAUSES:
            operator = OperatorPattern(self.word("an operator"))
            predicates.append(operator)
            if self._accept("("):
                predicates.append(self._call(operator))
        while self._next is not END:
            if not self._accept("as"):
                predicates += self._clause()
                continue
            word = self.word("a name")
            if not word.isidentifier() or word == "_":
                raise CheckError(f"a node's name is a plain word, not {word!r}")
            if name is not None:
                raise CheckError(f"a node gets one name, not {name} and {word}")
            name = word
        return Pattern(tuple(predicates), name)

    def _clause(self) -> list[Predicate]:
        if self._accept("in"):
            return self._membership()
        if self._accept("->"):
            return [self._type()]
        if self._accept("from"):
            return [ComesFrom(self.word("a captured name or a graph input"))]
        if self._accept("used"):
            only = self._accept("only")
            self._expect("by")
            return [UsedBy(OperatorPattern(self.word("an operator or a captured name")), only)]
        hint = _advice(self._next.text) or nearest(self._next.text, CLAUSES)
        raise CheckError(
            f"expected {', '.join(CLAUSES)} or the end, found {self._spell_next()}{hint}"
        )

    def _membership(self) -> list[Predicate]:
        found: list[Predicate] = []
        if self._next.text in ("fwd", "bwd"):
            found.append(InDirection(self._take().text))
        # After a direction a word may begin the next clause; else it is a module, ``in used``.
        begins_clause = bool(found) and self._next.text in CLAUSES
        if self._accept("bucket"):
            self._expect("(")
            fqns = self._until(")", lambda: self.word("a module"))
            found.append(InBucket(tuple(fqns)))
        elif self._next.kind in ("word", "string") and not begins_clause:
            found.append(InModule(self._take().text))
        if not found:
            raise CheckError(
                f"expected fwd, bwd, a module or bucket(...), found {self._spell_next()}"
            )
        return found

    def _type(self) -> HasType:
        dtype: torch.dtype | None = None
        if self._next.kind == "word":
            name = self._take().text
            if name not in DTYPE_OF:
                raise CheckError(f"there is no dtype {name!r}{nearest(name, DTYPE_OF)}")
            dtype = DTYPE_OF[name]
        shape = self._extents()
        if dtype is None and shape is None:
            raise CheckError(f"expected a dtype or a shape, found {self._spell_next()}")
        strides = self._extents() if shape is not None else None
        return HasType(dtype, shape, strides)

    def _extents(self) -> tuple[Extent, ...] | None:
        if not self._accept("["):
            return None
        if self._accept("("):  # f32[()] has no dimensions
            self._expect(")")
            self._expect("]")
            return ()
        extents = tuple(self._until("]", self._extent))
        if not extents:
            raise CheckError("a shape without dimensions is written [()]")
        if extents.count(...) > 1:
            raise CheckError("a shape has one `...` at most")
        return extents

    def _extent(self) -> Extent:
        if self._accept("_"):
            return None
        if self._accept("..."):
            return ...
        return self.whole_number("an extent, `_` or `...`")

    def _until(self, closing: str, item: Callable[[], _T]) -> list[_T]:
        """Read items with commas between them, up to a closing mark."""
        found: list[_T] = []
        while not self._accept(closing):
            if found:
                self._expect(",")
                if self._accept(closing):
                    break
            found.append(item())
        return found

    def _call(self, operator: OperatorPattern) -> CallPattern:
        items = self._until(")", self._argument_or_keyword)
        values = [value for name, value in items if name is None]
        keywords = tuple((name, value) for name, value in items if name is not None)
        return CallPattern(operator, _with_one_rest(values), keywords)

    def _argument_or_keyword(self) -> tuple[str | None, Argument]:
        if self._next.kind != "word" or self._tokens[self._at + 1].text != "=":
            return None, self._argument()
        name = self._take().text
        self._expect("=")
        return name, self._argument()

    def _argument(self) -> Argument:
        token = self._next
        if token.kind == "string":
            return repr(self._take().text)
        if token.kind == "number":  # as graph text spells it: ``1e-5`` is ``1e-05``
            text = self._take().text
            if text.removeprefix("-").isdecimal():
                return repr(int(text))
            return repr(float(text))
        if self._accept("...") or self._accept("_"):
            return token.text
        if self._accept("[") or self._accept("("):
            closing = "]" if token.text == "[" else ")"
            return List(_with_one_rest(self._until(closing, self._argument)))
        word = self.word("an argument")
        if word in ("None", "True", "False"):
            return word
        if self._accept("["):
            item = self.whole_number("the number of an output")
            self._expect("]")
            return Name(word, item)
        if not self._accept("("):
            return Name(word)
        return _constant_of(self._call(OperatorPattern(word)))


def _constant_of(call: CallPattern) -> Argument:
    """Return what ``range(0, 8)`` and ``device("cuda")`` stand for; any other call as it is."""
    literals = [argument for argument in call.arguments if isinstance(argument, str)]
    if call.operator.text == "range":
        bounds = [int(text) for text in literals if text.removeprefix("-").isdecimal()]
        if 1 <= len(bounds) <= 3:
            return List(tuple(map(str, range(*bounds))))
    if call.operator.text == "device":
        for text in literals:
            if text[:1] in ("'", '"'):
                return f'device("{text[1:-1]}")'
    return call


def _with_one_rest(items: Sequence[Argument]) -> tuple[Argument, ...]:
    if items.count(REST) > 1:
        raise CheckError("a list of arguments has one `...` at most")
    return tuple(items)
