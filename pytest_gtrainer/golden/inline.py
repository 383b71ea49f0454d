"""Accept inline expectations (``assert_expected_inline`` of expecttest) with the flags of goldens.

An *expectation* is one call of that function: the text that the source expects, and the text that
the test has obtained. To *accept* it is to write the obtained text into the source.

Each process sends its tests' expectations, met ones too, along with the reports (attribute
``gt_inline``). The process that all reports come to accepts those of passed tests once, at the end.
A literal is found by the place of its call and by its value, so in another state of the file it is
not found.

This relies on expecttest 0.3 and later: its classes and functions call ``assert_expected_inline``
by its name in the module, and without ``EXPECTTEST_ACCEPT`` it raises AssertionError if the texts
differ.
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
import types
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_gtrainer import facts
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.plugin import (
    GoldenPlugin,
    has_passed,
    is_skipped_subtest,
    modes_of,
    refuse_in_ci,
)

ACCEPT_VARIABLE = "EXPECTTEST_ACCEPT"
_SHOWN = 60
_LINE_END = re.compile(rb"\r\n|\r|\n")
LiteralKey = tuple[str, int, str, int, int]
_sessions: "list[InlinePlugin]" = []  # the pytest sessions of this process, the innermost last


class Expectation(NamedTuple):
    """One call; it goes through JSON."""

    file: str  # below the root directory, else absolute
    line: int
    expected: str
    obtained: str
    digest: str  # of the file when it was imported
    # Line and column after the call; zeros if only its line is known.
    end_line: int = 0
    end_column: int = 0

    @property
    def literal(self) -> LiteralKey:
        """The key of its literal, the same however often the call runs."""
        return self.file, self.line, self.expected, self.end_line, self.end_column


def prepare(early_config: pytest.Config) -> None:
    """Replace expecttest's function before a conftest can import it by name."""
    is_asked = bool(os.environ.get(ACCEPT_VARIABLE))
    for name in ("gt_update_goldens", "gt_create_goldens"):
        # A wrong value is reported when pytest has read all options.
        with contextlib.suppress(ValueError, pytest.UsageError):
            is_asked |= bool(
                getattr(early_config.known_args_namespace, name) or early_config.getini(name)
            )
    if is_asked:
        ask_sessions()


def ask_sessions() -> None:
    """Let expecttest ask the innermost session about each expectation, if the session accepts any.

    The function stays replaced while this process lives, because tests import it by name.
    """
    try:
        import expecttest
    except ImportError:
        # Goldens work without expecttest.
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
        end = (0, 0)
        if pos is None:
            caller = sys._getframe(1 + skip)
            end = _end_of_call(caller)
            pos = expecttest.PositionInfo(caller.f_code.co_filename, caller.f_lineno)
        if expect_filters is not None:
            actual = expecttest.replace_many(expect_filters, actual)
        record = _sessions[-1].record
        try:
            with pytest.MonkeyPatch.context() as patch:
                # With the variable, expecttest would write the file itself.
                patch.delenv(ACCEPT_VARIABLE, raising=False)
                original(actual, expect, pos=pos, **others)
        except AssertionError:
            if not isinstance(actual, str) or not record(
                pos.filename, pos.lineno, expect, actual, end
            ):
                raise
        else:
            record(pos.filename, pos.lineno, expect, expect, end)

    expecttest.assert_expected_inline = assert_expected_inline


