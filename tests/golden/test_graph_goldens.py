"""Graphs and layouts as goldens."""

import pytest
import torch
import torch._dynamo

# Once for all runs in this process: these register operators, which can be done only once.
import pytest_gtrainer.graphtext.rendering  # noqa: F401

GRAPH = """
import os, torch
from torch import fx

class Step:
    def __init__(self, function):
        graph = fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(function, (x,))
        graph.output((y,))
        x.meta["val"] = y.meta["val"] = torch.zeros(2)
        self.gm = fx.GraphModule({}, graph)
        self.gm.gm = torch.nn.Identity()  # a module of this name is no graph

def test_graph(gt_golden):
    aten = torch.ops.aten
    gt_golden.check(Step(aten.cos.default if os.environ.get("CHANGED") else aten.sin.default)VIEW)
"""
WHOLE, SCHEDULE = (GRAPH.replace("VIEW", view) for view in ("", ", view='schedule'"))
FILE = "test_it/test_graph.fxgraph"


def test_a_graph_has_a_header_and_a_difference_in_words(run_here, goldens, monkeypatch):
    run_here(WHOLE, "--gt-update-goldens").assert_outcomes(passed=1)
    assert list(goldens()) == [FILE]
    lines = goldens()[FILE].splitlines()
    assert lines[:2] == ["# gtrainer graph v2", "# test: test_it.py::test_graph"]
    remake = "# remake: pytest test_it.py::test_graph --gt-update-goldens"
    assert lines[2:4] == [f"# torch: {torch.__version__}", remake]
    monkeypatch.setenv("CHANGED", "1")
    result = run_here(None)
    result.stdout.fnmatch_lines(
        ["*test_graph.fxgraph differs", "*fwd _: lost aten.sin, gained aten.cos"]
    )
    result.stdout.no_fnmatch_line("*made with torch*")


def test_a_difference_says_which_torch_made_the_golden(run_here, goldens, pytester, monkeypatch):
    run_here(WHOLE, "--gt-update-goldens")
    file = pytester.path / "golden" / FILE
    file.write_text(file.read_text().replace(f"# torch: {torch.__version__}", "# torch: 2.12.0"))
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])
    monkeypatch.setenv("CHANGED", "1")
    run_here(None).stdout.fnmatch_lines([f"*made with torch 2.12.0, running {torch.__version__}"])


WORLD = """
import os, pytest, torch
from pytest_gtrainer import data_parallel, trace_step

@pytest.mark.gt_world("fake", size=int(os.environ.get("CHANGED", "2")))
def test_graph(gt_mesh, gt_golden):
    model = data_parallel(torch.nn.Linear(4, 4), gt_mesh)
    gt_golden.check(trace_step(model, lambda m, x: m(x).sum(), (torch.ones(2, 4),)))
"""


def test_a_difference_says_in_which_world_the_golden_was_made(run_here, monkeypatch):
    run_here(WORLD, "--gt-update-goldens").assert_outcomes(passed=1)
    monkeypatch.setenv("CHANGED", "3")
    run_here(None).stdout.fnmatch_lines(
        ["*made in fake, 2 ranks, rank 0; this is fake, 3 ranks, rank 0"]
    )


def test_of_a_partial_view_the_whole_graph_is_kept_too(run_here, pytester, monkeypatch):
    run_here(SCHEDULE, "--gt-update-goldens").assert_outcomes(passed=1)
    monkeypatch.setenv("CHANGED", "1")
    run_here(None, "--gt-artifacts=out").assert_outcomes(failed=1)
    folder = pytester.path / "out/test_it/test_graph"
    assert {file.name for file in folder.iterdir()} == {
        "obtained.fxgraph",
        "golden.fxgraph",
        "graph.fxgraph",
        "difference.diff",
    }
    assert "# view: schedule\n" in (folder / "obtained.fxgraph").read_text()
    whole = (folder / "graph.fxgraph").read_text()
    assert "# view:" not in whole
    assert "cos: f32[2] = aten.cos(" in whole


LAYOUT = """
import os, torch
from pytest_gtrainer.graph.layout import BucketLayout, Payload, Slot

def test_layout(gt_golden):
    slots = [Slot("layers.0.a", 0, 16), Slot("layers.0.b", 16, 32)]
    if os.environ.get("CHANGED"):
        slots = [Slot("layers.0.b", 0, 32), Slot("layers.0.a", 32, 16)]
    payload = Payload("reduce_scatter", torch.float32, (0, 1), "avg", tuple(slots))
    gt_golden.check(BucketLayout((payload,)))
"""


def test_a_layout_tells_who_sits_where(run_here, goldens, monkeypatch):
    run_here(LAYOUT, "--gt-create-goldens").assert_outcomes(passed=1)
    text = goldens()["test_it/test_layout.fxgraph"]
    assert "# view: layout\n" in text
    assert "  L.a: at(0, bytes=16)\n  L.b: at(16, bytes=32)\n" in text
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])
    monkeypatch.setenv("CHANGED", "1")
    result = run_here(None)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*differs", "*L.a: at(0, bytes=16)"])


def test_a_view_is_of_a_graph(run_here):
    result = run_here("def test_a(gt_golden): gt_golden.check('text', view='schedule')")
    result.stdout.fnmatch_lines(
        ["*TypeError: view='schedule' says how much of a graph to show, and this is of str"]
    )


UNFAITHFUL = """
import itertools, torch
from torch import fx
import pytest

class Restless:
    asked = itertools.count()
    def __repr__(self):
        return f"Restless({next(self.asked)})"

def graph_with(constant):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, constant))
    graph.output((y,))
    x.meta["val"] = y.meta["val"] = torch.zeros(2)
    return fx.GraphModule({}, graph)

@pytest.mark.parametrize("constant", [2, Restless()], ids=["plain", "restless"])
def test_graph(gt_golden, constant):
    gt_golden.check(graph_with(constant))

def test_caught(gt_golden):
    with pytest.raises(AssertionError):
        gt_golden.check(graph_with(Restless()))
"""


def test_a_text_that_would_not_be_read_back_is_not_written(run_here, goldens):
    """The graph's twin, with a constant that a text can hold, is written."""
    result = run_here(UNFAITHFUL, "--gt-update-goldens")
    result.assert_outcomes(passed=2, failed=1)
    assert list(goldens()) == ["test_it/test_graph-plain.fxgraph"]
    result.stdout.fnmatch_lines(
        ["*restless.fxgraph was not written: it would be read back as another graph: line *"]
    )


DYNAMIC = '''
import os

from pytest_gtrainer import graphtext

TEXT = """\\
s0 = size({batch})
if I:
  I.x: f32[s0, 8]
if fwd:
  with _:
    relu: f32[s0, 8] = aten.relu(I.x)
if out:
  yield fwd._.relu
"""

def test_it(gt_golden):
    gm = graphtext.parse(TEXT.format(batch=os.environ["BATCH"]))
    gt_golden.check(gm, sizes=os.environ["SIZES"])
'''


@pytest.mark.parametrize(
    ("sizes", "outcome"), [("symbols", "passed"), ("both", "failed"), ("examples", "failed")]
)
def test_one_golden_serves_two_batches_where_sizes_are_symbols(
    run_here, monkeypatch, sizes, outcome
):
    """The twin: with their examples it does not."""
    monkeypatch.setenv("SIZES", sizes)
    monkeypatch.setenv("BATCH", "16")
    run_here(DYNAMIC, "--gt-update-goldens").assert_outcomes(passed=1)
    monkeypatch.setenv("BATCH", "32")
    run_here(None).assert_outcomes(**{outcome: 1})
