"""The page of ``--gt-report``: one file that needs nothing else, neither a network nor a server.

What is seen at once is a line for each test. Details lie in the page packed, one script tag for each test and one
for each distinct graph and its schedule, and the page's script draws what is opened, so that a thousand tests and
a graph of 40,000 nodes cost a reader no more than what they look at.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

from pytest_gtrainer.report.collected import ORDER, Test
from pytest_gtrainer.report.witness import packed

_MOST_OUTPUT = 200_000  # characters of a section that the page keeps
_MOST_WORDS = 2_000


def render_page(title: str, made: str, summary: Sequence[str], tests: Sequence[Test]) -> str:
    """The page, with failures first.

    Args:
        made: versions, devices, the command line.
        summary: the lines of the run's summary.
    """
    from jinja2 import Environment

    source = resources.files(__package__) / "template"
    style, script, body = (
        (source / name).read_text(encoding="utf-8") for name in ("report.css", "report.js", "report.html.j2")
    )
    counts = Counter(test.outcome for test in tests)
    ordered = sorted(tests, key=lambda test: ORDER.index(test.outcome))  # then as they ran
    return Environment(autoescape=True, trim_blocks=True).from_string(body).render(
        run={"title": title, "made": made, "summary": summary,
             "counts": [(name, counts[name]) for name in ORDER if counts[name]]},
        tests=[_row(test) for test in ordered],
        texts={fact["key"]: fact["packed"] for test in ordered for fact in test.of("graph_text")},
        schedules={fact["key"]: fact["packed"] for test in ordered for fact in test.of("schedule")},
        memories={fact["key"]: fact["packed"] for test in ordered for fact in test.of("memory")},
        style=style,
        script=script,
    )  # fmt: skip


def _row(test: Test) -> dict[str, str]:
    """The line of a test, whose words the page's search looks through."""
    details = details_of(test)
    headline = ""  # of a failure, as the terminal's short summary shows it
    failed = next((report for report in test.reports if report.failed), None)
    if failed is not None:
        crash = getattr(failed.longrepr, "reprcrash", None)
        told = str(crash.message) if crash is not None else failed.longreprtext
        headline = told.strip().partition("\n")[0][:300]
    passes = " ".join(each["name"] for pipeline in details["pipelines"] for each in pipeline["passes"])
    words = f"{test.name} {test.outcome} {test.world} {passes} {headline}"
    return {
        "name": test.name,
        "outcome": test.outcome,
        "world": test.world,
        "time": f"{sum(report.duration for report in test.reports):.2f} s",
        "headline": headline,
        "words": words.lower()[:_MOST_WORDS],
        "packed": packed(json.dumps(details)),
    }


def details_of(test: Test) -> dict[str, Any]:
    """All that the page draws when a test is opened."""
    pipelines: dict[int, dict[str, Any]] = {}
    for fact in test.of("pass"):
        pipelines.setdefault(fact["pipeline"], {"passes": [], "layouts": []})["passes"].append(fact)
    layouts: list[dict[str, Any]] = []  # of no pipeline: two sides that were compared
    for fact in test.of("layout"):
        found = pipelines[fact["pipeline"]]["layouts"] if fact["pipeline"] in pipelines else layouts
        found.append(fact)
    return {
        "failures": [[report.when, report.longreprtext] for report in test.reports if report.failed],
        "comparisons": test.comparisons(),
        "layouts": layouts,
        "pipelines": list(pipelines.values()),
        "memories": [fact["key"] for fact in test.of("memory") if fact["asked"]],
        "said": _said(test),
        "sections": [[title, _cut(text)] for report in test.reports[-1:] for title, text in report.sections],
    }


def _said(test: Test) -> list[str]:
    """Goldens, verdicts and skips in a line each, and what the page could not show."""
    lines = []
    for fact in test.facts:
        if fact["kind"] == "golden":
            lines.append(f"golden {fact['name']}: {fact['outcome']}")
        elif fact["kind"] == "verdict":
            lines.append(f"verdict{' on ' + fact['what'] if fact.get('what') else ''}: {fact['outcome']}")
        elif fact["kind"] == "skip":
            lines.append(f"skipped: {fact['cause']}")
    lines += [f"not shown: {fact['what']}: {fact['why']}" for fact in test.of("not_shown")]
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_OUTPUT else f"{text[:_MOST_OUTPUT]}\n[... {len(text) - _MOST_OUTPUT} more]"
