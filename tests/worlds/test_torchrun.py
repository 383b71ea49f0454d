"""The same test files under ``torchrun -m pytest``: one launcher, and two as on two nodes."""

import os
import re
import socket
import time

import pytest

from tests.worlds.conftest import Suite

pytestmark = pytest.mark.second_tier

SUITE = """
import os, signal, subprocess, time
import pytest, torch
import torch.distributed as dist
from pytest_gtrainer.ranks import watch

watch.LINE_EVERY = 0.5

on = lambda size, **more: pytest.mark.gt_world("ranks", size=size, **more)
PIDS = set()

@pytest.fixture(scope="module")
def expensive():
    return {"pid": os.getpid()}

@on(3)
@pytest.mark.xdist_group("ours")
def test_collective(gt_world, expensive, tmp_path):
    value = torch.tensor([float(gt_world.rank)])
    dist.all_reduce(value)
    assert value.item() == 3 and dist.get_world_size() == gt_world.size == 3
    assert expensive == {"pid": os.getpid()} and tmp_path.is_dir()
    PIDS.add(os.getpid())
    subprocess.Popen(["sleep", "604"], start_new_session=True)
    print("wrote", gt_world.rank)

@on(3)
def test_same_processes(expensive):
    assert PIDS == {os.getpid()} == {expensive["pid"]}

def test_without_ranks():
    assert not dist.is_initialized()

@pytest.mark.gt_world("fake", size=8)
def test_fake(gt_world):
    assert dist.get_world_size() == 8

@on(2)
def test_smaller_than_the_world():
    assert dist.get_world_size() == 2
    dist.barrier()

@on(4)
def test_larger_than_the_world(): raise SystemExit

def called(number):
    dist.barrier()
    return dist.get_rank() * number

def test_functions(gt_ranks):
    assert gt_ranks.run(called, 2) == [0, 2, 4]
    assert not dist.is_initialized()

@on(3)
def test_golden(gt_golden):
    gt_golden.check("text")

@on(3)
def test_raises_while_others_wait():
    assert dist.get_rank() != 1, "only here"
    dist.barrier()

@on(3)
def test_skips_on_one():
    if dist.get_rank() == 2: pytest.skip("not me")

@on(3)
def test_skips_everywhere():
    pytest.skip("nobody")

@on(3)
@pytest.mark.xfail(strict=True)
def test_xfails_on_one():
    assert dist.get_rank() == 0

@on(3)
def test_subtest_fails(subtests):
    with subtests.test("a"):
        assert dist.get_rank() != 0

@on(3, timeout=1.5)
@pytest.mark.parametrize("who", [0, 2])
def test_hangs(who):
    if dist.get_rank() == who: time.sleep(600)
    dist.barrier()

def test_struck_by_a_limit_of_another_kind(gt_ranks):
    def strike(*_): raise TimeoutError("enough of this")
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    gt_ranks.run(time.sleep, 600, size=3)

@on(3)
def test_counts_differ():
    if dist.get_rank() == 0: dist.all_reduce(torch.ones(1), async_op=True)

@on(3)
def test_good_after_that():
    dist.barrier()

@on(3)
@pytest.mark.parametrize("who", [0, 2])
def test_killed(who):
    if dist.get_rank() == who: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@on(2, timeout=1.5)
def test_never_ends():
    while dist.get_rank() == 0:
        try: time.sleep(60)
        except BaseException: pass

@on(3)
def test_good_in_the_end():
    dist.barrier()
"""

# test: outcome, what its report says
TABLE = {
    "test_collective": ("passed", []),
    "test_same_processes": ("passed", []),
    "test_without_ranks": ("passed", []),
    "test_fake": ("passed", []),
    "test_smaller_than_the_world": ("passed", []),
    "test_larger_than_the_world": ("skipped", ["needs 4 ranks, torchrun has started 3"]),
    "test_functions": ("passed", []),
    "test_golden": ("failed", ["test_golden.txt is missing"]),
    "test_raises_while_others_wait": (
        "failed",
        ["rank 1: AssertionError: only here", "ranks 0, 2: waited in barrier"],
    ),
    "test_skips_on_one": (
        "failed",
        ["the ranks do not agree: passed (ranks 0, 1), skipped: not me (rank 2)"],
    ),
    "test_skips_everywhere": ("skipped", []),
    "test_xfails_on_one": ("xfailed", []),
    "test_subtest_fails": (
        "failed",
        ["rank 0: AssertionError: assert 0 != 0", "ranks 1, 2: passed"],
    ),
    "test_hangs[0]": (
        "failed",
        ["rank 0 did not end within 1.5 s, at test_it.py", "ranks 1, 2: did not end within"],
    ),
    "test_hangs[2]": (
        "failed",
        ["rank 2 did not end within 1.5 s, at test_it.py", "waiting in barrier"],
    ),
    "test_struck_by_a_limit_of_another_kind": ("failed", ["TimeoutError: enough of this"]),
    "test_counts_differ": (
        "failed",
        ["different numbers of collectives on all ranks: 1 (rank 0), 0 (ranks 1, 2)"],
    ),
    "test_good_after_that": ("passed", []),
    "test_killed[0]": ("failed", ["rank 0 was killed by SIGKILL", "ranks 1, 2: waited in barrier"]),
    "test_killed[2]": ("failed", ["rank 2 was killed by SIGKILL", "ranks 0, 1: waited in barrier"]),
    "test_never_ends": ("failed", ["rank 0 did not end within 1.5 s"]),
    "test_good_in_the_end": ("passed", []),
}


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    return module_suite.run(
        "-p", "no:randomly", "--strict-markers", launcher=("--standalone", "--nproc-per-node=3")
    )


