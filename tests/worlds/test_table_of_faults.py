"""T: faults on 4 and on 8 ranks, what the report must say, and after how many seconds.

``pytest -s -m long`` of this file prints the table.
Seconds are from the moment of the fault to the report; nothing is asserted of them.
"""

import re

import pytest

from tests.worlds.conftest import Suite

SUITE = """
import ctypes, os, signal, sys, time
import pytest
from late import dist, torch

SIZE, LIMIT = {size}, 4


def now(rank=1):
    "The moment of the fault: whether this is the rank at fault."
    if dist.get_rank() != rank: return False
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split()[0]
    with open("moments", "a") as file: print(name, time.monotonic(), file=file)
    return True

def reduce(*shape, dtype=torch.float32): dist.all_reduce(torch.ones(*shape or (1,), dtype=dtype))

def fault(function):
    limit = LIMIT if function.__name__ in LIMITED else 300
    return pytest.mark.gt_world("ranks", size=SIZE, timeout=limit)(function)

LIMITED = ("test_sleeps", "test_is_stopped", "test_holds_the_gil")

@fault
def test_warms_up(): reduce()
@fault
def test_raises():
    if now(): raise ValueError("only here")
    reduce()
@fault
def test_all_raise(): now(); raise ValueError("everywhere")
@fault
def test_is_killed():
    if now(): os.kill(os.getpid(), signal.SIGKILL)
    reduce()
@fault
def test_reads_address_0():
    if now(): ctypes.string_at(0)
    reduce()
@fault
def test_exits():
    if now(): os._exit(3)
    reduce()
@fault
def test_exits_python():
    if now(): sys.exit("enough")
    reduce()
@fault
def test_exits_pytest():
    if now(): pytest.exit("no more")
    reduce()
@fault
def test_waits_alone():
    if now(): reduce(3)
@fault
def test_all_wait_for_one():
    if not now(): reduce()
@fault
def test_skips_a_collective():
    if not now(): reduce(2)
    dist.barrier()
@fault
def test_another_shape(): reduce(6 if now() else 4)
@fault
def test_another_dtype(): reduce(4, dtype=torch.float64 if now() else torch.float32)
@fault
def test_another_collective():
    if now(): return dist.barrier()
    reduce(4)
@fault
def test_waits_alone_in_a_subgroup():
    group = dist.new_group([0, 1])
    if now(): dist.all_reduce(torch.ones(1), group=group)
@fault
def test_receives_what_nobody_sends():
    if now(): dist.recv(torch.ones(1), src=0)
@fault
def test_counts_differ():
    if now(): dist.all_reduce(torch.ones(1), async_op=True)
@fault
def test_skips_on_one():
    if now(): pytest.skip("not me")
    reduce()
@fault
def test_sleeps():
    if now(): time.sleep(600)
    reduce()
@fault
def test_holds_the_gil():
    if now(): ctypes.PyDLL(None).sleep(600)
    reduce()
@fault
def test_is_stopped():
    if now(): os.kill(os.getpid(), signal.SIGSTOP)
    reduce()

@pytest.fixture
def broken(): assert not now(), "the fixture broke"
@fault
def test_setup_fails(broken): reduce()
@pytest.fixture
def breaks():
    yield
    assert not now(), "the end broke"
@fault
def test_teardown_fails(breaks): reduce()
@fault
def test_good_at_the_end(): reduce()
"""

OTHERS = {4: "ranks 0, 2, 3", 8: "ranks 0, 2-7"}
# test: what the report says, {others} being all ranks but 1
TABLE = {
    "test_raises": "rank 1: ValueError: only here\n{others}: waited in all_reduce",
    "test_all_raise": "ValueError: everywhere",
    "test_is_killed": "rank 1 was killed by SIGKILL",
    "test_reads_address_0": "rank 1 was killed by SIGSEGV",
    "test_exits": "rank 1 exited with status 3",
    "test_exits_python": "rank 1: SystemExit: enough",
    "test_exits_pytest": "rank 1: called pytest.exit: no more",
    "test_waits_alone": "rank 1 waits in all_reduce of float32[3] at {line} on all ranks: "
    "{others} ended without it",
    "test_all_wait_for_one": "{others} wait in all_reduce of float32[1] at {line} on all ranks: "
    "rank 1 ended without",
    "test_skips_a_collective": "rank 1 called barrier at {line}, "
    "{others} called all_reduce of float32[2] at {line}",
    "test_another_shape": "rank 1 called all_reduce of float32[6] at {line}, "
    "{others} called all_reduce of float32[4]",
    # gloo ends another rank, too
    "test_another_dtype": "rank 1 called all_reduce of float64[4] at {line}, ranks",
    "test_another_collective": "rank 1 called barrier at {line}, "
    "{others} called all_reduce of float32[4] at {line}",
    "test_waits_alone_in_a_subgroup": "rank 1 waits in all_reduce of float32[1] at {line} "
    "on ranks 0, 1: rank 0 ended",
    "test_receives_what_nobody_sends": "rank 1 is alone, waiting in recv: "
    "all other ranks have ended",
    "test_counts_differ": "different numbers of collectives on all ranks: 0 ({others}), 1 (rank 1)",
    "test_skips_on_one": "the ranks do not agree: waited in all_reduce ({others}), "
    "skipped: not me (rank 1)",
    "test_sleeps": "rank 1 did not end within 4 s, at {line}",
    "test_holds_the_gil": "rank 1 did not end within 4 s",
    "test_is_stopped": "rank 1 did not end within 4 s, stopped by a signal, as SIGSTOP is one",
    "test_setup_fails": "rank 1: AssertionError: the fixture broke",
    "test_teardown_fails": "rank 1: AssertionError: the end broke",
}
PASSES = {"test_warms_up", "test_good_at_the_end"}
LINE = re.compile(r"test_it.py:\d+ in \w+")


@pytest.mark.long
@pytest.mark.parametrize("size", OTHERS)
def test_table(size, tmp_path):
    suite = Suite(tmp_path / "suite")
    suite.write("test_it.py", SUITE.replace("{size}", str(size)))
    run = suite.run(f"--gt-gpus={size}")
    moments = dict(line.split() for line in (suite.folder / "moments").read_text().splitlines())
    wrong = {}
    print(f"\n| at {size} ranks | expected | seen | seconds |\n|---|---|---|---|")
    for name, said in TABLE.items():
        expected = said.format(others=OTHERS[size], line="LINE")
        text, failed = LINE.sub("LINE", run.text(name)), run.outcome(name) in ("failed", "error")
        seen = failed and all(line in text for line in expected.splitlines())
        reported = min(
            each["reported"]
            for each in run.reports[name].values()
            if each["outcome"] == "failed" or not failed
        )
        shown = expected.replace("\n", "; ").replace("LINE", "its line")
        what, seconds = "the same" if seen else text[-300:], reported - float(moments[name])
        print(f"| {name[5:].replace('_', ' ')} | {shown} | {what} | {seconds:.2f} |")
        if not seen:
            wrong[name] = run.text(name)
    assert {name for name in run.reports if run.outcome(name) == "passed"} == PASSES
    assert set(run.reports) == PASSES | set(TABLE)
    assert wrong == {}
    assert run.left_over() == []
