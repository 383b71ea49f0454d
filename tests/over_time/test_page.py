"""The page "I have a loss that moved" is followed; the page of a comparison as a whole."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from fixtures.pages import follow
from pytest_gtrainer.over_time.comparing import Comparison, Difference
from pytest_gtrainer.over_time.files import RecordedRun
from pytest_gtrainer.over_time.page import page_of, write_page
from tests.over_time.trainers import SCRIPT

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "i-have-a-loss-that-moved.md"


@pytest.mark.second_tier
def test_the_page_is_followed(tmp_path):
    """Z1, Z2: by a stranger, with the trainer of the page."""
    shutil.copy(SCRIPT, tmp_path)
    assert follow(PAGE, tmp_path, Path(sys.executable).parent) == 6


def comparison(**fields):
    """The comparison of two records of one step each."""
    runs = (
        RecordedRun(Path("a<b"), {0: {}, 1: {}}, {0: {}}),
        RecordedRun(Path("b"), {0: {}}, {0: {}, 1: {}}),
    )
    return Comparison(runs, **{"compared": 3, "steps": [0], **fields})


def body(result):
    """Return the text of the page, a line for each element."""
    text = page_of(result)
    title = re.search("<title>(.*)</title>", text)[1]
    main = text.partition("<header>")[2].partition("</main>")[0]
    assert text.startswith("<!doctype html>\n")
    assert text.endswith("</main>\n</body>\n</html>\n")
    assert "body {" in text.partition("<style>")[2].partition("</style>")[0]
    lines = main.replace("</header>\n<main>\n", "\n").split("\n")
    assert lines[0] == f"<h1>{title}</h1>"
    return [line for line in lines if line not in ("", "<table>", "</table>")]


HEADS = ["<pre>A: a&lt;b, 2 ranks, steps 0 to 0", "B: b, 1 rank, steps 0 to 1"]


@pytest.mark.parametrize(
    ("is_complete", "more"), [(True, ""), (False, " as far as they go")], ids=["whole", "cut"]
)
def test_a_page_without_differences(is_complete, more):
    result = comparison(is_complete=is_complete, surroundings=["other a: 1"], notes=["a\nnote"])
    assert body(result) == [
        f"<h1>Two records are equal{more}</h1>",
        *HEADS,
        "other a: 1",
        "a\\nnote</pre>",
        "<p>equal: 3 values in 1 step</p>",
    ]


def test_a_page_of_a_run_that_ends_before_the_other():
    result = comparison(shorter="B ends after step 4, and A after 5")
    assert body(result) == [
        "<h1>Two records are equal as far as they go</h1>",
        *HEADS[:-1],
        f"{HEADS[-1]}</pre>",
        "<p>equal: 3 values in 1 step</p>",
        "<p>not equal to the end: B ends after step 4, and A after 5</p>",
    ]


def test_a_page_of_differences_holds_them_all():
    result = comparison(
        is_complete=False,
        differences=[
            Difference(0, "clip", "w<", (0, 1), "1 in A"),
            Difference(0, "clip", "v\n", ()),
            *(Difference(0, "clip", f"u{number}", (7,)) for number in range(9)),
        ],
        counts={"optimiser": (0, 2), "clip": (11, 12)},
        element=["  element [0]: 1 in A"],
        places=["step at a.py:1"],
        sizes=["B is 2 times A"],
    )
    assert body(result) == [
        "<h1>Two records differ: step 0, clip: w&lt;, ranks 0, 1: 1 in A</h1>",
        HEADS[0],
        f"{HEADS[1]}</pre>",
        "<pre>element [0]: 1 in A",
        "step at a.py:1",
        "B is 2 times A</pre>",
        "<h3>What differs in step 0, clip</h3>",
        "<tr><th>name</th><th>ranks</th><th>how</th></tr>",
        "<tr><td>w&lt;</td><td>0, 1</td><td>1 in A</td></tr>",
        "<tr><td>v\\n</td><td></td><td></td></tr>",
        *(f"<tr><td>u{number}</td><td>7</td><td></td></tr>" for number in range(9)),
        "<h3>Phases of step 0</h3>",
        "<tr><th>phase</th><th>differ</th><th>of</th></tr>",
        "<tr><td>clip</td><td>11</td><td>12</td></tr>",
        "<tr><td>optimiser</td><td>0</td><td>2</td></tr>",
    ]


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_page(comparison(), path)
    assert path.read_text() == page_of(comparison())
    assert list(tmp_path.iterdir()) == [path]

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_page(comparison(compared=4), path)
    assert path.read_text() == page_of(comparison())
    assert list(tmp_path.iterdir()) == [path]
