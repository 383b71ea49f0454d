"""One screen: versions, devices, and each topic in a line, with what is out of order below it."""

import ast
import contextlib
import functools
import io
import os
import platform
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

import pytest_gtrainer
from pytest_gtrainer import _HOME
from pytest_gtrainer.doctor import contract
from pytest_gtrainer.doctor.contract import ROOT, Diagnosis, Missing, Topic, examine, find, read_topic
from pytest_gtrainer.environment import complaint
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.knobs import KNOBS

PACKAGE = "pytest_gtrainer"

# What users name that is no public name of the package, by the module that makes it.
WORLDS = {
    'gt_world("fake")': "worlds.fake",
    'gt_world("simulated")': "worlds.fake",
    'eager code in gt_world("simulated")': "worlds.simulated.threads.run",
    'gt_world("ranks")': "ranks.inside.rank",
    "gt_golden of graphs": "graphtext.rendering",
    "pass files": "testing.running",
}
_WIDTH = 110
_SHOWN = 6  # problems of one topic, and parts, without --verbose
_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_OTHERS = ("pytest-xdist", "expecttest", "numpy")


def topics() -> list[Topic]:
    """Every file of private names: those of torch by name, the switches of torch, and that of pytest."""
    files = sorted(path for path in (ROOT / "_torch").glob("*.py") if path.stem != "__init__")
    of_torch = [read_topic(path, f"{PACKAGE}._torch.{path.stem}", ("torch",)) for path in files]
    switches = [contract.Need(knob.name.removesuffix("()"), users={"KNOBS"}) for knob in KNOBS if not knob.is_variable]
    of_torch.append(Topic(knobs.__name__, "Switches that decide bits", switches, [], set(), set()))
    return [*of_torch, read_topic(ROOT / "_pytest_private.py", f"{PACKAGE}._pytest_private", ("pytest", "_pytest"))]


def report(*, verbose: bool = False) -> tuple[str, bool]:
    """The text (if ``verbose`` with every name in a line, and lists in full), and whether everything is in order."""
    lines = list(installation())
    has_torch = _version("torch") is not None
    read = [topic for topic in topics() if has_torch or topic.name == "pytest_private"]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # of torch's modules, at their import
        warnings.simplefilter("ignore")
        findings = {topic.module: examine(topic) for topic in read}
    lines.append("")
    for topic in read:
        lines += lines_of(topic, findings[topic.module], verbose)
    if not has_torch:
        lines += ["torch is not installed: reading graph text and goldens as text works, everything else needs it"]
    if has_torch and not any(found.problem for each in findings.values() for found in each):
        return "\n".join([*lines, "", "Everything is in order."]), True
    lines.append("")
    broken, weak = broken_modules(findings), set()
    for topic_module, found in findings.items():
        if topic_module not in broken:
            weak |= modules_using(topic_module, set().union(*(each.users for each in found if each.problem)))
    if broken:
        count = f"{len(broken)} modules of pytest-gtrainer do not import; out of order"
        lines += listed(count, told(broken), True, "")
    if weak - broken:
        lines += listed("May fail", told(weak - broken), True, "")
    if not verbose:
        lines.append("Every name: python -m pytest_gtrainer doctor --verbose")
    return "\n".join(lines), False


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installation() -> Iterator[str]:
    """Versions, devices and backends, a line each."""
    if (torch_version := _version("torch")) is not None:
        with contextlib.suppress(Missing):
            torch_version = find("torch.__version__")
    said = f"pytest-gtrainer {pytest_gtrainer.__version__}, torch {torch_version or 'not installed'}"
    yield f"{said}, Python {platform.python_version()}, pytest {_version('pytest') or 'not installed'}"
    others = (f"{name} {_version(name) or 'not installed'}" for name in _OTHERS)
    yield f"beside     {', '.join(others)}"
    if torch_version is None:
        return
    if unsupported := complaint(torch_version):
        yield from textwrap.wrap(f"versions   {unsupported}", _WIDTH, subsequent_indent=" " * 11)
    try:
        cuda = find("torch.cuda")
        names = [cuda.get_device_name(index) for index in range(cuda.device_count() if cuda.is_available() else 0)]
        gpus = ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names)) or "no CUDA device"
    except Exception as error:  # a driver that does not fit, for one
        gpus = f"CUDA fails: {error}"
    yield f"devices    CPU with {len(os.sched_getaffinity(0))} cores; {gpus}"
    try:
        dist = find("torch.distributed")
        has = {kind: dist.is_available() and getattr(dist, f"is_{kind}_available")() for kind in _BACKENDS}
        backends = ", ".join(f"{kind} {'yes' if has[kind] else 'no'}" for kind in has)
        if not dist.is_available():
            backends = "none: this torch is built without torch.distributed"
    except Missing as error:
        backends = f"none: no {error}"
    yield f"backends   {backends}"


