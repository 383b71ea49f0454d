"""One run with tests of torch's own kinds, with coverage, and with compiled code in ranks."""

import re
import subprocess

import pytest
import torch

pytestmark = pytest.mark.long

TORCHS_OWN = """
import pytest, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_fsdp import FSDPTest


class TestProcesses(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        value = torch.tensor([float(self.rank)])
        dist.all_reduce(value)
        self.assertEqual(value.item(), 1.0)
        dist.destroy_process_group()

    def test_wrong(self):
        self.assertEqual(self.rank, 0)


class TestSharded(FSDPTest):
    world_size = 2

    def test_forward(self):
        model = fully_shard(torch.nn.Linear(4, 4))
        self.assertEqual(model(torch.ones(2, 4)).shape, (2, 4))


@pytest.mark.gt_world("ranks", size=2)
def test_ours(gt_world):
    value = torch.tensor([float(gt_world.rank)])
    dist.all_reduce(value)
    assert value.item() == 1


def test_ours_is_deterministic(gt_deterministic):
    assert torch.backends.flags_frozen()
    assert torch.backends.cudnn.deterministic and torch.are_deterministic_algorithms_enabled()


@pytest.mark.gt_world("ranks", size=2)
def test_ours_is_deterministic_on_ranks(gt_world, gt_deterministic):
    assert torch.backends.mkldnn.deterministic and torch.are_deterministic_algorithms_enabled()


def in_a_process_of_its_own(rank):
    return torch.backends.mkldnn.deterministic


def test_ours_calls_ranks(gt_ranks, gt_deterministic):
    assert gt_ranks.run(in_a_process_of_its_own, 0, size=2) == [True, True]


@pytest.mark.gt_world("fake", size=64)
def test_ours_in_a_fake_world(gt_world):
    assert dist.get_world_size() == 64
"""


def test_torchs_test_cases_run_beside_ours(pytester):
    """Theirs spawn processes of their own, ours stay warm; a failure of theirs is theirs.

    Without GPUs ``FSDPTest`` skips itself.
    """
    pytester.makepyfile(test_both=TORCHS_OWN)
    result = pytester.runpytest_subprocess("--gt-device=cpu", "-v", timeout=280)
    sharded = {"passed": 7} if torch.cuda.device_count() > 1 else {"passed": 6, "skipped": 1}
    result.assert_outcomes(failed=1, **sharded)
    result.stdout.fnmatch_lines(["*TestProcesses::test_wrong FAILED*"])
    result.stdout.fnmatch_lines(["worlds    1 test in fake(64), 2 tests in ranks(2, *"])


INDUCTOR = """
import pytest, torch

@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("time", range(2))
def test_compiled(gt_world, time):
    def step(x):
        return (x * 2).sin().sum()

    x = torch.arange(8.0) + gt_world.rank
    torch.testing.assert_close(torch.compile(step, backend="inductor", fullgraph=True)(x), step(x))
"""


def test_inductor_compiles_in_ranks(pytester):
    """Its C++ kernels are built and loaded in a forked rank, also after the caches of the first
    test are dropped.
    """
    pytester.makepyfile(test_it=INDUCTOR)
    pytester.runpytest_subprocess("--gt-device=cpu", timeout=280).assert_outcomes(passed=2)


COVERED = """
def only_on_ranks(rank):
    if rank == 1:
        return "one"
    return "zero"

def never():
    return 1
"""


def test_coverage_is_measured_inside_ranks(installed, tmp_path):
    """With coverage's own patches for child processes; the line that only rank 1 runs counts."""
    tool = [installed.python, "-m", "pip", "install", "-q", "pytest-cov>=7", "coverage>=7.10"]
    subprocess.run(tool, check=True)
    (tmp_path / "mine.py").write_text(COVERED)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.coverage.run]\npatch = ["subprocess", "fork", "_exit"]\nparallel = true\n'
        'source = ["mine"]\n'
        '[tool.pytest.ini_options]\npythonpath = ["."]\n'
    )
    (tmp_path / "test_it.py").write_text(
        'import pytest\n@pytest.mark.gt_world("ranks", size=2)\ndef test_it(gt_world):\n'
        "    from mine import only_on_ranks\n    assert only_on_ranks(gt_world.rank)\n"
    )
    output = installed.run(
        "pytest", "--cov", "--cov-report=term-missing", "--gt-device=cpu", cwd=tmp_path
    )
    covered = re.search(r"^mine\.py +(\d+) +(\d+) .*?([\d, -]+)$", output, re.MULTILINE)
    assert covered, output
    assert covered[3].strip() == "8", output  # the body of never()


def test_random_order_and_a_time_limit(installed, tmp_path):
    """pytest-randomly shuffles and seeds, pytest-timeout stays in the parent; ranks follow the
    order of the parent.
    """
    tool = [
        installed.python,
        "-m",
        "pip",
        "install",
        "-q",
        "pytest-randomly>=4",
        "pytest-timeout>=2.3",
    ]
    subprocess.run(tool, check=True)
    (tmp_path / "test_it.py").write_text(
        "import random, pytest, torch.distributed as dist\n"
        '@pytest.mark.gt_world("ranks", size=2)\n@pytest.mark.parametrize("n", range(6))\n'
        "def test_it(gt_world, n):\n"
        "    drawn = [None, None]\n    dist.all_gather_object(drawn, random.random())\n"
        "    assert drawn[0] == drawn[1]\n"
    )
    output = installed.run("pytest", "-v", "--timeout=100", "--gt-device=cpu", cwd=tmp_path)
    assert "6 passed" in output
    assert "Using --randomly-seed=" in output


def test_the_twin_of_coverage(installed, tmp_path):
    """Without those patches the ranks' lines are missing, so the check above can fail."""
    (tmp_path / "mine.py").write_text(COVERED)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.coverage.run]\nsource = ["mine"]\n[tool.pytest.ini_options]\npythonpath = ["."]\n'
    )
    (tmp_path / "test_it.py").write_text("def test_it():\n    import mine\n")
    output = installed.run("pytest", "--cov", "--cov-report=term-missing", cwd=tmp_path)
    assert re.search(r"^mine\.py .* 3-5, 8$", output, re.MULTILINE), output
