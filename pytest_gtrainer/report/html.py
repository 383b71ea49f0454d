"""The page of ``--gt-report``: one file that needs nothing else, neither a network nor a server.

Details lie packed, a script tag for each test, graph and schedule. The page's script draws what is
opened, so a thousand tests and a graph of 40,000 nodes cost a reader only what they look at.
"""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from pytest_gtrainer import facts
from pytest_gtrainer.facts import packed
from pytest_gtrainer.report.cards import build_card, shown_by_world
from pytest_gtrainer.report.changes import Earlier, describe_failure
from pytest_gtrainer.report.collected import ORDER, Test

_MOST_OUTPUT = 200_000  # characters of a section that the page keeps
_MOST_SEARCHED = 2_000  # characters that the page's search reads of a test


@dataclass(slots=True)
class PageContent:
    """The contents of a page or a summary.

    Attributes:
        title: the headline.
        provenance: the command of the run, and versions.
        summary: the lines of the terminal's summary.
        tests: the tests, sorted with failures first.
        earlier: the page that the run is compared with.
        folder: the path from the working directory to the root of the run, as "" or "tests/".
        options: what a command repeats of this run's, as "--gt-gpus=2".
        details: for each test what the page draws when the test is opened.
    """

    title: str
    provenance: str
    summary: list[str]
    tests: list[Test]
    earlier: Earlier | None = None
    folder: str = ""
    options: Sequence[str] = ()
    details: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.tests = sorted(self.tests, key=lambda test: ORDER.index(test.outcome))
        self.details = [facts.all_escaped(build_details(test, self.earlier)) for test in self.tests]
        # Behind the details, which count the changes.
        if self.earlier is not None:
            self.summary = [*self.summary, self.earlier.summary({test.name for test in self.tests})]
        self.title, self.provenance = facts.one_line(self.title), facts.one_line(self.provenance)
        self.summary = list(map(facts.one_line, self.summary))

    def again(self, test: Test) -> str:
        """Return the command that runs a test again, from the working directory."""
        return shlex.join(["pytest", self.folder + test.name, *self.options])

    @property
    def counts(self) -> list[tuple[str, int]]:
        """The number of tests with each outcome, failures first."""
        counts = Counter(test.outcome for test in self.tests)
        return [(name, counts[name]) for name in ORDER if counts[name]]


