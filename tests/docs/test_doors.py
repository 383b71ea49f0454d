"""The README's example, and the doors: pages of one screen that end in a green test in the reader's
own repository.
"""

import re
import sys
from pathlib import Path

import pytest

import pytest_gtrainer
from fixtures.pages import follow

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
DOORS = {"i-have-a-pass": 4, "i-have-a-parallel-model": 4, "i-have-a-compiled-model": 3}
"""Pages, and how many commands each has."""
COMMANDS = Path(sys.executable).parent


@pytest.mark.second_tier
@pytest.mark.parametrize("page", DOORS)
def test_a_door_is_followed(tmp_path, page):
    """The last command is the green test; that of a loss that moved is followed with its page."""
    assert follow(HOW_TO / f"{page}.md", tmp_path, COMMANDS) == DOORS[page]


@pytest.mark.second_tier
def test_the_readme_is_followed(tmp_path):
    assert follow(ROOT / "README.md", tmp_path, COMMANDS) == 2


def test_the_readme_and_the_first_page_have_all_doors():
    for page, folder in (("README.md", "docs/how-to"), ("docs/index.md", "how-to")):
        text = (ROOT / page).read_text()
        for door in (*DOORS, "i-have-a-loss-that-moved"):
            assert f"]({folder}/{door}.md)" in text, page


def test_the_readme_has_few_names_and_each_exists():
    """Everything else is on pages."""
    text = (ROOT / "README.md").read_text()
    table = text.partition("## Which question")[2].partition("\n## ")[0]
    answers = re.findall(r"^\|[^|]+\| (.+) \|$", table, re.MULTILINE)[1:]
    named = set(re.findall(r"[A-Za-z_]\w+", " ".join(answers)))
    public = named & set(pytest_gtrainer.__all__)
    assert 12 <= len(public) <= 15, sorted(public)
    assert len(text.splitlines()) < 140
