"""Ranks start under ``-W error``, with modules of the user, beside the rest of killed runs; or
fail.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gtrainer.ranks import team
from pytest_gtrainer.ranks.team import OWNER_LOCK, lock_folder, sweep_folders_of_killed_runs

TWO_TESTS = """
import warnings
import pytest

pytestmark = pytest.mark.gt_world("ranks", size=2)

def test_is_quiet(gt_mesh): assert gt_mesh.size() == 2

def test_warns(): warnings.warn("mine", UserWarning)
"""


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("options", "ini"),
    [
        (("-W", "error"), ""),
        (("-W", "error", "--", "test_it.py"), ""),
        ((), "filterwarnings = error"),
    ],
    ids=["on the command line", "before the end of options", "in the ini file"],
)
def test_warnings_are_errors_of_the_test_that_warns(suite, options, ini):
    """Not of the start of ranks, whose plugins the forkserver has imported before."""
    suite.write("test_it.py", TWO_TESTS)
    suite.write("pytest.ini", f"[pytest]\n{ini}\n")
    run = suite.run(*options)
    assert run.outcome("test_is_quiet") == "passed", run.output
    assert run.outcome("test_warns") == "failed"
    assert "UserWarning: mine" in run.text("test_warns")


HANGS_IN_A_CONFTEST = """
import os, time

if os.environ.get("RANK") == {rank!r}:
    print("about to hang")
    time.sleep(600)
"""


@pytest.mark.second_tier
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_conftest_that_hangs_on_a_rank_is_named_with_its_line(suite, rank):
    """At the limit of the test, and not before ranks had 20 s to start."""
    recording = (suite.folder / "conftest.py").read_text()
    suite.write("conftest.py", HANGS_IN_A_CONFTEST.format(rank=rank) + recording)
    suite.write("test_it.py", TWO_TESTS)
    run = suite.run("--gt-timeout=20", "-k", "quiet")
    said = run.text("test_is_quiet")
    assert f"rank {rank} did not start within 20 s, at conftest.py:6 in <module>" in said
    assert f"rank {1 - int(rank)} did not start" not in said
    assert "about to hang" in said
    assert run.status == 1


HANGS = """
import logging, sys, time
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=2)

@pytest.fixture
def talkative():
    print("set up by", dist.get_rank())
    logging.warning("recorded as %s was set up", dist.get_rank())

def test_is_quiet():
    logging.error("of another test")

def test_hangs(talkative):
    print("printed by", dist.get_rank())
    print("an error of", dist.get_rank(), file=sys.stderr)
    logging.error("recorded by %s", dist.get_rank())
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()
"""


@pytest.mark.second_tier
@pytest.mark.parametrize("capture", ["fd", "sys", "tee-sys"])
def test_a_rank_that_runs_into_the_limit_keeps_what_it_has_written(suite, capture):
    """Output and log, of the phase that hangs and of those before it, and of no other test."""
    suite.write("test_it.py", HANGS)
    said = suite.run("--gt-timeout=3", f"--capture={capture}").text("test_hangs")
    assert "rank 1 did not end within 3 s" in said
    for rank in (0, 1):
        for line in (
            "set up by {}",
            "recorded as {} was set up",
            "printed by {}",
            "an error of {}",
            "recorded by {}",
        ):
            # tee-sys writes everything a second time, to where uncaptured output goes
            assert said.count(line.format(rank)) == 1 + (
                capture == "tee-sys" and "recorded" not in line
            ), (line, said)
    assert "of another test" not in said


PRELOADED = """
import os
import pytest
import slow_library

@pytest.mark.gt_world("ranks", size=2)
def test_it():
    assert (slow_library.PID != os.getpid()) == {shared}
