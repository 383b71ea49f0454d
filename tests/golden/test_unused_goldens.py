"""Goldens that no test checks: which they are, after which runs it is said, and what is done about
them.
"""

import itertools
import os
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from pytest_gtrainer.golden.unused import UnusedGoldens

SOURCE = """
import pytest

def test_a(gt_golden):
    gt_golden.check("test_a")

@pytest.mark.parametrize("x", [1, 2])
def test_b(gt_golden, x):
    gt_golden.check(f"test_b-{x}@name", "name")
"""
USED = ("test_it/test_a.txt", "test_it/test_b-1@name.txt", "test_it/test_b-2@name.txt")
UNUSED = (
    "old/test_it/test_a.txt",  # the file of the test is gone
    "test_it/test_a.fxgraph",  # the test checks a text now
    "test_it/test_a@name.txt",  # no longer this name
    "test_it/test_b-3@name.txt",  # no longer this parameter
    "test_it/test_c.txt",  # the test is gone
)
TITLE = "goldens that no test checks (--gt-prune-goldens removes them):"


def unused_in(result: pytest.RunResult) -> list[str]:
    """The unused goldens that the summary lists."""
    lines = result.outlines
    if TITLE not in lines:
        assert "unused" not in result.stdout.str().replace("--gt-unused-goldens", "")
        return []
    rest = lines[lines.index(TITLE) + 1 :]
    listed = rest[: next(n for n, line in enumerate(rest) if not line.startswith("  "))]
    return [line.strip().removeprefix("golden/") for line in listed]


# -- which


def test_each_way_to_become_unused_is_found(run_here, put_goldens, goldens):
    put_goldens(
        *USED,
        *UNUSED,
        "test_it/README.md",
        "notes.txt",
        "test_it/.hidden.txt",
        "test_it/.gt-0-1-2.tmp",
    )
    before = goldens()
    result = run_here(SOURCE)
    result.assert_outcomes(passed=3)
    assert unused_in(result) == list(UNUSED)
    result.stdout.fnmatch_lines(["goldens   3 equal, 5 unused"])
    assert (result.ret, goldens()) == (0, before)


def test_what_the_summary_lists_is_bounded(run_here, put_goldens):
    put_goldens(*USED, *(f"test_it/test_c-{x:02}.txt" for x in range(50)))
    result = run_here(SOURCE)
    result.stdout.fnmatch_lines(
        ["  golden/test_it/test_c-07.txt", "  … and 42 more", "*3 passed*"], consecutive=True
    )
    result.stdout.fnmatch_lines(["goldens   3 equal, 50 unused"])


NOT_CHECKED = {
    "failed": "def test_a(gt_golden): assert False",
    "failed in setup": "import pytest\n@pytest.fixture\ndef f(): assert False\ndef test_a(f): pass",
    "failed in teardown": (
        "import pytest\n@pytest.fixture\ndef f():\n    yield\n    assert False\ndef test_a(f): pass"
    ),
    "failed subtest": "def test_a(subtests):\n    with subtests.test():\n        assert False",
    "skipped subtest": "import pytest\ndef test_a(subtests):\n    with subtests.test():\n"
    "        pytest.skip()",
    "skipped": "import pytest\ndef test_a(gt_golden): pytest.skip()",
    "skipped by a mark": "import pytest\n@pytest.mark.skip\ndef test_a(gt_golden): pass",
    "xfailed": "import pytest\n@pytest.mark.xfail\ndef test_a(gt_golden): assert False",
    "skipped file": "import pytest\npytest.skip(allow_module_level=True)\ndef test_a(gt_golden): "
    "pass",
    "missing import": "import pytest\npytest.importorskip('no_such_module')\ndef "
    "test_a(gt_golden): pass",
    "deselected": "import pytest\n@pytest.mark.slow\ndef test_a(gt_golden): pass",
    "no parameters here": "import pytest\n@pytest.mark.parametrize('x', [])\ndef test_a(gt_golden, "
    "x): pass",
}


