"""Imports of the package: downwards only, a lower half that a trainer uses without pytest, and
texts read without torch.
"""

import ast
import itertools
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_gtrainer

ROOMS = (
    {"plugin", "__main__"},
    {"fixtures"},
    {"conformance"},
    {"ranks", "testing", "doctor"},
    {"report"},
    {"golden"},
    {"leaks", "swallowed"},
    {"devices"},
    {"marker"},
    {"extensions", "options"},
    {"hookspecs"},
    # ---- above imports pytest; below does not
    {"over_time", "start"},
    {"attack"},
    {"compiling"},
    {"bisect"},
    {"references"},
    {"proofs"},
    {"worlds"},
    {"passes", "tracing", "checks"},
    {"numerics"},
    {"graphtext"},
    {"arithmetic"},
    {"graph"},
    {"_torch", "_pytest_private"},
    {"facts", "environment"},
)
"""From the top: a room imports from rooms below it, never from one beside it. docs/architecture.md
draws them.
"""

ROOT = Path(pytest_gtrainer.__path__[0])

LOWER_HALF = (
    *("checks", "graph", "graphtext", "numerics", "passes", "tracing"),
    *("references", "worlds", "bisect", "compiling", "facts", "environment"),
    *("arithmetic", "proofs", "attack", "over_time", "start"),
)
"""Rooms below the line of docs/architecture.md: a trainer uses them without pytest."""


def leaves_out(modules, heavy):
    probe = f"import sys, {', '.join(modules)}; sys.exit({heavy!r} in sys.modules)"
    return subprocess.run([sys.executable, "-c", probe]).returncode == 0


def modules_of(package):
    if (ROOT / f"{package}.py").is_file():
        return [f"pytest_gtrainer.{package}"]
    path = [str(ROOT / package)]
    prefix = f"pytest_gtrainer.{package}."
    return [module.name for module in pkgutil.walk_packages(path, prefix)]


@pytest.mark.second_tier
def test_the_lower_half_does_not_import_pytest():
    """Nor does what it imports of others."""
    assert leaves_out([name for package in LOWER_HALF for name in modules_of(package)], "_pytest")


@pytest.mark.parametrize(
    "modules",
    [
        ["pytest_gtrainer", "pytest_gtrainer.plugin"],
        ["pytest_gtrainer.graphtext", "pytest_gtrainer.graphtext.header"],
        ["pytest_gtrainer.testing", "pytest_gtrainer.testing.pass_file"],
    ],
    ids=["the plugin", "reading graph text", "finding pass files"],
)
def test_what_does_not_import_torch(modules):
    assert leaves_out(modules, "torch")


@pytest.mark.parametrize("heavy", ["filelock", "asyncio", "jinja2"])
def test_the_plugin_leaves_what_few_projects_need_for_later(heavy):
    """A project that does not use the plugin pays for what it imports: benchmarks/unused.py."""
    assert leaves_out(["pytest_gtrainer.plugin"], heavy)


def test_the_probe_sees_an_import():
    """The twin."""
    assert not leaves_out(["pytest_gtrainer.plugin"], "_pytest")


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"}


def imported_by(source):
    """Modules of ours that a source imports: at its head, inside functions, and for annotations
    only.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, name = name.partition(".")
            while package == "pytest_gtrainer" and name and name not in MODULES:
                name = name.rpartition(".")[0]
            if package == "pytest_gtrainer" and name:
                found.add(name)
    return found


@pytest.fixture(scope="module")
def imports():
    """Map each module to ours that it imports. Each source is parsed once, when needed."""
    return {name: imported_by(path.read_text()) - {name} for name, path in MODULES.items()}


def names_pytest(source):
    """Return whether a source imports pytest, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return not {"pytest", "_pytest"}.isdisjoint(name.partition(".")[0] for name in names)


def upwards(imports):
    """Imports from a room that is not below."""
    floor = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    for name, others in sorted(imports.items()):
        for other in sorted(others):
            here, there = name.partition(".")[0], other.partition(".")[0]
            if here != there and floor[here] >= floor[there]:
                yield f"{name} imports {other}"


def circle(imports):
    """Modules that import each other in a circle; empty if there is none."""
    left = dict(imports)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    while leaves := [name for name in left if not any(name in others for others in left.values())]:
        for name in leaves:
            del left[name]
    return sorted(left)


def test_every_import_goes_down(imports):
    """Also those inside functions and for annotations."""
    unknown = {name.partition(".")[0] for name in MODULES} - set(itertools.chain(*ROOMS))
    assert not unknown, f"rooms without a floor: {unknown}; add them to ROOMS"
    assert not list(upwards(imports))


def test_no_circles(imports):
    assert not circle(imports)


def test_no_file_of_the_lower_half_names_pytest():
    """The second tier imports all of them, which takes seconds."""
    assert not [
        name
        for name in MODULES
        if name.partition(".")[0] in LOWER_HALF and names_pytest(MODULES[name].read_text())
    ]
    assert names_pytest("def f():\n    from _pytest.config import Config")


def test_an_import_upwards_and_a_circle_are_seen():
    """The twin."""
    lazy = imported_by("def f():\n    from pytest_gtrainer.golden import store")
    assert lazy == {"golden.store"}
    assert list(upwards({"numerics.bits": lazy})) == ["numerics.bits imports golden.store"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
