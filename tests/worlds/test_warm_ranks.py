"""State that ranks have when they are forked, and state that they put away between tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pytest_gtrainer._torch import process_groups
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.inside.messages import Counts, count_messages
from pytest_gtrainer.ranks.inside.rank import RankGroup
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


class Group:
    """Stands for a process group. The next one is made at the address of one that is gone."""


def test_a_group_does_not_inherit_the_counts_of_one_that_its_test_has_destroyed(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else the ranks would seem to issue different numbers of collectives."""
    group = RankGroup(0, "cpu", "nccl")
    live: list[Group] = []
    monkeypatch.setattr(process_groups, "live_groups", lambda: live)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    found, addresses = [], set()
    for issued in (3, 4, 4, 5):
        live.append(Group())
        addresses.add(id(live[0]))
        monkeypatch.setattr(process_groups, "issued_on", lambda group, issued=issued: issued)
        found += group._issued()[0].values()
        live.clear()
    assert len(addresses) < 4, "no address was used again, so nothing is judged"
    assert found == [3, 4, 4, 5]


def test_messages_on_a_group_are_not_those_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch):
    for name in ("send", "recv", "recv_anysource", "monitored_barrier"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda group: None)
    issued, balance = Counts(), Counts()
    count_messages(issued, balance)
    kept = Group()
    for _ in range(3):
        gone = Group()
        dist.ProcessGroup.send(gone)
        dist.ProcessGroup.send(kept)
        dist.ProcessGroup.recv(kept)
        assert (issued[gone], balance[gone]) == (1, 1)
        del gone
    assert dict(issued) == {kept: 6}
    assert dict(balance) == {kept: 0}


def test_a_module_whose_import_was_ended_counts_nothing(monkeypatch):
    """It stays half imported, without its counter, if a test ends in the middle."""
    half = type(sys)("torch._dynamo.convert_frame")
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", half)
    resets = []
    monkeypatch.setattr("torch.compiler.reset", lambda: resets.append("reset"))
    process_groups.forget_compiled()
    assert resets == []
    half.FRAME_COUNTER = 1
    process_groups.forget_compiled()
    assert resets == ["reset"]


@pytest.mark.gt_world("fake", size=2)
def test_a_group_that_counts_nothing_does_not_end_the_rank(gt_world):
    """A trainer has fake groups on real ranks, for dimensions of its mesh that are off."""
    kept = process_groups.live_groups()
    with pytest.raises(RuntimeError, match="sequence numbers"):
        process_groups.issued_on(kept[0])
    group = RankGroup(0, "cpu", "gloo")
    group._end(kept)
    group.begin()
    group.check_ended_groups()
