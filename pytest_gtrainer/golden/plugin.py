"""Judge and write goldens in a pytest run.

Only the process that owns a test judges its claims and writes files, after the test's teardown and
only if all of it has passed. A rank records claims and sends them with its reports; the parent
judges them (``judge_ranks``).

Reports take the results to the process that ends the run: facts (attribute ``gt_facts``), the paths
of claims (``gt_claims``), and the command of an inline expectation that has failed (``gt_accept``).
The report of the teardown carries the facts of files written, so a worker that crashes later loses
none.
"""

import functools
import os
import shlex
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.golden import artifacts, naming, store
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
HAS_PASSED = pytest.StashKey[bool]()
"""Whether the call of a test has passed, for the clean-up of its fixtures."""
_MOST_COMMANDS = 8
_MOST_ARTIFACT_LINES = 20_000
_MOST_LINES_OF_HEAD = 20


class GoldenPlugin:
    """Judges and writes goldens; registered as ``gtrainer-goldens``."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.modes = modes_of(config)
        # Facts that are found after the last report, so no report carries them.
        self.late_facts: list[facts.Fact] = []
        self._compares_runs = options.compares_runs(config)
        # Texts are reported, too: two runs, or repetitions, may each accept a text of their own.
        self._shows_claims = self._compares_runs or options.get(config, "repeat") > 1
        self._artifacts = artifacts.folder(config)
        self._is_rank = "gt_rank" in getattr(config, "workerinput", {})
        self._recorded: dict[str, list[Claim]] = {}  # in a rank: claims for its reports
        self._running: str | None = None
        # Of the running test: goldens to write if it passes, with the outcome; paths of its claims;
        # phases with their outcomes.
        self._pending: list[tuple[Claim, str]] = []
        self._claimed: set[str] = set()
        self._outcomes: set[tuple[str | None, str]] = set()
        # By real path, as links may give one file two names: the name and text written last.
        self._written: dict[str, tuple[str, str]] = {}
        self._commands: dict[str, None] = {}  # of failed tests, in order
        # A sentence by path, for numbers of an environment that the golden does not have.
        self._not_judged: dict[str, str] = {}
        if not hasattr(config, "workerinput"):
            refuse_in_ci(config, self.modes.flags, f"{FOLDER}/")
            artifacts.check(config)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore goldens and artifacts: pytest takes any ``test*.txt`` for a doctest."""
        if self._artifacts is not None and collection_path.is_relative_to(self._artifacts):
            return True
        if collection_path.name.endswith(tuple(SUFFIXES.values())):
            return collection_path.is_relative_to(self.root / FOLDER) or None
        return None

    def claim(
        self, item: pytest.Item, claim: Claim, why_not_to_write: Callable[[], str | None]
    ) -> str | None:
        """Judge a check, or record it in a rank; return the failure's text, None if it holds.

        Args:
            why_not_to_write: returns why the text must not become a golden; None if it may.
        """
        if self._is_rank:
            self._recorded.setdefault(item.nodeid, []).append(claim)
            is_first = self.config.workerinput["gt_rank"] == 0  # type: ignore[attr-defined]
            return why_not_to_write() if self.modes.creates and is_first else None

        found, failure = self._judge(item, claim)
        found = [*found, *self._shown(claim)]
        if self._pending and self._pending[-1][0] is claim:
            failure = why_not_to_write()
            if failure is not None:
                self._pending.pop()

        for fact in found:
            facts.emit(**fact)
        return failure

    def _shown(self, claim: Claim) -> list[facts.Fact]:
        """Return the text of a check as a fact, if runs or repetitions are compared."""
        if not self._shows_claims:
            return []
        text = {"key": facts.key_of(claim.text), "packed": facts.packed(claim.text)}
        return [{"kind": "golden_text", "name": claim.path, "of": claim.kind, **text}]

    def _judge(self, item: pytest.Item, claim: Claim) -> tuple[list[facts.Fact], str | None]:
        """Return the facts of a check, and the failure's text.

        A check that waits for the end of the test to be written has neither.
        """
        held = self._for_this_torch(claim)
        self._claimed |= {claim.path, held.path}
        if self._compares_runs:
            return [_fact(claim, "compared between two runs")], None
        try:
            golden = store.read(self.root / held.path, self.root)
        except store.GoldenFileError as error:
            # The numbers of other environments would be lost with a damaged file.
            is_damaged = isinstance(error, store.DamagedGolden) and claim.kind != "numbers"
            if self.modes.updates and is_damaged:
                return self._await(claim, "updated")
            return self._failed(item, claim, "different", str(error))

        if golden is None:
            if self.modes.creates:
                return self._await(claim, "created")
            problem = f"{claim.path} is missing\nobtained:\n{_head(claim.text)}"
            return self._failed(item, claim, "missing", problem + self._renamed(item, claim))

        from pytest_gtrainer.golden.compare import judge, maker

        finding = judge(claim.kind, golden, claim.text)
        is_new, is_judged = held.path != claim.path, finding.outcome != "not judged"
        if finding.outcome == "equal":
            # After a rename the header still has the old test, and a command that runs nothing.
            is_renamed = maker(claim.kind, golden) not in (None, maker(claim.kind, claim.text))
            if is_renamed and self.modes.updates and not is_new:
                return self._await(claim, "updated")
            return [_fact(held, "equal")], None

        outcome, is_asked = "updated", self.modes.updates
        if is_new or not is_judged:
            # Nothing that a person has accepted is lost: the file, or the entry, is a new one.
            outcome, is_asked = "created", self.modes.creates
        if finding.replaceable and is_asked:
            return self._await(claim, outcome)
        if not is_judged:
            return self._not_judged_fact(item, claim, finding.reasons), None

        problem = f"{held.path} differs\n{finding.reasons}"
        if is_new:
            problem += (
                f"\n\nit stays as it is: what is accepted goes to {claim.path}, "
                "for this torch and newer ones"
            )

        return self._failed(item, claim, "different", problem, golden)

    def _not_judged_fact(self, item: pytest.Item, claim: Claim, why: str) -> list[facts.Fact]:
        try:
            kept = artifacts.save(item, _artifact(claim, "obtained"), claim.text)
            where = f"; obtained: {artifacts.path_from_here(kept)}" if kept is not None else ""
        except store.GoldenFileError as error:
            where = f"; {error}"
        return [_fact(claim, "not judged", why=why + where)]

    def _renamed(self, item: pytest.Item, claim: Claim) -> str:
        """Return a paragraph on a golden without a test that has the obtained text; "" for none.

        The test was probably renamed.
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
            # A header names the test, and the command to remake the golden.
            if claim.kind != "text":
                commands.append(self.accept_command(item))
            return (
                f"\n\n{path} has the same text, and its test is not in this run. "
                f"If the test was renamed:\n  {' && '.join(commands)}"
            )

        return ""

    def _for_this_torch(self, claim: Claim) -> Claim:
        """Return the claim with the file that it is compared with under this version of torch."""
        path = PurePosixPath(claim.path)
        if naming.torch_of(path) is None:
            return claim
        folder = (self.root / path).parent
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        return claim._replace(path=naming.file_for_version(path, names).as_posix())

    def _await(self, claim: Claim, outcome: str) -> tuple[list[facts.Fact], None]:
        self._pending.append((claim, outcome))
        return [], None

    def _failed(
        self, item: pytest.Item, claim: Claim, outcome: str, problem: str, golden: str | None = None
    ) -> tuple[list[facts.Fact], str]:
        """Save the texts for a reader of the failure; return its facts and its text."""
        texts = {"obtained": claim.text, "graph": claim.graph}
        if golden is not None and self._artifacts is not None:
            from pytest_gtrainer.golden.compare import judge

            difference = judge(claim.kind, golden, claim.text, _MOST_ARTIFACT_LINES).reasons
            texts |= {"golden": golden, "difference": facts.escaped(difference) + "\n"}

        named = {_artifact(claim, role): text for role, text in texts.items() if text}
        command = self.accept_command(item)
        accept = f"{facts.TO_ACCEPT}\n  {command}"
        found = [_fact(claim, outcome), {"kind": "accept", "command": command}]
        if golden is not None and claim.kind == "graph" and options.wants_report(self.config):
            from pytest_gtrainer.golden.compare import golden_difference

            found += golden_difference(claim.path, golden, claim.text)

        return found, "\n\n".join([problem, *self._save(item, named), accept])

    def _save(self, item: pytest.Item, texts: Mapping[str, str]) -> list[str]:
        """Save texts by name; return a paragraph with their paths, or with the error."""
        if self._artifacts is None or not texts:
            return []
        lines = ["saved:"]
        try:
            for name, text in texts.items():
                path = artifacts.save(item, name, text)
                if path is not None:
                    lines.append(f"  {artifacts.path_from_here(path)}")
        except store.GoldenFileError as error:
            return [f"nothing saved in {artifacts.path_from_here(self._artifacts)}: {error}"]
        return ["\n".join(lines)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Add the claims to a report: a rank's for the parent to judge, else their paths."""
        report = yield
        if call.when == "call":
            item.stash[HAS_PASSED] = report.passed
        if not self._is_rank:
            report.gt_claims = sorted(self._claimed)
        else:
            claims = self._recorded.pop(item.nodeid, [])
            report.gt_goldens = [claim._asdict() for claim in claims]
        return report

    def judge_ranks(
        self,
        item: pytest.Item,
        claims: Mapping[int, list[dict[str, Any]]],
        report: pytest.TestReport,
    ) -> str | None:
        """Judge the claims of all ranks: return the failure's text, give ``report`` the facts."""
        by_rank: dict[int, list[Claim]] = {}
        for rank, claimed in claims.items():
            by_rank[rank] = [Claim(**claim) for claim in claimed]
        found: list[facts.Fact] = []
        failure = None
        if any(by_rank.values()):
            failure = self._judge_claims(item, by_rank, found)
        _add_facts(report, found)
        report.gt_claims = sorted(self._claimed)  # type: ignore[attr-defined]
        return failure

    def _judge_claims(
        self, item: pytest.Item, by_rank: Mapping[int, list[Claim]], found: list[facts.Fact]
    ) -> str | None:
        conflict = disagreement(by_rank)
        if conflict is not None:
            text, claimed = conflict
            found.append({"kind": "golden", "outcome": "different", "name": item.nodeid})
            texts = {}
            for rank, claim in claimed.items():
                texts[f"rank{rank}.{_artifact(claim, 'obtained')}"] = claim.text
            return facts.escaped("\n\n".join([text, *self._save(item, texts)]))

        failures = []
        for nth in range(len(by_rank[min(by_rank)])):
            claim = naming.with_groups_of_all_ranks(
                {rank: claimed[nth] for rank, claimed in by_rank.items()}
            )
            more, failure = self._judge(item, claim)
            found += [*more, *self._shown(claim)]
            if failure is not None:
                failures.append(failure)

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
        """Write the goldens of a test that ends.

        ``tryfirst``: other plugins count the report of a teardown, which a failed write changes.
        """
        if report.nodeid == self._running:
            if report.when == "setup":
                # A plugin that runs a test again begins with its setup.
                self._outcomes = set()
            if not is_skipped_subtest(report):
                self._outcomes.add((report.when, report.outcome))
            if report.when == "teardown":
                self._finish(report)

        for fact in getattr(report, "gt_facts", []):
            if report.failed and fact["kind"] == "accept":
                self._commands[fact["command"]] = None
            elif fact["kind"] == "golden" and "why" in fact:
                self._not_judged[fact["name"]] = fact["why"]

        if report.failed and hasattr(report, "gt_accept"):
            self._commands[report.gt_accept] = None
        yield

    def _finish(self, teardown: pytest.TestReport) -> None:
        """Write the goldens of a test that has passed; a failed write fails the teardown."""
        pending, self._pending = self._pending, []
        if not pending or not has_passed(self._outcomes):
            return
        from pytest_gtrainer.golden import values

        problems = []
        for claim, outcome in pending:
            real = os.path.realpath(self.root / claim.path)
            path, text = self._written.get(real, (claim.path, claim.text))
            if path != claim.path and text != claim.text:
                problems.append(
                    f"{claim.path} was not written: by a link it is {path}, which another test has "
                    "just written with another text: replace the link by a file"
                )
                continue
            merge = None
            # The numbers of other environments stay in the file.
            if claim.kind == "numbers":
                merge = functools.partial(values.merged, obtained=claim.text)
            try:
                store.write(self.root / claim.path, self.root, claim.text, merge)
            except store.GoldenFileError as error:
                problems.append(str(error))
            except values.NumbersError as error:
                problems.append(f"{claim.path} was not written: it {error}")
            else:
                self._written[real] = claim.path, claim.text
                _add_facts(teardown, [_fact(claim, outcome)])

        if problems:
            teardown.outcome, teardown.longrepr = "failed", facts.escaped("\n".join(problems))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._artifacts is not None and not hasattr(self.config, "workerinput"):
            artifacts.remove_empty_folders(self._artifacts)

    def summary_lines(self) -> list[str]:
        """Return the summary's lines on commands to accept, and on goldens that were not judged."""
        lines = []
        commands = list(self._commands)
        if len(commands) > 1:
            lines += ["to accept what a test obtained, when its difference is right:"]
            lines += [f"  {command}" for command in commands[:_MOST_COMMANDS]]
        if (left := len(commands) - _MOST_COMMANDS) > 0:
            lines.append(f"  … and {left} more: each failure ends in its command")
        for path, why in list(self._not_judged.items())[:_MOST_COMMANDS]:
            lines.append(f"not judged: {path} {why}")
        if (left := len(self._not_judged) - _MOST_COMMANDS) > 0:
            lines.append(f"… and {left} more not judged")
        return lines

    def accept_command(self, item: pytest.Item) -> str:
        """Return the command that accepts this test's goldens, from the current folder."""
        path, separator, rest = id_of(item).partition("::")
        here = Path(os.path.relpath(self.root / path, self.config.invocation_params.dir)).as_posix()
        repeated = options.repeated(self.config)
        return shlex.join(["pytest", here + separator + rest, *repeated, "--gt-update-goldens"])


