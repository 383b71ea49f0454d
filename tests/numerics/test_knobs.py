"""The table of switches: each exists in this torch, and the documentation shows this table."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.knobs import KNOBS

DOCUMENT = Path(__file__).parents[2] / "docs" / "numerics.md"


@pytest.mark.parametrize(
    "knob", [knob for knob in KNOBS if not knob.is_variable], ids=lambda knob: knob.name
)
def test_every_knob_exists_in_this_torch(knob: knobs.Knob):
    importlib.import_module(knob.path.partition(":")[0])
    assert knob.read() is not knobs.NOT_LOADED


@pytest.mark.parametrize(
    "name",
    [knob.name for knob in KNOBS if knob.is_variable and knob.name.startswith("TORCHINDUCTOR_")],
)
def test_inductor_reads_its_variables(name: str):
    source = Path(importlib.import_module("torch._inductor.config").__file__).read_text()
    assert f'"{name}"' in source


def test_a_knob_that_does_not_exist_is_an_error():
    """The twin: reading does not make up a value."""
    with pytest.raises(AttributeError):
        knobs.Knob("torch.backends.cudnn:deterministick", "CUDA", "", "", "").read()


def test_reading_a_knob_of_a_module_that_is_not_loaded_loads_nothing(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "not_loaded_yet.py").write_text("flag = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    knob = knobs.Knob("not_loaded_yet:flag", "CPU", "", "", "")
    assert (knob.read(), "not_loaded_yet" in sys.modules) == (knobs.NOT_LOADED, False)
    importlib.import_module("not_loaded_yet")
    assert knob.read() == 3
    monkeypatch.delitem(sys.modules, "not_loaded_yet")


def test_a_knob_that_torch_cannot_read_says_why():
    """Two ways to set a precision are mixed; a report shows one line of torch's error."""
    knob = next(knob for knob in KNOBS if knob.name == "torch.get_float32_matmul_precision()")
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError) as error:
            torch.get_float32_matmul_precision()
        assert knob.read() == f"cannot be read: {str(error.value).splitlines()[0]}"
    finally:
        products.fp32_precision = before


def test_reading_sees_every_change_of_a_configuration():
    config = importlib.import_module("torch._inductor.config")
    before, name = knobs.values(), "torch._inductor.config.deterministic"
    for value in (True, False):
        with config.patch(deterministic=value):
            assert knobs.values()[name] is value
    assert knobs.values() == before


def test_the_documentation_shows_the_table():
    rows = [
        "| knob | concerns | `deterministic` sets | what it decides | documented in |",
        "|---|---|---|---|---|",
    ]
    for knob in knobs.KNOBS:
        setting = f"`{knob.setting}`" if knob.setting else "left alone"
        rows.append(
            f"| `{knob.name}` | {knob.devices} | {setting} | {knob.effect} | {knob.documented} |"
        )
    assert "\n".join(rows) in DOCUMENT.read_text()


@pytest.mark.second_tier
def test_reading_imports_nothing():
    probe = """
import sys
from pytest_gtrainer.numerics import knobs
flags = [knob for knob in knobs.KNOBS if not knob.is_variable]
assert set(knobs.values(flags).values()) == {knobs.NOT_LOADED}
assert "torch" not in sys.modules
import torch
knobs.values()
assert "torch._inductor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", probe], check=True)
