"""A golden kept per version of torch: it holds from its version on, and no other version calls it
unused.
"""

import pytest
import torch  # noqa: F401 - once for all runs in this process

from pytest_gtrainer import environment
from pytest_gtrainer.golden import check, unused
from pytest_gtrainer.testing import run_project
from tests.golden.conftest import QUICK

SOURCE = "def test_a(gt_golden): gt_golden.check({!r}, per='torch')"
V13, V14, V15 = (f"test_it/test_a@torch=2.{minor}.txt" for minor in (13, 14, 15))


@pytest.fixture
def under(monkeypatch):
    """``under(14)``: what asks which torch is installed hears 2.14."""

    def under(minor: int) -> None:
        for module in (check, unused):
            monkeypatch.setattr(module, "installed_minor", lambda: (2, minor))

    return under


def test_each_version_has_a_file_and_an_older_ones_holds_until_there_is_a_newer(
    run_here, goldens, under
):
    under(13)
    run_here(SOURCE.format("a"), "--gt-create-goldens").stdout.fnmatch_lines(
        ["goldens   1 created"]
    )
    under(14)
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])
    under(15)
    run_here(SOURCE.format("b"), "--gt-update-goldens").stdout.fnmatch_lines(
        ["goldens   1 created"]
    )
    assert goldens() == {V13: "a\n", V15: "b\n"}
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])
    under(14)
    run_here(None).assert_outcomes(failed=1)
    run_here(SOURCE.format("a")).stdout.fnmatch_lines(["goldens   1 equal"])


def test_none_for_this_version_or_an_older_one_is_missing(run_here, goldens, put_goldens, under):
    put_goldens(V15, "test_it/test_a.txt", "test_it/test_a@b@torch=2.13.txt", text="a\n")
    under(14)
    result = run_here(SOURCE.format("a"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*golden/{V14} is missing", "goldens   1 missing*"])


@pytest.mark.second_tier("--gt-create")
@pytest.mark.parametrize("flag", ["--gt-create-goldens", "--gt-update-goldens"])
def test_where_an_older_ones_does_not_hold_both_flags_write_one_for_this_version(
    run_here, goldens, put_goldens, under, flag
):
    put_goldens(V13, text="a\n")
    under(15)
    result = run_here(SOURCE.format("b"))
    result.stdout.fnmatch_lines(
        [
            f"*golden/{V13} differs",
            "*-a",
            "*+b",
            f"*it stays as it is: what is accepted goes to golden/{V15}, for this torch and "
            f"newer ones",
        ]
    )
    assert goldens() == {V13: "a\n"}
    run_here(None, flag).stdout.fnmatch_lines(["goldens   1 created"])
    assert goldens() == {V13: "a\n", V15: "b\n"}


def test_its_own_file_is_updated_and_not_created_anew(run_here, goldens, put_goldens, under):
    put_goldens(V13, V15, text="a\n")
    under(15)
    run_here(SOURCE.format("b"), "--gt-create-goldens").assert_outcomes(failed=1)
    run_here(None, "--gt-update-goldens").stdout.fnmatch_lines(["goldens   1 updated"])
    assert goldens() == {V13: "a\n", V15: "b\n"}


@pytest.mark.second_tier("14", "15")
@pytest.mark.parametrize("minor", [13, 14, 15])
def test_those_of_other_versions_are_neither_unused_nor_pruned(
    run_here, goldens, put_goldens, under, minor
):
    put_goldens(V13, V15, text="a\n")
    under(minor)
    run_here(SOURCE.format("a"), "--gt-unused-goldens=fail").assert_outcomes(passed=1)
    run_here(None, "--gt-prune-goldens").stdout.no_fnmatch_line("*removed*")
    assert goldens() == {V13: "a\n", V15: "a\n"}


def test_one_that_only_some_versions_check_is_not_unused_under_the_others(
    run_here, goldens, put_goldens, under
):
    put_goldens(V15, text="a\n")
    under(13)
    run_here("def test_a(): pass", "--gt-unused-goldens=fail").assert_outcomes(passed=1)


def test_what_the_own_version_does_not_check_is_unused(run_here, goldens, put_goldens, under):
    """The twin: without ``per``, without its test, and the plain file beside one that is kept per
    version.
    """
    put_goldens(V13, V15, "test_it/test_a.txt", "test_it/test_gone@torch=2.13.txt", text="a\n")
    under(15)
    run_here(SOURCE.format("a"), "--gt-prune-goldens").stdout.fnmatch_lines(
        [
            "removed golden/test_it/test_a.txt",
            "removed golden/test_it/test_gone@torch=2.13.txt",
        ]
    )
    put_goldens("test_it/test_b.txt", text="b\n")
    source = "def test_a(): pass\ndef test_b(gt_golden): gt_golden.check('b')"
    run_here(source, "--gt-prune-goldens").stdout.fnmatch_lines([f"removed golden/{V15}"])
    assert sorted(goldens()) == [V13, "test_it/test_b.txt"]


def test_two_checks_of_one_test(run_here, goldens, under):
    under(15)
    source = (
        "def test_a(gt_golden):\n    gt_golden.check('a', per='torch')\n"
        "    gt_golden.check('b', 'b', per='torch')"
    )
    run_here(source, "--gt-update-goldens").assert_outcomes(passed=1)
    assert goldens() == {V15: "a\n", "test_it/test_a@b@torch=2.15.txt": "b\n"}
    run_here(None, "--gt-unused-goldens=fail").stdout.fnmatch_lines(["goldens   2 equal"])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            "'a', per='python'",
            "*per='python': a golden is kept per=\"torch\", or without it serves all versions",
        ),
        (
            "[1.0], per='torch'",
            '*per="torch" is not for numbers: their file has an entry for each environment anyway',
        ),
        (
            "'a', 'torch=2.15'",
            "*the name 'torch=2.15' is how goldens kept per version*: give per='torch'",
        ),
    ],
)
def test_what_cannot_be_kept_so_is_refused_in_a_sentence(run_here, goldens, arguments, why):
    result = run_here(f"def test_a(gt_golden): gt_golden.check({arguments})", "--gt-update-goldens")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([why])
    assert goldens() == {}


def test_a_torch_without_a_version_is_refused(run_here, monkeypatch):
    monkeypatch.setattr(check, "installed_minor", lambda: None)
    run_here(SOURCE.format("a")).stdout.fnmatch_lines(
        ['*per="torch" needs a version like 2.15, and that of *']
    )


@pytest.mark.second_tier
def test_ranks_claim_and_their_parent_finds_the_file_that_holds(tmp_path):
    """The real version is used, with a file of an older one only."""
    major, minor = environment.installed_minor()
    source = "import pytest\n@pytest.mark.gt_world('ranks', size=2)\n" + SOURCE.format("b")
    old = "golden/test_it/test_a@torch=2.1.txt"
    for content, arguments, outcome in (
        ("b\n", (), "1 equal"),
        ("a\n", (), "1 different"),
        ("a\n", ("--gt-create-goldens",), "1 created"),
        ("a\n", ("--gt-unused-goldens=fail",), "1 equal"),
    ):
        (tmp_path / "golden/test_it").mkdir(parents=True, exist_ok=True)
        (tmp_path / old).write_text(content)
        run = run_project(tmp_path, *QUICK, *arguments, files={"test_it.py": source})
        assert f"goldens   {outcome}" in run.output, run.output
    assert (tmp_path / f"golden/test_it/test_a@torch={major}.{minor}.txt").read_text() == "b\n"
    assert (tmp_path / old).read_text() == "a\n"
