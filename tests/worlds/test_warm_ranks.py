"""What ranks bring along when they are forked, and what they put away between tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from pytest_gtrainer.ranks.pool import PRELOAD

WITH_A_GPU = """
import sys, torch, torch._dynamo
from pytest_gtrainer._torch.process_groups import forget_compiled

{compile}
torch.cuda.is_available = lambda: True
forget_compiled()
print("torch._inductor.cudagraph_trees" in sys.modules)
"""


def test_what_the_forkserver_imports_beforehand_is_there():
    assert [name for name in PRELOAD if name != "numpy" and importlib.util.find_spec(name) is None] == []


def imports_inductor(compile):
    done = subprocess.run([sys.executable, "-c", WITH_A_GPU.format(compile=compile)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_rank_that_compiled_nothing_does_not_import_inductor():
    """``torch.compiler.reset`` does so where there is a GPU: a second in each rank, before its first answer."""
    assert imports_inductor("") == "False"


def test_the_probe_sees_it_where_something_was_compiled():
    assert imports_inductor('torch.compile(torch.neg, backend="eager")(torch.ones(2))') == "True"
