"""Tools to test a pass or plugin of your own: pass tests as files, and projects run under pytest.

A *pass file* is graph text with the passes to run, and what to expect, in its comments::

    # world: fake 2
    # mesh: fsdp=2
    # passes: canonicalize_graph_pass; my_pass(threshold=2)
    # check: then aten.mm in layers.0

``pass_files`` finds them for a parametrised test, ``run_pass_file`` runs one. ``parse`` makes a
graph from text. ``run_project`` runs a project in its own process and returns the results of its
tests. This imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_gtrainer.testing.pass_file import PassFile, PassFileError, pass_files
from pytest_gtrainer.testing.project import ProjectRun, ToldByTest, run_project

if TYPE_CHECKING:
    from pytest_gtrainer.graphtext import parse
    from pytest_gtrainer.testing.running import run_pass_file

__all__ = [
    "PassFile",
    "PassFileError",
    "ProjectRun",
    "ToldByTest",
    "parse",
    "pass_files",
    "run_pass_file",
    "run_project",
]

_HOME = {"run_pass_file": "pytest_gtrainer.testing.running", "parse": "pytest_gtrainer.graphtext"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
