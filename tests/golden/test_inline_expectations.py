"""``assert_expected_inline`` under the flags of goldens: in functions and classes, under xdist."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.second_tier

HEAD = "import os, pytest, expecttest\nfrom expecttest import assert_expected_inline as same\n"
UPDATE = "--gt-update-goldens"


@pytest.fixture(autouse=True)
def without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs these tests may have set it."""
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)


@pytest.fixture
def run_file(run, pytester) -> Callable[..., pytest.RunResult]:
    """``run_file(text, *arguments)``: the text exactly as it is, in ``test_it.py``."""

    def run_file(text: str, *arguments: str) -> pytest.RunResult:
        (pytester.path / "test_it.py").write_text(text)
        return run(None, *arguments)

    return run_file


@pytest.fixture
def source(pytester) -> Callable[..., str]:
    """The present text of a test file."""
    return lambda name="test_it.py": (pytester.path / name).read_text()


PLAIN = (
    HEAD
    + '''
def test_function():
    same("one\\ntwo\\n", """""")
    same("met", """met""")
    same("three", """zero""")

class TestCase(expecttest.TestCase):
    def test_method(self):
        self.assertExpectedInline("four", \'\'\'\\
zero
zero
\'\'\')
        self.substituteExpected("/tmp/123", "TEMP")
        self.assertExpectedRaisesInline(ValueError, int, """""", "/tmp/123")

expected = expecttest.Expect("""zero""")
def test_expect():
    expected.assert_expected("five")
'''
)


def test_a_skipped_subtest_does_not_keep_its_test_from_updating(run_file, source):
    test = 'def test_a(subtests):\n    same("new", """old""")\n'
    run_file(f"{HEAD}{test}    with subtests.test(): pytest.skip()\n", UPDATE)
    assert 'same("new", """new""")' in source()


def test_one_run_accepts_all_as_expecttest_itself_would(run, run_file, pytester, source):
    result = run_file(PLAIN, UPDATE)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["inline    2 created, 3 updated"])
    assert [
        path.name for path in pytester.path.iterdir() if path.suffix in (".py", ".bak", ".tmp")
    ] == ["test_it.py"]
    ours = source()
    (pytester.path / "test_it.py").write_text(PLAIN)
    pytester._monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    pytester.runpytest_subprocess("-p", "no:gtrainer").assert_outcomes(passed=3)
    assert ours == source()
    assert ours.count('"""four"""') == 0
    assert (
        ours.count("'''four'''")
        == ours.count('"""\\\none\ntwo\n"""')
        == ours.count('\'TEMP\'"""')
        == 1
    )
    pytester._monkeypatch.delenv("EXPECTTEST_ACCEPT")
    run(None).assert_outcomes(passed=3)


def test_without_the_flag_a_mismatch_fails_with_the_command_for_its_test(run, run_file, source):
    text = PLAIN + "def test_other():\n    same('x', 'x')\n    assert 'x' == 'y'\n"
    result = run_file(text, "--gt-gpus=4")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "*Mismatch between actual and expect strings:*",
            "*- inline expectation -*",
            "to accept what was obtained:",
            "  pytest test_it.py::test_function --gt-gpus=4 --gt-update-goldens",
            "*AssertionError: 'zero\\nzero\\n' != 'four'*",
            "*- inline expectation -*",
            "to accept what was obtained:",
            "  pytest test_it.py::TestCase::test_method --gt-gpus=4 --gt-update-goldens",
        ]
    )
    assert result.stdout.lines.count("to accept what was obtained:") == 3, (
        "not for the failure of test_other"
    )
    assert source() == text
    result.stdout.no_fnmatch_line("inline *")


def test_the_flag_that_creates_leaves_what_is_expected_already(run_file, source):
    result = run_file(PARAMETERS, "--gt-create-goldens")
    result.assert_outcomes(passed=5, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*test_it.py:14: one inline expectation, but*", "inline    1 created"]
    )
    assert source() == PARAMETERS.replace('"new", """"""', '"new", """new"""')


