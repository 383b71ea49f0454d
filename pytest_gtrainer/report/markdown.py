"""The summary of ``--gt-summary`` in Markdown, short enough for a pull request or the page of a CI job."""

import html
import re
import shlex

from pytest_gtrainer.facts import escaped
from pytest_gtrainer.report.changes import BAD
from pytest_gtrainer.report.collected import Test
from pytest_gtrainer.report.html import Run

MOST_TESTS = 50
_LINKED = re.compile(r"@[\w-]|#\d|\bGH-\d|:[\w+-]+:")
_MOST_OUTPUT = 3_000
"""Characters of a failure: with all of them a summary stays below the 1 MiB that a job's page on GitHub takes."""


def render_summary(run: Run) -> str:
    """Counts, the run's own lines, each failed test with what changed, and what changed in those that passed."""
    counts = ", ".join(f"{count} {name}" for name, count in run.counts) or "no tests"
    parts = [f"## {text(run.title)}: {counts}", text(run.made)]
    if run.summary:
        parts.append(fenced("\n".join(run.summary)))
    told = list(zip(run.tests, run.details, strict=True))
    failed = [pair for pair in told if pair[0].outcome in BAD]
    changed = [pair for pair in told if pair[0].outcome not in BAD and pair[1]["earlier"]["lines"]]
    for title, pairs in (("Failed", failed), ("Changed since the earlier report", changed)):
        if pairs:
            parts.append(f"### {title}")
            for test, details in pairs[:MOST_TESTS]:
                headline = [test.headline] if test.headline else []
                lines = [*headline, *details["changed"], *details["earlier"]["lines"]]
                parts.append(_entry(test, lines, run.folder))
        if len(pairs) > MOST_TESTS:
            parts.append(f"… and {len(pairs) - MOST_TESTS} more.")
    return "\n\n".join(parts) + "\n"


def _entry(test: Test, lines: list[str], folder: str) -> str:
    where = f", {text(test.world)}" if test.world else ""
    failure = next((report.longreprtext for report in test.reports if report.failed), "")
    parts = [
        "\n".join(
            [
                f"**{code(test.name)}** {test.outcome}{where}",
                "",
                *(f"- {text(line)}" for line in lines),
            ]
        )
    ]
    if failure:
        half = _MOST_OUTPUT // 2  # its beginning says what it is, its end what to do
        cut = (
            failure if len(failure) <= _MOST_OUTPUT else f"{failure[:half]}\n[…]\n{failure[-half:]}"
        )
        again = f"Run it again: {code(shlex.join(['pytest', folder + test.name]))}"
        parts.append(
            f"<details><summary>The failure</summary>\n\n{fenced(cut)}\n\n{again}\n\n</details>"
        )
    return "\n\n".join(parts)


def text(told: str) -> str:
    """Return ``told`` on one line, without markup, mentions (``@name``), issues (``#12``) and emoji (``:name:``).

    GitHub links mentions and issues even if their marks are escaped; it does not inside code.

    >>> print(text("a_b <c> *d* @e"))
    a\\_b &lt;c&gt; \\*d\\* `@e`
    """
    marks = re.compile(r"([\\`*_\[\]#|~@$])")
    return " ".join(
        code(word) if _LINKED.search(word) else html.escape(marks.sub(r"\\\1", word), quote=False)
        for word in escaped(told).split()
    )


def code(told: str) -> str:
    """A text as inline code, whatever backticks it holds."""
    told = escaped(told)
    ticks = "`" * (1 + max(map(len, re.findall("`+", told)), default=0))
    space = " " if "`" in told else ""
    return f"{ticks}{space}{' '.join(told.split())}{space}{ticks}"


def fenced(told: str) -> str:
    """A text as a block of code, whatever fences it holds."""
    told = escaped(told)
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", told)), default=0))
    return f"{ticks}text\n{told}\n{ticks}"
