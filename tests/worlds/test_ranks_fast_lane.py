"""The fast lane of a rank gives the reports that pytest's own protocol gives, and is left where others have a say."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.worlds.conftest import Run, Suite

# A hook that does nothing, and that the lane does not know.
CLOSES_THE_LANE = """
def pytest_runtest_teardown(item):
    pass
"""

SUITE = """
import logging, os, sys, threading, time, unittest.mock, warnings
import pytest, torch
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=2)
EXPECTED = os.environ["LANE"]

def lane():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("fast_lane.py") and frame.f_code.co_name == "_call":
            return "open"
        frame = frame.f_back
    return "closed"

def test_on_the_lane():
    assert lane() == EXPECTED

def test_prints_on_one_rank(gt_world):
    if gt_world.rank == 1:
        print("printed")
        os.system("echo from a child >&2")
    assert lane() == EXPECTED

@pytest.fixture
def loud():
    print("in setup")
    yield
    print("in teardown")

def test_prints_around(loud):
    pass

def test_warns_on_one_rank(gt_world):
    if gt_world.rank == 0:
        warnings.warn("warned")

@pytest.mark.filterwarnings("error")
def test_filters_warnings():
    warnings.warn("an error")

def test_logs_and_passes():
    logging.getLogger("mine").warning("logged")

def test_logs_and_fails():
    silent = logging.getLogger("mine.silent")
    silent.propagate = False
    logging.getLogger("mine").error("before the failure on %d", dist.get_rank())
    assert dist.get_world_size() == 3

@pytest.fixture
def silenced():
    logger = logging.getLogger("mine.silenced")
    logger.propagate = False
    return logger

def test_logger_that_a_fixture_silenced(silenced):
    silenced.error("heard all the same")

@pytest.fixture
def expected_to_fail(request):
    request.node.add_marker(pytest.mark.xfail(reason="by a fixture"))

def test_marked_in_setup(expected_to_fail):
    assert False

def test_marked_while_it_runs(request):
    request.node.add_marker(pytest.mark.xfail(reason="by itself", strict=True))

def test_marked_and_fails(request):
    request.node.add_marker(pytest.mark.xfail(reason="by itself"))
    assert False

def test_skips():
    pytest.skip("no reason")

def test_property(record_property):
    record_property("answer", 42)

def test_captures(request):
    capsys = request.getfixturevalue("capsys")
    print("captured")
    assert capsys.readouterr().out == "captured\\n"
    print("left")

def test_reads_log(request):
    caplog = request.getfixturevalue("caplog")
    logging.getLogger("mine").warning("read")
    assert caplog.messages == ["read"]

def test_subtests(request):
    subtests = request.getfixturevalue("subtests")
    for n in range(2):
        with subtests.test(n=n):
            assert n == 0

@pytest.fixture
def breaks():
    yield
    raise RuntimeError("in teardown")

def test_teardown_fails(breaks):
    pass

@pytest.fixture
def cannot():
    raise RuntimeError("in setup")

def test_setup_fails(cannot):
    pass

def test_raises_in_a_thread():
    def fail():
        raise ValueError("in a thread")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()

def test_leaks_a_flag():
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark

def test_temporary_folder(tmp_path):
    (tmp_path / "file").write_text("")

@pytest.fixture
def doubled(request):
    return 2 * request.param

@pytest.mark.parametrize("doubled", [1], indirect=True)
def test_indirect_parameter(doubled):
    assert doubled == 2

@pytest.mark.parametrize("n", [1, 2], scope="module")
def test_parameter_of_the_module(n):
    assert n in (1, 2)

@pytest.fixture
def value():
    return 0

@pytest.mark.parametrize("value", [3])
def test_parameter_instead_of_a_fixture(value):
    assert value == 3 and lane() == EXPECTED

def test_value_of_the_fixture(value):
    assert value == 0

@pytest.mark.parametrize("value", [3], indirect=True)
def test_parameter_that_the_fixture_ignores(value):
    assert value == 0

@pytest.fixture
def named(request):
    request.node.add_marker("early")

def test_named_while_it_runs(named, request):
    request.node.add_marker("late")

