"""Anything may lie where a golden should: one sentence each, at once, and nothing is lost."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gtrainer.golden import store


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    try:
        os.mknod(file, 0o020666, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("making a device needs root")


def listener(file: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(file))  # the length of a socket's name is limited
    server.close()


def circle(file: Path) -> None:
    file.symlink_to(file.name)


def inside_a_file(file: Path) -> None:
    file.parent.rmdir()
    file.parent.write_text("x")


NOT_FILES: list[tuple[Callable[[Path], object], str]] = [
    (Path.mkdir, "golden/g is a directory, expected a file: remove it"),
    (pipe, "golden/g is a pipe, a socket or a device, expected a file: remove it"),
    (device, "golden/g is a pipe, a socket or a device, expected a file: remove it"),
    (listener, "golden/g is a pipe, a socket or a device, expected a file: remove it"),
    (circle, "golden/g is a link that leads back to itself: replace it by a file"),
    (inside_a_file, "golden is a file, expected a directory: remove it"),
]


@pytest.fixture
def golden(tmp_path, monkeypatch) -> Path:
    """The path of a golden that is not there; its folder is."""
    monkeypatch.chdir(tmp_path)
    Path("golden").mkdir()
    return tmp_path / "golden/g"


def refusals(golden: Path) -> list[str]:
    """The sentences on reading and on writing."""
    root = golden.parents[1]
    said = []
    for access in (lambda: store.read(golden, root), lambda: store.write(golden, root, "new\n")):
        with pytest.raises(store.GoldenFileError) as error:
            access()
        assert type(error.value) is store.GoldenFileError, "no update may replace it"
        said.append(str(error.value))
    return said


@pytest.mark.parametrize(("make", "sentence"), NOT_FILES)
def test_what_is_no_file_is_neither_waited_for_nor_replaced(golden, make, sentence):
    make(golden)
    before = golden.lstat().st_ino if golden.parent.is_dir() else golden.parent.stat().st_ino
    assert refusals(golden) == [sentence, sentence]
    assert before == (
        golden.lstat().st_ino if golden.parent.is_dir() else golden.parent.stat().st_ino
    )


@pytest.mark.parametrize("link", ["file", "folder", "dangling"])
def test_a_link_out_of_the_tree_is_refused(tmp_path, link):
    root, outside = tmp_path / "project", tmp_path / "outside"
    for folder in (root / "golden", outside):
        folder.mkdir(parents=True)
    (outside / "g").write_text("one\n")
    golden = root / "golden/g"
    if link == "folder":
        golden = root / "golden/sub/g"
        golden.parent.symlink_to(outside)
    else:
        golden.symlink_to(outside / ("g" if link == "file" else "new"))
    shown = golden.relative_to(root).as_posix()
    sentence = f"{shown} leads out of the tree by a link: replace it by a file"
    for access in (lambda: store.read(golden, root), lambda: store.write(golden, root, "two\n")):
        with pytest.raises(store.GoldenFileError) as error:
            access()
        assert str(error.value) == sentence
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"g": "one\n"}


def test_a_link_inside_the_tree_is_followed_and_kept(tmp_path):
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden/old_name").symlink_to("new_name")
    store.write(tmp_path / "golden/old_name", tmp_path, "one\n")
    assert (tmp_path / "golden/old_name").is_symlink()
    assert (tmp_path / "golden/new_name").read_text() == "one\n"
    assert store.read(tmp_path / "golden/old_name", tmp_path) == "one\n"


@pytest.mark.parametrize("there", ["conftest.py", "other.txt"])
def test_a_link_to_what_is_no_golden_is_refused(tmp_path, there):
    """An update followed it, and overwrote the file that it leads to."""
    (tmp_path / "golden").mkdir()
    (tmp_path / "conftest.py").write_text("import pytest\n")
    golden = tmp_path / "golden/g"
    golden.symlink_to(f"../{there}")
    for access in (
        lambda: store.read(golden, tmp_path),
        lambda: store.write(golden, tmp_path, "two\n"),
    ):
        with pytest.raises(store.GoldenFileError) as error:
            access()
        assert (
            str(error.value)
            == f"golden/g leads to {there}, which is no golden, by a link: replace it by a file"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "golden"]
    assert (tmp_path / "conftest.py").read_text() == "import pytest\n"


DAMAGE = [
    (b"a\xff\xfe", "golden/g is not valid UTF-8 at byte 1: restore or remake it"),
    (b"one\n\0\0\0", "golden/g has a NUL byte at byte 4: restore or remake it"),
    (b"", "golden/g is empty: restore or remake it"),
    (b"\xef\xbb\xbf", "golden/g is empty: restore or remake it"),
]


@pytest.mark.parametrize(("content", "sentence"), DAMAGE)
def test_a_damaged_file_is_one_sentence_and_may_be_replaced(golden, content, sentence):
    golden.write_bytes(content)
    with pytest.raises(store.DamagedGolden) as error:
        store.read(golden, golden.parents[1])
    assert str(error.value) == sentence
    assert golden.read_bytes() == content
    store.write(golden, golden.parents[1], "new\n")
    assert golden.read_text() == "new\n"


def test_a_golden_of_50_mb_is_refused_without_reading_it(golden, monkeypatch):
    with open(golden, "wb") as file:
        file.truncate(50_000_000)

    def never(*_: object) -> int:
        raise AssertionError("opened")

    monkeypatch.setattr(os, "open", never)
    with pytest.raises(store.DamagedGolden) as error:
        store.read(golden, golden.parents[1])
    assert (
        str(error.value)
        == "golden/g has 48 MiB, where a golden has at most 16: restore or remake it"
    )


def test_the_longest_golden_is_read_and_written_and_one_byte_more_is_not(golden):
    root = golden.parents[1]
    longest = "x" * (store.LONGEST - 1) + "\n"
    store.write(golden, root, longest)
    assert store.read(golden, root) == longest
    with pytest.raises(
        store.GoldenFileError, match="was not written: the obtained text has 16 MiB, where"
    ):
        store.write(golden, root, "x" + longest)
    assert golden.stat().st_size == store.LONGEST


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\0b\n", "golden/g was not written: the obtained text has a NUL byte at byte 1"),
        ("a\ud800\n", "golden/g was not written: the obtained text is not valid UTF-8 at byte 1"),
    ],
)
def test_a_text_that_could_not_be_read_again_is_not_written(golden, text, problem):
    with pytest.raises(store.GoldenFileError) as error:
        store.write(golden, golden.parents[1], text)
    assert str(error.value) == problem
    assert list(golden.parent.iterdir()) == []


def test_line_ends_and_byte_order_marks_do_not_count(golden):
    golden.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert store.read(golden, golden.parents[1]) == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("there", "new", "named"),
    [
        ("golden/t/test_A", "golden/t/test_a", "golden/t/test_A differs from test_a"),
        ("golden/T/test_a", "golden/t/test_a", "golden/T differs from t"),
    ],
)
def test_a_new_name_may_not_differ_from_another_only_in_case(tmp_path, there, new, named):
    store.write(tmp_path / there, tmp_path, "one\n")
    with pytest.raises(store.GoldenFileError) as error:
        store.write(tmp_path / new, tmp_path, "two\n")
    assert str(error.value) == (
        f"{new} was not written: {named} only in case, and is the same file on some systems: "
        f"rename one of the tests"
    )
    store.write(tmp_path / there, tmp_path, "three\n")
    assert (tmp_path / there).read_text() == "three\n"


RUN = """
import pytest
@pytest.mark.parametrize("kind", ["bytes", "folder", "marks", "pipe"])
def test_a(gt_golden, kind):
    gt_golden.check("new")