@pytest.mark.parametrize("source", NOT_CHECKED.values(), ids=NOT_CHECKED)
def test_goldens_of_tests_that_came_to_no_check_are_kept(run_here, put_goldens, goldens, source):
    """Each beside a golden that is unused for sure, so that the run is seen to be full."""
    own = "test_one/test_a-8.txt" if "parametrize" in source else "test_one/test_a.txt"
    put_goldens(own, "test_two/test_b.txt", "test_two/test_c.txt")
    result = run_here(
        None,
        "-mnot slow",
        "--gt-prune-goldens",
        "-Wignore",
        test_one=source,
        test_two="def test_b(gt_golden): gt_golden.check('test_b')",
    )
    result.stdout.fnmatch_lines(["goldens   1 equal, 1 removed"])
    assert sorted(goldens()) == [own, "test_two/test_b.txt"]


def test_the_twin_a_test_that_passes_without_its_check_loses_its_golden(run_here, put_goldens):
    put_goldens("test_one/test_a.txt", "test_one/test_b.txt")
    result = run_here(
        None, test_one="def test_a(): pass\ndef test_b(gt_golden): gt_golden.check('test_b')"
    )
    assert unused_in(result) == ["test_one/test_a.txt"]


def test_goldens_of_files_that_are_not_collected_are_kept(run_here, put_goldens, pytester):
    put_goldens(
        *USED, "test_ignored/test_a.txt", "test_gone/test_a.txt", "sub_x/test_far/test_a.txt"
    )
    pytester.makeconftest("collect_ignore = ['test_ignored.py']")
    folder = pytester.mkdir("sub x")  # its goldens lie in `sub_x~…`, which `sub_x` is not
    (folder / "test_far.py").write_text("")
    result = run_here(SOURCE, "--ignore=sub x", test_ignored="def test_a(): pass")
    assert unused_in(result) == ["sub_x/test_far/test_a.txt", "test_gone/test_a.txt"]


def test_a_plugin_that_drops_tests_silently_makes_no_golden_unused(run_here, put_goldens, pytester):
    put_goldens(*USED, "test_it/test_c.txt")
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    del items[1:]")
    assert unused_in(run_here(SOURCE)) == ["test_it/test_c.txt"]


def test_tests_that_a_plugin_adds_have_goldens_too(run_here, put_goldens, pytester):
    put_goldens(*USED, "test_it/test_added.txt", "test_it/test_c.txt")
    pytester.makeconftest("""
        import pytest
        def pytest_collection_modifyitems(items):
            def test_added(gt_golden): pytest.skip()
            parent = items[0].parent
            added = pytest.Function.from_parent(parent, name="test_added", callobj=test_added)
            items.append(added)
    """)
    assert unused_in(run_here(SOURCE)) == ["test_it/test_c.txt"]


def test_of_a_test_that_a_plugin_reports_by_itself_nothing_is_known(
    run_here, put_goldens, pytester
):
    """Plugins that run a test in another process report it by themselves."""
    put_goldens(*USED, "test_it/test_a@name.txt", "test_it/test_c.txt")
    pytester.makeconftest("""
        import pytest
        def pytest_runtest_protocol(item):
            if item.name != "test_a":
                return None
            for when in ("setup", "call", "teardown"):
                report = pytest.TestReport(item.nodeid, item.location, {}, "passed", None, when)
                item.ihook.pytest_runtest_logreport(report=report)
            return True
    """)
    assert unused_in(run_here(SOURCE)) == ["test_it/test_c.txt"]


def test_a_test_that_is_run_again_is_judged_by_its_last_time(run_here, put_goldens, pytester):
    """Like pytest-rerunfailures: the first time it fails before its check."""
    put_goldens("test_it/test_a.txt", "test_it/test_a@name.txt")
    pytester.makeconftest("""
        from _pytest.runner import runtestprotocol
        def pytest_runtest_protocol(item, nextitem):
            for _ in range(2):
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
                if any(report.failed for report in reports):
                    item._initrequest()
                for report in reports:
                    item.ihook.pytest_runtest_logreport(report=report)
            return True
    """)
    source = "times = []\ndef test_a(gt_golden):\n    times.append(1)\n    assert len(times) > 1\n"
    result = run_here(source + "    gt_golden.check('test_a')")
    assert unused_in(result) == ["test_it/test_a@name.txt"]