def test_logger_that_propagates_again():
    logging.getLogger("mine.silenced").propagate = True
    logging.getLogger("mine.silenced").warning("heard once")

def test_records_of_each_phase(request):
    logging.getLogger("mine").warning("of the call")
    caplog = request.getfixturevalue("caplog")
    assert (len(caplog.get_records("setup")), len(caplog.get_records("call"))) == (0, 1)

@pytest.fixture
def slow():
    time.sleep(0.1)
    yield
    time.sleep(0.1)

def test_slow(slow):
    time.sleep(0.2)

def test_sets_a_filter(request):
    request.config.addinivalue_line("filterwarnings", "error:by the new filter")

def test_heeds_the_filter():
    warnings.warn("by the new filter")

@unittest.mock.patch("os.sep", "/")
def test_patched():
    pass

class TestClass:
    def setup_method(self):
        self.value = 1

    @pytest.mark.parametrize("n", [1, "a b"])
    def test_method(self, n):
        assert self.value == 1

def test_quiet_after_all_that():
    assert lane() == EXPECTED
    dist.all_reduce(torch.ones(4))
"""


def run_suite(folder: Any, lane: str) -> Run:
    suite = Suite(folder)
    suite.write("test_it.py", SUITE)
    suite.write("closes_the_lane.py", CLOSES_THE_LANE)
    plugin = ["-p", "closes_the_lane"] if lane == "closed" else []
    return suite.run("--gt-gpus=2", *plugin, environ={"LANE": lane, "PYTHONPATH": path_with(suite)})


def path_with(suite: Suite) -> str:
    """For a plugin beside the test files."""
    return os.pathsep.join([str(suite.folder), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("lane")
    return {lane: run_suite(folder / lane / "suite", lane) for lane in ("open", "closed")}


def test_reports_are_those_of_pytest(runs: dict[str, Run]) -> None:
    """Outcomes, texts, output, log, facts, properties, keywords of every phase of every test."""
    told = {lane: without_places(run.reports) for lane, run in runs.items()}
    assert len(told["open"]) > 20
    for name, phases in told["closed"].items():
        assert told["open"][name] == phases, name


def without_places(reports: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Without what differs from run to run: times, folders, names of threads, and in what order facts come."""
    return {
        name: {
            when: {key: re.sub(r"/\S*|Thread-\d+|0x\w+|open|closed", "_", str(value))
                   for key, value in report.items() if key != "duration"}
            for when, report in phases.items()
        }
        for name, phases in reports.items()
    }  # fmt: skip


def test_outcomes(runs: dict[str, Run]) -> None:
    """The lane was open and closed where it should be, and every kind of outcome was there."""
    for run in runs.values():
        outcomes = {name: run.outcome(name) for name in run.reports}
        assert outcomes["test_on_the_lane"] == outcomes["test_quiet_after_all_that"] == "passed", run.output
        assert set(outcomes.values()) == {"passed", "failed", "error", "skipped", "xfailed"}


def test_durations_are_those_of_the_phases(runs: dict[str, Run]) -> None:
    for run in runs.values():
        phases = run.reports["test_slow"]
        assert phases["setup"]["duration"] >= 0.1
        assert phases["call"]["duration"] >= 0.2
        assert phases["teardown"]["duration"] >= 0.1


def test_filters_of_warnings_that_are_added_later_hold(runs: dict[str, Run]) -> None:
    """Filters are parsed once, until there are others."""
    for run in runs.values():
        assert "UserWarning: by the new filter" in run.text("test_heeds_the_filter")


def test_what_one_rank_writes_is_shown(runs: dict[str, Run]) -> None:
    call = runs["open"].reports["test_prints_on_one_rank"]["call"]
    assert (call["output"], call["errors"]) == ("printed\n", "from a child\n")
    around = runs["open"].reports["test_prints_around"]
    assert around["teardown"]["output"] == "in setup\nin teardown\n"
    failed = runs["open"].reports["test_logs_and_fails"]["call"]
    assert "before the failure on 0" in failed["log"]
    assert "before the failure on 1" in failed["log"]


