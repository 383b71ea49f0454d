"""Files that a run leaves in ``--gt-artifacts DIR``."""

import errno
import os

import pytest

# A run inside this process forgets what it has imported, and torch cannot be loaded again.
import pytest_gtrainer.numerics.compare  # noqa: F401

SOURCE = """
import pytest

def test_missing(gt_golden): gt_golden.check("new")
def test_equal(gt_golden): gt_golden.check("test_equal")

@pytest.mark.parametrize("x", ["a/b"])
def test_different(gt_golden, x):
    gt_golden.check("\\n".join(f"{n}\\nnew" for n in range(100)), "after")
"""
NEW, OLD = ("".join(f"{n}\n{what}\n" for n in range(100)) for what in ("new", "old"))
DIFFERENT = "test_different-a_b~c14cddc0"
GOLDENS = ("test_it/test_equal.txt", f"test_it/{DIFFERENT}@after.txt")


@pytest.fixture
def saved(pytester):
    """The files below ``out`` with their text, or None where there is no such folder."""

    def read(place="out"):
        top = pytester.path / place
        files = (file for file in top.rglob("*") if file.is_file())
        return (
            {file.relative_to(top).as_posix(): file.read_text() for file in files}
            if top.exists()
            else None
        )

    return read


@pytest.mark.second_tier("under xdist]")
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "under xdist"])
def test_a_failure_leaves_what_was_obtained_and_says_where(
    run, run_here, put_goldens, saved, workers
):
    put_goldens(GOLDENS[0])
    put_goldens(GOLDENS[1], text=OLD)
    result = (run if workers else run_here)(SOURCE, "--gt-artifacts", "out", "test_it.py", *workers)
    result.assert_outcomes(failed=2, passed=1)
    files = saved()
    diff = files.pop(f"test_it/{DIFFERENT}/after.difference.diff")
    assert files == {
        "test_it/test_missing/obtained.txt": "new\n",
        f"test_it/{DIFFERENT}/after.obtained.txt": NEW,
        f"test_it/{DIFFERENT}/after.golden.txt": OLD,
    }
    assert diff.count("\n+new") == 100, "an artifact is not cut as the message is"
    text = result.stdout.str()
    for name in files:
        assert f"  {os.path.join('out', name)}" in text


def test_nothing_is_made_when_nothing_failed(run_here, put_goldens, saved):
    put_goldens("test_it/test_equal.txt")
    source = "def test_equal(gt_golden, gt_artifacts): gt_golden.check('test_equal')"
    run_here(source, "--gt-artifacts=out/deep").assert_outcomes(passed=1)
    assert saved("out/deep") is None


def test_nothing_is_made_without_the_option(run_here, pytester):
    run_here(SOURCE)
    made = (
        name for name in os.listdir(pytester.path) if not name.startswith(".")
    )  # of other plugins
    assert sorted(made) == ["test_it.py", "tox.ini"]


def test_a_relative_folder_is_below_where_pytest_was_called_or_the_ini_file_lies(
    run_here, pytester, saved
):
    pytester._monkeypatch.chdir(pytester.mkdir("called_here"))
    run_here(None, "--gt-artifacts=out", "..", test_it=SOURCE)
    assert "test_it/test_missing/obtained.txt" in saved("called_here/out")
    pytester.makeini("[pytest]\ngt_artifacts = from_ini")
    run_here(None, "..")
    assert saved("from_ini") == saved("called_here/out")


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("test_it.py", "is a file: give a folder"),
        (".", "holds the root directory itself: give a folder of its own"),
        ("..", "holds the root directory itself: give a folder of its own"),
        ("golden/out", "lies among the goldens: give a folder of its own"),
    ],
)
def test_a_folder_that_cannot_be_one_stops_the_run(run_here, place, sentence):
    result = run_here(SOURCE, f"--gt-artifacts={place}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --gt-artifacts=/* {sentence}"])


