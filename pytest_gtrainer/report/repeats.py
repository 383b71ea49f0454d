"""Repeat each test in one process and compare what the repetitions record, for ``--gt-repeat``.

Every repetition is a whole run of the test, with fixtures of function scope of its own, and begins
with the random states of the first. So all of them should record the same. If they do not, the test
is *observed*: it runs as often again, with a digest of what each operator gives, and the first
operator that differs is named. Nothing is observed before, because compiled code runs otherwise
while operators are observed.
"""

import copy
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.marker import id_of
from pytest_gtrainer.report.changes import Earlier
from pytest_gtrainer.report.collected import Test

IS_OBSERVED = pytest.StashKey[bool]()
"""Of the configuration: whether the running test is observed, in this process or on its ranks."""

Call = tuple[str, str, str]  # operator, line and digest
_COLLECTIVES = ("c10d.", "_c10d_functional")


class Repeats:
    """Repeats tests in the process that runs them, or sends them to ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._count: int = options.get(config, "repeat")
        self._running: list[Test] | None = None  # the repetitions so far of the test that runs
        self._is_last = False

    @property
    def is_between(self) -> bool:
        """True if no repetition runs: a hook around a test is then around all repetitions."""
        return self._running is None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not self.is_between:
            return None
        tests = self._run(item, nextitem)
        lines = describe_differences(tests)
        # With -x, the run ends at the repetition that failed, and its report says which it is.
        if not lines or len(tests) < self._count:
            return True
        self._config.stash[IS_OBSERVED] = True
        try:
            observed = self._run(item, nextitem)
        finally:
            self._config.stash[IS_OBSERVED] = False
        lines += [f"run {len(observed)} times again, each operator observed:"]
        lines += [f"  {find_operator(list(map(calls_by_rank, observed)))}"]
        again = shlex.join(["pytest", id_of(item), f"--gt-repeat={self._count}"])
        text = facts.escaped("\n".join(["repetitions differ", *lines, f"again: {again}"]))
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[Test]:
        """Run a test as often as asked; return each repetition."""
        tests: list[Test] = []
        self._running = tests
        try:
            for number in range(self._count):
                tests.append(Test(item.nodeid))
                self._is_last = number == self._count - 1
                # With itself as the next test, fixtures of the function would be kept.
                following = nextitem if self._is_last else copy.copy(item)
                with _same_random_states():
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                if item.session.shouldfail or item.session.shouldstop:
                    break
        finally:
            self._running = None
        return tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._running is None or report.nodeid != self._running[-1].name:
            return
        self._running[-1].add(report)
        number = len(self._running)
        report.gt_repetition = number  # type: ignore[attr-defined]
        is_observed = self._config.stash.get(IS_OBSERVED, False)
        if report.failed:
            how = ", observed" if is_observed else ""
            said = f"{number} of {self._count}{how}"
            report.sections.append(("gtrainer repetition", said))
        # They are compared here and can be many.
        sent = {**getattr(report, "gt_shown", {}), None: getattr(report, "gt_facts", [])}
        for each in sent.values():
            each[:] = [fact for fact in each if fact["kind"] != "calls"]
        if report.when == "teardown" and self._is_last and not is_observed:
            found = [*getattr(report, "gt_facts", []), self._summarize(self._running)]
            report.gt_facts = found  # type: ignore[attr-defined]

    def _summarize(self, tests: Sequence[Test]) -> facts.Fact:
        what = "the same"
        if describe_differences(tests):
            what = "different"
        elif not has_records(tests[0]):
            what = "without records, only outcomes compared"
        elif tests[0].verdicts_alone():
            names = facts.spell_some(tests[0].verdicts_alone())
            what = f"the same, of {names} only verdicts compared"
        return {"kind": "repeat", "what": f"{what} ({self._count} times)"}


class OperatorObserver:
    """Digests what each operator of an observed test gives, in the process that runs the test."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if not item.config.stash.get(IS_OBSERVED, False):
            return (yield)
        import torch

        from pytest_gtrainer.numerics.calls import DigestedCalls, kept_calls

        calls = DigestedCalls()
        try:
            # Threads of the backward would mix the order of calls.
            with torch.autograd.set_multithreading_enabled(False), kept_calls(into=calls):
                return (yield)
        finally:
            facts.emit("calls", calls=calls.digested)


