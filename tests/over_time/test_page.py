"""The page "My loss moved" is followed."""

import shutil
import sys
from pathlib import Path

import pytest

from fixtures.pages import follow
from tests.over_time.trainers import SCRIPT

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "loss-moved.md"


@pytest.mark.second_tier
def test_the_page_is_followed(tmp_path):
    """Z1, Z2: by a stranger, with the trainer of the page."""
    shutil.copy(SCRIPT, tmp_path)
    assert follow(PAGE, tmp_path, Path(sys.executable).parent) == 5
