"""``--gt-against``: the tests run at another git revision, too, and what moved is said."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_gtrainer.report import keeper
from pytest_gtrainer.report.changes import Earlier
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import build_details
from pytest_gtrainer.report.revision import ChosenTests, Revision, folder_of

TESTS = """
import os
from trainer import scale

def test_same(gt_golden):
    gt_golden.check("the same")

def test_text(gt_golden):
    gt_golden.check(f"scaled: {scale(1)}")

def test_outcome():
    assert scale(1) == 2
"""


def git(folder, *arguments):
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit: a package in src, and its tests, beside a folder for /tmp."""
    folder = tmp_path / "repository"
    (folder / "src" / "trainer").mkdir(parents=True)
    (folder / "src" / "trainer" / "__init__.py").write_text("def scale(x):\n    return 2 * x\n")
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    (folder / ".gitignore").write_text("__pycache__\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    (tmp_path / "temporary").mkdir()
    return folder


def change(repository):
    package = repository / "src" / "trainer" / "__init__.py"
    package.write_text("def scale(x):\n    return 3 * x\n")


def environment(repository):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Bytecode of a file that changes twice within a second, at one length, would be taken as fresh.
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    return environ | {"TMPDIR": str(repository.parent / "temporary")}


def run(repository, *options, cwd=".", **variables):
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:hypothesispytest", *options]
    done = subprocess.run(
        command,
        cwd=repository / cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(repository) | variables,
    )
    assert_nothing_left(repository)
    return done


def assert_nothing_left(repository):
    assert git(repository, "worktree", "list").count("\n") == 0
    assert list((repository.parent / "temporary").glob("gtrainer-against-*")) == []


@pytest.mark.second_tier
@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_what_moved_is_said_test_by_test_and_no_golden_decides(repository, workers):
    change(repository)
    done = run(repository, "--gt-against=main", "--gt-gpus=8", *workers)
    assert done.returncode == 1, done.stdout + done.stderr  # by test_outcome, as without
    assert "with 1 uncommitted change\n" in done.stdout
    assert "test_it.py::test_outcome: passed then, failed now\n" in done.stdout
    assert "-scaled: 2; +scaled: 3" in done.stdout
    assert "gtrainer: against main (" in done.stdout
    assert "): 1 newly failing, 1 with another text\n" in done.stdout
    assert "test_same:" not in done.stdout
    assert "2 compared between two runs" in done.stdout
    assert not (repository / "golden").exists()
    assert "git worktree add --detach" in done.stdout


@pytest.mark.second_tier
def test_numbers_graphs_layouts_and_times_of_tests_on_real_ranks(repository):
    """Two ranks in each of two workers, on both sides; each kind is counted."""
    package = repository / "src" / "trainer" / "__init__.py"
    package.write_text("NOW, SECONDS = False, 0\n")
    tests = (Path(__file__).parent / "changing.py").read_text()
    assert 'os.environ.get("VARIANT") == "now"' in tests
    tests = tests.replace('os.environ.get("VARIANT") == "now"', "trainer.NOW")
    tests = tests.replace('"fake"', '"ranks"').replace(
        "import os\n", "import time\n\nimport trainer\n"
    )
    tests += (
        '@pytest.mark.gt_world("ranks", size=2)\n'
        "def test_time():\n"
        "    time.sleep(trainer.SECONDS)\n"
        '@pytest.mark.gt_world("ranks", size=2)\n'
        "def test_one_rank():\n"
        "    x = torch.ones(2) * (1 + trainer.NOW * torch.distributed.get_rank())\n"
        "    assert_bitwise_equal(x, x.clone(), what='a rank')\n"
    )
    (repository / "test_it.py").write_text(tests)
    git(repository, "commit", "--all", "--quiet", "--message=ranks")
    package.write_text("NOW, SECONDS = True, 3\n")
    done = run(
        repository, "--gt-against=HEAD", "--gt-gpus=8", "-n2", "-q", "-knot (outcome or new)"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begin = "gtrainer: test_it.py::test_"
    for name in ("graph", "graph_on_ranks"):
        assert f"{begin}{name}: golden/test_it/test_{name}.fxgraph: " in done.stdout
    assert f"{begin}pass: " in done.stdout
    assert "new payloads: " in done.stdout.partition(f"{begin}pass: ")[2]
    assert f"{begin}numbers: graph against eager: other numbers than then, first at step 1" in (
        done.stdout
    )
    assert f"{begin}one_rank: a rank: other numbers than then" in done.stdout
    assert f"{begin}time: slower: 0." in done.stdout
    assert f"{begin}same: " not in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "gtrainer: against HEAD (" in line]
    assert "3 with other numbers, 3 with another graph, 1 with another layout, " in line
    assert ", 1 slower" in line


@pytest.mark.second_tier
def test_what_moved_fails_the_run_only_if_asked(repository):
    change(repository)
    chosen = ("test_it.py::test_text", "test_it.py::test_same", "--gt-against", "HEAD", "-q")
    assert run(repository, *chosen).returncode == 0
    done = run(repository, *chosen, "--gt-moved=fail")
    assert done.returncode == 1
    assert "--gt-moved=fail: this run fails, because tests have moved" in done.stdout
    git(repository, "checkout", "--quiet", ".")
    done = run(repository, *chosen, "--gt-moved=fail")
    assert done.returncode == 0
    assert "here is the same commit, unchanged" in done.stdout
    # On a busy machine a test may take another time all the same.
    assert re.search(
        r"against HEAD \(\w+\): (nothing changed|\d (faster|slower)(, \d (faster|slower))?)$",
        done.stdout,
        re.M,
    )


@pytest.mark.second_tier
def test_a_new_test_is_called_new_and_alone_it_is_compared_with_nothing(repository):
    with (repository / "test_it.py").open("a") as file:
        file.write("\ndef test_new():\n")
        file.write("    pytest_gtrainer.assert_same_function(torch.sin, torch.sin, inputs=X)\n")
        file.write("\nimport pytest_gtrainer, torch\nX = (torch.ones(2),)\n")
    done = run(repository, "--gt-against=main", "test_it.py::test_new", "test_it.py::test_same")
    assert done.returncode == 0, done.stdout
    assert "of proof only verdicts were compared, and no numbers" in done.stdout
    assert "test_it.py::test_new: new: it is not at main (" in done.stdout
    done = run(repository, "--gt-against=main", "test_it.py::test_new")
    assert done.returncode == 1
    assert "nothing compared: no test ran at main (" in done.stdout
    (repository / "test_other.py").write_text("def test_it(): pass\n")
    done = run(repository, "--gt-against=main", "test_other.py")
    assert done.returncode == 1
    assert "ERROR: there is no test_other.py" in done.stdout


@pytest.mark.second_tier
def test_a_revision_that_does_not_import_is_a_sentence_and_not_green(repository):
    package = repository / "src" / "trainer" / "__init__.py"
    package.write_text("import nowhere\n")
    git(repository, "commit", "--all", "--quiet", "--message=broken")
    package.write_text("def scale(x):\n    return 2 * x\n")
    (repository / "test_other.py").write_text("def test_it(): pass\n")
    done = run(repository, "--gt-against=HEAD", "test_it.py")
    assert done.returncode == 1
    assert "not compared: its file cannot be collected at HEAD (" in done.stdout
    assert "ModuleNotFoundError: No module named 'nowhere'" in done.stdout
    assert "nothing compared: none of these tests ran at HEAD (" in done.stdout


@pytest.mark.second_tier
def test_the_first_failure_there_does_not_end_the_run_there(repository):
    change(repository)
    git(repository, "commit", "--all", "--quiet", "--message=fails")
    (repository / "test_it.py").write_text(TESTS.replace("test_same", "test_zero"))
    with (repository / "test_it.py").open("a") as file:
        file.write("\ndef test_last(): pass\n")
    git(repository, "commit", "--all", "--quiet", "--message=more")
    (repository / "src/trainer/__init__.py").write_text("def scale(x): return 2 * x\n")
    done = run(repository, "--gt-against=HEAD", "-x")
    assert "test_last" not in done.stdout
    assert "1 fixed" in done.stdout


@pytest.mark.second_tier
def test_an_installed_copy_is_not_compared_with_itself(repository, tmp_path):
    installed = tmp_path / "site-packages" / "trainer"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("def scale(x):\n    return 2 * x\n")
    (repository / "pytest.ini").write_text("[pytest]\n")
    git(repository, "commit", "--all", "--quiet", "--message=installed")
    done = run(repository, "--gt-against=HEAD", PYTHONPATH=str(installed.parent))
    assert done.returncode == 1
    expected = f"here, trainer was imported from {installed.parent}, an installed copy"
    assert expected in done.stdout


@pytest.mark.second_tier
@pytest.mark.parametrize("place", [0, "len(sys.meta_path)"])
def test_an_editable_install_is_led_to_the_revision_or_refused(repository, tmp_path, place):
    """Finders of setuptools come last and give way to PYTHONPATH; others come first."""
    (repository / "pytest.ini").write_text("[pytest]\n")
    git(repository, "commit", "--all", "--quiet", "--message=editable")
    site = tmp_path / "finder"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"""
import sys
from importlib.util import spec_from_file_location
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "trainer":
            return spec_from_file_location(name, {str(repository)!r} + "/src/trainer/__init__.py")
sys.meta_path.insert({place}, Finder)
"""
    )
    change(repository)
    done = run(repository, "--gt-against=HEAD", PYTHONPATH=str(site))
    assert done.returncode == 1
    if place == 0:
        assert f"imported trainer from {repository}/src, so they did not run on" in done.stdout
    else:
        assert "1 newly failing, 1 with another text\n" in done.stdout


