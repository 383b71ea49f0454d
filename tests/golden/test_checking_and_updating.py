"""Goldens in a run: missing, different, updated, refused."""

import pytest

ONE = "def test_a(gt_golden): gt_golden.check('one')"
TWO = "def test_a(gt_golden): gt_golden.check('two')"


def test_a_missing_golden_fails_and_nothing_is_written(run_here, goldens):
    result = run_here(ONE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*golden/test_it/test_a.txt is missing",
            "*obtained:",
            "*one",
            "*to accept what was obtained:",
            "*  pytest test_it.py::test_a --gt-update-goldens",
            "goldens   1 missing",
        ]
    )
    assert goldens() == {}


def test_update_creates_then_the_golden_is_equal(run_here, goldens):
    result = run_here(ONE, "--gt-update-goldens")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["goldens   1 created"])
    assert goldens() == {"test_it/test_a.txt": "one\n"}
    result = run_here(None)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["goldens   1 equal"])


def test_a_text_that_begins_with_a_byte_order_mark_equals_itself(run_here):
    test = "def test_a(gt_golden): gt_golden.check('\\ufeffone')"
    run_here(test, "--gt-update-goldens").stdout.fnmatch_lines(["goldens   1 created"])
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])
    run_here(ONE).stdout.fnmatch_lines(["goldens   1 equal"])


def test_a_difference_fails_until_it_is_accepted(run_here, goldens):
    run_here(ONE, "--gt-update-goldens")
    result = run_here(TWO)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*golden/test_it/test_a.txt differs", "*-one", "*+two", "*1 different"]
    )
    assert goldens() == {"test_it/test_a.txt": "one\n"}
    result = run_here(None, "--gt-update-goldens")
    result.stdout.fnmatch_lines(["goldens   1 updated"])
    assert goldens() == {"test_it/test_a.txt": "two\n"}


@pytest.mark.parametrize(
    "failing",
    [
        "def test_a(gt_golden): gt_golden.check('one'); assert False",
        "import pytest\ndef test_a(gt_golden): gt_golden.check('one'); pytest.skip()",
        "import pytest\n@pytest.mark.xfail\n"
        "def test_a(gt_golden): gt_golden.check('one'); assert False",
        "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    assert False\n"
        "def test_a(broken, gt_golden): gt_golden.check('one')",
    ],
    ids=["failed", "skipped", "xfailed", "failed in teardown"],
)
def test_a_test_that_does_not_pass_updates_nothing(run_here, goldens, failing):
    result = run_here(failing, "--gt-update-goldens")
    assert "created" not in result.stdout.str()
    assert goldens() == {}


@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_a_skipped_subtest_does_not_keep_its_test_from_updating(run_here, goldens, how):
    source = """
def test_a(gt_golden, subtests):
    import pytest
    gt_golden.check({!r})
    with subtests.test("on a GPU"):
        pytest.{}("no GPU")
"""
    run_here(source.format("old", how), "--gt-create-goldens")
    run_here(source.format("new", how), "--gt-update-goldens")
    assert goldens() == {"test_it/test_a.txt": "new\n"}
    run_here(source.format("newer", how).replace("pytest.", "assert not "), "--gt-update-goldens")
    assert goldens() == {"test_it/test_a.txt": "new\n"}, "a subtest that failed"


def test_the_accept_command_names_one_test_and_repeats_the_world(run_here, pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine with fewer GPUs refuses
    source = "import pytest\n@pytest.mark.parametrize('x', ['a b'])\n" + ONE.replace(")", ", x)", 1)
    result = run_here(source, "--gt-gpus=4")
    result.stdout.fnmatch_lines(
        ["*  pytest 'test_it.py::test_a[[]a b]' --gt-gpus=4 --gt-update-goldens"]
    )
    folder = pytester.mkdir("elsewhere")
    pytester._monkeypatch.chdir(folder)
    run_here(None, "..").stdout.fnmatch_lines(["*  pytest '../test_it.py::test_a[[]a b]' *"])


def test_updating_in_ci_needs_a_second_flag(run_here, goldens, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = run_here(ONE, "--gt-update-goldens")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--gt-update-goldens is refused where CI is set*--gt-goldens-in-ci too"]
    )
    assert goldens() == {}
    run_here(ONE, "--gt-update-goldens", "--gt-goldens-in-ci").assert_outcomes(passed=1)
    assert len(goldens()) == 1


def test_two_checks_of_one_test_need_names(run_here, goldens):
    twice = "def test_a(gt_golden): gt_golden.check('a', 'x'); gt_golden.check('b', 'x')"
    result = run_here(twice, "--gt-update-goldens")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ValueError: this test has checked a golden named 'x' already*"])
    run_here(
        "def test_a(gt_golden): gt_golden.check('a'); gt_golden.check('b', 'after')",
        "--gt-update-goldens",
    )
    assert goldens() == {"test_it/test_a.txt": "a\n", "test_it/test_a@after.txt": "b\n"}


def test_something_else_than_a_graph_or_a_text_is_refused(run_here):
    """A tensor with the way out."""
    values = ("{3}", "torch.ones(2)")
    tests = [
        "import torch",
        *(f"def test_{n}(gt_golden): gt_golden.check({v})" for n, v in enumerate(values)),
    ]
    output = run_here("\n".join(tests)).stdout
    output.fnmatch_lines(["*TypeError: a golden is made of an FX graph, * or numbers; not of set"])
    output.fnmatch_lines(
        ["*; not of Tensor: check digest(tensor), which holds every bit, or tensor.tolist()"]
    )


@pytest.mark.second_tier
def test_workers_update_at_the_same_time(run, goldens):
    source = (
        "import pytest\n@pytest.mark.parametrize('x', range(20))\n"
        "def test_a(gt_golden, x): gt_golden.check(f'text {x}')"
    )
    result = run(source, "-n2", "--gt-update-goldens")
    result.assert_outcomes(passed=20)
    result.stdout.fnmatch_lines(["goldens   20 created"])
    assert goldens() == {f"test_it/test_a-{x}.txt": f"text {x}\n" for x in range(20)}


def test_a_test_that_only_uses_texts_does_not_import_torch(pytester: pytest.Pytester):
    """The run has a process of its own: those of ``run`` have imported torch before."""
    probe = "\ndef test_b():\n    import sys\n    assert 'torch' not in sys.modules"
    pytester.makepyfile(test_it=ONE + probe)
    pytester.runpytest_subprocess("--gt-update-goldens").assert_outcomes(passed=2)


RENAMED = {
    "graph": ("torch.fx.symbolic_trace(torch.nn.ReLU())", ".fxgraph"),
    "numbers": ("{'loss': 0.5}", ".numbers.json"),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_the_head_of_a_golden_follows_a_rename(kind: str, run_here, goldens, pytester):
    """The message says how; without an update the golden is equal and still names the old test."""
    value, suffix = RENAMED[kind]
    source = f"import torch\ndef test_a(gt_golden): gt_golden.check({value})"
    run_here(source, "--gt-update-goldens").assert_outcomes(passed=1)
    renamed = source.replace("test_a", "test_b")
    here, there = f"golden/test_it/test_a{suffix}", f"golden/test_it/test_b{suffix}"
    accept = "pytest test_it.py::test_b --gt-update-goldens"
    run_here(renamed).stdout.fnmatch_lines(
        [f"*mkdir -p golden/test_it && git mv {here} {there} && {accept}"]
    )
    (pytester.path / here).rename(pytester.path / there)

    run_here(renamed).assert_outcomes(passed=1)
    assert "test_a" in goldens()[f"test_it/test_b{suffix}"]
    result = run_here(renamed, "--gt-update-goldens")
    result.stdout.fnmatch_lines(["goldens   1 updated"])
    text = goldens()[f"test_it/test_b{suffix}"]
    assert "test_a" not in text
    assert accept in text
    assert "1 equal" in run_here(renamed, "--gt-update-goldens").stdout.str()


def test_a_renamed_test_is_told_which_golden_was_its_own(run_here, goldens, pytester):
    """Same text, and nobody of this run owns it."""
    run_here(ONE, "--gt-update-goldens")
    renamed = ONE.replace("test_a", "test_b")
    result = run_here(renamed)
    result.stdout.fnmatch_lines(
        [
            "*golden/test_it/test_a.txt has the same text, and its test is not in this run. If "
            "the test was renamed:",
            "*  mkdir -p golden/test_it && git mv golden/test_it/test_a.txt "
            "golden/test_it/test_b.txt",
        ]
    )
    for other in (
        renamed.replace("'one'", "'two'"),
        ONE + "\n" + renamed,
    ):  # another text; the other test is there
        assert "has the same text" not in run_here(other).stdout.str()


def test_a_run_inside_a_test_judges_its_own_tests(run_here):
    """This test would fail for the check that its inner run reports."""
    source = """
import contextlib

def test_a(gt_golden):
    with contextlib.suppress(AssertionError):
        gt_golden.check("text")
"""
    run_here(source).assert_outcomes(failed=1)
