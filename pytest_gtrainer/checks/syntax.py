"""Reading a check's text: ``then aten.mm(g, _) -> bf16[64, _] in fwd layers.0 as m``.

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

from pytest_gtrainer.checks import predicates as must
from pytest_gtrainer.checks.arguments import (
    REST,
    Argument,
    CallPattern,
    List,
    Name,
    OperatorPattern,
)
from pytest_gtrainer.checks.predicates import KINDS, Check, Extent, Pattern
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
    """A word, a number, a string, or a mark of punctuation; "end" behind the last."""

    kind: str
    text: str


END = Token("end", "")


_SEPARATORS = {
    ";": "write one check a line",
    ",": "clauses have no comma between them",
    "/": "write dots in the path of a module, `layers.0.wq`",
    "[": "write dots in the path of a module, `layers.0.wq`",
    ".": "write dots in the path of a module, `layers.0.wq`",
    ":": "write dots in the path of an operator, `aten.mm.default`",
}
"""Advice for what people write where a check has something else, or nothing."""


def _advice(text: str) -> str:
    return f": {_SEPARATORS[text]}" if text in _SEPARATORS else ""


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text, ``END`` behind them; a CheckError at a character that no check has.

    >>> [token.text for token in tokens_of("aten.mm(g, ...) -> f32[2] in layers.*")]
    ['aten.mm', '(', 'g', ',', '...', ')', '->', 'f32', '[', '2', ']', 'in', 'layers.*', '']
    """
    found: list[Token] = []
    place, text = 0, text.rstrip()
    for match in _TOKEN.finditer(text):
        if match.start() != place:
            break
        kind, place = str(match.lastgroup), match.end()
        found.append(Token(kind, match[kind][1:-1] if kind == "string" else match[kind]))
    if place < len(text):
        mark = text[place:].lstrip()[:1]
        raise CheckError(f"{mark!r} at column {place + 1} is not part of a check{_advice(mark)}")
    return [*found, END]


CLAUSES = ("in", "->", "from", "used", "as")
_T = TypeVar("_T")


def parse_check(text: str, place: str) -> Check:
    """A check from its text; a ``CheckError`` says the place and what was expected."""
    try:
        reader = _Grammar(tokens_of(text))
        if (kind := reader.word("one of " + ", ".join(KINDS))) not in KINDS:
            raise CheckError(
                f"a check begins with {', '.join(KINDS)}, not {kind!r}{nearest(kind, KINDS)}"
            )
        number = reader.whole_number("how many") if kind == "count" else None
        return Check(kind, reader.pattern(), text.strip(), place, number)
    except CheckError as error:
        raise CheckError(f"{place}: {text.strip()}\n{error}") from None


class _Grammar:
    """Recursive descent over the tokens, one method a rule of the grammar."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        if (token := self._next) is not END:
            self._at += 1
        return token

    def _accept(self, text: str) -> bool:
        found = self._next.text == text and self._next.kind in ("mark", "word")
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise CheckError(f"expected {text!r}, found {self._shown()}")

    def _shown(self) -> str:
        return "the end" if self._next is END else repr(self._next.text)

    def word(self, what: str) -> str:
        if self._next.kind not in ("word", "string"):
            raise CheckError(f"expected {what}, found {self._shown()}")
        return self._take().text

    def whole_number(self, what: str) -> int:
        if self._next.kind != "number" or not self._next.text.isdecimal():
            raise CheckError(f"expected {what}, a whole number, found {self._shown()}")
        return int(self._take().text)

    def pattern(self) -> Pattern:
        predicates: list[Predicate] = []
        names: list[str] = []
        if self._next is not END and self._next.text not in CLAUSES:
            operator = OperatorPattern(self.word("an operator"))
            predicates.append(operator)
            if self._accept("("):
                predicates.append(self._call(operator))
        while self._next is not END:
            if self._accept("as"):
                names.append(self.word("a name"))
                if not names[-1].isidentifier() or names[-1] == "_":
                    raise CheckError(f"a node's name is a plain word, not {names[-1]!r}")
            else:
                predicates += self._clause()
        if len(names) > 1:
            raise CheckError(f"a node gets one name, not {' and '.join(names)}")
        return Pattern(tuple(predicates), names[0] if names else None)

    def _clause(self) -> list[Predicate]:
        if self._accept("in"):
            return self._place()
        if self._accept("->"):
            return [self._type()]
        if self._accept("from"):
            return [must.ComesFrom(self.word("a captured name or a graph input"))]
        if self._accept("used"):
            only = self._accept("only")
            self._expect("by")
            return [must.UsedBy(OperatorPattern(self.word("an operator or a captured name")), only)]
        hint = _advice(self._next.text) or nearest(self._next.text, CLAUSES)
        raise CheckError(f"expected {', '.join(CLAUSES)} or the end, found {self._shown()}{hint}")

    def _place(self) -> list[Predicate]:
        found: list[Predicate] = []
        if self._next.text in ("fwd", "bwd"):
            found.append(must.InDirection(self._take().text))
        if self._accept("bucket"):
            self._expect("(")
            found.append(must.InBucket(tuple(self._until(")", lambda: self.word("a module")))))
        elif self._next.kind in ("word", "string") and (
            not found or self._next.text not in CLAUSES
        ):
            found.append(must.InModule(self._take().text))
        if not found:
            raise CheckError(f"expected fwd, bwd, a module or bucket(...), found {self._shown()}")
        return found

    def _type(self) -> must.HasType:
        dtype: torch.dtype | None = None
        if self._next.kind == "word":
            if (name := self._take().text) not in DTYPE_OF:
                raise CheckError(f"there is no dtype {name!r}{nearest(name, DTYPE_OF)}")
            dtype = DTYPE_OF[name]
        shape = self._extents()
        if dtype is None and shape is None:
            raise CheckError(f"expected a dtype or a shape, found {self._shown()}")
        return must.HasType(dtype, shape, self._extents() if shape is not None else None)

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
        return ... if self._accept("...") else self.whole_number("an extent, `_` or `...`")

    def _until(self, closing: str, item: Callable[[], _T]) -> list[_T]:
        """Items with commas between them, up to a closing mark."""
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
            return repr(int(text) if text.removeprefix("-").isdecimal() else float(text))
        if self._accept("...") or self._accept("_"):
            return token.text
        if self._accept("[") or self._accept("("):
            return List(
                _with_one_rest(self._until("]" if token.text == "[" else ")", self._argument))
            )
        if (word := self.word("an argument")) in ("None", "True", "False"):
            return word
        if self._accept("["):
            item = self.whole_number("the number of an output")
            self._expect("]")
            return Name(word, item)
        if not self._accept("("):
            return Name(word)
        call = self._call(OperatorPattern(word))
        literals = [item for item in call.arguments if isinstance(item, str)]
        bounds = [int(text) for text in literals if text.removeprefix("-").isdecimal()]
        if word == "range" and 1 <= len(bounds) <= 3:
            return List(tuple(map(str, range(*bounds))))
        names = [text[1:-1] for text in literals if text[:1] in ("'", '"')]
        return f'device("{names[0]}")' if word == "device" and names else call


def _with_one_rest(items: Sequence[Argument]) -> tuple[Argument, ...]:
    if items.count(REST) > 1:
        raise CheckError("a list of arguments has one `...` at most")
    return tuple(items)
