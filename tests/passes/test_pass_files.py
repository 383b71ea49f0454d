"""Every pass file in fixtures/graphs: an input graph, the passes to run, and what they must
give.
"""

import re
from pathlib import Path

import pytest

import pytest_gtrainer
from pytest_gtrainer import graphtext
from pytest_gtrainer.passes.graph_pass import REWRITE
from pytest_gtrainer.testing import pass_files, run_pass_file

OURS = {name for name in pytest_gtrainer.__all__ if name.endswith("_pass")}
GRAPHS = Path(__file__).parents[2] / "fixtures" / "graphs"
WITHOUT_A_FILE = {
    "transformer_block_bucketing_reordering_pass": "it takes two graphs: "
    "tests/passes/test_separate_graphs.py",
    "chunk_pass": "it takes a twin: tests/passes/chunking",
    "concretize_chunk_symbolic_shapes_pass": "it takes a symbolic trace: "
    "tests/passes/chunking/test_symbolic.py",
}


@pytest.mark.parametrize("path", pass_files(GRAPHS))
def test_pass_file(path, gt_golden):
    """The file holds, and each pass says rightly whether it has changed its graph."""
    passes = {name: truthful(getattr(pytest_gtrainer, name)) for name in OURS - set(WITHOUT_A_FILE)}
    run_pass_file(path, golden=gt_golden, passes=passes)


def truthful(a_pass):
    """Wrap the pass; one that changes a graph and does not say so would leave the code of the graph
    before.
    """
    rewrite = getattr(a_pass, REWRITE, None)

    def run(gm, *args, **options):
        before, code = graphtext.render(gm), gm.code
        says_changed = rewrite(gm, *args, **options)
        gm.recompile()
        assert says_changed or gm.code == code, (
            f"{a_pass.__name__} changed the graph and did not say so"
        )
        assert not says_changed or graphtext.render(gm) != before, (
            f"{a_pass.__name__} reported a change and made none"
        )
        return gm

    return run


def test_every_pass_has_a_pass_file():
    named = {
        name
        for path in GRAPHS.rglob("*.fxgraph")
        for name in re.findall(r"\w+_pass\b", path.read_text())
    }
    assert len(OURS) > len(WITHOUT_A_FILE)
    assert OURS - named == set(WITHOUT_A_FILE)