@pytest.mark.second_tier
@pytest.mark.parametrize("victim", ["pytest", "group"])
def test_the_worktree_is_removed_after_ctrl_c_and_after_a_kill(repository, victim):
    (repository / "test_it.py").write_text(
        "import os, time\n"
        "def test_it():\n"
        "    if 'GTRAINER_OTHER_SIDE' in os.environ:\n"
        f"        open({str(repository.parent / 'started')!r}, 'w').close()\n"
        "        time.sleep(600)\n"
    )
    git(repository, "commit", "--all", "--quiet", "--message=sleeps")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:hypothesispytest"]
    with subprocess.Popen(
        [*command, "--gt-against=HEAD"],
        cwd=repository,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(repository),
        start_new_session=True,
        # A shell starts what it runs in the background with SIGINT ignored, and Python keeps that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_until((repository.parent / "started").exists)
        if victim == "pytest":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=60)[0]

    def is_gone():
        try:
            assert_nothing_left(repository)
        except AssertionError:
            return False
        return True

    wait_until(is_gone)
    if victim == "group":
        assert process.returncode == 2, output
        assert "nothing compared: interrupted" in output


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gt-against=nowhere"], "--gt-against=nowhere: there is no such revision in "),
        (["--gt-against=--all"], "--gt-against=--all: there is no such revision in "),
        (["--gt-against=HEAD", "--gt-update-goldens"], "writes none: leave out"),
        (["--gt-against=HEAD", "--gt-report-against=x"], "exclude each other"),
        (["--gt-against=HEAD", "--pdb"], "runs tests where no debugger can ask"),
        (["--gt-moved=fail"], "add --gt-against=REV"),
    ],
)
def test_what_cannot_be_compared_ends_the_run_before_it_begins(repository, options, message):
    done = run(repository, *options)
    assert (done.returncode, done.stdout.count("test_it.py")) == (4, 0), done.stdout
    assert message in done.stderr


