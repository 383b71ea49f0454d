"""What ranks bring along when they are forked, and what they put away between tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from pytest_gtrainer.ranks.pool import PRELOAD

RESETS = """
import torch, torch._dynamo
from pytest_gtrainer._torch.process_groups import forget_compiled

{compile}
resets = []
torch.compiler.reset = lambda: resets.append("reset")
forget_compiled()
print(*resets)
"""


def test_what_the_forkserver_imports_beforehand_is_there():
    assert [name for name in PRELOAD if name != "numpy" and importlib.util.find_spec(name) is None] == []


def resets_after(compile):
    done = subprocess.run([sys.executable, "-c", RESETS.format(compile=compile)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_rank_that_compiled_nothing_resets_nothing():
    """``torch.compiler.reset`` of 2.13 imports Inductor where there is a GPU: a second in each rank."""
    assert resets_after("") == ""


def test_a_rank_forgets_what_it_compiled():
    assert resets_after('torch.compile(torch.neg, backend="eager")(torch.ones(2))') == "reset"
