"""The examples of docs/graph-text.md are graph text."""

import re
from pathlib import Path

import pytest

from pytest_gtrainer.graphtext import TextError, header, parse, render

PAGE = Path(__file__).parents[2] / "docs" / "graph-text.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_example_is_canonical():
    (example,) = [block for block in BLOCKS if block.startswith("# gtrainer graph")]
    assert render(parse(example), header=header.read(example)) == example


def test_the_error_is_the_one_shown():
    text = """\
if A:
  A[0]: f32[2]
if fwd:
  with _:
    neg: f32[2] = aten.neg(A[0])
    relu: f32[2]    = aten.rellu(neg)
"""
    with pytest.raises(TextError) as error:
        parse(text)
    assert str(error.value) in PAGE.read_text()
