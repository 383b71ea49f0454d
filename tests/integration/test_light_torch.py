"""``.ci/light_torch.py``: a library that links CUDA loads without CUDA, and obstacles are
reported.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "light_torch.py"
METADATA = """Metadata-Version: 2.4
Name: torch
Requires-Dist: sympy>=1.13
Requires-Dist: cuda-toolkit[cublas]==13; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2; platform_system == "Linux"
Requires-Dist: triton~=3.9
"""
# A library whose symbols have a version, and one whose symbols have none; no machine has these.
CUDA = {
    "libcudart.so.99": ("cudaGetDeviceCount", "libcudart.so.99"),
    "libcudnn.so.99": ("cudnnGetErrorString", "libcudnn.so.99"),
    "libnccl.so.99": ("ncclInit", None),
}


@pytest.fixture
def light_torch():
    spec = importlib.util.spec_from_file_location("light_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path):
    """A small torch, linked with libraries of CUDA that are then taken away; ``all_of()`` calls
    all, and reads the text of an error.
    """
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        pytest.skip("gcc and binutils are not here: stubs of CUDA's libraries are not judged")
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    for name, (function, version) in CUDA.items():
        script = folder / "versions"
        script.write_text(f"{version} {{ global: {function}; }};" if version else "{ global: *; };")
        compile_library(
            folder / name,
            f"long {function}(void) {{ return 0; }}",
            f"-Wl,--version-script={script}",
        )
    declared = "".join(f"long {function}(void);" for function, _ in CUDA.values())
    text = "cudnnGetErrorString"
    declared = declared.replace(f"long {text}", f"const char *{text}")
    numbers = [function for function, _ in CUDA.values() if function != text]
    calls = " && ".join([f"{text}()[0] == 't'", *(f"{name}() == 35" for name in numbers)])
    source = f"{declared} int all_of(void) {{ return {calls}; }}"
    compile_library(
        folder / "libtorch.so", source, *(folder / name for name in CUDA), "-Wl,-rpath,$ORIGIN"
    )
    for name in CUDA:
        (folder / name).unlink()
    (tmp_path / "torch-2.15.0.dist-info").mkdir()
    (tmp_path / "torch-2.15.0.dist-info" / "METADATA").write_text(METADATA)
    return tmp_path


def compile_library(path, source, *options):
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{path.name}",
        "-o",
        path,
        "-x",
        "c",
        "-",
        "-x",
        "none",
    ]
    subprocess.run([*command, *options], input=source, text=True, check=True)


def load(site):
    """Load the library in a process of its own. It fails unless the dependencies are found and
    answer that the driver is insufficient.
    """
    probe = (
        f"import ctypes; assert "
        f"ctypes.CDLL({str(site / 'torch' / 'lib' / 'libtorch.so')!r}).all_of() == 1"
    )
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)


@pytest.mark.second_tier
def test_a_library_that_links_cuda_loads(light_torch, site):
    light_torch.stub(site)
    done = load(site)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_does_not_load_without_stubs(site):
    """The control."""
    assert "libcudart.so.99: cannot open shared object file" in load(site).stderr


def test_pip_is_not_told_of_cuda(light_torch, site):
    light_torch.stub(site)
    text = (site / "torch-2.15.0.dist-info" / "METADATA").read_text()
    assert text == "Metadata-Version: 2.4\nName: torch\nRequires-Dist: sympy>=1.13\n"


def test_tools_that_are_missing_are_named(light_torch, site, monkeypatch):
    monkeypatch.setenv("PATH", str(site))
    with pytest.raises(
        light_torch.Refused, match=r"gcc, nm, readelf not found.*: install gcc and binutils"
    ):
        light_torch.stub(site)


@pytest.mark.long
@pytest.mark.parametrize(
    "version", ["2.12.1", "2.13.999"], ids=["is not allowed", "is not on the index"]
)
def test_a_torch_that_cannot_be_had(version, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, version, tmp_path / "env"], capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    assert (
        f"light_torch: torch {version} cannot be had: pyproject.toml allows torch>=" in done.stderr
    )
    assert done.stderr.count("\n") == 1
