"""Inline expectations: ``assert_expected_inline`` of expecttest, accepted by the flags that accept
goldens.

An *expectation* is one call of that function: the text that the source expects, and the one that
the test has obtained. To *accept* it is to write the obtained text into the source.

Each process sends its tests' expectations, met ones too, along with the reports (attribute
``gt_inline``). The process that all reports come to accepts those of passed tests once, at the end.
A literal is found by the line of its call and by what it reads as, so in another state of the file
it is not found.

Relied on of expecttest 0.3 and later: its classes and functions reach ``assert_expected_inline`` by
that name in the module, and where ``EXPECTTEST_ACCEPT`` is not set it raises AssertionError if the
texts differ.
"""

import ast
import contextlib
import functools
import hashlib
import io
import os
import re
import sys
import tokenize
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer.facts import Fact
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.plugin import GoldenPlugin, has_passed, modes_of, refuse_in_ci

ACCEPT_VARIABLE = "EXPECTTEST_ACCEPT"
_SHOWN = 60
_LINE_END = re.compile(rb"\r\n|\r|\n")
Place = tuple[str, int, str]
_sessions: "list[InlinePlugin]" = []  # the pytest sessions of this process, the innermost last


@dataclass(frozen=True, slots=True)
class Expectation:
    """One call; it goes through JSON."""

    file: str  # below the root directory, else absolute
    line: int
    expected: str
    obtained: str
    digest: str  # of the file when it was imported

    @property
    def place(self) -> Place:
        """Return what one literal has in common, however often its call runs."""
        return self.file, self.line, self.expected


def prepare(early_config: pytest.Config) -> None:
    """Before a conftest can import expecttest's function by name."""
    names = ("gt_update_goldens", "gt_create_goldens")
    asked = False
    with contextlib.suppress(ValueError, pytest.UsageError):  # told when all options are read
        asked = any(
            getattr(early_config.known_args_namespace, name) or early_config.getini(name)
            for name in names
        )
    if asked or os.environ.get(ACCEPT_VARIABLE):
        ask_sessions()


def ask_sessions() -> None:
    """Let expecttest ask the innermost session, if it accepts any, about each expectation, while
    this process lives.
    """
    try:
        import expecttest
    except ImportError:  # goldens work without it
        return
    original: Callable[..., None] = expecttest.assert_expected_inline
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def assert_expected_inline(
        actual: str,
        expect: str,
        skip: int = 0,
        *,
        pos: Any = None,
        expect_filters: Any = None,
        **others: Any,
    ) -> None:
        __tracebackhide__ = True
        if not _sessions or not _sessions[-1].accepts:
            original(actual, expect, skip + 1, pos=pos, expect_filters=expect_filters, **others)
            return
        if pos is None:
            caller = sys._getframe(1 + skip)
            pos = expecttest.PositionInfo(caller.f_code.co_filename, caller.f_lineno)
        if expect_filters is not None:
            actual = expecttest.replace_many(expect_filters, actual)
        record = _sessions[-1].record
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv(ACCEPT_VARIABLE, raising=False)  # so that it writes no file by itself
                original(actual, expect, pos=pos, **others)
        except AssertionError:
            if not isinstance(actual, str) or not record(pos.filename, pos.lineno, expect, actual):
                raise
        else:
            record(pos.filename, pos.lineno, expect, expect)

    expecttest.assert_expected_inline = assert_expected_inline


def register(config: pytest.Config) -> None:
    """Add the plugins of a process that runs tests, and of the one that accepts, which is refused
    where CI is set.
    """
    plugin = InlinePlugin(config)
    config.pluginmanager.register(plugin, "gtrainer-inline")
    if plugin.accepts and not hasattr(config, "workerinput"):
        refuse_in_ci(config, [ACCEPT_VARIABLE], "the changes")
        config.pluginmanager.register(AcceptancePlugin(config), "gtrainer-inline-acceptance")


