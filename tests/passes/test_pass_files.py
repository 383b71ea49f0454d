"""Every pass file in fixtures/graphs: an input graph, the passes to run, and what they must give."""

from pathlib import Path

import pytest

from pytest_gtrainer.testing import pass_files, run_pass_file

GRAPHS = Path(__file__).parents[2] / "fixtures" / "graphs"


@pytest.mark.parametrize("path", pass_files(GRAPHS))
def test_pass_file(path, gt_golden):
    run_pass_file(path, golden=gt_golden)
