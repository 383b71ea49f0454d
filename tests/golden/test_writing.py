"""Writing of goldens and inline expectations, function by function; test_safety_writing kills whole
runs.
"""

import os
import stat
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 - once for all runs in this process

from pytest_gtrainer.golden import store

OLD, NEW = "golden/test_a/test_c.txt", "golden/test_a/TestB.test_d.txt"


def write(root: Path, name: str = OLD, text: str = "new\n", **options) -> Path:
    store.write(root / name, root, text, **options)
    return root / name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with one golden, ``OLD``."""
    (tmp_path / OLD).parent.mkdir(parents=True)
    (tmp_path / OLD).write_text("old\n")
    return tmp_path


def files(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / OLD).parent.iterdir()}


def test_a_file_is_replaced_and_keeps_its_mode(root):
    (root / OLD).chmod(0o640)
    before = (root / OLD).stat().st_ino
    after = write(root).stat()
    assert files(root) == {"test_c.txt": "new\n"}
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert after.st_ino != before, (
        "another file took its name: a reader of the old one reads it to its end"
    )


def test_a_new_one_may_be_read_by_others(root):
    umask = os.umask(0o022)
    try:
        assert stat.S_IMODE(write(root, NEW).stat().st_mode) == 0o644
    finally:
        os.umask(umask)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(root, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(
        store.GoldenFileError, match=r"test_c\.txt was not written: No space left on device"
    ):
        write(root)
    assert files(root) == {"test_c.txt": "old\n"}


def test_only_old_temporaries_of_writers_are_swept(root):
    folder = (root / OLD).parent
    kept, gone = [".gt-00000000000000ab.tmp", ".gt-notes.tmp", "a.tmp"], ".gt-0123456789abcdef.tmp"
    for name in (*kept, gone):
        (folder / name).write_text("")
    for name in (*kept[1:], gone):
        os.utime(folder / name, times=(time.time() - 70,) * 2)
    write(root)
    assert sorted(files(root)) == sorted(["test_c.txt", *kept])


def test_what_is_merged_comes_from_the_file_as_it_is_then(root):
    assert write(root, merge=lambda old: old + "more\n").read_text() == "old\nmore\n"
    assert write(root, NEW, merge=lambda old: old + "more\n").read_text() == "new\n", (
        "where there is none, it is new"
    )
    with pytest.raises(
        store.GoldenFileError, match="was not written: the obtained text has a NUL byte at byte 1"
    ):
        write(root, merge=lambda old: "a\0")
    assert (root / OLD).read_text() == "old\nmore\n"


def test_a_change_is_made_of_all_that_is_there_and_no_change_writes_nothing(root):
    seen = []
    store.rewrite(root / OLD, root, lambda old: seen.append(old) or old)
    inode = (root / OLD).stat().st_ino
    store.rewrite(root / OLD, root, lambda old: seen.append(old) or old)
    assert (seen, (root / OLD).stat().st_ino) == ([b"old\n"] * 2, inode)
    store.rewrite(root / OLD, root, bytes.upper)
    assert files(root) == {"test_c.txt": "OLD\n"}


def test_a_link_stays_a_link_and_one_out_of_the_tree_is_refused(root, tmp_path_factory):
    (root / NEW).symlink_to(root / OLD)
    assert write(root, NEW).is_symlink()
    assert (root / OLD).read_text() == "new\n"
    outside = tmp_path_factory.mktemp("outside") / "precious.txt"
    outside.write_text("precious")
    (root / NEW).unlink()
    (root / NEW).symlink_to(outside)
    with pytest.raises(
        store.GoldenFileError, match="leads out of the tree by a link: replace it by a file"
    ):
        write(root, NEW)
    assert outside.read_text() == "precious"


def test_removing_takes_the_folders_that_are_empty_then(root):
    write(root, NEW)
    store.remove(root / OLD, root)
    assert files(root) == {"TestB.test_d.txt": "new\n"}
    (root / "golden/notes.md").write_text("")
    store.remove(root / NEW, root)
    assert sorted(path.name for path in (root / "golden").iterdir()) == ["notes.md"]
    store.remove(root / NEW, root)  # it is gone already


INLINE = '''
from expecttest import assert_expected_inline as same

def test_updated():
    same("new\\nlines\\n", """old""")

def test_created():
    same("made", """""")

def test_met():
    same("met", """met""")

def test_fails_behind_it():
    same("never", """kept""")
    assert False

def test_in_a_loop():
    for text in ("one", "two"):
        same(text, """both""")
'''
UPDATED = ('same("new\\nlines\\n", """old""")', 'same("new\\nlines\\n", """\\\nnew\nlines\n""")')
CREATED = ('same("made", """""")', 'same("made", """made""")')


@pytest.mark.parametrize(
    ("flags", "changes", "counts"),
    [
        ((), (), "*4 failed, 1 passed*"),
        (("--gt-update-goldens",), (UPDATED, CREATED), "inline    1 created, 1 updated"),
        (("--gt-create-goldens",), (CREATED,), "inline    1 created"),
    ],
    ids=["without a flag", "updated", "created"],
)
def test_expectations_of_tests_that_pass_are_accepted(
    run_here, pytester, monkeypatch, flags, changes, counts
):
    """A test that fails behind its expectation changes nothing, nor does one literal for
    two texts.
    """
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    (pytester.path / "test_it.py").write_text(INLINE)
    result = run_here(None, *flags)
    expected = INLINE
    for before, after in changes:
        assert before in expected
        expected = expected.replace(before, after)
    assert (pytester.path / "test_it.py").read_text() == expected
    result.stdout.fnmatch_lines([counts])
    if "--gt-update-goldens" in flags:
        result.stdout.fnmatch_lines(
            ["*one inline expectation, but different texts, so none is accepted: give each*"]
        )
