"""The table of a run: bug, found by what, on how many ranks, in what time, in which words."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from museum.exhibit import EXHIBITS, Exhibit
from museum.usual import Practice, Seen

MOST = 160
"""Characters of a sentence in the table."""


@dataclass
class Row:
    """What a run has found out about an exhibit."""

    ranks: int = 1
    seconds: float = 0.0
    words: str = ""
    is_found: bool = False
    is_quiet: bool = False
    """The fixed version raised no alarm."""
    seen: dict[bool, Seen] | None = None
    """What usual practice sees of the fixed version and of the bug."""


class Table:
    """Collects the outcomes of a run, a pytest plugin."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.started = time.time()

    def row(self, nodeid: str) -> Row:
        module = nodeid.partition("::")[0].removesuffix(".py").replace("/", ".")
        return self.rows.setdefault(module, Row())

    def pytest_collection_modifyitems(self, items):
        for item in items:
            world = item.get_closest_marker("gt_world")
            if world is not None:
                self.row(item.nodeid).ranks = world.kwargs.get("size", 1)

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if "usual" in properties and report.when == "teardown":
            module, seen = properties["usual"]
            self.rows.setdefault(module, Row()).seen = seen
        if report.when != "call" or not report.nodeid.endswith(("[bug]", "[fixed]")):
            return
        row = self.row(report.nodeid)
        if report.nodeid.endswith("[fixed]"):
            row.is_quiet = report.passed
            return
        row.seconds = report.duration
        row.is_found = report.skipped and hasattr(report, "wasxfail")
        row.words = words_of(report.longreprtext)

    def pytest_sessionfinish(self):
        if self.path is not None:
            Path(self.path).write_text(markdown(self.rows))


def words_of(failure: str) -> str:
    """Take from a failure's text the message, in one line."""
    lines = []
    for line in failure.splitlines():
        if line.startswith("E   "):
            lines.append(re.sub(r"^(\w+\.)*\w+: ", "", line[1:].strip()))
    text = " / ".join(line for line in lines if line)
    return text if len(text) <= MOST else text[: MOST - 1] + "…"


def sign(seen: bool | None) -> str:
    if seen is None:
        return ""
    return "seen" if seen else "**no**"


def usual_columns(exhibit: Exhibit, row: Row) -> list[str]:
    if not isinstance(exhibit.usual, Practice):
        return [exhibit.usual, "", ""]
    if row.seen is None:
        return ["not run", "", ""]
    seen = row.seen[True]
    return [sign(seen.close), sign(seen.curve), sign(seen.hashes)]


def markdown(rows: dict[str, Row]) -> str:
    """Write the table and its totals."""
    lines = [
        "| bug | found by | ranks | s | what the user reads | `assert_close` | loss, 50 steps, 1 % | "
        "hashes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = quiet = 0
    seconds = []
    for module, exhibit in sorted(EXHIBITS.items(), key=lambda each: each[1].kind):
        row = rows.get(module, Row())
        found += row.is_found
        quiet += row.is_quiet
        seconds.append(row.seconds)
        file = module.replace(".", "/") + ".py"
        cells = [
            f"[{exhibit.thread}]({file}) ({exhibit.year}): {exhibit.title}",
            exhibit.found_by if row.is_found else "**not found**",
            str(row.ranks),
            f"{row.seconds:.1f}",
            row.words.replace("|", "\\|"),
            *usual_columns(exhibit, row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    middle = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    totals = (
        f"{found} of {len(EXHIBITS)} found, median {middle:.1f} s; "
        f"{len(EXHIBITS) - quiet} alarms on the fixed versions."
    )
    return "\n".join([totals, "", *lines, ""])
