"""State that ranks have when they are forked, and state that they put away between tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.pool import PRELOAD
from pytest_gtrainer.ranks.team import ForkServer

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
    assert [
        name for name in PRELOAD if name != "numpy" and importlib.util.find_spec(name) is None
    ] == []


def test_what_starts_a_thread_is_not_imported_beforehand(tmp_path, monkeypatch):
    """Later modules are not imported either: a process with threads cannot be forked.

    Of torch, the modules that start CUDA start threads.
    """
    thread = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), "
        "daemon=True).start()"
    )
    for name, source in {"comes_before": "", "starts_a_thread": thread, "comes_after": ""}.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(["comes_before", "starts_a_thread", "comes_after"], live_output=False)
    try:
        assert server.conn.recv() == wire.Started(None)
        process = Path("/proc", str(server._process.pid))
        assert len([*process.joinpath("task").iterdir()]) == 1
        assert '"comes_before"' in process.joinpath("cmdline").read_text()
        assert '"starts_a_thread"' not in process.joinpath("cmdline").read_text()
    finally:
        server.close()


COMPILES = 'torch.compile(torch.neg, backend="eager")(torch.ones(2))'


@pytest.mark.second_tier
@pytest.mark.parametrize(("compile", "printed"), [("", ""), (COMPILES, "reset")])
def test_a_rank_forgets_what_it_compiled_if_it_compiled(compile, printed):
    """``torch.compiler.reset`` of 2.13 imports Inductor where there is a GPU: a second in each
    rank.
    """
    done = subprocess.run(
        [sys.executable, "-c", RESETS.format(compile=compile)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed
