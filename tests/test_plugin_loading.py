"""Loading the plugin: no output where it is not used."""

import json

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.plugin import USED_LATER


def test_a_project_that_does_not_use_it_sees_no_output(pytester: pytest.Pytester):
    pytester.makepyfile("def test_nothing_of_ours(): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*gtrainer*summary*")
    assert "gt-" not in result.stdout.str()


CONFTEST = """
import json, sys

CALLS = {}

def before(name, impls, kwargs):
    ours = [impl for impl in impls if impl.plugin_name.startswith("gtrainer")]
    CALLS[name] = CALLS.get(name, 0) + len(ours)

def pytest_configure(config):
    config.pluginmanager.add_hookcall_monitoring(before, lambda *call: None)

def pytest_unconfigure(config):
    with open("seen.json", "w") as file:
        json.dump({"modules": sorted(sys.modules), "calls": CALLS}, file)
"""


def seen_by(pytester: pytest.Pytester, tests: int, *args: str) -> tuple[set[str], dict[str, int]]:
    """Return the modules that a run of so many tests imported, and our hooks that it called."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("\n".join(f"def test_{number}(): pass" for number in range(tests)))
    pytester.runpytest_subprocess(*args)
    seen = json.loads((pytester.path / "seen.json").read_text())
    return set(seen["modules"]), seen["calls"]


def more_calls(few: dict[str, int], many: dict[str, int]) -> dict[str, int]:
    """Return our hooks that a run with one test more calls more often."""
    more = {name: many[name] - few.get(name, 0) for name in many.keys() - HOOKS_OF_FILES}
    return {name: calls for name, calls in more.items() if calls}


# Called for files and folders, of which the first run leaves some.
HOOKS_OF_FILES = {
    "pytest_ignore_collect",
    "pytest_collectstart",
    "pytest_make_collect_report",
    "pytest_collectreport",
}
HOOKS_OF_OURS = {
    "pytest_runtest_protocol": 5,
    "pytest_runtest_logstart": 1,
    "pytest_runtest_setup": 4,
    "pytest_runtest_call": 2,
    "pytest_runtest_teardown": 3,
    "pytest_runtest_makereport": 15,
    "pytest_runtest_logreport": 12,
}


def test_another_project_pays_for_few_modules_and_hooks(pytester: pytest.Pytester):
    """Counted, as seconds say little here: benchmarks/unused.py has those."""
    modules, few = seen_by(pytester, 1, "--co")
    _, many = seen_by(pytester, 2, "--co")
    ours = {name for name in modules if name.partition(".")[0] == "pytest_gtrainer"}
    assert len(ours) <= 28, sorted(ours)
    assert not ours & {f"pytest_gtrainer.{name}" for name in USED_LATER}
    assert not modules & {"torch", "multiprocessing", "ctypes", "pickle", "asyncio"}
    assert more_calls(few, many) == {"pytest_generate_tests": 1}


@pytest.mark.second_tier
def test_a_test_of_another_project_calls_few_hooks(pytester: pytest.Pytester):
    modules, few = seen_by(pytester, 1)
    _, many = seen_by(pytester, 2)
    assert not modules & {f"pytest_gtrainer.{name}" for name in USED_LATER}
    assert more_calls(few, many) == {"pytest_generate_tests": 1, **HOOKS_OF_OURS}


@pytest.mark.second_tier
def test_a_run_that_runs_pytest_inside_imports_them_all(pytester: pytest.Pytester):
    """The twin: such a run forgets modules, and classes of messages must stay the same."""
    modules, _ = seen_by(pytester, 1, "-p", "pytester")
    assert {f"pytest_gtrainer.{name}" for name in USED_LATER} <= modules


@pytest.mark.parametrize(
    ("words", "value"),
    [(("1", "true", "Yes", "on", "On"), True), (("0", "false", "No", "off", "Off"), False)],
)
def test_a_flag_with_a_choice_takes_the_words_of_every_flag(
    pytester: pytest.Pytester, words: tuple[str, ...], value: bool
):
    for word in words:
        pytester.makeini(f"[pytest]\ngt_fresh_ranks = {word}\n")
        assert options.get(pytester.parseconfig(), "fresh-ranks") is value, word


@pytest.mark.parametrize("word", ["on-failure", " On-Failure "])
def test_a_flag_with_a_choice_takes_it_in_the_ini_file(pytester: pytest.Pytester, word: str):
    pytester.makeini(f"[pytest]\ngt_fresh_ranks = {word}\n")
    assert options.get(pytester.parseconfig(), "fresh-ranks") == "on-failure"
    assert options.get(pytester.parseconfig("--gt-fresh-ranks"), "fresh-ranks") is True
