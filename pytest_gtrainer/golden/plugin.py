"""Goldens in a pytest run: who judges, who writes, and when.

The process that owns a test judges its claims and alone writes files, after the test's teardown and
only if all of it has passed. A rank records claims and sends them with its reports; the parent
judges them (``judge_ranks``).

What a test came to goes with its reports to the process that ends the run: facts (attribute
``gt_facts``), the paths it claims (``gt_claims``), the command of an inline expectation that has
failed (``gt_accept``). The teardown's report carries what was written, so that a worker that
crashes later takes nothing along.
"""

import functools
import os
import shlex
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.golden import artifacts, naming, store, values
from pytest_gtrainer.golden.naming import (
    FOLDER,
    SUFFIXES,
    Claim,
    disagreement,
    stem_of_golden,
    stem_of_test,
)
from pytest_gtrainer.marker import id_of

UPDATE, CREATE, PRUNE = "update-goldens", "create-goldens", "prune-goldens"
_MOST_COMMANDS = 8
_MOST_ARTIFACT_LINES = 20_000


class GoldenPlugin:
    """Judges and writes goldens; registered as ``gtrainer-goldens``."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.modes = modes_of(config)
        self.late_facts: list[
            facts.Fact
        ] = []  # that no report carries, as they were found after the last one
        self._artifacts = artifacts.folder(config)
        self._is_rank = "gt_rank" in getattr(config, "workerinput", {})
        self._recorded: dict[str, list[Claim]] = {}  # in a rank: what its reports will carry
        self._running: str | None = None
        self._pending: list[
            tuple[Claim, str]
        ] = []  # to be written if the running test passes, and the outcome
        self._claimed: set[str] = set()  # paths, by the running test
        self._outcomes: set[tuple[str | None, str]] = set()  # of the running test: phase, outcome
        self._commands: dict[str, None] = {}  # of failed tests, in order
        self._unjudged: dict[str, str] = {}  # numbers in an unknown environment: path, sentence
        if not hasattr(config, "workerinput"):
            refuse_in_ci(config, self.modes.flags, f"{FOLDER}/")
            artifacts.check(config)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Keep pytest from running goldens and artifacts: it takes any ``test*.txt`` for a doctest."""
        if self._artifacts is not None and collection_path.is_relative_to(self._artifacts):
            return True
        is_golden = collection_path.name.endswith(tuple(SUFFIXES.values()))
        return True if is_golden and collection_path.is_relative_to(self.root / FOLDER) else None

    def claim(self, item: pytest.Item, claim: Claim, unfit: Callable[[], str | None]) -> str | None:
        """Judge a check, or keep it; returns why it fails. ``unfit`` says why its text must not
        become a golden.
        """
        if self._is_rank:
            self._recorded.setdefault(item.nodeid, []).append(claim)
            is_asked = self.modes.creates and self.config.workerinput["gt_rank"] == 0  # type: ignore[attr-defined]
            return unfit() if is_asked else None
        told, failure = self._judge(item, claim)
        if self._pending and self._pending[-1][0] is claim and (failure := unfit()) is not None:
            self._pending.pop()
        for fact in told:
            facts.emit(**fact)
        return failure

    def _judge(self, item: pytest.Item, claim: Claim) -> tuple[list[facts.Fact], str | None]:
        """Return what is to be counted, nothing while it awaits the test's end; and the failure's
        text.
        """
        held = self._held(claim)
        self._claimed |= {claim.path, held.path}
        try:
            golden = store.read(self.root / held.path, self.root)
        except store.GoldenFileError as error:
            if (
                self.modes.updates
                and isinstance(error, store.DamagedGolden)
                and claim.kind != "numbers"
            ):
                return self._await(claim, "updated")
            return self._failed(item, claim, "different", str(error))
        if golden is None:
            if self.modes.creates:
                return self._await(claim, "created")
            problem = f"{claim.path} is missing\nobtained:\n{_head(claim.text)}"
            return self._failed(item, claim, "missing", problem + self._renamed(item, claim))
        from pytest_gtrainer.golden.compare import judge, maker

        finding = judge(claim.kind, golden, claim.text)
        if finding.outcome == "equal":
            # after a rename the head still names the old test, and with it a command that runs
            # nothing
            is_renamed = maker(claim.kind, golden) not in (None, maker(claim.kind, claim.text))
            if is_renamed and self.modes.updates and held.path == claim.path:
                return self._await(claim, "updated")
            return [_fact(held, "equal")], None
        is_new, is_judged = held.path != claim.path, finding.outcome != "not judged"
        outcome = "created" if is_new or not is_judged else "updated"
        if finding.replaceable and (
            self.modes.creates if outcome == "created" else self.modes.updates
        ):
            return self._await(claim, outcome)
        if not is_judged:  # numbers of another environment
            try:
                kept = artifacts.save(item, _artifact(claim, "obtained"), claim.text)
                where = f"; obtained: {artifacts.shown(kept)}" if kept is not None else ""
            except store.GoldenFileError as error:
                where = f"; {error}"
            return [_fact(claim, "not judged", why=finding.reasons + where)], None
        problem = f"{held.path} differs\n{finding.reasons}"
        if is_new:
            problem += f"\n\nit stays as it is: what is accepted goes to {claim.path}, for this torch and newer ones"
        return self._failed(item, claim, "different", problem, golden)

    def _renamed(self, item: pytest.Item, claim: Claim) -> str:
        """Return which golden of no collected test holds what was obtained, if a test was renamed;
        else "".
        """
        from pytest_gtrainer.golden.compare import same_content

        known = {stem_of_test(each.nodeid) for each in item.session.items}
        suffix, obtained = SUFFIXES[claim.kind], store.normal(claim.text)
        for path in store.goldens_below(self.root):
            if not path.name.endswith(suffix) or stem_of_golden(path) in known:
                continue
            try:
                golden = store.read(self.root / path, self.root)
            except store.GoldenFileError:
                continue
            if golden is None or not same_content(claim.kind, golden, obtained):
                continue
            commands = [
                f"mkdir -p {shlex.quote(str(PurePosixPath(claim.path).parent))}",
                shlex.join(["git", "mv", str(path), claim.path]),
            ]
            if claim.kind != "text":  # its head names the test, and how to remake it
                commands.append(self.accept_command(item))
            found = f"{path} has the same text, and its test is not in this run."
            return f"\n\n{found} If the test was renamed:\n  {' && '.join(commands)}"
        return ""

    def _held(self, claim: Claim) -> Claim:
        """The claim on the file that holds here: of goldens kept per version of torch it may be an
        older one's.
        """
        path = PurePosixPath(claim.path)
        if naming.torch_of(path) is None:
            return claim
        folder = (self.root / path).parent
        there = sorted(os.listdir(folder)) if folder.is_dir() else []
        return replace(claim, path=naming.standing(path, there).as_posix())

    def _await(self, claim: Claim, outcome: str) -> tuple[list[facts.Fact], None]:
        self._pending.append((claim, outcome))
        return [], None

    def _failed(
        self, item: pytest.Item, claim: Claim, outcome: str, problem: str, golden: str | None = None
    ) -> tuple[list[facts.Fact], str]:
        """Save what a reader of the failure may want to look at, and say where it is and how to
        accept it.
        """
        texts = {"obtained": claim.text, "graph": claim.graph}
        if golden is not None and self._artifacts is not None:
            from pytest_gtrainer.golden.compare import judge

            difference = judge(claim.kind, golden, claim.text, _MOST_ARTIFACT_LINES).reasons
            texts |= {"golden": golden, "difference": facts.escaped(difference) + "\n"}
        saved = self._saved(
            item, {_artifact(claim, what): text for what, text in texts.items() if text}
        )
        command = self.accept_command(item)
        parts = [problem, *saved, f"to accept what was obtained:\n  {command}"]
        told = [_fact(claim, outcome), {"kind": "accept", "command": command}]
        if golden is not None and claim.kind == "graph" and options.wants_report(self.config):
            from pytest_gtrainer.golden.compare import golden_difference

            told += golden_difference(claim.path, golden, claim.text)
        return told, "\n\n".join(parts)

    def _saved(self, item: pytest.Item, texts: Mapping[str, str]) -> list[str]:
        """Save texts by name; a paragraph that says where, or why not."""
        if self._artifacts is None or not texts:
            return []
        try:
            kept = [artifacts.save(item, name, text) for name, text in texts.items()]
        except store.GoldenFileError as error:
            return [f"nothing saved in {artifacts.shown(self._artifacts)}: {error}"]
        return [
            "\n".join(
                ["saved:", *(f"  {artifacts.shown(path)}" for path in kept if path is not None)]
            )
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Send along what the test claims: from a rank whole, to be judged; else by path."""
        report = yield
        if not self._is_rank:
            report.gt_claims = sorted(self._claimed)
        else:
            report.gt_goldens = list(map(asdict, self._recorded.pop(item.nodeid, [])))
        return report

    def judge_ranks(
        self,
        item: pytest.Item,
        claims: Mapping[int, list[dict[str, Any]]],
        report: pytest.TestReport,
    ) -> str | None:
        """Judge what the ranks of a test have claimed; returns why the test fails. ``report`` gets
        the facts.
        """
        by_rank = {rank: [Claim(**claim) for claim in claimed] for rank, claimed in claims.items()}
        told: list[facts.Fact] = []
        failure = self._judge_claims(item, by_rank, told) if any(by_rank.values()) else None
        _add_facts(report, told)
        report.gt_claims = sorted(self._claimed)  # type: ignore[attr-defined]
        return failure

    def _judge_claims(
        self, item: pytest.Item, by_rank: Mapping[int, list[Claim]], told: list[facts.Fact]
    ) -> str | None:
        if (conflict := disagreement(by_rank)) is not None:
            text, claimed = conflict
            told.append({"kind": "golden", "outcome": "different", "name": item.nodeid})
            texts = {
                f"rank{rank}.{_artifact(claim, 'obtained')}": claim.text
                for rank, claim in claimed.items()
            }
            return facts.escaped("\n\n".join([text, *self._saved(item, texts)]))
        failures = []
        for nth in range(len(by_rank[min(by_rank)])):
            claim = naming.showing_groups({rank: claimed[nth] for rank, claimed in by_rank.items()})
            more, failure = self._judge(item, claim)
            told += more
            failures += [failure] if failure is not None else []
        return facts.escaped("\n\n".join(failures)) or None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = item.nodeid
        self._outcomes, self._pending, self._claimed = set(), [], set()
        try:
            return (yield)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Before anybody counts a report or sends it on: write what the test has left to write."""
        if report.nodeid == self._running:
            if report.when == "setup":
                self._outcomes = set()  # a plugin that runs a test again begins here
            self._outcomes.add((report.when, report.outcome))
            if report.when == "teardown":
                self._finish(report)
        told: list[facts.Fact] = getattr(report, "gt_facts", [])
        if report.failed:
            commands = [fact["command"] for fact in told if fact["kind"] == "accept"]
            commands += [report.gt_accept] if hasattr(report, "gt_accept") else []
            self._commands |= dict.fromkeys(commands)
        self._unjudged |= {
            fact["name"]: fact["why"] for fact in told if fact["kind"] == "golden" and "why" in fact
        }
        yield

    def _finish(self, teardown: pytest.TestReport) -> None:
        """Write the test's goldens if it has passed, else forget them; what fails, fails the
        teardown.
        """
        pending, self._pending = self._pending, []
        problems = []
        for claim, outcome in pending if has_passed(self._outcomes) else ():
            # of a golden of numbers, those of other environments stay
            merge = (
                functools.partial(values.merged, obtained=claim.text)
                if claim.kind == "numbers"
                else None
            )
            try:
                store.write(self.root / claim.path, self.root, claim.text, merge)
            except store.GoldenFileError as error:
                problems.append(str(error))
            except values.NumbersError as error:
                problems.append(f"{claim.path} was not written: it {error}")
            else:
                _add_facts(teardown, [_fact(claim, outcome)])
        if problems:
            teardown.outcome, teardown.longrepr = "failed", facts.escaped("\n".join(problems))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._artifacts is not None and not hasattr(self.config, "workerinput"):
            artifacts.remove_empty_folders(self._artifacts)

    def summary_lines(self) -> list[str]:
        """Return what the run's summary says below the counts: how to accept, and what was not
        judged.
        """
        lines = []
        if len(self._commands) > 1:
            lines += ["to accept what a test obtained, when its difference is right:"]
            lines += [f"  {command}" for command in list(self._commands)[:_MOST_COMMANDS]]
        if len(self._commands) > _MOST_COMMANDS:
            lines += [
                f"  … and {len(self._commands) - _MOST_COMMANDS} more: each failure ends in its command"
            ]
        lines += [
            f"not judged: {path} {why}"
            for path, why in list(self._unjudged.items())[:_MOST_COMMANDS]
        ]
        left = len(self._unjudged) - _MOST_COMMANDS
        return [*lines, f"… and {left} more not judged"] if left > 0 else lines

    def accept_command(self, item: pytest.Item) -> str:
        """Return what to type, here and now, to accept this test's goldens."""
        path, separator, rest = id_of(item).partition("::")
        here = Path(os.path.relpath(self.root / path, self.config.invocation_params.dir)).as_posix()
        shown = {
            f"--gt-{name}": self.config.getoption(f"--gt-{name}") for name in ("gpus", "device")
        }
        repeated = [f"{flag}={value}" for flag, value in shown.items() if value is not None]
        return shlex.join(["pytest", here + separator + rest, *repeated, "--gt-update-goldens"])


def has_passed(outcomes: Iterable[tuple[str | None, str]]) -> bool:
    """Return whether these phases and their outcomes are those of a test that has passed, teardown
    included.
    """
    phases, results = {phase for phase, _ in outcomes}, {result for _, result in outcomes}
    return {"call", "teardown"} <= phases and results == {"passed"}


def _fact(claim: Claim, outcome: str, **more: str) -> facts.Fact:
    return {"kind": "golden", "outcome": outcome, "name": claim.path, **more}


def _add_facts(report: pytest.TestReport, told: list[facts.Fact]) -> None:
    report.gt_facts = [*getattr(report, "gt_facts", ()), *told]  # type: ignore[attr-defined]


def _artifact(claim: Claim, what: str) -> str:
    """The name of an artifact about a golden; a difference is always text."""
    named = f"{naming.safe(claim.name)}." if claim.name else ""
    suffix = {"difference": ".diff", "graph": SUFFIXES["graph"]}.get(what, SUFFIXES[claim.kind])
    return f"{named}{what}{suffix}"


def _head(text: str, limit: int = 20) -> str:
    lines = text.splitlines()
    rest = [f"… and {facts.counted(len(lines) - limit, 'more line')}"] if len(lines) > limit else []
    return "\n".join([*lines[:limit], *rest])


@dataclass(frozen=True, slots=True)
class Modes:
    """Which goldens a run writes or removes."""

    creates: bool
    updates: bool
    unused: str  # what happens to those that no test checks: "warn", "fail", "ignore" or "prune"

    @property
    def flags(self) -> list[str]:
        """The flags that let this run write."""
        asked = {
            UPDATE: self.updates,
            CREATE: self.creates and not self.updates,
            PRUNE: self.unused == "prune",
        }
        return [f"--gt-{name}" for name, is_asked in asked.items() if is_asked]


def modes_of(config: pytest.Config) -> Modes:
    """The modes of a run; flags win over the ini file. Two that exclude each other are a
    pytest.UsageError.
    """
    update, create = given(config, UPDATE), given(config, CREATE)
    if not update and not create:
        update, create = options.get(config, UPDATE), options.get(config, CREATE)
    if update and create:
        raise pytest.UsageError(
            f"--gt-{UPDATE} and --gt-{CREATE} exclude each other, as updating writes missing goldens too: give one"
        )
    unused: str = options.get(config, "unused-goldens")
    if options.get(config, PRUNE):
        if given(config, PRUNE) and given(config, "unused-goldens") and unused == "ignore":
            raise pytest.UsageError(
                "--gt-prune-goldens and --gt-unused-goldens=ignore exclude each other: give one"
            )
        unused = "prune"
    return Modes(creates=create or update, updates=update, unused=unused)


def given(config: pytest.Config, name: str) -> bool:
    """Return whether the command line itself has an option."""
    return config.getoption(f"--gt-{name}") is not None


def refuse_in_ci(config: pytest.Config, flags: list[str], written: str) -> None:
    """Where CI is set nobody reviews what is written: a pytest.UsageError, unless
    ``--gt-goldens-in-ci`` is given.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and flags and not options.get(config, "goldens-in-ci"):
        raise pytest.UsageError(
            f"{' and '.join(flags)} {'is' if len(flags) == 1 else 'are'} refused where CI is set, as nobody would "
            f"review {written}: run it on your machine, or give --gt-goldens-in-ci too"
        )