@pytest.mark.parametrize("name", TABLE)
def test_under_torchrun(run, name):
    """T1 to T4, T7: as without torchrun; no rank is the process that reports, so that rank 0 may
    die or hang like any.

    Marks are strict, and ranks know those of plugins that they do without: xdist's in
    ``test_collective``.
    """
    outcome, expected = TABLE[name]
    assert run.outcome(name) == outcome, run.text(name)
    for line in expected:
        assert line in run.text(name)


def test_one_report_for_all(run):
    assert set(run.reports) == set(TABLE)
    assert run.output.count("test session starts") == 1
    assert "3 CPU ranks (gloo), started by torchrun, no GPU used" in run.output
    assert run.reports["test_collective"]["call"]["output"] == "wrote 0\nwrote 1\nwrote 2\n"


def test_a_long_wait_names_the_ranks_that_are_waited_for(run):
    for who in (0, 2):
        where = rf"test_it.py:\d+ in test_hangs \(rank {who}\)"
        assert re.search(
            rf"gtrainer: .*test_hangs\[{who}\] has run for \d s of 1.5: .*{where}", run.output
        ), run.output


def test_the_exit_code_is_one_for_all(run):
    assert run.status == 1


def test_nothing_is_left_over(run):
    assert run.left_over() == []


ON_TWO_NODES = """
import os, time
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=2)

def test_nodes(tmp_path):
    groups = [None, None]
    own = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], os.getppid()
    dist.all_gather_object(groups, own)
    assert [group[:2] for group in groups] == [("0", "0"), ("1", "0")]
    assert groups[0][2] != groups[1][2]

def test_fails_there():
    assert dist.get_rank() == 0

def test_ends_there():
    print("its last words")
    if dist.get_rank() == 1: os._exit(3)
    dist.barrier()

@pytest.mark.gt_world("ranks", size=2, timeout=2)
def test_hangs_there():
    if dist.get_rank() == 1: time.sleep(600)

def test_stops_there():
    if dist.get_rank() == 1: breakpoint()

def called(number):
    return dist.get_rank() * number

@pytest.mark.gt_world("ranks", size=2)
def test_functions(gt_ranks):
    assert gt_ranks.run(called, 2.5) == [0.0, 2.5]
"""


def on_two_nodes(suite, tmp_path, **environ):
    """Two launchers meet on loopback: the run, and the suite of the second one's folder for
    temporary files.

    Each has one of its own: in one, the processes of the other would be waited for as strays.
    """
    second = Suite(tmp_path / "second")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    )
    there = {"TMPDIR": str(second.folder / "tmp"), **environ}
    run = suite.run_together(
        suite.start(launcher=(*launcher, "--node-rank=0"), environ={"GT_TORCHRUN_KEY": "a secret"}),
        suite.start(
            launcher=(*launcher, "--node-rank=1"), environ={"GT_TORCHRUN_KEY": "a secret", **there}
        ),
    )
    return run, second


def test_two_nodes(suite, tmp_path):
    """A rank of the other node is reported on, its end noticed, and another one takes its place."""
    suite.write("test_it.py", ON_TWO_NODES)
    run, second = on_two_nodes(suite, tmp_path)
    outcomes = {name: run.outcome(name) for name in run.reports}
    failed = dict.fromkeys(
        ("test_fails_there", "test_ends_there", "test_hangs_there", "test_stops_there"), "failed"
    )
    assert outcomes == {"test_nodes": "passed", **failed, "test_functions": "passed"}, run.output
    assert "rank 1: AssertionError: assert 1 == 0" in run.text("test_fails_there")
    assert "rank 1 exited with status 3" in run.text("test_ends_there")
    assert "last output [rank 1] ---\nits last words" in run.text("test_ends_there")
    assert "rank 1 did not end within 2 s, at test_it.py" in run.text("test_hangs_there")
    said = (
        "RuntimeError: rank 1 is at a breakpoint on another node, which the terminal does not "
        "reach; stop a rank of"
    )
    assert said in run.text("test_stops_there")
    assert run.status != 0
    _wait_until_nothing_is_left(suite)
    _wait_until_nothing_is_left(second)