def is_skipped_subtest(report: pytest.TestReport) -> bool:
    """Return whether a subtest was skipped, or failed as expected: its test may yet pass."""
    # By exact type: the report of a subtest is of a subclass, whichever plugin runs subtests.
    return type(report) is not pytest.TestReport and report.skipped


def has_passed(outcomes: Iterable[tuple[str | None, str]]) -> bool:
    """Return whether a test with these phases and outcomes has passed, teardown included."""
    phases, results = {phase for phase, _ in outcomes}, {result for _, result in outcomes}
    return {"call", "teardown"} <= phases and results == {"passed"}


def _fact(claim: Claim, outcome: str, **more: str) -> facts.Fact:
    return {"kind": "golden", "outcome": outcome, "name": claim.path, **more}


def _add_facts(report: pytest.TestReport, found: list[facts.Fact]) -> None:
    report.gt_facts = [*getattr(report, "gt_facts", ()), *found]  # type: ignore[attr-defined]


def _artifact(claim: Claim, role: str) -> str:
    """Return the file name of an artifact: "obtained", "golden", "graph" or "difference"."""
    name = f"{naming.safe(claim.name)}." if claim.name else ""
    suffix = {"difference": ".diff", "graph": SUFFIXES["graph"]}.get(role, SUFFIXES[claim.kind])
    return f"{name}{role}{suffix}"


