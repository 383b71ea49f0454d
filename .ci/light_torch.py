"""A virtual environment with a CUDA build of torch and without CUDA's libraries: 1.4 GB instead of
5.6 GB.

    python3.12 .ci/light_torch.py 2.15.0 build/env

For CI on CPU only. The newest wheels of torch on the index are CUDA builds. Such a wheel is
installed alone, and each library of CUDA that it links is replaced by a stub of the same name,
whose functions all return error 35, or, where a text is asked for, "the driver is insufficient".
Then torch imports, gloo works,
and ``torch.cuda.is_available()`` is False. What the wheel requires of CUDA, and triton, is struck
from its metadata, so that pip takes it for complete. A wheel that links no CUDA (``2.13.0+cpu``) is
left as it is.

torch is kept in ``build/torch-VERSION-PYTHON``; a second environment, or a second run, unpacks
nothing again. Stubs need gcc and binutils. Only the standard library is imported: this runs under
any Python from 3.11 on.

Exit status: 0; 2 for a missing tool or a torch that does not work; 3 where no torch of that version
can be had.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
# These return a text: torch would read the number 35 as its address.
GIVES_TEXT = re.compile(
    r"((cuda|cudnn|cublas|cusparse|nccl|nvrtc)Get(Error|Status)|ncclGetLastError)"
)
CUDA_REQUIREMENT = re.compile(r"Requires-Dist: (nvidia|cuda|triton)\b")
TOOLS = {"gcc": "gcc", "nm": "binutils", "readelf": "binutils"}
WORKS = """
import torch, torch.distributed as dist
assert torch.__version__.split("+")[0] == {version!r}, torch.__version__
assert not torch.cuda.is_available(), "CUDA is available: take the whole wheel on a machine with a GPU"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


class Refused(Exception):
    """What stands in the way, in one sentence, and the status to exit with."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status


def environment(version: str, folder: Path) -> None:
    """Make ``folder`` an environment of this Python with torch ``version``, unless it is one
    already.

    Raises:
        Refused: the version is not allowed or not on the index, a tool is missing, or torch does
            not work.
    """
    kept = ROOT / "build" / f"torch-{version}-{sys.implementation.cache_tag}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    if not kept.exists():
        _unpack(version, python, kept)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(output(python, "-c", ask).strip())
    (site / "light_torch.pth").write_text(f"{kept}\n")
    _script(folder / "bin" / "torchrun", python, "torch.distributed.run")
    # pip does not judge what torch requires: it is installed
    required = re.findall(r"^Requires-Dist: ([^;\n]+)$", _metadata(kept).read_text(), re.MULTILINE)
    install(python, *required)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", WORKS.format(version=version)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        told = done.stderr or f"Python ended with status {done.returncode}"
        raise Refused(
            f"torch {version} in {kept} does not work; remove that folder and try again:\n{told}"
        )


def _unpack(version: str, python: Path, kept: Path) -> None:
    """Put torch and its stubs in a folder; two at a time do not disturb each other."""
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{kept.name}-", dir=kept.parent) as new:
        allowed = _allowed()
        wanted = f"torch=={version},{allowed}"
        done = pip(python, "install", "--no-deps", "--no-compile", "--target", new, wanted)
        if done.returncode:
            _explain(version, allowed, done.stderr)
        stub(Path(new))
        try:
            os.rename(new, kept)
        except OSError:  # another run was faster
            return
        Path(new).mkdir()  # for the clean-up


def _allowed() -> str:
    """The versions of torch that pyproject.toml allows, as a specifier."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch"))
    return torch.removeprefix("torch")


def _explain(version: str, allowed: str, told: str) -> None:
    found = re.search(r"\(from versions: (.*)\)", told)
    if not found:
        raise Refused(f"pip could not install torch {version}:\n{told}")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise Refused(
        f"torch {version} cannot be had: pyproject.toml allows torch{allowed}, and for Python {python} "
        f"the index has {found[1]}",
        status=3,
    )


