"""The options: flag, ini twin, help and check of each stand in one place.

Read an option with ``get(config, "gpus")``: the flag wins over the ini setting, which wins over the
default. ``check`` parses all of them at start-up.
"""

import os
from argparse import SUPPRESS
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest


def _path(text: str) -> str:
    if not text:
        raise ValueError("a path")
    return text


def _whole(least: int, what: str) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{what}, {least} or more")
        return int(text)

    return parsed


def _modules(text: str) -> list[str]:
    names = text.replace(",", " ").split()
    if not names:
        raise ValueError("names of modules")
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"names of modules; {name!r} is none")
    return names


def _names(text: str) -> list[str]:
    names = text.replace(",", " ").split()
    if not names:
        raise ValueError("module:function")
    return names


_COUNT, _RANK = _whole(1, "a whole number"), _whole(0, "a rank")


def _positive_seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < float(text) < float("inf"):
            return float(text)
    raise ValueError("a number of seconds above 0")


class Option(NamedTuple):
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


_SECONDS: dict[str, Any] = {"metavar": "SECONDS", "parse": _positive_seconds}
_REACTION: dict[str, Any] = {"default": "warn", "choices": ("warn", "fail", "ignore")}

OPTIONS: tuple[Option, ...] = (
    Option(
        "gpus",
        "number of devices the run may use (default: all visible GPUs, or 8 CPU slots without a "
        "GPU)",
        metavar="N",
        parse=_COUNT,
    ),
    Option(
        "device",
        "device of the ranks; auto takes GPUs if there are any, cuda fails without one "
        "(default: auto)",
        default="auto",
        choices=("auto", "cpu", "cuda"),
    ),
    Option(
        "cuda-as",
        "let the CPU stand for CUDA in this run, also while test files are imported: device "
        "arguments, seeds, and what torch.cuda answers (default: off)",
        choices=("cpu",),
    ),
    Option("timeout", "time limit for one test on ranks (default: 300)", 300.0, **_SECONDS),
    Option(
        "one-rank",
        "run tests of one rank in pytest's own process, for the debugger of an IDE",
        is_flag=True,
    ),
    Option(
        "pdb-rank",
        "debug only rank N with breakpoint(), --pdb and --trace",
        metavar="N",
        parse=_RANK,
    ),
    Option(
        "lease-timeout",
        "time limit for waiting until other workers or runs release devices (default: 1800)",
        1800.0,
        **_SECONDS,
    ),
    Option(
        "require",
        "fail tests instead of skipping them: ranks, if the run has too few; cuda, also if a GPU "
        "is missing",
        choices=("ranks", "cuda"),
    ),
    Option(
        "update-goldens",
        "write goldens that are missing or differ, for tests that otherwise pass",
        is_flag=True,
    ),
    Option(
        "create-goldens",
        "write missing goldens; a golden that differs still fails its test",
        is_flag=True,
    ),
    Option(
        "prune-goldens",
        "delete goldens that no test checked, after a run of all tests",
        is_flag=True,
    ),
    Option(
        "unused-goldens",
        "what to do about goldens that no test checked in a run of all tests (default: warn)",
        **_REACTION,
    ),
    Option(
        "goldens-in-ci",
        "allow the flags that write goldens when the variable CI is set",
        is_flag=True,
    ),
    Option(
        "artifacts",
        "save what failed tests obtained and the differences, one folder per test below DIR",
        metavar="DIR",
    ),
    Option(
        "report",
        "write an HTML report: the graph before and after each pass, layouts, schedules, digests",
        metavar="FILE",
    ),
    Option(
        "summary",
        "write a Markdown summary for a pull request or the page of a CI job",
        metavar="FILE",
    ),
    Option(
        "report-against",
        "compare with an earlier --gt-report file and say what changed",
        metavar="FILE",
    ),
    Option(
        "against",
        "run the same tests at a git revision, too, and say what moved",
        metavar="REV",
    ),
    Option(
        "moved",
        "what to do about tests that moved under --gt-against (default: report)",
        default="report",
        choices=("report", "fail"),
    ),
    Option(
        "repeat",
        "run each test N times, and fail it with the first operator if its records differ",
        1,
        metavar="N",
        parse=_COUNT,
    ),
    Option(
        "bisect",
        "if a bitwise comparison of a replayed graph fails, find the pass that introduced the "
        "difference",
        is_flag=True,
    ),
    Option("trace-log", "keep torch's structured trace log enabled during tests", is_flag=True),
    Option(
        "leaked-flags",
        "what to do about a test that leaves a global torch setting changed (default: warn)",
        **_REACTION,
    ),
    Option(
        "leaked-resources",
        "what to do about a test on ranks that leaves a process group or GPU memory "
        "(default: warn)",
        **_REACTION,
    ),
    Option(
        "pass",
        "pass to test against the rules: pytest --pyargs pytest_gtrainer.conformance "
        "--gt-pass MODULE:NAME",
        metavar="MODULE:NAME",
    ),
    Option(
        "kind",
        "kind of the pass under --gt-pass, which selects the rules (default: any)",
        choices=(
            "any",
            "bucketing",
            "separate",
            "canonicalisation",
            "deduplication",
            "remat",
            "memory_policy",
            "reassignment",
            "ddp",
            "chunking",
        ),
    ),
    Option(
        "model",
        "functions that return a model of your own, or its graphs: --gt-pass is tested on these, "
        "too; also names of the hook pytest_gtrainer_models",
        (),
        metavar="MODULE:FUNCTION[,...]",
        parse=_names,
    ),
    Option("conformance", "write the conformance table as JSON", metavar="FILE"),
    Option(
        "conformance-against",
        "compare the conformance table with an earlier --gt-conformance file",
        metavar="FILE",
    ),
    Option(
        "fresh-ranks",
        "start new rank processes for each test; with =on-failure, run a test that fails once "
        "more, on new ranks",
        False,
        choices=("on-failure",),
        is_flag=True,
    ),
    Option(
        "preload",
        "modules that are imported once for all ranks, by the process that forks them",
        (),
        metavar="MODULE[,MODULE]",
        parse=_modules,
    ),
)

