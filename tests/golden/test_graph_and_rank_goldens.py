"""Graphs as goldens, and goldens of tests that run on ranks."""

from __future__ import annotations

import pytest

GRAPH = """
import os, torch
from torch.fx.experimental.proxy_tensor import make_fx

class Step:
    def __init__(self, function):
        self.gm = make_fx(function)(torch.zeros(2))

def test_graph(gt_golden):
    gt_golden.check(Step(torch.cos if os.environ.get("CHANGED") else torch.sin))
"""


def test_a_graph_has_a_header_and_a_difference_in_words(run, goldens, monkeypatch):
    run(GRAPH, "--gt-update-goldens").assert_outcomes(passed=1)
    (text,) = goldens().values()
    assert list(goldens()) == ["test_it/test_graph.fxgraph"]
    assert text.splitlines()[:2] == ["# gtrainer graph v1", "# test: test_it.py::test_graph"]
    assert "# remake: pytest test_it.py::test_graph --gt-update-goldens\n" in text
    monkeypatch.setenv("CHANGED", "1")
    run(None).stdout.fnmatch_lines(["*test_graph.fxgraph differs", "*fwd _: lost aten.sin, gained aten.cos"])


RANKS = """
import os, pytest
on_ranks = pytest.mark.gt_world("ranks", size=2)

@on_ranks
def test_agree(gt_golden, gt_world):
    gt_golden.check("the same" + os.environ.get("CHANGED", ""), "a")
    gt_golden.check("also", "b")

@on_ranks
def test_disagree(gt_golden, gt_world):
    gt_golden.check(f"rank {gt_world.rank}")

@on_ranks
def test_fails_on_one(gt_golden, gt_world):
    gt_golden.check("never written")
    assert gt_world.rank == 0
"""


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "under xdist"])
def test_ranks_claim_and_the_parent_judges_and_writes(run, goldens, monkeypatch, workers):
    result = run(RANKS, *workers, "--gt-update-goldens")
    result.assert_outcomes(passed=1, failed=2)
    problem = "the golden differs between ranks, first on rank 1 at line 1:"
    result.stdout.fnmatch_lines([problem, "  rank 0: rank 0", "  rank 1: rank 1"])
    result.stdout.fnmatch_lines(["goldens   2 created, 1 different"])
    assert goldens() == {"test_it/test_agree@a.txt": "the same\n", "test_it/test_agree@b.txt": "also\n"}
    if workers:
        return
    monkeypatch.setenv("CHANGED", "!")
    result = run(None, "-k", "test_agree")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_agree@a.txt differs", "-the same", "+the same!"])
    result.stdout.fnmatch_lines(["goldens   1 different, 1 equal"])
    assert goldens()["test_it/test_agree@a.txt"] == "the same\n"
