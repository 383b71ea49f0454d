"""Parts of ``--gt-against`` by themselves: names, arguments, folders of modules, sentences."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_gtrainer.report import revision
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.revision import (
    Imports,
    Revision,
    _ending,
    _environment_of_git,
    _refuse_options,
    _without_against,
    folder_of,
    imports_of,
)

COMMIT = "0123456789abcdef"


def found(given="main", top=Path("/repo"), root=None):
    return Revision(given, COMMIT, top, root or top, "here")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("main", "main (0123456789)"),
        ("HEAD~1", "HEAD~1 (0123456789)"),
        ("0123", "0123456789"),
        (COMMIT, "0123456789"),
        ("12", "12 (0123456789)"),
    ],
)
def test_a_revision_is_named_as_it_was_given_and_by_its_commit(given, shown):
    assert str(found(given)) == shown


def config(*arguments, start="/repo", **values):
    options = {f"--gt-{name}": value for name, value in values.items()} | values
    made = SimpleNamespace(
        invocation_params=SimpleNamespace(args=arguments, dir=Path(start)),
        getoption=lambda name, default=None: options.get(name, default),
        getini=lambda name: "",
        rootpath=Path(start),
    )
    return made


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["a.py", "-x"], ["a.py", "-x"]),
        (["--gt-against=main", "a.py"], ["a.py"]),
        (["--gt-against", "main", "a.py"], ["a.py"]),
        (["--gt-moved", "fail", "--gt-against=x", "-k", "y"], ["-k", "y"]),
        (["--gt-moved=fail", "a.py"], ["a.py"]),
        (["a.py", "--gt-against"], ["a.py"]),
        (["--gt-against-x=1"], ["--gt-against-x=1"]),
        ([Path("a.py")], ["a.py"]),
    ],
)
def test_arguments_without_those_of_the_comparison(given, kept):
    assert _without_against(config(*given)) == kept


@pytest.mark.parametrize("behind", [[], ["--", "-odd.py"]])
@pytest.mark.parametrize("has_junit", [False, True])
def test_arguments_of_the_run_there(monkeypatch, behind, has_junit):
    monkeypatch.setattr(revision.options, "get", lambda config, name: name == "artifacts")
    made = config("/repo/a.py", "/repo2/b.py", *behind, xmlpath="j.xml" if has_junit else None)
    arguments = found(root=Path("/repo/sub"))._arguments(made, Path("/f"))
    assert arguments == [
        "/f/tree/a.py",
        "/repo2/b.py",
        "--rootdir=/f/tree/sub",
        "--basetemp=/f/temporary",
        "--gt-report=/f/page.html",
        "--maxfail=0",
        "--continue-on-collection-errors",
        *["--junitxml=/f/junit.xml"] * has_junit,
        "--gt-artifacts=/f/artifacts",
        *behind,
    ]


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/repo", True),
        ("/repo/src/a", True),
        ("/repo2", False),
        ("/", False),
        ("/repo/.venv/lib/site-packages", False),
        ("/repo/.venv/lib/site-packages/a", False),
        ("/repo/lib/dist-packages/a", False),
        ("/repo/site-packages-2", True),
    ],
)
def test_folders_of_the_working_tree_are_not_those_of_an_environment(path, is_own):
    assert found()._is_own(Path(path)) == is_own


def test_the_path_there_is_that_of_here_in_the_worktree(tmp_path, monkeypatch):
    top = tmp_path / "repo"
    for name in ("src", "more", "site-packages"):
        (top / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    paths = [str(top / "src"), str(top / "site-packages"), str(tmp_path / "outside")]
    monkeypatch.setattr(sys, "path", [*paths, str(top / "missing"), str(top / "src")])
    own = [str(top / "more"), str(tmp_path / "outside"), "", "/other"]
    monkeypatch.setenv("PYTHONPATH", ":".join(own))
    entries = found(top=top, root=top)._python_path({"a": str(top / "more")}, Path("/tree"))
    assert entries == ["/tree/src", "/tree/more", str(tmp_path / "outside"), "/other"]


def test_the_command_for_a_person(tmp_path, monkeypatch):
    top = (tmp_path / "re po").resolve()
    (top / "sub").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    test = Collected("t")
    test.shown = {0: [{"kind": "imported", "modules": {"a": str(top / "sub")}}]}
    made = config("a b.py", "--gt-against=x", start=top / "sub")
    tree = top.parent / "at-0123456789"
    assert found(top=top, root=top).command(made, [test]) == (
        f"git worktree add --detach {tree} 0123456789 && cd {tree}/sub && "
        f"PYTHONPATH={tree}/sub python -P -m pytest 'a b.py'"
    )


@pytest.mark.parametrize("place", ["", "src"])
@pytest.mark.parametrize("is_package", [True, False])
def test_modules_of_the_working_tree_are_imported_from_it_here_and_from_the_worktree_there(
    tmp_path, place, is_package
):
    top, tree = (tmp_path / "repo").resolve(), Path("/tree")
    module = top / place / ("own/__init__.py" if is_package else "own.py")
    module.parent.mkdir(parents=True)
    module.write_text("")
    made = found(top=top, root=top)
    here, there = {"own": str(top / place), "other": "/lib"}, {"own": "/tree", "other": "/lib"}
    assert made._mixed(here, there, tree) is None
    assert made._mixed({**here, "own": "/lib/x"}, there, tree) == (
        f"here, own was imported from /lib/x, an installed copy, and not from the working tree "
        f"{top}: install it with `pip install -e`, or set PYTHONPATH"
    )
    for wrong in ("/lib/x", str(top)):
        said = made._mixed(here, {**there, "own": wrong}, tree)
        assert said.startswith(
            f"the tests at main (0123456789) imported own from {wrong}, so they did not run on "
            "the code of that revision."
        )
    assert made._mixed(here, {"other": "/lib"}, tree) == (
        "the tests at main (0123456789) do not say where they imported their modules from"
    )


@pytest.mark.parametrize("place", [".", "src", "sub", "sub/src"])
def test_a_package_of_the_repository_or_of_the_root_is_the_working_trees(tmp_path, place):
    """Tests may have their root below the top of the repository, and the package beside it."""
    top = (tmp_path / "repo").resolve()
    (top / place / "own").mkdir(parents=True)
    (top / place / "own/__init__.py").write_text("")
    made = found(top=top, root=top / "sub")
    said = made._mixed({"own": "/lib/x"}, {"own": "/tree"}, Path("/tree"))
    assert said.startswith("here, own was imported from /lib/x, an installed copy")
    assert made._mixed({"other": "/lib/x"}, {"other": "/tree"}, Path("/tree")) is None


def test_facts_of_imports_are_one_table():
    facts = [{"kind": "imported", "modules": {"a": "1", "b": "1"}}, {"kind": "pass"}]
    facts.append({"kind": "imported", "modules": {"b": "2"}})
    assert imports_of(facts) == {"a": "1", "b": "2"}


def test_the_folder_of_a_module(tmp_path):
    plain, package, odd = ModuleType("a"), ModuleType("b"), ModuleType("c")
    plain.__file__ = str(tmp_path / "a.py")
    package.__path__, package.__file__ = [str(tmp_path / "x" / "b"), "/other"], "/no/b.py"
    assert folder_of(plain) == str(tmp_path.resolve())
    assert folder_of(package) == str((tmp_path / "x").resolve())
    odd.__file__ = None
    assert folder_of(odd) is None
    assert folder_of(ModuleType("d")) is None


def test_each_module_is_reported_once(monkeypatch):
    emitted = []
    monkeypatch.setattr(revision.facts, "emit", lambda kind, **fields: emitted.append(fields))
    imports = Imports()
    imports.pytest_runtest_makereport()
    emitted.clear()
    imports.pytest_runtest_makereport()
    assert emitted == []
    module = ModuleType("own_module_y")
    module.__file__ = "/x/own_module_y.py"
    monkeypatch.setitem(sys.modules, "own_module_y", module)
    monkeypatch.setitem(sys.modules, "own_module_y.inner", module)
    imports.pytest_runtest_makereport()
    imports.pytest_runtest_makereport()
    assert emitted == [{"modules": {"own_module_y": "/x"}}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n\nb\nc\nd\ne\n", "b / c / d / e"),
        ("a\nERROR: no\nb\n", "ERROR: no"),
        ("E  one\nx\nERROR two\n", "E  one / ERROR two"),
        ("E one\n", "E one"),
        ("", ""),
    ],
)
def test_how_a_run_without_a_page_has_ended(tmp_path, text, words):
    (tmp_path / "output").write_text(text)
    assert _ending(tmp_path / "output", "4") == f"pytest ended with status 4: {words}"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *(
            (
                {name: True},
                f"--o=x compares goldens of two runs and writes none: leave out --gt-{name}",
            )
            for name in ("update-goldens", "create-goldens", "prune-goldens")
        ),
        ({"report-against": "p"}, "--o=x and --gt-report-against exclude each other: give one"),
        ({"usepdb": True}, "--o=x runs tests where no debugger can ask: leave it out"),
        ({"trace": True}, "--o=x runs tests where no debugger can ask: leave it out"),
        ({"launch": True}, "--o=x starts pytest itself, without torchrun"),
    ],
)
def test_options_that_do_not_go_with_a_comparison(monkeypatch, values, words):
    monkeypatch.setattr(revision.options, "get", lambda config, name: values.get(name))
    monkeypatch.setattr(revision, "launch_of", lambda config: values.get("launch"))
    with pytest.raises(pytest.UsageError) as caught:
        _refuse_options(config(**values), "--o=x")
    assert str(caught.value) == words
    values.clear()
    _refuse_options(config(), "--o=x")


@pytest.mark.parametrize(
    "name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"]
)
def test_git_reads_the_repository_of_the_run_and_not_of_a_hook(monkeypatch, name):
    monkeypatch.setenv(name, "/other")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "me")
    assert name not in _environment_of_git()
    assert _environment_of_git()["GIT_AUTHOR_NAME"] == "me"
