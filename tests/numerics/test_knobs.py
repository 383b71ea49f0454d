"""The table of switches: every one exists in this torch, and the documentation shows this very table."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.knobs import KNOBS

DOCUMENT = Path(__file__).parents[2] / "docs" / "determinism.md"


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if not knob.is_variable], ids=lambda knob: knob.name)
def test_every_knob_exists_in_this_torch(knob: knobs.Knob):
    importlib.import_module(knob.path.partition(":")[0])
    assert knob.read() is not knobs.NOT_LOADED


@pytest.mark.parametrize(
    "name", [knob.name for knob in KNOBS if knob.is_variable and knob.name.startswith("TORCHINDUCTOR_")]
)
def test_inductor_reads_its_variables(name: str):
    source = Path(importlib.import_module("torch._inductor.config").__file__).read_text()
    assert f'"{name}"' in source


def test_a_knob_that_does_not_exist_is_an_error():
    """The twin: reading does not make up a value."""
    with pytest.raises(AttributeError):
        knobs.Knob("torch.backends.cudnn:deterministick", "CUDA", "", "", "").read()


def test_a_reader_sees_every_change_of_a_configuration():
    """A reader keeps what it has read of torch's configuration until something is set there."""
    config = importlib.import_module("torch._inductor.config")
    read = knobs.Reader(KNOBS)
    before, name = read(), "torch._inductor.config.deterministic"
    for value in (True, False):
        with config.patch(deterministic=value):
            assert read()[name] is value
    assert read() == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch.are_deterministic_algorithms_enabled()", "torch.use_deterministic_algorithms(True)"),
        ("torch.backends.cudnn.benchmark", "torch.backends.cudnn.benchmark = True"),
        ("torch.backends.cuda.matmul.fp32_precision", "torch.backends.cuda.matmul.fp32_precision = 'tf32'"),
        ("torch.backends.cuda.flash_sdp_enabled()", "torch.backends.cuda.enable_flash_sdp(False)"),
    ],
)
def test_a_reader_sees_every_change_of_a_switch(name: str, change: str):
    """A reader keeps how to read, not what it has read. In a process of its own: not all can be put back."""
    probe = f"""
import torch
from pytest_gtrainer.numerics import knobs
read = knobs.Reader(knobs.KNOBS)
before = read()
{change}
changed = {{name for name, value in read().items() if value != before[name]}}
assert {name!r} in changed, changed
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documentation_shows_the_table():
    assert knobs.table() in DOCUMENT.read_text()


def test_reading_imports_nothing():
    probe = """
import sys
from pytest_gtrainer.numerics import knobs
assert set(knobs.values([k for k in knobs.KNOBS if not k.is_variable]).values()) == {knobs.NOT_LOADED}
assert "torch" not in sys.modules
import torch
knobs.values()
assert "torch._inductor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", probe], check=True)