def test_a_folder_that_cannot_be_written_hides_no_failure(run_here, pytester):
    (pytester.mkdir("out") / "test_it").write_text("a file in the way")
    result = run_here(SOURCE, "--gt-artifacts=out", "-ktest_missing")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*golden/test_it/test_missing.txt is missing",
            "*nothing saved in out: test_it is a file, expected a directory: remove it",
            "*pytest test_it.py::test_missing --gt-update-goldens",
        ]
    )


def test_artifacts_are_not_run_as_tests(run_here, pytester):
    """pytest takes any ``test*.txt`` for a doctest."""
    folder = pytester.mkdir("out")
    (folder / "test_x.txt").write_text(">>> 1 / 0\n")
    (folder / "test_y.py").write_text("def test_y(): assert False")
    run_here("def test_a(): pass", "--gt-artifacts=out").assert_outcomes(passed=1)
    run_here(None).assert_outcomes(passed=1, failed=2)


def test_the_fixture_is_a_temporary_folder_without_the_option(run_here, pytester):
    run_here("def test_a(gt_artifacts, tmp_path): assert gt_artifacts == tmp_path").assert_outcomes(
        passed=1
    )


SAVE = """
import pytest
from pytest_gtrainer.golden import artifacts

@pytest.mark.parametrize("x", [1, 2])
def test_a(request, x):
    path = artifacts.save(request.node, "a verdict: table", f"{x}")
    assert path is None or path.read_text() == f"{x}"
"""


def test_other_parts_save_by_one_call(run_here, saved):
    run_here(SAVE, "--gt-artifacts=out").assert_outcomes(passed=2)
    assert saved() == {f"test_it/test_a-{x}/a_verdict__table~0acffe40": f"{x}" for x in (1, 2)}
    run_here(None).assert_outcomes(passed=2)


THREE = """
import pytest, torch
from pytest_gtrainer import assert_bitwise_equal

def test_golden(gt_golden): gt_golden.check("new")
def test_verdict(): assert_bitwise_equal(torch.ones(1), torch.zeros(1))
def test_own(gt_artifacts, tmp_path):
    assert gt_artifacts == tmp_path
    (gt_artifacts / "mine").write_text("text")
"""

UNWRITABLE = {
    "below a file": ("a_file/out", "Not a directory"),
    "a NUL in a name": ("out\0put", "embedded null byte"),
    "a read-only file system": ("/proc/out", "No such file or directory"),
    "too long a name": ("x" * 300, "File name too long"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_a_folder_that_cannot_be_written_is_a_warning(run_here, pytester, case):
    """The tests have their own results, and each says that nothing was saved, and why."""
    folder, reason = UNWRITABLE[case]
    (pytester.path / "a_file").write_text("")
    result = run_here(THREE, f"--gt-artifacts={folder}")
    result.assert_outcomes(failed=2, passed=1, warnings=2)
    text = result.stdout.str()
    assert "INTERNALERROR" not in text + result.stderr.str()
    assert "\0" not in text
    lines = [
        line
        for line in text.splitlines()
        if reason in line or "is a file, expected a directory" in line
    ]
    assert any("nothing saved in" in line for line in lines), "the golden"
    assert any("ArtifactWarning: --gt-artifacts: nothing was saved:" in line for line in lines), (
        "the verdict"
    )
    assert any(
        "ArtifactWarning: --gt-artifacts:" in line and "was not made" in line for line in lines
    ), "the fixture"


@pytest.mark.parametrize("name", ["ENOSPC", "EROFS", "EIO"])
def test_a_disk_that_fails_while_it_is_written_is_a_warning(run_here, monkeypatch, name):
    code = getattr(errno, name)

    def fails(file: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)  # the last call before a file gets its name
    result = run_here(
        THREE.replace("gt_artifacts == tmp_path", "gt_artifacts.is_dir()"), "--gt-artifacts=out"
    )
    result.assert_outcomes(failed=2, passed=1, warnings=1)
    result.stdout.fnmatch_lines(
        [f"*ArtifactWarning: --gt-artifacts: nothing was saved: *{os.strerror(code)}*"]
    )
    assert "INTERNALERROR" not in result.stdout.str()
