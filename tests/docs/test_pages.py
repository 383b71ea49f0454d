"""The documentation is true: the tutorial is followed, the table of behaviours is complete, pages
name what exists.
"""

import ast
import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import pytest_gtrainer
from fixtures.pages import blocks, commands, fits, follow

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
FOLLOWED = {
    "goldens": ["In CI"],
    "graph-checks": ["The smallest pass and its test"],
    "how-to/i-have-a-compiled-model": ["I have a compiled model"],
    "how-to/i-have-a-parallel-model": ["I have a parallel model"],
    "how-to/i-have-a-pass": ["I have a pass"],
    "how-to/i-have-a-loss-that-moved": ["I have a loss that moved"],
    "parallelism": ["My loss differs from eager"],
    "passes": ["A pass of your own in a training step"],
    "ranks": ["First on one machine"],
    "reports": ["In CI: versions of torch, CPU and GPU"],
    "tutorial": [
        "From an empty directory to a failing golden and back",
        "A model of transformers",
    ],
}
"""Sections whose commands tests type: here, and in tests of doors, of a clean installation, of a
trainer and of transformers.
"""

SHOWN = {
    "conformance": ["Graphs on which it fails", "Make a failing graph small", "On your own model"],
    "reports": ["What changed since the last run"],
}
"""Sections that show output as an example."""

UNNAMED: set[str] = set()
"""Behaviours whose tests do not name them by their id."""


