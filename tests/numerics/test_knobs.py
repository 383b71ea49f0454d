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


# How to change each switch that is not read in the public way, which leads through properties.
CHANGES = {
    "torch:are_deterministic_algorithms_enabled()": "torch.use_deterministic_algorithms(True)",
    "torch:is_deterministic_algorithms_warn_only_enabled()": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "torch:get_float32_matmul_precision()": "torch.set_float32_matmul_precision('high')",
    "torch.utils.deterministic:fill_uninitialized_memory":
        "torch.utils.deterministic.fill_uninitialized_memory = False",
    "torch.backends:fp32_precision": "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn:enabled": "torch.backends.cudnn.enabled = False",
    "torch.backends.cudnn:deterministic": "torch.backends.cudnn.deterministic = True",
    "torch.backends.cudnn:benchmark": "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn:fp32_precision": "torch.backends.cudnn.fp32_precision = 'ieee'",
    "torch.backends.cudnn:conv.fp32_precision": "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    "torch.backends.cudnn:rnn.fp32_precision": "torch.backends.cudnn.rnn.fp32_precision = 'tf32'",
    "torch.backends.cudnn:depthwise_kernel": "torch.backends.cudnn.depthwise_kernel = 'native'",
    "torch.backends.mkldnn:enabled": "torch.backends.mkldnn.enabled = False",
    "torch.backends.mkldnn:deterministic": "torch.backends.mkldnn.deterministic = True",
    # through the module itself torch sets another one
    "torch.backends.mkldnn:fp32_precision": "torch._C._set_fp32_precision_setter('mkldnn', 'all', 'bf16')",
    "torch.backends.mkldnn:matmul.fp32_precision": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.mkldnn:conv.fp32_precision": "torch.backends.mkldnn.conv.fp32_precision = 'ieee'",
    "torch.backends.mkldnn:rnn.fp32_precision": "torch.backends.mkldnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.cuda:matmul.fp32_precision": "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.backends.cuda:matmul.allow_fp16_accumulation": "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
    "torch.backends.cuda:flash_sdp_enabled()": "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda:mem_efficient_sdp_enabled()": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "torch.backends.cuda:math_sdp_enabled()": "torch.backends.cuda.enable_math_sdp(False)",
    "torch.backends.cuda:cudnn_sdp_enabled()": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "torch.backends.cuda:fp16_bf16_reduction_math_sdp_allowed()":
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    "torch.backends.cuda:preferred_blas_library()":
        "torch.backends.cuda.preferred_blas_library('cublaslt' if torch.version.cuda else 'ck')",
}  # fmt: skip


def test_the_short_way_to_read_a_knob_says_what_the_public_way_says():
    """Every one of them, before and after a change; in a process of its own, since not all can be put back."""
    probe = f"""
import torch, torch.utils.deterministic
from pytest_gtrainer.numerics import knobs
changes = {CHANGES!r}
assert set(changes) == set(knobs._IN_TORCH)
read = knobs.Reader(knobs.KNOBS)
for path, change in changes.items():
    module = eval(path.partition(":")[0])
    short, public = knobs._direct(path), knobs._bound(path, module)
    before = public()
    assert short() == before, path
    exec(change)
    assert short() == public() != before, (path, before, short(), public())
    name = path.replace(":", ".")
    assert read()[name] == public(), path
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