_BY_NAME = {option.name: option for option in OPTIONS}


def add(parser: pytest.Parser) -> None:
    """Register all options and their ini twins."""
    group = parser.getgroup("gtrainer", "tests of distributed compile (pytest-gtrainer)")
    for option in OPTIONS:
        if option.is_flag:
            group.addoption(option.flag, action="store_true", default=None, help=option.help)
            for choice in option.choices or ():
                # An option string of its own: if the flag took an optional value (nargs="?"),
                # argparse would take a path after the flag for it.
                group.addoption(
                    f"{option.flag}={choice}",
                    dest=option.ini,
                    action="store_const",
                    const=choice,
                    help=SUPPRESS,
                )
            kind: Any = "string" if option.choices else "bool"
            parser.addini(
                option.ini, option.help, type=kind, default="false" if option.choices else False
            )
        else:
            shown = "|".join(option.choices) if option.choices else option.metavar
            group.addoption(option.flag, default=None, metavar=shown, help=option.help)
            parser.addini(option.ini, option.help, default=None)


def get(config: pytest.Config, name: str) -> Any:
    """Return the parsed value of ``--gt-NAME``.

    Raises:
        pytest.UsageError: the option does not take the value, which the message names.
    """
    option = _BY_NAME[name]
    raw = config.getoption(option.flag)
    source = option.flag
    if raw is None:
        try:
            raw, source = config.getini(option.ini), option.ini
        except (ValueError, pytest.UsageError) as error:  # of a flag
            raise pytest.UsageError(f"{option.ini}: {error}, expected true or false") from None
    if option.is_flag and option.choices:
        return _flag_or_choice(option, raw, source)
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


def _flag_or_choice(option: Option, raw: Any, source: str) -> Any:
    """Return True, False, or one of the option's choices."""
    text, choices = str(raw).strip().lower(), option.choices or ()
    if text in choices:
        return text
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    expected = ", ".join(["true", "false", *choices])
    raise pytest.UsageError(f"{source}={raw}: expected one of {expected}")


