"""Text that would command a terminal, hide, or change the direction of writing is shown as an
escape, everywhere.
"""

import json
import re

import pytest
import torch

from pytest_gtrainer import Record, compare, facts
from pytest_gtrainer.facts import unpacked
from pytest_gtrainer.numerics.verdict import Key, table, where
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import PageContent, render_page
from pytest_gtrainer.report.markdown import render_summary
from pytest_gtrainer.report.terminal import SummaryPlugin

HOSTILE = {
    "ESC": "\x1b[2J",
    "NUL": "\0",
    "bidi override": "\u202egnp",
    "bidi isolate": "\u2066",
    "CSI of one byte": "\x9b2J",
    "backspace": "\b\b\b",
    "carriage return": "\rpassed",
    "zero width": "\u200b",
    "line separator": "\u2028",
    "lone surrogate": "\udc80",
    "DEL": "\x7f",
}
TEXT = f"begin{''.join(HOSTILE.values())}end"


def is_tame(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


@pytest.fixture
def hostile() -> PageContent:
    """A failed test, everything about which is hostile."""
    reports = [
        pytest.TestReport(
            f"test_{TEXT}.py::t[{TEXT}]",
            (TEXT, 1, TEXT),
            {},
            "failed",
            TEXT,
            "call",
            [(TEXT, TEXT)],
        )
    ]
    found = [
        {"kind": "golden", "name": TEXT, "outcome": "different"},
        {"kind": "verdict", "what": TEXT, "outcome": "different"},
        {"kind": "skip", "cause": TEXT},
        {"kind": "leak", "test": TEXT, "what": TEXT},
    ]
    test = Collected(reports[0].nodeid, reports, found)
    return PageContent(TEXT, TEXT, [TEXT, "second"], [test])


def test_the_summary_in_markdown(hostile):
    text = render_summary(hostile)
    assert is_tame(text)
    assert r"\x1b[2J" in text
    assert r"\u202egnp" in text


def test_the_page(hostile):
    page = render_page(hostile)
    assert is_tame(page)
    packed = re.search(r'<script type="text/plain" id="d0">([^<]*)</script>', page)[1]
    assert is_tame(json.dumps(json.loads(unpacked(packed)), ensure_ascii=False))
    assert r"\x1b[2J" in page


def test_the_summary_on_the_terminal(monkeypatch):
    class Reporter:
        text = ""

        def write_line(self, line: str) -> None:
            self.text += line + "\n"

        def write_sep(self, sign: str, title: str) -> None:
            self.text += title + "\n"

    plugin = SummaryPlugin(None)
    row = dict.fromkeys(
        ("ranks", "nodes", "channels", "algorithm", "partition", "accumulate", "result"), TEXT
    )
    plugin._nets = {TEXT: [{"kind": "net", **row}, {"kind": "net", **row, "ranks": "2"}]}
    plugin.facts = [
        {"kind": "sweep", "sweep": TEXT, "settings": {TEXT: TEXT}, "result": TEXT, "why": TEXT}
    ]
    monkeypatch.setattr(SummaryPlugin, "lines", lambda self: [f"{TEXT}\nforged line"])
    plugin.pytest_terminal_summary(reporter := Reporter())
    assert is_tame(reporter.text)
    assert r"\x1b[2J" in reporter.text
    assert "\nforged line" not in reporter.text


@pytest.mark.parametrize("which", HOSTILE)
def test_names_of_tensors(which: str):
    """Names stand in a verdict and in its table, whose lines and columns they cannot break."""
    name = f"w{HOSTILE[which]}\n\tx"
    verdict = compare({name: torch.ones(1)}, {name: torch.zeros(1)})
    assert is_tame(str(verdict))
    assert facts.one_line(name) in str(verdict)
    lines = table(verdict).splitlines()
    assert len(lines) == 2
    assert {len(line.split("\t")) for line in lines} == {15}
    record = Record()
    record.add(0, 0, "weight", name, torch.ones(1))
    assert is_tame(where(next(iter(record))))


def test_other_letters_stay_what_they_are():
    """The twin: only what cannot be seen is escaped."""
    name = "gewichte.größe.重み.🙂"
    assert where(Key(0, 0, "", name)) == name
    assert facts.escaped("a\tb\nc") == "a\tb\nc"
    assert facts.one_line("a\tb\nc") == r"a\tb\nc"