@pytest.mark.second_tier
def test_a_folder_that_is_no_repository_or_is_new_is_a_sentence(repository, tmp_path):
    (repository / "new").mkdir()
    done = run(repository, "--gt-against=HEAD", cwd="new")
    assert "there is no folder new at that revision" in done.stderr
    other = tmp_path / "other"
    other.mkdir()
    (other / "pytest.ini").write_text("[pytest]\n")
    done = run(repository, "--gt-against=HEAD", cwd=other)
    assert f"{other} is in no git repository" in done.stderr


def test_the_keeper_runs_a_command_at_the_revision_and_removes_everything(repository, tmp_path):
    change(repository)
    users = tmp_path / "users"  # a worktree on a disk that is not mounted
    git(repository, "worktree", "add", "--quiet", users)
    shutil.rmtree(users)
    folder = tmp_path / "temporary" / "gtrainer-against-x"
    folder.mkdir()
    kept = tmp_path / "seen"
    script = f"cp src/trainer/__init__.py {kept}; exit 3"
    command = [sys.executable, "-I", keeper.__file__, repository, "main", folder, "."]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "sh", "-c", script], **pipes) as process:
        assert process.stdout.readline() == "3\n"
        assert (folder / "tree").exists()
        process.stdin.close()
    assert "return 2 * x" in kept.read_text()
    assert not folder.exists()
    listed = git(repository, "worktree", "list")
    assert "gtrainer-against" not in listed
    assert str(users) in listed


