"""Flags: which files each of them lets a run write, flags that exclude each other, and where none
may write.
"""

import pytest

SOURCE = """
def test_missing(gt_golden): gt_golden.check("new")
def test_different(gt_golden): gt_golden.check("new")
def test_equal(gt_golden): gt_golden.check("test_equal")
"""
MISSING, DIFFERENT, EQUAL = (
    f"test_it/test_{what}.txt" for what in ("missing", "different", "equal")
)
UNUSED = "test_it/test_gone.txt"
ALL_BUT_MISSING = (DIFFERENT, EQUAL, UNUSED)
OLD = {DIFFERENT: "test_different\n", EQUAL: "test_equal\n", UNUSED: "test_gone\n"}


@pytest.mark.parametrize(
    ("flags", "counts", "change"),
    [
        ("", "1 different, 1 equal, 1 missing, 1 unused", {}),
        ("--gt-goldens-in-ci", "1 different, 1 equal, 1 missing, 1 unused", {}),
        ("--gt-create-goldens", "1 created, 1 different, 1 equal, 1 unused", {MISSING: "new\n"}),
        (
            "--gt-update-goldens",
            "1 created, 1 equal, 1 unused, 1 updated",
            {MISSING: "new\n", DIFFERENT: "new\n"},
        ),
        ("--gt-prune-goldens", "1 different, 1 equal, 1 missing, 1 removed", {UNUSED: None}),
        (
            "--gt-update-goldens --gt-prune-goldens",
            "1 created, 1 equal, 1 removed, 1 updated",
            {MISSING: "new\n", DIFFERENT: "new\n", UNUSED: None},
        ),
    ],
)
def test_a_flag_writes_just_what_it_says(run_here, put_goldens, goldens, flags, counts, change):
    put_goldens(*ALL_BUT_MISSING)
    result = run_here(SOURCE, *flags.split(), "test_it.py")  # a path may follow any of them
    result.stdout.fnmatch_lines([f"goldens   {counts}"])
    assert goldens() == {name: text for name, text in (OLD | change).items() if text is not None}


def test_a_flag_may_stand_in_the_ini_file_and_the_command_line_wins(
    run_here, put_goldens, goldens, pytester
):
    put_goldens(*ALL_BUT_MISSING)
    pytester.makeini("[pytest]\ngt_create_goldens = true")
    run_here(SOURCE).stdout.fnmatch_lines(["goldens   1 created, 1 different, 1 equal, 1 unused"])
    run_here(None, "--gt-update-goldens").stdout.fnmatch_lines(
        ["goldens   2 equal, 1 unused, 1 updated"]
    )


BOTH = (
    "--gt-update-goldens and --gt-create-goldens exclude each other, as updating writes "
    "missing goldens too: *"
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--gt-create-goldens --gt-update-goldens", BOTH),
        (
            "--gt-prune-goldens --gt-unused-goldens=ignore",
            "--gt-prune-goldens and --gt-unused-goldens=ignore exclude each other: give one",
        ),
        (
            "--gt-unused-goldens=drop",
            "--gt-unused-goldens=drop: expected one of warn, fail, ignore",
        ),
    ],
)
def test_flags_that_exclude_each_other_stop_the_run(
    run_here, put_goldens, goldens, arguments, sentence
):
    put_goldens(*ALL_BUT_MISSING)
    result = run_here(SOURCE, *arguments.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])
    assert goldens() == OLD


@pytest.mark.second_tier("--gt-create-goldens --gt-prune", "--gt-create-goldens---gt-create")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--gt-update-goldens", "--gt-update-goldens is refused"),
        ("--gt-create-goldens", "--gt-create-goldens is refused"),
        ("--gt-prune-goldens", "--gt-prune-goldens is refused"),
        (
            "--gt-create-goldens --gt-prune-goldens",
            "--gt-create-goldens and --gt-prune-goldens are refused",
        ),
    ],
)
def test_no_flag_writes_in_ci_without_another_one(
    run_here, put_goldens, goldens, monkeypatch, flags, sentence
):
    put_goldens(*ALL_BUT_MISSING)
    monkeypatch.setenv("CI", "true")
    result = run_here(SOURCE, *flags.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: {sentence} where CI is set, as nobody would review golden/: *"]
    )
    assert goldens() == OLD
    run_here(None, *flags.split(), "--gt-goldens-in-ci")
    assert goldens() != OLD
    monkeypatch.setenv("CI", "false")
    assert run_here(None, *flags.split()).ret != pytest.ExitCode.USAGE_ERROR