def test_warnings_are_those_of_pytest(runs: dict[str, Run]) -> None:
    told = {lane: re.findall(r"^  .*Warning: .*$", run.output, re.MULTILINE) for lane, run in runs.items()}
    assert any("UserWarning: warned" in line for line in told["open"])
    assert any("LeakedFlagWarning" in line for line in told["open"])
    assert len(told["open"]) == len(told["closed"])
    for run in runs.values():
        assert ", 5 warnings, " in run.output, "each is given once, with its own test"


HOOKS = """
import os

def written(what, config):
    rank = getattr(config, "workerinput", {}).get("gt_rank")
    if rank is not None:
        with open(f"hooks{rank}", "a") as file:
            file.write(what + "\\n")

def pytest_runtest_call(item):
    written("call", item.config)

def pytest_runtest_makereport(item, call):
    written("makereport " + call.when, item.config)

def pytest_runtest_logreport(report):
    written("logreport " + report.when, CONFIG[0])

def pytest_runtest_logstart(nodeid):
    written("logstart", CONFIG[0])

CONFIG = []

def pytest_configure(config):
    CONFIG[:] = [config]
"""


def test_hooks_of_a_conftest_run_in_ranks(suite: Suite) -> None:
    suite.write("conftest.py", HOOKS)
    suite.write("test_it.py", 'import pytest\n@pytest.mark.gt_world("ranks", size=2)\ndef test_empty(): pass\n')
    assert suite.run("--gt-gpus=2").status == 0
    expected = ["logstart", "makereport setup", "logreport setup", "call", "makereport call", "logreport call",
                "makereport teardown", "logreport teardown"]  # fmt: skip
    for rank in range(2):
        assert (suite.folder / f"hooks{rank}").read_text().splitlines() == expected


# In ranks alone: a hook of the conftest itself would make the lane look at the switches of every test anew.
PARENT = """
import pytest

class Parent:
    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid):
        if "test_shares" in nodeid:
            self.skipped.add_marker(pytest.mark.skip(reason="thought better of it"))

    def pytest_collection_modifyitems(self, items):
        self.skipped = next((item for item in items if "test_skipped" in item.name), None)

def pytest_configure(config):
    if "gt_rank" not in getattr(config, "workerinput", {}):
        config.pluginmanager.register(Parent())
"""

BETWEEN = {
    "test_a.py": """
        import os
        import pytest, torch
        pytestmark = pytest.mark.gt_world("ranks", size=2)

        @pytest.mark.parametrize("n", range(2))
        def test_phase(n):
            assert os.environ["PYTEST_CURRENT_TEST"] == f"test_a.py::test_phase[{n}] (call)"

        def test_leaks(): torch.backends.cudnn.deterministic = True
        def test_after(): assert torch.backends.cudnn.deterministic
        def test_puts_it_back(): torch.backends.cudnn.deterministic = False
        def test_last(): pass
        """,
    "test_b.py": """
        import pytest, torch
        pytestmark = pytest.mark.gt_world("ranks", size=2)
        torch.backends.cudnn.benchmark = True  # ranks import this between two tests

        def test_of_a_file_that_sets_a_switch(): assert torch.backends.cudnn.benchmark
        def test_quiet(): pass

        def switch(): torch.set_float32_matmul_precision("high")

        def test_calls(gt_ranks): gt_ranks.run(switch, size=2)
        def test_after_a_call(): assert torch.get_float32_matmul_precision() == "high"
        def test_last(): pass
        """,
    "test_c.py": """
        import pytest, torch
        pytestmark = pytest.mark.gt_world("ranks", size=2)

        @pytest.fixture(scope="class")
        def shared():
            yield
            torch.backends.mkldnn.enabled = False

        class TestClass:
            def test_shares(self, shared): pass
            def test_skipped(self, shared): pass  # not known to be when the one before ends

        def test_after_a_fixture_has_ended(): assert not torch.backends.mkldnn.enabled
        def test_last(): pass
        """,
}


@pytest.fixture(scope="module")
def files_run(module_suite: Suite) -> Run:
    """Several files in one run, on the lane."""
    module_suite.write("parent.py", PARENT)
    for name, source in {**BETWEEN, "test_it.py": QUIET_AND_LOUD}.items():
        module_suite.write(name, source)
    return module_suite.run("--gt-gpus=2", "-p", "parent", environ={"PYTHONPATH": path_with(module_suite)})


