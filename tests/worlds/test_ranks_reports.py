"""A test on ranks reports the same as the same test under pytest without the plugin."""

import re
from typing import Any

import pytest

from tests.worlds.conftest import Run, Suite

pytestmark = pytest.mark.second_tier

KINDS = (
    "outcome",
    "text",
    "output",
    "errors",
    "log",
    "xfailed",
    "properties",
    "keywords",
    "location",
)


@pytest.fixture(scope="module")
def run(module_suite: Suite) -> Run:
    module_suite.take("ranks_reports")
    return module_suite.run("--gt-gpus=2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same file in a pytest that does not have the plugin."""
    suite = Suite(tmp_path_factory.mktemp("plain") / "suite")
    suite.take("ranks_reports")
    (suite.folder / "pytest.ini").write_text("[pytest]\nmarkers = gt_world\n")
    return suite.run("test_reports.py", without_plugin=True)


def test_reports_are_those_of_pytest(run: Run, plain: Run) -> None:
    """Outcomes, tracebacks, output, log, xfails, properties, keywords, locations: every phase of
    every test.
    """
    assert len(plain.reports) > 40
    for name, phases in plain.reports.items():
        reported = {when: as_plain(report) for when, report in run.reports[name].items()}
        assert reported == {when: as_plain(report) for when, report in phases.items()}, name


def as_plain(report: dict[str, Any]) -> dict[str, str]:
    """Without what ranks add (who the others were), and what differs from run to run: folders,
    addresses.
    """
    report = {**report, "text": re.split(r"\n-+ ranks -+\n", report["text"])[0]}
    return {kind: re.sub(r"/\S*|0x\w+", "_", str(report[kind])) for kind in KINDS}


def test_every_outcome_is_among_them(plain: Run) -> None:
    outcomes = {plain.outcome(name) for name in plain.reports}
    assert outcomes == {"passed", "failed", "error", "skipped", "xfailed"}


def test_warnings_are_those_of_pytest(run: Run, plain: Run) -> None:
    """Those of threads and of finalizers among them, each once."""
    given = [warnings_of(each.output) for each in (run, plain)]
    assert given[0] - {"UserWarning: only here"} == given[1]
    assert {kind.partition(":")[0] for kind in given[1]} >= {
        "UserWarning",
        "PytestUnhandledThreadExceptionWarning",
        "PytestUnraisableExceptionWarning",
    }
    for each in (run, plain):
        assert each.output.count("UserWarning: warned") == 1


def warnings_of(output: str) -> set[str]:
    found = re.findall(r"^  \S+: (\w+Warning: .*)$", output, re.MULTILINE)
    return {re.sub(r"0x\w+", "_", warning) for warning in found}


def test_durations_are_those_of_the_phases(run: Run) -> None:
    phases = run.reports["test_slow"]
    assert phases["setup"]["duration"] >= 0.1
    assert phases["call"]["duration"] >= 0.2
    assert phases["teardown"]["duration"] >= 0.1


def test_what_one_rank_tells_is_told(run: Run) -> None:
    call = run.reports["test_prints_on_one_rank"]["call"]
    assert (call["output"], call["errors"]) == ("printed\n", "complained\n")
    log = run.reports["test_logs_on_each"]["call"]["log"]
    assert "on rank 0" in log
    assert "on rank 1" in log
    assert run.output.count("UserWarning: only here") == 1


def test_output_belongs_to_the_test_that_wrote_it(run: Run) -> None:
    for n in range(3):
        assert run.reports[f"test_prints_and_one_fails[{n}]"]["call"]["output"] == f"of test {n}\n"
    assert run.reports["test_last"]["call"]["output"] == "last of the file\n"


HOOKS = """
def written(what, config):
    rank = getattr(config, "workerinput", {}).get("gt_rank")
    if rank is not None:
        with open(f"hooks{rank}", "a") as file:
            file.write(what + "\\n")

CONFIG = []

def pytest_configure(config):
    CONFIG[:] = [config]

def pytest_runtest_logstart(nodeid):
    written("logstart", CONFIG[0])

def pytest_fixture_setup(fixturedef, request):
    written("fixture " + fixturedef.argname, request.config)

def pytest_runtest_call(item):
    written("call", item.config)

def pytest_runtest_makereport(item, call):
    written("makereport " + call.when, item.config)

def pytest_runtest_logreport(report):
    written("logreport " + report.when, CONFIG[0])
"""

PARAMETER = """
import pytest
@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("n", [1])
def test_empty(n): pass
"""


def test_hooks_of_a_conftest_run_in_ranks(suite: Suite) -> None:
    suite.write("conftest.py", HOOKS)
    suite.write("test_it.py", PARAMETER)
    assert suite.run("--gt-gpus=2").status == 0
    expected = [
        "logstart",
        "fixture n",
        "makereport setup",
        "logreport setup",
        "call",
        "makereport call",
        "logreport call",
        "makereport teardown",
        "logreport teardown",
    ]
    for rank in range(2):
        assert (suite.folder / f"hooks{rank}").read_text().splitlines() == expected


LEAKS = """
import pytest, torch
pytestmark = pytest.mark.gt_world("ranks", size=2)

def test_leaks(): torch.backends.cudnn.deterministic = True
def test_after(): assert torch.backends.cudnn.deterministic
def test_puts_it_back(): torch.backends.cudnn.deterministic = False

def switch(): torch.set_float32_matmul_precision("high")
def test_calls(gt_ranks): gt_ranks.run(switch, size=2)
def test_after_a_call(): assert torch.get_float32_matmul_precision() == "highest"

@pytest.fixture(scope="class")
def shared():
    yield
    torch.backends.mkldnn.enabled = False

class TestClass:
    def test_shares(self, shared): pass
def test_after_a_fixture_has_ended(): assert not torch.backends.mkldnn.enabled
"""


def test_a_switch_is_blamed_on_the_test_that_left_it(suite: Suite) -> None:
    """K3: not on one that finds it so, whoever left it: another test, a call, a fixture of a wider
    scope.
    """
    suite.write("test_it.py", LEAKS)
    run = suite.run("--gt-gpus=2")
    assert "7 passed" in run.output, run.output
    deterministic = {"torch.backends.cudnn.deterministic"}
    found = blamed(run.output)
    assert {name: found.get(name) for name in ("test_leaks", "test_puts_it_back")} == {
        "test_leaks": deterministic,
        "test_puts_it_back": deterministic,
    }
    assert not found.keys() & {
        "test_after",
        "test_after_a_call",
        "test_after_a_fixture_has_ended",
    }, run.output


BESIDE_A_PLAIN_TEST = """
import pytest, torch
on_ranks = pytest.mark.gt_world("ranks", size=2)

@on_ranks
def test_before(): pass
def test_plain(): torch.backends.cudnn.benchmark = True
@on_ranks
def test_after(): pass
"""


def test_under_torchrun_a_test_in_the_process_of_rank_0_makes_none_on_ranks_a_leak(
    suite: Suite,
) -> None:
    """K3"""
    suite.write("conftest.py", "")
    suite.write("test_it.py", BESIDE_A_PLAIN_TEST)
    run = suite.run(launcher=("--standalone", "--nproc-per-node=2"))
    assert "3 passed" in run.output, run.output
    assert blamed(run.output) == {"test_plain": {"torch.backends.cudnn.benchmark"}}


def blamed(output: str) -> dict[str, set[str]]:
    """The switches that tests were said to have changed, by test."""
    found: dict[str, set[str]] = {}
    for name, switch in re.findall(r"LeakedFlagWarning: \S*::(\w+) changed (\S+) from", output):
        found.setdefault(name, set()).add(switch)
    return found


GROUPED = """
import pytest
pytestmark = pytest.mark.xdist_group("ours")

@pytest.mark.gt_world("ranks", size=2)
def test_on_ranks(gt_world): assert gt_world.size == 2
"""


def test_marks_of_plugins_that_ranks_do_without_are_known_there(suite: Suite) -> None:
    """The mark of xdist's groups is one: with strict markers an unknown one fails the file."""
    suite.write("pytest.ini", "[pytest]\naddopts = --strict-markers\n")
    suite.write("test_it.py", GROUPED)
    run = suite.run("-n1", "--dist=loadgroup", "--gt-gpus=2")
    assert "1 passed" in run.output, run.output
