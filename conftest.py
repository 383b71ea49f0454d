"""Set-up shared by all tests of the repository."""

import gc
import os
import sys
from collections.abc import Generator
from contextlib import suppress

import pytest

from fixtures.warm import WarmPython
from pytest_gtrainer.devices import visible_gpus

# Generated tests have no limit of time: a loaded machine is no fault of theirs. CI draws the same
# examples each time.
with suppress(ModuleNotFoundError):  # `make gpu` does without hypothesis
    from hypothesis import HealthCheck, settings

    os.environ.setdefault(
        "GT_SAME_EXAMPLES", "1" if "CI" in os.environ else ""
    )  # workers are told, too
    _calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("calm", derandomize=bool(os.environ["GT_SAME_EXAMPLES"]), **_calm)
    settings.load_profile("calm")

# Read when torch loads. Models of tests are tiny: a pool of threads waits for itself, up to a
# hundred times as long as one thread computes where other processes are at work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Inductor starts CUDA, and tests of the GPU do, in a process whose later tests may want to be
# deterministic.
if visible_gpus():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    """``--gt-device=cpu`` goes for the runs that tests start, too: one GPU in sight is too few for
    their ranks.
    """
    if config.getoption("gt_device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Python's own threshold, 700 objects, walks the million of torch and of 13,000 tests so often
    # that a third of the collection is spent on it.
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    """Keep torch and the collected tests, which live as long as the run, from the collector: each
    ``gc.collect`` of a test, of the package or of pytest would walk them for half a second.
    """
    gc.collect()
    gc.freeze()


pytest_plugins = ["pytester"]
collect_ignore = ["fixtures/suites"]  # runs of their own, which tests start


@pytest.fixture
def pytester(pytester: pytest.Pytester) -> pytest.Pytester:
    """Its processes do without hypothesis, which would be imported to say a word at the end of each
    run.
    """
    pytester.plugins.append("no:hypothesispytest")
    return pytester


@pytest.fixture(scope="session")
def warm_process() -> Generator[WarmPython]:
    process = WarmPython()
    yield process
    process.close()


@pytest.fixture
def warm_python(warm_process: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of pytest that the test starts are forked from a Python that has imported torch."""
    monkeypatch.setattr(sys, "executable", warm_process.executable)


def pytest_sessionstart() -> None:
    """Runs that tests start are a developer's: where CI is set, an update of goldens would be
    refused.
    """
    os.environ.pop("CI", None)


def pytest_runtest_teardown() -> None:
    """Let later tests set flags of backends: torch's own harness forbids it from the first test that
    imports it until the process ends.
    """
    if torch_backends := sys.modules.get("torch.backends"):
        its_globals = torch_backends.flags_frozen.__globals__
        its_globals["__allow_nonbracketed_mutation_flag"] = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove ``second_tier("case", ...)`` and ``long("case", ...)`` from the cases whose ids do not
    begin with one of their arguments.
    """
    for item in items:
        case = item.name.partition("[")[2]
        for mark in list(item.own_markers):
            has_cases = mark.name in ("second_tier", "long") and mark.args
            if has_cases and not case.startswith(mark.args):
                item.own_markers.remove(mark)
