"""Determinism in a process that has imported torch's own harness.

The harness (``common_utils``) forbids assignments to flags of backends until the process ends, so
each test runs in a Python of its own.
"""

import subprocess
import sys

import pytest

READ = """
import torch
from pytest_gtrainer import DebugConfig, assert_run_to_run, deterministic
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.run_to_run import PRESSURES
from pytest_gtrainer.worlds.hygiene import restored

SETTINGS = {knob.name: knob.setting for knob in knobs.KNOBS if knob.setting in ("True", "False")}

def read():
    values = knobs.values().items()
    return {name: str(value) for name, value in values if value is not knobs.NOT_LOADED}

def check_inside():
    found = read()
    for name, setting in SETTINGS.items():
        assert found.get(name, setting) == setting, (name, found[name])

def check_restored(before):
    now = read()
    assert {name: now[name] for name in before} == before
    assert not torch.backends.cudnn.deterministic and not torch.backends.mkldnn.deterministic
"""

HARNESS = "import torch.testing._internal.common_utils as harness"

IMPORTED_BEFORE = f"""
{HARNESS}
assert torch.backends.flags_frozen()
before = read()

with deterministic():  # one block
    check_inside()
check_restored(before)

try:  # one that fails
    with deterministic():
        raise KeyError
except KeyError:
    pass
check_restored(before)

with deterministic():  # two
    with deterministic(DebugConfig(seed=2, deterministic_warn_only=True)):
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    check_inside()
check_restored(before)

# torch's own way to set these flags, around a block and inside one
others = dict(benchmark=True, deterministic=False, benchmark_limit=7)
with torch.backends.cudnn.flags(enabled=True, **others):
    around = read()
    with deterministic():
        check_inside()
        with torch.backends.mkldnn.flags(enabled=False):
            assert not torch.backends.mkldnn.deterministic
        check_inside()
    assert read() == around
    assert torch.backends.cudnn.benchmark
check_restored(before)

with deterministic():  # the runs of a check
    report = assert_run_to_run(lambda: torch.rand(3), pressures=PRESSURES[:3])
assert "run 3" in report.equal

with restored():  # what is put back behind a test on ranks
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
check_restored(before)

# precisions that torch's flags() cannot read
torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = "tf32", "ieee"
before = read()
with deterministic():
    check_inside()
check_restored(before)
"""

IMPORTED_INSIDE = f"""
before = read()
with deterministic():
    check_inside()
    {HARNESS}
    check_inside()
    with deterministic():
        check_inside()
    check_inside()
check_restored(before)
with deterministic():
    check_inside()
check_restored(before)
"""


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "script", [IMPORTED_BEFORE, IMPORTED_INSIDE], ids=["before a block", "inside a block"]
)
def test_torchs_harness_is_imported(script: str):
    """K3: all that ``deterministic`` sets is set, and put back."""
    done = subprocess.run([sys.executable, "-c", READ + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
