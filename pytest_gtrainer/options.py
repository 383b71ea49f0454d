"""Every option once: flag, ini twin, help.

Read an option with ``get(config, "gpus")``: the flag wins over the ini setting, which wins
over the default. Values are checked by ``check``, at start-up, with a usage error that
names the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


def _path(text: str) -> str:
    if not text:
        raise ValueError("a path")
    return text


@dataclass(frozen=True, slots=True)
class Option:
    """One option: ``--gt-NAME`` on the command line, ``gt_NAME`` in the ini file."""

    name: str
    help: str
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] = _path
    is_flag: bool = False

    @property
    def flag(self) -> str:
        return f"--gt-{self.name}"

    @property
    def ini(self) -> str:
        return f"gt_{self.name.replace('-', '_')}"


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number, 1 or more")
    return int(text)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a rank, 0 or more")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ValueError("a number of seconds above 0")
    return seconds


_SECONDS: dict[str, Any] = {"metavar": "SECONDS", "parse": _positive_seconds}
_REACTION: dict[str, Any] = {"default": "warn", "choices": ("warn", "fail", "ignore")}

OPTIONS: tuple[Option, ...] = (
    Option(
        "gpus",
        "devices the run may use (default: the visible GPUs, else 8 CPU slots)",
        metavar="N",
        parse=_positive_int,
    ),
    Option(
        "device", "where ranks run; cuda makes a missing GPU an error", default="auto", choices=("auto", "cpu", "cuda")
    ),
    Option("timeout", "limit for one test on ranks (default: 300)", 300.0, **_SECONDS),
    Option("pdb-rank", "debug this rank only, at breakpoints and by --pdb and --trace", metavar="N", parse=_rank),
    Option(
        "lease-timeout",
        "limit for waiting until other workers and runs free devices (default: 1800)",
        1800.0,
        **_SECONDS,
    ),
    Option(
        "require",
        "fail tests that would be skipped: ranks, those that need more ranks than there are; cuda, "
        "also those that need GPUs",
        choices=("ranks", "cuda"),
    ),
    Option("update-goldens", "write goldens that are missing or differ, of the tests that pass", is_flag=True),
    Option("create-goldens", "write goldens that are missing; what differs fails", is_flag=True),
    Option("prune-goldens", "remove goldens that no test checks, after a run of all tests", is_flag=True),
    Option("unused-goldens", "goldens that no test checks, after a run of all tests (default: warn)", **_REACTION),
    Option("goldens-in-ci", "let the flags that write goldens do so where the variable CI is set", is_flag=True),
    Option("artifacts", "keep what failed tests obtained, with differences, in a folder for each", metavar="DIR"),
    Option("report", "write a page: graphs before and after each pass, layouts, schedules, digests", metavar="FILE"),
    Option("bisect", "bisect a bitwise comparison that fails over the passes of the replayed graphs", is_flag=True),
    Option("trace-log", "capture torch's structured trace in every test, as pytest does by itself", is_flag=True),
    Option("leaked-flags", "a test that leaves a global switch of torch changed (default: warn)", **_REACTION),
    Option(
        "leaked-resources", "a test on ranks that leaves a process group or GPU memory (default: warn)", **_REACTION
    ),
    Option("pass", "the pass that pytest_gtrainer.conformance judges", metavar="MODULE:NAME"),
    Option("kind", "which rules it is held to (default: any)", choices=("any", "bucketing")),
    Option("conformance", "write the table of conformance as JSON", metavar="FILE"),
    Option("conformance-against", "show what differs from a table that was written before", metavar="FILE"),
    Option("fresh-ranks", "start new rank processes for every test", is_flag=True),
)

_BY_NAME = {option.name: option for option in OPTIONS}


def add(parser: pytest.Parser) -> None:
    """Register all options and their ini twins."""
    group = parser.getgroup("gtrainer", "tests of distributed compile (pytest-gtrainer)")
    for option in OPTIONS:
        if option.is_flag:
            group.addoption(option.flag, action="store_true", default=None, help=option.help)
            parser.addini(option.ini, option.help, type="bool", default=False)
        else:
            shown = "|".join(option.choices) if option.choices else option.metavar
            group.addoption(option.flag, default=None, metavar=shown, help=option.help)
            parser.addini(option.ini, option.help, default=None)


def get(config: pytest.Config, name: str) -> Any:
    """The value of ``--gt-NAME``, parsed.

    Raises:
        pytest.UsageError: the value is not one the option takes.
    """
    option = _BY_NAME[name]
    raw = config.getoption(option.flag)
    source = option.flag
    if raw is None:
        raw, source = config.getini(option.ini), option.ini
    if option.is_flag:
        return bool(raw)
    if raw is None:
        return option.default
    raw = str(raw).strip()
    if option.choices and raw not in option.choices:
        raise pytest.UsageError(f"{source}={raw}: expected one of {', '.join(option.choices)}")
    try:
        return option.parse(raw)
    except ValueError as error:
        raise pytest.UsageError(f"{source}={raw}: expected {error}") from None


def check(config: pytest.Config) -> None:
    """Parse every option once, so that a bad value stops the run before it starts."""
    for option in OPTIONS:
        get(config, option.name)
