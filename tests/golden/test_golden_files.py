"""Files: where they lie, what makes one unreadable, and how one is replaced."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from pytest_gtrainer.golden import compare, naming, store

NODE = "tests/a b/test_x.py::TestY::test_z"


ODD = ["a/b", "..", "a:b*?", "Linear", "x" * 300, "ü", "nul", "a@b", "", " ", "end."]


@pytest.mark.parametrize("parameter", ODD)
def test_any_parameter_gives_a_safe_name(parameter):
    path = naming.golden_path(f"{NODE}[{parameter}]", None, "graph")
    assert path.parts[:2] == ("golden", "tests")
    assert path.suffix == ".fxgraph"
    for part in path.parts:
        assert len(part) < 200
        assert set(part) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,=+-~")


def test_parameters_much_alike_have_own_files():
    alike = [*ODD, "a_b", "linear", "LINEAR", "x" * 299, "x" * 80, "_", "end", "a:b?*"]
    paths = {str(naming.golden_path(f"{NODE}[{parameter}]", None, "text")).lower() for parameter in alike}
    assert len(paths) == len(alike)


GRAPH = "# gtrainer graph v1\nif fwd:\n  with norm:\n    a: f32[2] = aten.a()\n"


@pytest.mark.parametrize(("content", "sentence"), [
    (b"\xff\xfe", "golden/g is not valid UTF-8 at byte 0: restore or remake it"),
    (None, "golden/g is a directory, expected a file: remove it"),
])  # fmt: skip
def test_an_unreadable_file_is_one_sentence(tmp_path, content, sentence):
    file = tmp_path / "golden/g"
    file.parent.mkdir()
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(store.GoldenFileError) as error:
        store.read(file, tmp_path)
    assert str(error.value) == sentence


@pytest.mark.parametrize(("golden", "sentence"), [
    (GRAPH.replace("if", "<<<<<<< ours\nif"), "the golden has merge conflict marks at line 2: resolve *"),
    (GRAPH.replace("v1", "v7"), "the golden has format v7 and this pytest-gtrainer reads v1: *, so upgrade"),
    ("if fwd:\n  a: f32[2] = aten.a()\n", "the golden does not begin with `# gtrainer graph v1`: *"),
    (GRAPH.replace("if fwd", "if x:\n  x\nfor x"), "the golden is not graph text: line 4: expected `for *"),
])  # fmt: skip
def test_a_damaged_graph_is_one_sentence(golden, sentence):
    from fnmatch import fnmatch

    found = compare.difference("graph", golden, GRAPH.replace("aten.a", "aten.b"))
    assert found is not None
    assert fnmatch(found, sentence)


def test_a_link_out_of_the_tree_is_refused(tmp_path):
    root, outside = tmp_path / "project", tmp_path / "outside.txt"
    (root / "golden").mkdir(parents=True)
    outside.write_text("one\n")
    (root / "golden/g").symlink_to(outside)
    with pytest.raises(store.GoldenFileError, match="golden/g leads out of the tree by a link"):
        store.read(root / "golden/g", root)
    with pytest.raises(store.GoldenFileError, match="golden/g leads out of the tree by a link"):
        store.write(root / "golden/g", root, "two")
    assert outside.read_text() == "one\n"


def test_line_ends_and_byte_order_marks_do_not_count(tmp_path):
    (tmp_path / "g").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert store.read(tmp_path / "g", tmp_path) == "one\ntwo\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, number):
    file = tmp_path / "golden/g"
    store.write(file, tmp_path, "old\n")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(store.GoldenFileError, match=f"golden/g was not written: {os.strerror(number)}"):
        store.write(file, tmp_path, "new\n")
    assert {path.name: path.read_text() for path in file.parent.iterdir()} == {"g": "old\n"}


def test_writers_of_one_file_leave_one_whole_text(tmp_path):
    texts = [str(number) * 100_000 + "\n" for number in range(8)]
    writers = [threading.Thread(target=store.write, args=(tmp_path / "g", tmp_path, text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "g").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_a_golden_may_be_read_by_others(tmp_path):
    umask = os.umask(0o022)
    try:
        store.write(tmp_path / "g", tmp_path, "x\n")
    finally:
        os.umask(umask)
    assert (tmp_path / "g").stat().st_mode & 0o777 == 0o644