def stub(site: Path) -> None:
    """Give the torch in ``site`` a stub for each CUDA library that it links, and strike them from
    its metadata.
    """
    folder = site / "torch" / "lib"
    libraries = sorted(folder.glob("*.so"))
    _require_tools()
    linked = [output("readelf", "-dVW", library) for library in libraries]
    needed = {name for text in linked for name in re.findall(r"\(NEEDED\).*\[(.+)\]", text)}
    missing = sorted(
        name for name in needed if CUDA_LIBRARY.match(name) and not (folder / name).exists()
    )
    metadata = _metadata(site)
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not CUDA_REQUIREMENT.match(line)))
    if not missing:
        return
    versions = {version: file for text in linked for file, version in _versions(text)}
    functions = _functions(libraries)
    for name in missing:
        theirs = {
            version: names for version, names in functions.items() if versions.get(version) == name
        }
        _compile(folder / name, theirs, functions.get("", []))


def _versions(linked: str) -> list[tuple[str, str]]:
    """``(file, version)`` for each version of symbols that a library needs of another.

    >>> _versions("File: libcudart.so.13  Cnt: 1\\n  0x01:   Name: libcudart.so.13  Flags: none  Version: 5")
    [('libcudart.so.13', 'libcudart.so.13')]
    """
    found, file = [], ""
    for kind, name in re.findall(r"\b(File|Name): (\S+)", linked):
        if kind == "File":
            file = name
        else:
            found.append((file, name))
    return found


def _functions(libraries: list[Path]) -> dict[str, list[str]]:
    """What the libraries need of others, by the version of the symbol, "" for none.

    Of those without a version, what torch defines is left out, and what begins like Python's and
    C++'s own: a stub of these would be called. What remains is CUDA's, whose interface is C.
    """
    needed: dict[str, set[str]] = {}
    defined = set()
    for library in libraries:
        for line in output("nm", "-D", "--with-symbol-versions", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind == "U":
                needed.setdefault(version.lstrip("@"), set()).add(name)
            else:
                defined.add(name)
    needed[""] = {
        name
        for name in needed.get("", ())
        if name not in defined and not name.startswith(("_", "Py"))
    }
    return {version: sorted(names) for version, names in needed.items()}


def _compile(library: Path, versioned: dict[str, list[str]], others: list[str]) -> None:
    """Write a stub: its own functions under their versions, and those of all stubs that have none."""
    names = sorted({name for group in (*versioned.values(), others) for name in group})
    source = "long stub(void) { return 35; }\n"
    source += 'const char *text(void) { return "the driver is insufficient"; }\n'
    for name in names:
        kind, function = ("const char *", "text") if GIVES_TEXT.match(name) else ("long ", "stub")
        source += f'{kind}{name}(void) __attribute__((alias("{function}")));\n'
    script = "".join(
        f"{version} {{ global: {'; '.join(own)}; }};\n" for version, own in versioned.items()
    )
    with tempfile.TemporaryDirectory() as work:
        versions, command = (
            Path(work, "versions"),
            ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}"],
        )
        if script:
            versions.write_text(script)
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run(
            [*command, "-x", "c", "-", "-o", library], input=source, text=True, check=True
        )


def _require_tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " and ".join(dict.fromkeys(TOOLS[tool] for tool in missing))
        raise Refused(
            f"{', '.join(missing)} not found, which make stubs of CUDA's libraries: install {packages}"
        )


def _metadata(site: Path) -> Path:
    (found,) = site.glob("torch-*.dist-info/METADATA")
    return found


def _script(path: Path, python: Path, module: str) -> None:
    """A command of torch's, as pip would have written it."""
    path.write_text(f'#!/bin/sh\nexec "{python.absolute()}" -m {module} "$@"\n')
    path.chmod(0o755)


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True)


def install(python: Path, *arguments: str) -> None:
    done = pip(python, "install", *arguments)
    if done.returncode:
        raise Refused(f"pip could not install {' '.join(arguments)}:\n{done.stderr}")


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__.partition("\n\n")[2].partition("\n\n")[0], file=sys.stderr)
        return 2
    try:
        environment(arguments[0], Path(arguments[1]))
    except Refused as refusal:
        print(f"light_torch: {refusal}", file=sys.stderr)
        return refusal.status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