def test_modules_of_the_worktree_are_told_from_those_of_the_working_tree(tmp_path):
    top, tree = tmp_path / "top", tmp_path / "tree"
    (top / "src" / "trainer").mkdir(parents=True)
    (top / "src" / "trainer" / "__init__.py").touch()
    revision = Revision("main", "0" * 40, top, top, "here")
    own = {"trainer": f"{top}/src"}
    assert revision._mixed(own, {"trainer": f"{tree}/src"}, tree) is None
    found = revision._mixed(own, {"trainer": f"{top}/src", "test_it": str(tree)}, tree)
    assert "so they did not run on the code of that revision" in found
    installed = {"trainer": f"{top}/.venv/lib/site-packages"}
    found = revision._mixed(own, installed | {"test_it": str(tree)}, tree)
    assert "so they did not run on the code of that revision" in found
    assert "an installed copy" in revision._mixed(installed, own, tree)
    assert "do not say" in revision._mixed(own, {}, tree)


def test_the_folder_of_a_module_is_read_from_whatever_it_is():
    class Angry(ModuleType):
        def __getattr__(self, name):
            raise RuntimeError(name)

    assert folder_of(keeper) == str(Path(keeper.__file__).resolve().parent)
    assert folder_of(sys.modules["pytest_gtrainer"]) == str(Path(keeper.__file__).parents[2])
    assert folder_of(Angry("angry")) is None
    assert folder_of(ModuleType("empty")) is None


@pytest.mark.parametrize(
    ("then", "now", "lines"),
    [
        (1.0, 1.9, []),
        (0.1, 0.5, []),
        (0.1, 0.7, ["slower: 0.1 s then, 0.7 s now"]),
        (3.0, 1.0, ["faster: 3.0 s then, 1.0 s now"]),
    ],
)
def test_a_time_that_moves_is_said_and_does_not_count_as_moved(then, now, lines):
    report = pytest.TestReport("a", ("a", 0, "a"), {}, "passed", None, "call", duration=now)
    details = build_details(Collected("a", [report]))
    earlier = Earlier(Path(), {"a": details | {"seconds": then}}, {}, times=True)
    found = earlier.compare(Collected("a", [report]), details, {})
    assert (found["lines"], found["moved"]) == (lines, False)


OWN = (
    "--rootdir=",
    "--basetemp=/",
    "--gt-report=",
    "--maxfail=",
    "--continue-on-collection-errors",
)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], []),
        (["--gt-against=main", "-q"], ["-q"]),
        (["--gt-against", "main", "-q"], ["-q"]),
        (["-q", "--gt-moved", "fail", "--gt-against", "main", "-x"], ["-q", "-x"]),
        (["--gt-moved=fail", "--gt-against=main"], []),
    ],
)
@pytest.mark.parametrize("paths", [[], ["test_a.py"], ["--", "{top}/test_a.py", "-odd.py"]])
def test_the_run_there_has_the_arguments_of_here_and_its_files_elsewhere(
    pytester, options, kept, paths
):
    paths = [path.format(top=pytester.path) for path in paths]
    config = pytester.parseconfig("--basetemp=here", *options, *paths)
    revision = Revision("main", "0" * 40, pytester.path, pytester.path, "here")
    arguments = revision._arguments(config, Path("/there"))
    own = [argument for argument in arguments if argument.startswith(OWN)]
    assert len(own) == len(OWN)

    # Options behind "--" would be paths, and the last of two options counts.
    there = [path.replace(str(pytester.path), "/there/tree") for path in paths]
    expected = ["--basetemp=here", *kept, *there, *own]
    if "--" in paths:
        expected = ["--basetemp=here", *kept, *own, *there]
    assert arguments == expected


