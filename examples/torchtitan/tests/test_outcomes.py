"""torchtitan's own tests come to the same with the plugin, where no means is on; and to more with one."""

import functools
import importlib.util

import pytest
from upstream import RUNS, folder, run_file

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-torchtitan", allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcomes of a file's tests in one of ``RUNS``, which is done once."""

    @functools.cache
    def outcomes_of(file, run):
        out = tmp_path_factory.mktemp("outcomes") / "run"
        found = run_file(folder() / file, out, RUNS[run])
        return {name: each["outcome"] for name, each in found.items()}

    return outcomes_of


@pytest.mark.parametrize("file", ["test_graph_pp_runner.py", "test_precompile.py"])
def test_the_plugin_moves_no_outcome(file, outcomes):
    as_is = outcomes(file, "asis")
    assert outcomes(file, "beside") == as_is
    assert len(as_is) > 20


def test_the_cpu_as_cuda_moves_what_asks_for_cuda_and_no_other(outcomes):
    """One passes. One that was skipped now runs, and fails: what it wraps is a CUDA graph."""
    as_is = outcomes("test_precompile.py", "asis")
    with_means = outcomes("test_precompile.py", "cuda")
    moved = sorted(
        (as_is[name], with_means[name]) for name in as_is if as_is[name] != with_means[name]
    )
    assert moved == [("failed", "passed"), ("skipped", "failed")]
