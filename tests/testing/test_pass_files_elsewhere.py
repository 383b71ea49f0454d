"""Pass files in a repository that is not ours: found, run and pinned as tests."""

import pytest

from pytest_gtrainer import facts
from tests.testing.conftest import BODY

TEST_FILE = """
from pathlib import Path
import pytest
from pytest_gtrainer.testing import pass_files, run_pass_file

def negate_pass(gm, example_inputs, *, times):
    return gm

@pytest.mark.parametrize("path", pass_files(Path(__file__).parent / "graphs"))
def test_pass_file(path, gt_golden):
    run_pass_file(path, golden=gt_golden, passes={"negate_pass": negate_pass})
"""


@pytest.fixture(scope="module")
def dynamo():
    """Import dynamo first: modules that a run in this process imports are forgotten afterwards, and
    dynamo cannot be imported twice.
    """
    import torch._dynamo  # noqa: F401


@pytest.fixture
def elsewhere(dynamo, pytester, monkeypatch):
    """A project with three pass files: one with a golden, one with a check, one that cannot be
    read.
    """
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_it=TEST_FILE)
    for name, directives in {
        "buckets/pinned": "# world: fake 2\n# mesh: dp=2\n# passes: negate_pass(times=2)\n",
        "buckets/checked": "# passes: negate_pass(times=2)\n# check: then neg\n",
        "damaged": "# passes: negate_pass(times=2)\n# chek: then neg\n",
    }.items():
        path = pytester.path / "graphs" / f"{name}.fxgraph"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# gtrainer graph v2\n" + directives + BODY)

    def run(*arguments):
        with monkeypatch.context() as isolated:
            isolated.setattr(facts, "_sinks", [])
            return pytester.runpytest_inprocess(
                "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments
            )

    return pytester, run


def test_each_file_is_a_test_of_its_name(elsewhere):
    """A mistake in one file fails its own test only; a golden is accepted by the usual flag."""
    pytester, run = elsewhere
    result = run("-rA")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["PASSED test_it.py::test_pass_file[[]buckets.checked[]]"])
    result.stdout.fnmatch_lines(
        ["*graphs/damaged.fxgraph:3: there is no directive `# chek:`, did you mean `check`?"]
    )
    result.stdout.fnmatch_lines(
        ["*pytest 'test_it.py::test_pass_file[[]buckets.pinned[]]' --gt-update-goldens"]
    )
    run("--gt-update-goldens", "-k", "pinned").assert_outcomes(passed=1, deselected=2)
    golden = (pytester.path / "golden/test_it/test_pass_file-buckets.pinned.fxgraph").read_text()
    assert "# world: fake, 2 ranks, rank 0\n# mesh: dp=2\n" in golden
    assert "\ndp = group(range(0, 2))\n" in golden
    run("-k", "pinned").assert_outcomes(passed=1, deselected=2)