def check(config: pytest.Config) -> None:
    """Parse every option once, so that a bad value stops the run before it starts."""
    for option in OPTIONS:
        get(config, option.name)
    if config.getoption("--gt-moved") is not None and get(config, "against") is None:
        raise pytest.UsageError(
            "--gt-moved is for tests that --gt-against compares: add --gt-against=REV"
        )
    for first, second, why in _EXCLUSIVE:
        _refuse_together(config, first, second, why)
    gpus, pdb_rank = get(config, "gpus"), get(config, "pdb-rank")
    if gpus is not None and pdb_rank is not None and pdb_rank >= gpus:
        raise pytest.UsageError(
            f"--gt-pdb-rank={pdb_rank}: with --gt-gpus={gpus} ranks are 0 to {gpus - 1}, and none "
            "would be debugged"
        )
    _refuse_one_file_for_two(config)


_EXCLUSIVE = (
    (("require", "cuda"), ("device", "cpu"), "no test would have a GPU"),
    (("require", "cuda"), ("cuda-as", "cpu"), "no test would have a GPU"),
    (("device", "cuda"), ("cuda-as", "cpu"), "ranks would be on GPUs that torch does not show"),
)
"""Pairs of values that exclude each other, and why."""


def _refuse_together(
    config: pytest.Config, first: tuple[str, str], second: tuple[str, str], why: str
) -> None:
    """Refuse two values of which one is an answer to the other.

    The command line may correct what the ini file says, so both have to be in one of the two.
    """
    pair = (first, second)
    if any(get(config, name) != value for name, value in pair):
        return
    on_command_line = [config.getoption(_BY_NAME[name].flag) is not None for name, _ in pair]
    if on_command_line[0] != on_command_line[1]:
        return
    said = []
    for name, value in pair:
        option = _BY_NAME[name]
        said.append(f"{option.flag if on_command_line[0] else option.ini}={value}")
    raise pytest.UsageError(f"{' and '.join(said)} exclude each other, as {why}: give one")


def _refuse_one_file_for_two(config: pytest.Config) -> None:
    """Refuse two options that write one file: the last one would overwrite the other."""
    writers: dict[str, str] = {}
    for name in ("report", "summary", "conformance"):
        given = get(config, name)
        if given is not None:
            _note_writer(config, writers, f"--gt-{name}", given)
    junit = config.getoption("xmlpath", None)
    if junit:
        _note_writer(config, writers, "--junitxml", junit)


def _note_writer(config: pytest.Config, writers: dict[str, str], flag: str, given: str) -> None:
    path = os.path.normpath(config.invocation_params.dir / given)
    if path in writers:
        raise pytest.UsageError(f"{writers[path]} and {flag} both write {given}: give two files")
    writers[path] = flag


def file_to_write(config: pytest.Config, name: str, example: str) -> Path | None:
    """Return the file that ``--gt-NAME`` names, as an absolute path, and make its directory.

    A wrong path ends the run here, at its start, not after hours of tests.

    Raises:
        pytest.UsageError: it cannot be written.
    """
    given = get(config, name)
    if given is None:
        return None
    path = Path(config.invocation_params.dir, given)
    try:
        if path.is_dir():
            raise pytest.UsageError(
                f"--gt-{name}={given} is a directory; name a file, as {given}/{example}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(
            f"--gt-{name}={given}: its directory cannot be made: {error}"
        ) from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise pytest.UsageError(f"--gt-{name}={given} cannot be written: permission denied")
    return path


def repeated(config: pytest.Config) -> list[str]:
    """Return the options that a command repeats which runs a test again: those of its ranks."""
    found = []
    for flag in ("--gt-gpus", "--gt-device"):
        value = config.getoption(flag)
        if value is not None:
            found.append(f"{flag}={value}")
    return found


def wants_report(config: pytest.Config) -> bool:
    """Return whether the run records graphs and digests: for a page, a summary or a comparison."""
    names = ("report", "summary", "report-against", "against")
    return get(config, "repeat") > 1 or any(get(config, name) is not None for name in names)


OTHER_SIDE = "GTRAINER_OTHER_SIDE"
"""The variable that is set in the run at the revision of ``--gt-against``."""


def is_other_side(config: pytest.Config) -> bool:
    """Return whether this is the run at the revision, which another run has started."""
    # A run that one of its tests starts is none.
    page = os.environ.get(OTHER_SIDE)
    return page is not None and config.getoption("--gt-report") == page


def compares_runs(config: pytest.Config) -> bool:
    """Return whether goldens are compared with those of another run, and not with their files."""
    return is_other_side(config) or get(config, "against") is not None
