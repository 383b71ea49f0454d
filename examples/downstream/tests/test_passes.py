"""Our pass on graphs written as text: each file in ``graphs/`` says what to run and what must come
out.
"""

from pathlib import Path

import pytest

from pytest_gtrainer.testing import pass_files, run_pass_file


@pytest.mark.parametrize("path", pass_files(Path(__file__).parent / "graphs"))
def test_pass_file(path, gt_golden):
    run_pass_file(path, golden=gt_golden)
