"""Goldens in a pytest run: who judges, who writes, and when.

The process that owns a test judges its claims and alone writes files, after the test's
teardown and only if all of the test has passed. A rank records claims and sends them with its
call report; the parent judges them (``judge_ranks``).

What a test came to goes with its reports to the process that ends the run: facts (attribute
``gt_facts``), the paths it claims (``gt_claims``), the command of an inline expectation that has
failed (``gt_accept``). The teardown's report carries what was written, so that a worker that
crashes later takes nothing along.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from pytest_gtrainer import facts
from pytest_gtrainer.golden import artifacts, modes, store, values
from pytest_gtrainer.golden.claims import Claim, disagreement
from pytest_gtrainer.golden.naming import FOLDER, SUFFIXES, id_of, safe, standing, torch_of

_MOST_COMMANDS = 8
_MOST_ARTIFACT_LINES = 20_000


@dataclass(frozen=True, slots=True)
class _Pending:
    """A claim to be written if its test passes."""

    claim: Claim
    outcome: str


class GoldenPlugin:
    """Judges and writes goldens; registered as ``gtrainer-goldens``.

    Attributes:
        late_facts: facts that no report carries, because they were found after the last one.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.modes = modes.modes_of(config)
        self.late_facts: list[facts.Fact] = []
        self._artifacts = artifacts.folder(config)
        self._is_rank = "gt_rank" in getattr(config, "workerinput", {})
        self._recorded: dict[str, list[Claim]] = {}  # in a rank: what its reports will carry
        self._running: str | None = None
        self._pending: list[_Pending] = []
        self._claimed: set[str] = set()  # paths, by the running test
        self._ranks_facts: list[facts.Fact] | None = None  # None: the running test has not been judged as one on ranks
        self._outcomes: list[tuple[str | None, str]] = []  # of the running test: phase, outcome
        self._commands: dict[str, None] = {}  # of failed tests, in order
        self._unjudged: dict[str, str] = {}  # numbers in an unknown environment: path, sentence
        if not hasattr(config, "workerinput"):
            modes.refuse_in_ci(config, self.modes)
            artifacts.check(config)

    # -- before

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Keep pytest from running goldens and artifacts: it takes any ``test*.txt`` for a doctest."""
        if self._artifacts is not None and collection_path.is_relative_to(self._artifacts):
            return True
        is_golden = collection_path.name.endswith(tuple(SUFFIXES.values()))
        return True if is_golden and collection_path.is_relative_to(self.root / FOLDER) else None

    # -- while the test runs

    def claim(self, item: pytest.Item, claim: Claim, unfit: Callable[[], str | None]) -> str | None:
        """Judge a check, or keep it for later; returns why it fails.

        ``unfit`` says why the text must not become a golden; it is asked only where it may become one.
        """
        if self._is_rank:
            self._recorded.setdefault(item.nodeid, []).append(claim)
            is_asked = self.modes.creates and self.config.workerinput["gt_rank"] == 0  # type: ignore[attr-defined]
            return unfit() if is_asked else None
        told, failure = self._judge(item, claim)
        is_pending = bool(self._pending) and self._pending[-1].claim is claim
        if is_pending and (failure := unfit()) is not None:
            self._pending.pop()
        for fact in told:
            facts.emit(**fact)
        return failure

    def _judge(self, item: pytest.Item, claim: Claim) -> tuple[list[facts.Fact], str | None]:
        """What is to be counted, nothing while it awaits the test's end; and the failure's text."""
        held = self._standing(claim)
        self._claimed |= {claim.path, held.path}
        path = self.root / held.path
        try:
            golden = store.read(path, self.root)
        except store.GoldenFileError as error:
            may_replace = self.modes.updates and isinstance(error, store.DamagedGolden)
            if may_replace and claim.kind != "numbers":
                return self._await(claim, "updated"), None
            return self._failed(item, claim, "different", str(error))
        if golden is None:
            if self.modes.creates:
                return self._await(claim, "created"), None
            return self._failed(item, claim, "missing", f"{claim.path} is missing\nobtained:\n{_head(claim.text)}")
        from pytest_gtrainer.golden.compare import judge

        finding = judge(claim.kind, golden, claim.text)
        if finding.outcome == "equal":
            return [_fact(held, "equal")], None
        if finding.outcome == "not judged":
            return self._not_judged(item, claim, finding.reasons), None
        is_new = held.path != claim.path
        if (self.modes.creates if is_new else self.modes.updates) and finding.replaceable:
            return self._await(claim, "created" if is_new else "updated"), None
        problem = f"{held.path} differs\n{finding.reasons}"
        if is_new:
            problem += f"\n\nit stays as it is: what is accepted goes to {claim.path}, for this torch and newer ones"
        return self._failed(item, claim, "different", problem, golden)

    def _standing(self, claim: Claim) -> Claim:
        """The claim on the file that holds here: of goldens kept per version of torch it may be an older one's."""
        path = PurePosixPath(claim.path)
        if torch_of(path) is None:
            return claim
        folder = (self.root / path).parent
        there = sorted(os.listdir(folder)) if folder.is_dir() else []
        return replace(claim, path=standing(path, there).as_posix())

    def _await(self, claim: Claim, outcome: str) -> list[facts.Fact]:
        self._pending.append(_Pending(claim, outcome))
        return []

    def _not_judged(self, item: pytest.Item, claim: Claim, why: str) -> list[facts.Fact]:
        """Numbers of another environment: new ones, for a flag that lets new ones be written."""
        if self.modes.creates:
            return self._await(claim, "created")
        try:
            kept = artifacts.save(item, _artifact(claim, "obtained"), claim.text)
        except store.GoldenFileError as error:
            return [_fact(claim, "not judged", why=f"{why}; {error}")]
        where = f"; obtained: {artifacts.shown(kept)}" if kept is not None else ""
        return [_fact(claim, "not judged", why=why + where)]

    def _failed(
        self, item: pytest.Item, claim: Claim, outcome: str, problem: str, golden: str | None = None
    ) -> tuple[list[facts.Fact], str]:
        command = self.accept_command(item)
        parts = [problem, *self._kept(item, claim, golden), f"to accept what was obtained:\n  {command}"]
        return [_fact(claim, outcome), {"kind": "accept", "command": command}], "\n\n".join(parts)

    def _kept(self, item: pytest.Item, claim: Claim, golden: str | None) -> Iterator[str]:
        """Save what a reader of the failure may want to look at; yields a paragraph that says where."""
        if self._artifacts is None:
            return
        texts = {"obtained": claim.text, "graph": claim.graph}
        if golden is not None:
            from pytest_gtrainer.golden.compare import judge

            difference = judge(claim.kind, golden, claim.text, _MOST_ARTIFACT_LINES).reasons
            texts |= {"golden": golden, "difference": difference + "\n"}
        yield from self._saved(item, {_artifact(claim, what): text for what, text in texts.items() if text})

    def _saved(self, item: pytest.Item, texts: Mapping[str, str]) -> Iterator[str]:
        """Save texts by name; yields a paragraph that says where, or why not."""
        if self._artifacts is None or not texts:
            return
        try:
            kept = [artifacts.save(item, name, text) for name, text in texts.items()]
        except store.GoldenFileError as error:
            yield f"nothing saved in {artifacts.shown(self._artifacts)}: {error}"
        else:
            yield "\n".join(["saved:", *(f"  {artifacts.shown(path)}" for path in kept if path is not None)])

    # -- ranks

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send along what the test claims: from a rank whole, to be judged; else by path."""
        report = yield
        if not self._is_rank:
            report.gt_claims = sorted(self._claimed)  # type: ignore[attr-defined]
        elif call.when in ("call", "teardown"):
            report.gt_goldens = [c.to_json() for c in self._recorded.pop(item.nodeid, [])]  # type: ignore[attr-defined]
        return report

    def judge_ranks(self, item: pytest.Item, claims: Mapping[int, list[dict[str, Any]]]) -> str | None:
        """Judge what the ranks of a test have claimed; returns why the test fails."""
        by_rank = {rank: [Claim(**claim) for claim in claimed] for rank, claimed in claims.items()}
        self._ranks_facts = []
        if not any(by_rank.values()):
            return None
        conflict = disagreement(by_rank)
        if conflict is not None:
            self._ranks_facts.append({"kind": "golden", "outcome": "different", "name": item.nodeid})
            claimed = conflict.claims.items()
            texts = {f"rank{rank}.{_artifact(claim, 'obtained')}": claim.text for rank, claim in claimed}
            return "\n\n".join([conflict.text, *self._saved(item, texts)])
        failures = []
        for claim in by_rank[min(by_rank)]:
            told, failure = self._judge(item, claim)
            self._ranks_facts += told
            failures += [failure] if failure is not None else []
        return "\n\n".join(failures) or None

    # -- after the test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = item.nodeid
        self._begin()
        try:
            return (yield)
        finally:
            self._running = None
            self._begin()

    def _begin(self) -> None:
        self._outcomes, self._pending, self._claimed, self._ranks_facts = [], [], set(), None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Before anybody counts a report or sends it on: write what the test has left to write."""
        if report.nodeid == self._running:
            if report.when == "setup":
                self._outcomes = []  # a plugin that runs a test again begins here
            self._outcomes.append((report.when, report.outcome))
            if report.when == "call" and self._ranks_facts is not None:
                report.gt_claims = sorted(self._claimed)  # type: ignore[attr-defined]
                _add_facts(report, self._ranks_facts)
            if report.when == "teardown":
                self._finish(report)
        self._remember(report)
        yield

    def _remember(self, report: pytest.TestReport) -> None:
        """Keep what the summary says of a report."""
        told: list[facts.Fact] = getattr(report, "gt_facts", [])
        if report.failed:
            commands = [fact["command"] for fact in told if fact["kind"] == "accept"]
            commands += [report.gt_accept] if hasattr(report, "gt_accept") else []
            self._commands |= dict.fromkeys(commands)
        self._unjudged |= {fact["name"]: fact["why"] for fact in told if fact["kind"] == "golden" and "why" in fact}

    def _finish(self, teardown: pytest.TestReport) -> None:
        """Write the test's goldens if it has passed, else forget them; what fails, fails the teardown."""
        phases = {when for when, _ in self._outcomes}
        passed = {"call", "teardown"} <= phases and all(outcome == "passed" for _, outcome in self._outcomes)
        pending, self._pending = self._pending, []
        problems = []
        for each in pending if passed else ():
            try:
                self._write(each.claim)
            except store.GoldenFileError as error:
                problems.append(str(error))
            else:
                _add_facts(teardown, [_fact(each.claim, each.outcome)])
        if problems:
            teardown.outcome, teardown.longrepr = "failed", "\n".join(problems)

    def _write(self, claim: Claim) -> None:
        merge = None
        if claim.kind == "numbers":  # those of other environments stay
            merge = functools.partial(values.merged, obtained=claim.text)
        try:
            store.write(self.root / claim.path, self.root, claim.text, merge)
        except values.NumbersError as error:
            raise store.GoldenFileError(f"{claim.path} was not written: it {error}") from error

    # -- at the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._artifacts is not None and not hasattr(self.config, "workerinput"):
            artifacts.remove_empty_folders(self._artifacts)

    def summary_lines(self) -> list[str]:
        """What the run's summary says below the counts: how to accept, and what was not judged."""
        lines = []
        if len(self._commands) > 1:
            shown = list(self._commands)[:_MOST_COMMANDS]
            lines += ["to accept what a test obtained, when its difference is right:", *(f"  {line}" for line in shown)]
            left = len(self._commands) - len(shown)
            lines += [f"  … and {left} more: each failure ends in its command"] if left else []
        shown_unjudged = list(self._unjudged.items())[:_MOST_COMMANDS]
        lines += [f"not judged: {path} {why}" for path, why in shown_unjudged]
        left = len(self._unjudged) - len(shown_unjudged)
        return [*lines, f"… and {left} more not judged"] if left else lines

    # -- commands

    def accept_command(self, item: pytest.Item) -> str:
        """What to type, here and now, to accept this test's goldens."""
        path, separator, rest = id_of(item).partition("::")
        here = Path(os.path.relpath(self.root / path, self.config.invocation_params.dir)).as_posix()
        given = []
        for name in ("gpus", "device"):
            value = self.config.getoption(f"--gt-{name}")
            given += [f"--gt-{name}={value}"] if value is not None else []
        return shlex.join(["pytest", here + separator + rest, *given, "--gt-update-goldens"])

    def remake_command(self, item: pytest.Item) -> str:
        """The command for a golden's header: from the root, the same for everyone."""
        return shlex.join(["pytest", id_of(item), "--gt-update-goldens"])


def _fact(claim: Claim, outcome: str, **more: str) -> facts.Fact:
    return {"kind": "golden", "outcome": outcome, "name": claim.path, **more}


def _add_facts(report: pytest.TestReport, told: list[facts.Fact]) -> None:
    report.gt_facts = [*getattr(report, "gt_facts", ()), *told]  # type: ignore[attr-defined]


def _artifact(claim: Claim, what: str) -> str:
    """The name of an artifact about a golden; a difference is always text."""
    named = f"{safe(claim.name)}." if claim.name else ""
    suffix = {"difference": ".diff", "graph": SUFFIXES["graph"]}.get(what, SUFFIXES[claim.kind])
    return f"{named}{what}{suffix}"


def _head(text: str, limit: int = 20) -> str:
    lines = text.splitlines()
    rest = [f"… and {len(lines) - limit} more lines"] if len(lines) > limit else []
    return "\n".join([*lines[:limit], *rest])
