"""The examples of docs/proofs.md run, and say what the page says."""

import importlib.util
import re
from pathlib import Path

import pytest

from fixtures.pages import section_of
from pytest_gtrainer.testing import run_project

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "proofs.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_of_operators_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    table = generated.operators_table()
    assert table in PAGE, f"put this into docs/proofs.md:\n{table}"


def test_the_how_tos_begin_with_the_question():
    """Parity, torch.compile and "loss differs" link the page before anything else."""
    for name, title in (
        ("compile.md", "torch.compile"),
        ("worlds.md", "The simulated world"),
        ("parallelism.md", "Which parallelism"),
        ("parallelism.md", "My loss differs from eager"),
    ):
        first = section_of((DOCS / name).read_text(), title).split("\n\n")[0]
        assert re.search(r"\[[Ww]hich kind of equal\?\]\((\.\./)?proofs\.md\)", first), name


def test_the_examples_run():
    blocks = [block for block in BLOCKS if "def test_" not in block]
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "proofs.md", "exec"), {"__name__": "proofs.md"})


def check_example(block, right, wrong, name, folder):
    """Check that the test of an example passes, and that it fails with ``wrong`` for ``right``."""
    assert right in block
    files = {"test_page.py": block, "test_wrong.py": block.replace(right, wrong)}
    run = run_project(folder, "--gt-gpus=2", files=files)
    assert run[f"test_page::{name}"].outcome == "passed", run.output
    assert run[f"test_wrong::{name}"].outcome == "failed", run.output


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_the_example_of_a_parallel_model_holds(tmp_path):
    (block,) = [block for block in BLOCKS if "def test_parallel_is_unsharded" in block]
    right = 'ColwiseParallel(), "2": RowwiseParallel()'
    check_example(block, right, "ColwiseParallel()", "test_parallel_is_unsharded", tmp_path)


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_the_example_of_a_pipeline_holds(tmp_path):
    (block,) = [block for block in BLOCKS if "def test_pipeline_is_unsharded" in block]
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": block})
    assert run["test_pipeline_is_unsharded"].outcome == "passed", run.output
    wrong = block.replace("loss_fn=mean_square", "loss_fn=mean_square, scale_grads=False")
    assert wrong != block
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": wrong})
    assert run["test_pipeline_is_unsharded"].outcome == "failed", run.output
    assert "2 times what is expected" in run.output


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_the_example_of_a_loss_weighted_by_tokens_holds(tmp_path):
    """Each rank divides by its own count: the page shows what the message is."""
    (block,) = [block for block in BLOCKS if "def test_tokens_count_alike" in block]
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": block})
    assert run["test_tokens_count_alike"].outcome == "passed", run.output
    wrong = block.replace('(tokens_of_all / mesh["dp"].size())', "count(labels)")
    assert wrong != block
    run = run_project(tmp_path, "--gt-gpus=2", files={"test_page.py": wrong})
    assert run["test_tokens_count_alike"].outcome == "failed", run.output
    shown = PAGE.partition("If each rank divides by its own count")[2].split("```")[1]
    for line in shown.strip().splitlines():
        assert line.strip() in run.output, run.output


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_the_example_on_ranks_holds(tmp_path):
    (block,) = [block for block in BLOCKS if "def loss_in_field" in block]
    right = "parallelize_module(model, gt_mesh, plan)"
    wrong = f"nn.Sequential({right}, nn.SiLU())"
    check_example(block, right, wrong, "test_tensor_parallel", tmp_path)
