"""Leases on slots: all or nothing, disjoint, larger worlds first, freed when their holder dies."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from pytest_gtrainer import devices
from pytest_gtrainer.devices import Gpu, confined
from pytest_gtrainer.ranks import leases
from pytest_gtrainer.ranks.leases import LeaseError, Slots
from pytest_gtrainer.ranks.pool import GpuSharing

NAMES = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
SOON = 20.0

HOLDER = """
import sys, time
from pathlib import Path
from pytest_gtrainer.ranks.leases import Slots
slots = Slots(Path(sys.argv[1]), sys.argv[3:])
lease = slots.acquire(int(sys.argv[2]), 10, "tests/test_a.py::test_b")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def slots(tmp_path):
    return Slots(tmp_path / "leases", NAMES)


@pytest.fixture
def other_process(tmp_path):
    """Another process that holds some of the slots."""
    started = []

    def start(count):
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "leases"), str(count), *NAMES]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def in_background(function, *args):
    """The results of a call in a thread, and the thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)), daemon=True)
    thread.start()
    return results, thread


def until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_leases_are_disjoint(slots, other_process):
    other_process(3)
    assert slots.acquire(1, SOON).slots == ("GPU-d",)


def test_all_or_nothing(slots):
    """A lease that cannot be had whole leaves what is free to others."""
    held = slots.acquire(2, SOON)
    with pytest.raises(LeaseError):
        slots.acquire(3, 0.1)
    rest = slots.acquire(2, SOON)
    assert {*held.slots, *rest.slots} == {*NAMES}


def test_who_waits_in_vain_is_told_who_holds(slots, other_process):
    process = other_process(4)
    with pytest.raises(LeaseError) as failure:
        slots.acquire(2, 0.1)
    message = str(failure.value)
    assert "waited 0.1 s for 2 of 4 slots (GPU-a, GPU-b, GPU-c, GPU-d)" in message
    assert f"GPU-a by process {process.pid} (tests/test_a.py::test_b)" in message
    assert "--gt-lease-timeout" in message


def test_a_lease_ends_with_its_holder(slots, other_process):
    """A stale lease after kill -9."""
    process = other_process(4)
    process.kill()
    process.wait()
    assert slots.acquire(4, SOON).slots == NAMES


def test_who_dies_in_the_middle_of_a_grab_leaves_nothing(slots, tmp_path):
    """Killed while it holds the line, a place in it, and has just taken all slots."""
    grabber = """
import os, signal, sys
from pathlib import Path
from pytest_gtrainer.ranks import leases
slots, write = leases.Slots(Path(sys.argv[1]), sys.argv[2:]), leases._write

def killed(file, place):
    write(file, place)
    if place.slots: os.kill(os.getpid(), signal.SIGKILL)

