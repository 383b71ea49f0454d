"""Loading the plugin: no torch, no output where it is not used, importable with it switched off."""

import subprocess
import sys

import pytest


def test_loading_the_plugin_does_not_import_torch():
    probe = "import sys, pytest_gtrainer, pytest_gtrainer.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


def test_a_project_that_does_not_use_it_sees_no_output(pytester: pytest.Pytester):
    pytester.makepyfile("def test_nothing_of_ours(): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*gtrainer*summary*")
    assert "gt-" not in result.stdout.str()