@contextmanager
def _same_random_states() -> Iterator[None]:
    """Put random states back after the block, so that the next one begins as this one."""
    # The first repetition may be the first to import torch, whose states are read before it.
    from pytest_gtrainer._torch.random_states import random_states_kept

    with random_states_kept():
        yield


def has_records(test: Test) -> bool:
    """Return whether a test recorded numbers, graphs, layouts, goldens or verdicts."""
    kinds = ("comparison", "pass", "layout", "golden_text")
    is_judged = any(fact["kind"] == "verdict" for fact in test.facts)
    return is_judged or any(test.find(kind) for kind in kinds)


def describe_differences(tests: Sequence[Test]) -> list[str]:
    """Compare repetitions with the first one; return a line for each that differs."""
    from pytest_gtrainer.report.html import build_details

    first = tests[0]
    graphs = _packed_texts(first)
    known = facts.all_escaped(build_details(first))
    lines = []
    for number, test in enumerate(tests[1:], 2):
        earlier = Earlier(Path(), {facts.escaped(first.name): known}, graphs)
        found = earlier.compare(test, facts.all_escaped(build_details(test)), _packed_texts(test))
        if found["lines"]:
            lines.append(f"repetition {number} against 1: {'; '.join(found['lines'])}")
    return lines


def _packed_texts(test: Test) -> dict[str, str]:
    found = [*test.find("graph_text"), *test.find("golden_text")]
    return {fact["key"]: fact["packed"] for fact in found}


def calls_by_rank(test: Test) -> dict[int, list[Call]]:
    """Return the calls of an observed repetition, by rank; 0 if there are no ranks."""
    calls: dict[int, list[Call]] = {}
    for rank, sent in test.shown.items():
        for fact in facts.of_kind(sent, "calls"):
            calls.setdefault(rank, []).extend(map(tuple, fact["calls"]))
    return calls


def find_operator(repetitions: Sequence[Mapping[int, Sequence[Call]]]) -> str:
    """Name the first operator whose result differs between repetitions.

    >>> rand, add = ("aten.rand", "a.py:1", "5f"), ("aten.add", "a.py:2", "77")
    >>> find_operator([{0: [rand, add]}, {0: [rand, ("aten.add", "a.py:2", "78")]}])
    'first operator: aten.add at a.py:2, call 2 of 2'
    >>> find_operator([{0: [rand, add]}, {0: [add]}])
    'repetitions part at call 1: aten.rand at a.py:1, or aten.add at a.py:2'
    """
    first, *others = repetitions
    found: list[tuple[bool, int, int, str]] = []
    for other in others:
        for rank in first.keys() & other.keys():
            place = _first_difference(first[rank], other[rank])
            if place is not None:
                index, what, said = place
                # What a collective gives may have become another one on another rank, before it.
                found.append((what.startswith(_COLLECTIVES), index, rank, said))
    if found:
        _, _, rank, said = min(found)
        return said if first.keys() == {0} else f"{said}, on rank {rank}"
    if not any(any(calls.values()) for calls in repetitions):
        return "no operator was called: fixtures, other threads and processes are not observed"
    return (
        "no operator differs: the difference is rare (repeat more often), or comes from compiled "
        "code, a trace, a fixture, another thread or process"
    )


def _first_difference(old: Sequence[Call], new: Sequence[Call]) -> tuple[int, str, str] | None:
    """Return the index of the first call that differs, its operator, and the difference."""
    for index, (mine, other) in enumerate(zip(old, new, strict=False)):
        what, line, digest = mine
        if mine[:2] != other[:2]:
            places = f"{what} at {line}, or {other[0]} at {other[1]}"
            return index, what, f"repetitions part at call {index + 1}: {places}"
        if digest != other[2]:
            return index, what, f"first operator: {what} at {line}, call {index + 1} of {len(old)}"
    if len(old) != len(new):
        index = min(len(old), len(new))
        what, line, _ = max(old, new, key=len)[index]
        said = f"repetitions part at call {index + 1}: {what} at {line}, or the end"
        return index, what, said
    return None