def blamed(output: str) -> dict[str, set[str]]:
    """The switches that tests were said to have changed, by test."""
    found: dict[str, set[str]] = {}
    for name, switch in re.findall(r"LeakedFlagWarning: \S*::(\w+) changed (\S+) from", output):
        found.setdefault(name, set()).add(switch)
    return found


def test_what_changes_switches_between_two_tests_is_blamed_on_neither(files_run: Run) -> None:
    """K3: as long as nobody's code runs between two tests the switches are read once for both, and no longer."""
    assert "2 failed, 19 passed, 1 skipped" in files_run.output, files_run.output
    deterministic = {"torch.backends.cudnn.deterministic"}
    assert blamed(files_run.output) == {"test_leaks": deterministic, "test_puts_it_back": deterministic}


HOOKS_BETWEEN = """
import os, sys

def pytest_runtest_logfinish():
    assert "PYTEST_CURRENT_TEST" not in os.environ
    if "torch" in sys.modules:
        cudnn = sys.modules["torch"].backends.cudnn
        cudnn.benchmark = not cudnn.benchmark

def pytest_fixture_setup(fixturedef):
    if fixturedef.argname == "n":
        with open("parameters", "a") as file:
            file.write("n")
"""


@pytest.fixture(scope="module")
def hooks_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    suite = Suite(tmp_path_factory.mktemp("hooks") / "suite")
    suite.write("conftest.py", HOOKS_BETWEEN)
    suite.write("test_a.py", BETWEEN["test_a.py"])
    return suite.run("--gt-gpus=2")


def test_hooks_of_fixtures_see_parameters(hooks_run: Run) -> None:
    assert (hooks_run.folder / "parameters").read_text() == "nn" * 2, "two tests on two ranks"


def test_a_hook_that_changes_switches_between_tests_makes_no_test_a_leak(hooks_run: Run) -> None:
    """K3"""
    assert "6 passed" in hooks_run.output, hooks_run.output
    assert set(blamed(hooks_run.output)) == {"test_leaks", "test_puts_it_back"}


BESIDE_A_PLAIN_TEST = """
import pytest, torch
on_ranks = pytest.mark.gt_world("ranks", size=2)

@on_ranks
def test_before(): pass
def test_plain(): torch.backends.cudnn.benchmark = True
@on_ranks
def test_after(): pass
@on_ranks
def test_last(): pass
"""


def test_under_torchrun_a_test_in_the_process_of_rank_0_makes_none_on_ranks_a_leak(suite: Suite) -> None:
    """K3"""
    suite.write("conftest.py", "")
    suite.write("test_it.py", BESIDE_A_PLAIN_TEST)
    run = suite.run(launcher=("--standalone", "--nproc-per-node=2"))
    assert "4 passed" in run.output, run.output
    assert blamed(run.output) == {"test_plain": {"torch.backends.cudnn.benchmark"}}


QUIET_AND_LOUD = """
import logging, os, sys
import pytest
pytestmark = pytest.mark.gt_world("ranks", size=2)

@pytest.mark.parametrize("n", range(3))
def test_prints(n):
    print("of test", n)
    assert n != 1

@pytest.mark.parametrize("n", range(3))
def test_logs(n):
    logger = logging.getLogger("mine.of.this.file")
    logger.propagate = n == 2
    logger.warning("of test %d", n)
    assert n != 1

def test_prints_last():
    print("last of the file")
"""


def test_output_belongs_to_the_test_that_wrote_it(files_run: Run) -> None:
    """Where nobody's code runs before and after a body, it is looked for once."""
    calls = {name: phases["call"] for name, phases in files_run.reports.items() if "call" in phases}
    for n in range(3):
        assert calls[f"test_prints[{n}]"]["output"] == f"of test {n}\n"
    for n in (1, 2):  # in the first one the logger stops to propagate when nobody listens to it any more
        assert calls[f"test_logs[{n}]"]["log"].endswith(f"of test {n}")
    assert calls["test_prints_last"]["output"] == "last of the file\n"
    failed = [name for name in files_run.reports if files_run.outcome(name) == "failed"]
    assert failed == ["test_prints[1]", "test_logs[1]"]


