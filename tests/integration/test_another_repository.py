"""A repository that is not ours: an empty directory, the package installed, a ten-line test
file.
"""

import pytest

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("warm_python")]

TEST_FILE = """
import pytest, torch
from pytest_gtrainer import assert_bitwise_equal, data_parallel, trace_step

@pytest.mark.gt_world("ranks", size=2)
def test_my_step(gt_world, gt_mesh, gt_golden):
    model = data_parallel(torch.nn.Linear(16, 16).to(gt_world.device), gt_mesh)
    x = torch.ones(4, 16, device=gt_world.device)
    traced = trace_step(model, lambda m, x: m(x).square().mean(), (x,))
    assert_bitwise_equal(traced.replay(model, x), model(x).square().mean().detach())
    gt_golden.check(traced)
"""
GOLDEN = "golden/test_mine/test_my_step.fxgraph"


@pytest.fixture
def elsewhere(pytester):
    """A project with the ten lines above, run as its owner would, outside of CI."""
    pytester.makepyfile(test_mine=TEST_FILE)
    return pytester


def test_from_no_golden_to_green_and_to_a_changed_graph(elsewhere):
    """Without xdist, beside it and under it; every run is a process of its own."""
    missing = elsewhere.runpytest_subprocess("-p", "no:xdist")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*pytest test_mine.py::test_my_step --gt-update-goldens"])
    assert not (elsewhere.path / "golden").exists()

    created = elsewhere.runpytest_subprocess("--gt-update-goldens")
    created.assert_outcomes(passed=1)
    assert "all_gather_into_tensor" in (elsewhere.path / GOLDEN).read_text()

    green = elsewhere.runpytest_subprocess("-n", "1")
    green.assert_outcomes(passed=1)
    green.stdout.fnmatch_lines(
        ["worlds*1 test in ranks(2, *", "goldens*1 equal", "verdicts*1 equal"]
    )

    elsewhere.makepyfile(test_mine=TEST_FILE.replace(".square()", ".abs()"))
    changed = elsewhere.runpytest_subprocess("-p", "no:xdist")
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        ["*aten.abs*", "*pytest test_mine.py::test_my_step --gt-update-goldens"]
    )
    changed.stdout.fnmatch_lines(
        ["worlds*1 test in ranks(2, *", "goldens*1 different", "verdicts*1 equal"]
    )


def test_with_the_plugin_disabled_only_the_fixtures_are_missing(elsewhere):
    result = elsewhere.runpytest_subprocess("-p", "no:gtrainer")
    result.assert_outcomes(errors=1, warnings=1)  # the warning: an unknown marker
    result.stdout.fnmatch_lines(["*fixture 'gt_world' not found"])
    result.stdout.no_fnmatch_line("*ImportError*")