def render_page(run: PageContent) -> str:
    """Return the page as HTML, failures first."""
    from jinja2 import Environment

    texts: dict[str, str] = {}
    schedules: dict[str, str] = {}
    memories: dict[str, str] = {}
    kinds = {"graph_text": texts, "schedule": schedules, "memory": memories}
    for test in run.tests:
        for kind, packed_by_key in kinds.items():
            for fact in test.find(kind):
                packed_by_key[fact["key"]] = fact["packed"]
        for fact in test.find("golden_difference"):
            texts.update(fact["texts"])
        for fact in test.find("golden_text"):
            texts[fact["key"]] = fact["packed"]

    if run.earlier is not None:
        for key in run.earlier.shown & run.earlier.graphs.keys():
            texts[key] = run.earlier.graphs[key]
    rows = []
    for test, details in zip(run.tests, run.details, strict=True):
        rows.append(_build_row(test, details, run.again(test)))
    source = resources.files(__package__) / "template"
    # Escaped, since names of tests and messages of failures may hold markup.
    template = Environment(autoescape=True, trim_blocks=True).from_string(
        (source / "report.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        run=run,
        tests=rows,
        shown=shown_by_world(run.tests),
        texts=texts,
        schedules=schedules,
        memories=memories,
        style=(source / "report.css").read_text(encoding="utf-8"),
        script=(source / "report.js").read_text(encoding="utf-8"),
    )


def _build_row(test: Test, details: dict[str, Any], again: str) -> dict[str, Any]:
    """Build the line of a test in the list; the page's search reads its ``words``."""
    card, earlier = build_card(test, again), details["earlier"]["lines"]
    # The message of a card says what has changed.
    changed = earlier if card is not None else [*details["changed"], *earlier]
    changed = [line[:300] for line in changed]
    words = [test.name, test.outcome, test.world]
    for pipeline in details["pipelines"]:
        words += [run["name"] for run in pipeline["passes"]]
    words += [test.headline, *details["changed"], *changed]
    return {
        "name": facts.one_line(test.name),
        "outcome": test.outcome,
        "world": facts.one_line(test.world),
        "card": card,
        "time": f"{sum(report.duration for report in test.reports):.2f} s",
        "changed": changed,
        "words": facts.escaped(" ".join(words)).lower()[:_MOST_SEARCHED],
        "packed": packed(json.dumps(details)),
    }


def build_details(test: Test, earlier: Earlier | None = None) -> dict[str, Any]:
    """Build what the page draws when a test is opened, and what a later run compares with."""
    goldens = []
    for fact in test.find("golden_difference"):
        goldens.append({name: fact[name] for name in ("name", "keys", "changes")})
    sections = []
    for title, text in test.reports[-1].sections if test.reports else ():
        shown = text[:_MOST_OUTPUT]
        if len(text) > _MOST_OUTPUT:
            shown += f"\n[... {len(text) - _MOST_OUTPUT} more]"
        sections.append([title, shown])

    claimed = test.find("golden_text")
    imported: list[facts.Fact] = []
    for sent in test.shown.values():
        imported += facts.of_kind(sent, "imported")
    failures = []
    for report in test.reports:
        if report.failed:
            failures.append([report.when, report.longreprtext])
    details: dict[str, Any] = {
        "name": test.name,
        "outcome": test.outcome,
        "changed": describe_failure(test),
        "goldens": goldens,
        "earlier": {"lines": [], "graphs": [], "moved": False},
        "failures": failures,
        "comparisons": test.comparisons(),
        # Layouts of no pipeline are pairs that the test compared.
        "layouts": [fact for fact in test.find("layout") if fact["pipeline"] is None],
        "pipelines": _build_pipelines(test),
        "memories": [fact["key"] for fact in test.find("memory") if fact["asked"]],
        "said": _describe_checks(test),
        "checks": [fact["name"] for fact in test.facts if fact["kind"] == "check"],
        "kinds": [fact["outcome"] for fact in test.facts if fact["kind"] == "kind"],
        "verdicts": [
            [fact.get("what", ""), fact["outcome"]]
            for fact in test.facts
            if fact["kind"] == "verdict"
        ],
        "claims": [{name: fact[name] for name in ("name", "of", "key")} for fact in claimed],
        "seconds": sum(report.duration for report in test.reports),
        "imported": imported,
        "sections": sections,
    }
    if earlier is not None:
        graphs = {fact["key"]: fact["packed"] for fact in [*test.find("graph_text"), *claimed]}
        details["earlier"] = earlier.compare(test, details, graphs)
    return details


def _build_pipelines(test: Test) -> list[dict[str, Any]]:
    """Build a dict for each pipeline: its number from 0, facts of its passes and layouts."""
    found = [fact for fact in test.find("layout") if fact["pipeline"] is not None]
    found = sorted([*test.find("pass"), *found], key=lambda fact: int(fact["pipeline"]))
    pipelines: dict[int, dict[str, Any]] = {}
    parts = {"pass": "passes", "layout": "layouts"}
    for fact in found:
        # The witness counts on if a test runs again, and a later run is compared by these numbers.
        number = fact["pipeline"] - found[0]["pipeline"]
        pipeline = pipelines.setdefault(number, {"number": number, "passes": [], "layouts": []})
        pipeline[parts[fact["kind"]]].append(fact)
    return list(pipelines.values())


def _describe_checks(test: Test) -> list[str]:
    """Describe goldens, verdicts, skips and rules in a line each, and what the page cannot show."""
    lines = []
    for fact in test.facts:
        match fact["kind"]:
            case "golden":
                lines.append(f"golden {fact['name']}: {fact['outcome']}")
            case "verdict":
                what = f" on {fact['what']}" if fact.get("what") else ""
                lines.append(f"verdict{what}: {fact['outcome']}")
            case "assumed":
                lines.append(f"assumed: {fact['what']}")
            case "kind":
                lines.append(f"in exact arithmetic: {fact['outcome']}")
            case "skip":
                lines.append(f"skipped: {fact['cause']}")
            case "conformance":
                lines.append("rule {rule} ({says}) of {pass}: {result}. {why}".format(**fact))

    for fact in test.find("not_shown"):
        lines.append(f"not shown: {fact['what']}: {fact['why']}")
    return lines
