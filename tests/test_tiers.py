"""The two tiers of the suite: each entry of the second one's list stands for tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from conftest import second_tier

ROOT = Path(__file__).parents[1]


def stale(entries: Iterable[str]) -> Iterator[str]:
    """Entries whose file is gone, or in whose file no test begins so."""
    for entry in entries:
        file, _, test = entry.partition("::")
        function = re.escape(test.partition("[")[0])
        ending = r"\(" if "[" in test else ""
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        if not re.search(rf"^(def )?{function or 'test_'}{ending}", text, re.MULTILINE):
            yield entry


def test_every_entry_of_the_second_tier_stands_for_tests():
    """Else a test that was renamed would come to the first tier and nobody would know why."""
    assert not list(stale(second_tier()))


def test_a_stale_entry_is_seen():
    """The twin."""
    gone = ["tests/test_gone.py", "tests/test_tiers.py::test_gone", "tests/test_tiers.py::test_a_stale[one]"]
    assert list(stale(["tests/test_tiers.py", "tests/test_tiers.py::test_a_stale", *gone])) == gone
