"""The pictures are those that ``docs/pictures.py`` draws now, and each is shown somewhere."""

import re
import runpy
from pathlib import Path

import pytest

from pytest_gtrainer.environment import installed_minor

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
DRAWINGS = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["DRAWINGS"]
FROM_RUNS = ("buckets", "terminal")


@pytest.mark.parametrize("name", [name for name in DRAWINGS if name not in FROM_RUNS])
def test_a_drawing_is_up_to_date(name):
    assert DRAWINGS[name]() == (PICTURES / f"{name}.svg").read_text(), (
        "python docs/pictures.py draws it again"
    )


@pytest.mark.second_tier
@pytest.mark.skipif(
    installed_minor() != (2, 13), reason="drawn under torch 2.13, the pin of this repository"
)
@pytest.mark.parametrize("name", FROM_RUNS)
def test_a_picture_of_a_run_is_what_the_run_says(name):
    sides = [DRAWINGS[name](), (PICTURES / f"{name}.svg").read_text()]
    if name == "terminal":  # shows the rank that failed first: its numbers are its own
        sides = [re.sub(r" *-?\b\d[\d.a-fx]*", " N", side) for side in sides]
    assert sides[0] == sides[1], "python docs/pictures.py draws it again"


def test_a_difference_would_be_seen(monkeypatch):
    """The twin: another order of a ring is another picture."""
    from pytest_gtrainer.worlds.simulated import rings

    monkeypatch.setattr(rings, "rail_rings", lambda *sizes: (tuple(range(8)), tuple(range(8))))
    assert DRAWINGS["ring"]() != (PICTURES / "ring.svg").read_text()


def test_every_picture_is_shown_and_every_picture_that_is_shown_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        name
        for page in pages
        for name in re.findall(r"!\[[^\]]+\]\([./a-z]*pictures/([\w.]+)\)", page.read_text())
    }
    assert shown == {path.name for path in PICTURES.iterdir()}
