"""The environment of a project that a test runs."""

from pytest_gtrainer.testing import run_project

TEXT = """
import os

def test_it():
    names = {name for name in os.environ if "PYTEST" in name}
    assert names - {"PYTEST_VERSION"} == {"MY_PYTEST_", "PYTEST_CURRENT_TEST"}
"""


def test_variables_of_the_calling_run_do_not_reach_a_project(tmp_path, monkeypatch):
    """Its workers, options and plugins are not those of the project; other variables stay."""
    for name in ("ADDOPTS", "PLUGINS", "XDIST_WORKER", "XDIST_TESTRUNUID"):
        monkeypatch.setenv(f"PYTEST_{name}", "no_such_plugin")
    monkeypatch.setenv("MY_PYTEST_", "1")
    run = run_project(tmp_path, "-p", "no:hypothesispytest", files={"test_it.py": TEXT})
    assert run["test_it"].outcome == "passed", run.output
