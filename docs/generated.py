"""Tables that are made from the code when the site is built: a hook of MkDocs, and a script that prints them.

A page has ``<!-- name -->`` where the table of that name is put. ``behaviours`` is every behaviour of
``behaviours.txt`` with the tests whose docstrings name it. An id counts where a docstring begins with it, alone or in
a list: ``D4:``, ``L1, K1:``, ``I3.``. Pass files name theirs in a comment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ID = r"[A-Z][0-9]{1,2}"
_IDS = re.compile(rf"({_ID}(?:(?:,| and)? {_ID})*)\b(?!-)")


def behaviours() -> dict[str, tuple[str, str]]:
    """Section and statement of each behaviour, by its id, in order."""
    found: dict[str, tuple[str, str]] = {}
    section = ""
    for line in (ROOT / "docs" / "behaviours.txt").read_text(encoding="utf-8").splitlines():
        name, _, text = line.partition(" ")
        if name == "#":
            section = text
        elif name:
            found[name] = section, text
    return found


def ids_of(docstring: str) -> list[str]:
    """The ids that a docstring begins with.

    >>> ids_of("D4: the offset"), ids_of("L1, K1 and K2. Both"), ids_of("F1 F2: both"), ids_of("All D4"), ids_of("A 3")
    (['D4'], ['L1', 'K1', 'K2'], ['F1', 'F2'], [], [])
    """
    match = _IDS.match(docstring.strip())
    return re.findall(_ID, match[1]) if match else []


def tests() -> Iterator[tuple[str, str]]:
    """Ids and the tests that name them, ``path::name``."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for name in ids_of(ast.get_docstring(node) or ""):
                    yield name, f"{path.relative_to(ROOT)}::{node.name}"
    for path in sorted((ROOT / "fixtures" / "graphs").rglob("*.fxgraph")):
        for line in path.read_text(encoding="utf-8").splitlines():
            for name in ids_of(line.removeprefix("#")) if line.startswith("# ") else ():
                yield name, str(path.relative_to(ROOT))


def tests_by_id() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, test in tests():
        found.setdefault(name, []).append(test)
    return found


def behaviours_tables() -> str:
    """A table of behaviours for each section, with the tests of each behaviour."""
    named, section = tests_by_id(), ""
    lines: list[str] = []
    for name, (heading, text) in behaviours().items():
        if heading != section:
            section = heading
            lines += ["", f"### {heading}", "", "| | behaviour | tests |", "|---|---|---|"]
        shown = (
            "<br>".join(f"`{test}`" for test in dict.fromkeys(named.get(name, ())))
            or "none by this id"
        )
        lines.append(f"| {name} | {text.replace('|', chr(92) + '|')} | {shown} |")
    return "\n".join(lines)


