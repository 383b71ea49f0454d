"""Every extra that a page, a message or a package of the examples names can be installed."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = re.compile(r"(?:pytest[-_]gtrainer|(?<![\w\])])\.)\[([a-z][\w\-, ]*)\]")
FOLDERS = ("docs", "pytest_gtrainer", "examples", "benchmarks", "fixtures", ".ci", ".github")
SUFFIXES = {".md", ".py", ".toml", ".txt", ".yml", ".yaml", ".csv", ".sh"}


def named_extras(text: str) -> set[str]:
    """
    >>> sorted(named_extras("pip install 'pytest-gtrainer[a]' -e .[b, c]; x.passes[d]"))
    ['a', 'b', 'c']
    """
    return {extra.strip() for names in NAMED.findall(text) for extra in names.split(",")}


def files() -> list[Path]:
    found = [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
    ]
    for folder in FOLDERS:
        found += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    return found


def test_every_extra_that_is_named_exists():
    extras = PROJECT["optional-dependencies"]
    places = {extra: path for path in files() for extra in named_extras(path.read_text())}
    assert places.keys() >= {"conformance"}, "the search finds what is known to be named"
    missing = {
        extra: str(path.relative_to(ROOT)) for extra, path in places.items() if extra not in extras
    }
    assert not missing


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install 'pytest-gtrainer[conformance]'", {"conformance"}),
        ('"pytest_gtrainer[test,docs]"', {"test", "docs"}),
        ("pip install -e '.[dev]'", {"dev"}),
        ("record.passes[0], P.layers[0], x.y[name]", set()),
    ],
)
def test_how_an_extra_is_named(text: str, found: set[str]):
    assert named_extras(text) == found


def test_the_extra_of_conformance_brings_what_its_rule_imports():
    assert any(
        each.startswith("hypothesis") for each in PROJECT["optional-dependencies"]["conformance"]
    )