class InlinePlugin:
    """Observes the expectations of the tests that this process runs."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        modes = modes_of(config)
        self._accepts_any = modes.updates or bool(os.environ.get(ACCEPT_VARIABLE))
        self.accepts = (
            self._accepts_any or modes.creates
        )  # the latter only where nothing is expected yet
        self._digests: dict[str, str] = {}
        self._running = False
        self._observed: list[Expectation] = []
        if self.accepts:
            ask_sessions()
        _sessions.append(self)
        config.add_cleanup(lambda: _sessions.remove(self))

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Test files are imported next: what lies there now is what the lines of expectations refer
        to.
        """
        if self.accepts and isinstance(collector, pytest.Module):
            self._digests[str(collector.path)] = digest_of(collector.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._running = True
        try:
            return (yield)
        finally:
            self._running = False

    def record(self, file: str, line: int, expected: str, obtained: str) -> bool:
        """Keep an expectation of the running test; False if it must fail, as it is not to be
        accepted.
        """
        __tracebackhide__ = True
        if not self._running:
            return False
        if obtained != expected and expected and not self._accepts_any:
            return False
        if obtained != expected and spell('""""""', obtained) is None:
            pytest.fail(
                "the obtained text is not printable ASCII, as inline expectations are: use gt_golden.check"
            )
        if file not in self._digests:
            self._digests[file] = digest_of(Path(file))
        path, root = (Path(os.path.realpath(each)) for each in (file, self.config.rootpath))
        shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        self._observed.append(Expectation(shown, line, expected, obtained, self._digests[file]))
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Send the expectations along; say how to accept one that has failed."""
        report = yield
        if self._observed:
            report.gt_inline = [asdict(each) for each in self._observed]
            self._observed = []
        if report.failed and call.excinfo is not None and is_mismatch(call.excinfo.value):
            goldens: GoldenPlugin = self.config.pluginmanager.getplugin("gtrainer-goldens")
            report.gt_accept = goldens.accept_command(item)
            text = f"to accept what was obtained:\n  {report.gt_accept}"
            if hasattr(report.longrepr, "addsection"):
                report.longrepr.addsection("inline expectation", text)
            else:
                report.longrepr = f"{report.longrepr}\n\n{text}"
        return report

    def judge_ranks(
        self,
        item: pytest.Item,
        claims: Mapping[int, list[dict[str, Any]]],
        report: pytest.TestReport,
    ) -> str | None:
        """Why a test fails whose ranks have obtained different texts for one expectation."""
        seen = [
            (f"rank {rank}", Expectation(**each))
            for rank in sorted(claims)
            for each in claims[rank]
        ]
        return next(
            iter(disagreements(seen, "expect what all ranks have in common").values()), None
        )


def is_mismatch(error: BaseException) -> bool:
    """Return whether this is the failure of an inline expectation."""
    library = sys.modules.get("expecttest")
    if library is None or not isinstance(error, AssertionError):
        return False
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        code.co_name == "assert_expected_inline" and code.co_filename == library.__file__
        for code in codes
    )


def disagreements(seen: Iterable[tuple[str, Expectation]], way_out: str) -> dict[Place, str]:
    """The literals for which different texts were obtained, each with a message: where, and who has
    obtained which.
    """
    first: dict[Place, dict[str, str]] = {}  # of each text, who has obtained it
    for who, each in seen:
        first.setdefault(each.place, {}).setdefault(each.obtained, who)
    found = {}
    for (file, line, expected), texts in first.items():
        if len(texts) > 1:
            problem = f"one inline expectation, but different texts, so none is accepted: {way_out}"
            said = [
                f"  {who}: {text[:_SHOWN]!r}{'…' if len(text) > _SHOWN else ''}"
                for text, who in texts.items()
            ]
            found[file, line, expected] = "\n".join([f"{file}:{line}: {problem}", *said])
    return found


def digest_of(path: Path) -> str:
    """The digest of a file's content; "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


class AcceptancePlugin:
    """Gathers the expectations of all tests, and accepts them when the last test has ended."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self._tests: dict[tuple[str, int], list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = (
            report.nodeid,
            id(getattr(report, "node", None)),
        )  # xdist: the worker, as two may run one test
        if key not in self._tests or report.when == "setup":  # again: a plugin repeats the test
            self._tests[key] = []
        self._tests[key].append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            return (yield)
        # stopped at a failure, or interrupted: as goldens, those of the tests before are written
        finally:
            self._accept()

    def _accept(self) -> None:
        tests = [
            told
            for told in self._tests.values()
            if has_passed({(each.when, each.outcome) for each in told})
        ]
        sent = (
            (report, each)
            for told in tests
            for report in told
            for each in getattr(report, "gt_inline", ())
        )
        passed = [(report, Expectation(**each)) for report, each in sent]
        edits: dict[str, dict[Expectation, pytest.TestReport]] = {}
        problems = disagreements(
            ((report.nodeid, each) for report, each in passed), "give each its own"
        )
        first: dict[Place, tuple[pytest.TestReport, Expectation]] = {}
        for report, each in passed:
            first.setdefault(each.place, (report, each))
        for place, (report, each) in first.items():
            if place in problems:
                self._fail(report, problems[place])
            elif each.obtained != each.expected:
                edits.setdefault(each.file, {})[each] = report
        for file in sorted(edits):
            imported = {each.digest for _, each in passed if each.file == file}
            self._accept_in(file, edits[file], imported)

    def _accept_in(
        self, file: str, edits: dict[Expectation, pytest.TestReport], imported: set[str]
    ) -> None:
        """Edit one file, of which the processes of the run have ``imported`` these states."""
        refused: dict[Expectation, str] = {}

        def edited(source: bytes) -> bytes:
            if imported != {hashlib.sha256(source).hexdigest()}:
                raise EditError("was changed while the tests ran")
            new, problems = rewritten(source, edits)
            refused.update(problems)
            return new

        some_report = next(iter(edits.values()))
        try:
            if Path(file).is_absolute():
                raise EditError("lies outside of the root directory")
            store.rewrite(self.root / file, self.root, edited)
        except EditError as error:
            self._fail(
                some_report,
                f"{file} {error}: none of its inline expectations is accepted, run again",
            )
        except store.GoldenFileError as error:
            self._fail(some_report, str(error))
        else:
            for edit, problem in refused.items():
                self._fail(
                    edits[edit],
                    f"{file}:{edit.line}: the inline expectation is not accepted: {problem}",
                )
            late_facts: list[Fact] = self.config.pluginmanager.getplugin(
                "gtrainer-goldens"
            ).late_facts
            for edit in edits.keys() - refused.keys():
                outcome = "updated" if edit.expected else "created"
                late_facts.append(
                    {"kind": "inline", "outcome": outcome, "name": f"{file}:{edit.line}"}
                )

    def _fail(self, told: pytest.TestReport, problem: str) -> None:
        """One more report of a test, as it has ended already."""
        report = pytest.TestReport(told.nodeid, told.location, {}, "failed", problem, "teardown")
        self.config.hook.pytest_runtest_logreport(report=report)


class EditError(Exception):
    """An edit that cannot be made, or a file that cannot be edited; the message lacks which."""


def rewritten(source: bytes, edits: Iterable[Expectation]) -> tuple[bytes, dict[Expectation, str]]:
    """The source with obtained texts in place, and why others are not; EditError if more than
    literals would change.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise EditError(f"is not Python source ({error})") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    literals: dict[ast.Constant, Expectation] = {}
    refused = {}
    for edit in edits:
        try:
            literal = find_literal(calls, edit.line, edit.expected)
            if literal in literals:
                raise EditError(
                    "another expectation has the only literal there that reads as the old text"
                )
            literals[literal] = edit
        except EditError as error:
            refused[edit] = str(error)

    utf8 = text.encode()  # what the columns of a syntax tree count
    starts = [0, *(found.end() for found in _LINE_END.finditer(utf8))]
    line_end = _LINE_END.search(utf8)
    for literal, edit in sorted(
        literals.items(), key=lambda pair: (-pair[0].lineno, -pair[0].col_offset)
    ):
        start = starts[literal.lineno - 1] + literal.col_offset
        end = starts[(literal.end_lineno or 0) - 1] + (literal.end_col_offset or 0)
        if (
            spelled := spell(_LINE_END.sub(b"\n", utf8[start:end]).decode(), edit.obtained)
        ) is None:
            refused[edit] = (
                "the obtained text has characters that an inline expectation cannot hold"
            )
            continue
        literal.value = edit.obtained
        utf8 = (
            utf8[:start]
            + spelled.encode().replace(b"\n", line_end[0] if line_end else b"\n")
            + utf8[end:]
        )
    try:
        is_as_meant = _dumped(ast.parse(utf8.decode())) == _dumped(tree)
    except SyntaxError:
        is_as_meant = False
    if not is_as_meant:
        raise EditError("cannot be edited without changing more than its expectations")
    return utf8.decode().encode(encoding), refused


def _dumped(tree: ast.AST) -> str:
    """A tree as text, without the prefix of literals like u"…"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.kind = None
    return ast.dump(tree)


def find_literal(calls: Iterable[ast.Call], line: int, value: str) -> ast.Constant:
    """The last literal that reads as ``value`` among the arguments of the call at ``line``. The
    call is the outermost of those that begin last, on that line or before it, and have one;
    ``calls`` are in the order of ``ast.walk``, outer before inner.
    """
    found = []
    for call in calls:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        literals = [node for node in arguments if isinstance(node, ast.Constant)]
        # the type first: under -bb to compare bytes with a string is an error
        literals = [
            node for node in literals if isinstance(node.value, str) and node.value == value
        ]
        if literals and call.lineno <= line <= (call.end_lineno or 0):
            found.append((call, max(literals, key=lambda node: (node.lineno, node.col_offset))))
    if not found:
        raise EditError(
            "there is no string literal that reads as the old expectation in the call there"
        )
    last = max(call.lineno for call, _ in found)
    (outermost, literal), *others = (
        (call, literal) for call, literal in found if call.lineno == last
    )
    inside = set(ast.walk(outermost))
    if any(call not in inside for call, _ in others):
        raise EditError("two calls there have the same expectation: put them on lines of their own")
    return literal


def spell(literal: str, text: str) -> str | None:
    r"""A literal that reads as ``text``, in the style of another; None if expecttest writes none."""
    from expecttest import replace_string_literal

    for template in (literal, '""""""'):
        try:
            spelled, _ = replace_string_literal(template, 1, template.count("\n") + 1, text)
        except AssertionError:  # not printable ASCII
            return None
        if ast.literal_eval(f"({spelled})") == text:
            return str(spelled)
    return None