def test_a_node_with_another_key_is_refused(suite, tmp_path):
    """It says why, and what to do; rank 0 waits for it once."""
    soon = "from pytest_gtrainer.ranks.torchrun import nodes\nnodes.NODES_LIMIT = 4.0\n"
    suite.write("test_it.py", soon + ON_TWO_NODES)
    run, second = on_two_nodes(suite, tmp_path, GT_TORCHRUN_KEY="another secret")
    refusal = (
        "127.0.0.1 does not have the key of this run, and is not heard;"
        " set GT_TORCHRUN_KEY to the same secret on all"
    )
    assert f"gtrainer: refused a connection from 127.0.0.1: {refusal}" in run.output, run.output
    assert f"gtrainer: {refusal} nodes: rank 1 ends too" in run.output
    assert run.output.count("the nodes of rank 1 did not come within 4 s") >= 5
    assert run.status != 0
    _wait_until_nothing_is_left(suite)
    _wait_until_nothing_is_left(second)


def _wait_until_nothing_is_left(suite):
    end = time.monotonic() + 60
    while suite.left_over() and time.monotonic() < end:
        time.sleep(0.1)
    assert suite.left_over() == []


def test_the_death_of_the_process_that_reports_ends_all(suite, tmp_path):
    """T2: it runs the tests without ranks; other nodes say that it ended, its launcher says how."""
    suite.write(
        "test_it.py",
        """
        import os, signal
        import pytest
        @pytest.mark.gt_world("ranks", size=2)
        def test_on_ranks(): pass
        def test_kills_the_process(): os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    run, second = on_two_nodes(suite, tmp_path)
    assert (
        "gtrainer: rank 0, which reports for all ranks, has ended: rank 1 ends too" in run.output
    ), run.output
    assert run.status != 0
    _wait_until_nothing_is_left(suite)
    _wait_until_nothing_is_left(second)


def test_without_a_place_for_the_key_the_way_out_is_told(suite):
    suite.write("test_it.py", "def test_never_run(): raise SystemExit('ran')")
    run = suite.run(launcher=("--standalone", "--nproc-per-node=2"), environ={"HOME": os.devnull})
    # by rank 0, or by another process: torchrun ends all once the first has ended
    assert "there is no file for the key that signs messages of a run" in run.output
    assert "set GT_TORCHRUN_KEY to the same secret on all nodes" in run.output
    assert "INTERNALERROR" not in run.output
    assert run.reports == {}


STRANGER = """
import os, pickle, socket, sys
import torch.distributed as dist

class Command:
    def __reduce__(self): return os.system, ("touch " + sys.argv[1],)

store = dist.PrefixStore("gtrainer", next(dist.rendezvous("env://"))[0])
for place in ("rank1", "driver"):
    store.set(f"{place}/{store.add(f'{place}/count', 1)}", pickle.dumps(Command()))
if store.check(["port"]):
    with socket.create_connection(("localhost", int(store.get("port")))) as sock:
        sock.sendall(pickle.dumps(Command()) * 9)
for name in ("port", "line"):
    store.set(name, pickle.dumps(Command()))
"""


def test_a_stranger_at_the_store_is_refused_by_name_and_runs_nothing(suite):
    """Whoever reaches torchrun's store writes pickles that would run a command, and sends them to
    rank 0's port.
    """
    suite.write("stranger.py", STRANGER)
    suite.write(
        "test_it.py",
        """
        import subprocess, sys, time
        import pytest
        @pytest.mark.gt_world("ranks", size=2)
        def test_before(): pass
        def test_stranger():
            subprocess.run([sys.executable, "stranger.py", "owned"], check=True)
            time.sleep(1)
        @pytest.mark.gt_world("ranks", size=2)
        def test_after(): pass
        """,
    )
    run = suite.run("-p", "no:randomly", launcher=("--standalone", "--nproc-per-node=2"))
    assert not (suite.folder / "owned").exists(), run.output
    assert "gtrainer: refused a connection from 127.0.0.1: " in run.output
    assert {name: run.outcome(name) for name in run.reports} == dict.fromkeys(
        ("test_before", "test_stranger", "test_after"), "passed"
    )
    assert run.status == 0
    _wait_until_nothing_is_left(suite)


@pytest.mark.long
def test_ctrl_c_ends_all_ranks(suite):
    """T6."""
    suite.write(
        "test_it.py",
        """
        import subprocess, time
        import pytest, torch.distributed as dist
        @pytest.mark.gt_world("ranks", size=2)
        def test_waits():
            subprocess.Popen(["sleep", "605"], start_new_session=True)
            open(f"started{dist.get_rank()}", "w").close()
            if dist.get_rank() == 0: time.sleep(600)
            dist.barrier()
        """,
    )
    process = suite.start(launcher=("--standalone", "--nproc-per-node=2"))
    end = time.monotonic() + 120
    while len(list(suite.folder.glob("started*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in output
    _wait_until_nothing_is_left(suite)


ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        (
            "-n2",
            "torchrun has started the 4 ranks of this run, and xdist would start processes of its "
            "own: leave out",
        ),
        ("--gt-gpus=8", "--gt-gpus=8: torchrun has started 4 ranks; promise at most 4"),
    ],
)
def test_what_torchrun_cannot_have(pytester, monkeypatch, argument, sentence):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    result = pytester.runpytest_inprocess(argument, "--gt-device=cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{sentence}*"])