def options_table() -> str:
    from pytest_gtrainer.options import OPTIONS

    rows = []
    for option in OPTIONS:
        value = (
            ""
            if option.is_flag
            else f" {option.metavar or '{' + ','.join(option.choices or ()) + '}'}"
        )
        rows.append(
            f"| `{option.flag}{value}` | `{option.ini}` | {option.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(["| option | ini setting | |", "|---|---|---|", *rows])


def operators_table() -> str:
    """The table of operators in ``proofs.md``, from the one table that the arithmetics read."""
    from pytest_gtrainer.arithmetic import complexes, field, kernels, operators

    decisions = operators.COMPARISONS | operators.TRUTHS | operators.SORTS | set(operators.FINITE)
    known = operators.MOVES | operators.FACTORIES | operators.UNINITIALISED | operators.CASTS
    rows = [
        ("views", "read other places of the same memory", "all, by their schema"),
        ("moves", "take elements elsewhere", operators.MOVES),
        ("factories", "make known numbers", operators.FACTORIES | operators.UNINITIALISED),
        ("casts", "round, or do nothing in *rounds elsewhere*", operators.CASTS),
        ("decisions", "compare and choose, in nine orders", decisions),
        (
            "of a field",
            "are computed modulo a prime: sums in any order, `exp` and roots as functions",
            field.RING - known,
        ),
        (
            "made of others",
            "are taken apart",
            "torch's decompositions, attention on the CPU, lists",
        ),
        (
            "kernels that torch does not decompose",
            "are taken apart in a field",
            {operators.base_name(operator) for operator in kernels.KERNELS},
        ),
        (
            "of complex numbers",
            "are made of real ones, beside views and moves",
            set(complexes.FORMULAS),
        ),
        (
            "other functions of each element",
            "are equal for equal operands",
            "those that torch tags as pointwise",
        ),
        (
            "opaque",
            "are equal for equal arguments, else *unknown*",
            "all others, unless `meaning` says what they compute",
        ),
    ]
    lines = ["| operators | in an arithmetic they | which |", "|---|---|---|"]
    for kind, effect, names in rows:
        shown = (
            names if isinstance(names, str) else ", ".join(f"`{name}`" for name in sorted(names))
        )
        lines.append(f"| {kind} | {effect} | {shown} |")
    return "\n".join(lines)


TABLES = {"behaviours": behaviours_tables, "options": options_table}


def filled(page: str) -> str:
    """A page with its tables in the place of their comments."""
    for name, make in TABLES.items():
        if f"<!-- {name} -->" in page:
            page = page.replace(f"<!-- {name} -->", make())
    return page


def colours() -> str:
    """``css/code.css``: colours and one box for code, wide enough for 120 characters, and tables whose cells wrap."""
    from pygments.formatters import HtmlFormatter

    ours = """
.rst-content div.highlight { border: 0; padding: 0; background: none; }
.wy-nav-content { max-width: 1080px; }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
"""
    return HtmlFormatter(style="tango").get_style_defs(".highlight") + ours


def as_markdown(lines: list[str]) -> list[str]:
    """A docstring's examples and its blocks behind "::" as Markdown has them.

    >>> as_markdown(["Twice::", "", "    f(f(1))", "", ">>> f(1)", "2", "", "More"])
    ['Twice:', '', '    f(f(1))', '', '```pycon', '>>> f(1)', '2', '```', '', 'More']
    """
    made, inside = [], False
    for line in [*lines, ""]:
        if inside != (bool(line.strip()) if inside else line.lstrip().startswith(">>> ")):
            made.append("```" if inside else "```pycon")
            inside = not inside
        made.append(line if inside else re.sub("::$", ":", line))
    return made[:-1]


def on_config(config: Any) -> Any:
    """MkDocs' hook: docstrings are read as ``as_markdown`` has them, before blocks of code are sought (25)."""
    from markdown import Extension
    from markdown.preprocessors import Preprocessor

    class Examples(Extension):
        def extendMarkdown(self, md: Any) -> None:
            docstrings = Preprocessor(md)
            docstrings.run = as_markdown  # type: ignore[method-assign]
            md.preprocessors.register(docstrings, "examples", 27)

    config.markdown_extensions.append(Examples())
    return config


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: add the colours of code."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "css/code.css", content=colours()))
    return files


def on_page_markdown(markdown: str, **given: Any) -> str:
    """MkDocs' hook: put in the tables."""
    return filled(markdown)


def from_elsewhere(text: str) -> list[str]:
    """What a page or a style sheet loads over the network; a link that a reader follows is no such thing.

    >>> from_elsewhere('<script src="//a.org/b.js"></script><a href="https://c.org">c</a><img src="d.svg">')
    ['<script src="//a.org/b.js"']
    >>> from_elsewhere("a { background: url(https://a.org/b.png) }")
    ['url(https://a.org/b.png']
    """
    return re.findall(
        r"<(?:script|link|img|iframe|source)[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+[\"']?"
        r"|(?:url\(|@import )[\"']?(?:https?:)?//[^\s\"')]+",
        text,
    )


def on_post_build(config: Any) -> None:
    """MkDocs' hook: the site works without a network, or is not built."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (
            found := from_elsewhere(path.read_text(encoding="utf-8"))
        ):
            raise PluginError(f"{path.name} loads from the network: {found[0]}")


if __name__ == "__main__":
    for make in TABLES.values():
        print(make())
