"""``python -m pytest_gtrainer doctor``: what it says of the installed torch and pytest, and of damaged ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pytest_gtrainer
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.doctor.contract import CalledOnUs, Topic, examine
from pytest_gtrainer.doctor.report import topics

ROOT = Path(pytest_gtrainer.__file__).parents[1]

# What a torch, and a pytest, that we have not met might lack or change.
DAMAGE = """
import importlib, pkgutil, sys
import _pytest.config, torch.fx._lazy_graph_module, torch.nn.attention.flex_attention
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
import another_torch

del torch.fx._lazy_graph_module._LazyGraphModule
del FSDPParamGroup._is_hsdp
del _pytest.config._prepareconfig
del torch.cuda._sleep
c10d._new_process_group_helper = another_torch._new_process_group_helper
c10d._new_group_with_tag = another_torch._new_group_with_tag
c10d.batch_isend_irecv = another_torch.batch_isend_irecv
c10d.barrier = another_torch.barrier

from pytest_gtrainer.__main__ import main
from pytest_gtrainer.doctor.contract import examine
from pytest_gtrainer.doctor.report import broken_modules, topics

status = main(["doctor"])
said = broken_modules({topic.module: examine(topic) for topic in topics()})
for name in sorted(said):
    before = set(sys.modules)
    try:
        importlib.import_module(name)
        print("WRONG: imports,", name)
    except ImportError:
        # A package that fails leaves the modules that it has imported, and they would "import" later.
        for added in set(sys.modules) - before:
            if added.startswith("pytest_gtrainer."):
                del sys.modules[added]
for module in pkgutil.walk_packages(pytest_gtrainer.__path__, "pytest_gtrainer."):
    if module.name not in said and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
sys.exit(status)
""".replace("import importlib", "import pytest_gtrainer, importlib", 1)

ANOTHER_TORCH = """
def _new_process_group_helper(group_size, group_rank, global_ranks_in_group, backend, store, *, group_name):
    pass

def _new_group_with_tag(default_pg, ranks):
    return default_pg.new_group(ranks, colour="red")

def batch_isend_irecv(group):
    return group.not_what_we_wait_for()

def barrier(group):
    group.barrier(opts=None, device_ids=[], patience=1)
"""


def ask(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "another_torch.py").write_text(ANOTHER_TORCH)
    return ask("-c", DAMAGE, cwd=folder)


def section(output: str, topic: str) -> str:
    """What the doctor says of a topic, on one line."""
    lines = output.splitlines()
    start = next(number for number, line in enumerate(lines) if line[13:].startswith(f"{topic} "))
    stop = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(" "))
    return " ".join(" ".join(lines[start:stop]).split())


def test_all_is_in_order_on_this_torch(capsys: pytest.CaptureFixture[str]):
    """In this process, which has imported most of what it looks at; the verbose form runs as a command."""
    status = main(["doctor"])
    told = capsys.readouterr().out
    assert status == 0, told
    assert "out of order" not in told
    assert len(told.splitlines()) <= 40  # a screen


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("graph_modules", "_lazy_graph_module._LazyGraphModule: missing"),
        ("graph_modules", "does not import, nor do: apply_graph_passes"),
        ("fsdp2", "FSDPParamGroup._is_hsdp: missing may fail: eager_bucket_layout"),
        ("process", "torch.cuda._sleep: missing may fail: assert_run_to_run"),
        ("passes", "_new_process_group_helper: changed: too many positional arguments"),
        ("passes", "may fail: async_tp_decisions, AsyncTpDecision, bind_options, deduplicate_fsdp_unshard_chains_pass"),
        ("threads", "ThreadGroup.new_group, called by torch.distributed.distributed_c10d._new_group_with_tag: changed: "
                    "torch's call does not fit ours: got an unexpected keyword argument 'colour'"),
        ("threads", "batch_isend_irecv: missing: torch does not call it there"),
        ("threads", "ThreadGroup.barrier, called by torch.distributed.distributed_c10d.barrier: changed: "),
        ("threads", 'may fail: eager code in gt_world("simulated")'),
        ("pytest_private", "_pytest.config._prepareconfig: missing does not import, nor do: gt_world(\"ranks\")"),
        ("autograd", "in order autograd"),
    ],
)  # fmt: skip
def test_what_is_missing_or_changed_is_named_with_what_stands_on_it(damaged, topic: str, said: str):
    assert said in section(damaged.stdout, topic), damaged.stdout


def test_a_damaged_installation_is_a_failure_without_a_traceback(damaged):
    assert damaged.returncode == 1
    assert "Traceback" not in damaged.stderr  # torch itself may say there what it misses


def test_exactly_the_modules_that_it_names_do_not_import(damaged):
    assert "WRONG" not in damaged.stdout
    assert "modules of pytest-gtrainer do not import" in damaged.stdout


def test_it_works_without_torch_and_without_pytest():
    probe = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from pytest_gtrainer.__main__ import main; sys.exit(main())"
    done = ask("-I", "-S", "-c", probe, "doctor", cwd=ROOT)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "torch not installed" in done.stdout
    assert "pytest_private  0 of" in done.stdout


def test_verbose_names_everything_that_is_relied_on():
    done = ask("-m", "pytest_gtrainer", "doctor", "--verbose", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch.compiler._patch_engine_backward: present", "ThreadGroup.new_group, called by"):
        assert name in done.stdout


def test_without_a_command_it_says_what_there_is():
    done = ask("-m", "pytest_gtrainer", cwd=ROOT)
    assert done.returncode == 0
    assert "doctor" in done.stdout


def test_a_command_that_does_not_exist_is_refused_in_one_line():
    done = ask("-m", "pytest_gtrainer", "dcotor", cwd=ROOT)
    assert done.returncode == 2
    assert "invalid choice: 'dcotor'" in done.stderr


@pytest.mark.parametrize("topic", topics(), ids=lambda topic: topic.name)
def test_the_documentation_shows_every_topic(topic: Topic):
    """Its output is quoted of a torch that this suite does not run on; only the topics are ours to compare."""
    lines = (ROOT / "docs" / "doctor.md").read_text().splitlines()
    assert any(line[13:].startswith(f"{topic.name} ") and line.endswith(f"  {topic.title}") for line in lines)


def test_a_method_that_torch_calls_must_be_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But not where torch asks for its own class first, as ``batch_isend_irecv`` did in 2.13."""
    (tmp_path / "their_torch.py").write_text(
        "def asks(group): return group.split_group(1)\n"
        "def asks_its_own(group): return type(group) is int and group.split_group(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ours = "pytest_gtrainer.worlds.simulated.threads.group:ThreadGroup"
    called = [CalledOnUs(ours, "split_group", f"their_torch:{name}") for name in ("asks", "asks_its_own")]
    asked, not_asked = examine(Topic("topic", "", [], called, set(), set()))
    assert asked.problem == "changed: ThreadGroup has no split_group of its own"
    assert not not_asked.problem
