"""Files: where they lie, and what makes a graph unreadable (a file: test_safety_reading)."""

from types import SimpleNamespace

import pytest

from pytest_gtrainer.golden import compare, naming
from pytest_gtrainer.marker import id_of

NODE = "tests/a b/test_x.py::TestY::test_z"


ODD = ["a/b", "..", "a:b*?", "Linear", "x" * 300, "ü", "nul", "a@b", "", " ", "end."]


@pytest.mark.parametrize("parameter", ODD)
def test_any_parameter_gives_a_safe_name(parameter):
    path = naming.golden_path(f"{NODE}[{parameter}]", None, "graph")
    assert path.parts[:2] == ("golden", "tests")
    assert path.suffix == ".fxgraph"
    for part in path.parts:
        assert len(part) < 200
        assert set(part) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,=+-~"
        )


def test_parameters_much_alike_have_own_files():
    alike = [*ODD, "a_b", "linear", "LINEAR", "x" * 299, "x" * 80, "_", "end", "a:b?*"]
    paths = {
        str(naming.golden_path(f"{NODE}[{parameter}]", None, "text")).lower() for parameter in alike
    }
    assert len(paths) == len(alike), "two parameters share a file where file systems ignore case"


def test_the_group_that_xdist_appends_to_a_test_does_not_count():
    """pytest below 9.2, ``--dist loadgroup``."""
    file = SimpleNamespace(nodeid="tests/test_x.py")
    for nodeid in ("tests/test_x.py::test_z[a@b]", "tests/test_x.py::test_z[a@b]@gpu"):
        item = SimpleNamespace(nodeid=nodeid, name="test_z[a@b]", parent=file)
        assert id_of(item) == "tests/test_x.py::test_z[a@b]"


GRAPH = "# gtrainer graph v2\nif fwd:\n  with norm:\n    a: f32[2] = aten.a()\n"


@pytest.mark.parametrize(
    ("golden", "sentence"),
    [
        (
            GRAPH.replace("if", "<<<<<<< ours\nif"),
            "the golden has merge conflict marks at line 2: resolve *",
        ),
        (
            GRAPH.replace("v2", "v7"),
            "the golden has format v7 and this pytest-gtrainer reads v2: *, so upgrade",
        ),
        (
            GRAPH.replace("v2", "v1"),
            "the golden has the old format v1, *: remake it with --gt-update-goldens, at a *",
        ),
        (
            "if fwd:\n  a: f32[2] = aten.a()\n",
            "the golden does not begin with `# gtrainer graph v2`: *",
        ),
        (
            GRAPH.replace("if fwd", "if x:\n  x\nfor x"),
            "the golden is not graph text: line 4: expected `for *",
        ),
    ],
)
def test_a_damaged_graph_is_one_sentence(golden, sentence):
    from fnmatch import fnmatch

    found = compare.difference("graph", golden, GRAPH.replace("aten.a", "aten.b"))
    assert found is not None
    assert fnmatch(found, sentence)
