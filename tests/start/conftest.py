"""Shared by the tests of ``plan`` and ``init``."""

import sys

import pytest


@pytest.fixture
def make_project(tmp_path, monkeypatch):
    """``make_project(text)``: a repository with a module of a name that no other test imports, in
    which the test is; returns the name.
    """

    def make(text):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        name = f"model_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return make