NOT_PASSED = (
    HEAD
    + '''
@pytest.fixture
def broken():
    yield
    assert False

def test_failed(): same("new", """old"""); assert False
def test_skipped(): same("new", """old"""); pytest.skip()
@pytest.mark.xfail
def test_xfailed(): same("new", """old"""); assert False
def test_torn_down(broken): same("new", """old""")
def test_golden(gt_golden):
    same("new", """old""")
    gt_golden.check("text")
def test_passed(): same("new", """new""")
'''
)


def test_a_test_that_does_not_pass_updates_nothing(run, run_file, pytester, source):
    (pytester.path / "golden/test_it/test_golden.txt").mkdir(parents=True)
    run_file(NOT_PASSED, UPDATE).assert_outcomes(failed=2, skipped=1, xfailed=1, passed=2, errors=1)
    assert source() == NOT_PASSED


PARAMETERS = (
    HEAD
    + '''
@pytest.mark.parametrize("x", [1, 2, 3])
def test_alike(x):
    same("new", """""")

@pytest.mark.parametrize("x", [1, 2, 3])
def test_unlike(x):
    same(f"{min(x, 2)}", """1""")

def test_loop():
    for x in "ab":
        same(x, """""")
'''
)


def test_one_expectation_of_several_tests_is_accepted_once_if_all_agree(run, run_file, source):
    result = run_file(PARAMETERS, UPDATE)
    result.assert_outcomes(passed=7, errors=2)
    problem = "one inline expectation, but different texts, so none is accepted: give each its own"
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_unlike[[]1] *",
            f"test_it.py:10: {problem}",
            "  test_it.py::test_unlike[[]1[]]: '1'",
            "  test_it.py::test_unlike[[]2[]]: '2'",
            "*ERROR at teardown of test_loop *",
            f"test_it.py:14: {problem}",
            "  test_it.py::test_loop: 'a'",
            "  test_it.py::test_loop: 'b'",
            "inline    1 created",
        ]
    )
    assert source() == PARAMETERS.replace('"new", """"""', '"new", """new"""')
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def many(spelled: Callable[[int], str]) -> str:
    """Expectations of many heights, whose order in the file is not that of the tests."""
    return HEAD + "".join(
        f"def test_{n * 7 % 10}():\n    same('new' + '\\n' * {n % 3}, '''{spelled(n)}''')\n"
        for n in range(10)
    )


OLD = many(lambda n: f"old {n}")
NEW = many(lambda n: "new" if n % 3 == 0 else "\\\nnew" + "\n" * (n % 3))


def test_workers_send_their_expectations_and_one_process_writes(run, run_file, pytester, source):
    (pytester.path / "test_two.py").write_text("#\n" + OLD)
    result = run_file(OLD, "-n2", UPDATE)
    result.assert_outcomes(passed=20)
    result.stdout.fnmatch_lines(["inline    20 updated"])
    assert source() == NEW
    assert source("test_two.py") == "#\n" + NEW
    run(None).assert_outcomes(passed=20)


CRASH = (
    HEAD
    + '''
def test_1(): same("new", """old 1""")
def test_2(): same("new", """old 2""")
def test_3():
    same("new", """old 3""")
    os._exit(1)
def test_4(): same("new", """old 4""")
'''
)


def test_what_passed_before_a_worker_crashed_is_not_lost(run, run_file, source):
    result = run_file(CRASH, "-n1", "--max-worker-restart=1", UPDATE)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["inline    3 updated"])
    expected = CRASH
    for number in (1, 2, 4):
        expected = expected.replace(f"old {number}", "new")
    assert source() == expected


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        ("assert False", ["-x"]),
        ("raise KeyboardInterrupt", []),
        ("request.addfinalizer(interrupted)", []),
    ],
    ids=["-x", "an interrupt", "an interrupt of the teardown"],
)
def test_what_passed_before_the_run_was_stopped_is_accepted(run, run_file, source, ending, options):
    text = CRASH.replace("test_3()", "test_3(request)").replace("os._exit(1)", ending)
    text += "def interrupted(): raise KeyboardInterrupt\n"
    result = run_file(text, *options, UPDATE)
    result.stdout.fnmatch_lines(["inline    2 updated"])
    assert source() == text.replace("old 1", "new").replace("old 2", "new")