"""


@pytest.mark.second_tier("by the ini", "beside", "not at all")
@pytest.mark.parametrize(
    "how", ["not at all", "by the option", "by the ini file", "beside another"]
)
def test_modules_of_the_user_are_imported_once_for_all_ranks(suite, how):
    suite.write("slow_library.py", "import os\nPID = os.getpid()\n")
    suite.write("another.py", "")
    suite.write("test_it.py", PRELOADED.format(shared=how != "not at all"))
    names = {
        "by the ini file": "slow_library",
        "beside another": "\n    another\n    slow_library",
    }.get(how, "")
    suite.write(
        "pytest.ini", f"[pytest]\npythonpath = .\n{f'gt_preload = {names}' if names else ''}\n"
    )
    run = suite.run(*["--gt-preload=slow_library"] * (how == "by the option"))
    assert run.outcome("test_it") == "passed", run.output


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "1 / 0",
            "whose import fails in the process that forks ranks (ZeroDivisionError: division by "
            "zero)",
        ),
        (
            "raise SystemExit(3)",
            "whose import fails in the process that forks ranks (SystemExit: 3)",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), "
            "daemon=True).start()",
            "which starts a thread when it is imported, and a process with threads cannot be "
            "forked",
        ),
        (
            None,
            "whose import fails in the process that forks ranks (ModuleNotFoundError: No module "
            "named 'library')",
        ),
        (
            "import os; os._exit(3)",
            "whose import ends the process that forks ranks: it exited with status 3",
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            "whose import ends the process that forks ranks: it was killed by SIGSEGV",
        ),
    ],
    ids=["fails", "exits", "starts a thread", "is missing", "ends its process", "crashes"],
)
def test_a_module_that_cannot_be_shared_is_named(suite, source, says):
    if source is not None:
        suite.write("library.py", source)
    suite.write("test_it.py", TWO_TESTS)
    suite.write("pytest.ini", "[pytest]\npythonpath = .\ngt_preload = library\n")
    run = suite.run("-k", "quiet")
    assert (
        f"gt_preload names library, {says}: correct it, or take it out of gt_preload"
        in run.text("test_is_quiet")
    )
    assert run.status == 1
    assert "1 failed" in run.output.splitlines()[-1], "the run itself has ended well"


@pytest.mark.second_tier
def test_a_module_whose_import_does_not_end_is_named(tmp_path, monkeypatch):
    (tmp_path / "never_ends.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(team, "SERVER_START_LIMIT", 5.0)
    monkeypatch.setattr(team, "SERVER_END_LIMIT", 0.1)
    server = team.ForkServer([], ["never_ends"], live_output=False)
    with pytest.raises(
        team.RanksError, match="gt_preload names never_ends, whose import did not end within 5 s"
    ):
        server.fork([])
    server.close()  # as the end of the run does
    assert not server.folder.exists()


def test_a_name_that_is_none_of_a_module_is_a_usage_error(suite):
    suite.write("test_it.py", TWO_TESTS)
    run = suite.run("--gt-preload=my-library")
    assert run.status == 4
    assert "--gt-preload=my-library: expected names of modules; 'my-library' is none" in run.output


STARTS_MANY = """
import subprocess
for _ in range(3000):
    subprocess.Popen(["sleep", "606"], start_new_session=True)
"""


@pytest.mark.parametrize("notices", ["in a test", "at the end"])
def test_what_starts_while_the_forkserver_is_lost_ends_too(notices):
    """Each has a parent that has not yet been killed, and some have no environment yet."""
    server = team.ForkServer([], live_output=False)
    environ = {**os.environ, team.FOLDER_VARIABLE: str(server.folder)}
    with subprocess.Popen([sys.executable, "-S", "-c", STARTS_MANY], env=environ):
        time.sleep(0.2)
        server._process.kill()
        server._process.wait()
        if notices == "in a test":
            while server.alive:
                server.pump(0.1)
        else:
            server.close()
    time.sleep(0.1)
    left = subprocess.run(["pgrep", "-f", "sleep 606"], capture_output=True, text=True)
    subprocess.run(["pkill", "-f", "sleep 606"])
    server.close()
    assert left.stdout == ""


HOLDS_A_FOLDER = """
import sys, time
from pathlib import Path
from pytest_gtrainer.ranks.team import ForkServer

server = ForkServer([], live_output=False)
print(server.folder, flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path: Path):
    """Its folder stays while the run lives, and goes with the next run once it and its forkserver
    have been killed.
    """
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDS_A_FOLDER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as run:
        folder = Path(run.stdout.readline().strip())
        (forkserver,) = (
            int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        )
        # The forkserver first: it would remove the folder itself. Wait for its end, since it holds
        # the lock until then.
        forkserver_ends = os.pidfd_open(forkserver)
        os.kill(forkserver, signal.SIGKILL)
        assert select.select([forkserver_ends], [], [], 60.0)[0]
        os.close(forkserver_ends)
        sweep_folders_of_killed_runs(tmp_path)
        assert folder.is_dir(), "the folder of a run that lives"
        run.kill()
        run.wait()
        assert folder.is_dir(), "nobody has removed it: this test shows something"
        sweep_folders_of_killed_runs(tmp_path)
        assert not folder.exists()


def test_a_folder_is_not_swept_while_its_run_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another run may start between any two steps."""
    folder = tmp_path / "gtrainer-x"
    folder.mkdir()
    lock = fcntl.flock

    def swept_before(file: object, how: int) -> None:
        if how == fcntl.LOCK_SH:
            sweep_folders_of_killed_runs(tmp_path)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", swept_before)
    owner = lock_folder(folder)
    sweep_folders_of_killed_runs(tmp_path)
    assert folder.is_dir()
    os.close(owner)
    sweep_folders_of_killed_runs(tmp_path)
    assert not folder.exists(), "the twin: its owner has gone"


@pytest.mark.parametrize("kept", ["no lock file", "a held lock", "another name"])
def test_other_folders_are_not_touched(tmp_path: Path, kept: str):
    folder = tmp_path / ("gtrainer-x" if kept != "another name" else "other-x")
    folder.mkdir()
    if kept == "no lock file":
        (folder / "content").touch()
        sweep_folders_of_killed_runs(tmp_path)
    elif kept == "another name":
        (folder / OWNER_LOCK).touch()
        sweep_folders_of_killed_runs(tmp_path)
    else:
        with (folder / OWNER_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            sweep_folders_of_killed_runs(tmp_path)
            assert folder.is_dir()
        sweep_folders_of_killed_runs(tmp_path)
        assert not folder.exists(), "the twin: the same folder, whose owner has gone"
        return
    assert folder.is_dir()