def _head(text: str) -> str:
    """Return the first lines of an obtained text, which has no golden to differ from."""
    lines = text.splitlines()
    left = len(lines) - _MOST_LINES_OF_HEAD
    if left > 0:
        lines[_MOST_LINES_OF_HEAD:] = [f"… and {facts.counted(left, 'more line')}"]
    return "\n".join(lines)


class Modes(NamedTuple):
    """The goldens that a run writes or removes."""

    creates: bool
    updates: bool
    unused: str  # "warn" of those that no test checks, "fail", "ignore" or "prune" them

    @property
    def flags(self) -> list[str]:
        """The flags that let this run write or remove files."""
        asked = {
            UPDATE: self.updates,
            CREATE: self.creates and not self.updates,
            PRUNE: self.unused == "prune",
        }
        return [f"--gt-{name}" for name, is_asked in asked.items() if is_asked]


def modes_of(config: pytest.Config) -> Modes:
    """Return the modes of a run; flags win over the ini file.

    Raises:
        pytest.UsageError: two of them exclude each other.
    """
    update, create = given(config, UPDATE), given(config, CREATE)
    if not update and not create:
        update, create = options.get(config, UPDATE), options.get(config, CREATE)
    if update and create:
        raise pytest.UsageError(
            f"--gt-{UPDATE} and --gt-{CREATE} exclude each other, as updating writes missing "
            "goldens too: give one"
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
    """Refuse the ``flags`` if the variable CI is set, because nobody reviews files written there.

    Raises:
        pytest.UsageError: CI is set, a flag is given, and ``--gt-goldens-in-ci`` is not.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and flags and not options.get(config, "goldens-in-ci"):
        raise pytest.UsageError(
            f"{' and '.join(flags)} {'is' if len(flags) == 1 else 'are'} refused where CI is set, "
            f"as nobody would review {written}: run it on your machine, or give "
            "--gt-goldens-in-ci too"
        )
