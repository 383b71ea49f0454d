"""Every pass file in fixtures/graphs: an input graph, the passes to run, and what they must give."""

import re
from pathlib import Path

import pytest

import pytest_gtrainer
from pytest_gtrainer.testing import pass_files, run_pass_file

GRAPHS = Path(__file__).parents[2] / "fixtures" / "graphs"
WITHOUT_A_FILE = {
    "transformer_block_bucketing_reordering_pass": "it takes two graphs: tests/passes/test_separate_graphs.py",
    "chunk_pass": "it takes a twin: tests/passes/chunking",
    "chunk_schedule_pass": "it takes a chunked graph: tests/passes/chunking/test_schedule.py",
    "concretize_chunk_symbolic_shapes_pass": "it takes a symbolic trace: tests/passes/chunking/test_symbolic.py",
}


@pytest.mark.parametrize("path", pass_files(GRAPHS))
def test_pass_file(path, gt_golden):
    run_pass_file(path, golden=gt_golden)


def test_every_pass_has_a_pass_file():
    named = {name for path in GRAPHS.rglob("*.fxgraph") for name in re.findall(r"\w+_pass\b", path.read_text())}
    public = {name for name in pytest_gtrainer.__all__ if name.endswith("_pass")}
    assert len(public) > len(WITHOUT_A_FILE)
    assert public - named == set(WITHOUT_A_FILE)
