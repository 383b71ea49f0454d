"""Worlds that modules share, in runs of their own: where they end, and what cannot share one."""

import pytest

pytestmark = pytest.mark.second_tier

SUITE = """
import pytest
from late import dist, torch
{mark}
seen = []

@pytest.fixture(scope="module")
def mesh(gt_module_mesh): return gt_module_mesh

"""
SHARING = """
def work(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    inner = mesh["inner"]
    sharded = distribute_tensor(torch.arange(6.0), inner, [Shard(0)]) / 2
    whole = sharded.redistribute(placements=[Replicate()]).to_local()
    assert whole.tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    seen.append(mesh)
    if dist.get_rank() == 0:
        with open("groups", "a") as file:
            print(__name__, os.getpid(), inner.get_group().group_name, len(groups()), file=file)

@pytest.mark.parametrize("n", range(3))
def test_shares(mesh, n):
    work(mesh)
    assert all(each is seen[0] for each in seen)
"""
AFTER = """
def test_fails_while_others_wait(mesh):
    assert dist.get_rank() != 1
    dist.barrier()  # of the group that is made anew where nothing is shared

def test_has_a_new_mesh(mesh):
    assert not seen, "the ranks are others"
    work(mesh)
"""
MARK = "import os\nfrom pytest_gtrainer._torch.process_groups import live_groups as groups\n"
MARK += 'pytestmark = pytest.mark.gt_world("ranks", size=4, mesh={"outer": 2, "inner": 2})'


@pytest.mark.parametrize("workers", [(), ("-n2", "--dist=loadfile")], ids=["alone", "under xdist"])
def test_a_mesh_ends_with_its_module(suite, workers):
    """The next module, on the same ranks, does not find it again.

    A broken one is built anew on new ranks.
    """
    for name in ("one", "two"):
        suite.write(
            f"test_{name}.py",
            SUITE.replace("{mark}", MARK) + SHARING.replace("test_shares", f"test_{name}"),
        )
    suite.write(
        "test_zbroken.py",
        SUITE.replace("{mark}", MARK) + SHARING.replace("test_shares", "test_three") + AFTER,
    )
    run = suite.run("--gt-gpus=4", "--gt-leaked-resources=fail", *workers)
    wrong = {
        name: run.text(name)
        for name in run.reports
        if (run.outcome(name) != "passed") != ("fails" in name)
    }
    assert wrong == {}, run.output
    assert len(run.reports) == 11
    lines = [line.split() for line in (suite.folder / "groups").read_text().splitlines()]
    groups_of = {}
    for module, pid, group, live in lines:
        groups_of.setdefault((module.rpartition(".")[2], pid), []).append((group, live))
    assert (
        sorted(len(set(each)) for each in groups_of.values()) == [1] * 4
    )  # one mesh for each module, and after the fault
    if not workers:
        assert len({pid for _, pid in groups_of}) == 2
        assert (
            len({live for each in groups_of.values() for _, live in each}) == 1
        )  # no group of an earlier module
        (one,), (two,) = (
            set(groups_of[key]) for key in groups_of if key[0] in ("test_one", "test_two")
        )
        assert one != two


def test_a_test_of_another_size_does_not_share(suite):
    suite.write(
        "test_it.py",
        """
        import pytest
        pytestmark = pytest.mark.gt_world("ranks", size=2)
        def test_two(gt_module_mesh): assert gt_module_mesh.size() == 2
        @pytest.mark.gt_world("ranks", size=4)
        def test_four(gt_module_mesh): raise SystemExit
        """,
    )
    run = suite.run("--gt-gpus=4")
    assert (run.outcome("test_two"), run.outcome("test_four")) == ("passed", "error")
    text = " ".join(run.text("test_four").split())
    assert (
        "gt_module_world: test_it.py is marked ranks(2), a test that shares it ranks(4): " in text
    )


def test_a_module_is_marked_as_a_whole(suite):
    suite.write(
        "test_it.py",
        """
        import pytest
        @pytest.mark.gt_world("fake", size=2)
        def test_it(gt_module_mesh): raise SystemExit
        """,
    )
    assert "gt_module_world needs the marker that says which world" in suite.run().text("test_it")


def test_fake_worlds_are_shared_too(suite):
    suite.write(
        "test_it.py",
        """
        import pytest
        pytestmark = pytest.mark.gt_world("fake", size=6, rank=4)
        meshes = []
        @pytest.mark.parametrize("n", range(2))
        def test_shares(gt_module_mesh, gt_world, n):
            meshes.append(gt_module_mesh)
            assert meshes[0] is gt_module_mesh
            assert (gt_world.kind, gt_world.rank) == ("fake", 4)
        def test_needs_the_marker_only():
            import torch.distributed as dist
            assert dist.get_world_size() == 6
        """,
    )
    suite.write(
        "test_later.py",
        "import torch.distributed as dist\ndef test_it(): assert not dist.is_initialized()",
    )
    run = suite.run()
    assert {run.outcome(name) for name in run.reports} == {"passed"}, run.output
    assert "worlds    3 tests in fake(6" in run.output


@pytest.mark.parametrize("kind", ["fake", "simulated"])
@pytest.mark.parametrize("fixture", ["gt_world", "gt_mesh", ""])
def test_one_process_has_no_second_world_beside_a_shared_one(suite, kind, fixture):
    """The tests beside it hold, and the next class has a world of its own size."""
    suite.write(
        "test_it.py",
        f"""
        import pytest
        @pytest.mark.gt_world("{kind}", size=2)
        class TestTwo:
            def test_before(self, gt_class_mesh): assert gt_class_mesh.size() == 2
            @pytest.mark.gt_world("fake", size=4)
            def test_other(self, {fixture}): raise SystemExit
            def test_after(self, gt_class_mesh, gt_mesh): assert gt_mesh.size() == 2
        class TestNext:
            @pytest.mark.gt_world("fake", size=4)
            def test_alone(self, gt_world): assert gt_world.size == 4
        """,
    )
    run = suite.run()
    outcomes = {name: run.outcome(name) for name in run.reports}
    assert outcomes.pop("test_other") == "error"
    assert list(outcomes.values()) == ["passed"] * 3, run.output
    said = " ".join(run.text("test_other").split())
    assert f"marked fake(4), while the world of its module or class, {kind}(2), is set up" in said