def lines_of(topic: Topic, findings: list[Diagnosis], verbose: bool) -> Iterator[str]:
    """The state of a topic; below it what is out of order, and the parts that stand on it."""
    problems = [found for found in findings if found.problem]
    state = "out of order" if problems else "in order"
    count = f"{len(findings) - len(problems)} of {len(findings)}"
    yield f"{state:<13}{topic.name:<16}{count:<10}{topic.title}"
    shown = findings if verbose else problems[:_SHOWN]
    for found in shown:
        text = f"{found.name}: {found.problem or found.note or 'present'}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * 13, subsequent_indent=" " * 15)
    if len(shown) < len(problems):
        yield f"{'':13}and {len(problems) - len(shown)} more: --verbose"
    if not problems:
        return
    if standing_on := broken_modules({topic.module: problems}):
        yield from listed("does not import, nor do", told(standing_on - {topic.module}), verbose)
        return
    users = set().union(*(found.users for found in problems))
    yield from listed("may fail", told(modules_using(topic.module, users)), verbose)


def listed(what: str, names: list[str], verbose: bool, indent: str = " " * 13) -> Iterator[str]:
    shown = names if verbose or len(names) <= 2 * _SHOWN else names[: 2 * _SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    text = f"{what}: {', '.join(shown)}{more}" if names else f"{what}: nothing"
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


class _Imports(NamedTuple):
    """Of one module, by its source: others that it imports at its import, and names that it takes of each, whenever."""

    eager: set[str]
    names: dict[str, set[str]]


@functools.cache
def _all_imports() -> dict[str, _Imports]:
    files = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found: dict[str, _Imports] = {}
    for module, file in files.items():
        imports = found[module] = _Imports(set(), {})
        todo: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_text()), True)]
        while todo:
            node, eager = todo.pop()
            eager = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if not isinstance(node, ast.If) or "TYPE_CHECKING" not in ast.unparse(node.test):
                todo += [(inner, eager) for inner in ast.iter_child_nodes(node)]
            for _, _, path in contract.imported_names(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
                home, name = (path, "*") if path in files else path.rpartition(".")[::2]
                if home in files:
                    imports.names.setdefault(home, set()).add(name)
                    if eager:  # a package is imported before what is in it
                        imports.eager.update(home[:place] for place, sign in enumerate(f"{home}.") if sign == ".")
    return found


def broken_modules(findings: dict[str, list[Diagnosis]]) -> set[str]:
    """The modules that do not import since a topic does not, topics included; ``findings`` are by their modules."""
    broken = {topic for topic, found in findings.items() if any(each.stops_import for each in found)}
    before = 0
    while before != len(broken):
        before = len(broken)
        broken |= {module for module, imports in _all_imports().items() if imports.eager & broken}
    return broken


def modules_using(topic: str, users: Iterable[str]) -> set[str]:
    """The modules that take one of these functions of a topic, or of a class of ours that is ``module:name``."""
    wanted = [(home or topic, {"*", name}) for home, _, name in (user.rpartition(":") for user in users)]
    taken = {module: imports.names for module, imports in _all_imports().items()}
    return {module for module, of in taken.items() if any(of.get(home, set()) & names for home, names in wanted)}


def told(modules: Iterable[str]) -> list[str]:
    """What users call the parts that are in these modules, or else in the nearest that import them."""
    homes = {name: f"{PACKAGE}.{home}" for name, home in {**_HOME, **WORLDS}.items()}
    reached = set(modules)
    while True:
        names = sorted((name for name, home in homes.items() if home in reached), key=str.lower)
        above = {module for module, imports in _all_imports().items() if imports.names.keys() & reached}
        if names or above <= reached:
            return names or sorted(module.removeprefix(f"{PACKAGE}.") for module in reached)
        reached |= above
