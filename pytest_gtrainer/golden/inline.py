"""Inline expectations: ``assert_expected_inline`` of expecttest, accepted by the flags that accept goldens.

Terms: an *expectation* is one call of that function, with the text that the source expects there and
the one that the test has obtained. To *accept* it is to write the obtained text into the source.

While tests run nothing is written. Each process observes its tests' expectations, met ones too, and
sends them along with the reports (attribute ``gt_inline``): a rank to its parent, an xdist worker to
the controller. The process that all reports come to accepts them once, at the end, also those of workers that
crashed later. Only tests that have passed count, teardown included.
Where expecttest is not installed all of this does nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.facts import Fact
from pytest_gtrainer.golden import _expecttest, literals, store
from pytest_gtrainer.golden.modes import modes_of

if TYPE_CHECKING:
    from pytest_gtrainer.golden.plugin import GoldenPlugin

_SHOWN = 60
_Who = TypeVar("_Who")
Place = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Expectation:
    """One call: the file (below the root directory, else absolute) and line, and both texts.

    ``digest`` is that of the file when it was imported. An expectation goes through JSON.
    """

    file: str
    line: int
    expected: str
    obtained: str
    digest: str

    @property
    def place(self) -> Place:
        """What one literal has in common, however often its call runs."""
        return self.file, self.line, self.expected


def prepare(early_config: pytest.Config) -> None:
    """Before a conftest can import expecttest's function by name."""
    names = ("gt_update_goldens", "gt_create_goldens")
    asked = any(getattr(early_config.known_args_namespace, name) or early_config.getini(name) for name in names)
    if asked or _by_variable():
        _expecttest.prepare()


def register(config: pytest.Config) -> None:
    """Add the plugins of a process that runs tests, and of the one that accepts.

    Raises:
        pytest.UsageError: expectations are to be accepted where CI is set.
    """
    plugin = InlinePlugin(config)
    config.pluginmanager.register(plugin, "gtrainer-inline")
    if plugin.accepts and not hasattr(config, "workerinput"):
        _refuse_in_ci(config)
        config.pluginmanager.register(AcceptancePlugin(config), "gtrainer-inline-acceptance")