def _end_of_call(caller: types.FrameType) -> tuple[int, int]:
    """Return where the call that a frame is in ends in its source; zeros if nobody knows."""
    positions = list(caller.f_code.co_positions())
    _, line, _, column = positions[caller.f_lasti // 2]
    return (line or 0, column or 0)


def register(config: pytest.Config) -> None:
    """Add the plugin of a process that runs tests, and that of the one that accepts.

    Raises:
        pytest.UsageError: the run would accept expectations, and the variable CI is set.
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
        # With ``--gt-create-goldens`` only those whose expected text is still empty.
        self.accepts = self._accepts_any or modes.creates
        self._digests: dict[str, str] = {}
        self._running = False
        self._observed: list[Expectation] = []
        if self.accepts:
            ask_sessions()
        _sessions.append(self)
        config.add_cleanup(lambda: _sessions.remove(self))

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Note the content of a test file before it is imported: lines refer to this content."""
        if self.accepts and isinstance(collector, pytest.Module):
            self._digests[str(collector.path)] = digest_of(collector.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._running = True
        try:
            return (yield)
        finally:
            self._running = False

    def record(
        self, file: str, line: int, expected: str, obtained: str, end: tuple[int, int]
    ) -> bool:
        """Keep an expectation of the running test; return False if its call has to fail."""
        __tracebackhide__ = True
        if not self._running:
            return False
        if obtained != expected and expected and not self._accepts_any:
            return False
        if obtained != expected and spell('""""""', obtained) is None:
            pytest.fail(
                "the obtained text is not printable ASCII, as inline expectations are: "
                "use gt_golden.check"
            )

        if file not in self._digests:
            self._digests[file] = digest_of(Path(file))
        # A stack names a file by the path that it was imported from, which a link may be part of.
        root = Path(os.path.realpath(self.config.rootpath))
        shown = store.spell_path(Path(os.path.realpath(file)), root)
        digest = self._digests[file]
        self._observed.append(Expectation(shown, line, expected, obtained, digest, *end))
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Add the expectations to a report, and the command to accept one that has failed."""
        report = yield
        if self._observed:
            report.gt_inline = [each._asdict() for each in self._observed]
            self._observed = []
        if report.failed and call.excinfo is not None and is_mismatch(call.excinfo.value):
            goldens: GoldenPlugin = self.config.pluginmanager.getplugin("gtrainer-goldens")
            report.gt_accept = goldens.accept_command(item)
            text = f"{facts.TO_ACCEPT}\n  {report.gt_accept}"
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
        """Return the failure of ranks that obtained different texts for one expectation."""
        seen = []
        for rank in sorted(claims):
            seen += [(f"rank {rank}", Expectation(**each)) for each in claims[rank]]
        problems = disagreements(seen, "expect what all ranks have in common")
        return next(iter(problems.values()), None)


def is_mismatch(error: BaseException) -> bool:
    """Return whether this is the failure of an inline expectation."""
    library = sys.modules.get("expecttest")
    if library is None or not isinstance(error, AssertionError):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "assert_expected_inline" and code.co_filename == library.__file__:
            return True
    return False


def disagreements(seen: Iterable[tuple[str, Expectation]], way_out: str) -> dict[LiteralKey, str]:
    """Return a message for each literal for which different texts were obtained.

    ``seen`` has each expectation with the test or rank that had it.
    """
    # For each literal its texts, each with the first who obtained it.
    first: dict[LiteralKey, dict[str, str]] = {}
    for who, each in seen:
        first.setdefault(each.literal, {}).setdefault(each.obtained, who)
    found = {}
    for literal, texts in first.items():
        if len(texts) > 1:
            lines = [
                f"{literal[0]}:{literal[1]}: one inline expectation, but different texts, "
                f"so none is accepted: {way_out}"
            ]
            for text, who in texts.items():
                lines.append(f"  {who}: {text[:_SHOWN]!r}")
                if len(text) > _SHOWN:
                    lines[-1] += "…"
            found[literal] = "\n".join(lines)

    return found


def digest_of(path: Path) -> str:
    """Return the digest of a file's content; "" if it cannot be read."""
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
        # Two workers of xdist may run one test.
        key = report.nodeid, id(getattr(report, "node", None))
        # A plugin that repeats a test begins with its setup again.
        if key not in self._tests or report.when == "setup":
            self._tests[key] = []
        self._tests[key].append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            # A run that was stopped also accepts those of the tests before, as it writes goldens.
            self._accept()

    def _accept(self) -> None:
        """Write the obtained texts of passed tests into their sources; fail those that disagree."""
        seen: list[tuple[str, Expectation]] = []
        first: dict[LiteralKey, tuple[pytest.TestReport, Expectation]] = {}
        # Of each file the digests that processes of the run imported.
        imported: dict[str, set[str]] = defaultdict(set)
        for reports in self._tests.values():
            # A test that failed may have obtained anything.
            own = [report for report in reports if not is_skipped_subtest(report)]
            if not has_passed({(report.when, report.outcome) for report in own}):
                continue
            for report in reports:
                for sent in getattr(report, "gt_inline", ()):
                    each = Expectation(**sent)
                    seen.append((report.nodeid, each))
                    first.setdefault(each.literal, (report, each))
                    imported[each.file].add(each.digest)

        problems = disagreements(seen, "give each its own")
        edits: dict[str, dict[Expectation, pytest.TestReport]] = {}
        for literal, (report, each) in first.items():
            if literal in problems:
                self._fail(report, problems[literal])
            elif each.obtained != each.expected:
                edits.setdefault(each.file, {})[each] = report

        for file in sorted(edits):
            self._accept_in(file, edits[file], imported[file])

    def _accept_in(
        self, file: str, edits: dict[Expectation, pytest.TestReport], imported: set[str]
    ) -> None:
        """Edit one file; ``imported`` has the digests of it that processes of the run imported."""
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
            goldens: GoldenPlugin = self.config.pluginmanager.getplugin("gtrainer-goldens")
            for edit, report in edits.items():
                place = f"{file}:{edit.line}"
                if edit in refused:
                    problem = refused[edit]
                    self._fail(
                        report, f"{place}: the inline expectation is not accepted: {problem}"
                    )
                else:
                    outcome = "updated" if edit.expected else "created"
                    fact = {"kind": "inline", "outcome": outcome, "name": place}
                    goldens.late_facts.append(fact)

    def _fail(self, last: pytest.TestReport, problem: str) -> None:
        """Log one more report of a test, as it has ended already."""
        report = pytest.TestReport(last.nodeid, last.location, {}, "failed", problem, "teardown")
        self.config.hook.pytest_runtest_logreport(report=report)


class EditError(Exception):
    """An edit cannot be made, or a file not be edited; the message does not name the file."""


def rewritten(source: bytes, edits: Iterable[Expectation]) -> tuple[bytes, dict[Expectation, str]]:
    """Return the source with obtained texts in place, and the reasons why others are not.

    Raises:
        EditError: this is no source of Python, or more than literals would change.
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
            literal = find_literal(calls, edit)
            if literal in literals:
                raise EditError(
                    "another expectation has the only literal there that reads as the old text"
                )
            literals[literal] = edit
        except EditError as error:
            refused[edit] = str(error)

    # Columns of a syntax tree count bytes of UTF-8.
    utf8 = text.encode()
    starts, line_end = [0], b"\n"
    for found in _LINE_END.finditer(utf8):
        if len(starts) == 1:
            line_end = found[0]
        starts.append(found.end())

    # The last literal first: an edit moves all that stands after it.
    for literal in sorted(literals, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        edit = literals[literal]
        start = starts[literal.lineno - 1] + literal.col_offset
        end = starts[(literal.end_lineno or 0) - 1] + (literal.end_col_offset or 0)
        spelled = spell(_LINE_END.sub(b"\n", utf8[start:end]).decode(), edit.obtained)
        if spelled is None:
            refused[edit] = (
                "the obtained text has characters that an inline expectation cannot hold"
            )
            continue
        literal.value = edit.obtained
        utf8 = utf8[:start] + spelled.encode().replace(b"\n", line_end) + utf8[end:]

    try:
        is_as_meant = _dumped(ast.parse(utf8.decode())) == _dumped(tree)
    except SyntaxError:
        is_as_meant = False

    if not is_as_meant:
        raise EditError("cannot be edited without changing more than its expectations")
    return utf8.decode().encode(encoding), refused


def _dumped(tree: ast.AST) -> str:
    """Return a tree as text, without the prefix of literals like u"…"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.kind = None
    return ast.dump(tree)


def find_literal(calls: Iterable[ast.Call], edit: Expectation) -> ast.Constant:
    """Return the literal of the old text among the arguments of the call of an expectation.

    If only the line of the call is known, it is the last one of the outermost call there that has
    one and begins last. ``calls`` are in the order of ``ast.walk``, outer before inner.

    Raises:
        EditError: there is no such literal, or there are two.
    """
    spanning = [call for call in calls if call.lineno <= edit.line <= (call.end_lineno or 0)]
    end = edit.end_line, edit.end_column
    known = [call for call in spanning if (call.end_lineno, call.end_col_offset) == end]
    found = []
    for call in known or spanning:
        literals = []
        for node in [*call.args, *(keyword.value for keyword in call.keywords)]:
            if not isinstance(node, ast.Constant):
                continue
            # Under ``python -bb`` comparing bytes with a string raises, so the type comes first.
            if isinstance(node.value, str) and node.value == edit.expected:
                literals.append(node)
        if known and len(literals) > 1:
            raise EditError(
                "several arguments there read as the old expectation: give it another text first"
            )
        if literals:
            found.append((call, max(literals, key=lambda node: (node.lineno, node.col_offset))))

    if not found:
        raise EditError(
            "there is no string literal that reads as the old expectation in the call there"
        )

    last = max(call.lineno for call, _ in found)
    (outermost, literal), *others = [pair for pair in found if pair[0].lineno == last]
    inside = set(ast.walk(outermost))
    if any(call not in inside for call, _ in others):
        raise EditError("two calls there have the same expectation: put them on lines of their own")
    return literal


def spell(literal: str, text: str) -> str | None:
    r"""Return a literal of ``text`` in the style of another; None if expecttest writes none."""
    from expecttest import replace_string_literal

    for template in (literal, '""""""'):
        try:
            spelled, _ = replace_string_literal(template, 1, template.count("\n") + 1, text)
        except AssertionError:  # not printable ASCII
            return None
        if ast.literal_eval(f"({spelled})") == text:
            return str(spelled)
    return None