def test_ci_is_refused_by_flag_and_by_variable(run, run_file, source, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = run_file(PLAIN, UPDATE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    result = run_file(PLAIN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: EXPECTTEST_ACCEPT is refused where CI is set*, or give --gt-goldens-in-ci*"]
    )
    assert source() == PLAIN
    run_file(PLAIN, "--gt-goldens-in-ci").assert_outcomes(passed=3)
    assert source() != PLAIN


FAILING = "def test_x():\n    same('new', '''old''')\n    assert False\n"


def test_the_variable_of_expecttest_is_served_in_the_same_way(
    run, run_file, pytester, source, monkeypatch
):
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    result = run_file(OLD + FAILING)
    result.assert_outcomes(passed=10, failed=1)
    result.stdout.fnmatch_lines(["inline    10 updated"])
    assert source() == NEW + FAILING
    assert not (pytester.path / "test_it.py.bak").exists()


CHANGED = (
    "test_it.py was changed while the tests ran: none of its inline expectations is accepted, "
    "run again"
)


def test_a_file_that_was_changed_while_the_tests_ran_is_left_as_it_is(run_file, source):
    """Since it was imported, that is, though no expectation has been met before."""
    changing = (
        HEAD
        + '''
def test_a():
    with open(__file__, "a") as file:
        file.write("# from an editor\\n")
def test_b(): same("new", """old""")
def test_c(): same("new", """older""")
'''
    )
    result = run_file(changing, UPDATE)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines([CHANGED])
    assert source() == changing + "# from an editor\n"


@pytest.mark.long
def test_a_file_that_workers_have_imported_in_different_states_is_left_as_it_is(
    run_file, pytester, source
):
    """One worker's lines are those of a file that is no more, and the other's of the
    present one.
    """
    pytester.makeconftest("""
        import os, pathlib, time
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        def wait_for(name):
            while not pathlib.Path(name).exists():
                time.sleep(0.01)
        def pytest_collection():
            if worker == "gw1":
                wait_for("gw0.collected")
                with open("test_it.py", "a") as file:
                    file.write("# from an editor\\n")
        def pytest_collection_finish():
            pathlib.Path(f"{worker}.collected").touch()
        def pytest_runtest_setup():
            if worker == "gw0":  # the first report is of the present file
                wait_for("gw1.ran")
        def pytest_runtest_teardown():
            pathlib.Path(f"{worker}.ran").touch()
    """)
    result = run_file(OLD, "-n2", "--dist=each", UPDATE)
    result.assert_outcomes(passed=20, errors=1)
    result.stdout.fnmatch_lines([CHANGED])
    assert source() == OLD + "# from an editor\n"


@pytest.mark.parametrize("asked", ["by a flag", "in the ini file"])
def test_helpers_of_a_conftest_accept_for_their_callers(run, run_file, pytester, source, asked):
    if asked == "in the ini file":
        pytester.makeini("[pytest]\ngt_update_goldens = true")
    pytester.makeconftest("""
        from expecttest import assert_expected_inline
        import pytest
        @pytest.fixture
        def check():
            return lambda text, expected: assert_expected_inline(text, expected, skip=1)
    """)
    flags = [UPDATE] if asked == "by a flag" else []
    result = run_file('def test_a(check):\n    check("new", """old""")\n', *flags)
    result.assert_outcomes(passed=1)
    assert source() == 'def test_a(check):\n    check("new", """new""")\n'


def test_what_cannot_be_accepted_fails_in_one_sentence(run, run_file, pytester, source):
    outside = pytester.path.parent / "outside_of_the_tree.py"
    outside.write_text(HEAD + "def check(): same('new', '''old''')\n")
    pytester._monkeypatch.setenv("PYTHONPATH", str(pytester.path.parent), prepend=os.pathsep)
    text = (
        HEAD
        + '''
import outside_of_the_tree
OLD = "old"
def test_variable(): same("new", OLD)
def test_letters(): same("\\x00", """old""")
def test_outside(): outside_of_the_tree.check()
def test_fine(): same("new", """old""")
'''
    )
    result = run_file(text, UPDATE)
    result.assert_outcomes(passed=3, failed=1, errors=2)
    problem = "there is no string literal that reads as the old expectation in the call there"
    result.stdout.fnmatch_lines_random(
        [
            f"test_it.py:6: the inline expectation is not accepted: {problem}",
            f"{outside} lies outside of the root directory: none of its inline expectations is "
            f"accepted, *",
            "E * Failed: the obtained text is not printable ASCII, as inline expectations are: "
            "use gt_golden.check",
            "inline    1 updated",
        ]
    )
    assert outside.read_text().endswith("'''old''')\n")
    assert source() == text.replace(
        'test_fine(): same("new", """old"""', 'test_fine(): same("new", """new"""'
    )


BESIDE = (
    HEAD
    + '''
WANT = ""
def text(): return "torch.sin x"
def run(call, label=""): call()
def helper(value, want, name=None): same(value, want, skip=1)
def test_elsewhere(): same(text().replace("torch.", ""), WANT)
@pytest.mark.parametrize("want", [""])
def test_parameter(want): helper(text().strip(""), want)
def test_lambda(): run(lambda: same(text(), """"""), "")
def test_two(): same(text(), """"""), same("second", """""")
def test_broken():
    assert helper(
        text().strip(""), want="""""",
    ) is None
def test_name(): helper(text(), "", name="")
'''
)


def test_only_the_literal_of_the_call_itself_is_written(run_file, source):
    """An expectation that is no literal of the call beside an equal one that is of another call."""
    result = run_file(BESIDE, UPDATE)
    result.assert_outcomes(passed=6, errors=3)
    text = BESIDE.replace('same(text(), """""")', 'same(text(), """torch.sin x""")')
    text = text.replace('same("second", """""")', 'same("second", """second""")')
    assert source() == text.replace('want=""""""', 'want="""torch.sin x"""')


def test_a_run_inside_a_run_accepts_only_by_its_own_flag(run, run_file, pytester):
    """A test of somebody's plugin: its pytest runs are in this process."""
    pytester.makeconftest("pytest_plugins = ['pytester']")
    result = run(
        '''
def test_inner(pytester):
    body = "expecttest.assert_expected_inline('new', 'old')"
    pytester.makepyfile("import expecttest\\ndef test_a():\\n    " + body)
    pytester.runpytest_inprocess().assert_outcomes(failed=1)
    pytester.runpytest_inprocess("--gt-update-goldens").assert_outcomes(passed=1)
    import expecttest
    expecttest.assert_expected_inline("new", """old""")
''',
        UPDATE,
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["inline    1 updated"])


def test_where_expecttest_is_not_installed_goldens_work_alone(run, run_file, pytester, goldens):
    pytester.makepyfile(without_expecttest="import sys\nsys.modules['expecttest'] = None")
    result = run(
        "def test_a(gt_golden): gt_golden.check('one')", "-p", "without_expecttest", UPDATE
    )
    result.assert_outcomes(passed=1)
    assert goldens() == {"test_it/test_a.txt": "one\n"}


def test_a_run_that_updates_nothing_does_not_import_expecttest():
    code = (
        "import sys, pytest\npytest.main(['--version'])\n"
        "pytest.main(['--collect-only', '-q', '/dev/null'])\n"
    )
    code += "raise SystemExit('expecttest' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == 0
    )
