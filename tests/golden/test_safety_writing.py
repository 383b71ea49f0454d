"""Replacing goldens: killed, refused by the system, many at once; a file is always the old or the
new one.
"""

import builtins
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from pytest_gtrainer.golden import store
from tests.golden.conftest import QUICK

pytestmark = pytest.mark.second_tier

# One test for each of 200 goldens; the process kills itself at the given fsync (two a golden).
MANY = """
import itertools, os, signal
import pytest

deadly, calls, fsync = int(os.environ.get("DEADLY", -1)), itertools.count(), os.fsync

def counted(handle):
    if next(calls) == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)

os.fsync = counted

@pytest.mark.parametrize("x", range(200))
def test_a(gt_golden, x):
    gt_golden.check(f"new {x}\\n" * 2000)
"""


def text(state: str, number: int) -> str:
    return f"{state} {number}\n" * 2000


def states(folder: Path) -> dict[str, int]:
    """Count old goldens, new goldens and other files."""
    counts: dict[str, int] = {}
    for file in folder.iterdir():
        number = int(found[1]) if (found := re.fullmatch(r"test_a-(\d+)\.txt", file.name)) else -1
        content = file.read_text()
        whole = next(
            (state for state in ("old", "new") if content == text(state, number)), "neither"
        )
        what = (
            whole
            if number >= 0
            else "temporary"
            if store._TEMPORARY.fullmatch(file.name)
            else file.name
        )
        counts[what] = counts.get(what, 0) + 1
    return counts


@pytest.mark.parametrize(
    "deadly", [100, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 1, 123, 199))]
)
def test_killed_in_the_middle_of_200_every_golden_is_old_or_new(run, pytester, monkeypatch, deadly):
    folder = pytester.path / "golden/test_it"
    folder.mkdir(parents=True)
    for number in range(200):
        (folder / f"test_a-{number}.txt").write_text(text("old", number))
    monkeypatch.setenv("DEADLY", str(deadly))
    assert run(MANY, "--gt-update-goldens").ret == -signal.SIGKILL
    expected = {"old": 200 - deadly, "new": deadly, "temporary": 1}
    assert states(folder) == {what: count for what, count in expected.items() if count}
    (left,) = folder.glob(".gt-*.tmp")
    os.utime(left, (time.time() - 100,) * 2)
    monkeypatch.delenv("DEADLY")
    result = run(None, "--gt-update-goldens")
    result.assert_outcomes(passed=200)
    assert states(folder) == {"new": 200}  # the next writer in the folder clears up


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """Whole: a file is synchronised before it is renamed."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def told_fsync(handle: int) -> None:
        done.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        fsync(handle)

    def told_replace(old: Path, new: Path) -> None:
        done.append("replace " + os.path.relpath(new, tmp_path))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "replace", told_replace)
    store.write(tmp_path / "golden/t/g", tmp_path, "one\n")
    found = [re.sub(r"\.gt-\w+\.tmp", "TEMPORARY", step) for step in done]
    assert found == ["fsync golden/t/TEMPORARY", "replace golden/t/g"]


STEPS = [(builtins, "open"), (os, "fsync"), (os, "replace")]


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EROFS, "Read-only file system"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize(("module", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, module, step, number, way_out
):
    golden = tmp_path / "golden/g"
    store.write(golden, tmp_path, "old\n")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(module, step, fail)
        with pytest.raises(store.GoldenFileError) as error:
            store.write(golden, tmp_path, "new\n")
    assert str(error.value) == f"golden/g was not written: {way_out}"
    assert {path.name: path.read_text() for path in golden.parent.iterdir()} == {"g": "old\n"}


def python(code: str, *arguments: object) -> int:
    """Run code that has ``golden``, ``root`` and ``store`` in a process of its own."""
    head = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from pytest_gtrainer.golden import store\n"
    )
    head += "golden, root = Path(sys.argv[1]), Path(sys.argv[2])\n"
    return subprocess.run(
        [sys.executable, "-c", head + code, *map(str, arguments)], timeout=60
    ).returncode


def test_removing_takes_a_golden_and_empty_folders_and_nothing_out_of_the_tree(tmp_path):
    root, outside = tmp_path / "project", tmp_path / "outside"
    for file in (root / "golden/a/b/one", root / "golden/a/two", outside / "three"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x\n")
    (root / "golden/link").symlink_to(outside / "three")
    (root / "golden/folder").symlink_to(outside)
    for name in ("a/b/one", "link", "missing"):
        store.remove(root / "golden" / name, root)
    assert sorted(path.name for path in (root / "golden").iterdir()) == ["a", "folder"]
    assert [path.name for path in (root / "golden/a").iterdir()] == ["two"]
    with pytest.raises(store.GoldenFileError) as error:
        store.remove(root / "golden/folder/three", root)
    assert (
        str(error.value)
        == "golden/folder/three was not removed: it lies out of the tree, behind a link"
    )
    assert (outside / "three").exists()


def test_a_limit_of_the_file_size_is_one_sentence(tmp_path):
    golden = tmp_path / "golden/g"
    store.write(golden, tmp_path, "old\n")
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.write(golden, root, "x" * 2000)
except store.GoldenFileError as error:
    sentence = "golden/g was not written: File too large"
    assert str(error) == sentence, error
    raise SystemExit(7)
"""
    assert python(code, golden, tmp_path) == 7
    assert {path.name: path.read_text() for path in golden.parent.iterdir()} == {"g": "old\n"}


