"""``python -m pytest_gtrainer doctor``: what it says of the installed torch and pytest, and of
damaged ones.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import pytest_gtrainer
from pytest_gtrainer import doctor
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.doctor import Topic, exists, read_topic, topics

ROOT = Path(pytest_gtrainer.__file__).parents[1]

# Names that another torch, or another pytest, might lack.
DAMAGE = """
import sys
import _pytest.config, torch.fx._lazy_graph_module, torch.nn.attention.flex_attention
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

del torch.fx._lazy_graph_module._LazyGraphModule
del torch.cuda._sleep
del _pytest.config._prepareconfig

from pytest_gtrainer.__main__ import main

sys.exit(main(["doctor"]))
"""


def ask(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("damaged")
    return ask("-c", DAMAGE, cwd=folder)


def test_all_is_in_order_on_this_torch(capsys: pytest.CaptureFixture[str]):
    """The doctor runs in this process, which has imported most of its subjects; the verbose form
    runs as a command.
    """
    status = main(["doctor"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "out of order" not in output
    assert len(output.splitlines()) <= 40  # a screen


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "line",
    [
        "out of order graph_modules ",
        "torch.fx._lazy_graph_module._LazyGraphModule: missing",
        "out of order process ",
        "torch.cuda._sleep: missing",
        "out of order pytest_private ",
        "_pytest.config._prepareconfig: missing",
        "in order     autograd ",
        "does not import: apply_graph_passes, ",
        'does not import: gt_world("ranks")',
        "lacks what pytest-gtrainer relies on: cannot import name '_LazyGraphModule'",
    ],
)
def test_what_is_missing_is_named_with_what_does_not_import(damaged, line: str):
    assert line in damaged.stdout


@pytest.mark.second_tier
def test_what_still_works_is_not_named(damaged):
    """The twin: graph text needs none of the names that are gone."""
    assert "gt_golden of graphs" not in damaged.stdout
    assert "graphtext" not in damaged.stdout


@pytest.mark.second_tier
def test_a_damaged_installation_is_a_failure_without_a_traceback(damaged):
    assert damaged.returncode == 1
    assert "Traceback" not in damaged.stderr  # torch itself may say there what it misses


def test_it_works_without_torch_and_without_pytest():
    probe = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from pytest_gtrainer.__main__ import "
        f"main; sys.exit(main())"
    )
    done = ask("-I", "-S", "-c", probe, "doctor", cwd=ROOT)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "torch not installed" in done.stdout
    assert "pytest_private  0 of" in done.stdout


@pytest.mark.second_tier
def test_verbose_names_everything_that_is_relied_on():
    done = ask("-m", "pytest_gtrainer", "doctor", "--verbose", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "torch.compiler._patch_engine_backward",
        "torch.distributed.distributed_c10d._world",
    ):
        assert f"{name}: present" in done.stdout


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
    """Its output is quoted of a torch that this suite does not run on; only the topics are ours to
    compare.
    """
    lines = (ROOT / "docs" / "index.md").read_text().splitlines()
    assert any(
        line[13:].startswith(f"{topic.name} ") and line.endswith(f"  {topic.title}")
        for line in lines
    )


@pytest.mark.parametrize(
    "name",
    [
        "torch.fx:Graph",
        "torch._inductor:compile_fx",  # a module
        "torch.distributed.distributed_c10d:_world.pg_map",
        "torch.backends.opt_einsum.strategy",  # it is None
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._orig_size",  # of instances
        "torch.nn:Linear._forward_pre_hooks",  # of instances, set by a base class
    ],
)
def test_a_name_is_found_wherever_it_is_set(name: str):
    assert exists(name)
    assert not exists(f"{name}_gone")


def test_names_are_read_in_the_source(tmp_path: Path):
    """An import inside ``try`` is optional; imports of other packages are not looked up."""
    file = tmp_path / "topic.py"
    file.write_text(
        '"""A title.\n\nMore."""\nimport os\nimport torch\nfrom torch.fx import Graph, gone\n'
        "try:\n    from torch import newer\nexcept ImportError:\n    newer = None\n"
        "ATTRIBUTES = {'torch.fx:Graph': ('_len', '_away'), 'torch.fx': ('_lost',)}\n"
    )
    topic = read_topic(file, ("torch",))
    assert (topic.name, topic.title) == ("topic", "A title")
    assert set(topic.names) == {
        "torch",
        "torch.fx:Graph",
        "torch.fx:gone",
        "torch:newer",
        "torch.fx:Graph._len",
        "torch.fx:Graph._away",
        "torch.fx:_lost",
    }
    assert topic.optional == {"torch:newer"}
    assert set(topic.missing()) == {"torch.fx:gone", "torch.fx:Graph._away", "torch.fx:_lost"}


@pytest.mark.parametrize("missing", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_each_topic_counts_wherever_it_stands(missing, monkeypatch):
    """Names that are looked up when they are used: everything imports without them."""
    names = ("os:path", "os:getcwd")
    found = []
    for place in range(3):
        own = (*names, "os:gone") if place in missing else names
        found.append(Topic(f"topic{place}", "A title", own))
    monkeypatch.setattr(doctor, "topics", lambda: found)
    monkeypatch.setattr(doctor, "parts_that_do_not_import", dict)
    text, in_order = doctor.report()
    assert in_order == (not missing), f"the page says\n{text}"
    assert text.endswith("Everything is in order.") == in_order
    for place in range(3):
        line = f"in order     topic{place:<11}2 of 2    A title\n"
        if place in missing:
            line = f"out of order topic{place:<11}2 of 3    A title\n{'':13}os.gone: missing\n"
        assert line in text
