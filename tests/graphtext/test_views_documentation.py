"""The documentation of the views shows the content of goldens."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = "golden/tests/parity/test_llama3_8b/test_llama3_8b_under_64_ranks_is_pinned@{}.fxgraph"
EXAMPLES = dict(
    re.findall(
        r"^```python\n# view: (\w+)\n(.*?)^```",
        (ROOT / "docs/graph-text.md").read_text(),
        re.S | re.M,
    )
)


@pytest.mark.parametrize("view", ["schedule", "layout"])
def test_the_example_is_cut_from_a_golden(view):
    golden = iter((ROOT / GOLDEN.format(view)).read_text().splitlines())
    assert [
        line for line in EXAMPLES[view].splitlines() if line not in golden
    ] == []  # each behind the one before


def test_the_example_says_how_long_the_schedule_is():
    golden = (ROOT / GOLDEN.format("schedule")).read_text().splitlines()
    lines = len([line for line in golden if not line.startswith("#")])
    assert f"{lines} lines in all" in (ROOT / "docs/graph-text.md").read_text()