def test_a_temporary_of_a_killed_writer_goes_after_a_minute(tmp_path):
    golden = tmp_path / "golden/g"
    dying = (
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.write(golden, root, 'half')\n"
    )
    assert python(dying, golden, tmp_path) == -signal.SIGKILL
    (left,) = golden.parent.iterdir()
    store.write(golden, tmp_path, "whole\n")
    assert sorted(golden.parent.iterdir()) == sorted([golden, left])
    os.utime(left, (time.time() - 70,) * 2)
    store.write(golden, tmp_path, "whole\n")
    assert list(golden.parent.iterdir()) == [golden]


def test_a_lock_that_another_run_keeps_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.1)
    held = threading.Event()
    let_go = threading.Event()

    def hold() -> None:
        with store._sole_writer(tmp_path / "other", tmp_path):
            held.set()
            let_go.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(30)
        with pytest.raises(
            store.GoldenFileError,
            match=r"^g was not written: another run has held the lock .*: let",
        ):
            store.write(tmp_path / "g", tmp_path, "x\n")
    finally:
        let_go.set()
        holder.join()
    assert list(tmp_path.iterdir()) == []


def test_writers_of_one_file_leave_one_whole_text(tmp_path):
    texts = [str(number) * 100_000 + "\n" for number in range(8)]
    writers = [
        threading.Thread(target=store.write, args=(tmp_path / "g", tmp_path, text))
        for text in texts
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "g").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def add_line(file: Path) -> None:
    store.write(file, file.parent, "first\n", merge=lambda golden: golden + "next\n")


def extend(file: Path) -> None:
    store.rewrite(file, file.parent, lambda old: old + b"next\n")


@pytest.mark.parametrize("add", [add_line, extend])
def test_no_change_of_a_file_is_lost_between_reading_and_writing(tmp_path, add):
    file = tmp_path / "lines"
    if add is extend:
        file.write_text("first\n")
    calls = 80 if add is add_line else 79

    def work(own: int) -> None:
        for _ in range(own, calls, 4):
            add(file)

    workers = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert file.read_text().splitlines() == ["first"] + 79 * ["next"]