HOOKS_AROUND_A_BODY = """
import logging
import pytest

def tell(what, node):
    print(what, node.name)
    logging.getLogger("mine").warning("%s %s", what, node.name)

class InRanks:
    def pytest_fixture_setup(self, request):
        tell("before", request.node)

    def pytest_fixture_post_finalizer(self, request):
        tell("after", request.node)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if "finalized" in pyfuncitem.name:
            pyfuncitem.addfinalizer(lambda: tell("at the end of", pyfuncitem))

def pytest_configure(config):
    if "gt_rank" in getattr(config, "workerinput", {}):
        config.pluginmanager.register(InRanks())
"""

AROUND_A_BODY = """
import pytest
pytestmark = pytest.mark.gt_world("ranks", size=2)

def test_first(): pass
@pytest.mark.parametrize("n", range(3))
def test_parameter(n): assert n != 2
def test_finalized(): pass
def test_quiet(): pass
def test_last(): assert False
"""


def test_output_around_a_body_belongs_to_its_phase(suite: Suite) -> None:
    """Hooks of fixtures run for parameters, and finalizers, too, for a test that has no fixtures."""
    suite.write("hooks.py", HOOKS_AROUND_A_BODY)
    suite.write("test_it.py", AROUND_A_BODY)
    run = suite.run("--gt-gpus=2", "-p", "hooks", environ={"PYTHONPATH": path_with(suite)})
    ends = {name: phases["teardown"] for name, phases in run.reports.items()}
    for n in range(3):
        name = f"test_parameter[{n}]"
        assert run.reports[name]["setup"]["output"] == f"before {name}\n"
        assert run.reports[name]["setup"]["log"].endswith(f"before {name}")
        assert ends[name]["output"] == f"before {name}\nafter {name}\n"
        assert ends[name]["log"].endswith(f"after {name}")
    assert ends["test_finalized"]["output"] == "at the end of test_finalized\n"
    assert ends["test_finalized"]["log"].endswith("at the end of test_finalized")
    for name in ("test_first", "test_quiet", "test_last"):
        assert (ends[name]["output"], ends[name]["log"]) == ("", "")


UNUSUAL_LOGGERS = """
import logging, unittest.mock
import pytest
pytestmark = pytest.mark.gt_world("ranks", size=2)

class SetsByItself(logging.Logger):
    __setattr__ = object.__setattr__

class Computes(logging.Logger):
    is_silent = False
    propagate = property(lambda self: not Computes.is_silent, lambda self, value: None)

@pytest.mark.parametrize("kind", [SetsByItself, Computes])
def test_makes(kind):
    logging.setLoggerClass(kind)
    logging.getLogger(kind.__name__)
    logging.setLoggerClass(logging.Logger)

def test_silences():
    logging.getLogger("SetsByItself").propagate = False
    Computes.is_silent = True

@pytest.mark.parametrize("name", ["SetsByItself", "Computes"])
def test_logs(name):
    logging.getLogger(name).warning("heard")

@pytest.fixture(params=["class", "logger"])
def mocked(request):
    logger = logging.getLogger("mine")
    logger.propagate = False
    loggers = {"mock": unittest.mock.MagicMock(spec=logging.Logger)}
    with (unittest.mock.patch("logging.Logger") if request.param == "class" else
          unittest.mock.patch.dict(logging.root.manager.loggerDict, loggers)):
        yield logger

def test_logs_beside_a_mock(mocked):
    mocked.warning("heard")
"""


def test_loggers_that_propagate_in_their_own_way_are_heard(suite: Suite) -> None:
    suite.write("test_it.py", UNUSUAL_LOGGERS)
    run = suite.run("--gt-gpus=2")
    assert "7 passed" in run.output, run.output
    for name in ("test_logs[SetsByItself]", "test_logs[Computes]",
                 "test_logs_beside_a_mock[class]", "test_logs_beside_a_mock[logger]"):  # fmt: skip
        assert run.reports[name]["call"]["log"].endswith("heard"), name
