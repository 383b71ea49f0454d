"""Reading a text runs nothing of it: hostile texts are refused, and damaged ones never do worse."""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gtrainer.graphtext import TextError, render
from pytest_gtrainer.graphtext.parsing import parser_of
from tests.graphtext.toy import toy_graph

OPERAND = "s0 = size(1000000000)\nif A:\n  A[0]: f32[2]\nif fwd:\n  with _:\n    a: _ = aten.add.Tensor(A[0], {})\n"
HOSTILE = [
    "__import__('os').system('true')",
    "os.system",
    "().__class__.__bases__[0]",
    "lambda: 1",
    "[x for x in (1, 2)]",
    "(y := 2)",
    "f'{1}'",
    "*A",
    "A[0].__class__",
    "builtins.eval",
    "sym(9**9**9)",
    "sym(LShift(2, 10**9))",
    "sym(PowByNatural(2, s0))",
    "sym(PowByNatural(PowByNatural(PowByNatural(s0, 64), 64), 64))",
    "sym(__import__('os'))",
    "const(f32[2], __import__('os'))",
    "const('Popen', 'x')",
    "device('/etc/passwd')",
    "range(10**12)[0]",
    "{**A}",
    "await A",
    "1 if A else 2",
    "A[0] and A[0]",
    "9" * 5000,
    "(" * 250 + ")" * 250,
    "-" * 5000 + "1",
    "+".join(["1"] * 20000),
    ".".join(["a"] * 20000),
]
STATEMENTS = [
    "import os",
    "def cond_graph_0(x=__import__('os')):\n  pass",
    "@print\ndef cond_graph_0():\n  if out:\n    yield None",
    "def forward():\n  if out:\n    yield None",
    "class A:\n  pass",
    "for i in fwd.layers[0:10**9]:\n  with L:\n    a: _ = aten.relu(A)",
    "for i in fwd.layers[0:999999999]:\n  with L:\n    a: _ = aten.relu(A)",
    "for i in fwd.layers[0:9999]:\n  with L:\n" + "    a: _ = aten.relu(A)\n" * 110,
    "if fwd:\n  while True:\n    pass",
    "if fwd:\n  with open('x', 'w') as f:\n    a: _ = aten.relu(f)",
    "if fwd:\n  with _:\n    a: _ = os.system('true')",
    "if fwd:\n  with _:\n    a: _ = aten.from_file('/etc/passwd')",
    "if fwd:\n  with _:\n    a: _ = torch.load('x')",
    "if fwd:\n  with _:\n    a: _ = method.__reduce__(1)",
    "if fwd:\n  with _:\n    a: _ = hop.call_torchbind(1)",
    "x = __import__('os')",
    "s0 = size(__import__('os'))",
    "managed = [__import__('os')]",
    "x\0y",
]
_seen: list[str] = []
_watching = [False]


# what it reads is an argument: at the end of the process globals are gone
def _watch(event: str, arguments: tuple[object, ...], watching: list[bool] = _watching) -> None:
    if not watching[0] or event in (
        "compile",
        "builtins.id",
        "object.__getattr__",
        "sys._getframe",
        "object.__setattr__",
    ):
        return
    if (event, *arguments[:1]) != ("open", "<unknown>"):  # Python itself looks for the line of a SyntaxError
        _seen.append(event)


sys.addaudithook(_watch)


@contextlib.contextmanager
def nothing_happens() -> Iterator[None]:
    """No file, no import, no process: no event that Python's auditing tells."""
    _seen.clear()
    _watching[0] = True
    try:
        yield
    finally:
        _watching[0] = False
    assert _seen == []


def read(text: str) -> None:
    """Read a text: a graph or a TextError, and nothing happens on the way."""
    # a fake mode of torch notes who made it, and opens the sources of callers that nobody has looked at yet
    traceback.extract_stack()
    with nothing_happens():
        parser_of(text)


@pytest.fixture(scope="module", autouse=True)
def _everything_imported():
    parser_of("s0 = size(4)\nif A:\n  A[0]: f32[s0, u0*u1 - u2] @ cuda\n")
    for operand in ("1", "hop.none"):
        with contextlib.suppress(TextError):
            parser_of(OPERAND.format(operand))


@pytest.mark.parametrize("operand", HOSTILE, ids=lambda text: text[:30])
def test_a_hostile_operand_is_refused(operand):
    with pytest.raises(TextError):
        read(OPERAND.format(operand))


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda text: text[:40])
def test_a_hostile_statement_is_refused(statement):
    with pytest.raises(TextError):
        read(statement)


def test_the_watch_sees_what_happens():
    """The twin."""
    with pytest.raises(AssertionError, match="open"), nothing_happens():
        open(__file__).close()


TEXT = render(toy_graph(3))
WORDS = [
    "(", ")", "[", "]", ":", ",", "=", ".", "\n", "  ", "if ", "for i in ", "with ", "L", "_", "P", "[i-1]", "-1",
    "'x'", "aten.add.Tensor", "group(", "const(", "sym(", "u0", "f32", "like(", "after(", "|", "@", "yield ", "None",
    "1e400", "9999999999999999999",
]  # fmt: skip


def damaged(seed: int, damages: int) -> str:
    """The text with random pieces cut, doubled, moved and put in."""
    chance = random.Random(seed)
    text = TEXT
    for _ in range(damages):
        at, length = chance.randrange(len(text) + 1), chance.choice([1, 1, 3, 10, 40])
        piece = chance.choice(["", chance.choice(WORDS), text[at : at + length] * 2, chr(chance.randrange(1, 256))])
        text = text[:at] + piece + text[at + chance.choice([0, length]) :]
    return text


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_damaged_text_is_read_or_refused(seed, damages):
    with contextlib.suppress(TextError):
        read(damaged(seed, damages))


@pytest.mark.long
@settings(max_examples=10000)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_many_damaged_texts_are_read_or_refused(seed, damages):
    with contextlib.suppress(TextError):
        read(damaged(seed, damages))