def test_a_link_keeps_what_it_leads_to(run_here, put_goldens, pytester):
    put_goldens("test_it/test_b-1@name.txt", "test_it/test_b-2@name.txt", "shared/test_a.txt")
    folder = pytester.path / "golden/test_it"
    (folder / "test_a.txt").symlink_to("../shared/test_a.txt")
    (folder / "test_c.txt").symlink_to("../shared/test_a.txt")
    result = run_here(SOURCE, "--gt-prune-goldens")
    result.stdout.fnmatch_lines(["removed golden/test_it/test_c.txt"])
    assert sorted(os.listdir(folder)) == ["test_a.txt", "test_b-1@name.txt", "test_b-2@name.txt"]
    assert (folder / "test_a.txt").read_text() == "test_a\n"


def test_a_link_to_a_folder_keeps_what_is_in_it(run_here, put_goldens, pytester):
    """Also what a test checks that was skipped: nothing says which names are in use."""
    put_goldens("shared/test_a.txt", "shared/test_b-1@name.txt", "shared/test_b-2@name.txt")
    put_goldens("shared/test_skipped.txt", "test_gone/test_a.txt")
    (pytester.path / "golden/test_it").symlink_to("shared")
    source = SOURCE + "\n@pytest.mark.skip\ndef test_skipped(gt_golden): gt_golden.check('x')\n"
    result = run_here("import pytest\n" + source, "--gt-prune-goldens")
    assert "removed golden/test_gone/test_a.txt" in result.outlines
    assert len(os.listdir(pytester.path / "golden/shared")) == 4


def test_links_that_loop_do_not_end_the_run(run_here, put_goldens, pytester):
    """One that a test checks, and one that no test does."""
    put_goldens(*USED[1:])
    loops = [pytester.path / "golden/test_it" / name for name in ("test_a.txt", "test_c.txt")]
    for loop in loops:
        loop.symlink_to(loop.name)
    result = run_here(SOURCE, "--gt-prune-goldens")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*golden/test_it/test_a.txt is a link that leads back to itself*"])
    result.stdout.fnmatch_lines(["removed golden/test_it/test_c.txt"])
    assert [loop.is_symlink() for loop in loops] == [True, False]


def test_another_use_of_the_folders_name_is_left_alone(run_here, put_goldens, goldens):
    put_goldens("cases/one.txt", "cases/two.json")
    result = run_here(
        "def test_a(): pass", "--gt-prune-goldens", "--disable-warnings"
    )  # pytest's own name plugins
    assert "gtrainer" not in result.stdout.str().partition("collected")[2]
    assert len(goldens()) == 2


# -- after which runs


PARTS = {
    "-k": (["-k", "test"], "-k selects tests"),
    "node id": (["test_it.py::test_a"], "test_it.py::test_a names a test"),
    "--collect-only": (["--collect-only"], "--collect-only runs no test"),
    "--setup-only": (["--setup-only"], "--setup-only runs no test"),
    "--setup-plan": (["--setup-plan"], "--setup-plan runs no test"),
    "one file": (["test_other.py"], "test_other.py does not hold all tests"),
    "elsewhere": (["empty"], "empty does not hold all tests"),
}


