"""A marker that comes after the test was sent nowhere is a failure, not a test without ranks."""

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.second_tier

LATE = """
import pytest

MARKER = pytest.mark.gt_world("ranks", size=2)

@pytest.fixture
def marked(request):
    request.node.add_marker(MARKER)

def test_by_a_fixture(marked):
    pass

def test_by_itself(request):
    request.applymarker(MARKER)
    request.getfixturevalue("gt_world")

def test_without():
    pass
"""


def test_a_late_marker_fails_the_test(pytester):
    pytester.makepyfile(LATE)
    run = pytester.runpytest_subprocess("--gt-device=cpu", "--gt-gpus=2")
    run.assert_outcomes(failed=2, passed=1)
    run.stdout.fnmatch_lines(['*gt_world("ranks") was added while the test was running*'])
