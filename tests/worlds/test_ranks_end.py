"""A failure outside of the tests' phases fails the run: as a rank's session ends, and in hooks."""

import re
import xml.etree.ElementTree as ET

import pytest

from tests.worlds.conftest import Run, Suite

pytestmark = pytest.mark.second_tier

# A world of each size ends in its own way, on its last rank. The parent's part of the file is that
# of any project.
ENDS = """
import os, signal, threading, time
import pytest
from pytest_gtrainer.ranks import team

team.STOP_LIMIT = 1.0

def kind(config):
    worker = getattr(config, "workerinput", {})
    return worker["gt_size"] if worker.get("gt_rank") == worker.get("gt_size", 0) - 1 else None

def pytest_sessionfinish(session):
    match kind(session.config):
        case 1: raise ValueError("at the end")
        case 3: session.exitstatus = 3
        case 4: os._exit(7)
        case 5: pytest.exit("enough", 2)
        case 6: time.sleep(600)

def pytest_unconfigure(config):
    if kind(config) == 2: raise ValueError("behind the end")
"""

WORLDS = """
import os, signal, threading
import pytest, torch.distributed as dist

SIZES = [pytest.param(n, marks=pytest.mark.gt_world("ranks", size=n)) for n in range(1, 7)]

@pytest.mark.parametrize("n", SIZES)
def test_passes(n): pass

@pytest.mark.gt_world("ranks", size=2, timeout=77)
def test_dies_later():
    if dist.get_rank() == 0: threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

def test_here():
    import time
    time.sleep(2)

@pytest.mark.gt_world("ranks", size=7)
def test_ends_well(): pass
"""


@pytest.fixture(scope="module")
def ends(module_suite: Suite) -> Run:
    module_suite.write(
        "conftest.py", module_suite.folder.joinpath("conftest.py").read_text() + ENDS
    )
    module_suite.write("test_it.py", WORLDS)
    return module_suite.run("--gt-gpus=7", "--junitxml=junit.xml", "-p", "no:xdist")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_passes[1]", "rank 0: pytest_sessionfinish raised ValueError: at the end"),
        ("test_passes[2]", "rank 1: pytest_unconfigure raised ValueError: behind the end"),
        ("test_passes[3]", "rank 2: pytest_sessionfinish set the exit status 3"),
        ("test_passes[4]", "rank 3: exited with status 7 after its last test"),
        ("test_passes[5]", "rank 4: pytest_sessionfinish raised Exit: enough"),
        ("test_passes[6]", "rank 5: its session did not end within 1 s"),
        ("test_dies_later", "rank 0: was killed by SIGKILL after its last test"),
    ],
)
def test_what_fails_as_a_rank_ends_is_an_error_of_its_last_test(
    ends: Run, name: str, words: str
) -> None:
    """V1: the tests have passed, and the run fails."""
    assert ends.reports[name]["call"]["outcome"] == "passed"
    assert ends.outcome(name) == "error"
    assert words in ends.text(name)
    assert ends.status == pytest.ExitCode.TESTS_FAILED
    assert f"ERROR test_it.py::{name} - {words.partition(':')[0]}" in ends.output
    cases = ET.parse(ends.folder / "junit.xml").getroot().iter("testcase")
    assert any(case.get("name") == name and case.find("error") is not None for case in cases)


def test_a_rank_that_ends_well_adds_nothing(ends: Run) -> None:
    assert ends.outcome("test_ends_well") == "passed"
    assert len(re.findall("^ERROR ", ends.output, re.MULTILINE)) == 7, ends.output
    assert ends.left_over() == []