@pytest.mark.parametrize(
    ("workers", "goldens_each"),
    [
        pytest.param(2, 20, id="short"),
        pytest.param(8, 200, id="long", marks=pytest.mark.long),
    ],
)
def test_two_runs_of_many_workers_at_once_lose_nothing(pytester, goldens, workers, goldens_each):
    """Each run has its own test file, and both have one in common."""
    pytester.makeini("[pytest]")
    source = f"""
        import pytest
        @pytest.mark.parametrize("x", range({goldens_each}))
        def test_a(gt_golden, x):
            gt_golden.check(f"text {{x}}")
        """
    names = ("one", "both", "two")
    pytester.makepyfile(**{f"test_{name}": source for name in names})
    processes = [
        pytester.popen(
            [
                sys.executable,
                "-m",
                "pytest",
                *QUICK,
                f"-n{workers}",
                "--basetemp",
                pytester.path / f"temp_{own}",
                f"test_{own}.py",
                "test_both.py",
                "--gt-update-goldens",
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        for own in ("one", "two")
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()
        assert f"{2 * goldens_each} passed" in output.decode()
    expected = {
        f"test_{name}/test_a-{x}.txt": f"text {x}\n" for name in names for x in range(goldens_each)
    }
    assert goldens() == expected


@pytest.mark.parametrize(("umask", "before", "mode"), [(0o022, None, 0o644), (0o022, 0o600, 0o600)])
def test_a_new_golden_may_be_read_by_others_and_an_old_one_keeps_its_mode(
    tmp_path, umask, before, mode
):
    if before is not None:
        (tmp_path / "g").touch(before)
    previous = os.umask(umask)
    try:
        store.write(tmp_path / "g", tmp_path, "x\n")
    finally:
        os.umask(previous)
    assert (tmp_path / "g").stat().st_mode & 0o777 == mode


def test_a_golden_that_cannot_be_written_fails_its_test_in_one_sentence(run, pytester, goldens):
    source = """
import os, pytest
def test_a(gt_golden):
    gt_golden.check("one")
    def full(*_):
        raise OSError(28, os.strerror(28))
    os.fsync = full
"""
    result = run(source, "--gt-update-goldens")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["golden/test_it/test_a.txt was not written: No space left on device"]
    )
    assert goldens() == {}


def test_the_lock_lies_where_no_other_user_can_put_a_link(tmp_path, monkeypatch):
    """A link of another user in everybody's folder made it empty a file of ours; filelock follows
    none, either.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / f"gtrainer-locks-{os.getuid()}").mkdir(parents=True, mode=0o755)
    lock = Path(store._lock_file(tmp_path))
    assert lock.parent.stat().st_mode & 0o777 == 0o700
    assert lock.parent.parent == tmp_path / "tmp"
    (tmp_path / "mine").write_text("kept")
    lock.symlink_to(tmp_path / "mine")
    with pytest.raises(store.GoldenFileError, match=r"^g was not written: "):
        store.write(tmp_path / "g", tmp_path, "x\n")
    assert (tmp_path / "mine").read_text() == "kept"


def test_no_filelock_is_allowed_that_follows_links():
    """Those before 3.20.1 do."""
    (floor,) = [
        each for each in metadata.requires("pytest-gtrainer") if each.startswith("filelock")
    ]
    assert tuple(map(int, re.fullmatch(r"filelock>=([\d.]+)", floor)[1].split("."))) >= (3, 20, 1)


@pytest.mark.parametrize("to", ["elsewhere", "nowhere"])
def test_a_folder_of_locks_that_is_a_link_is_one_sentence(tmp_path, monkeypatch, to):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"gtrainer-locks-{os.getuid()}").symlink_to(to)
    with pytest.raises(
        store.GoldenFileError,
        match=r"^g was not written: .*gtrainer-locks-\d+, .* is no folder: remove it",
    ):
        store.write(tmp_path / "g", tmp_path, "x\n")
    assert [*(tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("texts", ["ab", "aa"])
def test_one_file_by_two_names_is_not_written_with_two_texts(
    run_here, put_goldens, pytester, texts
):
    """The second test would take the golden of the first: one run green, the next one red."""
    put_goldens("test_it/test_b.txt")
    link = pytester.path / "golden/test_it/test_a.txt"
    link.symlink_to("test_b.txt")
    source = f"""
        def test_a(gt_golden): gt_golden.check({texts[0]!r})
        def test_b(gt_golden): gt_golden.check({texts[1]!r})
    """
    result = run_here(source, "--gt-update-goldens")
    if texts == "aa":
        result.assert_outcomes(passed=2)
    else:
        result.assert_outcomes(passed=2, errors=1)
        result.stdout.fnmatch_lines(
            ["*test_b.txt was not written: by a link it is golden/test_it/test_a.txt, which *"]
        )
    assert link.is_symlink()
    assert link.read_text() == "a\n"
    assert run_here(None).ret == (0 if texts == "aa" else 1)