"""


def test_a_run_says_each_sentence_and_an_update_replaces_only_files(run, pytester):
    folder = pytester.path / "golden/test_it"
    folder.mkdir(parents=True)
    (folder / "test_a-bytes.txt").write_bytes(b"\xff")
    (folder / "test_a-folder.txt").mkdir()
    (folder / "test_a-marks.txt").write_text("<<<<<<< ours\na\n=======\nb\n>>>>>>> theirs\n")
    os.mkfifo(folder / "test_a-pipe.txt")
    result = run(RUN)
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "*test_a-bytes.txt is not valid UTF-8 at byte 0: restore or remake it",
            "*test_a-folder.txt is a directory, expected a file: remove it",
            "*test_a-marks.txt differs",
            "*the golden has merge conflict marks at line 1: resolve the merge, or remake it",
            "*test_a-pipe.txt is a pipe, a socket or a device, expected a file: remove it",
        ]
    )
    result = run(None, "--gt-update-goldens")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["goldens   2 different, 2 updated"])
    written = {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}
    assert written == {"test_a-bytes.txt": "new\n", "test_a-marks.txt": "new\n"}


def test_a_golden_is_not_run_as_a_doctest(run, pytester):
    example = ">>> open('ran', 'w').close()\n"
    run(
        f"def test_a(gt_golden): gt_golden.check({example!r})", "--gt-update-goldens"
    ).assert_outcomes(passed=1)
    pytester.maketxtfile(test_of_its_own=">>> 1\n1\n")
    run(None).assert_outcomes(passed=2)  # test_a, and the doctest that is no golden
    assert not (pytester.path / "ran").exists()
