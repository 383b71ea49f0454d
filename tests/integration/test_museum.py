"""``examples/museum``: a sample of its exhibits is found, and its table has all of them."""

import re
import shutil
from pathlib import Path

import pytest

from fixtures.pages import section_of
from pytest_gtrainer.testing import run_project

ROOT = Path(__file__).parents[2]
MUSEUM = ROOT / "examples" / "museum"
TOTALS = re.compile(r"\d+ of \d+ found")

# One of each means, with and without ranks.
SAMPLE = (
    "test_torchtitan_4054",
    "test_torchtitan_2972",
    "test_nemo_rl_3788",
    "test_flashoptim_3",
    "test_torchtitan_4730",
    "test_xformers_173",
    "test_mlx_lm_1413",
    "test_torchtitan_1974",
)

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("warm_python")]


def test_a_sample_is_found_and_the_fixed_versions_are_quiet(tmp_path):
    copy = shutil.copytree(MUSEUM, tmp_path / "museum")
    run = run_project(
        copy, "-p", "no:randomly", *(f"exhibits/{name}.py" for name in SAMPLE), "--gt-gpus=2"
    )
    assert run.status == 0, run.output
    outcomes = {name.rpartition("::")[2]: test.outcome for name, test in run.tests.items()}
    assert len(run.tests) == 2 * len(SAMPLE), outcomes
    assert "7 xfailed" in run.output, "torchtitan#1974 is the one that is not found"


def test_the_table_has_every_exhibit():
    page = (MUSEUM / "README.md").read_text()
    files = {path.name for path in (MUSEUM / "exhibits").glob("test_*.py")}
    listed = set(re.findall(r"\(exhibits/(test_\w+\.py)\)", page))
    assert page.startswith("# A museum"), "the table has replaced the page"
    assert listed == files, "run: pytest exhibits tests --museum-table README.md"


def test_the_page_names_exhibits_that_exist():
    page = (ROOT / "docs" / "which-test.md").read_text()
    page = section_of(page, "Which check for which bug")
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) > 10
    assert [name for name in named if not (MUSEUM / "exhibits" / f"{name}.py").exists()] == []


def test_the_pages_have_the_totals_of_the_table():
    totals = TOTALS.findall((MUSEUM / "README.md").read_text())
    for page in ("README.md", "docs/which-test.md"):
        assert TOTALS.findall((ROOT / page).read_text()) == totals, page
