"""What imports what: a trainer uses the lower half without pytest, and reading a text needs no torch."""

import pkgutil
import subprocess
import sys

import pytest

import pytest_gtrainer

LOWER_HALF = ("checks", "graphtext", "numerics", "passes", "tracing", "references")


def leaves_out(modules, heavy):
    probe = f"import sys, {', '.join(modules)}; sys.exit({heavy!r} in sys.modules)"
    return subprocess.run([sys.executable, "-c", probe]).returncode == 0


def modules_of(package):
    path = [f"{pytest_gtrainer.__path__[0]}/{package}"]
    return [f"pytest_gtrainer.{package}.{module.name}" for module in pkgutil.walk_packages(path)]


def test_the_lower_half_does_not_import_pytest():
    assert leaves_out([name for package in LOWER_HALF for name in modules_of(package)], "_pytest")


@pytest.mark.parametrize(
    "modules",
    [
        ["pytest_gtrainer", "pytest_gtrainer.plugin"],
        ["pytest_gtrainer.graphtext", "pytest_gtrainer.graphtext.header"],
        ["pytest_gtrainer.testing", "pytest_gtrainer.testing.pass_file"],
    ],
    ids=["the plugin", "reading graph text", "finding pass files"],
)
def test_what_does_not_import_torch(modules):
    assert leaves_out(modules, "torch")


def test_the_probe_sees_an_import():
    """The twin."""
    assert not leaves_out(["pytest_gtrainer.plugin"], "_pytest")
