"""torchtitan's own tests come to the same with the plugin, where no means is on; and to more with one."""

import importlib.util

import pytest
from upstream import RUNS, folder, run_file

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-torchtitan", allow_module_level=True)


def outcomes(file, run, tmp_path):
    found = run_file(folder() / file, tmp_path / "run", RUNS[run])
    return {name: each["outcome"] for name, each in found.items()}


@pytest.mark.parametrize("file", ["test_graph_pp_runner.py", "test_precompile.py"])
def test_the_plugin_moves_no_outcome(file, tmp_path):
    as_is = outcomes(file, "asis", tmp_path)
    assert outcomes(file, "beside", tmp_path) == as_is
    assert len(as_is) > 20


def test_the_cpu_as_cuda_moves_what_asks_for_cuda_and_no_other(tmp_path):
    """One passes. One that was skipped now runs, and fails: what it wraps is a CUDA graph."""
    as_is = outcomes("test_precompile.py", "asis", tmp_path)
    with_means = outcomes("test_precompile.py", "cuda", tmp_path)
    moved = sorted(
        (as_is[name], with_means[name]) for name in as_is if as_is[name] != with_means[name]
    )
    assert moved == [("failed", "passed"), ("skipped", "failed")]