def test_checking_in_ci_needs_no_flag(run_here, put_goldens, monkeypatch):
    put_goldens(*ALL_BUT_MISSING)
    monkeypatch.setenv("CI", "1")
    result = run_here(SOURCE, "--gt-unused-goldens=fail")
    result.stdout.fnmatch_lines(["goldens   1 different, 1 equal, 1 missing, 1 unused"])


def test_a_damaged_golden_is_not_a_missing_one(run_here, put_goldens, goldens):
    put_goldens(MISSING, text="")
    result = run_here(SOURCE, "--gt-create-goldens", "-ktest_missing")
    result.stdout.fnmatch_lines(["*golden/test_it/test_missing.txt is empty: restore or remake it"])
    assert goldens() == {MISSING: ""}


@pytest.mark.parametrize(
    "option",
    [
        "--gt-update-goldens",
        "--gt-create-goldens",
        "--gt-prune-goldens",
        "--gt-goldens-in-ci",
        "--gt-unused-goldens=warn|fail|ignore",
        "--gt-artifacts=DIR",
    ],
)
def test_each_has_a_line_of_help_and_an_ini_twin(run_here, option):
    lines = [line.strip() for line in run_here(None, "--help").outlines]
    ini_twin = option.partition("=")[0].removeprefix("--").replace("-", "_")
    assert any(line.startswith(option) for line in lines)
    assert any(line.startswith(f"{ini_twin} (") for line in lines)


# -- commands


def test_several_failures_end_in_the_list_of_their_commands(run_here, put_goldens, monkeypatch):
    """Never in one that updates everything."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine with fewer GPUs refuses
    put_goldens(*ALL_BUT_MISSING)
    result = run_here(
        SOURCE + "def test_other(): assert False", "--gt-unused-goldens=ignore", "--gt-gpus=2"
    )
    result.assert_outcomes(failed=3, passed=1)
    result.stdout.fnmatch_lines(
        [
            "goldens   1 different, 1 equal, 1 missing",
            "to accept what a test obtained, when its difference is right:",
            "  pytest test_it.py::test_missing --gt-gpus=2 --gt-update-goldens",
            "  pytest test_it.py::test_different --gt-gpus=2 --gt-update-goldens",
            "*short test summary info*",
        ],
        consecutive=True,
    )
    commands = [line for line in result.outlines if "--gt-update-goldens" in line]
    assert all("::" in line for line in commands)


def test_one_failure_has_its_command_already(run_here, put_goldens):
    put_goldens(EQUAL)
    result = run_here(SOURCE, "-ktest_missing")
    assert result.stdout.str().count("--gt-update-goldens") == 1
    result.stdout.no_fnmatch_line("to accept what a test obtained*")


EXPECTED = """
import pytest
@pytest.mark.xfail
def test_a(gt_golden): gt_golden.check("xfailed")
def test_b(gt_golden):
    with pytest.raises(AssertionError):
        gt_golden.check("looked at")
def test_c(gt_golden): gt_golden.check("failed")
"""


def test_a_mismatch_that_fails_no_test_needs_no_command(run_here):
    result = run_here(EXPECTED)
    result.assert_outcomes(failed=1, passed=1, xfailed=1)
    result.stdout.no_fnmatch_line("to accept what a test obtained*")


@pytest.mark.second_tier("under xdist]")
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "under xdist"])
def test_the_list_is_bounded(run, run_here, workers):
    source = (
        "import pytest\n@pytest.mark.parametrize('x', range(11))\n"
        "def test_a(gt_golden, x): gt_golden.check('a')"
    )
    result = (run if workers else run_here)(source, *workers)
    lines = result.outlines
    start = lines.index("to accept what a test obtained, when its difference is right:")
    assert lines[start + 9] == "  … and 3 more: each failure ends in its command"
    listed = {
        line
        for line in lines[start + 1 : start + 9]
        if line.startswith("  pytest 'test_it.py::test_a[")
    }
    assert len(listed) == 8
