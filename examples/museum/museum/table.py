"""The table of a run: bug, found by what, on how many ranks, in what time, in which words."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from museum.exhibit import EXHIBITS, Exhibit
from museum.usual import Practice, Seen

MOST = 220
"""Characters of what the table quotes of a message."""
MARK = "<!-- made by --museum-table -->"
HEADLINES = (
    "the parallel model is not the unsharded one",
    "another function: the results differ, and no rounding explains it",
)
"""First lines of many messages, which say nothing of the cause."""


@dataclass
class Row:
    """What a run has found out about an exhibit."""

    is_run: bool = False
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
        return self.rows.setdefault(module_of(nodeid), Row())

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
        row.is_run = True
        if report.nodeid.endswith("[fixed]"):
            row.is_quiet = report.passed
            return
        row.seconds = report.duration
        row.is_found = report.skipped and hasattr(report, "wasxfail")
        exhibit = EXHIBITS.get(module_of(report.nodeid))
        if exhibit is None:
            return  # with -n the parent imports no exhibit, and writes no table
        row.words = words_of(report.longreprtext, exhibit.says) if row.is_found else exhibit.says

    def pytest_sessionfinish(self):
        if self.path is not None:
            write(Path(self.path), markdown(self.rows))


def write(file: Path, table: str) -> None:
    """Write a table; behind ``MARK``, if the file is a page that has it."""
    page = file.read_text() if file.exists() else ""
    head, mark, _ = page.partition(MARK)
    file.write_text(f"{head}{mark}\n\n{table}" if mark else table)


def module_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removesuffix(".py").replace("/", ".")


def words_of(failure: str, says: str) -> str:
    """Quote whole lines of a failure's message: those that an exhibit names, and lines around."""
    lines = []
    for line in failure.splitlines():
        if line.startswith("E   "):
            line = line[1:].strip()
            if not lines:
                line = re.sub(r"^((\w+\.)+\w+|AssertionError): ", "", line)
            if line and line not in HEADLINES:
                lines.append(line)
    chosen = [index for index, line in enumerate(lines) if says in line][:1]
    length = sum(len(lines[index]) for index in chosen)
    for index, line in enumerate(lines):
        length += 0 if index in chosen else len(line) + 3
        if length > MOST:
            break
        chosen.append(index)
    return " / ".join(lines[index] for index in sorted(set(chosen)))


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
        "| kind | bug | found by | ranks | s | what the user reads | `assert_close` | "
        "loss, 50 steps, 1 % | hashes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for module, exhibit in sorted(EXHIBITS.items(), key=lambda each: (each[1].kind, each[0])):
        row = rows.get(module, Row())
        if not row.is_run:
            continue
        file = module.replace(".", "/") + ".py"
        cells = [
            exhibit.kind,
            f"[{exhibit.thread}]({file}) ({exhibit.year}): {exhibit.title}",
            exhibit.found_by if row.is_found else "**not found**",
            str(row.ranks),
            f"{row.seconds:.1f}",
            row.words.replace("|", "\\|"),
            *usual_columns(exhibit, row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([totals(rows), "", *lines, ""])


def totals(rows: dict[str, Row]) -> str:
    """Write how many are found, in what time, and what usual practice sees of the same."""
    found = quiet = 0
    seconds = []
    run = [row for row in rows.values() if row.is_run]
    for row in run:
        found += row.is_found
        quiet += row.is_quiet
        seconds.append(row.seconds)
    middle = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    text = (
        f"{found} of {len(run)} found, median {middle:.1f} s; "
        f"{len(run) - quiet} alarms on the fixed versions."
    )
    looks = {"`assert_close`": "close", "the loss of 50 steps": "curve", "hashes": "hashes"}
    usual = []
    for name, look in looks.items():
        answers = []
        for row in run:
            if row.seen is not None and getattr(row.seen[True], look) is not None:
                answers.append(getattr(row.seen[True], look))
        if answers:
            usual.append(f"{name} {sum(answers)} of {len(answers)}")
    return text + (f" Usual practice sees: {', '.join(usual)}." if usual else "")