@pytest.mark.parametrize(
    "name", ["", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR"]
)
def test_a_revision_is_looked_up_in_the_repository_of_the_run(
    repository, pytester, monkeypatch, name
):
    """Git names the repository and the index of a hook in the environment."""
    monkeypatch.chdir(repository)
    config = pytester.parseconfig(f"--rootdir={repository}")
    first = git(repository, "rev-parse", "HEAD")
    if name:
        monkeypatch.setenv(name, str(repository.parent / "elsewhere"))

    same = Revision.find(config, "main")
    assert (same.commit, same.top, str(same)) == (first, repository, f"main ({first[:10]})")
    assert same.here == "the same commit, unchanged: only what is not deterministic can move"
    assert str(Revision.find(config, first[:12])) == first[:10]

    change(repository)
    assert Revision.find(config, "main").here == f"{first[:10]} with 1 uncommitted change"
    (repository / "new.py").touch()
    assert Revision.find(config, "main").here == f"{first[:10]} with 2 uncommitted changes"


def test_an_unchanged_tree_at_another_commit_is_named_by_its_own(repository, pytester, monkeypatch):
    monkeypatch.chdir(repository)
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "--allow-empty", "--quiet", "--message=second")
    found = Revision.find(pytester.parseconfig(f"--rootdir={repository}"), "HEAD~1")
    assert found.commit == first
    assert found.here == git(repository, "rev-parse", "HEAD")[:10] != first[:10]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ([""], ["test_a[1]", "test_a[10]", "test_ab", "test_d[1]", "test_d[2]", "test_e"]),
        (["::test_a"], ["test_a[1]", "test_a[10]"]),
        (["::test_a[1]"], ["test_a[1]"]),
        (["::test_ab"], ["test_ab"]),
        (["::TestC"], ["test_d[1]", "test_d[2]", "test_e"]),
        (["::TestC::test_d", "::test_ab"], ["test_ab", "test_d[1]", "test_d[2]"]),
        (["::TestC::test_d[2]", "::test_gone"], ["test_d[2]"]),
        (["::test_gone"], []),
    ],
)
def test_tests_are_chosen_at_the_revision_as_pytest_does_but_for_those_that_are_not_there(
    pytester, chosen, names
):
    file = pytester.makepyfile(test_it="")
    config = pytester.parseconfig(*(f"test_it.py{name}" for name in chosen))
    config.args.append("test_other.py::test_a")
    items = []
    for name in (
        "test_a[1]",
        "test_a[10]",
        "test_ab",
        "TestC::test_d[1]",
        "TestC::test_d[2]",
        "TestC::test_e",
    ):
        items.append(SimpleNamespace(nodeid=f"test_it.py::{name}", path=file))
    choice = ChosenTests(config)
    assert config.args == ["test_it.py"]
    choice.pytest_collection_modifyitems(config, items)
    assert [item.nodeid.rpartition("::")[2] for item in items] == names


def test_a_run_none_of_whose_files_is_there_names_them(pytester):
    config = pytester.parseconfig("test_a.py::test_b", "test_c.py")
    with pytest.raises(pytest.UsageError, match=r"^there is no test_a\.py::test_b, test_c\.py$"):
        ChosenTests(config)


@pytest.mark.second_tier
@pytest.mark.parametrize("option", ["--help", "--markers", "--version"])
def test_a_run_without_a_session_compares_nothing(repository, option):
    done = run(repository, option, "--gt-against=main")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback (most recent" not in done.stdout + done.stderr
