"""Reading a text runs nothing of it: hostile texts are refused, and damaged ones never do worse."""

import contextlib
import random
import sys
import traceback
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gtrainer.graphtext import TextError, parse, render
from pytest_gtrainer.graphtext.parsing import parser_of
from tests.graphtext.toy import toy_graph

OPERAND = (
    "s0 = size(1000000000)\nif A:\n  A[0]: f32[2]\nif fwd:\n  with _:\n"
    "    a: _ = aten.add.Tensor(A[0], {})\n"
)
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
    if (event, *arguments[:1]) != (
        "open",
        "<unknown>",
    ):  # Python itself looks for the line of a SyntaxError
        _seen.append(event)


sys.addaudithook(_watch)


@contextlib.contextmanager
def nothing_happens() -> Iterator[None]:
    """No file, no import, no process: no event that Python's auditing reports."""
    _seen.clear()
    _watching[0] = True
    try:
        yield
    finally:
        _watching[0] = False
    assert _seen == []


def read(text: str) -> None:
    """Read a text: a graph or a TextError, and nothing happens on the way."""
    # a fake mode of torch notes who made it, and opens the sources of callers that nobody has
    # looked at yet
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
    "(",
    ")",
    "[",
    "]",
    ":",
    ",",
    "=",
    ".",
    "\n",
    "  ",
    "if ",
    "for i in ",
    "with ",
    "L",
    "_",
    "P",
    "[i-1]",
    "-1",
    "'x'",
    "aten.add.Tensor",
    "group(",
    "const(",
    "sym(",
    "u0",
    "f32",
    "like(",
    "after(",
    "|",
    "@",
    "yield ",
    "None",
    "1e400",
    "9999999999999999999",
]


def damaged(seed: int, damages: int) -> str:
    """The text with random pieces cut, doubled, moved and put in."""
    chance = random.Random(seed)
    text = TEXT
    for _ in range(damages):
        at, length = chance.randrange(len(text) + 1), chance.choice([1, 1, 3, 10, 40])
        piece = chance.choice(
            ["", chance.choice(WORDS), text[at : at + length] * 2, chr(chance.randrange(1, 256))]
        )
        text = text[:at] + piece + text[at + chance.choice([0, length]) :]
    return text


@pytest.mark.second_tier
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


INPUT = "for i in P.layers[0:{}]:\n  P.L.w: f32[2]\n"
BODY = (
    "def cond_graph_{}():\n  for i in P.layers[0:9000]:\n    P.L.w: f32[2]\n  if out:\n"
    "    yield P.layers[0].w\n"
)
LARGE = {
    "layers of a heading": (
        INPUT.format(99999),
        "expected 1 to 10000 layers in a heading, found 99999",
    ),
    "layers of several headings": (
        "".join(INPUT.format(10000).replace("layers", f"a{n}") for n in range(7)),
        r"expected at most 655\d\d lines, layers counted out, found 70000",
    ),
    "many lines of a few layers": (
        INPUT.format(9000) + "".join(f"  P.L.w{n}: f32[2]\n" for n in range(9)),
        "lines, layers counted out, found 90000",
    ),
    "layers that refer to a large one": (
        "for i in fwd.layers[0]:\n"
        + "".join(f"  x{n}: _ = aten.rand([])\n" for n in range(99))
        + "for i in fwd.layers[1:9999]:\n  like(fwd.layers[0])\n",
        "lines, layers counted out, found",
    ),
    "graphs inside the graph": (
        "".join(map(BODY.format, range(9))),
        "lines, layers counted out, found",
    ),
    "a graph in a graph in a graph": (
        "def a_graph_0():\n  "
        + BODY.format(0).replace("\n", "\n  ").rstrip()
        + "\n  "
        + BODY.format(1).replace("9000", "9999").replace("\n", "\n  ").rstrip()
        + "\n"
        + "".join(map(BODY.format, range(2, 8))),
        "lines, layers counted out, found",
    ),
    "one group": ("g = group(range(0, 99999999))\n", "at most 1048576 ranks together"),
    "a group beyond any length": (
        f"g = group(range(0, {10**30}))\n",
        "at most 1048576 ranks together",
    ),
    "groups together": (
        "".join(f"g{n} = group(range(0, 300000))\n" for n in range(9)),
        r"line 4, column 12: the groups of a text have at most 1048576 ranks together, and "
        r"with `range.0, 300000.`",
    ),
    "groups of graphs inside the graph": (
        "".join(
            f"def c_graph_{n}():\n  g = group(range(0, 300000))\n  if out:\n    yield 1\n"
            for n in range(9)
        ),
        "at most 1048576 ranks together",
    ),
    "a list that is repeated": ("if out:\n  yield [0] * 999999999\n", "expected an operand"),
    "a text that is repeated": ("if out:\n  yield 'a' * 999999999\n", "expected an operand"),
    "a power": ("if out:\n  yield 9 ** 9 ** 9\n", "expected an operand"),
}


@pytest.mark.second_tier("layers of several", "many lines", "a graph in a graph")
@pytest.mark.parametrize("name", LARGE)
def test_a_small_text_that_means_much_is_refused_before_it_is_read(name: str, monkeypatch):
    """No node is made of it, and no list of numbers."""
    text, message = LARGE[name]
    monkeypatch.setattr("pytest_gtrainer.graphtext.parsing._Parser._input", None)
    monkeypatch.setattr("pytest_gtrainer.graphtext.parsing._Parser._computed", None)
    with pytest.raises(TextError, match=message):
        parse(text)


def test_rows_without_elements_are_not_counted_out():
    """A constant of that type took 35 seconds, and its text was as long as it has rows."""
    gm = parse("if out:\n  yield const(f32[1000000000, 0], [])\n")
    assert "const(f32[1000000000, 0], [])" in render(gm)
    assert "const(f32[3, 0], [[], [], []])" in render(
        parse("if out:\n  yield const(f32[3, 0], [])\n")
    )


def test_a_long_text_may_have_as_many_lines_as_it_has():
    lines = "".join(f"  P.w{n}: f32[2]\n" for n in range(20))
    assert (
        len(parse(f"if P:\n{lines}if out:\n  yield P.w0\n").graph.find_nodes(op="placeholder"))
        == 20
    )