leases._write = killed
slots.acquire(4, 10)
"""
    killed = subprocess.run([sys.executable, "-c", grabber, str(tmp_path / "leases"), *NAMES])
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "leases" / "line").iterdir())) == 1
    assert slots.acquire(4, SOON).slots == NAMES
    assert not slots.wanted()


def test_grabs_of_many_at_once(tmp_path):
    """All or nothing, disjoint, and nobody waits for ever: threads with slots of their own stand
    for processes.
    """
    held, twice, guard = set(), [], threading.Lock()

    def grab(size):
        slots = Slots(tmp_path / "leases", NAMES)
        for _ in range(4):
            lease = slots.acquire(size, 2 * SOON)
            with guard:
                twice.extend(held & {*lease.slots})
                held.update(lease.slots)
            time.sleep(0.005)
            with guard:
                held.difference_update(lease.slots)
            lease.release()
        return size

    grabbing = [in_background(grab, size) for size in (4, 3, 2, 2, 1, 1)]
    for _, thread in grabbing:
        thread.join(4 * SOON)
    assert [results for results, _ in grabbing] == [[4], [3], [2], [2], [1], [1]]
    assert twice == []


def test_who_wants_other_slots_is_not_waited_for(tmp_path):
    """Two runs confined to different GPUs of a machine; a third one that sees one of each."""
    left, right = (Slots(tmp_path / "leases", names) for names in (NAMES[:2], NAMES[2:]))
    both = Slots(tmp_path / "leases", NAMES[1:3])
    held = left.acquire(1, SOON)
    larger, waiting = in_background(left.acquire, 2, SOON)
    until(left.wanted)
    assert not right.wanted()
    assert both.wanted()
    right.acquire(1, 0.1).release()
    with pytest.raises(
        LeaseError, match=rf"held are: none; before it in line: process {os.getpid()} for 2; "
    ):
        both.acquire(1, 0.1)
    held.release()
    waiting.join(SOON)
    assert larger[0].slots == NAMES[:2]


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    """Its links could lead anywhere."""
    (tmp_path / "leases").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(
        LeaseError, match=r"leases, .*, belongs to user \d+: remove it, or set TMPDIR"
    ):
        Slots(tmp_path / "leases", NAMES)


def test_a_place_in_line_ends_with_its_holder(slots, other_process):
    held = slots.acquire(1, SOON)
    command = [sys.executable, "-c", HOLDER, str(slots._folder), "4", *NAMES]
    waiting = subprocess.Popen(command)
    until(slots.wanted)
    waiting.kill()
    waiting.wait()
    assert not slots.wanted()
    assert slots.acquire(3, SOON).slots == NAMES[1:]
    held.release()


def test_larger_worlds_come_first(slots):
    """A small world that came later does not take what a large one waits for."""
    held = slots.acquire(1, SOON)
    large, waiting_large = in_background(slots.acquire, 4, SOON)
    until(slots.wanted)
    small, waiting_small = in_background(slots.acquire, 1, SOON)
    time.sleep(0.2)
    assert not small
    held.release()
    waiting_large.join(SOON)
    assert len(large) == 1
    assert not small
    large[0].release()
    waiting_small.join(SOON)
    assert len(small) == 1


def test_more_than_there_are(slots):
    with pytest.raises(ValueError, match="5 slots were asked for, there are 4"):
        slots.acquire(5, SOON)


def test_gpus_are_kept_until_somebody_waits(slots):
    """Between tests too: whoever waits may wait for a worker that has nothing to do."""
    stopped = []
    entries = {name: str(index) for index, name in enumerate(NAMES)}
    sharing = GpuSharing(slots, entries, SOON, lambda: stopped.append(True), print)
    with sharing.for_test(2, "test_a"):
        assert sharing.environment() == {
            "CUDA_VISIBLE_DEVICES": "0,1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    with sharing.for_test(2, "test_b"):
        pass
    assert not stopped
    assert slots.acquire(4, SOON).slots == NAMES
    assert stopped == [True]
    sharing.close()


def test_gpus_for_a_larger_world_are_asked_for_anew(slots):
    """Holding some while waiting for more, two workers could wait for each other."""
    stopped = []
    sharing = GpuSharing(
        slots, dict(zip(NAMES, "0123", strict=True)), SOON, lambda: stopped.append(True), print
    )
    with sharing.for_test(1, "test_a"):
        pass
    with sharing.for_test(4, "test_b"):
        assert stopped == [True]
        assert sharing.environment()["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    sharing.close()
    assert slots.acquire(4, 0.1).slots == NAMES


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_gpus_are_given_back_though_ranks_cannot_be_stopped(slots):
    """Between tests by a thread, which the next test replaces; at the end by the run."""
    stopped = []

    def fail() -> None:
        stopped.append(True)
        raise OSError("ranks cannot be stopped")

    entries = dict(zip(NAMES, "0123", strict=True))
    sharing = GpuSharing(slots, entries, SOON, fail, print)
    for turn in (1, 2):
        with sharing.for_test(2, "test_a"):
            pass
        lease = slots.acquire(4, SOON)
        assert lease.slots == NAMES
        assert len(stopped) == turn
        lease.release()
    with sharing.for_test(2, "test_b"):
        pass
    with pytest.raises(OSError, match="cannot be stopped"):
        sharing.close()
    assert slots.acquire(4, SOON).slots == NAMES


def test_gpus_are_those_that_the_caller_may_use():
    """Indices and UUIDs, in the order of the variable."""
    uuids = ["GPU-aa", "GPU-ab", "GPU-cc"]
    assert confined(uuids, "2,GPU-aa") == (Gpu("2", "GPU-cc"), Gpu("GPU-aa", "GPU-aa"))
    assert confined(uuids, None) == (Gpu("0", "GPU-aa"), Gpu("1", "GPU-ab"), Gpu("2", "GPU-cc"))
    assert confined(uuids, "0,7,1") == (Gpu("0", "GPU-aa"),)
    assert confined(uuids, "GPU-a,1") == ()


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        ("0,0", ["0"]),
        ("0,0,1", ["0"]),
        ("2,0,2,1", ["2", "0"]),
        ("1, 01 ,0", ["1"]),
        ("GPU-ab,GPU-ab,0", ["GPU-ab"]),
        ("GPU-c,GPU-cc,0", ["GPU-c"]),
        ("GPU-cc,GPU-c,0", ["GPU-cc"]),
        ("1,GPU-ab,0", ["1"]),
        ("GPU-ab,1,0", ["GPU-ab"]),
        ("MIG-a,MIG-a,0", ["MIG-a"]),
        ("MIG-a,0,MIG-b,0,1", ["MIG-a", "0", "MIG-b"]),
    ],
)
def test_the_list_ends_where_a_gpu_is_named_again(visible, left):
    """By its index, its UUID or the beginning of it, or by another of these."""
    assert [gpu.entry for gpu in confined(["GPU-aa", "GPU-ab", "GPU-cc"], visible)] == left


MIXED = [("GPU-aa", "small"), ("GPU-ab", "large")]


def test_which_gpus_of_several_kinds_an_index_means_is_not_guessed(monkeypatch):
    """CUDA counts the fastest kind first and NVML does not, so ranks are set to count as NVML."""
    monkeypatch.setattr(devices, "_nvml_gpus", lambda: MIXED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    with pytest.raises(
        pytest.UsageError, match=r"=1 counts GPUs of several kinds \(small, large\).*PCI_BUS_ID"
    ):
        devices.visible_gpus()
    assert devices.visible_gpus(to_lease=False) == (Gpu("1", "GPU-ab"),)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert devices.visible_gpus() == (Gpu("1", "GPU-ab"),)


@pytest.mark.parametrize("visible", ["GPU-ab,GPU-aa", "", None])
def test_gpus_of_several_kinds_are_told_apart_without_an_index(monkeypatch, visible):
    monkeypatch.setattr(devices, "_nvml_gpus", lambda: MIXED)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = {"GPU-ab,GPU-aa": ["GPU-ab", "GPU-aa"], "": [], None: ["GPU-aa", "GPU-ab"]}[visible]
    assert [gpu.uuid for gpu in devices.visible_gpus()] == found


def test_equal_gpus_may_be_counted(monkeypatch):
    monkeypatch.setattr(devices, "_nvml_gpus", lambda: [("GPU-aa", "one"), ("GPU-ab", "one")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert [gpu.uuid for gpu in devices.visible_gpus()] == ["GPU-ab", "GPU-aa"]


def test_who_waits_for_long_says_so(slots, other_process, monkeypatch):
    process = other_process(4)
    monkeypatch.setattr(leases, "LINE_EVERY", 0.1)
    lines = []

    def write(text):
        lines.append(text)
        process.kill()

    assert slots.acquire(2, SOON, "test_it.py::test_b", write).slots == ("GPU-a", "GPU-b")
    waited = (
        r"test_it.py::test_b has waited \d\S* s for 2 of 4 slots .*, held are: GPU-a by process "
        r"\d+ "
    )
    assert re.match(waited, lines[0])


def test_a_line_about_the_wait_comes_once_in_each_interval(slots, other_process, monkeypatch):
    process = other_process(4)
    monkeypatch.setattr(leases, "LINE_EVERY", 0.1)
    lines = []

    def write(text):
        lines.append(float(re.search(r"has waited (\S+) s", text)[1]))
        if len(lines) == 4:
            process.kill()

    assert slots.acquire(2, SOON, "test_it.py::test_b", write).slots == ("GPU-a", "GPU-b")
    for earlier, later in itertools.pairwise([0.0, *lines[:4]]):
        # Three digits are written.
        assert later - earlier > 0.08, f"lines came after {lines} s, one in each 0.1 s is due"


@pytest.mark.parametrize("required", ["ranks", "cuda"])
def test_what_is_required_is_not_skipped(pytester, required):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.gt_world("ranks", size=64)
        def test_large(): pass
        @pytest.mark.gt_world("ranks", size=2, device="cuda")
        def test_on_gpus(): pass
        """
    )
    # On the command line both would exclude each other.
    pytester.makeini("[pytest]\ngt_device = cpu")
    result = pytester.runpytest_inprocess(f"--gt-require={required}", "--gt-gpus=4")
    result.assert_outcomes(errors=1, skipped=1) if required == "ranks" else result.assert_outcomes(
        errors=2
    )
    result.stdout.fnmatch_lines(
        ["needs 64 ranks, --gt-gpus gives 4: --gt-gpus=64 lets it run, and --gt-require=*"]
    )
