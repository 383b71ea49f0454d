"""What people need to test a pass of their own: pass tests as files.

A *pass file* is graph text with the passes to run, and what to expect, in its comments::

    # world: fake 2
    # mesh: fsdp=2
    # passes: canonicalize_graph_pass; my_pass(threshold=2)
    # check: then aten.mm in layers.0

``pass_files`` finds them for a parametrised test, ``run_pass_file`` runs one. Importing this
package does not import torch: files are found when tests are collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gtrainer.testing.pass_file import PassFile, PassFileError, pass_files

if TYPE_CHECKING:
    from pytest_gtrainer.testing.running import run_pass_file

__all__ = ["PassFile", "PassFileError", "pass_files", "run_pass_file"]


def __getattr__(name: str) -> Any:
    if name != "run_pass_file":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_gtrainer.testing.running import run_pass_file

    return run_pass_file