@pytest.mark.second_tier("--setup")
@pytest.mark.parametrize(("arguments", "reason"), PARTS.values(), ids=PARTS)
def test_a_run_of_a_part_says_nothing_and_removes_nothing(
    run_here, put_goldens, goldens, pytester, arguments, reason
):
    put_goldens(*USED, *UNUSED, "test_other/test_d.txt")
    pytester.mkdir("empty")
    files = {"test_it": SOURCE, "test_other": "def test_d(): pass"}
    assert unused_in(run_here(None, *arguments, **files)) == []
    result = run_here(None, *arguments, "--gt-unused-goldens=fail")
    assert result.ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    result.stdout.fnmatch_lines([f"unused goldens were not looked for: {reason}"])
    result = run_here(None, *arguments, "--gt-prune-goldens")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    sentence = "--gt-prune-goldens removes goldens only after a run of all tests, and "
    result.stderr.fnmatch_lines([f"ERROR: {sentence}{reason}"])
    assert len(goldens()) == len(USED) + len(UNUSED) + 1


@pytest.mark.second_tier("--sw")
@pytest.mark.parametrize("flag", ["--lf", "--sw"])
def test_a_run_of_what_failed_last_says_nothing(run_here, put_goldens, flag):
    put_goldens(*USED, *UNUSED)
    files = {"test_it": SOURCE + "\ndef test_z(): assert False", "test_more": "def test_y(): pass"}
    assert unused_in(run_here(None, with_cache=True, **files)) == list(UNUSED)
    assert unused_in(run_here(None, flag, with_cache=True)) == []
    assert unused_in(run_here(SOURCE, flag, with_cache=True)) == [], "also when nothing fails"
    assert unused_in(run_here(SOURCE + "\ndef test_z(): assert False", with_cache=True)) == list(
        UNUSED
    )
    assert unused_in(run_here(None, "--ff", with_cache=True)) == list(UNUSED)


STOPS = {
    "-x": (["-x"], "assert False"),
    "--maxfail": (["--maxfail=1"], "assert False"),
    "exit": ([], "import pytest; pytest.exit('enough')"),
}


@pytest.mark.second_tier("exit")
@pytest.mark.parametrize(("arguments", "body"), STOPS.values(), ids=STOPS)
def test_a_run_that_stops_early_says_nothing_and_removes_nothing(
    run_here, put_goldens, goldens, arguments, body
):
    put_goldens(*USED, *UNUSED)
    files = {"test_a": f"def test_a(): {body}", "test_it": SOURCE}
    assert unused_in(run_here(None, *arguments, **files)) == []
    result = run_here(None, *arguments, "--gt-prune-goldens")
    result.stdout.fnmatch_lines(["unused goldens were not looked for: *"])
    assert len(goldens()) == len(USED) + len(UNUSED)


def test_an_interrupted_run_removes_nothing(run, put_goldens, goldens):
    put_goldens(*USED, *UNUSED)
    result = run(SOURCE + "\ndef test_c(): raise KeyboardInterrupt", "--gt-prune-goldens")
    result.stdout.fnmatch_lines(["unused goldens were not looked for: the run was stopped"])
    assert len(goldens()) == len(USED) + len(UNUSED)


def test_a_stop_at_the_very_last_test_is_none(run_here, put_goldens):
    """The twin: everything has run."""
    put_goldens(*USED, *UNUSED)
    assert unused_in(
        run_here(None, "-x", test_it=SOURCE, test_z="def test_z(): assert False")
    ) == list(UNUSED)


def test_after_a_failed_collection_nothing_is_said(run_here, put_goldens):
    put_goldens(*USED, *UNUSED, "test_broken/test_z.txt")
    result = run_here(
        SOURCE, "--continue-on-collection-errors", "--gt-unused-goldens=fail", test_broken="1 / 0"
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["unused goldens were not looked for: collection failed"])
    result.stdout.no_fnmatch_line(TITLE)


