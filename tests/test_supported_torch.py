"""Another version of torch: one line at the head of a run, and with an import that fails."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import pytest_gtrainer
from pytest_gtrainer import environment

LINE = (
    "torch {} is outside of the supported range, 2.13 to 2.15: graph text, goldens and digests "
    "may work; tracing, "
    "passes and ranks may not. `python -m pytest_gtrainer doctor` says which"
)


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0.dev20261101", "3.0", "nightly"])
def test_the_head_of_a_run_says_so(pytester, monkeypatch, version):
    pytester.makepyfile("def test_it(): pass")
    monkeypatch.setattr(environment.metadata, "version", lambda name: version)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"gtrainer: {LINE.format(version)}"])


def test_the_supported_one_is_not_mentioned(pytester):
    """The twin, with the torch that is installed."""
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess().stdout.no_fnmatch_line("*supported range*")


def test_an_import_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(environment.metadata, "version", lambda name: "2.12.1")
    monkeypatch.setitem(pytest_gtrainer._HOME, "broken", "no_such_part")
    with pytest.raises(ImportError) as caught:
        pytest_gtrainer.broken  # noqa: B018
    assert caught.value.__notes__[0] == LINE.format("2.12.1")
    assert "pytest_gtrainer.broken" not in sys.modules


def test_the_declared_range_is_the_one_that_is_said():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    (torch_range,) = [needed for needed in project["dependencies"] if re.match(r"torch\b", needed)]
    (major, first), (_, last) = environment.FIRST, environment.LAST
    assert torch_range == f"torch>={major}.{first},<{major}.{last + 1}"
    assert environment.FIRST <= environment.minor_version(torch.__version__) <= environment.LAST
