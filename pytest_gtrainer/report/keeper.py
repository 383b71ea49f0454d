"""Run a command in a git worktree, and remove the worktree however pytest ends.

A script that imports nothing of the package: ``python keeper.py TOP COMMIT FOLDER CWD COMMAND...``.
It is a process of its own because pytest may be killed, and nobody else would then remove the
worktree. The end of its standard input is the end of pytest. When the command has ended, the keeper
writes its exit status, and keeps its files until the end of standard input.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PATIENCE = 10.0  # seconds for pytest to end its ranks


def main(top: str, commit: str, folder: str, cwd: str, *command: str) -> None:
    """Check ``commit`` out below ``folder``, run ``command`` there, and remove all of it."""
    tree = Path(folder, "tree")
    # A hook of the repository is for the user's checkouts.
    worktree = ["git", "-C", top, "-c", "core.hooksPath=/dev/null", "worktree"]
    try:
        subprocess.run([*worktree, "add", "--detach", "--quiet", tree, commit], check=True)
        with Path(folder, "output").open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=tree / cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pytest_ended = threading.Event()
        threading.Thread(target=_end_with_pytest, args=(child, pytest_ended), daemon=True).start()
        status = child.wait()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what its tests have left running
        try:
            print(status, flush=True)
        except BrokenPipeError:
            # The interpreter would flush again at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        pytest_ended.wait()
    finally:
        # Not "prune", which forgets worktrees of the user whose disk is not mounted.
        subprocess.run([*worktree, "remove", "--force", tree], stderr=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_pytest(child: subprocess.Popen[bytes], pytest_ended: threading.Event) -> None:
    sys.stdin.read()
    for number in (signal.SIGINT, signal.SIGKILL):
        if child.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(PATIENCE)
    pytest_ended.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
