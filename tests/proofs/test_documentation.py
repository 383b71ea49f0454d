"""The examples of docs/proofs.md run, and say what the page says."""

import re
from pathlib import Path

import pytest

from pytest_gtrainer.testing import run_project

PAGE = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_examples_run():
    blocks = [block for block in BLOCKS if "def test_" not in block]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "proofs.md", "exec"), {"__name__": "proofs.md"})


def test_the_example_of_a_parallel_model_holds(tmp_path):
    (block,) = [block for block in BLOCKS if "assert_same_model(" in block]
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": block})
    assert run["test_parallel_is_unsharded"].outcome == "passed", run.output
    wrong = block.replace('ColwiseParallel(), "2": RowwiseParallel()', "ColwiseParallel()")
    assert wrong != block
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": wrong})
    assert run["test_parallel_is_unsharded"].outcome == "failed", run.output


@pytest.mark.second_tier
def test_the_example_on_ranks_holds(tmp_path):
    (block,) = [block for block in BLOCKS if "def loss_in_field" in block]
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": block})
    assert run["test_tensor_parallel"].outcome == "passed", run.output
    right = "parallelize_module(model, gt_mesh, plan)"
    wrong = block.replace(right, f"nn.Sequential({right}, nn.SiLU())")
    assert wrong != block
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": wrong})
    assert run["test_tensor_parallel"].outcome == "failed", run.output
