"""An option that switches a bug on, to see it told."""

import pytest


def pytest_addoption(parser):
    bugs = ("writes", "buffers", "directions")
    parser.addoption("--with-bug", choices=bugs, default="", help="let the pass make a mistake")


@pytest.fixture(autouse=True)
def bug(pytestconfig, monkeypatch):
    monkeypatch.setattr("train.passes.BUG", pytestconfig.getoption("with_bug"))
