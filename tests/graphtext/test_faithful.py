"""A text that does not say everything is found before it becomes a golden."""

import itertools

import pytest
import torch
from torch import fx

from pytest_gtrainer.graphtext import parse, render
from pytest_gtrainer.graphtext.parsing import unfaithful

aten = torch.ops.aten
TEXT = """# gtrainer graph v2
# torch: 2.13.0
if A:
  A[0]: f32[2]
if fwd:
  with _:
    sin: f32[2] = aten.sin(A[0])
    cos: f32[2] = aten.cos(sin)
if out:
  yield fwd._.cos
"""


class Restless:
    """A constant that says something else of itself whenever it is asked."""

    asked = itertools.count()

    def __repr__(self) -> str:
        return f"Restless({next(self.asked)})"


def graph_of(function: object, *arguments: object) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(function, (x, *arguments))
    graph.output((y,))
    x.meta["val"] = y.meta["val"] = torch.zeros(2)
    return fx.GraphModule({}, graph)


def test_a_text_that_is_read_back_as_it_was_is_faithful():
    gm = parse(TEXT)
    assert unfaithful(gm, render(gm, header={"torch": "2.13.0"})) is None


@pytest.mark.parametrize(
    ("written", "spelled", "line"),
    [
        ("aten.cos(sin)", "aten.cos(_.sin)", 8),
        ("aten.cos(sin)", "aten.cos.default(sin)", 8),
        ("A[0]: f32[2]", "A[0]: f32[2][1]", 4),
    ],
)
def test_the_first_line_that_is_read_back_as_another_is_told(written, spelled, line):
    text = render(parse(TEXT), header={"torch": "2.13.0"}).replace(written, spelled)
    assert unfaithful(parse(TEXT), text).splitlines()[0].startswith(f"line {line}")


def test_a_line_that_cannot_be_read_is_told():
    gm = graph_of(aten.add.Tensor, Restless())
    found = unfaithful(gm, render(gm))
    assert "is given by its digest only" in found
    assert found.splitlines()[1].startswith(
        "  text:  add: f32[2] = aten.add.Tensor(A[0], const('Restless', "
    )


def test_a_graph_that_calls_python_is_only_compared():
    gm = graph_of(lambda x: x)
    assert unfaithful(gm, render(gm)) is None
