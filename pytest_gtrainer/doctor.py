"""Report what this installation can do, on one screen: ``python -m pytest_gtrainer doctor``.

A *topic* is a file of private names: a module of ``pytest_gtrainer/_torch``, or
``_pytest_private.py``. Its imports and its table ``ATTRIBUTES`` list what it needs of torch or
pytest. The doctor reads both in the source, without importing the file, and looks each name up in
what is installed. Then it imports every public part of this package.

It needs neither torch nor pytest: a broken installation is what it is for.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import platform
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest_gtrainer
from pytest_gtrainer import _HOME
from pytest_gtrainer.environment import complaint
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.numerics.knobs import KNOBS

ROOT = Path(__file__).parent

# Parts that users name and that are no public names of the package, by the module that makes them.
OTHER_PARTS = {
    'gt_world("fake")': "worlds.fake",
    'gt_world("simulated")': "worlds.fake",
    'eager code in gt_world("simulated")': "worlds.simulated.threads.run",
    'gt_world("ranks")': "ranks.inside.rank",
    "gt_golden of graphs": "graphtext.rendering",
    "pass files": "testing.running",
}
PACKAGES_BESIDE = ("pytest-xdist", "expecttest", "numpy")
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
LINE_WIDTH = 110
MOST_SHOWN = 12
MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Topic:
    """A file of private names.

    Attributes:
        name: the name of the file, without suffix.
        title: the first line of its docstring.
        names: what it needs, as ``module:attribute``, in the order of the source.
        optional: those of ``names`` that it can do without.
    """

    name: str
    title: str
    names: tuple[str, ...]
    optional: frozenset[str] = frozenset()

    def missing(self) -> list[str]:
        """Return the names that are needed and not there."""
        return [name for name in self.names if name not in self.optional and not exists(name)]


def topics() -> list[Topic]:
    """Return the files of private names of torch, the switches of torch, and the file of pytest."""
    found = []
    for file in sorted((ROOT / "_torch").glob("*.py")):
        if file.stem != "__init__":
            found.append(read_topic(file, ("torch",)))
    switches = tuple(knob.name.removesuffix("()") for knob in KNOBS if not knob.is_variable)
    found.append(Topic("knobs", "Switches that decide bits", switches))
    found.append(read_topic(ROOT / "_pytest_private.py", ("pytest", "_pytest")))
    return found


def read_topic(file: Path, hosts: Sequence[str]) -> Topic:
    """Read a file's imports of ``hosts`` and its table ``ATTRIBUTES``, without importing it."""
    tree = ast.parse(file.read_text())
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            guarded.update(inner for statement in node.body for inner in ast.walk(statement))

    names: list[str] = []
    optional: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}:{alias.name}" for alias in node.names]
        else:
            continue
        ours = [name for name in imported if re.split("[.:]", name)[0] in hosts]
        names += ours
        # An import inside ``try``: the topic can do without it.
        if node in guarded:
            optional.update(ours)

    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES":
            for owner, attributes in ast.literal_eval(node.value).items():
                joint = "." if ":" in owner else ":"
                names += [f"{owner}{joint}{attribute}" for attribute in attributes]

    title = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
    return Topic(file.stem.strip("_"), title, tuple(dict.fromkeys(names)), frozenset(optional))


def exists(name: str) -> bool:
    """Return whether ``module:attribute.attribute`` can be found in what is installed.

    The last attribute may be one of instances only: declared in the class, or named in its source.
    """
    if _find(name) is not MISSING:
        return True
    owner_name, _, attribute = name.rpartition(".")
    owner = _find(owner_name)
    if ":" not in owner_name or owner is MISSING:
        return False
    for each in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        with contextlib.suppress(OSError, TypeError):  # written in C++
            if re.search(rf"\b{attribute}\b", inspect.getsource(each)):
                return True
    return False


def _find(name: str) -> Any:
    """Return what a name stands for, or ``MISSING``."""
    try:
        return pkgutil.resolve_name(name.replace(":", "."))
    except Exception:  # importing a module of another torch may raise anything
        return MISSING