@pytest.fixture(scope="module")
def generated():
    spec = importlib.util.spec_from_file_location("generated", PAGES / "generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing_tests(page):
    """Return the tests that a page names, as ``file::function``, and that do not exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    return [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists()
        or not re.search(rf"^ *def {name}", (ROOT / file).read_text(), re.MULTILINE)
    ]


def test_tests_that_pages_name_exist():
    for page in [*PAGES.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert missing_tests(page.read_text()) == [], page.name
    gone = "tests/docs/test_pages.py::test_gone"
    assert missing_tests(f"`{gone}`") == [gone], "the twin"


@pytest.mark.second_tier
def test_the_example_of_a_pass_is_followed(tmp_path):
    commands, section = Path(sys.executable).parent, "The smallest pass and its test"
    assert follow(PAGES / "graph-checks.md", tmp_path, commands, section) == 2


@pytest.mark.long
def test_the_tutorial_is_followed_literally(tmp_path):
    commands = Path(sys.executable).parent
    assert follow(PAGES / "tutorial.md", tmp_path, commands, FOLLOWED["tutorial"][0]) == 10
    assert (tmp_path / "report.html").stat().st_size > 10_000


def typed(page, section=None):
    """The commands of ``page``, or of its ``section``."""
    shown = [text for language, text in blocks(page, section) if language == "console"]
    return [command for text in shown for command, _ in commands(text)]


def test_every_command_that_a_page_shows_is_followed_or_known():
    listed = {**FOLLOWED}
    for page, sections in SHOWN.items():
        listed[page] = [*listed.get(page, ()), *sections]
    for page in PAGES.rglob("*.md"):
        name = str(page.relative_to(PAGES)).removesuffix(".md")
        known = [each for title in listed.pop(name, ()) for each in typed(page, title)]
        assert sorted(typed(page)) == sorted(known), name
    assert listed == {}


def test_the_follower_sees_a_line_that_does_not_come():
    """The twin."""
    assert fits("a\nb 1\nc", "a\n...\nc") == ""
    assert fits("a\nb [1]\nc", "b [1]") == ""
    assert fits("a\nc", "a\n...b\nc") == "no line '...b'"
    assert fits("c\na", "a\nc") == "no line 'c'"


@pytest.fixture(scope="module")
def named(generated):
    """The ids that tests name: all of them are read for it."""
    return set(generated.tests_by_id())


def test_every_behaviour_has_a_test_that_names_it(generated, named):
    """Those of ``UNNAMED`` are tested under other words, or not; the page says so of them."""
    known = set(generated.behaviours())
    assert known - named <= UNNAMED


def test_every_id_that_a_test_names_exists(generated, named):
    unknown = named - set(generated.behaviours())
    assert not unknown


def test_pages_name_options_and_library_names_that_exist(generated):
    from pytest_gtrainer.options import OPTIONS

    text = "\n".join(page.read_text() for page in [*PAGES.rglob("*.md"), ROOT / "README.md"])
    flags = set(re.findall(r"--gt-[a-z]+(?:-[a-z]+)*", text))
    assert flags - {option.flag for option in OPTIONS} == set()
    imported = re.findall(r"^from pytest_gtrainer import (\([^)]+\)|.+)", text, re.MULTILINE)
    names = {name for line in imported for name in re.findall(r"\w+", line.partition("#")[0])}
    assert names
    assert {name for name in names if not hasattr(pytest_gtrainer, name)} == set()


def test_every_page_has_its_place_in_the_site_and_links_lead_somewhere():
    text = (ROOT / "mkdocs.yml").read_text()
    in_site = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    written = {str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md")}
    assert written - in_site == set()
    assert in_site - written == set()
    for page in PAGES.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[\w-]+)?\)", page.read_text()):
            place = (page.parent / target).resolve().relative_to(PAGES)
            assert str(place) in in_site, f"{page.name} links {target}"


IN_REPOSITORY = "index.md#in-the-repository)"
"""The end of a link to the section that says where what the wheel does not have is."""


def not_in_the_wheel(paragraph):
    """Return the files, folders and modules of this repository that a paragraph names, and that no
    wheel has.
    """
    named = re.findall(r"\b(?:fixtures|benchmarks|tests|examples)(?:[/.]\w+)+", paragraph)
    found = []
    for name in named:
        path = ROOT / name
        module = ROOT / name.replace(".", "/")
        if path.exists() or module.exists() or module.with_suffix(".py").exists():
            found.append(name)
    return found


def test_what_only_the_repository_has_is_named_so():
    """A reader of the wheel and the site has no tests, fixtures, examples and benchmarks of ours.

    The page about the architecture is for those who have the repository.
    """
    seen = 0
    for page in PAGES.rglob("*.md"):
        if page.name == "architecture.md":
            continue
        prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for paragraph in prose.split("\n\n"):
            named = not_in_the_wheel(paragraph)
            seen += len(named)
            assert not named or IN_REPOSITORY in paragraph, f"{page.name} names {named[0]}"
    assert seen > 30
    assert not_in_the_wheel(
        "`tests/test_step.py` is yours, `python -m benchmarks.passes` ours"
    ) == ["benchmarks.passes"]
    text = (PAGES / "index.md").read_text()
    assert "## In the repository\n" in text


def test_pages_are_few_and_a_long_one_begins_with_its_contents():
    """A page is long from 400 lines on, code counted; a contents list links three or more."""
    pages = {page.name: page.read_text() for page in PAGES.rglob("*.md")}
    assert len(pages) <= 24
    long = {name: text for name, text in pages.items() if len(text.splitlines()) > 400}
    assert len(long) > 2
    for name, text in long.items():
        head = text.partition("\n## ")[0].partition("On this page:")[2]
        assert head.count("](#") > 2, name


def test_every_public_name_stands_on_a_reference_page():
    """Names stand with their path on the page of the library; kinds of conformance in the table of
    their page.
    """
    paths = re.findall(r"^::: ([\w.]+)$", (PAGES / "library.md").read_text(), re.MULTILINE)
    kinds = re.findall(
        r"^\| `[\w-]+` \| `(\w+)` \|", (PAGES / "conformance.md").read_text(), re.MULTILINE
    )
    assert len(paths) == len(set(paths))
    homes = {
        f"pytest_gtrainer.{home}.{name}"
        for name, home in pytest_gtrainer._HOME.items()
        if home != name
    }
    assert homes - set(paths) == set(), (
        "a public name needs its line `::: path.of.it` in docs/library.md"
    )
    shown = {path.rpartition(".")[2] for path in paths} | set(kinds)
    for part in ("graphtext", "checks", "testing", "conformance"):
        tree = ast.parse((ROOT / "pytest_gtrainer" / part / "__init__.py").read_text())
        (public,) = (
            ast.literal_eval(node.value) for node in tree.body if "__all__ = " in ast.unparse(node)
        )
        assert set(public) - shown == set(), part


def test_the_site_loads_nothing_from_the_network(generated, tmp_path, monkeypatch):
    """The build refuses a page that does; and code is coloured by a style sheet of the site."""
    assert "highlightjs: false" in (ROOT / "mkdocs.yml").read_text()
    assert ".highlight .k " in generated.colours()
    monkeypatch.setitem(sys.modules, "mkdocs.exceptions", SimpleNamespace(PluginError=RuntimeError))
    (tmp_path / "page.html").write_text(
        '<a href="https://a.org">a</a><link rel="stylesheet" href="css/code.css">'
    )
    generated.on_post_build(SimpleNamespace(site_dir=tmp_path))
    (tmp_path / "page.html").write_text('<link rel="stylesheet" href="https://a.org/b.css">')
    with pytest.raises(
        RuntimeError, match=r'page.html loads from the network: <link .*"https://a.org/b.css"'
    ):
        generated.on_post_build(SimpleNamespace(site_dir=tmp_path))


@pytest.mark.second_tier
def test_a_behaviour_without_a_test_is_told_and_a_bar_does_not_end_a_cell(generated, monkeypatch):
    monkeypatch.setattr(
        generated, "behaviours", lambda: {"Z9": ("Things", "a | b"), "Z8": ("Others", "c")}
    )
    page = generated.behaviours_tables()
    assert "| Z9 | a \\| b | none by this id |" in page
    assert (
        page.index("## Things")
        < page.index("| Z9 |")
        < page.index("## Others")
        < page.index("| Z8 |")
    )


def test_generated_pages(generated):
    """Each table has its place on a page, and fills it."""
    rows = {
        "architecture": "| D2 | Payload order is eager FSDP2's",
        "options": "| `--gt-report FILE` | `gt_report` |",
    }
    for name, row in rows.items():
        page = (PAGES / f"{name}.md").read_text()
        assert row not in page
        assert row in generated.filled(page)
        assert "<!--" not in generated.filled(page)
    assert doctest.testmod(generated) == (0, 4)


def test_the_architecture_names_rooms_and_files_that_exist():
    """Each room of the picture has its floor in the test of imports, and each file of the tables is
    there.
    """
    from tests.test_import_directions import ROOMS

    text = (PAGES / "architecture.md").read_text()
    package = ROOT / "pytest_gtrainer"
    named = {
        name
        for name in re.findall(r"`([a-z_/]+(?:/|\.py))`", text)
        if not name.startswith("tests/")
    }
    assert len(named) > 15
    assert {name for name in named if not (package / name).exists()} == set()
    picture = text.partition("## Rooms")[2].partition("## Who")[0]
    assert {
        room for rooms in ROOMS for room in rooms if not re.search(rf"\b{room}\b", picture)
    } == set()
