"""The page of ``--gt-report``: one file that needs nothing else, neither a network nor a server.

Details lie packed, a script tag for each test, graph and schedule. The page's script draws what is opened, so a
thousand tests and a graph of 40,000 nodes cost a reader only what they look at.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from pytest_gtrainer import facts
from pytest_gtrainer.facts import packed
from pytest_gtrainer.report.changes import Earlier, what_changed
from pytest_gtrainer.report.collected import ORDER, Test

_MOST_OUTPUT = 200_000  # characters of a section that the page keeps
_MOST_WORDS = 2_000


@dataclass(slots=True)
class Run:
    """What a page or a summary is made of: tests, failures first. ``earlier`` is the page that it is compared with."""

    title: str
    made: str
    summary: list[str]
    tests: list[Test]
    earlier: Earlier | None = None
    folder: str = ""
    details: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.tests = sorted(self.tests, key=lambda test: ORDER.index(test.outcome))
        self.details = [facts.all_escaped(details_of(test, self.earlier)) for test in self.tests]
        if self.earlier is not None:
            self.summary = [*self.summary, self.earlier.summary({test.name for test in self.tests})]
        self.title, self.made = facts.one_line(self.title), facts.one_line(self.made)
        self.summary = [facts.one_line(line) for line in self.summary]

    @property
    def counts(self) -> list[tuple[str, int]]:
        """How many tests came to each outcome, failures first."""
        counts = Counter(test.outcome for test in self.tests)
        return [(name, counts[name]) for name in ORDER if counts[name]]


def render_page(run: Run) -> str:
    """The page, with failures first."""
    from jinja2 import Environment

    source = resources.files(__package__) / "template"
    style, script, body = (
        (source / name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js", "report.html.j2")
    )
    texts, schedules, memories = (
        {fact["key"]: fact["packed"] for test in run.tests for fact in test.of(kind)}
        for kind in ("graph_text", "schedule", "memory")
    )
    for test in run.tests:
        texts |= {
            key: text
            for fact in test.of("golden_difference")
            for key, text in fact["texts"].items()
        }
    if run.earlier is not None:
        texts |= {
            key: run.earlier.graphs[key] for key in run.earlier.shown if key in run.earlier.graphs
        }
    tests = [_row(test, details) for test, details in zip(run.tests, run.details, strict=True)]
    data = {
        "texts": texts,
        "schedules": schedules,
        "memories": memories,
        "style": style,
        "script": script,
    }
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(body)
        .render(run=run, tests=tests, **data)
    )


def _row(test: Test, details: dict[str, Any]) -> dict[str, Any]:
    """The line of a test, whose words the page's search looks through."""
    passes = " ".join(
        each["name"] for pipeline in details["pipelines"] for each in pipeline["passes"]
    )
    changed = [each[:300] for each in [*details["changed"], *details["earlier"]["lines"]]]
    words = facts.escaped(
        " ".join([test.name, test.outcome, test.world, passes, test.headline, *changed])
    )
    time = f"{sum(report.duration for report in test.reports):.2f} s"
    shown = {
        "name": test.name,
        "outcome": test.outcome,
        "world": test.world,
        "headline": test.headline,
    }
    return {
        **{name: facts.one_line(text) for name, text in shown.items()},
        "time": time,
        "changed": changed,
        "words": words.lower()[:_MOST_WORDS],
        "packed": packed(json.dumps(details)),
    }


def details_of(test: Test, earlier: Earlier | None = None) -> dict[str, Any]:
    """All that the page draws when a test is opened, and what a later run compares with."""
    of_pipelines = [
        fact
        for kind in ("pass", "layout")
        for fact in test.of(kind)
        if fact["pipeline"] is not None
    ]
    layouts = [
        fact for fact in test.of("layout") if fact["pipeline"] is None
    ]  # two sides that were compared
    first = min(
        (fact["pipeline"] for fact in of_pipelines), default=0
    )  # not 0 in a test that was run again
    pipelines: dict[int, dict[str, Any]] = {}
    for fact in sorted(of_pipelines, key=lambda fact: int(fact["pipeline"])):
        number = fact["pipeline"] - first
        one = pipelines.setdefault(number, {"number": number, "passes": [], "layouts": []})
        one["passes" if fact["kind"] == "pass" else "layouts"].append(fact)
    goldens = [
        {name: fact[name] for name in ("name", "keys", "changes")}
        for fact in test.of("golden_difference")
    ]
    details: dict[str, Any] = {
        "name": test.name,
        "outcome": test.outcome,
        "changed": what_changed(test),
        "goldens": goldens,
        "earlier": {"lines": [], "graphs": []},
        "failures": [
            [report.when, report.longreprtext] for report in test.reports if report.failed
        ],
        "comparisons": test.comparisons(),
        "layouts": layouts,
        "pipelines": list(pipelines.values()),
        "memories": [fact["key"] for fact in test.of("memory") if fact["asked"]],
        "said": _said(test),
        "sections": [],
    }
    for title, text in test.reports[-1].sections if test.reports else ():
        more = f"\n[... {len(text) - _MOST_OUTPUT} more]" if len(text) > _MOST_OUTPUT else ""
        details["sections"].append([title, text[:_MOST_OUTPUT] + more])
    if earlier is not None:
        graphs = {fact["key"]: fact["packed"] for fact in test.of("graph_text")}
        details["earlier"] = earlier.compare(test, details, graphs)
    return details


def _said(test: Test) -> list[str]:
    """Goldens, verdicts and skips in a line each, and what the page could not show."""
    lines = []
    for fact in test.facts:
        if fact["kind"] == "golden":
            lines.append(f"golden {fact['name']}: {fact['outcome']}")
        elif fact["kind"] == "verdict":
            lines.append(
                f"verdict{' on ' + fact['what'] if fact.get('what') else ''}: {fact['outcome']}"
            )
        elif fact["kind"] == "skip":
            lines.append(f"skipped: {fact['cause']}")
        elif fact["kind"] == "conformance":
            lines.append("rule {rule} ({says}) of {pass}: {result}. {why}".format(**fact))
    lines += [f"not shown: {fact['what']}: {fact['why']}" for fact in test.of("not_shown")]
    return lines
