"""T: breakpoints, --pdb and --trace on ranks, through a real terminal."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pexpect
import pytest

pytestmark = pytest.mark.second_tier

BESIDE = Path(sys.prefix) / "beside"  # where `make env` installs pytest-timeout
LIMIT = 300  # of waiting for a prompt on a busy machine


class Session:
    """A pytest run in a terminal of its own."""

    def __init__(self, suite, *args: str, path: str = "") -> None:
        suite.take("ranks_debugged")
        environ = {
            **os.environ,
            "TMPDIR": str(suite.folder / "tmp"),
            "RECORDS": str(suite.records),
            "TERM": "dumb",
        }
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environ.get("PYTHONPATH")]))
        environ = {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}
        command = [
            "-m",
            "pytest",
            f"--rootdir={suite.folder}",
            "--gt-device=cpu",
            "--gt-gpus=2",
            *args,
        ]
        self.child = pexpect.spawn(
            sys.executable,
            command,
            cwd=suite.folder,
            env=environ,
            timeout=LIMIT,
            encoding="utf8",
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # a job in the background ignores it
        )

    def prompt(self, rank: int | str = r"\d") -> int:
        """Wait for a rank's prompt: its rank."""
        self.child.expect(rf"\(Pdb rank ({rank})\) ")
        return int(self.child.match[1])

    def say(self, text: str, answer: str = "") -> None:
        self.child.sendline(text)
        self.child.expect(answer)

    def end(self) -> str:
        """The rest of the output."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.before


def test_ranks_take_turns_at_a_breakpoint(suite):
    """The clock is held meanwhile; Ctrl-C at a prompt ends nothing."""
    run = Session(suite, "-k", "stops_on_both")
    first = run.prompt()
    run.say("p mine", f"{10 + first}")
    run.child.sendintr()
    run.child.expect("KeyboardInterrupt")
    run.prompt(first)
    run.say("c")
    run.prompt(1 - first)
    run.say("p mine", f"{11 - first}")
    run.say("c")
    assert "1 passed" in run.end()


def test_one_rank_is_chosen(suite):
    run = Session(suite, "-k", "stops_on_both or stops_on_one or at_the_third", "--gt-pdb-rank=1")
    for _ in range(2):
        run.prompt(1)
        run.say("c")
    run.prompt(1)
    run.say("p turn", "2")  # dist.breakpoint(skip=2), in the frame that calls it
    run.prompt(1)
    run.say("n", "assert turn < 3")
    run.prompt(1)
    run.say("c")
    assert "3 passed" in run.end()


def test_the_first_rank_that_fails_is_examined(suite):
    run = Session(suite, "-k", "fails_on_one or after_that", "--pdb")
    run.child.expect("assert mine == 30")
    run.prompt(1)
    run.say("p mine", "31")
    run.say("c")
    rest = run.end()
    assert "1 failed, 1 passed" in rest
    assert "rank 1: AssertionError: assert 31 == 30" in rest


@pytest.mark.parametrize("how", ["quit", "end of input"])
def test_quitting_ends_the_run(suite, how):
    run = Session(suite, "-k", "stops_on_one or after_that")
    run.prompt(1)
    run.child.sendline("q") if how == "quit" else run.child.sendeof()
    rest = run.end()
    assert "Quitting debugger" in rest
    assert "1 failed" in rest
    assert "passed" not in rest
    assert suite.left_over() == []


def test_quitting_in_a_function_on_ranks_ends_the_run(suite):
    run = Session(suite, "-k", "function_stops or after_that", "--gt-pdb-rank=1")
    run.prompt(1)
    run.say("p mine", "51")
    run.child.sendline("q")
    rest = run.end()
    assert "Exit: Quitting debugger" in rest
    assert "passed" not in rest


def test_a_person_may_take_longer_than_the_limit(suite):
    """6 s at the prompt do not count against a limit of 5, nor against one of pytest-timeout."""
    run = Session(
        suite, "-k", "has_little_time", "-p", "no:randomly", "--timeout=5", path=str(BESIDE)
    )
    run.prompt(1)
    time.sleep(6)
    run.say("c")
    assert "1 passed" in run.end()


def test_the_chosen_rank_alone_is_examined(suite):
    run = Session(suite, "-k", "fails_on_one or after_that", "--pdb", "--gt-pdb-rank=1")
    run.prompt(1)
    run.say("p mine", "31")
    run.say("c")
    assert "1 failed, 1 passed" in run.end()


def test_trace_stops_at_the_first_line(suite):
    run = Session(suite, "-k", "test_traced", "--trace", "--gt-pdb-rank=0")
    run.prompt(0)
    run.say("n")
    run.prompt(0)
    run.say("p mine", "40")
    run.say("c")
    assert "1 passed" in run.end()


def test_without_a_terminal_the_way_is_said(suite):
    """Pytest itself refuses --pdb with workers; a breakpoint is met in one."""
    suite.take("ranks_debugged")
    run = suite.run("-n1", "--gt-gpus=2", "-k", "stops_on_both")
    assert "run it with -n0: pytest test_debugged.py::test_stops_on_both" in run.text(
        "test_stops_on_both"
    )


@pytest.mark.parametrize(("hook", "said"), [("0", ""), ("test_debugged.say_so", "mine is 11 here")])
def test_another_breakpoint_is_python_s(suite, hook, said):
    """``PYTHONBREAKPOINT`` works in ranks as elsewhere: it switches breakpoints off, or calls what
    it names there.
    """
    suite.take("ranks_debugged")
    run = suite.run("-s", "--gt-gpus=2", "-k", "stops_on_both", environ={"PYTHONBREAKPOINT": hook})
    assert run.outcome("test_stops_on_both") == "passed"
    assert said in run.output


def test_output_carries_its_rank(suite):
    suite.take("ranks_debugged")
    output = suite.run("-s", "--gt-gpus=2", "-k", "after_that").output
    for rank in range(2):
        assert f"[rank {rank}] I am {rank}\n" in output
        parts = re.findall(
            rf"^\[rank {rank}\] ([xy]+)$", output, re.MULTILINE
        )  # a pipe takes 4 KiB at once
        assert [len(part) for part in parts] == [4000, 4000, 2000]
        assert "".join(parts) == "x" * 9000 + "y" * 1000