@pytest.mark.parametrize(
    ("testpaths", "arguments", "is_full"),
    [
        ("", [], True),
        ("", ["."], True),
        ("", ["tests"], True),
        ("", ["tests/test_it.py"], False),
        ("", ["tests/test_it.py", "tests/test_more.py"], True),
        ("tests", [], True),
        ("tests", ["tests"], True),
        ("tests", ["."], True),
        ("tests", ["tests/test_it.py"], False),
        ("tests more", [], True),
        ("tests more", ["more", "tests"], True),
        ("tests more", ["more"], False),
    ],
)
def test_which_paths_are_all_of_them(
    pytester, run_here, put_goldens, testpaths, arguments, is_full
):
    put_goldens(*(f"tests/{name}" for name in USED), "tests/test_more/test_z.txt")
    for folder, name, source in (
        ("tests", "test_it", SOURCE),
        ("tests", "test_more", ""),
        ("more", "test_m", ""),
    ):
        (pytester.path / folder).mkdir(exist_ok=True)
        (pytester.path / folder / f"{name}.py").write_text(source)
    pytester.makeini(f"[pytest]\ntestpaths = {testpaths}")
    assert unused_in(run_here(None, *arguments)) == (
        ["tests/test_more/test_z.txt"] if is_full else []
    )


def test_a_path_out_of_the_tree_holds_none_of_its_tests(run_here, put_goldens, tmp_path_factory):
    put_goldens(*USED, *UNUSED)
    outside = tmp_path_factory.mktemp("outside")
    (outside / "test_o.py").write_text("def test_o(): pass")
    run_here(SOURCE).assert_outcomes(passed=3)
    result = run_here(None, "--rootdir=.", "-c", "tox.ini", str(outside))
    result.assert_outcomes(passed=1)
    assert unused_in(result) == []


def test_tests_that_this_run_is_not_about_keep_their_goldens(pytester, run_here, put_goldens):
    """``examples`` is not in ``testpaths``: another run checks its goldens."""
    put_goldens(*USED, "examples/test_e/test_e.txt", "gone/test_e/test_e.txt")
    (pytester.mkdir("examples") / "test_e.py").write_text("")
    pytester.makeini("[pytest]\ntestpaths = test_it.py")
    assert unused_in(run_here(SOURCE)) == ["gone/test_e/test_e.txt"]


# -- workers


@pytest.mark.second_tier
def test_workers_together_tell_it_once(run, put_goldens, goldens):
    put_goldens(*USED, *UNUSED)
    result = run(SOURCE, "-n2", "--gt-prune-goldens", "--gt-unused-goldens=fail")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["goldens   3 equal, 5 removed", *(f"removed golden/{name}" for name in UNUSED)]
    )
    assert (result.ret, sorted(goldens())) == (0, sorted(USED))


@pytest.mark.parametrize("order", list(itertools.permutations(("ab", "bc", "abcd"))))
def test_a_golden_that_one_worker_has_collected_has_a_test(pytester, order):
    goldens = SimpleNamespace(modes=SimpleNamespace(unused="fail"), late_facts=[])
    plugin = UnusedGoldens(pytester.parseconfig(), goldens)
    files = [PurePosixPath(f"golden/test_it/{name}.txt") for name in "abcd"]
    for number, names in enumerate(order):
        unowned = [f"golden/test_it/{name}.txt" for name in names]
        node = SimpleNamespace(
            workeroutput={"gt_unowned_goldens": unowned}, gateway=SimpleNamespace(id=f"gw{number}")
        )
        plugin.pytest_testnodedown(node, None)
    assert plugin._unused(files) == {files[1]}
    assert plugin._reason_of_cut(0) is None
    plugin.pytest_testnodedown(SimpleNamespace(gateway=SimpleNamespace(id="gw3")), None)
    assert plugin._reason_of_cut(0) == "worker gw3 has died"


@pytest.mark.second_tier
def test_after_a_worker_has_died_nothing_is_removed(run, put_goldens, goldens):
    """Goldens that the dead worker had counted before stay counted."""
    put_goldens(*USED[1:], *UNUSED)
    source = SOURCE + "\ndef test_c():\n    import os\n    os._exit(7)"
    result = run(source, "-n1", "--gt-prune-goldens", "--gt-update-goldens")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["goldens   1 created, 2 equal", "unused goldens were not looked for: worker gw0*died"]
    )
    assert sorted(goldens()) == sorted({*USED, *UNUSED})


