"""The front of the page: a card for each failed test, and what the passed tests have shown."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gtrainer import facts
from pytest_gtrainer.report.changes import BAD
from pytest_gtrainer.report.collected import Test

_CLASS = re.compile(r"(\[rank \d+\] )?((?:\w+\.)*)(\w+): ")
"""The beginning of a failure's message: the rank, the module and the class of the exception."""
_MOST_LINES, _MOST_LETTERS = 14, 1_400
# The kinds of ``proofs``, which imports torch.
_PROVED = ("identical", "other kernels", "reordered", "rounds elsewhere")
_COLUMNS = ("proofs", "bits", "goldens", "rules")


@dataclass(frozen=True, slots=True)
class Card:
    """The part of a failed test that a person reads before opening it.

    Attributes:
        kind: which kind of failure it is: the outcome of the check that failed, as "another
            function", or the class of the exception.
        lines: the message, cut after its first lines.
        commands: what to run next, with a word about each.
    """

    kind: str
    lines: list[str]
    commands: list[tuple[str, str]]


def build_card(test: Test, again: str) -> Card | None:
    """Build the card of a test, or None if it has not failed.

    Args:
        again: the command that runs the test again.
    """
    if test.outcome not in BAD:
        return None
    message = test.message
    named = _CLASS.match(message)
    kind = "failed"
    if named is not None:
        rank, module, name = named.groups()
        kind = name
        if module.startswith("pytest_gtrainer."):
            kind = _outcome_of_check(test) or name
            message = (rank or "") + message[named.end() :]
    if test.outcome == "error":
        phase = next(report.when for report in test.reports if report.failed)
        kind = f"{kind} in {phase}"

    commands = []
    for fact in test.facts:
        if fact["kind"] == "accept":
            commands.append(("if what was obtained is right", fact["command"]))
            message = message.partition(facts.TO_ACCEPT)[0]
    for report in test.reports:
        for title, text in report.sections:
            if title.startswith(facts.NEXT):
                what, _, command = text.partition(": ")
                commands.append((what, command))
    commands.append(("run it again", again))
    commands = [(facts.one_line(what), facts.one_line(command)) for what, command in commands]
    return Card(facts.one_line(kind), _cut(message), commands)


def _outcome_of_check(test: Test) -> str:
    """Return the outcome of the check of a test that has failed; "" if it said none."""
    found = list(test.facts)
    failed = [place for place, fact in enumerate(found) if fact.get("held") is False]
    if failed:
        del found[failed[-1] :]
    for fact in reversed(found):
        match fact["kind"]:
            case "check" if fact["held"]:
                return ""  # what stands before was said by a check that held
            case "kind" | "verdict":
                return re.sub("^different", "bits differ", fact["outcome"])
            case "golden" | "inline":
                return f"golden {fact['outcome']}"
            case "conformance":
                return f"rule {fact['result']}"
    return ""


def _cut(message: str) -> list[str]:
    lines = facts.escaped(message.strip()).splitlines()
    shown: list[str] = []
    for line in lines[:_MOST_LINES]:
        if sum(map(len, shown)) + len(line) > _MOST_LETTERS:
            break
        shown.append(line)
    if not shown and lines:
        shown = [lines[0][:_MOST_LETTERS] + "…"]
    if len(shown) < len(lines):
        shown.append(f"… and {facts.counted(len(lines) - len(shown), 'more line')} below")
    return shown


def shown_by_world(tests: Sequence[Test]) -> list[list[str]]:
    """Return the table of what passed tests have shown, its header first; empty if they checked
    nothing.

    A failed test has shown nothing, nor has a check that a passed test expected to fail. A test
    without a world ran in pytest's own process.
    """
    passed: Counter[str] = Counter()
    shown: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for test in tests:
        if test.outcome != "passed":
            continue
        world = test.world or "this process"
        passed[world] += 1
        for fact in test.facts:
            outcome = str(fact.get("outcome", ""))
            match fact["kind"]:
                case "verdict" if outcome in _PROVED:
                    shown[world, "proofs"][outcome] += 1
                case "verdict" if outcome.startswith("equal") or outcome == "different as required":
                    shown[world, "bits"][outcome] += 1
                case "golden" | "inline" if outcome in ("equal", "created", "updated"):
                    shown[world, "goldens"][outcome] += 1
                case "conformance" if fact["result"] == "held":
                    shown[world, "rules"]["held"] += 1

    if not shown:
        return []
    columns = [name for name in _COLUMNS if any(column == name for _, column in shown)]
    table = [["world", "tests passed", *columns]]
    for world in sorted(passed):
        cells = [facts.spell_counts(dict(shown[world, column].most_common())) for column in columns]
        table.append([world, str(passed[world]), *cells])
    return table
