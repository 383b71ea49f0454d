"""A test on ranks is a pytest test: fixtures, parameters, marks, output, warnings, skips."""

from __future__ import annotations

import re

import pytest

SUITE = '''
import os, random, warnings
import pytest
from late import dist, torch

PIDS = set()

@pytest.fixture(scope="module")
def expensive():
    return {"pid": os.getpid(), "made": 1}

@pytest.mark.gt_world("ranks", size=2)
class TestTwo:
    def test_collective(self, gt_world):
        value = torch.tensor([float(gt_world.rank)])
        dist.all_reduce(value)
        assert value.item() == 1 and dist.get_world_size() == gt_world.size == 2
        assert (gt_world.kind, gt_world.device, gt_world.backend) == ("ranks", "cpu", "gloo")
        PIDS.add(os.getpid())

    def test_same_processes(self):
        assert PIDS == {os.getpid()}

    def test_seeds(self):
        numbers = torch.rand(1).item(), random.random()
        everyone = [None, None]
        dist.all_gather_object(everyone, numbers)
        assert everyone[0] == everyone[1]
        print("seeded", *numbers)

    def test_seeds_again(self):
        print("seeded", torch.rand(1).item(), random.random())

    @pytest.mark.parametrize("word", ["a b", "x/y", "☃"])
    def test_parameters(self, word, expensive, tmp_path, monkeypatch):
        assert expensive == {"pid": os.getpid(), "made": 1}
        assert tmp_path.is_dir()
        print("word", word)

    def test_changes_its_process(self, tmp_path):
        os.chdir(tmp_path)
        os.environ["LEFT_BEHIND"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        self.__class__.group = dist.new_group([0, 1])

    def test_finds_it_unchanged(self, request):
        assert os.getcwd() == str(request.config.rootpath)
        assert "LEFT_BEHIND" not in os.environ
        assert torch.get_default_dtype() == torch.float32
        assert torch.get_num_threads() == 1
        assert len(dist.distributed_c10d._world.pg_map) == 1

    def test_warns(self):
        warnings.warn("take care")

    def test_destroys_the_group(self):
        dist.destroy_process_group()

    def test_after_the_group_was_destroyed(self):
        dist.barrier()

    @pytest.mark.parametrize("n", range(2))
    def test_mended_later(self, n):
        os.write(1, f"pid {os.getpid()} ".encode())
        assert os.path.exists("mended") or dist.get_rank() == 0

    @pytest.mark.skipif(True, reason="not today")
    def test_skipped(self): pass

    @pytest.mark.skip(reason="never")
    def test_never(self): raise SystemExit

    @pytest.mark.xfail(reason="known")
    def test_xfailed_on_one_rank(self, gt_world):
        assert gt_world.rank == 0

    @pytest.mark.xfail(strict=True)
    def test_xpassed_strictly(self): pass

    def test_failed_subtest(self, subtests, gt_golden):
        with subtests.test("a"):
            assert 1 == 2
        gt_golden.check("never")

    def test_passed_subtest(self, subtests, gt_golden):
        gt_golden.check("before")
        with subtests.test("a"):
            pass

    @pytest.mark.gt_world("ranks", size=3)
    def test_sends_are_not_collectives(self, gt_world):
        box = torch.ones(1)
        if gt_world.rank > 0:
            dist.recv(box, gt_world.rank - 1)
        if gt_world.rank < 2:
            dist.isend(box, gt_world.rank + 1).wait()

@pytest.mark.gt_world("ranks", mesh={"dp": 2, "tp": 2})
def test_mesh(gt_mesh):
    assert gt_mesh.mesh_dim_names == ("dp", "tp")
    assert list(gt_mesh.get_coordinate()) == [dist.get_rank() // 2, dist.get_rank() % 2]

@pytest.mark.gt_world("ranks", size=[2, 3])
def test_sizes(gt_world):
    assert dist.get_world_size() == gt_world.size

@pytest.mark.gt_world("ranks", size=16)
def test_too_large(): raise SystemExit

@pytest.mark.gt_world("ranks", sise=16)
def test_invalid_marker(): raise SystemExit

def test_without_ranks():
    assert not dist.is_initialized()
'''


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    return module_suite.run("-rs", "--gt-gpus=8", "--gt-update-goldens", "-p", "no:randomly", environ={"CI": ""})


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
    first, again = (run.reports[name]["call"]["output"] for name in ("test_seeds", "test_seeds_again"))
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
    assert [path.name for path in (run.folder / "golden").rglob("*.txt")] == ["TestTwo.test_passed_subtest.txt"]


@pytest.fixture(scope="module")
def again(run, module_suite):
    """What has failed, uncaptured and on fresh ranks, up to the first failure; part of it is mended."""
    (run.folder / "mended").touch()
    module_suite.records = run.folder / "records-again"
    return module_suite.run("--lf", "-x", "-s", "--gt-fresh-ranks", "--gt-gpus=8", environ={"CI": ""})


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
    assert "needs 16 ranks, --gt-gpus gives 8" in run.output
    facts = run.reports["test_too_large"]["setup"]["facts"]
    assert facts == [{"kind": "skip", "cause": "needs 16 ranks, --gt-gpus gives 8"}]


def test_an_invalid_marker_is_one_clean_error(run):
    assert run.outcome("test_invalid_marker") == "error"
    text = run.text("test_invalid_marker").strip()
    assert text.startswith("gt_world takes size, mesh, nodes, ")
    assert text.endswith("; not sise")


def test_facts_of_the_first_rank_come_with_the_report(run):
    facts = run.reports["test_collective"]["setup"]["facts"]
    assert facts == [{"kind": "world", "world": "ranks", "size": 2, "device": "cpu", "backend": "gloo"}]


def test_the_header_says_on_what_ranks_run(run):
    assert "gtrainer: 8 CPU ranks (gloo), no GPU used" in run.output


def test_nothing_is_left_over(run, again):
    assert run.left_over() == []