@pytest.mark.second_tier
def test_workers_that_stop_at_a_failure_remove_nothing(run, put_goldens, goldens):
    put_goldens(*USED, *UNUSED)
    source = (
        "import time\ndef test_0():\n    assert False\n"
        + SOURCE
        + "\ndef test_z(): time.sleep(1)\n"
    )
    result = run(source, "-n2", "-x", "--gt-prune-goldens")
    result.stdout.fnmatch_lines(["unused goldens were not looked for: *"])
    assert len(goldens()) == len(USED) + len(UNUSED)


# -- devices


GRAPH = '# gtrainer graph v2\ndefault = device("{}")\nif fwd:\n  a: f32[2] = aten.a()\n'
NUMBERS = (
    '{{"gtrainer": "numbers v1", "entries": [{{"environment": {{"device": "{}"}}, "values": '
    "1}}]}}\n"
)


@pytest.mark.parametrize(
    ("device", "outcome"), [("cuda", "3 not judged"), ("cpu", "1 not judged, 2 unused")]
)
def test_what_only_a_gpu_could_judge_is_not_unused_without_one(
    run_here, put_goldens, device, outcome
):
    """A golden needs a GPU by its name, its devices or its environments."""
    put_goldens("test_it/test_a.txt", "test_it/test_b-nccl.txt")
    put_goldens("test_it/test_a@after.fxgraph", text=GRAPH.format(device))
    put_goldens("test_it/test_a@loss.numbers.json", text=NUMBERS.format(device))
    result = run_here("def test_a(gt_golden): gt_golden.check('test_a')", "--gt-device=cpu")
    result.stdout.fnmatch_lines([f"goldens   1 equal, {outcome}"])


# -- what is done


def test_they_can_fail_the_run(run_here, put_goldens, pytester):
    put_goldens(*USED, *UNUSED)
    result = run_here(SOURCE, "--gt-unused-goldens", "fail")
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert unused_in(result) == list(UNUSED)
    result.stdout.fnmatch_lines(
        ["a run with unused goldens has failed, as --gt-unused-goldens=fail was given"]
    )
    assert unused_in(run_here(None, "--gt-unused-goldens=ignore")) == []
    pytester.makeini("[pytest]\ngt_unused_goldens = fail")
    assert run_here(None).ret == pytest.ExitCode.TESTS_FAILED


def test_pruning_removes_them_says_each_and_leaves_no_empty_folder(
    run_here, put_goldens, goldens, pytester
):
    put_goldens(*USED, *UNUSED, "test_it/README.md")
    result = run_here(SOURCE, "--gt-prune-goldens", ".")  # a path may follow the flag
    result.stdout.fnmatch_lines(
        ["goldens   3 equal, 5 removed", *(f"removed golden/{name}" for name in UNUSED)]
    )
    assert result.ret == 0
    assert sorted(goldens()) == sorted([*USED, "test_it/README.md"])
    assert not (pytester.path / "golden/old").exists()
    assert unused_in(run_here(None)) == []


def test_what_cannot_be_removed_is_still_unused(
    run_here, put_goldens, goldens, monkeypatch, pytester
):
    put_goldens(*USED, "test_it/test_c.txt")
    pytester.makeconftest("""
        import os, pathlib
        def pytest_sessionstart():
            def unlink(path, missing_ok=False):
                raise OSError(30, os.strerror(30))
            pathlib.Path.unlink = unlink
    """)
    monkeypatch.setattr(
        "pathlib.Path.unlink", __import__("pathlib").Path.unlink
    )  # put back afterwards
    result = run_here(SOURCE, "--gt-prune-goldens")
    sentence = "golden/test_it/test_c.txt was not removed: Read-only file system"
    result.stdout.fnmatch_lines(
        ["goldens   3 equal, 1 unused", sentence, TITLE, "  golden/test_it/test_c.txt"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