HOOKS = """
import pytest

def on_rank_1(config): return getattr(config, "workerinput", {}).get("gt_rank") == 1
def strike(config, nodeid, name):
    if on_rank_1(config) and nodeid.endswith(f"test_hook[{name}]"): raise ValueError(f"in {name}")

CONFIG = []
def pytest_sessionstart(session): CONFIG[:] = [session.config]
def pytest_runtest_logstart(nodeid): strike(CONFIG[0], nodeid, "logstart")
def pytest_runtest_logfinish(nodeid): strike(CONFIG[0], nodeid, "logfinish")
def pytest_runtest_setup(item): strike(item.config, item.nodeid, "setup")
def pytest_runtest_teardown(item): strike(item.config, item.nodeid, "teardown")
def pytest_runtest_makereport(item, call):
    if call.when == "call": strike(item.config, item.nodeid, "makereport")
def pytest_runtest_logreport(report):
    if report.when == "teardown": strike(CONFIG[0], report.nodeid, "logreport")
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    result = yield
    strike(item.config, item.nodeid, "protocol")
    if on_rank_1(item.config) and item.name == "test_hook[stop]": item.session.shouldstop = "enough"
    return result
"""
HOOKED = """
import pytest
NAMES = [
    "logstart", "logfinish", "setup", "teardown", "makereport", "logreport", "protocol", "stop"
]
@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("name", NAMES)
def test_hook(name): pass

@pytest.mark.gt_world("ranks", size=2)
def test_last(): pass
"""


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    suite = Suite(tmp_path_factory.mktemp("hooked") / "suite")
    suite.write("conftest.py", suite.folder.joinpath("conftest.py").read_text() + HOOKS)
    suite.write("test_it.py", HOOKED)
    return suite.run("--gt-gpus=2", "-p", "no:xdist")


@pytest.mark.parametrize(
    "name",
    ["logstart", "logfinish", "setup", "teardown", "makereport", "logreport", "protocol", "stop"],
)
def test_a_hook_that_raises_on_one_rank_fails_the_test(hooked: Run, name: str) -> None:
    """V1"""
    words = "asked to stop the run: enough" if name == "stop" else f"in {name}"
    assert hooked.outcome(f"test_hook[{name}]") in ("failed", "error"), hooked.output
    assert words in hooked.text(f"test_hook[{name}]")


def test_the_hooks_of_one_test_do_not_touch_the_next(hooked: Run) -> None:
    assert hooked.outcome("test_last") == "passed", hooked.text("test_last")


ENDS_BADLY = """
def pytest_sessionfinish(session):
    if getattr(session.config, "workerinput", {}).get("gt_rank") == 1:
        raise ValueError("at the end")
"""
BEHIND = """
import pytest
@pytest.mark.gt_world("ranks", size=2)
def test_on_ranks(): pass
def test_without_ranks(): pass
"""


def test_under_xdist_the_last_test_of_the_worker_is_blamed(suite: Suite) -> None:
    """V1: xdist takes no report of another test, and ended the run with an internal error."""
    suite.write("conftest.py", suite.folder.joinpath("conftest.py").read_text() + ENDS_BADLY)
    suite.write("test_it.py", BEHIND)
    run = suite.run("--gt-gpus=2", "-n1")
    assert run.status == pytest.ExitCode.TESTS_FAILED, run.output
    assert "2 passed, 1 error" in run.output
    words = (
        "after test_it.py::test_on_ranks, rank 1: pytest_sessionfinish raised ValueError: at the "
        "end"
    )
    assert words in run.text("test_without_ranks")


NEVER_COMES = """
import pytest

@pytest.fixture(scope="module")
def broken_at_the_end():
    yield
    raise ValueError("at the end of the module")

def test_here(broken_at_the_end): pass

@pytest.mark.gt_world("ranks", size=2)
def test_fails(): assert False

def test_never(broken_at_the_end): pass
"""


def test_when_a_failure_stops_the_run_fixtures_of_the_module_end_with_its_report(
    suite: Suite,
) -> None:
    """V1: as without ranks; their failure came as an error of pytest itself, behind the summary."""
    suite.write("test_it.py", NEVER_COMES)
    run = suite.run("--gt-gpus=2", "-x")
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed, 1 error" in run.output, run.output
    assert run.output.count("ValueError: at the end of the module") >= 1
