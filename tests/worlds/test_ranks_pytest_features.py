"""A test on ranks is a pytest test: fixtures, parameters, marks, output, warnings, skips."""

import re

import pytest

pytestmark = pytest.mark.second_tier


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.take("ranks_features")
    return module_suite.run("-rs", "--gt-gpus=8", "--gt-update-goldens", "-p", "no:randomly")


@pytest.mark.parametrize(
    "name",
    [
        "test_collective",
        "test_same_processes",
        "test_seeds",
        "test_seeds_again",
        "test_parameters[a b]",
        "test_parameters[x/y]",
        "test_parameters[\\u2603]",
        "test_changes_its_process",
        "test_finds_it_unchanged",
        "test_warns",
        "test_destroys_the_group",
        "test_after_the_group_was_destroyed",
        "test_passed_subtest",
        "test_sends_are_not_collectives",
        "test_mesh",
        "test_sizes[size2]",
        "test_sizes[size3]",
        "test_without_ranks",
    ],
)
def test_passes(run, name):
    assert run.outcome(name) == "passed", run.text(name)


def test_output_comes_from_all_ranks_equal_texts_once(run):
    assert run.reports["test_parameters[a b]"]["call"]["output"] == "word a b\n"


def test_seeds_are_the_same_for_every_test(run):
    first, again = (
        run.reports[name]["call"]["output"] for name in ("test_seeds", "test_seeds_again")
    )
    assert first == again != ""


def test_warnings_reach_the_parent_once(run):
    assert run.output.count("UserWarning: take care") == 1


def test_skip_and_xfail_are_as_everywhere(run):
    """T4: an agreed skip is a skip; an xfail on one rank is an xfail."""
    assert run.outcome("test_skipped") == run.outcome("test_never") == "skipped"
    assert run.outcome("test_xfailed_on_one_rank") == "xfailed"
    assert run.outcome("test_xpassed_strictly") == "failed"
    assert "XPASS(strict)" in run.text("test_xpassed_strictly")


def test_a_failed_subtest_fails_the_test_and_keeps_its_golden_unwritten(run):
    assert run.outcome("test_failed_subtest") == "failed"
    assert "assert 1 == 2" in run.text("test_failed_subtest")
    assert [path.name for path in (run.folder / "golden").rglob("*.txt")] == [
        "TestTwo.test_passed_subtest.txt"
    ]


@pytest.fixture(scope="module")
def again(run, module_suite):
    """Run failed tests again, uncaptured and on fresh ranks, up to the first failure; part is
    mended.
    """
    (run.folder / "mended").touch()
    module_suite.records = run.folder / "records-again"
    return module_suite.run("--lf", "-x", "-s", "--gt-fresh-ranks", "--gt-gpus=8")


def test_a_run_of_what_failed_stops_at_the_first_failure(run, again):
    """--lf and -x: as for any other test."""
    assert run.outcome("test_mended_later[0]") == run.outcome("test_mended_later[1]") == "failed"
    assert {name: again.outcome(name) for name in again.reports} == {
        "test_mended_later[0]": "passed",
        "test_mended_later[1]": "passed",
        "test_xpassed_strictly": "failed",
    }


def test_a_second_test_costs_no_fork_unless_it_is_asked_for(run, again):
    warm = "".join(run.reports[f"test_mended_later[{n}]"]["call"]["output"] for n in range(2))
    assert len(set(pids_in(warm))) == 2
    assert len(set(pids_in(again.output))) == len(pids_in(again.output)) == 4


def pids_in(text):
    return re.findall(r"pid (\d+)", text)


def test_setup_plan_runs_nothing(pytester):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.gt_world("ranks", size=2)
        def test_never_run(gt_world): open("ran", "w").close()
        """
    )
    assert pytester.runpytest_inprocess("--setup-plan").ret == 0
    assert not (pytester.path / "ran").exists()


def test_a_world_too_large_is_skipped_with_the_reason_and_counted(run):
    assert run.outcome("test_too_large") == "skipped"
    assert "needs 16 ranks, --gt-gpus gives 8: --gt-gpus=16 lets it run" in run.output
    facts = run.reports["test_too_large"]["setup"]["facts"]
    assert facts == [
        {"kind": "skip", "cause": "needs 16 ranks, --gt-gpus gives 8: --gt-gpus=16 lets it run"}
    ]


def test_an_invalid_marker_is_one_clean_error(run):
    assert run.outcome("test_invalid_marker") == "error"
    text = run.text("test_invalid_marker").strip()
    assert text.startswith("gt_world takes size, mesh, nodes, ")
    assert text.endswith("; not sise")


def test_facts_of_the_first_rank_come_with_the_report(run):
    facts = run.reports["test_collective"]["setup"]["facts"]
    assert facts == [
        {"kind": "world", "world": "ranks", "size": 2, "device": "cpu", "backend": "gloo"}
    ]


def test_the_header_says_on_what_ranks_run(run):
    assert "gtrainer: 8 CPU ranks (gloo), no GPU used" in run.output


def test_nothing_is_left_over(run):
    assert run.left_over() == []


def test_nothing_is_left_over_by_fresh_ranks(again):
    assert again.left_over() == []
