"""Which of our modules, and so which public names, stand on a topic: read in the source, as nothing may import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_gtrainer import _HOME
from pytest_gtrainer.doctor.contract import MODULE, imported_names
from pytest_gtrainer.doctor.examination import ROOT, Diagnosis

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


@dataclass(slots=True)
class _Imports:
    """Of one module: others that it imports when it is imported, and names that it takes of each, whenever."""

    eager: set[str] = field(default_factory=set)
    names: dict[str, set[str]] = field(default_factory=dict)


@functools.cache
def _all_imports() -> dict[str, _Imports]:
    files = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found: dict[str, _Imports] = {}
    for module, file in files.items():
        imports = found[module] = _Imports()
        _read(ast.parse(file.read_text()).body, imports, files.keys(), eager=True)
    return found


def _read(body: Iterable[ast.AST], imports: _Imports, modules: Iterable[str], *, eager: bool) -> None:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, _, path in imported_names(node):
                home, name = (path, "*") if path in modules else path.rpartition(".")[::2]
                if home in modules:
                    imports.names.setdefault(home, set()).add(name)
                    if eager:  # a package is imported before what is in it
                        imports.eager |= {home, *(home[:place] for place, sign in enumerate(home) if sign == ".")}
            continue
        inside = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        _read(ast.iter_child_nodes(node), imports, modules, eager=inside)


def broken_modules(findings: dict[str, list[Diagnosis]]) -> set[str]:
    """The modules that do not import, since a topic does not, the topics included.

    Args:
        findings: of each topic, by its module.
    """
    broken = {topic for topic, found in findings.items() if any(each.stops_import for each in found)}
    before = 0
    while before != len(broken):
        before = len(broken)
        broken |= {module for module, imports in _all_imports().items() if imports.eager & broken}
    return broken


def modules_using(topic: str, users: Iterable[str]) -> set[str]:
    """The modules that take one of these functions of a topic, or of a class of ours that is ``module:name``."""
    wanted: dict[str, set[str]] = {}
    for user in users:
        home, _, name = user.rpartition(":")
        wanted.setdefault(home or topic, {"*"}).add(name)
    return {
        module
        for module, imports in _all_imports().items()
        if any(imports.names.get(home, set()) & names for home, names in wanted.items())
    }


def modules_standing_on(topic: str) -> set[str]:
    """The modules that do not import without a topic, itself not included."""
    return broken_modules({topic: [Diagnosis("", "missing", frozenset({MODULE}))]}) - {topic}


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