class InlinePlugin:
    """Observes the expectations of the tests that this process runs."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        chosen = modes_of(config)
        self._accepts_any = chosen.updates or _by_variable()
        self.accepts = self._accepts_any or chosen.creates  # the latter only where nothing is expected yet
        self._digests: dict[str, str] = {}
        self._running = False
        self._observed: list[Expectation] = []
        self._recorder = self._record if self.accepts else None
        if self.accepts:
            _expecttest.prepare()
        _expecttest.enter(self._recorder)

    def pytest_unconfigure(self) -> None:
        _expecttest.leave(self._recorder)

    # -- while tests run

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Test files are imported next: what lies there now is what the lines of expectations refer to."""
        if self.accepts and isinstance(collector, pytest.Module):
            self._digests[str(collector.path)] = digest_of(collector.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._running = True
        try:
            return (yield)
        finally:
            self._running = False

    def _record(self, file: str, line: int, expected: str, obtained: str) -> bool:
        """Keep an expectation of the running test; False if it must fail, as it is not to be accepted."""
        __tracebackhide__ = True
        if not self._running:
            return False
        if obtained != expected and expected and not self._accepts_any:
            return False
        if obtained != expected and _expecttest.spell('""""""', obtained) is None:
            pytest.fail("the obtained text is not printable ASCII, as inline expectations are: use gt_golden.check")
        digest = self._digests.setdefault(file, digest_of(Path(file)))
        self._observed.append(Expectation(self._below_root(file), line, expected, obtained, digest))
        return True

    def _below_root(self, file: str) -> str:
        path = Path(os.path.realpath(file))
        root = Path(os.path.realpath(self.config.rootpath))
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the expectations along; say how to accept one that has failed."""
        report = yield
        if self._observed:
            report.gt_inline = [asdict(each) for each in self._observed]  # type: ignore[attr-defined]
            self._observed = []
        if report.failed and call.excinfo is not None and _expecttest.is_mismatch(call.excinfo.value):
            goldens: GoldenPlugin = self.config.pluginmanager.getplugin("gtrainer-goldens")
            report.gt_accept = goldens.accept_command(item)  # type: ignore[attr-defined]
            _append(report, f"to accept what was obtained:\n  {report.gt_accept}")
        return report

    # -- ranks

    def judge_ranks(self, item: pytest.Item, claims: Mapping[int, list[dict[str, Any]]]) -> str | None:
        """Why a test fails whose ranks have obtained different texts for one expectation."""
        seen = [(f"rank {rank}", Expectation(**each)) for rank in sorted(claims) for each in claims[rank]]
        way_out = "expect what all ranks have in common"
        problems = (disagreement(those, way_out) for those in by_place(seen).values())
        return next((problem for problem in problems if problem is not None), None)


def by_place(seen: Iterable[tuple[_Who, Expectation]]) -> dict[Place, list[tuple[_Who, Expectation]]]:
    """The expectations of each literal."""
    places: dict[Place, list[tuple[_Who, Expectation]]] = {}
    for who, each in seen:
        places.setdefault(each.place, []).append((who, each))
    return places


def disagreement(seen: Iterable[tuple[str, Expectation]], way_out: str) -> str | None:
    """If the expectations of one literal came to different texts: where, and who has obtained which.

    >>> one, two = (Expectation("test_a.py", 3, "", text, "") for text in ("x", "y"))
    >>> print(disagreement([("rank 0", one), ("rank 1", one), ("rank 2", two)], "expect less"))
    test_a.py:3: one inline expectation, but different texts, so none is accepted: expect less
      rank 0: 'x'
      rank 2: 'y'
    """
    texts: dict[str, str] = {}
    for who, each in seen:
        texts.setdefault(each.obtained, who)
    if len(texts) < 2:
        return None
    said = "".join(f"\n  {who}: {_head(text)}" for text, who in texts.items())
    problem = f"one inline expectation, but different texts, so none is accepted: {way_out}"
    return f"{each.file}:{each.line}: {problem}{said}"


def digest_of(path: Path) -> str:
    """The digest of a file's content; "" if it cannot be read."""
    try:
        return digest(path.read_bytes())
    except OSError:
        return ""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _head(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"


def _append(report: pytest.TestReport, text: str) -> None:
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("inline expectation", text)
    else:
        report.longrepr = f"{longrepr}\n\n{text}"


def _by_variable() -> bool:
    """expecttest's own way to ask for it."""
    return bool(os.environ.get(_expecttest.ACCEPT_VARIABLE)) and _expecttest.module() is not None


def _refuse_in_ci(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if in_ci and not options.get(config, "goldens-in-ci"):
        raise pytest.UsageError(
            f"{_expecttest.ACCEPT_VARIABLE} is refused where CI is set, as nobody would review the changes: "
            "accept on your machine, or give --gt-goldens-in-ci too"
        )


@dataclass(slots=True)
class _Test:
    """What the reports of one test have told."""

    nodeid: str
    location: tuple[str, int | None, str]
    outcomes: list[tuple[str | None, str]] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        phases = {when for when, _ in self.outcomes}
        return {"call", "teardown"} <= phases and all(outcome == "passed" for _, outcome in self.outcomes)


class AcceptancePlugin:
    """Gathers the expectations of all tests, and accepts them when the last test has ended."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self._tests: dict[tuple[str, int], _Test] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = report.nodeid, id(getattr(report, "node", None))  # xdist: the worker, as two may run one test
        if key not in self._tests or report.when == "setup":  # again: a plugin repeats the test
            self._tests[key] = _Test(report.nodeid, report.location)
        self._tests[key].outcomes.append((report.when, report.outcome))
        self._tests[key].expectations += [Expectation(**each) for each in getattr(report, "gt_inline", ())]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:  # stopped at a failure, or interrupted: as goldens, those of the tests before are written
            self._accept()

    def _accept(self) -> None:
        passed = [(test, each) for test in self._tests.values() if test.has_passed for each in test.expectations]
        edits: dict[str, dict[literals.Edit, _Test]] = {}
        for seen in by_place(passed).values():
            problem = disagreement(((test.nodeid, each) for test, each in seen), "give each its own")
            test, each = seen[0]
            if problem is not None:
                self._fail(test, problem)
            elif each.obtained != each.expected:
                edits.setdefault(each.file, {})[literals.Edit(each.line, each.expected, each.obtained)] = test
        for file in sorted(edits):
            imported = {each.digest for _, each in passed if each.file == file}
            self._accept_in(file, edits[file], imported)

    def _accept_in(self, file: str, edits: dict[literals.Edit, _Test], imported: set[str]) -> None:
        """Edit one file, of which the processes of the run have ``imported`` these states."""
        refused: dict[literals.Edit, str] = {}

        def edited(source: bytes) -> bytes:
            if imported != {digest(source)}:
                raise literals.EditError("was changed while the tests ran")
            new, problems = literals.rewritten(source, edits, _expecttest.spell)
            refused.update(problems)
            return new

        some_test = next(iter(edits.values()))
        try:
            if Path(file).is_absolute():
                raise literals.EditError("lies outside of the root directory")
            store.rewrite(self.root / file, self.root, edited)
        except literals.EditError as error:
            self._fail(some_test, f"{file} {error}: none of its inline expectations is accepted, run again")
        except store.GoldenFileError as error:
            self._fail(some_test, str(error))
        else:
            for edit, problem in refused.items():
                self._fail(edits[edit], f"{file}:{edit.line}: the inline expectation is not accepted: {problem}")
            self._count(file, edits.keys() - refused.keys())

    def _count(self, file: str, edits: set[literals.Edit]) -> None:
        late_facts: list[Fact] = self.config.pluginmanager.getplugin("gtrainer-goldens").late_facts
        for edit in edits:
            outcome = "updated" if edit.old else "created"
            late_facts.append({"kind": "inline", "outcome": outcome, "name": f"{file}:{edit.line}"})

    def _fail(self, test: _Test, problem: str) -> None:
        """One more report of a test, as it has ended already."""
        report = pytest.TestReport(test.nodeid, test.location, {}, "failed", problem, "teardown")
        self.config.hook.pytest_runtest_logreport(report=report)