def report(*, verbose: bool = False) -> tuple[str, bool]:
    """Return the page, and whether everything is in order; ``verbose`` lists every name."""
    lines = [*installation(), ""]
    in_order = True
    # Importing torch warns, on the error stream too.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for topic in topics():
            missing = topic.missing()
            in_order = in_order and not missing
            count = f"{len(topic.names) - len(missing)} of {len(topic.names)}"
            state = "out of order" if missing else "in order"
            lines.append(f"{state:<13}{topic.name:<16}{count:<10}{topic.title}")
            for name in topic.names:
                if name in missing:
                    lines.append(f"{'':13}{name.replace(':', '.')}: missing")
                elif verbose:
                    lines.append(f"{'':13}{name.replace(':', '.')}: present")
        lines.append("")
        broken = parts_that_do_not_import()

    for reason, parts in broken.items():
        shown = spell_some(parts, len(parts) if verbose else MOST_SHOWN)
        lines += wrapped(f"does not import: {shown}", "  ", "    ")
        lines += wrapped(f"because: {reason}", "    ", "      ")

    if in_order and not broken:
        return "\n".join([*lines, "Everything is in order."]), True
    if not verbose:
        lines.append("Every name: python -m pytest_gtrainer doctor --verbose")
    return "\n".join(lines), False


def parts_that_do_not_import() -> dict[str, list[str]]:
    """Import every public part; return those that fail, by the first line of the error."""
    failed: dict[str, list[str]] = {}
    for part, home in sorted({**_HOME, **OTHER_PARTS}.items(), key=lambda item: item[0].lower()):
        try:
            importlib.import_module(f"pytest_gtrainer.{home}")
        # Not only ImportError: a module may read a missing attribute while it is imported.
        except Exception as error:
            # The message of the package ends with the advice to run the doctor.
            reason = str(error).partition("\n")[0].partition("; what still works")[0]
            reason = reason or type(error).__name__
            failed.setdefault(reason, []).append(part)
    return failed


def installation() -> Iterator[str]:
    """Yield versions, devices and backends, a line each."""
    torch_version = version_of("torch")
    torch = None
    # A torch that does not import is reported with the parts of the package.
    with contextlib.suppress(Exception):
        torch = importlib.import_module("torch")
        torch_version = torch.__version__
    versions = [
        f"pytest-gtrainer {pytest_gtrainer.__version__}",
        f"torch {torch_version or 'not installed'}",
        f"Python {platform.python_version()}",
        f"pytest {version_of('pytest') or 'not installed'}",
    ]
    yield ", ".join(versions)
    beside = [f"{name} {version_of(name) or 'not installed'}" for name in PACKAGES_BESIDE]
    yield f"beside     {', '.join(beside)}"
    if torch_version is None:
        yield (
            "torch is not installed: reading graph text and goldens as text works, "
            "everything else needs it"
        )
        return

    unsupported = complaint(torch_version)
    if unsupported:
        yield from wrapped(f"versions   {unsupported}", "", " " * 11)
    if torch is None:
        return
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
        gpus = ", ".join(names) or "no CUDA device"
    except Exception as error:  # a driver that does not fit, for one
        gpus = f"CUDA fails: {error}"

    yield f"devices    CPU with {len(os.sched_getaffinity(0))} cores; {gpus}"
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        yield "backends   none: this torch is built without torch.distributed"
        return
    states = []
    for backend in BACKENDS:
        available = getattr(dist, f"is_{backend}_available", bool)()
        states.append(f"{backend} {'yes' if available else 'no'}")
    yield f"backends   {', '.join(states)}"


def version_of(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def wrapped(text: str, indent: str, below: str) -> list[str]:
    """Wrap ``text`` to the width of the page; ``below`` indents all lines but the first."""
    return textwrap.wrap(text, LINE_WIDTH, initial_indent=indent, subsequent_indent=below)
