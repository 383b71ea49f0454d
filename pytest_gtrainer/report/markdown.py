"""The summary of ``--gt-summary``: Markdown for a pull request or the page of a CI job."""

import html
import re

from pytest_gtrainer.facts import escaped, spell_counts
from pytest_gtrainer.report.changes import BAD
from pytest_gtrainer.report.collected import Test
from pytest_gtrainer.report.html import PageContent

MOST_TESTS = 50
_LINKED = re.compile(r"@[\w-]|#\d|\bGH-\d|:[\w+-]+:")
_MARKS = re.compile(r"([\\`*_\[\]#|~@$])")
_MOST_OUTPUT = 3_000
"""Characters of a failure. A job's page on GitHub takes 1 MiB, so 50 failures fit."""


def render_summary(run: PageContent) -> str:
    """Return counts, the summary of the run, failed tests, and passed tests that changed."""
    counts = spell_counts(dict(run.counts))
    parts = [f"## {text(run.title)}: {counts or 'no tests'}", text(run.provenance)]
    if run.summary:
        parts.append(fenced("\n".join(run.summary)))
    failed, changed = [], []
    for test, details in zip(run.tests, run.details, strict=True):
        if test.outcome in BAD:
            failed.append((test, details))
        elif details["earlier"]["lines"]:
            changed.append((test, details))

    for title, tests in (("Failed", failed), ("Changed since the earlier report", changed)):
        if tests:
            parts.append(f"### {title}")
        for test, details in tests[:MOST_TESTS]:
            lines = [*details["changed"], *details["earlier"]["lines"]]
            if test.headline:
                lines.insert(0, test.headline)
            parts.append(_render_test(test, lines, run.again(test)))
        if len(tests) > MOST_TESTS:
            parts.append(f"… and {len(tests) - MOST_TESTS} more.")

    return "\n\n".join(parts) + "\n"


def _render_test(test: Test, lines: list[str], again: str) -> str:
    head = f"**{code(test.name)}** {test.outcome}"
    if test.world:
        head += f", {text(test.world)}"
    parts = [head + "\n"]
    parts += [f"- {text(line)}" for line in lines]
    failure = next((report.longreprtext for report in test.reports if report.failed), "")
    if failure:
        if len(failure) > _MOST_OUTPUT:
            # The beginning of a message names the failure, the end says what to do.
            half = _MOST_OUTPUT // 2
            failure = f"{failure[:half]}\n[…]\n{failure[-half:]}"
        parts += [
            f"\n<details><summary>The failure</summary>\n\n{fenced(failure)}\n",
            f"Run it again: {code(again)}\n\n</details>",
        ]

    return "\n".join(parts)


def text(content: str) -> str:
    """Return ``content`` on one line without markup, mentions, issues and emoji.

    GitHub links mentions (``@name``) and issues (``#12``), and replaces ``:name:``, even after a
    backslash. It does not inside code.

    >>> print(text("a_b <c> *d* @e"))
    a\\_b &lt;c&gt; \\*d\\* `@e`
    """
    words = []
    for word in escaped(content).split():
        if _LINKED.search(word):
            words.append(code(word))
        else:
            words.append(html.escape(_MARKS.sub(r"\\\1", word), quote=False))
    return " ".join(words)


def code(content: str) -> str:
    """Return ``content`` as inline code, in more backticks than it holds."""
    content = escaped(content)
    ticks = "`" * (1 + max(map(len, re.findall("`+", content)), default=0))
    space = " " if "`" in content else ""
    return f"{ticks}{space}{' '.join(content.split())}{space}{ticks}"


def fenced(content: str) -> str:
    """Return ``content`` as a block of code, in a longer fence than it holds."""
    content = escaped(content)
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
    return f"{ticks}text\n{content}\n{ticks}"
